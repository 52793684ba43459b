"""How kinds of attention grow with the length of the sequence: a step, forward and backward, and a decoded token.

    python benchmarks/attention.py                                    all kinds, T = 256 … 16384: fifteen minutes
    python benchmarks/attention.py --kinds full window --lengths 256 1024 --write    some of it, kept
    python benchmarks/attention.py --lengths --plot docs/attention-cost.svg          no measuring: a picture

A step is that of causal attention with 8 heads of 32 in float32, beside torch's scaled_dot_product_attention on as many
threads; a token is decoded by a model of one such layer, after T others:

- full: every token before
- window: the last 256
- blocks: of 64 tokens each, its own and the one before, the first, and two drawn ones (as in Big Bird)
- linear: linear attention with the features elu + 1; taylor: with Taylor's 273 of 16; retention: with a decay
- torch: full, by is_causal; torch masked: the blocks, as a boolean mask (T, T)

MB are the peak of memory above the arguments, and what the cache has allocated. Each kind and length has a process of
its own, which knows its peak. Below the tables: the exponent p of a figure that grows with T^p, fitted to T of 2048 and
more, and the length from which a kind takes less than full attention does.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import measuring, pictures, records, tables

import minigrad as mg
import nn
import nn.functional as F

HEADS, SIZE = 8, 32
WINDOW, BLOCK = 256, 64
FEATURES = 16  # of which Taylor's map makes 1 + 16 + 16²
DECAYS = tuple(1 - 2.0 ** (-5 - head) for head in range(HEADS))  # those of Sun et al. (2023)
KINDS = ("full", "window", "blocks", "linear", "taylor", "retention", "torch", "torch masked")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
DECODED = 30  # tokens after those
RESULTS = Path(__file__).parent / "results" / "attention.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "attention.md"
Found = dict[str, float]
Results = dict[tuple[str, int], Found]


def arrays(length: int, key_size: int = SIZE) -> list[np.ndarray]:
    """q, k, v and the upstream gradient."""
    sizes = (key_size, key_size, SIZE, SIZE)
    return [np.random.default_rng(n).standard_normal((1, HEADS, length, d), np.float32) for n, d in enumerate(sizes)]


def blocks(length: int) -> nn.BlockPattern:
    """The pattern of ``length`` tokens."""
    return nn.BlockPattern.local(length, BLOCK, reach=1, first=1, drawn=2)


def model_options(kind: str, length: int) -> dict[str, Any]:
    """What a model takes for a kind, for up to ``length`` tokens."""
    of_kinds: dict[str, dict[str, Any]] = {
        "full": {},
        "window": {"window": WINDOW},
        "blocks": {"pattern": blocks(length)},
        "linear": {"linear": {}},
        "taylor": {"linear": {"feature_map": "taylor", "feature_dim": FEATURES}},
        "retention": {"linear": {"feature_map": "identity", "decay": DECAYS}},
    }
    return of_kinds[kind]


# ---- a step ----------------------------------------------------------------------------------------------------------


def step_of(kind: str, length: int) -> Callable[[], list[np.ndarray]]:
    """A step of a kind: the result, and the gradients of q, k and v."""
    if kind.startswith("torch"):
        return torch_step(kind, length)
    options = model_options(kind, length)
    function: Callable[..., Any] = F.scaled_dot_product_attention
    if (linear := options.get("linear")) is not None:
        function, options = F.linear_attention, dict(linear)
    *given, g = arrays(length, options.pop("feature_dim", SIZE))
    leaves = [mg.Tensor(x, requires_grad=True) for x in given]
    attend = functools.partial(function, is_causal=True, **options)

    def step() -> list[np.ndarray]:
        out: mg.Tensor = attend(*leaves)
        return [out.numpy(), *(x.numpy() for x in mg.grad(out, leaves, mg.asarray(g)))]

    return step


def torch_step(kind: str, length: int) -> Callable[[], list[np.ndarray]]:
    """The same in torch."""
    import torch

    torch.set_num_threads(mg.get_num_threads())
    *given, g = (torch.from_numpy(x) for x in arrays(length))
    leaves = [x.requires_grad_() for x in given]
    shape: dict[str, Any] = {"is_causal": True}
    if kind == "torch masked":
        seen = np.kron(blocks(length).blocks, np.ones((BLOCK, BLOCK), bool))[:length, :length]
        shape = {"attn_mask": torch.from_numpy(np.tril(seen))}

    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **shape)

    def step() -> list[np.ndarray]:
        out = attend(*leaves)
        return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, leaves, g))]

    return step


# ---- decoding --------------------------------------------------------------------------------------------------------


def decoding(kind: str, length: int) -> tuple[float, float]:
    """ms of a token that a model of one layer decodes after ``length`` ones, and MB of its cache."""
    width, room = HEADS * SIZE, length + DECODED + 1
    sizes: dict[str, Any] = {
        "vocab_size": 2,
        "context_length": room,
        "d_model": width,
        "d_ff": 1,
        "num_layers": 1,
        "num_heads": HEADS,
    }
    model = nn.TransformerLM(**sizes, **model_options(kind, room))
    cache = nn.KVCache(model, room)
    model.next_logits(np.zeros((1, length), int), cache)
    token, times = np.zeros((1, 1), int), []
    for _ in range(DECODED):
        start = time.perf_counter()
        model.next_logits(token, cache)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times), measuring.held_mb(cache)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(kind: str, length: int, seconds: float) -> Found:
    """ms and MB of a step; but for torch also those of decoding."""
    step_of(kind, min(LENGTHS))()  # what a first call loads
    step = step_of(kind, length)
    before = measuring.resident_mb()
    measuring.reset_peak()
    step()
    found = {"MB": measuring.peak_mb() - before, "ms": 1e3 * measuring.median_seconds(step, seconds)}
    if not kind.startswith("torch"):
        found["token ms"], found["cache MB"] = decoding(kind, length)
    return found


def measured(kinds: list[str], lengths: list[int], seconds: float, keep: bool) -> Results:
    """What each kind takes at each length; left out where torch isn't installed, or memory runs short.

    What is to be kept is so at once, the least of all runs: others on the machine only add to it.
    """
    results: Results = {}
    for length, kind in itertools.product(lengths, kinds):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            try:
                results[kind, length] = pool.apply(functools.partial(measure, kind, length, seconds))
                print(
                    kind, length, *(f"{value:.3g} {what}" for what, value in results[kind, length].items()), flush=True
                )
            except (ImportError, MemoryError) as error:
                print(f"{kind} at {length}: {error}")
                continue
        if keep:
            before = read(RESULTS).get((kind, length), {})
            least = {what: min(value, before.get(what, value)) for what, value in results[kind, length].items()}
            records.add(RESULTS, {"kind": kind, "length": length, "found": least})
    return results


# ---- showing ---------------------------------------------------------------------------------------------------------


def curve(results: Results, kind: str, what: str) -> dict[int, float]:
    """A figure over the length, in order."""
    return {n: of[what] for (name, n), of in sorted(results.items()) if name == kind and what in of}


def exponent(points: dict[int, float]) -> float | None:
    """p of ``figure ~ length^p``, fitted to the lengths from 2048 on; None of fewer than two."""
    long = {n: y for n, y in points.items() if n >= 2048 and y > 0}
    return float(np.polyfit(np.log(list(long)), np.log(list(long.values())), 1)[0]) if len(long) > 1 else None


def pays_from(points: dict[int, float], full: dict[int, float]) -> str:
    """The length from which on a figure is below that of full attention, between the lengths by a power law."""
    ratios = {n: points[n] / full[n] for n in points if full.get(n)}
    if not ratios:
        return ""
    worse = [n for n, ratio in ratios.items() if ratio >= 1]
    if not worse:
        return f"≤ {min(ratios)}"
    after = [n for n in ratios if n > worse[-1]]
    if not after:
        return f"> {worse[-1]}"
    a, b = (math.log(ratios[n]) for n in (worse[-1], after[0]))
    return f"{round(math.exp(np.interp(0, [b, a], [math.log(after[0]), math.log(worse[-1])])), -2):.0f}"


FIGURES = {
    "ms": "A step, ms",
    "MB": "A step, MB",
    "token ms": "A decoded token, ms",
    "cache MB": "The cache, MB",
}


def text(results: Results) -> str:
    """A table for each figure, a row for each length; and how each kind grows."""
    lengths, kinds = (
        sorted({n for _, n in results}),
        [kind for kind in KINDS if any(kind == name for name, _ in results)],
    )
    parts = []
    for what, title in FIGURES.items():
        curves = {kind: points for kind in kinds if (points := curve(results, kind, what))}
        rows: list[list[Any]] = [[str(n), *(points.get(n) for points in curves.values())] for n in lengths]
        rows.append(["~ T^p, p =", *(exponent(points) for points in curves.values())])
        full = curves.get("full", {})
        rows.append(
            ["less than full from", *("" if points is full else pays_from(points, full) for points in curves.values())]
        )
        parts.append(f"{title}:\n\n{tables.table(['T', *curves], rows)}")
    return "\n\n".join(parts)


def draw(results: Results, path: Path) -> None:
    """Each figure over the length."""
    panels = [
        pictures.Panel(
            title, "T", "", {kind: [(n, y, 0.0) for n, y in curve(results, kind, what).items()] for kind in KINDS}
        )
        for what, title in FIGURES.items()
    ]
    pictures.draw(path, [panel._replace(log_y=True) for panel in panels])


def read(path: Path) -> Results:
    """The results in a file."""
    return {(record["kind"], record["length"]): record["found"] for record in records.read(path)}


def page(results: Results) -> str:
    """docs/attention.md with the tables of these results."""
    return tables.put(PAGE.read_text(), "attention.py", text(results))


def main() -> None:
    """Measure, and print the tables."""
    parser = tables.parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS), metavar="T", help="(default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of repeating each step (default: 1)")
    parser.add_argument(
        "--write", action="store_true", help=f"keep them in {RESULTS.name}, for the tables of docs/{PAGE.name}"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw what is in {RESULTS.name}, to an SVG")
    options = parser.parse_args()
    results = measured(options.kinds, options.lengths, options.seconds, options.write)
    print(f"\n{measuring.machine()}, {mg.get_num_threads()} threads\n\n{text(results)}")
    if options.write:
        PAGE.write_text(page(read(RESULTS)))
    if options.plot:
        draw(read(RESULTS), options.plot)
    tables.write_json(options.json, {f"{kind} {length}": found for (kind, length), found in results.items()})


if __name__ == "__main__":
    main()
