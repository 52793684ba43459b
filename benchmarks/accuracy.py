"""How exact each elementwise operation and its derivatives are: writes ``docs/accuracy.md``.

``python benchmarks/accuracy.py [--points 300]`` measures minigrad, torch and JAX (where that is installed) at the same
points against numbers of mpmath, on the CPU. ``tests/ops/test_accuracy.py`` holds minigrad to it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.exact import CASES, LIMITS, Case, Worst, measure
from support.exact_special import LEADING
from support.twins import twin

import minigrad as mg

Numbers = dict[tuple[int, ...], np.ndarray]

PAGE = """# Accuracy in units in the last place

How far values and derivatives of the elementwise operations are from the right numbers at worst, in units in the last
place, over points spread evenly in the exponent over the whole range of the dtype (a third of them), near 0 and towards
±1, with both signs; a pair of arguments has one size in half of the cases. `python benchmarks/accuracy.py` wrote this
page, with {points} points for each operation and dtype, against mpmath and SymPy's derivatives;
`tests/ops/test_accuracy.py` holds minigrad to it for every operation that is registered.

- Each cell is *value · first derivative · second derivative*, the worst of the partial ones where there are two
  arguments. **Lost** means that no digit is right, or that no number came.
- Counted is where value and derivative are normal numbers of the dtype; in x σ(x) and x Φ(x) where σ and Φ are, too,
  and in swiglu where up isn't within a factor of 10 000 of overflow.
- An error above one unit is counted less what half a unit of the arguments explains; near roots, as of silu' near
  -1.278, the unit is what one unit of the argument does to the result.
- The special functions (`mg.special`) are measured where they are not trivial: Bessel functions of the first and second
  kind up to 60, beta up to 1000, gamma and its kind above 0; `DOMAIN` in `tests/support/exact_special.py` has the
  rest. Their values are SciPy's, and so is the first number of a cell.
- The goal is 4 units. What is above, and why, stands below the tables. The last column is the point of our worst.
- torch {torch} and {jax}, on the CPU, with their own derivatives.

"""


def by_torch(case: Case) -> Callable[[Sequence[np.ndarray]], Numbers] | None:
    """Value and derivatives by torch."""
    import torch

    function = twin(mg.REGISTRY[case.name], torch)
    if function is None:
        return None

    def call(*leaves: Any) -> Any:
        if case.name == "where":
            return torch.where(torch.ones_like(leaves[0], dtype=torch.bool), leaves[0], 0.0)
        return function(
            *LEADING.get(case.title, ()),
            *leaves,
            *(["tanh"] if case.title.endswith("tanh") and case.name == "gelu" else []),
        )

    def numbers(inputs: Sequence[np.ndarray]) -> Numbers:
        leaves, unit = [torch.tensor(a, requires_grad=True) for a in inputs], np.eye(len(inputs), dtype=int)
        out = call(*leaves)
        found = {(0,) * len(leaves): out.detach().numpy()}
        firsts = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        for i, first in enumerate(firsts):
            found[tuple(unit[i])] = first.numpy(force=True)
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
            seconds = torch.autograd.grad(first.sum(), leaves, **options) if first.requires_grad else [None] * 2
            for j in range(i, len(leaves)):
                g = seconds[j]
                found[tuple(unit[i] + unit[j])] = np.zeros_like(inputs[0]) if g is None else g.numpy(force=True)
        return found

    return numbers


def by_jax(case: Case) -> Callable[[Sequence[np.ndarray]], Numbers] | None:
    """Value and derivatives by JAX."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    special: dict[str, Any] = {
        "erf": jax.scipy.special.erf,
        "gelu": lambda x: jax.nn.gelu(x, approximate=case.title.endswith("tanh")),
        "swiglu": lambda x, y: jax.nn.silu(x) * y,
        "where": lambda x: jnp.where(True, x, 0.0),
    }
    modules = (jnp, jax.nn, jax.scipy.special)
    function = special.get(case.name) or next((getattr(m, case.name) for m in modules if hasattr(m, case.name)), None)
    if function is None or case.title in LEADING:
        return None

    def numbers(inputs: Sequence[np.ndarray]) -> Numbers:
        unit, arrays = np.eye(len(inputs), dtype=int), [jnp.asarray(a) for a in inputs]
        found = {(0,) * len(inputs): np.asarray(function(*arrays))}
        for i in range(len(inputs)):
            first = jax.grad(lambda *a: function(*a).sum(), i)
            found[tuple(unit[i])] = np.asarray(first(*arrays))
            for j in range(i, len(inputs)):
                second = jax.grad(lambda *a, first=first: first(*a).sum(), j)
                found[tuple(unit[i] + unit[j])] = np.asarray(second(*arrays))
        return found

    return numbers


def cell(found: list[Worst] | None, dtype: Any) -> str:
    """``0.5 · 1.2 · 1.4``."""
    if found is None:
        return "–"
    all_digits = 0.1 / np.finfo(dtype).eps
    return " · ".join(
        "**lost**" if w.units > all_digits else f"{w.units:.1f}" if w.units < 100 else f"{w.units:.0e}" for w in found
    )


def table(dtype: Any, points: int, cases: Sequence[Any]) -> str:
    """The operations in one dtype, in the order of their names."""
    lines = ["| operation | minigrad | torch | JAX | our worst at |", "|---|---|---|---|---|"]
    for case in sorted((case for case in cases if case.public), key=str):
        ours = measure(case, dtype, points)
        others = []
        for library in (by_torch, by_jax):
            try:
                numbers = library(case)
            except ImportError:
                numbers = None
            others.append(measure(case, dtype, points, numbers) if numbers else None)
        worst = max(ours, key=lambda w: w.units)
        where = ", ".join(f"{float(v):.4g}" for v in worst.point) or "–"
        print(case.title, cell(ours, dtype), flush=True)
        lines.append(
            f"| {case.title} | {cell(ours, dtype)} | {cell(others[0], dtype)} | {cell(others[1], dtype)} | {where} |"
        )
    return "\n".join(lines)


def page(points: int, cases: Sequence[Any] = CASES) -> str:
    """The whole page."""
    import torch

    try:
        import jax

        jax_version = f"JAX {jax.__version__}"
    except ImportError:
        jax_version = "no JAX"
    text = PAGE.format(points=points, torch=torch.__version__, jax=jax_version)
    for dtype in (np.float64, np.float32):
        text += f"## {dtype.__name__}\n\n{table(dtype, points, cases)}\n\n"
    return text + limits() + NOTES


def limits() -> str:
    """What is above 4 units."""
    text = "## Above 4 units, and why\n\n| operation | derivative | held to | why |\n|---|---|---|---|\n"
    return text + "".join(
        f"| {title} | {order} | {limit} | {why} |\n" for (title, order), (limit, why) in LIMITS.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=300, help="for each operation and dtype")
    (ROOT / "docs" / "accuracy.md").write_text(page(parser.parse_args().points))


NOTES = """
Beyond 4 units in tails of a factor, and not counted: silu, swiglu and gelu within a factor of about 100 of underflow,
where their weight is no normal number, and the second derivative of swiglu within a factor of 10 000 of overflow.
log_softmax and cross_entropy are differences of logarithms: a value next to 0 has the absolute error of the logits.

## What it costs

Forward and backward pass together, new time by old, the median of 5 to 9 pairs, old and new in turn in two processes of
one thread (an AMD EPYC or, for the rows marked *, an Intel Xeon with AVX-512, NumPy 2.4), on 10⁵ and 1000 normal random
numbers, in (-0.8, 0.8) for arcsin and arctanh. The old code is gone, so no command repeats it. Half a microsecond of
each run belongs to the engine: negative, whose rule did not change, has 1.02 to 1.04. What is not listed has at most
1.05 on 10⁵ numbers. Loops of float32 are compiled where numba is.

| operation | float64 | float32 | 1000 numbers | what is left, and its floor |
|---|---|---|---|---|
| expm1 * | 1.19 | 1.22 | 1.24 to 1.31 | e^x takes 51, 34 µs, x + 1 21, 8; a list of places no less |
| tanh * | 1.09 | 1.02 to 1.09 | 1.19 to 1.31 | cosh, square, quotient (134 µs) for 90 µs; NumPy in float32 1.4 |
| arctanh * | 1.08 to 1.15 | 0.74 | 1.15 to 1.28 | (1 - x)(1 + x) is one pass more than 1 - x² |
| arcsin | 1.04 to 1.06 | 1.05 | 1.00 | the same |
| gelu tanh * | 1.03 | 0.53 | 1.12, 0.82 | passes that the engine's small arrays feel |
| swiglu * | 1.02 | 0.62 | 1.03, 0.83 | NumPy in float32 1.07: a comparison, which tells whether any x is above 5.5 |
| layer_norm, rows of 250 * | 1.07 | 0.45 | 1.13, 0.83 | a look at the range of the squares |
| rms_norm; glu; mse_loss * | 1.04; 0.83; 1.03 | 0.51; 0.77; 0.92 | 0.84 to 1.05 | |
| softmax, log_softmax, rows of 250 | 0.98 to 1.02 | 0.97 to 0.99 | 0.89 to 0.92 | |
| the same, a weight above 0.9 in each row | 1.06 to 1.13 | 0.99 to 1.11 | 0.95 to 1.01 | 33 of 330 µs to find and sum |
| the same in rows of 10 | 1.22 to 1.35 | 1.09 to 1.43 | 0.83 to 0.98 | the list of places is a tenth of all numbers |
| cross_entropy, rows of 250; each target above 0.9 | 1.03; 1.08 to 1.10 | 0.99; 1.08 | 1.05; 1.08 | another sum |
| hypot, norm of order 3, cumprod | 1.00 to 1.02 | 0.99 to 1.03 | 1.06 to 1.12 | looking at the range of a sum, 5 µs |
| sigmoid; softplus | 0.55; 0.55 | 0.35; 0.42 | 1.05; 0.90 | one exponential |
| arctan; logaddexp | 0.06; 0.75 | 0.11; 0.73 | 0.7; 0.94 | no hypot |
| gelu | 0.73 | 1.02 | 0.93 to 1.05 | |
| Adam, AdamW, 4 × 10⁵ * | 0.94 to 0.98 | 0.96 to 1.06, loop 0.5 | 1.00 to 1.05 | 200 × 16: 1.00 to 1.13 |

In float32 a tail where e^-x overflows costs gelu's tanh form 2.3 of its time. A node of tanh or sigmoid keeps its
argument in place of its result, which in the tail does not tell the slope, one of expm1 both: a network that keeps the
result for the next layer as well holds one array more.
"""

if __name__ == "__main__":
    main()
