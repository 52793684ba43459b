"""Convolutions, their transposes and pooling as layers."""

from __future__ import annotations

import math
from typing import Any

from minigrad import pad
from minigrad.backend import DType, Shape
from minigrad.errors import ArgumentError, ShapeError
from minigrad.ops import spread_out
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .checks import as_operand, check_sizes
from .module import Module
from .parameter import constant, truncated_normal
from .spatial import paddings

PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


class _Convolution(Module):
    """What the layers share: a weight for windows along ``axes`` axes, which starts as normals cut at 3σ, and a bias.

    σ² is 2/(n + n'), n being how many numbers of the input a result sees, and n' how many results an input changes.
    """

    axes: int
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Shape,
        stride: Shape,
        padding: Shape | str,
        dilation: Shape,
        groups: int,
        bias: bool,
        dtype: DType,
        device: str | None,
        generator: Any,
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            got = f"in_channels={in_channels}, out_channels={out_channels}, groups={groups}"
            raise ShapeError("groups that divide both numbers of channels", got, "each group has as many of them")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = spread_out(kernel_size, self.axes, "kernel_size")
        self.stride = spread_out(stride, self.axes, "stride")
        self.padding = padding if isinstance(padding, str) else spread_out(padding, self.axes, "padding", 0)
        self.dilation = spread_out(dilation, self.axes, "dilation")
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        std = math.sqrt(2 * groups / ((in_channels + out_channels) * math.prod(self.kernel_size)))
        shape = (first, second // groups, *self.kernel_size)
        self.weight = truncated_normal(shape, std, dtype=dtype, device=device, generator=generator)
        self.bias = constant(out_channels, 0.0, dtype, device) if bias else None

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        plain = {"padding": (0,) * self.axes, "dilation": (1,) * self.axes, "groups": 1}
        text += "".join(f", {k}={getattr(self, k)!r}" for k, usual in plain.items() if getattr(self, k) != usual)
        return text if self.bias is not None else f"{text}, bias=False"


class _Forward(_Convolution):
    """A convolution: from (N, in_channels, …) to (N, out_channels, …)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Shape,
        stride: Shape = 1,
        padding: Shape | str = 0,
        dilation: Shape = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, dtype, device, generator
        )
        paddings(self.padding, self.kernel_size, self.stride, self.dilation)
        if padding_mode not in PADDING_MODES:
            raise ArgumentError(f"a padding_mode of {', '.join(PADDING_MODES)}", repr(padding_mode), "zeros is usual")
        self.padding_mode = padding_mode

    def forward(self, x: TensorLike) -> Tensor:
        """The convolution of ``x``."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = self._padded(as_operand(x)), 0
        function = (F.conv1d, F.conv2d)[self.axes - 1]
        return function(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _padded(self, x: Any) -> Any:
        """x with elements of its own around it."""
        numbers = paddings(self.padding, self.kernel_size, self.stride, self.dilation)
        numbers = (numbers,) * self.axes if isinstance(numbers, int) else numbers
        pairs = [pair if isinstance(pair, tuple) else (pair, pair) for pair in numbers]
        return pad(x, [(0, 0)] * (x.ndim - self.axes) + pairs, PADDING_MODES[self.padding_mode])

    def extra_repr(self) -> str:
        mode = "" if self.padding_mode == "zeros" else f", padding_mode={self.padding_mode!r}"
        return super().extra_repr() + mode


class Conv1d(_Forward):
    """Cross-correlation along one axis, (N, in_channels, L) to (N, out_channels, L'); the batch may be left out.

    weight (out_channels, in_channels / groups, kernel_size) starts as normals with σ² = 2/(n + n') cut at 3σ, n and n'
    the numbers that a result sees and an input changes; bias (out_channels,) as 0. padding: a number, "same" or
    "valid"; padding_mode: "zeros", "reflect", "replicate" or "circular".

    >>> import minigrad as mg
    >>> Conv1d(2, 4, 3, padding="same")(mg.ones((1, 2, 8))).shape
    (1, 4, 8)
    """

    axes = 1


class Conv2d(_Forward):
    """Cross-correlation along two axes, (N, in_channels, H, W) to (N, out_channels, H', W'): as :class:`Conv1d`.

    LeCun et al., "Gradient-based learning applied to document recognition" (1998).

    >>> import minigrad as mg
    >>> Conv2d(3, 8, 3, stride=2, padding=1)(mg.ones((1, 3, 8, 8))).shape
    (1, 8, 4, 4)
    """

    axes = 2


class _Transposed(_Convolution):
    """The transpose of a convolution: from (N, in_channels, …) to (N, out_channels, …)."""

    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Shape,
        stride: Shape = 1,
        padding: Shape = 0,
        output_padding: Shape = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Shape = 1,
        *,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        padding = spread_out(padding, self.axes, "padding", 0)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, dtype, device, generator
        )
        self.output_padding = spread_out(output_padding, self.axes, "output_padding", 0)

    def forward(self, x: TensorLike) -> Tensor:
        """The transposed convolution of ``x``."""
        function = (F.conv_transpose1d, F.conv_transpose2d)[self.axes - 1]
        padding: Any = self.padding
        return function(
            x, self.weight, self.bias, self.stride, padding, self.output_padding, self.groups, self.dilation
        )

    def extra_repr(self) -> str:
        more = f", output_padding={self.output_padding}" if any(self.output_padding) else ""
        return super().extra_repr() + more


class ConvTranspose1d(_Transposed):
    """The transpose of a :class:`Conv1d` as a linear map, (N, in_channels, L) to (N, out_channels, L').

    L' is ``(L - 1) · stride - 2 · padding + dilation · (kernel_size - 1) + output_padding + 1``. The weight is
    (in_channels, out_channels / groups, kernel_size).

    >>> import minigrad as mg
    >>> ConvTranspose1d(2, 4, 2, stride=2)(mg.ones((1, 2, 8))).shape
    (1, 4, 16)
    """

    axes = 1


class ConvTranspose2d(_Transposed):
    """The transpose of a :class:`Conv2d`, (N, in_channels, H, W) to (N, out_channels, H', W'): as ConvTranspose1d.

    >>> import minigrad as mg
    >>> ConvTranspose2d(8, 3, 2, stride=2)(mg.ones((1, 8, 4, 4))).shape
    (1, 3, 8, 8)
    """

    axes = 2


# ---- pooling --------------------------------------------------------------------------------------------------------


class _Pool(Module):
    """What the layers share: windows along ``axes`` axes, and the distances between them."""

    axes: int

    def __init__(self, kernel_size: Shape, stride: Shape | None, padding: Shape, ceil_mode: bool) -> None:
        super().__init__()
        self.kernel_size, self.padding, self.ceil_mode = kernel_size, padding, ceil_mode
        self.stride = kernel_size if stride is None else stride

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class _MaxPool(_Pool):
    """The largest element of each window."""

    def __init__(
        self,
        kernel_size: Shape,
        stride: Shape | None = None,
        padding: Shape = 0,
        dilation: Shape = 1,
        *,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation = dilation

    def forward(self, x: TensorLike) -> Tensor:
        """The largest elements of ``x``."""
        function = (F.max_pool1d, F.max_pool2d)[self.axes - 1]
        return function(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class MaxPool1d(_MaxPool):
    """The largest of each window along one axis; stride is kernel_size by default.

    >>> print(MaxPool1d(2)([[[1.0, 5.0, 2.0, 3.0]]]))
    [[[5. 3.]]]
    """

    axes = 1


class MaxPool2d(_MaxPool):
    """The largest of each window along two axes: :class:`MaxPool1d` with numbers or pairs.

    >>> import minigrad as mg
    >>> MaxPool2d(2)(mg.ones((1, 3, 4, 4))).shape
    (1, 3, 2, 2)
    """

    axes = 2


class _AvgPool(_Pool):
    """The mean of each window."""

    def __init__(
        self,
        kernel_size: Shape,
        stride: Shape | None = None,
        padding: Shape = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = count_include_pad

    def forward(self, x: TensorLike) -> Tensor:
        """The means of ``x``."""
        function = (F.avg_pool1d, F.avg_pool2d)[self.axes - 1]
        return function(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class AvgPool1d(_AvgPool):
    """The mean of each window along one axis; stride is kernel_size by default.

    >>> print(AvgPool1d(2)([[[1.0, 5.0, 2.0, 3.0]]]))
    [[[3.  2.5]]]
    """

    axes = 1


class AvgPool2d(_AvgPool):
    """The mean of each window along two axes: :class:`AvgPool1d` with numbers or pairs.

    >>> import minigrad as mg
    >>> AvgPool2d(2)(mg.ones((1, 3, 4, 4))).shape
    (1, 3, 2, 2)
    """

    axes = 2
