"""Train the same language model with several engines, in one run, and compare time and memory.

    python benchmarks/compare.py                        minigrad and torch in their variants, every config
    python benchmarks/compare.py --write                puts the tables into benchmarks/results.md: about 15 minutes
    python benchmarks/compare.py --configs small --engines minigrad torch jax --rounds 9

Each engine has its own process; all are alive, one at a time is told to work, in turns. A step is forward pass,
cross-entropy, backward pass, clipping to norm 1 and AdamW, after which the gradients are let go, from the same weights
on the same tokens. If the losses of the first steps differ by more than 1e-3 from torch's, the run is void. Ratios are
taken within each round, and their median is shown; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import ENGINES
from harness import measuring, tables
from harness.configs import CONFIGS, Config, initial_weights
from harness.processes import Worker, WorkerError
from safetensors.numpy import save_file

RESULTS = Path(__file__).with_name("results.md")
BY_HAND = "<!-- written by hand from here on -->"

DEFAULT = ["minigrad", "minigrad+recompute", "minigrad+numba", "torch", "torch+malloc", "torch.compile"]
FIRST_STEPS = 5  # their losses are compared, and they compile what there is to compile
TOLERANCE = 1e-3  # relative
SLOWEST_STEP = 60.0  # seconds; an engine that needs more is left out of the config
COMPILATION = 900.0  # seconds that a first step may take
PAUSE = 0.2  # seconds between turns, in which the threads of the last engine fall asleep


@dataclass
class Record:
    """What was measured of one engine on one config."""

    losses: list[float] = field(default_factory=list)
    first_step_s: float = 0.0
    rounds_ms: list[list[float]] = field(default_factory=list)  # the steps of each round
    memory_mb: float = 0.0
    compiler_mb: float = 0.0
    product_gflops: list[float] = field(default_factory=list)

    @property
    def steps_ms(self) -> list[float]:
        """The times of all steps."""
        return [ms for steps in self.rounds_ms for ms in steps]


class Comparison:
    """One config: its workers, and what was measured of them."""

    def __init__(self, name: str, config: Config, engines: Sequence[str], threads: int | None, directory: Path) -> None:
        self.name, self.config, self.threads, self.directory = name, config, threads, directory
        self.workers: dict[str, Worker] = {}
        self.records: dict[str, Record] = {}
        self.left_out: dict[str, str] = {}
        self.operations: dict[str, float] | None = None
        weights = directory / f"{name}.safetensors"
        save_file(initial_weights(config), weights)
        for engine in engines:
            self._attempt(engine, lambda engine=engine: self._start(engine, weights))

    def _attempt(self, engine: str, action: Any) -> None:
        """Do something with a worker; if it fails, the engine is left out, and why is told."""
        try:
            action()
        except WorkerError as error:
            self.left_out[engine] = str(error)
            self.records.pop(engine, None)
            if engine in self.workers:
                self.workers.pop(engine).close()

    def _start(self, engine: str, weights: Path) -> None:
        log = self.directory / f"{self.name}-{engine}.log"
        worker = self.workers[engine] = Worker(engine, self.config, weights, self.threads, log)
        worker.start(timeout=120)
        record = self.records[engine] = Record()
        for i in range(FIRST_STEPS):
            step = worker.ask("first_step", timeout=COMPILATION)
            record.losses.append(step["loss"])
            record.first_step_s = record.first_step_s or step["seconds"]
            if i >= 2 and step["seconds"] > SLOWEST_STEP:
                raise WorkerError(f"a step takes {step['seconds']:.0f} s")

    @property
    def reference(self) -> str:
        """The engine that the others are compared with: torch if it runs, else the first."""
        return "torch" if "torch" in self.records else next(iter(self.records))

    def disagreements(self) -> list[str]:
        """For each engine whose losses differ from the reference's: where, and by how much."""
        found = []
        for engine, record in self.records.items():
            for i, (loss, right) in enumerate(zip(record.losses, self.records[self.reference].losses, strict=True)):
                if not abs(loss - right) <= TOLERANCE * abs(right):
                    found.append(f"{engine}: loss {loss:.5f} at step {i + 1}, {self.reference} {right:.5f}")
                    break
        return found

    def play(self, rounds: int, seconds: float, least: int = 1, profile: bool = True) -> None:
        """Let the engines take turns of about so many seconds, and of at least so many steps."""
        for i in range(rounds):
            order = list(self.workers)
            for engine in order[i % len(order) :] + order[: i % len(order)]:
                time.sleep(PAUSE)
                self._attempt(engine, lambda engine=engine: self._turn(engine, seconds, least))
        if profile and "minigrad" in self.workers:
            self._attempt("minigrad", self._profile)

    def _profile(self) -> None:
        self.operations = self.workers["minigrad"].ask("profile", steps=5)

    def _turn(self, engine: str, seconds: float, least: int) -> None:
        worker, record = self.workers[engine], self.records[engine]
        turn = worker.ask("turn", seconds=seconds, least=least)
        record.rounds_ms.append([1e3 * step for step in turn["seconds"]])
        record.compiler_mb = turn["compiler_mb"]
        record.memory_mb = record.memory_mb or turn["memory_mb"]  # of the first turn: matrices for sgemm come later
        record.product_gflops.append(worker.ask("product_gflops"))

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers.values():
            worker.close()

    def results(self) -> dict[str, Any]:
        """All that was measured, with what is derived from it, for JSON and the tables."""
        return {
            "config": asdict(self.config),
            "reference": self.reference,
            "gflop": self.config.flops / 1e9,
            "engines": {engine: self._derived(engine) for engine in self.records},
            "left_out": self.left_out,
            "operations": self.operations,
        }

    def _derived(self, engine: str) -> dict[str, Any]:
        record, reference = self.records[engine], self.records[self.reference]
        ms = quartiles(record.steps_ms)
        gflops = self.config.flops / ms[1] / 1e6
        medians = ([statistics.median(steps) for steps in r.rounds_ms] for r in (reference, record))
        product = statistics.median(record.product_gflops)
        return {
            "ms": ms[1],
            "ms_quartiles": ms,
            "speed_quartiles": quartiles([theirs / own for theirs, own in zip(*medians, strict=True)]),
            "tokens_per_s": self.config.tokens / ms[1] * 1e3,
            "gflops": gflops,
            "product_gflops": product,
            "share_of_product": gflops / product,
            "memory_mb": record.memory_mb,
            "compiler_mb": record.compiler_mb,
            "memory_ratio": record.memory_mb / reference.memory_mb,
            "first_step_s": record.first_step_s,
            "steps": len(record.steps_ms),
            "rounds_ms": record.rounds_ms,
            "losses": record.losses,
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


# ---- showing it ------------------------------------------------------------------------------------------------------


def report(name: str, result: dict[str, Any]) -> str:
    """The table of a config in Markdown, what was left out, and what limits minigrad."""
    sizes = "vocabulary {vocab_size}, width {d_model}, {num_layers} layers, {num_heads} heads, d_ff {d_ff}, "
    sizes += "sequence {context_length}, batch {batch_size}"
    reference = result["reference"]
    headers = ["engine", "ms/step", "quartiles", f"{reference} = 1", "quartiles", "tokens/s", "GFLOP/s", "sgemm"]
    headers += ["of sgemm", "peak MB", "memory", "compiler MB", "first step s", "steps"]
    rows = [
        [
            engine,
            f"{r['ms']:.1f}",
            "{0:.1f} to {2:.1f}".format(*r["ms_quartiles"]),
            f"{r['speed_quartiles'][1]:.2f}x",
            "{0:.2f} to {2:.2f}".format(*r["speed_quartiles"]),
            f"{r['tokens_per_s']:.0f}",
            r["gflops"],
            f"{r['product_gflops']:.0f}",
            f"{r['share_of_product']:.0%}",
            f"{r['memory_mb']:.0f}",
            f"{r['memory_ratio']:.2f}",
            f"{r['compiler_mb']:.0f}",
            f"{r['first_step_s']:.1f}",
            str(r["steps"]),
        ]
        for engine, r in result["engines"].items()
    ]
    parts = [f"## {name}", sizes.format(**result["config"]) + f": {result['gflop']:.1f} GFLOP a step"]
    parts.append(tables.table(headers, rows))
    parts += [f"Left out: {engine}, {why}." for engine, why in result["left_out"].items()]
    parts += [limits(result)] if result["operations"] else []
    return "\n\n".join(parts)


def limits(result: dict[str, Any]) -> str:
    """Which part of minigrad's step is matrix products at the rate of sgemm, and the operations that take most."""
    share = result["engines"]["minigrad"]["share_of_product"]
    largest = [f"{name} {part:.0%}" for name, part in result["operations"].items() if part >= 0.02]
    return (
        f"The matrix products alone, at the rate of sgemm, would take {share:.0%} of minigrad's step. "
        f"Its operations, as `mg.profile()` sees them: {', '.join(largest)}."
    )


def page(run: dict[str, Any]) -> str:
    """The whole run in Markdown."""
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    others = "" if run["others"] is None else f" Other processes took {run['others']:.0%} of the cores' time."
    threads = run["threads"] or "as each engine chooses"
    missing = f" Not installed: {', '.join(run['not_installed'])}." if run["not_installed"] else ""
    intro = (
        f"Machine: {run['machine']}. {versions}.\n\n"
        f"{run['rounds']} rounds; a turn is at least {run['steps']} steps and about {run['seconds']:g} s; "
        f"threads: {threads}.{others}"
        f"{missing}\n\n"
        "ms/step is the median over all steps, with their quartiles; the next columns tell how many times as fast as "
        "the reference: the median over the rounds, and the quartiles, of the ratio of the medians within a round; "
        "GFLOP/s the model's matrix products over the time of a step, sgemm the rate of the engine's own 1024 x 1024 "
        "products in the same process; peak MB the peak resident memory above that after the import, and memory its "
        "ratio to the reference's, both without compiler MB, which numba and the loops that it compiled take before "
        "the first step; the first step's time includes theirs; steps those that were timed."
    )
    return "\n\n".join([intro, *(report(name, result) for name, result in run["configs"].items())])


def write(run: dict[str, Any]) -> None:
    """Put the tables into results.md, and keep what was written by hand below them."""
    before = RESULTS.read_text() if RESULTS.exists() else ""
    by_hand = before.partition(BY_HAND)[2].strip()
    RESULTS.write_text(
        f"# Results\n\n`{run['command']}`\n\n{page(run)}\n\n{BY_HAND}\n" + (f"\n{by_hand}\n" if by_hand else "")
    )


# ---- the program -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = tables.parser(__doc__)
    parser.add_argument(
        "--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="NAME", help=f"of {', '.join(CONFIGS)}"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=DEFAULT, metavar="NAME", help=f"of {', '.join(ENGINES)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn; longer if a step is (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn, at least (default: 10)")
    parser.add_argument("--threads", type=int, help="cores for each engine (default: all, as each engine chooses)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {RESULTS.name}")
    return parser.parse_args(arguments)


def run_config(name: str, engines: Sequence[str], options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Compare the engines on one config; ends the program if they don't compute the same."""
    engines = [engine for engine in engines if name in (ENGINES[engine].configs or CONFIGS)]
    print(f"{name}: starting {', '.join(engines)}", file=sys.stderr, flush=True)
    comparison = Comparison(name, CONFIGS[name], engines, options.threads, directory)
    try:
        if not comparison.records:
            sys.exit(f"{name}: no engine could run\n{comparison.left_out}")
        if wrong := comparison.disagreements():
            sys.exit(f"{name}: the run is void, since the engines don't compute the same\n" + "\n".join(wrong))
        comparison.play(options.rounds, options.seconds, options.steps)
        return comparison.results()
    finally:
        comparison.close()


def main() -> None:
    """Run what the command line asks for."""
    options = parse()
    installed = [engine for engine in options.engines if ENGINES[engine].installed()]
    missing = [engine for engine in options.engines if engine not in installed]
    if missing:
        print(f"not installed: {', '.join(missing)} (pip install -e '.[bench]')")
    run: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
        "machine": measuring.machine(),
        "versions": measuring.versions(["numpy", *dict.fromkeys(ENGINES[engine].package for engine in installed)]),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "steps": options.steps,
        "threads": options.threads,
        "not_installed": missing,
        "configs": {},
    }
    others = measuring.OtherWork()
    with tempfile.TemporaryDirectory() as directory:
        for name in options.configs:
            run["configs"][name] = run_config(name, installed, options, Path(directory))
            print(report(name, run["configs"][name]), flush=True)
    run["others"] = others.share()
    tables.write_json(options.json, run)
    if options.write:
        write(run)


if __name__ == "__main__":
    main()
