"""New tensors from lists and arrays, from other libraries, and from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend import DType, Shape, array_of, as_dtype, check_device, use_device
from minigrad.errors import ArgumentError, DTypeError
from minigrad.messages.arguments import as_int, as_operand, as_shape
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor, TensorLike, as_array


@explained
def asarray(data: TensorLike, dtype: DType = None, device: str | None = None) -> Tensor:
    """A Tensor that shares the memory of ``data`` where dtype and device allow; a gradient flows to a Tensor.

    >>> a = np.zeros(2); t = asarray(a, device="cpu"); a[0] = 1.0; print(t.data)
    [1. 0.]
    """
    if isinstance(data, Tensor):
        tensor = data if device is None else data.to(device)
        return tensor if dtype is None or tensor.dtype == as_dtype(dtype) else tensor.astype(dtype)
    return Tensor._wrap(as_array(data, dtype, device, copy=False))


@explained
def from_dlpack(source: Any) -> Tensor:
    """A Tensor that shares the memory of any array with ``__dlpack__``: NumPy, CuPy, torch, JAX.

    >>> print(from_dlpack(np.ones(2)).data)
    [1. 1.]
    """
    if isinstance(source, Tensor):
        return source.detach()
    if not hasattr(source, "__dlpack__"):
        raise DTypeError("an object with __dlpack__", type(source).__name__, "asarray takes lists and numbers")
    kind, number = source.__dlpack_device__()
    with use_device("cpu" if kind == 1 else check_device(f"cuda:{number}")) as xp:
        try:
            return asarray(xp.from_dlpack(source))
        except (BufferError, RuntimeError) as error:  # a tensor that is recorded, or a dtype that NumPy hasn't
            raise ArgumentError("an array that can be shared", str(error), "copy it, or use asarray") from None


@explained
def full(
    shape: Shape, value: TensorLike, dtype: DType = "float32", device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor with ``value`` everywhere; float32 unless told.

    >>> print(full(2, 7.0).data)
    [7. 7.]
    """
    with use_device(check_device(device)) as xp:
        tensor = Tensor._wrap(xp.full(as_shape(shape), as_operand(value, "the value"), dtype=as_dtype(dtype)))
    tensor.requires_grad = requires_grad
    return tensor


@explained
def zeros(shape: Shape, dtype: DType = "float32", device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros; float32 unless told.

    >>> zeros((2, 3)).shape
    (2, 3)
    """
    return full(shape, 0, dtype, device, requires_grad)


@explained
def ones(shape: Shape, dtype: DType = "float32", device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of ones; float32 unless told.

    >>> ones((2, 3)).shape
    (2, 3)
    """
    return full(shape, 1, dtype, device, requires_grad)


@explained
def arange(
    start: TensorLike,
    stop: TensorLike | None = None,
    step: TensorLike = 1,
    dtype: DType = None,
    device: str | None = None,
) -> Tensor:
    """Numbers from ``start`` (or 0) up to but without ``stop`` in steps, with NumPy's dtype: integers from integers.

    >>> print(arange(3).data)
    [0 1 2]
    """
    first, last = (0, start) if stop is None else (start, stop)
    if not all(isinstance(array_of(n), int | float | np.number | np.ndarray) for n in (first, last, step)) or step == 0:
        got = f"{describe(start)}, {describe(stop)}, {describe(step)}"
        raise ArgumentError("numbers to start, to stop, and a step that is not 0", got, "arange(0, 10, 2)")
    with use_device(check_device(device)) as xp:
        return Tensor._wrap(xp.arange(first, last, step, dtype=None if dtype is None else as_dtype(dtype)))


@explained
def eye(n: int, m: int | None = None, k: int = 0, dtype: DType = "float32", device: str | None = None) -> Tensor:
    """An ``n × m`` matrix with ones on its ``k``-th diagonal; float32 unless told.

    >>> print(eye(2).data)
    [[1. 0.]
     [0. 1.]]
    """
    with use_device(check_device(device)) as xp:
        shape = as_shape((n, n if m is None else m), "n, m")
        return Tensor._wrap(xp.eye(*shape, as_int(k, "k"), dtype=as_dtype(dtype)))
