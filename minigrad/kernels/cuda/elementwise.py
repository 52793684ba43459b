"""The activations on a GPU. The NumPy pair keeps σ or the slope for the backward pass; these compute it again."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import Array, array_module
from minigrad.kernels.cuda.launching import THREADS, grid_for, launch, pack_of, uniform
from minigrad.kernels.gelu import gelu, is_exact
from minigrad.kernels.relu import relu
from minigrad.kernels.swiglu import silu, swiglu


def _each(name: str, *arrays: Array, results: int = 1, options: tuple[Any, ...] = ()) -> tuple[Array, ...]:
    """The results of the kernel ``name``, which takes each element of arrays of one shape."""
    xp = array_module(*arrays)
    given = [xp.ascontiguousarray(array) for array in arrays]
    outs = [xp.empty(arrays[0].shape, arrays[0].dtype) for _ in range(results)]
    size = outs[0].size
    if size:
        pack = pack_of(size, *given, *outs)
        launch("elementwise.cu", name, outs[0], pack, grid_for(size, pack), THREADS, *given, *outs, size, *options)
    return tuple(outs)


def _exactly(approximate: str) -> tuple[Any, ...]:
    return (int(is_exact(approximate)),)


def _swiglu_backward(g: Array, gate: Array, up: Array, sigma: None, needs: tuple[bool, bool]) -> tuple[Any, Any]:
    dgate, dup = _each("swiglu_backward", g, gate, up, results=2)
    return dgate, dup


relu.defgpu(lambda x: (_each("relu", x)[0], {}), lambda g, x: _each("relu_backward", g, x), uniform)
silu.defgpu(
    lambda x, needs=(): (_each("silu", x)[0], {"slopes": None}),
    lambda g, x, slopes: _each("silu_backward", g, x),
    uniform,
)
swiglu.defgpu(
    lambda gate, up: (_each("swiglu", gate, up)[0], {"sigma": None}),
    _swiglu_backward,
    lambda gate, up: np.shape(gate) == np.shape(up) and uniform(gate, up),
)
gelu.defgpu(
    lambda x, approximate, needs=(): (_each("gelu", x, options=_exactly(approximate))[0], {"slopes": None}),
    lambda g, x, approximate, slopes: _each("gelu_backward", g, x, options=_exactly(approximate)),
    lambda x, approximate: uniform(x),
)
