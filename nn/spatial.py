"""Convolutions, pooling and normalisation by channels, as functions with torch's names and arguments.

An input is (N, C, length…), or without a batch (C, length…).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad import sqrt
from minigrad.backend import Array, Shape, array_of
from minigrad.checkpointing import runs_again
from minigrad.errors import ArgumentError, ShapeError
from minigrad.kernels.batch_norm import normalize_batch
from minigrad.kernels.convolution import convolution, transposed_convolution
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.pooling import avg_pool, max_pool
from minigrad.messages.arguments import check_eps
from minigrad.messages.explain import explained
from minigrad.ops import spread_out
from minigrad.tensor import Operand, Tensor, X
from .checks import as_operand, check_probability, check_sizes

# ---- convolutions ---------------------------------------------------------------------------------------------------


def _on_batch(x: Any, axes: int, function: Callable[[Any], Any]) -> Any:
    """``function`` of x with ``axes`` behind its channels; what has no batch gets one for the time of the call."""
    x = as_operand(x)
    if np.ndim(x) not in (axes + 1, axes + 2):
        lengths = ["length", "height, width"][axes - 1]
        hint = "an axis of channels: x[:, None]" if np.ndim(x) == axes else "reshape to these axes"
        raise ShapeError(f"x (N, C, {lengths}) or (C, {lengths})", f"shape {np.shape(x)}", hint)
    return function(x) if np.ndim(x) == axes + 2 else function(x[None])[0]


def _convolved(axes: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    weight, bias = as_operand(weight), None if bias is None else as_operand(bias)
    pads = paddings(padding, np.shape(weight)[2:], stride, dilation)
    return _on_batch(x, axes, lambda batch: convolution(batch, weight, bias, stride, pads, dilation, groups))


def paddings(padding: Any, kernel: tuple[int, ...], stride: Any, dilation: Any) -> Any:
    """``padding`` in numbers: "valid" is none, "same" keeps the lengths, one more behind than before if it is uneven.

    >>> paddings("same", (3, 2), 1, 1), paddings("valid", (3,), 1, 1)
    (((1, 1), (0, 1)), 0)
    """
    if not isinstance(padding, str):
        return padding
    if padding == "valid":
        return 0
    count = len(kernel)
    if padding != "same" or set(spread_out(stride, count, "stride")) != {1}:
        got = f"padding={padding!r}, stride={stride}"
        raise ArgumentError("padding as numbers, 'valid', or 'same' with stride 1", got, "numbers go with any stride")
    around = [d * (k - 1) for k, d in zip(kernel, spread_out(dilation, count, "dilation"), strict=True)]
    return tuple((n // 2, n - n // 2) for n in around)


@explained
def conv1d(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Shape = 1,
    padding: Shape | str = 0,
    dilation: Shape = 1,
    groups: int = 1,
) -> X:
    """Cross-correlation along one axis: x (N, C, L) with kernels (O, C / groups, K) to (N, O, L').

    L' is ``(L + 2 · padding - dilation · (K - 1) - 1) // stride + 1``; padding is of zeros, a number, "same" or
    "valid". Each O / groups of the results see C / groups of the channels.

    >>> print(conv1d([[[1.0, 2.0, 4.0]]], [[[-1.0, 1.0]]]))
    [[[1. 2.]]]
    """
    return _convolved(1, x, weight, bias, stride, padding, dilation, groups)


@explained
def conv2d(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Shape = 1,
    padding: Shape | str = 0,
    dilation: Shape = 1,
    groups: int = 1,
) -> X:
    """Cross-correlation along two axes: x (N, C, H, W) with kernels (O, C / groups, K, K') to (N, O, H', W').

    Lengths and arguments are those of :func:`conv1d`, each a number or a pair.

    >>> print(conv2d(np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)), padding="same"))
    [[[[4. 2.]
       [2. 1.]]]]
    """
    return _convolved(2, x, weight, bias, stride, padding, dilation, groups)


def _transposed(axes: int, x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    weight, bias = as_operand(weight), None if bias is None else as_operand(bias)
    return _on_batch(x, axes, lambda batch: transposed_convolution(batch, weight, bias, *options))


@explained
def conv_transpose1d(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Shape = 1,
    padding: Shape = 0,
    output_padding: Shape = 0,
    groups: int = 1,
    dilation: Shape = 1,
) -> X:
    """The transpose of :func:`conv1d` as a linear map: x (N, C, L) with kernels (C, O / groups, K) to (N, O, L').

    L' is ``(L - 1) · stride - 2 · padding + dilation · (K - 1) + output_padding + 1``.

    >>> print(conv_transpose1d([[[1.0, 3.0]]], [[[1.0, 1.0]]], stride=2))
    [[[1. 1. 3. 3.]]]
    """
    return _transposed(1, x, weight, bias, stride, padding, output_padding, groups, dilation)


@explained
def conv_transpose2d(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Shape = 1,
    padding: Shape = 0,
    output_padding: Shape = 0,
    groups: int = 1,
    dilation: Shape = 1,
) -> X:
    """The transpose of :func:`conv2d` as a linear map: x (N, C, H, W), kernels (C, O / groups, K, K').

    >>> conv_transpose2d(np.ones((1, 2, 3, 3)), np.ones((2, 4, 2, 2)), stride=2).shape
    (1, 4, 6, 6)
    """
    return _transposed(2, x, weight, bias, stride, padding, output_padding, groups, dilation)


# ---- pooling --------------------------------------------------------------------------------------------------------


@explained
def max_pool1d(
    x: Operand[X],
    kernel_size: Shape,
    stride: Shape | None = None,
    padding: Shape = 0,
    dilation: Shape = 1,
    ceil_mode: bool = False,
) -> X:
    """The largest of each window along one axis, (N, C, L) to (N, C, L'); stride is kernel_size by default.

    With ceil_mode a last window may end behind the padding. Of equal elements the first takes the gradient.

    >>> print(max_pool1d([[[1.0, 5.0, 2.0, 3.0]]], 2))
    [[[5. 3.]]]
    """
    return _largest(1, x, kernel_size, stride, padding, dilation, ceil_mode)


@explained
def max_pool2d(
    x: Operand[X],
    kernel_size: Shape,
    stride: Shape | None = None,
    padding: Shape = 0,
    dilation: Shape = 1,
    ceil_mode: bool = False,
) -> X:
    """The largest of each window along two axes: :func:`max_pool1d` with numbers or pairs.

    >>> print(max_pool2d(np.arange(16.0).reshape(1, 1, 4, 4), 2))
    [[[[ 5.  7.]
       [13. 15.]]]]
    """
    return _largest(2, x, kernel_size, stride, padding, dilation, ceil_mode)


def _largest(axes: int, x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    kernel = list(spread_out(kernel_size, axes, "kernel_size"))
    return _on_batch(x, axes, lambda batch: max_pool(batch, kernel, stride, padding, dilation, ceil_mode))


@explained
def avg_pool1d(
    x: Operand[X],
    kernel_size: Shape,
    stride: Shape | None = None,
    padding: Shape = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> X:
    """The mean of each window along one axis, (N, C, L) to (N, C, L'); stride is kernel_size by default.

    Padding is of zeros, which count unless count_include_pad is False. With ceil_mode a last window may end behind the
    padding; what it takes from there never counts.

    >>> print(avg_pool1d([[[1.0, 5.0, 2.0, 3.0]]], 2))
    [[[3.  2.5]]]
    """
    return _average(1, x, kernel_size, stride, padding, ceil_mode, count_include_pad)


@explained
def avg_pool2d(
    x: Operand[X],
    kernel_size: Shape,
    stride: Shape | None = None,
    padding: Shape = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> X:
    """The mean of each window along two axes: :func:`avg_pool1d` with numbers or pairs.

    >>> print(avg_pool2d(np.arange(16.0).reshape(1, 1, 4, 4), 2))
    [[[[ 2.5  4.5]
       [10.5 12.5]]]]
    """
    return _average(2, x, kernel_size, stride, padding, ceil_mode, count_include_pad)


def _average(
    axes: int, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool
) -> Any:
    kernel = list(spread_out(kernel_size, axes, "kernel_size"))
    return _on_batch(x, axes, lambda batch: avg_pool(batch, kernel, stride, padding, ceil_mode, count_include_pad))


# ---- normalisation by channels --------------------------------------------------------------------------------------


@explained
def batch_norm(
    x: Operand[X],
    running_mean: Tensor | Array | None,
    running_var: Tensor | Array | None,
    weight: Operand[X] | None = None,
    bias: Operand[X] | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> X:
    """``(x - mean) / √(var + eps) · weight + bias`` for each channel of x (N, C, …).

    In training, and without running statistics, mean and variance are those of the batch. Then running_mean and
    running_var, arrays or Tensors (C,), move towards them in place: by the share ``momentum``, the variance with n - 1.
    Else these are taken. An empty batch moves nothing.

    >>> mean, var = np.zeros(1), np.ones(1)
    >>> print(batch_norm(np.array([[1.0], [3.0]]), mean, var, training=True).round(3).T, mean, var)
    [[-1.  1.]] [0.2] [1.1]
    """
    check_eps(eps)
    array: Any = as_operand(x)
    scale, offset = (None if p is None else as_operand(p) for p in (weight, bias))
    if not training and running_mean is not None:
        return _by_statistics(array, running_mean, running_var, scale, offset, eps)
    count = array.size // max(array.shape[1], 1) if np.ndim(array) > 1 else 0
    if training and count == 1:
        hint = "a larger batch, or eval()"
        raise ShapeError("more than one number for each channel in training", f"shape {array.shape}", hint)
    y: Any
    y, mean, var = normalize_batch(array, scale, offset, eps)
    if running_mean is not None and count and not runs_again():
        share = check_probability(momentum)
        _move(running_mean, array_of(mean), share)
        _move(running_var, array_of(var) * (count / max(count - 1, 1)), share)
    return y


def _by_statistics(x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> Any:
    channels = (-1, *[1] * (np.ndim(x) - 2))
    if np.ndim(x) < 2 or x.shape[1:2] != np.shape(mean):
        raise ShapeError(f"x (N, {np.size(mean)}, …)", f"shape {np.shape(x)}", "the second axis counts channels")
    scale = 1 / sqrt(as_operand(var) + eps) if weight is None else weight / sqrt(as_operand(var) + eps)
    y = (x - mean.reshape(channels)) * scale.reshape(channels)
    return (y if bias is None else y + bias.reshape(channels)).astype(x.dtype)


def _move(running: Any, value: Any, share: float) -> None:
    """Move running statistics, an array or a Tensor, by a share of the way towards ``value``."""
    array = array_of(running)
    moved = (1 - share) * array + (share * value).astype(array.dtype)
    if isinstance(running, Tensor):
        running.data = moved
    else:
        running[...] = moved


@explained
def group_norm(
    x: Operand[X],
    num_groups: int,
    weight: Operand[X] | None = None,
    bias: Operand[X] | None = None,
    eps: float = 1e-5,
) -> X:
    """Mean 0 and variance 1 for each group of channels of each example of x (N, C, …), then ``· weight + bias`` (C,).

    Wu and He, "Group Normalization" (2018).

    >>> print(group_norm(np.array([[1.0, 3.0, 0.0, 4.0]]), 2).round(3))
    [[-1.  1. -1.  1.]]
    """
    rows: Any = as_operand(x)
    check_sizes(num_groups=num_groups)
    if np.ndim(rows) < 2 or rows.shape[1] % num_groups:
        hint = "each group has as many channels"
        raise ShapeError(f"x (N, C, …), C a multiple of num_groups={num_groups}", f"shape {np.shape(rows)}", hint)
    rest = rows.size // max(1, len(rows) * num_groups)
    y: Any = layer_norm(rows.reshape(len(rows), num_groups, rest), (rest,), eps=eps).reshape(rows.shape)
    channels = (-1, *[1] * (np.ndim(rows) - 2))
    y = y if weight is None else y * as_operand(weight).reshape(channels)
    return y if bias is None else y + as_operand(bias).reshape(channels)
