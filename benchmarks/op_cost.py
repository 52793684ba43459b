"""Whether a change made an operation slower: an old and a new checkout take turns at its forward and backward pass.

    git worktree add /tmp/old d895bf7
    python benchmarks/op_cost.py /tmp/old . --only tanh softmax --pairs 9

Each checkout has a process of one thread; both are alive, one works at a time. A pair is a turn of each, the new one
first in every other pair; a turn repeats the work for about ``--seconds``, and its time is the median of the repeats.
The figure is the median over the pairs of new time over old time, with its 95 % confidence interval.
``MINIGRAD_COMPILED=0`` in the environment leaves the loops of numba out. Names are those of both checkouts: the work
uses public names of ``minigrad``, ``nn`` and ``optim`` alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from alternate import median_interval
from harness import measuring, tables
from harness.processes import THREAD_VARIABLES

SIZE = 100_000
Run = Callable[[], object]


# ---- the work, in the process of a checkout --------------------------------------------------------------------------


def passes(function: Callable[..., Any], x: np.ndarray, *parameters: np.ndarray) -> Run:
    """Forward and backward pass of a function of x and of parameters; gives the gradient of x."""
    import minigrad as mg

    leaves = [mg.Tensor(a, requires_grad=True) for a in (x, *parameters)]
    g = np.random.default_rng(1).standard_normal(x.shape).astype(x.dtype)

    def run() -> Any:
        for leaf in leaves:
            leaf.grad = None
        out = function(*leaves)
        out.backward(g if out.shape == g.shape else None)
        return leaves[0].grad

    return run


def steps(shapes: list[tuple[int, ...]], dtype: Any, size: float) -> Run:
    """An update of AdamW of parameters of these shapes, whose gradients have about this size."""
    import optim
    from minigrad import Tensor

    rng = np.random.default_rng(0)
    leaves = [Tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True) for shape in shapes]
    for leaf in leaves:
        leaf.grad = (size * rng.standard_normal(leaf.shape)).astype(dtype)
    return optim.AdamW(leaves).step


def works(size: int, dtype: Any) -> dict[str, Callable[[], Run]]:
    """Each piece of work by name, made when it is called for."""
    import minigrad as mg
    from nn import functional as F

    x = np.random.default_rng(0).standard_normal(size).astype(dtype)
    inside = np.random.default_rng(0).uniform(-0.8, 0.8, size).astype(dtype)
    positive = abs(x) + dtype(0.5)

    def rows(width: int, peaked: bool) -> np.ndarray:
        made: np.ndarray = x[: size // width * width].reshape(-1, width).copy()
        if peaked:
            made[np.arange(len(made)), np.arange(len(made)) % width] += dtype(12)
        return made

    def one(name: str, x: np.ndarray) -> Run:
        return passes(getattr(mg, name, None) or getattr(F, name), x)

    def of_targets(x: np.ndarray) -> Run:
        targets = np.arange(len(x)) % x.shape[1]
        return passes(lambda x: F.cross_entropy(x, targets), x)

    def normed(name: str, *parameters: np.ndarray) -> Run:
        return passes(lambda x, *p: getattr(F, name)(x, x.shape[-1:], *p), rows(250, False), *parameters)

    plain = ("negative", "expm1", "tanh", "sigmoid", "softplus", "arctan", "sinh", "cosh", "exp", "erf")
    found: dict[str, Callable[[], Run]] = {name: partial(one, name, x) for name in (*plain, "gelu", "silu")}
    found |= {name: partial(one, name, inside) for name in ("arcsin", "arccos", "arctanh")}
    found |= {name: partial(one, name, positive) for name in ("sqrt", "log", "log1p")}
    found["expm1 down to -5"] = partial(one, "expm1", 2.5 * x.clip(-2, 2))
    found["tanh up to 10"] = partial(one, "tanh", 5 * x.clip(-2, 2))
    found["gelu tanh"] = partial(passes, lambda x: F.gelu(x, approximate="tanh"), x)
    found["swiglu"] = partial(passes, F.swiglu, x, x[::-1].copy())
    found["hypot"] = partial(passes, mg.hypot, positive, positive[::-1].copy())
    for name in ("softmax", "log_softmax"):
        for width in (10, 250):
            for peaked in (False, True):
                found[f"{name}, rows of {width}{', peaked' * peaked}"] = partial(one, name, rows(width, peaked))
    for peaked in (False, True):
        found[f"cross_entropy{', peaked' * peaked}"] = partial(of_targets, rows(250, peaked))
    scale = np.linspace(0.5, 1.5, 250, dtype=dtype)
    found["layer_norm"] = partial(normed, "layer_norm", scale, scale)
    found["rms_norm"] = partial(normed, "rms_norm", scale)
    for gradients, size_of_them in (("", 1.0), (", gradients of 1e-21", 1e-21)):
        found[f"AdamW{gradients}"] = partial(steps, [(4 * size,)], dtype, size_of_them)
        found[f"AdamW, 200 of 16{gradients}"] = partial(steps, [(16,)] * 200, dtype, size_of_them)
    return found


def serve() -> None:
    """Answer the lines of the parent: make the work of a name, or repeat it."""
    run: Run = time.time
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "origin":
            import minigrad

            answer: Any = str(Path(minigrad.__file__).resolve().parent.parent)
        elif asked["do"] == "names":
            answer = list(works(1000, np.float64))
        elif asked["do"] == "make":
            run = works(asked["size"], np.dtype(asked["dtype"]).type)[asked["name"]]()
            for _ in range(3):
                run()
            answer = None
        else:
            times: list[float] = []
            run()
            while len(times) < 3 or sum(times) < asked["seconds"]:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            answer = statistics.median(times)
        print(json.dumps(answer), flush=True)


# ---- the parent ------------------------------------------------------------------------------------------------------


class Checkout:
    """A process that imports the packages of a folder."""

    def __init__(self, folder: Path) -> None:
        environment = dict(os.environ) | dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            cwd=Path(__file__).parent,
        )
        if (origin := self.ask(do="origin")) != str(folder):
            sys.exit(f"{folder}: expected the packages of this checkout, got those of {origin}")

    def ask(self, **asked: Any) -> Any:
        """The answer to a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Let the process end, which it does once nobody can ask."""
        self.process.communicate()


def compare(checkouts: list[Checkout], name: str, dtype: str, size: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Microseconds of both, and the median over the pairs of new over old with its interval."""
    times: list[list[float]] = [[], []]
    for checkout in checkouts:
        checkout.ask(do="make", name=name, dtype=dtype, size=size)
    for i in range(pairs):
        for which in ((0, 1), (1, 0))[i % 2]:
            times[which].append(1e6 * checkouts[which].ask(do="turn", seconds=seconds))
    ratios = [new / old for old, new in zip(*times, strict=True)]
    return {"us": list(map(statistics.median, times)), "ratio": statistics.median(ratios), "times_us": times}


def main() -> None:
    """Print a row for each piece of work as soon as it is measured, and the table last."""
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = tables.parser(__doc__)
    parser.add_argument("old", type=Path, help="the folder of the old checkout")
    parser.add_argument("new", type=Path, help="the folder of the new checkout")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="work whose name begins with a text")
    parser.add_argument("--dtypes", nargs="*", default=["float64", "float32"], metavar="DTYPE")
    parser.add_argument("--size", type=int, default=SIZE, help="numbers (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of turns (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.03, help="length of a turn (default: %(default)s)")
    options = parser.parse_args()
    checkouts = [Checkout(folder.resolve()) for folder in (options.old, options.new)]
    names = [name for name in checkouts[1].ask(do="names") if name.startswith(tuple(options.only))]
    print(f"{measuring.machine()}; {options.pairs} pairs, {options.size} numbers\n")
    others, rows, results = measuring.OtherWork(), [], {}
    for name in names:
        for dtype in options.dtypes:
            r = compare(checkouts, name, dtype, options.size, options.pairs, options.seconds)
            low, high = median_interval([new / old for old, new in zip(*r["times_us"], strict=True)])
            rows.append([name, dtype, *(f"{t:.1f}" for t in r["us"]), f"{r['ratio']:.3f}", f"{low:.2f} to {high:.2f}"])
            results[f"{name}, {dtype}"] = r
            print(*rows[-1], file=sys.stderr, flush=True)
    for checkout in checkouts:
        checkout.close()
    print(tables.table(["work", "dtype", "old µs", "new µs", "new / old", "95 % interval"], rows))
    if (share := others.share()) is not None:
        print(f"\nOther processes took {share:.0%} of the cores' time.")
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
