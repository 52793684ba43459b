"""Second names of operations: the array API standard's, and NumPy's own. Each is the same object as the first."""

from __future__ import annotations

from minigrad.ops import elementwise, more_elementwise, piecewise, shape

# fmt: off
ALIASES = {
    # the array API's
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "concat": "concatenate", "pow": "power",
    # NumPy's
    "around": "round", "degrees": "rad2deg", "fabs": "absolute", "fix": "trunc", "mod": "remainder",
    "radians": "deg2rad", "rint": "round", "true_divide": "divide",
}
# fmt: on

__all__ = list(ALIASES)
_ORIGINALS = {
    name: value for table in (more_elementwise, elementwise, piecewise, shape) for name, value in vars(table).items()
}
globals().update({alias: _ORIGINALS[name] for alias, name in ALIASES.items()})
