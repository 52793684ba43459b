"""What the special functions are to the last digit: formulas for ``exact.py``, which measures operations by them."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import sympy
from mpmath import mp
from sympy import Rational, besseli, besselj, bessely, digamma, exp, gamma, log, loggamma, polygamma, sqrt

x, y = sympy.symbols("x y", real=True)
_root_pi = sqrt(sympy.pi)


def _inverse_of_erfc(v: Any) -> Any:
    """By Newton's method on the logarithm of erfc, which is nearly a parabola; v in (0, 1]."""
    if v > 1:
        return -_inverse_of_erfc(2 - v)
    start = mp.sqrt(-mp.log(v)) if v < 0.3 else (1 - v) * mp.sqrt(mp.pi) / 2
    return mpmath.findroot(lambda t: mp.log(mpmath.erfc(t)) - mp.log(v), start, tol=mp.mpf(2) ** (-2 * mp.prec + 20))


class erfcinv_(sympy.Function):
    """The inverse of erfc, which SymPy can't print for mpmath."""

    def fdiff(self, place: int = 1) -> Any:
        return -_root_pi / 2 * exp(self**2)


class betainc_(sympy.Function):
    """``I(5/2, 3/2, x)``: SymPy's has no derivative in closed form, and mpmath's fails near 1."""

    def fdiff(self, place: int = 1) -> Any:
        return self.args[0] ** Rational(3, 2) * sqrt(1 - self.args[0]) * 16 / sympy.pi


class student_(sympy.Function):
    """The distribution function of Student's t with 3 degrees of freedom; closed, but it cancels in the tail."""

    def fdiff(self, place: int = 1) -> Any:
        return 2 / (sympy.pi * sqrt(3) * (1 + self.args[0] ** 2 / 3) ** 2)


def _student(v: Any) -> Any:
    u = v / mp.sqrt(3)
    return (mp.atan(u) + u / (1 + u * u)) / mp.pi + mp.mpf(1) / 2


def _betainc(v: Any) -> Any:
    low, a, b = (v, 2.5, 1.5) if v < 0.5 else (1 - v, 1.5, 2.5)
    part = mpmath.betainc(a, b, 0, low) * 16 / mp.pi
    return part if v < 0.5 else 1 - part


NUMBERS = {"betainc_": _betainc, "student_": _student, "erfcinv_": _inverse_of_erfc}


def _tail(n: int) -> Any:
    """``e^(x²) iⁿerfc(x)`` by its recurrence, which loses digits, of which there are enough."""
    below, value = 2 / _root_pi, exp(x * x) * sympy.erfc(x)
    for k in range(1, n + 1):
        below, value = value, (below - 2 * x * value) / (2 * k)
    return value


_beta = exp(loggamma(x) + loggamma(y) - loggamma(x + y))
_half = Rational(5, 2)
FORMULAS: dict[str, Any] = {
    "bessel J2": besselj(2, x),
    "bessel I2": besseli(2, x),
    "beta": _beta,
    "betainc": betainc_(x),
    "betaln": loggamma(x) + loggamma(y) - loggamma(x + y),
    "decaying 0": exp(-x) * besseli(0, x),
    "digamma": digamma(x),
    "entr": -x * log(x),
    "erfc": sympy.erfc(x),
    "erfcinv": erfcinv_(x),
    "erfcx": _tail(0),
    "erfinv": erfcinv_(1 - x),
    "gamma": gamma(x),
    "gammainc": sympy.lowergamma(_half, x) / gamma(_half),
    "gammaincc": sympy.uppergamma(_half, x) / gamma(_half),
    "gammaln": loggamma(x),
    "i0": besseli(0, x),
    "i0e": exp(-x) * besseli(0, x),
    "i1": besseli(1, x),
    "i1e": exp(-x) * besseli(1, x),
    "ive_slope": exp(-x) * besseli(_half, x),
    "iv": besseli(_half, x),
    "ive": exp(-x) * besseli(_half, x),
    "j0": besselj(0, x),
    "j1": besselj(1, x),
    "jn": besselj(3, x),
    "log_ndtr": log(sympy.erfc(-x / sqrt(2)) / 2),
    "logit": log(x / (1 - x)),
    "ndtr": sympy.erfc(-x / sqrt(2)) / 2,
    "ndtri": -sqrt(2) * erfcinv_(2 * x),
    "polygamma 0": digamma(x),
    "polygamma 1": polygamma(1, x),
    "rgamma": 1 / gamma(x),
    "polygamma_step 0": digamma(x + y) - digamma(x),
    "polygamma_step 1": polygamma(1, x + y) - polygamma(1, x),
    "rel_entr": x * log(x / y),
    "scaled_tail 1": _tail(1),
    "stdtr": student_(x),
    "xlog1py": x * log(1 + y),
    "xlogy": x * log(y),
    "y0": bessely(0, x),
    "y1": bessely(1, x),
    "yn": bessely(3, x),
    "zeta": sympy.zeta(_half, x),
}
LEADING: dict[str, tuple[Any, ...]] = {  # arguments before the one that varies
    "betainc": (2.5, 1.5), "jn": (3,), "polygamma 0": (0,), "polygamma 1": (1,), "stdtr": (3,), "yn": (3,),
    **dict.fromkeys(["gammainc", "gammaincc", "iv", "ive", "ive_slope", "zeta"], (2.5,)),
}  # fmt: skip
EXTRAS: dict[str, tuple[Any, ...]] = {  # and behind it
    "bessel J2": (2, -1), "bessel I2": (2, 1), "decaying 0": (0,), "polygamma_step 0": (0,), "polygamma_step 1": (1,),
    "ive_slope": (0,), "scaled_tail 1": (1,),
}  # fmt: skip


def _between(low: float, high: float) -> Any:
    return lambda *arrays: np.all([(a > low) & (a < high) for a in arrays], axis=0)


DOMAIN: dict[str, Any] = {
    **dict.fromkeys(["entr", "rel_entr"], _between(0, np.inf)),
    **dict.fromkeys(["logit", "ndtri", "betainc"], _between(0, 1)),
    "erfinv": _between(-1, 1),
    "erfcinv": _between(0, 2),
    "xlogy": lambda x, y: y > 0,
    "xlog1py": lambda x, y: y > -1,
    **dict.fromkeys(["gammaln", "digamma", "polygamma 0", "polygamma 1"], _between(0, 1e15)),
    **dict.fromkeys(["gamma", "rgamma", "zeta"], _between(1e-30, 170)),
    **dict.fromkeys(["beta"], _between(1e-4, 1e3)),
    **dict.fromkeys(["betaln", "polygamma_step 0", "polygamma_step 1"], _between(1e-8, 1e6)),
    **dict.fromkeys(["gammainc", "gammaincc"], _between(1e-10, 700)),
    **dict.fromkeys(["i0", "i1", "iv", "bessel I2"], _between(1e-8, 300)),
    **dict.fromkeys(["i0e", "i1e", "ive", "ive_slope", "decaying 0"], _between(1e-8, 1e3)),
    **dict.fromkeys(["j0", "j1", "jn", "y0", "y1", "yn", "bessel J2"], _between(1e-8, 60)),
    **dict.fromkeys(["erfcx", "scaled_tail 1"], _between(-20, 1e3)),
    "stdtr": _between(-1e6, 1e6),
    **dict.fromkeys(["erfc", "ndtr"], _between(-30, 40)),
    "log_ndtr": _between(-1e3, 37),
}
_OWN = "SciPy's own error"
_NEAR = f"{_OWN} at the neighbouring orders"
_EXPONENT = "e^u magnifies the rounding of u, a sum of logarithms, by its terms"
_QUADRATURE = "a sum of 68 rounded exponentials"
_CIRCLE = "a sum of 33 rounded exponentials"
_ORDERS = "a difference of functions of neighbouring orders, up to the z from which the series in 1/z is exact"
LIMITS: dict[tuple[str, int], tuple[float, str]] = {  # about twice the worst of 800 points
    ("bessel I2", 1): (20, _NEAR),
    ("beta", 0): (1000, _EXPONENT),
    ("beta", 1): (1000, "the value is a factor"),
    ("beta", 2): (5000, "the mixed derivative is 2 ζ(3) at 0, a difference of terms as large as the value"),
    ("betainc", 0): (14, _OWN),
    ("betainc", 1): (1000, _EXPONENT),
    ("betainc", 2): (1000, _EXPONENT),
    ("betaln", 0): (8, "a sum of logarithms"),
    ("decaying 0", 0): (10, _CIRCLE),
    ("decaying 0", 1): (15, _CIRCLE),
    ("erfc", 0): (15, _OWN),
    ("erfcinv", 0): (8, _OWN),
    ("erfcinv", 1): (20, "SciPy's erfcx is a factor"),
    ("erfcinv", 2): (20, "SciPy's erfcx is a factor"),
    ("erfcx", 0): (12, _OWN),
    ("erfcx", 1): (20, _QUADRATURE),
    ("erfcx", 2): (20, _QUADRATURE),
    ("erfinv", 1): (20, "SciPy's erfcx is a factor"),
    ("erfinv", 2): (20, "SciPy's erfcx is a factor"),
    ("gamma", 2): (10, "SciPy's gamma and digamma are factors"),
    ("gammainc", 0): (40, _OWN),
    ("gammainc", 1): (100, _EXPONENT),
    ("gammainc", 2): (100, _EXPONENT),
    ("gammaincc", 0): (30, _OWN),
    ("gammaincc", 1): (100, _EXPONENT),
    ("gammaincc", 2): (100, _EXPONENT),
    ("gammaln", 0): (12, _OWN),
    ("gammaln", 2): (8, f"{_OWN} in zeta"),
    ("i0", 0): (6, _OWN),
    ("i0", 1): (20, f"{_OWN} in i1"),
    ("i0", 2): (20, f"{_OWN} in i0 and i1"),
    ("i0e", 0): (10, _OWN),
    ("i0e", 1): (15, _CIRCLE),
    ("i0e", 2): (10, _CIRCLE),
    ("i1", 0): (12, _OWN),
    ("i1", 1): (20, f"{_OWN} in i0 and i1"),
    ("i1", 2): (20, f"{_OWN} in i0 and i1"),
    ("i1e", 0): (14, _OWN),
    ("i1e", 1): (30, _CIRCLE),
    ("i1e", 2): (30, _CIRCLE),
    ("iv", 0): (8, _OWN),
    ("iv", 1): (8, _NEAR),
    ("iv", 2): (10, _NEAR),
    ("ive", 0): (15, "SciPy's iv times an exponential"),
    ("ive", 1): (600, _ORDERS),
    ("ive", 2): (30000, _ORDERS),
    ("ive_slope", 0): (15, "SciPy's iv times an exponential"),
    ("ive_slope", 1): (600, _ORDERS),
    ("jn", 0): (35, _OWN),
    ("jn", 1): (12, _NEAR),
    ("jn", 2): (8, _NEAR),
    ("log_ndtr", 0): (8, f"{_OWN}, in the lower tail"),
    ("log_ndtr", 1): (12, "SciPy's erfcx is a factor"),
    ("log_ndtr", 2): (32, _QUADRATURE),
    ("ndtr", 0): (8, "SciPy's erfcx is a factor"),
    ("ndtri", 1): (20, "SciPy's erfcx is a factor"),
    ("ndtri", 2): (20, "SciPy's erfcx is a factor"),
    ("rgamma", 2): (30, "SciPy's gamma and digamma are factors"),
    ("scaled_tail 1", 0): (20, _QUADRATURE),
    ("scaled_tail 1", 1): (20, _QUADRATURE),
    ("stdtr", 0): (20, _OWN),
    ("stdtr", 1): (50, _EXPONENT),
    ("stdtr", 2): (50, _EXPONENT),
    ("y0", 0): (8, _OWN),
    ("y0", 1): (8, f"{_OWN} in y1"),
    ("y0", 2): (40, f"{_OWN} in y0 and y1"),
    ("y1", 0): (8, _OWN),
    ("y1", 1): (40, f"{_OWN} in y0 and y1"),
    ("y1", 2): (8, f"{_OWN} in y0 and y1"),
    ("yn", 0): (8, _OWN),
    ("yn", 2): (50, _NEAR),
    ("zeta", 1): (8, _OWN),
}
OWN = [title for (title, order), (_, why) in LIMITS.items() if order == 0 and why == _OWN]  # values that are SciPy's
