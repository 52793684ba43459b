"""New tensors from lists and arrays, from other libraries, and from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import ops
from minigrad.backend import DType, Shape, array_module, array_of, as_dtype, check_device, use_device
from minigrad.errors import ArgumentError, DTypeError
from minigrad.messages.arguments import as_int, as_operand, as_shape, normal_axis, tensors_in
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor, TensorLike, as_array


@explained
def asarray(data: TensorLike, dtype: DType = None, device: str | None = None) -> Tensor:
    """A Tensor that shares the memory of ``data`` where dtype and device allow.

    A gradient flows to a Tensor, and to those in nested lists.

    >>> a = np.zeros(2); t = asarray(a, device="cpu"); a[0] = 1.0; print(t.data)
    [1. 0.]
    """
    if isinstance(data, list | tuple) and next(tensors_in(data), None) is not None:
        data = Tensor._joined(data)
    if isinstance(data, Tensor):
        tensor = data if device is None else data.to(device)
        return tensor if dtype is None or tensor.dtype == as_dtype(dtype) else tensor.astype(dtype)
    return Tensor._wrap(as_array(data, dtype, device, copy=False))


@explained
def array(
    data: TensorLike, dtype: DType = None, copy: bool | None = True, ndmin: int = 0, device: str | None = None
) -> Tensor:
    """A Tensor of numbers, arrays, or nested lists with Tensors in them, to all of which a gradient flows.

    copy: False or None shares memory where that can be; ndmin: the least number of axes, new ones in front.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> array([[x[0], 0.0], [0.0, x[1] ** 2]]).sum().backward()
    >>> print(x.grad)
    [1. 4.]
    """
    tensor = asarray(data, dtype, device)
    tensor = tensor.copy() if copy and array_of(data) is tensor.data else tensor
    more = as_int(ndmin, "ndmin") - tensor.ndim
    return tensor.reshape((1,) * more + tensor.shape) if more > 0 else tensor


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
    shape: Shape, value: TensorLike, dtype: DType = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor with ``value`` everywhere, float32 unless told.

    A Tensor as the value keeps its dtype and, where it is recorded, receives a gradient.

    >>> print(full(2, 7.0).data)
    [7. 7.]
    """
    filling = as_operand(value, "the value")
    if dtype is None:
        dtype = filling.dtype if isinstance(filling, Tensor) else "float32"
    if isinstance(filling, Tensor) and filling.requires_grad:
        return ops.broadcast_to(asarray(filling, dtype, device), as_shape(shape))
    with use_device(check_device(device)) as xp:
        number, kind = array_of(filling), as_dtype(dtype)
        tensor = Tensor._wrap(xp.full(as_shape(shape), number, dtype=kind))
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


@explained
def full_like(x: TensorLike, value: TensorLike, dtype: DType = None, shape: Shape | None = None) -> Tensor:
    """A tensor with ``value`` everywhere, in the shape, dtype and place of ``x``; a gradient flows to the value.

    >>> print(full_like(np.ones(2), 7.0).data)
    [7. 7.]
    """
    like = asarray(x)
    wanted = like.dtype if dtype is None else as_dtype(dtype)
    return full(like.shape if shape is None else shape, value, wanted, like.device)


@explained
def zeros_like(x: TensorLike, dtype: DType = None, shape: Shape | None = None) -> Tensor:
    """A tensor of zeros in the shape, dtype and place of ``x``.

    >>> print(zeros_like(np.ones(2)).data)
    [0. 0.]
    """
    return full_like(x, 0, dtype, shape)


@explained
def ones_like(x: TensorLike, dtype: DType = None, shape: Shape | None = None) -> Tensor:
    """A tensor of ones in the shape, dtype and place of ``x``.

    >>> print(ones_like(np.zeros(2)).data)
    [1. 1.]
    """
    return full_like(x, 1, dtype, shape)


@explained
def linspace(
    start: TensorLike,
    stop: TensorLike,
    num: int = 50,
    endpoint: bool = True,
    dtype: DType = None,
    axis: int = 0,
    device: str | None = None,
) -> Tensor:
    """``num`` numbers from ``start`` to ``stop``, evenly spaced along a new ``axis``; a gradient flows to both.

    endpoint: whether the last one is ``stop``, or would be the next. The dtype is NumPy's: float64 of plain numbers.

    >>> print(linspace(0, 1, 5).data)
    [0.   0.25 0.5  0.75 1.  ]
    """
    first, last = as_operand(start, "start"), as_operand(stop, "stop")
    (count,) = as_shape(as_int(num, "num"), "num")
    if isinstance(first, Tensor) or isinstance(last, Tensor):
        ndim = max(np.ndim(array_of(first)), np.ndim(array_of(last)))
        xp = array_module(array_of(first), array_of(last))
        kind = np.result_type(array_of(first), array_of(last), 1.0)
        share = xp.arange(count, dtype=kind) / max(count - bool(endpoint), 1)
        if endpoint and count > 1:
            share[-1] = 1
        share = share.reshape((count,) + (1,) * ndim)
        line = first * (1 - share) + last * share
        made: Tensor = line if not axis else ops.moveaxis(line, 0, normal_axis(axis, ndim + 1))
    else:
        with use_device(check_device(device)) as xp:
            made = Tensor._wrap(xp.linspace(first, last, count, endpoint=bool(endpoint), axis=axis))
    return made if dtype is None else made.astype(dtype)
