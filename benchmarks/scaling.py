"""How time and memory of a training step grow, and where they must not.

    python benchmarks/scaling.py                          everything
    python benchmarks/scaling.py --what length steps      some of it

- length: the sequence, at 2048 tokens a batch; what grows is attention, whose quadratic part is fitted
- layers, vocabulary: the model's; both should grow in proportion
- depth: time and memory an operation, for chains of 1 000 to 1 000 000
- steps: memory that is held over 300 training steps; should be flat
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from compare import Comparison
from engines import ENGINES
from harness import tables
from harness.configs import CONFIGS, Config, initial_weights
from harness.processes import Worker
from op_overhead import growth, growth_table
from safetensors.numpy import save_file

LONG, NANO = CONFIGS["long"], CONFIGS["nano"]
GROWING: dict[str, dict[int, Config]] = {
    "length": {t: replace(LONG, context_length=t, batch_size=2048 // t) for t in (128, 256, 512, 1024, 2048)},
    "layers": {n: replace(LONG, context_length=256, batch_size=4, num_layers=n) for n in (1, 2, 4, 8)},
    "vocabulary": {v: replace(LONG, context_length=256, batch_size=4, vocab_size=v) for v in (256, 1024, 4096, 16384)},
}
STEPS = 300


def grow(configs: dict[int, Config], engines: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Time and peak memory of a step for each value, each in new processes; the engines alternate."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for value, config in configs.items():
            comparison = Comparison(str(value), config, engines, None, Path(directory))
            try:
                comparison.play(rounds, seconds, profile=False)
                found[str(value)] = comparison.results()["engines"]
            finally:
                comparison.close()
    return found


def grow_table(what: str, found: dict[str, Any], engines: Sequence[str]) -> str:
    """A row for each value: ms and MB of each engine, and what the last steps of the value added."""
    headers = [what, *(f"{engine} {unit}" for engine in engines for unit in ("ms", "MB"))]
    rows = [
        [value, *(records[engine][key] for engine in engines for key in ("ms", "memory_mb"))]
        for value, records in found.items()
    ]
    text = tables.table(headers, rows)
    if what == "length":
        parts = {engine: quadratic_part(found, engine) for engine in engines}
        text += "\n\nThe part of a step at the greatest length that grows with it: "
        text += ", ".join(f"{engine} {ms:.0f} ms" for engine, ms in parts.items()) + "."
    return text


def quadratic_part(found: dict[str, Any], engine: str) -> float:
    """Fit ms = a + b · length at a constant number of tokens, and give b times the greatest length."""
    lengths = np.array([int(value) for value in found], float)
    slope = np.polyfit(lengths, [records[engine]["ms"] for records in found.values()], 1)[0]
    return float(slope * lengths.max())


def memory_over_steps() -> list[float]:
    """MB held above the import after each of 300 steps of nano."""
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.safetensors"
        save_file(initial_weights(NANO), weights)
        with Worker("minigrad", NANO, weights, None, Path(directory) / "log") as worker:
            worker.start(timeout=60)
            held: list[float] = worker.ask("trace_memory", steps=STEPS)
            return held


def main() -> None:
    """Print the tables that are asked for."""
    parser = tables.parser(__doc__)
    what = [*GROWING, "depth", "steps"]
    parser.add_argument("--what", nargs="+", choices=what, default=what, metavar="NAME", help=f"of {', '.join(what)}")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["minigrad", "torch"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (default: 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn (default: 2)")
    options = parser.parse_args()
    engines = [engine for engine in options.engines if ENGINES[engine].installed()]
    results: dict[str, Any] = {}
    for name in options.what:
        if name in GROWING:
            results[name] = grow(GROWING[name], engines, options.rounds, options.seconds)
            text = grow_table(name, results[name], engines)
        elif name == "depth":
            results[name] = growth()
            text = growth_table(results[name])
        else:
            results[name] = memory_over_steps()
            marks = (1, 10, 50, 100, 200, STEPS)
            text = tables.table(["step", *map(str, marks)], [["MB held", *(results[name][i - 1] for i in marks)]])
        print(text, end="\n\n", flush=True)
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
