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


def table(dtype: Any, points: int) -> str:
    """The operations in one dtype, in the order of their names."""
    lines = ["| operation | minigrad | torch | JAX | our worst at |", "|---|---|---|---|---|"]
    for case in sorted((case for case in CASES if case.public), key=str):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=300, help="for each operation and dtype")
    points = parser.parse_args().points
    import torch

    try:
        import jax

        jax_version = f"JAX {jax.__version__}"
    except ImportError:
        jax_version = "no JAX"
    text = PAGE.format(points=points, torch=torch.__version__, jax=jax_version)
    for dtype in (np.float64, np.float32):
        text += f"## {dtype.__name__}\n\n{table(dtype, points)}\n\n"
    text += "## Above 4 units, and why\n\n| operation | derivative | held to | why |\n|---|---|---|---|\n"
    for (title, order), (limit, why) in LIMITS.items():
        text += f"| {title} | {order} | {limit} | {why} |\n"
    (ROOT / "docs" / "accuracy.md").write_text(text + NOTES)


NOTES = """
Beyond 4 units in tails of a factor, and not counted: silu, swiglu and gelu within a factor of about 100 of underflow,
where their weight is no normal number, and the second derivative of swiglu within a factor of 10 000 of overflow.
log_softmax and cross_entropy are differences of logarithms: a value next to 0 has the absolute error of the logits.

## What it costs

Forward and backward pass together, new time by old, on 10⁵ normal random numbers, the least of some tens to hundreds of
runs, old and new in turn in two processes of one thread (an Intel Xeon with AVX-512, NumPy 2.4; others used the machine
too, so that a twentieth is noise). The old code is gone, so no command repeats it. 10 µs of each new run belong to the
engine: negative, whose rule did not change, has 1.07 and 1.19, by which the others are to be judged.

| operation | float64 | float32 | the likely reason |
|---|---|---|---|
| expm1 | 1.20 | 1.58 | an exponential, 0.7 and 0.45 ns, in place of a sum; to pick the lower tail alone takes longer |
| tanh | 0.87 | 1.26 | cosh or sinh in place of a square: in the tail tanh x alone does not tell 1 - tanh² x |
| gelu | 0.66 | 1.04 | value and slope share an exponential, in the forward pass |
| gelu tanh | 1.07 | 1.13 | the same; more arrays in the cache at once |
| silu | 0.98 | 1.02 | the same |
| swiglu | 1.06 | 1.14 | a maximum, which tells whether any x is above 4.5 |
| arcsin, arctanh | 1.11 | 0.82 to 1.18 | one pass more over the numbers |
| arccos | 0.96 | 0.99 | |
| softmax, rows of 250; of 10 | 1.10; 1.05 | 1.13; 0.93 | a maximum, which tells whether any weight is above 0.9 |
| the same, each row with such a weight | 1.31; 1.49 | 1.40; 1.63 | a search for it and another subtraction |
| log_softmax, rows of 250; of 10 | 1.07; 1.05 | 1.16; 0.94 | as softmax |
| the same, each row with such a weight | 1.10; 1.34 | 1.18; 1.63 | a search for it and another sum |
| cross_entropy, rows of 250; of 10 | 1.00; 1.03 | 1.12; 0.95 | |
| the same, each target above 0.9 | 1.16; 1.05 | 1.03 for rows of 10 | another sum |
| sigmoid | 0.71 | 0.52 | no where() |
| power, arctan2, hypot, fmod | 0.94 to 1.04 | 0.97 to 1.02 | measured before the above |
| softplus, logaddexp, arctan, divide | 0.08 to 0.84 | 0.27 to 0.81 | the same |

On 10⁶ numbers tanh has 0.81 and 1.05, arcsin 0.86 and 1.01, arctanh 0.73 and 1.12. In float32 a tail where e^-x
overflows costs gelu's tanh form 2.3 of its time. A node of tanh, sigmoid or expm1 keeps its argument in place of its
result, which in the tail does not tell the slope: a network that keeps the result for the next layer as well holds one
array more.
"""

if __name__ == "__main__":
    main()
