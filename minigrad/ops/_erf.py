"""The error function and the normal distribution on plain arrays, by rational approximations.

Fitted for this project by weighted least squares (Lawson's iteration) against 50-digit values of erf, of
``e^(x²) erfc(x)`` and of Mills' ratio ``e^(x²/2) Φ(-x)``; the forms are those of W. J. Cody, "Rational Chebyshev
approximations for the error function", Math. Comp. 23 (1969). Coefficients ascend; all are positive, so Horner's rule
loses no digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, array_module, is_half

# erf(x) = x P(x²) / Q(x²): |x| < 1 to 2e-18, and |x| < 3.92 to 2e-8, beyond which erf rounds to 1 in float32.
_NEAR = (
    (1.1283791670955126, 0.14214926446413845, 0.04530392418592541, 0.0018272955421703005, 0.0001949566442162174),
    (
        1.0,
        0.45930983893475735,
        0.09325283708716735,
        0.010582217455222715,
        0.0006812168540533248,
        2.0297501242298036e-05,
    ),
)
_SINGLE = (
    (
        1.128379146345171,
        0.190378237863637,
        0.0527449776513681,
        0.00376441729011019,
        0.000284857932837,
        2.0503244711e-06,
    ),
    (1.0, 0.502051065371162, 0.114097437164673, 0.0149667935447785, 0.00116224980395016, 3.80928936835768e-05),
)
# erf(x) = 1 - e^(-x²) P(x) / Q(x): 1 < x < 6 to 1e-18.
_FAR = (
    (0.9999998866093572, 1.3906579384656528, 0.9496213665566655, 0.37365956568419256, 0.08436819076678749,
     0.008933240235433102),
    (1.0, 2.519035911354576, 2.792055007763747, 1.7573539415139448, 0.6702706941679437, 0.14953482218318845,
     0.015833878420203493),
)  # fmt: skip
# Φ(-x) = e^(-x²/2) P(x) / Q(x): 0 < x < 40 to 6e-17, and 0 < x < 15 to 7e-9, beyond which it is 0 in float32.
_MILLS = (
    (0.5, 0.7754596417547668, 0.5948949467369606, 0.2899388541952488, 0.09797144980073728, 0.02370555400746833,
     0.004106968305549589, 0.0004929700278961494, 3.748593241384118e-05, 1.3960176034049324e-06),
    (1.0, 2.348803844312388, 2.5638642172055293, 1.7171049814009551, 0.7837537862073933, 0.25568471117196123,
     0.06064970636364494, 0.010388606165195486, 0.0012391919078535503, 9.39632980874628e-05, 3.4992971965868398e-06),
)  # fmt: skip
_MILLS_SINGLE = (
    (0.5000000031369922, 0.43926058326011647, 0.18395159635682132, 0.040875040395092904, 0.004152278756954567),
    (1.0, 1.676406172030717, 1.2054767500688388, 0.47136224829559514, 0.10246465335144998, 0.010408107567928154),
)


def erf(x: Array) -> Array:
    """Error function of each element: relative error below 1e-15 in float64, 4e-7 in float32.

    Half precision is computed in float32 and rounded once; integers give float64.

    >>> print(erf(np.array([-np.inf, 0.0, 1.0])).round(6))
    [-1.        0.        0.842701]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    if is_half(x.dtype):
        return erf(x.astype(np.float32)).astype(x.dtype)
    with np.errstate(under="ignore"):  # squares of tiny numbers, and the tail far out
        if x.dtype == np.float32:
            x = xp.clip(x, -3.92, 3.92)
            return xp.clip(x * _ratio(_SINGLE, x * x), -1, 1)
        x = xp.clip(x, -6.0, 6.0) * 1.0
        size, square = xp.abs(x), x * x
        tail = xp.exp(-square) * _ratio(_FAR, size)
        return xp.where(size < 1, x * _ratio(_NEAR, square), xp.copysign(1 - tail, x))


def normal(x: Array) -> Array:
    """Distribution function of the standard normal, ``Φ(x) = erfc(-x/√2) / 2``, exact in its lower tail too.

    >>> print(normal(np.array([-np.inf, 0.0, 1.0])).round(6))
    [0.       0.5      0.841345]
    """
    xp = array_module(x)
    x = xp.asarray(x)
    if is_half(x.dtype):
        return normal(x.astype(np.float32)).astype(x.dtype)
    return normal_by(gaussian_of(x), x)


def gaussian_of(x: Array) -> Array:
    """``e^(-x²/2)`` of each element, in silence; a new array."""
    xp = array_module(x)
    with np.errstate(over="ignore", under="ignore"):
        out = xp.asarray(x * x)
        out *= -0.5
        return xp.exp(out, out=out)


def normal_by(gaussian: Array, x: Array) -> Array:
    """Φ(x), given ``e^(-x²/2)``, in whose place it is written."""
    xp = array_module(x)
    single = x.dtype == np.float32
    out, size = gaussian, xp.asarray(xp.abs(x))
    zero = 15.0 if single else 40.0  # where the gaussian is 0; beyond it powers might overflow
    if xp is not np or not size.max(initial=0) <= zero:  # a NaN hides a maximum; to look takes a fifth of the time
        xp.minimum(size, zero, out=size)
    with np.errstate(under="ignore"):
        out *= _ratio(_MILLS_SINGLE if single else _MILLS, size)
    xp.subtract((x >= 0).astype(out.dtype), out, out=out)
    return xp.abs(out, out=out)  # |1 - Φ(-x)| or |0 - Φ(x)|; where() would take longer than all of this


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], t: Array) -> Any:
    """P(t) / Q(t)."""
    above, below = (_polynomial(c, t) for c in coefficients)
    above /= below
    return above


def _polynomial(coefficients: tuple[float, ...], t: Array) -> Any:
    value = coefficients[-1] * t
    for c in coefficients[-2:0:-1]:
        value += c
        value *= t
    value += coefficients[0]
    return value
