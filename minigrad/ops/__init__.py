"""The operations: tables of functions on arrays, each followed by its derivatives."""

from minigrad.ops.elementwise import *
from minigrad.ops.index import *
from minigrad.ops.linalg import *
from minigrad.ops.reduce import *
from minigrad.ops.shape import *
