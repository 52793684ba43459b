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

Forward and backward pass together, new time by old: before the rules of this page, at `d895bf7`, and now, in turn in
two processes of one thread, the median of 9 pairs on 10⁵ normal random numbers, in (-0.8, 0.8) for arcsin and arctanh
(an AMD EPYC with AVX-512, NumPy 2.4): `git worktree add /tmp/old d895bf7`, then `python benchmarks/op_cost.py /tmp/old
.`, with `MINIGRAD_COMPILED=0` for float32 by NumPy. The goal is 1.05. On 1000 numbers all have 0.4 to 1.05, but for
layer_norm by NumPy, 1.07: the engine's own calls became faster.

| operation | float64 | float32, NumPy | float32, loop |
|---|---|---|---|
| expm1; arguments down to -5 | 1.14 to 1.21; 1.3 | 1.04 to 1.42; 1.1 to 1.42 | 1.00; 0.99 to 1.06 |
| tanh | 1.31 to 1.33 | 1.21 to 1.27 | 1.02 to 1.05 |
| arctanh; arcsin; arccos | 1.00; 1.04; 0.98 | 0.93; 0.98; 0.97 | 0.72; 0.96; 0.95 |
| sigmoid; softplus; arctan | 0.44; 0.47; 0.05 | 0.26; 0.32; 0.10 | 0.25; 0.34; 0.10 |
| gelu; its tanh form; silu; swiglu | 0.65; 0.97; 0.98; 1.00 | 0.96; 0.99; 0.95; 1.01 | 0.29; 0.51; 0.64; 0.55 |
| softmax, rows of 10; of 250 | 0.90; 0.98 | 0.85; 0.96 | 0.62; 0.64 |
| the same, a weight above 0.9 in each row | 1.09; 1.08 | 1.04; 1.08 | 0.71; 0.76 |
| log_softmax, rows of 10; of 250 | 0.95; 0.95 | 0.93; 0.94 | 0.73; 0.67 |
| the same, a weight above 0.9 in each row | 1.08 to 1.11; 1.02 | 1.09 to 1.11; 1.03 | 0.82; 0.75 |
| cross_entropy, rows of 250; each target above 0.9 | 0.96; 1.04 | 1.01; 1.05 | 0.89; 0.92 |
| layer_norm; rms_norm, rows of 250 | 1.02 to 1.06; 1.02 | 0.96 to 1.05; 0.99 | 0.46; 0.52 |
| hypot | 0.99 | 0.96 | 0.91 |
| AdamW of 4 × 10⁵; gradients of 1e-21 | 1.01; 1.03 | 1.03; 1.02 | 0.33; 0.29 |
| AdamW of 200 × 16; gradients of 1e-21 | 0.97; 0.98 | 1.01; 1.01 | 0.74; 0.72 |

What is left above 1.05 are passes of NumPy without which the numbers would not be right, measured one by one, in µs:

- tanh: in the tail 1 - tanh² is noise, and a sixth of all normal numbers are in it. tanh, cosh and one quotient alone
  take 159 (float32: 51), tanh and the old rule 138 (43): 1.16 (1.17) is the floor of any rule by cosh. An exponential
  takes as long as cosh.
- expm1: of 104 (float32: 47) a comparison takes 9 (5), the list of places where result + 1 is noise 12 (12), e^x there
  2 (4): 1.21 (1.45). e^x everywhere takes more where the places are few; a sample says whether they are.
- softmax beside a weight above 0.9, rows of 10: a comparison, a list of places, a tenth of all numbers, and the sums of
  the rows take 57 of 260, of which half is gained elsewhere. Rows of 250: 26 of 240.

In float32 a tail where e^-x overflows costs gelu's tanh form 2.3 of its time. A node of tanh or sigmoid keeps its
argument in place of its result, which in the tail does not tell the slope, one of expm1 both: a network that keeps the
result for the next layer as well holds one array more.
"""

if __name__ == "__main__":
    main()
