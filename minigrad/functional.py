"""Transforms of functions: gradients, products with Jacobians and Hessians, recomputation to save memory.

Each takes a function of Tensors (or arrays) and works on fresh leaves, so nothing is left in anybody's ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backward import grad
from minigrad.errors import ArgumentError, GraphError, ShapeError
from minigrad.recording import enable_grad
from minigrad.tensor import Tensor, asarray
