"""The gradient of an embedding: rows of a table that are picked many times must be summed.

    python benchmarks/embedding_gradient.py

50 000 ids, uniform or distributed as the words of a text (Zipf), into a 50 000 x 64 float32 table, on one thread:
minigrad's backward pass beside ways to write the sum in NumPy, each over the time of the forward pass ``W[ids]`` in the
same run. minigrad should stay within 8 (uniform) and 12 (Zipf) forward passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import threadpoolctl
from harness import tables

import minigrad as mg
from nn import functional as F

ROWS, WIDTH, COUNT = 50_000, 64, 50_000
LIMITS = {"uniform": 8, "zipf": 12}

Sum = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids (n,), gradients (n, d) to the table's gradient (rows, d)


def draw_ids(kind: str) -> np.ndarray:
    """50 000 ids, either all equally likely or the k-th in proportion to 1/k."""
    generator = np.random.default_rng(0)
    if kind == "uniform":
        return generator.integers(0, ROWS, COUNT)
    running = np.cumsum(1 / np.arange(1, ROWS + 1))
    ranks = generator.permutation(ROWS)
    chosen: np.ndarray = ranks[np.searchsorted(running, generator.random(COUNT) * running[-1])]
    return chosen


def add_at(ids: np.ndarray, g: np.ndarray) -> np.ndarray:
    """``np.add.at`` on rows."""
    out = np.zeros((ROWS, WIDTH), np.float32)
    np.add.at(out, ids, g)
    return out


def add_at_flat(ids: np.ndarray, g: np.ndarray) -> np.ndarray:
    """``np.add.at`` on single numbers, for which NumPy has a fast loop."""
    out = np.zeros(ROWS * WIDTH, np.float32)
    np.add.at(out, (ids[:, None] * WIDTH + np.arange(WIDTH)).ravel(), g.ravel())
    return out.reshape(ROWS, WIDTH)


def sorted_sums(ids: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Rows sorted by id, and ``np.add.reduceat`` over the runs of equal ids."""
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    starts = np.flatnonzero(np.diff(ranked, prepend=-1))
    out = np.zeros((ROWS, WIDTH), np.float32)
    out[ranked[starts]] = np.add.reduceat(g[order], starts, axis=0)
    return out


def in_rounds(ids: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The first row of each id assigned, then the second of each added, and so on: within a round no id repeats."""
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    starts = np.flatnonzero(np.diff(ranked, prepend=-1))
    place = np.arange(len(ids)) - np.repeat(starts, np.diff(starts, append=len(ids)))
    out = np.zeros((ROWS, WIDTH), np.float32)
    for i in range(place.max() + 1):
        chosen = order[place == i]
        out[ids[chosen]] += g[chosen]
    return out


WAYS: dict[str, Sum] = {
    "np.add.at, rows": add_at,
    "np.add.at, flat": add_at_flat,
    "sort, np.add.reduceat": sorted_sums,
    "rounds without repeats": in_rounds,
}


def measure(kind: str, rounds: int) -> dict[str, float]:
    """Median ms of the forward pass and of each way to sum, alternating; they must agree."""
    generator = np.random.default_rng(1)
    table, g = (generator.standard_normal(shape, np.float32) for shape in ((ROWS, WIDTH), (COUNT, WIDTH)))
    ids, weight = draw_ids(kind), mg.Tensor(table, requires_grad=True)

    def backward(lookup: Callable[[], mg.Tensor]) -> Callable[[], Callable[[], np.ndarray]]:
        """Record the lookup, which isn't timed, and give its backward pass, which is."""

        def prepare() -> Callable[[], np.ndarray]:
            weight.grad = None
            out = lookup()

            def differentiate() -> np.ndarray:
                out.backward(g)
                return np.asarray(weight.grad)

            return differentiate

        return prepare

    def in_numpy(way: Sum) -> Callable[[], Callable[[], np.ndarray]]:
        """A way to sum, which has nothing to prepare."""
        return lambda: lambda: way(ids, g)

    calls: dict[str, Callable[[], Callable[[], np.ndarray]]] = {
        "forward W[ids]": lambda: lambda: table[ids],
        "minigrad F.embedding": backward(lambda: F.embedding(ids, weight)),
        "minigrad W[ids]": backward(lambda: weight[ids]),
        **{name: in_numpy(way) for name, way in WAYS.items()},
    }
    right = add_at(ids, g.astype(np.float64))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, prepare in calls.items():
            call = prepare()
            start = time.perf_counter()
            result = call()
            if i:  # the first round touches the memory
                times[name].append(1e3 * (time.perf_counter() - start))
            elif name != "forward W[ids]":
                np.testing.assert_allclose(result, right, atol=1e-3, err_msg=name)
    return {name: statistics.median(measured) for name, measured in times.items()}


def measure_slice(rounds: int) -> dict[str, float]:
    """Median ms of the backward pass of a basic slice, half of the table, and of the same as one assignment."""
    weight = mg.Tensor(np.ones((ROWS, WIDTH), np.float32), requires_grad=True)
    g = np.ones((ROWS // 2, WIDTH), np.float32)
    times: dict[str, list[float]] = {"minigrad W[: rows // 2]": [], "zeros and an assignment": []}
    for _ in range(rounds):
        weight.grad = None
        out = weight[: ROWS // 2]
        start = time.perf_counter()
        out.backward(g)
        middle = time.perf_counter()
        dense = np.zeros((ROWS, WIDTH), np.float32)
        dense[: ROWS // 2] = g
        for measured, seconds in zip(times.values(), (middle - start, time.perf_counter() - middle), strict=True):
            measured.append(1e3 * seconds)
    return {name: statistics.median(measured) for name, measured in times.items()}


def main() -> None:
    """Print a table for each distribution of ids, and one for slices."""
    parser = tables.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="alternations (default: 7)")
    options = parser.parse_args()
    mg.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with threadpoolctl.threadpool_limits(1):
        for kind, limit in LIMITS.items():
            results[kind] = measure(kind, options.rounds)
            forward = results[kind]["forward W[ids]"]
            rows = [[name, ms, ms / forward] for name, ms in results[kind].items()]
            print(tables.table([f"{kind} ids", "ms", f"forward = 1 (limit {limit})"], rows), end="\n\n")
        results["slice"] = measure_slice(options.rounds)
    print(tables.table(["slice", "ms"], [[name, ms] for name, ms in results["slice"].items()]))
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
