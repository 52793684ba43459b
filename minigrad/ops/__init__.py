"""The operations: tables of functions on arrays, each followed by its derivatives.

``__init__.pyi`` has their signatures as a caller sees them; ``python tests/support/signatures.py`` writes it.
"""

from minigrad.ops import (
    aliases,
    averages,
    elementwise,
    index,
    joining,
    linalg,
    more_elementwise,
    piecewise,
    reduce,
    running,
    sampled,
    shape,
    windows,
)
from minigrad.ops.aliases import *
from minigrad.ops.averages import *
from minigrad.ops.elementwise import *
from minigrad.ops.index import *
from minigrad.ops.index import placed as placed
from minigrad.ops.index import plain_index as plain_index
from minigrad.ops.joining import *
from minigrad.ops.joining import from_nested as from_nested
from minigrad.ops.linalg import *
from minigrad.ops.more_elementwise import *
from minigrad.ops.piecewise import *
from minigrad.ops.piecewise import transfer as transfer
from minigrad.ops.piecewise import zeros_like as zeros_like
from minigrad.ops.reduce import *
from minigrad.ops.running import *
from minigrad.ops.sampled import *
from minigrad.ops.shape import *
from minigrad.ops.windows import *
from minigrad.ops.windows import add_windows as add_windows
from minigrad.ops.windows import spread_out as spread_out

# fmt: off
TABLES = (aliases, averages, elementwise, index, joining, linalg, more_elementwise, piecewise, reduce, running, sampled,
          shape, windows)
# fmt: on
__all__ = [name for table in TABLES for name in table.__all__]
