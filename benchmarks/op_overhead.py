"""What recording an operation costs: chains of multiplications of 8 floats, forward and backward.

    python benchmarks/op_overhead.py

First a chain of 200, in µs an operation, for each engine that is installed, alternating in one process: times a
constant, and times a second leaf that takes a gradient too. Then minigrad's time and memory an operation from 1 000 to
1 000 000 of them in one chain; both should stay as they are.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import measuring, tables

LENGTH = 200
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
START, FACTOR = np.linspace(0.5, 1.5, 8, dtype=np.float32), np.linspace(0.99, 1.01, 8, dtype=np.float32)


def multiplied(x: Any, factor: Any, length: int) -> Any:
    """x · factor · factor · … as a chain of ``length`` operations."""
    for _ in range(length):
        x = x * factor
    return x


# ---- the engines: each gives the gradients of the sum of the chain --------------------------------------------------


def minigrad_chain(length: int, leaf: bool) -> list[Any]:
    import minigrad as mg

    x, factor = mg.Tensor(START, requires_grad=True), mg.Tensor(FACTOR, requires_grad=leaf)
    multiplied(x, factor, length).sum().backward()
    return [x.grad, factor.grad] if leaf else [x.grad]


def autograd_chain(length: int, leaf: bool) -> list[Any]:
    from autograd import grad

    def total(x: Any, factor: Any) -> Any:
        return multiplied(x, factor, length).sum()

    return list(grad(total, (0, 1) if leaf else (0,))(START, FACTOR))


def mygrad_chain(length: int, leaf: bool) -> list[Any]:
    import mygrad

    x, factor = mygrad.tensor(START), mygrad.tensor(FACTOR, constant=not leaf)
    multiplied(x, factor, length).sum().backward()
    return [x.grad, factor.grad] if leaf else [x.grad]


def mygrad_unguarded_chain(length: int, leaf: bool) -> list[Any]:
    """Without its guard against writes to arrays in use, as its documentation advises for speed."""
    from mygrad import mem_guard_off

    with mem_guard_off:
        return mygrad_chain(length, leaf)


def torch_chain(length: int, leaf: bool) -> list[Any]:
    import torch

    x, factor = torch.tensor(START, requires_grad=True), torch.tensor(FACTOR, requires_grad=leaf)
    multiplied(x, factor, length).sum().backward()
    return [np.asarray(x.grad), np.asarray(factor.grad)] if leaf else [np.asarray(x.grad)]


CHAINS: dict[str, Callable[[int, bool], list[Any]]] = {
    "minigrad": minigrad_chain,
    "torch": torch_chain,
    "autograd": autograd_chain,
    "mygrad": mygrad_chain,
    "mygrad unguarded": mygrad_unguarded_chain,
}


def compare(rounds: int, leaf: bool) -> dict[str, float]:
    """Median µs an operation of a chain of 200, for each engine; they must agree on the gradients."""
    chains = {name: chain for name, chain in CHAINS.items() if importlib.util.find_spec(name.split()[0])}
    right = next(iter(chains.values()))(LENGTH, leaf)
    for name, chain in chains.items():
        for g, expected in zip(chain(LENGTH, leaf), right, strict=True):
            np.testing.assert_allclose(g, expected, rtol=1e-3, err_msg=name)
    times: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(rounds):
        for name, chain in chains.items():
            start = time.perf_counter()
            chain(LENGTH, leaf)
            times[name].append(1e6 * (time.perf_counter() - start) / LENGTH)
    return {name: statistics.median(measured) for name, measured in times.items()}


# ---- long chains -----------------------------------------------------------------------------------------------------


def measure_chain(length: int) -> dict[str, float]:
    """µs an operation, forward and backward, and bytes that an operation holds, of one chain in minigrad."""
    import minigrad as mg

    minigrad_chain(LENGTH, leaf=False)
    gc.collect()
    repeats = max(1, 10_000 // length)
    forward = backward = held = 0.0
    before = measuring.resident_mb()
    for _ in range(repeats):
        x, start = mg.Tensor(START, requires_grad=True), time.perf_counter()
        y = multiplied(x, np.ones_like(FACTOR), length).sum()
        middle = time.perf_counter()
        held = held or measuring.resident_mb() - before  # later chains find memory that the first one left
        resumed = time.perf_counter()
        y.backward()
        del y
        forward, backward = forward + middle - start, backward + time.perf_counter() - resumed
    unit = 1e6 / length / repeats
    return {"length": length, "forward": forward * unit, "backward": backward * unit, "bytes": held * 2**20 / length}


def measure_in_new_process(length: int) -> dict[str, float]:
    """``measure_chain`` with a memory of its own."""
    command = [sys.executable, __file__, "--chain", str(length)]
    measured: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return measured


def growth() -> list[dict[str, float]]:
    """How time and memory of an operation change with the length of the chain."""
    return [measure_in_new_process(length) for length in LENGTHS]


def growth_table(measured: list[dict[str, float]]) -> str:
    """The table of ``growth``."""
    headers = ["operations", "forward µs/op", "backward µs/op", "sum", "bytes/op"]
    rows = [
        [f"{m['length']:.0f}", m["forward"], m["backward"], m["forward"] + m["backward"], f"{m['bytes']:.0f}"]
        for m in measured
    ]
    return tables.table(headers, rows)


def main() -> None:
    """Print both tables."""
    parser = tables.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="alternations (default: 50)")
    parser.add_argument("--chain", type=int, metavar="N", help="only measure one chain of minigrad, and print JSON")
    options = parser.parse_args()
    if options.chain:
        print(json.dumps(measure_chain(options.chain)))
        return
    constant, leaf = compare(options.rounds, leaf=False), compare(options.rounds, leaf=True)
    rows = [[name, constant[name], leaf[name], f"{leaf[name] / leaf['minigrad']:.2f}"] for name in constant]
    print(tables.table(["µs/op, chain of 200", "times a constant", "times a leaf", "minigrad = 1"], rows), end="\n\n")
    measured = growth()
    print(growth_table(measured))
    tables.write_json(options.json, {"constant": constant, "leaf": leaf, "growth": measured})


if __name__ == "__main__":
    main()
