"""How kinds of attention grow with the length of the sequence: ms and MB of a step, forward and backward.

    python benchmarks/attention.py                                    all kinds, T = 256 … 16384: ten minutes
    python benchmarks/attention.py --kinds full window --lengths 256 1024

A causal layer of 8 heads of 32 in float32, beside torch's scaled_dot_product_attention on the same threads:

- full: every token before
- window: the last 256
- blocks: of 64 tokens each, its own and the one before, the first, and two drawn ones (as in Big Bird)
- torch: full, by is_causal; torch masked: the blocks, as a boolean mask (T, T)

Each kind and length has a process of its own, which knows its peak of memory above what the arguments take.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import measuring, tables

import minigrad as mg
import nn
import nn.functional as F

HEADS, SIZE = 8, 32
WINDOW, BLOCK = 256, 64
KINDS = ("full", "window", "blocks", "torch", "torch masked")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def arrays(length: int) -> list[np.ndarray]:
    """q, k, v and the upstream gradient."""
    return [np.random.default_rng(n).standard_normal((1, HEADS, length, SIZE), np.float32) for n in range(4)]


def blocks(length: int) -> nn.BlockPattern:
    """The pattern of ``length`` tokens."""
    return nn.BlockPattern.local(length, BLOCK, reach=1, first=1, drawn=2)


def step_of(kind: str, length: int) -> Callable[[], list[np.ndarray]]:
    """A step of a kind: the result, and the gradients of q, k and v."""
    if kind.startswith("torch"):
        return torch_step(kind, length)
    *given, g = arrays(length)
    leaves = [mg.Tensor(x, requires_grad=True) for x in given]
    kinds: dict[str, dict[str, Any]] = {"full": {}, "window": {"window": WINDOW}, "blocks": {"pattern": blocks(length)}}
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, **kinds[kind])

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


def measure(kind: str, length: int, seconds: float) -> tuple[float, float]:
    """ms and MB of a step."""
    step_of(kind, min(LENGTHS))()  # what a first call loads
    step = step_of(kind, length)
    before = measuring.resident_mb()
    measuring.reset_peak()
    step()
    memory = measuring.peak_mb() - before
    return 1e3 * measuring.median_seconds(step, seconds, least=1), memory


def measured(kinds: list[str], lengths: list[int], seconds: float) -> dict[str, dict[int, tuple[float, float]]]:
    """ms and MB of each kind at each length; a kind ends where torch isn't installed, or memory runs short."""
    found: dict[str, dict[int, tuple[float, float]]] = {kind: {} for kind in kinds}
    for length in lengths:
        for kind in kinds:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                try:
                    found[kind][length] = pool.apply(functools.partial(measure, kind, length, seconds))
                except (ImportError, MemoryError) as error:
                    print(f"{kind} at {length}: {error}")
    return found


def table(found: dict[str, dict[int, tuple[float, float]]], lengths: list[int]) -> str:
    """A row for each length; the last one says how much more the greatest length takes than the one before."""
    headers = ["T", *(f"{kind}: {unit}" for kind in found for unit in ("ms", "MB"))]
    nothing = (None, None)
    rows: list[list[Any]] = [[str(n), *(x for of in found.values() for x in of.get(n, nothing))] for n in lengths]
    if len(lengths) > 1:
        last, before = ([x for of in found.values() for x in of.get(n, nothing)] for n in (lengths[-1], lengths[-2]))
        growth = [None if a is None or not b else a / b for a, b in zip(last, before, strict=True)]
        rows.append([f"{lengths[-1]} / {lengths[-2]}", *growth])
    return tables.table(headers, rows)


def main() -> None:
    """Print the table."""
    parser = tables.parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="T", help="(default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of repeating each step (default: 1)")
    options = parser.parse_args()
    found = measured(options.kinds, options.lengths, options.seconds)
    print(f"{measuring.machine()}, {mg.get_num_threads()} threads\n\n{table(found, options.lengths)}")
    tables.write_json(options.json, found)


if __name__ == "__main__":
    main()
