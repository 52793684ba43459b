"""What small work costs beside HIPS autograd and torch, where Python's time outweighs the arithmetic; one thread.

    python benchmarks/small.py [--pairs 30] [--write]

Each piece of work is a formula in NumPy's names, which minigrad and autograd differentiate alike; the gradients must
agree. Both take turns in one process: a pair is a turn of each, who begins changes from pair to pair, and a turn
repeats the work for about ``--seconds``. The figure is the median over the pairs of autograd's time over ours: above 1
minigrad is faster. Then what a recorded operation takes, forward and backward, beside torch: ours over torch's.
``--write`` puts the tables into results.md.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before NumPy and torch are imported
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from alternate import median_interval
from compare import RESULTS
from harness import measuring, tables
from op_overhead import FACTOR, LENGTH, START, minigrad_chain, torch_chain

import minigrad as mg

Results = Sequence[Any]
Run = Callable[[], Results]  # the work, done once: its value and derivatives, as arrays


class Work(NamedTuple):
    """A formula to differentiate, ``kind`` says how, by its first arguments; ``xp`` is minigrad or autograd.numpy."""

    formula: Callable[..., Any]  # (xp, *arguments)
    arguments: tuple[Any, ...]
    kind: str = "grad"  # or "jacobian", "hessian"
    argnums: tuple[int, ...] = (0,)


# ---- the formulas ---------------------------------------------------------------------------------------------------


def layer(xp: Any, x: Any, w: Any) -> Any:
    """tanh(w x), a function of as many numbers as it gives."""
    return xp.tanh(xp.dot(w, x))


def recurrent(xp: Any, w: Any, u: Any, b: Any, inputs: Any) -> Any:
    """The squares of the last state of h' = tanh(w h + u x + b)."""
    h = np.zeros(len(inputs[0]))
    for x in inputs:
        h = xp.tanh(xp.dot(w, h) + xp.dot(u, x) + b)
    return xp.sum(h * h)


def sines(xp: Any, x: Any, times: int) -> Any:
    """sin(sin(… sin x)), of a single number."""
    for _ in range(times):
        x = xp.sin(x)
    return x


def logistic(xp: Any, w: Any, rows: Any, signs: Any) -> Any:
    """The mean loss of a logistic regression, with a ridge."""
    return xp.mean(xp.logaddexp(0.0, -signs * xp.dot(rows, w))) + 0.01 * xp.sum(w * w)


def kernel(xp: Any, points: Any, scales: Any, weights: Any) -> Any:
    """wᵀ K w for the kernel exp(-½ |x - y|²) of points in units of ``scales``."""
    scaled = points / scales
    between = scaled[:, None, :] - scaled[None, :, :]
    return xp.sum(weights * xp.dot(xp.exp(-0.5 * xp.sum(between**2, axis=2)), weights))


def rosenbrock(xp: Any, x: Any) -> Any:
    """Rosenbrock's banana in as many dimensions as x has."""
    return xp.sum(100.0 * (x[1:] - x[:-1] ** 2.0) ** 2.0 + (1.0 - x[:-1]) ** 2.0)


def orbit(xp: Any, rates: Any, effects: Any, start: Any, steps: int) -> Any:
    """The sum of three species after steps of Euler's method in Lotka's and Volterra's equations."""
    y = start
    for _ in range(steps):
        y = y + 0.01 * y * (rates + xp.dot(effects, y))
    return xp.sum(y)


def works(scale: float = 1.0) -> dict[str, Work]:
    """The pieces of work, their sizes multiplied by ``scale``."""
    draw = np.random.default_rng(0)

    def n(size: int) -> int:
        return max(2, round(size * scale))

    wide, state, points, columns = n(50), n(16), n(100), n(50)
    effects = np.array([[-1.0, -0.5, 0.2], [0.4, -1.0, -0.5], [-0.3, 0.6, -1.0]])
    random = draw.standard_normal
    return {
        f"Jacobian {wide} → {wide}": Work(layer, (random(wide), random((wide, wide)) / wide), "jacobian"),
        f"RNN of {n(1000)} steps": Work(
            recurrent,
            (random((state, state)) / state, random((state, state)), random(state), list(random((n(1000), state)))),
            argnums=(0, 1, 2),
        ),
        f"{n(200)} scalar sines": Work(sines, (1.0, n(200))),
        f"logistic regression {n(10_000)} x {columns}": Work(
            logistic, (random(columns), random((n(10_000), columns)), np.sign(random(n(10_000))))
        ),
        f"RBF kernel of {points} points": Work(
            kernel, (random((points, 3)), np.ones(3), random(points)), argnums=(0, 1)
        ),
        f"Hessian of Rosenbrock in {n(10)}": Work(rosenbrock, (random(n(10)),), "hessian"),
        f"ODE of {n(1000)} steps": Work(
            orbit, (np.array([1.0, 0.8, 0.5]), effects, np.array([0.5, 0.4, 0.3]), n(1000)), argnums=(0, 1, 2)
        ),
    }


# ---- the engines ----------------------------------------------------------------------------------------------------


def with_minigrad(work: Work) -> Run:
    function: Any = lambda *arguments: work.formula(mg, *arguments)
    if work.kind == "grad":
        transformed: Any = mg.functional.value_and_grad(function, work.argnums)

        def run() -> Results:
            value, slopes = transformed(*work.arguments)
            return [value.data, *(slope.data for slope in slopes)]

        return run
    transform: Any = getattr(mg.functional, work.kind)
    return lambda: [transform(lambda x: function(x, *work.arguments[1:]), work.arguments[0]).data]


def with_autograd(work: Work) -> Run:
    import autograd

    function = lambda *arguments: work.formula(autograd.numpy, *arguments)
    if work.kind == "grad":
        transformed: Any = autograd.value_and_grad(function, work.argnums)

        def run() -> Results:
            value, slopes = transformed(*work.arguments)
            return [value, *slopes]

        return run
    transform: Any = {"jacobian": autograd.jacobian, "hessian": autograd.hessian}[work.kind]
    return lambda: [transform(function)(*work.arguments)]


def one_operation(tensor: Callable[..., Any], of: Callable[[Any], Any]) -> Run:
    """A product of two small leaves and its backward pass, in minigrad or torch, whose names are the same here."""
    x, y, g = tensor(START), tensor(FACTOR), of(np.ones_like(START))
    x.requires_grad = y.requires_grad = True

    def run() -> Results:
        x.grad = y.grad = None
        (x * y).backward(g)
        return [np.asarray(x.grad), np.asarray(y.grad)]

    return run


def operations() -> dict[str, tuple[Run, Run]]:
    """Work of recorded operations, minigrad's and torch's."""
    import torch

    torch.set_num_threads(1)
    return {
        "one product, forward and backward": (
            one_operation(mg.Tensor, np.asarray),
            one_operation(torch.tensor, torch.tensor),
        ),
        f"chain of {LENGTH}, times a constant": (
            lambda: minigrad_chain(LENGTH, leaf=False),
            lambda: torch_chain(LENGTH, leaf=False),
        ),
        f"chain of {LENGTH}, times a leaf": (
            lambda: minigrad_chain(LENGTH, leaf=True),
            lambda: torch_chain(LENGTH, leaf=True),
        ),
    }


# ---- measuring ------------------------------------------------------------------------------------------------------


def check(name: str, ours: Run, theirs: Run) -> None:
    """End the program unless both give the same numbers."""
    for got, expected in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6, err_msg=name)


def milliseconds(run: Run, repeats: int) -> float:
    """The time of the work, the mean of so many repeats."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return 1e3 * (time.perf_counter() - start) / repeats


def compare(name: str, ours: Run, theirs: Run, pairs: int, seconds: float) -> dict[str, Any]:
    """The times of both, and the median over the pairs of theirs over ours with its interval."""
    check(name, ours, theirs)
    runs = (ours, theirs)
    repeats = [max(1, round(1e3 * seconds / milliseconds(run, 1))) for run in runs]
    times: list[list[float]] = [[], []]
    for i in range(pairs):
        for which in ((0, 1), (1, 0))[i % 2]:
            gc.collect()
            times[which].append(milliseconds(runs[which], repeats[which]))
    ratios = [their / own for own, their in zip(*times, strict=True)]
    medians = [statistics.median(found) for found in times]
    return {"ms": medians, "ratio": statistics.median(ratios), "interval": median_interval(ratios)}


def row(name: str, found: dict[str, Any], inverse: bool = False) -> list[Any]:
    """A row of the table; ``inverse`` shows ours over theirs."""
    ratio, (low, high) = found["ratio"], found["interval"]
    if inverse:
        ratio, low, high = 1 / ratio, 1 / high, 1 / low if low > 0 else float("inf")
    return [name, *found["ms"], f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"]


def section(text: str) -> None:
    """Put the tables into their section of results.md, in the place of those before."""
    heading, before = "## Small work", RESULTS.read_text()
    found = re.search(rf"^{heading}\n.*?(?=^## |\Z)", before, re.M | re.S)
    made = f"{heading}\n\n{text}\n\n"
    after = before.replace(found.group(), made) if found else f"{before.rstrip()}\n\n{made}"
    RESULTS.write_text(f"{after.rstrip()}\n")


def main() -> None:
    """Print a row for each piece of work as soon as it is measured, and the tables last."""
    parser = tables.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of turns (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the work whose name has this text in it")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {RESULTS.name}")
    options = parser.parse_args()
    mg.set_num_threads(1)
    others = measuring.OtherWork()
    pieces = {name: (with_minigrad(work), with_autograd(work)) for name, work in works().items()}
    results: dict[str, Any] = {}
    shown = []
    for peer, pairs_of_runs in (("autograd", pieces), ("torch", operations())):
        rows = []
        for name, (ours, theirs) in pairs_of_runs.items():
            if options.only in name:
                results[name] = compare(name, ours, theirs, options.pairs, options.seconds)
                rows.append(row(name, results[name], inverse=peer == "torch"))
                print(*rows[-1], flush=True)
        ratio = "autograd / minigrad" if peer == "autograd" else "minigrad / torch"
        shown.append(tables.table(["work", "minigrad ms", f"{peer} ms", ratio, "95 % interval"], rows))
    versions = ", ".join(f"{name} {v}" for name, v in measuring.versions(["numpy", "autograd", "torch"]).items())
    share = others.share()
    busy = "" if share is None else f" Other processes took {share:.0%} of the cores' time."
    intro = (
        f"`python benchmarks/small.py`, one thread, {options.pairs} pairs of turns. {measuring.machine()}; {versions}."
    )
    text = "\n\n".join([intro + busy, *shown])
    print(f"\n{text}")
    tables.write_json(options.json, results)
    if options.write:
        section(text)


if __name__ == "__main__":
    main()
