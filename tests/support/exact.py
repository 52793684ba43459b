"""What elementwise operations and their derivatives are to the last digit: formulas for SymPy, numbers from mpmath.

A reference is a formula; SymPy takes its derivatives, mpmath computes them with more and more digits until two
computations agree. So the oracle shares no rule, no rearrangement and no rounding with what it judges.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import sympy
from mpmath import mp

import minigrad as mg
import nn.functional
from support import exact_special

x, y = sympy.symbols("x y", real=True)


def _step(name: str, whole: Callable[[Any], Any]) -> Any:
    """A function made of steps, whose derivative is 0."""
    _WHOLE[name] = whole
    return type(name, (sympy.Function,), {"fdiff": lambda self, place=1: sympy.Integer(0)})


class _log1p(sympy.Function):  # type: ignore[misc]
    """ln(1 + x), which to any number of digits would be 0 for some small x."""

    def fdiff(self, place: int = 1) -> Any:
        return 1 / (1 + self.args[0])


_WHOLE: dict[str, Callable[[Any], Any]] = {**exact_special.NUMBERS, "_log1p": mpmath.log1p}
_floor = _step("floor_", mpmath.floor)
_ceil = _step("ceil_", mpmath.ceil)
_trunc = _step("trunc_", lambda v: mpmath.floor(v) if v >= 0 else mpmath.ceil(v))
_round = _step("round_", mpmath.nint)


def _pick(first: Any, condition: Any, second: Any) -> Any:
    return sympy.Piecewise((first, condition), (second, True))


def _settled(left: Any, formula: Any, right: Any, size: int = 3000) -> Any:
    """The formula, and what it is to a thousand digits far out on both sides, where mpmath would take minutes."""
    return sympy.Piecewise((left, x < -size), (right, x > size), (formula, True))


_zero = sympy.Integer(0)
_size = _pick(x, x > 0, -x)
_logistic = 1 / (1 + sympy.exp(-x))
_slope = sympy.sqrt(2 / sympy.pi)

FORMULAS: dict[str, Any] = {
    "absolute": _size,
    "add": x + y,
    "arccos": sympy.acos(x),
    "arccosh": sympy.log(x + sympy.sqrt(x - 1) * sympy.sqrt(x + 1)),
    "arcsin": sympy.asin(x),
    "arcsinh": sympy.asinh(x),
    "arctan": sympy.atan(x),
    "arctan2": sympy.atan2(x, y),
    "arctanh": sympy.log((1 + x) / (1 - x)) / 2,
    "cbrt": _pick(sympy.root(_size, 3), x > 0, -sympy.root(_size, 3)),
    "cbrt_slope": 1 / (3 * sympy.root(_size, 3) ** 2),
    "ceil": _ceil(x),
    "copysign": _pick(_size, y > 0, -_size),
    "cos": sympy.cos(x),
    "cosh": sympy.cosh(x),
    "divide": x / y,
    "erf": sympy.erf(x),
    "exp": sympy.exp(x),
    "exp2": 2**x,
    "expm1": sympy.exp(x) - 1,
    "floor": _floor(x),
    "fmax": _pick(x, x > y, y),
    "fmin": _pick(x, x < y, y),
    "fmod": x - y * _trunc(x / y),
    "gaussian": sympy.exp(-x * x),
    "gelu": _settled(_zero, x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2, x, 100),
    "gelu tanh": _settled(_zero, x / (1 + sympy.exp(-2 * _slope * (x + sympy.Rational(44715, 10**6) * x**3))), x, 100),
    "hypot": sympy.sqrt(x * x + y * y),
    "log": sympy.log(x),
    "log10": sympy.log(x) / sympy.log(10),
    "log1p": sympy.log(1 + x),
    "log2": sympy.log(x) / sympy.log(2),
    "logaddexp": sympy.Piecewise((y, y - x > 3000), (x, x - y > 3000), (x + _log1p(sympy.exp(y - x)), True)),
    "logaddexp2": sympy.Piecewise(
        (y, y - x > 4300), (x, x - y > 4300), (x + _log1p(2 ** (y - x)) / sympy.log(2), True)
    ),
    "maximum": _pick(x, x > y, y),
    "minimum": _pick(x, x < y, y),
    "multiply": x * y,
    "nan_to_num": x,
    "negative": -x,
    "normal_density": sympy.exp(-x * x / 2) / sympy.sqrt(2 * sympy.pi),
    "normal_distribution": _settled(_zero, (1 + sympy.erf(x / sympy.sqrt(2))) / 2, sympy.Integer(1), 100),
    "one_minus_square": 1 - x * x,
    "over_cosh_square": sympy.Piecewise((_zero, _size.subs(x, y) > 3000), (x / sympy.cosh(y) ** 2, True)),
    "over_one_plus_square": x / (1 + y * y),
    "power": x**y,
    "reciprocal": 1 / x,
    "relu": _pick(x, x > 0, _zero),
    "remainder": x - y * _floor(x / y),
    "root_one_minus_square": sympy.sqrt((1 - x) * (1 + x)),
    "round": _round(x),
    "share": sympy.Piecewise((_zero, y - x > 3000), (1, x - y > 3000), (1 / (1 + sympy.exp(y - x)), True)),
    "sigmoid": _settled(_zero, _logistic, sympy.Integer(1)),
    "sign": _pick(sympy.Integer(1), x > 0, sympy.Integer(-1)),
    "silu": _settled(_zero, x * _logistic, x),
    "sin": sympy.sin(x),
    "sinc": sympy.sin(sympy.pi * x) / (sympy.pi * x),
    "sinc_slope": sympy.diff(sympy.sin(sympy.pi * x) / (sympy.pi * x), x),
    "sinh": sympy.sinh(x),
    "softplus": _settled(_zero, sympy.log(1 + sympy.exp(x)), x),
    "sqrt": sympy.sqrt(x),
    "square": x * x,
    "subtract": x - y,
    "swiglu": _settled(_zero, x * _logistic * y, x * y),
    "tan": sympy.tan(x),
    "tanh": _settled(sympy.Integer(-1), sympy.tanh(x), sympy.Integer(1)),
    "trunc": _trunc(x),
    "where": x,
    **exact_special.FORMULAS,
}


def _weight_is_normal(weight: Callable[[Any], Any]) -> Callable[..., Any]:
    """Where x · weight(x) has digits at all: a weight below the normal numbers has lost them before x comes."""
    return lambda x, *_: weight(x.astype(float)) >= np.finfo(x.dtype).smallest_normal * 2


def _tail(x: Any) -> Any:
    """A bound from below of Φ(x) for negative x."""
    low = np.clip(x, -1e3, 0)
    return np.exp(-0.5 * low**2) / (3 - 3 * low)


def _tanh_tail(x: Any) -> Any:
    """The same of its approximation by tanh, and of its slope for both signs."""
    low = -np.minimum(abs(x), 1e2)
    return np.exp(1.6 * (low + 0.0448 * low**3)) / 4


DOMAIN = {  # where a formula is meant; elsewhere everywhere
    **dict.fromkeys(["arccos", "arcsin", "arctanh", "root_one_minus_square"], lambda x: abs(x) < 1),
    "arccosh": lambda x: x > 1,
    **dict.fromkeys(["log", "log2", "log10", "sqrt"], lambda x: x > 0),
    "log1p": lambda x: x > -1,
    "gelu": _weight_is_normal(_tail),
    "gelu tanh": _weight_is_normal(_tanh_tail),
    "silu": _weight_is_normal(lambda x: np.exp(-abs(x)) / 4),
    "swiglu": lambda x, y: _weight_is_normal(lambda x: np.exp(-abs(x)) / 4)(x) & (abs(y) < np.finfo(y.dtype).max / 1e4),
    "over_cosh_square": lambda x, y: abs(y) < 40,  # of which the square is a float32
    "power": lambda x, y: x > 0,
    "arctan2": lambda x, y: (x != 0) | (y > 0),
    **exact_special.DOMAIN,
}
DIGITS = (100, 250, 1300, 2600)  # bits, tried in turn


@functools.cache
def _function(name: str, orders: tuple[int, ...]) -> Callable[..., Any]:
    """The derivative of that order in each argument, on numbers of mpmath."""
    formula = FORMULAS[name]
    for symbol, order in zip((x, y), orders, strict=False):
        formula = sympy.diff(formula, symbol, order) if order else formula
    return sympy.lambdify((x, y)[: len(orders)], formula, modules=[_WHOLE, "mpmath"])


@functools.lru_cache(100_000)
def exact(name: str, orders: tuple[int, ...], point: tuple[Any, ...]) -> Any:
    """That derivative at a point to 60 bits at least; None where it isn't a real, finite number."""
    function, before = _function(name, orders), None
    for bits in DIGITS:
        with mp.workprec(bits):
            try:
                value = mp.mpmathify(function(*map(mp.mpf, point)))
            except (ValueError, ZeroDivisionError, OverflowError):
                return None
            if isinstance(value, mpmath.mpc):
                if value.imag:
                    return None
                value = value.real
            if before is not None and value and abs(value - before) <= abs(value) * mp.mpf(2) ** -60:
                return value if mp.isfinite(value) else None
            before = value
    return before if mp.isfinite(before) else None


# ---- points ----------------------------------------------------------------------------------------------------------


def points(name: str, dtype: Any, count: int, arguments: int, seed: int = 0) -> list[np.ndarray]:
    """Numbers of the domain, for each argument an array: over the whole range evenly in the exponent, both signs.

    A third each are spread over all exponents, over those near 0, where most functions live, and towards ±1.
    """
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)

    def some(n: int, low: float, high: float) -> Any:
        return np.exp2(rng.uniform(low, high, n)) * rng.choice([-1, 1], n)

    def line() -> Any:
        far, near, at_one = some(count, info.minexp, info.maxexp), some(count, -8, 10), some(count, -info.nmant, 0)
        kinds = rng.integers(0, 3, count)
        return np.choose(kinds, [far, near, np.sign(at_one) - at_one])

    found = [line().astype(dtype) for _ in range(arguments)]
    if arguments == 2:  # half of the pairs are of one size
        found[1] = np.where(rng.random(count) < 0.5, found[1], found[0] * some(count, -4, 4)).astype(dtype)
    inside = np.all([np.isfinite(a) & (np.abs(a) >= info.smallest_normal) for a in found], axis=0)
    if name in DOMAIN:
        inside &= DOMAIN[name](*found)
    return [a[inside] for a in found]


# ---- errors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worst:
    """The largest error of a function, in units in the last place, and where that is."""

    units: float = 0.0
    point: tuple[float, ...] = ()
    got: float = 0.0
    right: float = 0.0
    count: int = 0  # of the numbers that were compared


def _near(orders: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The derivatives of a derivative."""
    return [tuple(n + (k == place) for k, n in enumerate(orders)) for place in range(len(orders))]


def _units(name: str, orders: tuple[int, ...], point: tuple[float, ...], got: float, dtype: Any) -> Any:
    """The error of ``got``, in units, and the right number; None where that is no normal number of the dtype.

    What half a unit of the arguments explains is taken off an error above one unit. Near a root, which one Newton step
    finds, the unit is the effect of a unit of the arguments where that is larger than one in the last place.
    """
    info = np.finfo(dtype)
    right, value = exact(name, orders, point), exact(name, (0,) * len(orders), point)
    if right is None or value is None or not _is_normal(right, info) or not _is_normal(value, info, or_zero=True):
        return None
    unit = mp.mpf(float(np.spacing(dtype(abs(right)))))
    if not np.isfinite(got):
        return np.inf, right
    error = abs(mp.mpf(float(got)) - right)
    if error <= unit:
        return float(error / unit), right
    move, root = mp.mpf(0), False
    for place, (v, slope) in enumerate(zip(point, (exact(name, k, point) for k in _near(orders)), strict=True)):
        if slope:
            move += abs(slope) * mp.mpf(float(np.spacing(dtype(abs(v)))))
            if abs(right) <= abs(slope * v) and not root:
                beyond = tuple(mp.mpf(u) - (2 * right / slope if k == place else 0) for k, u in enumerate(point))
                there = exact(name, orders, beyond)
                root = there is not None and there * right <= 0
    return float(max(error - move / 2, mp.mpf(0)) / (max(unit, move) if root else unit)), right


def _is_normal(value: Any, info: Any, or_zero: bool = False) -> bool:
    size = abs(value)
    return bool(float(info.smallest_normal) <= size <= float(info.max)) or (or_zero and value == 0)


def worst(name: str, orders: tuple[int, ...], inputs: Sequence[np.ndarray], got: np.ndarray, skip: Any = None) -> Worst:
    """The worst of the numbers ``got`` for this derivative at these inputs."""
    found, count = Worst(), 0
    dtype = inputs[0].dtype.type
    for k, value in enumerate(got):
        point = tuple(float(a[k]) for a in inputs)
        judged = None if skip is not None and skip[k] else _units(name, orders, point, float(value), dtype)
        if judged is not None:
            count += 1
            if judged[0] > found.units:
                found = Worst(judged[0], point, float(value), float(judged[1]))
    return Worst(found.units, found.point, found.got, found.right, count)


def derivatives(arguments: int) -> list[list[tuple[int, ...]]]:
    """The orders of value, first and second derivatives: [[(0,)], [(1,)], [(2,)]] for one argument."""
    every = list(itertools.product(range(3), repeat=arguments))
    return [[orders for orders in every if sum(orders) == total] for total in range(3)]


# ---- the operations --------------------------------------------------------------------------------------------------

WITHOUT_FORMULA = {"broadcast_to", "gammasgn", "isfinite", "isinf", "isnan"}  # they compute no number
ONE_ARGUMENT = {"ceil", "nan_to_num", "round", "sign", "where"}  # the others are no numbers to differentiate by
EXTRAS: dict[str, tuple[Any, ...]] = {"gelu tanh": ("tanh",), "sinc_slope": (1,), **exact_special.EXTRAS}


@dataclass(frozen=True)
class Case:
    """An elementwise operation, with a further argument where it has forms."""

    title: str

    def __str__(self) -> str:
        return self.title

    @property
    def name(self) -> str:
        return self.title.split()[0]

    @property
    def arguments(self) -> int:
        return 1 if self.name in ONE_ARGUMENT else len(FORMULAS[self.title].free_symbols)

    @property
    def public(self) -> bool:
        """Whether users call it; the others are slopes, of which the derivative is the second of somebody."""
        return any(hasattr(module, self.name) for module in (mg, mg.special, nn.functional))

    def __call__(self, *arrays: Any) -> Any:
        operation = mg.REGISTRY[self.name]
        if self.name == "where":
            return operation(True, *arrays, 0.0)
        return operation(*exact_special.LEADING.get(self.title, ()), *arrays, *EXTRAS.get(self.title, ()))

    def numbers(self, inputs: Sequence[np.ndarray]) -> dict[tuple[int, ...], np.ndarray]:
        """Value and derivatives at the inputs, by their orders in the arguments."""
        leaves = [mg.Tensor(a, requires_grad=True) for a in inputs]
        unit = np.eye(len(inputs), dtype=int)
        with np.errstate(all="ignore"):
            out = self(*leaves)
            found = {(0,) * len(inputs): out.data}
            firsts = mg.grad(self(*leaves).sum(), leaves, create_graph=True)
            for i, (g, first) in enumerate(zip(mg.grad(out.sum(), leaves), firsts, strict=True)):
                found[tuple(unit[i])] = g.data
                seconds: Any = [None] * len(leaves)
                if first.requires_grad:
                    seconds = mg.grad(first.sum(), leaves, retain_graph=True, allow_unused=True)
                for j in range(i, len(leaves)):
                    g = seconds[j]
                    found[tuple(unit[i] + unit[j])] = np.zeros_like(inputs[0]) if g is None else g.data
        return found


CASES = [Case(title) for title in FORMULAS]
_MAGNIFIED = "e^u magnifies by u the rounding of u, a cubic of four roundings; half a unit of x explains three of them"
LIMITS: dict[tuple[str, int], tuple[float, str]] = {  # above 4 units, by order of the derivative, and why
    ("arctan", 2): (6, "1 + x², rounded twice, is divided by twice"),
    ("arctan2", 2): (6, "the radius, rounded, is divided by four times"),
    ("gelu tanh", 0): (8, _MAGNIFIED),
    ("gelu tanh", 1): (8, _MAGNIFIED),
    ("gelu tanh", 2): (16, _MAGNIFIED),
    **exact_special.LIMITS,
}


def measure(case: Case, dtype: Any, count: int, numbers: Any = None) -> list[Worst]:
    """The worst of value, first and second derivatives over ``count`` points; ``numbers`` are another library's."""
    inputs = points(case.title, dtype, count, case.arguments)
    found = (numbers or case.numbers)(inputs)
    orders = derivatives(case.arguments)[: None if case.public else 2]
    return [max((worst(case.title, o, inputs, found[o]) for o in group), key=lambda w: w.units) for group in orders]
