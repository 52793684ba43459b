"""What quantized weights save and cost: bytes, memory, time of a token, and how far the predictions move.

    python examples/train_lm.py --out-dir runs/plays                   the model, once
    python benchmarks/compression.py --checkpoint runs/plays           some minutes; a run that was stopped goes on
    python benchmarks/compression.py --checkpoint runs/plays --timing  the time of a token alone, on an idle machine

Every layout predicts the same windows of the validation part, the last tenth of the plays, as the float32 model does.
So differences are paired: their standard error is that of a mean over windows. ``--quick`` is for the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import measuring, tables

import minigrad as mg
import nn
from nn.parameter import hollow

PLAYS = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
KINDS = ("float32", "float16", "q8_0", "q4_0", "q4_1")
SMALL: dict[str, Any] = {"vocab_size": 256, "context_length": 16, "d_model": 32, "num_layers": 1, "num_heads": 2}
LARGE: dict[str, Any] = {"vocab_size": 8192, "context_length": 256, "d_model": 512, "num_layers": 8, "num_heads": 8}
BATCH = 16  # windows at once


def model_of(checkpoint: Path | None) -> nn.TransformerLM:
    """The model of the newest step of a run; a small one of random weights where there is none."""
    if checkpoint is None:
        return nn.TransformerLM(**SMALL, generator=0).eval()
    folder = max(checkpoint.glob("step_*"))
    model = nn.TransformerLM(**json.loads((folder / "meta.json").read_text())["model"])
    model.load_state_dict(mg.load(folder / "model.safetensors"))
    return model.eval()


def quantized(model: nn.TransformerLM, kind: str) -> nn.TransformerLM:
    """The model in one of the KINDS, itself."""
    return model if kind == "float32" else nn.quantize(model, kind)


def log_probabilities(model: nn.TransformerLM, windows: Any) -> Any:
    """Of every token after each token of the windows (windows, length)."""
    with mg.no_grad():
        return nn.functional.log_softmax(model(windows).astype("float64")).numpy()


def distances(model: nn.TransformerLM, other: nn.TransformerLM, count: int | None) -> dict[str, Any]:
    """How the other model's predictions differ from the model's on windows of the validation part."""
    text = np.frombuffer(PLAYS.read_bytes(), np.uint8).astype(np.int64)
    text, length = text[int(0.9 * len(text)) :], model.context_length
    starts = np.arange(0, len(text) - length, length)[:count]
    windows = text[starts[:, None] + np.arange(length + 1)]
    losses, apart, same = [], [], []
    for start in range(0, len(windows), BATCH):
        part = windows[start : start + BATCH]
        p, q = (log_probabilities(m, part[:, :-1]) for m in (model, other))
        pair = [-np.take_along_axis(x, part[:, 1:, None], 2).mean((1, 2)) for x in (p, q)]
        losses += list(np.stack(pair, 1))
        apart += list((np.exp(p) * (p - q)).sum(2).mean(1))
        same += list((p.argmax(2) == q.argmax(2)).mean(1))
    found = np.array(losses)
    more = found[:, 1] - found[:, 0]
    perplexities = np.exp(found.mean(0))
    return {
        "windows": len(windows),
        "perplexity": float(perplexities[1]),
        "more": float(perplexities[1] - perplexities[0]),
        "more_error": float(perplexities[0]) * error(more),
        "kl": float(np.mean(apart)),
        "kl_error": error(apart),
        "same": float(np.mean(same)),
    }


def error(values: Any) -> float:
    """The standard error of a mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def bytes_of(model: nn.TransformerLM, file: Path) -> dict[str, int]:
    """The bytes of a checkpoint of the model, and those of its arrays in memory."""
    mg.save(file, model.state_dict())
    return {"file": file.stat().st_size, "weights": sum(t.data.nbytes for t in [*model.parameters(), *model.buffers()])}


def resident(kind: str, quick: bool) -> float:
    """Megabytes that a model takes in a process of its own, with what a token needs.

    A small model goes first, for what Python and compiled loops take once.
    """
    held = []
    for sizes in (SMALL, SMALL if quick else LARGE):
        measuring.trim()
        before = measuring.resident_mb()
        with hollow():
            model = nn.TransformerLM(**sizes)
        quantized(model, kind)
        for parameter in model.parameters():
            parameter._data = np.ones(parameter.shape, np.float32)
        model.eval().next_logits([[1]], nn.KVCache(model, 16))
        held.append(model)
    measuring.trim()
    return measuring.resident_mb() - before


def resident_apart(kind: str, quick: bool) -> float:
    """The same, measured in another process."""
    command = [sys.executable, __file__, "--resident", kind, *["--quick"] * quick]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def token_ms(model: nn.TransformerLM, seconds: float) -> float:
    """Milliseconds a token of greedy decoding with a cache takes, on one thread."""
    count = model.context_length // 2
    return 1000 * measuring.median_seconds(lambda: nn.generate(model, [10], count, 0.0), seconds) / count


def table(found: dict[str, Any], times: dict[str, float]) -> str:
    """The results as a table."""
    rows = [
        [
            kind,
            f"{found[kind]['file'] / 1e6:.2f}",
            f"{found[kind]['resident']:.0f}",
            f"{times[kind]:.2f}" if kind in times else "",
            f"{found[kind]['perplexity']:.3f}",
            f"{found[kind]['more']:+.4f} ± {found[kind]['more_error']:.4f}",
            f"{found[kind]['kl']:.5f} ± {found[kind]['kl_error']:.5f}",
            f"{100 * found[kind]['same']:.1f} %",
        ]
        for kind in KINDS
        if kind in found
    ]
    heads = [
        "weights",
        "file, MB",
        "resident, MB",
        "ms a token",
        "perplexity",
        "more than float32",
        "KL, nats",
        "top 1",
    ]
    return tables.table(heads, rows)


def main() -> None:
    """Print the table."""
    parser = tables.parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="run folder of train_lm.py")
    parser.add_argument("--folder", type=Path, default=Path("runs/compression"), help="of the results")
    parser.add_argument("--quick", action="store_true", help="a small model and few windows, to see that all runs")
    parser.add_argument("--timing", action="store_true", help="the time of a token alone")
    parser.add_argument("--resident", choices=KINDS, help="print the memory of one kind, measured here")
    options = parser.parse_args()
    mg.set_num_threads(1)
    if options.resident:
        print(resident(options.resident, options.quick))
        return
    if options.checkpoint is None and not options.quick:
        parser.error("expected --checkpoint RUN, got none")
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / ("quick.json" if options.quick else "results.json")
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"found": {}, "times": {}}
    run = None if options.quick else options.checkpoint
    for kind in KINDS:
        if options.timing:
            state["times"][kind] = token_ms(quantized(model_of(run), kind), 0.01 if options.quick else 5)
        elif kind not in state["found"]:
            print(f"{kind} …", file=sys.stderr)
            other = quantized(model_of(run), kind)
            state["found"][kind] = {
                **distances(model_of(run), other, 8 if options.quick else None),
                **bytes_of(other, options.folder / f"{kind}.safetensors"),
                "resident": resident_apart(kind, options.quick),
            }
        tables.write_json(file, state)
    print(f"{measuring.machine()}, 1 thread\n\n{table(state['found'], state['times'])}")
    tables.write_json(options.json, state)


if __name__ == "__main__":
    main()
