"""BatchNorm1d and BatchNorm2d: channels brought to one scale over the batch, with statistics that are kept."""

from __future__ import annotations

import numpy as np

from minigrad.backend import DType
from minigrad.checkpointing import runs_again
from minigrad.errors import ShapeError
from minigrad.messages.arguments import check_eps
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .checks import as_operand, check_probability, check_sizes
from .module import Module
from .parameter import constant


class _BatchNorm(Module):
    """Normalisation of each channel over the batch, for inputs with a number of axes among ``ndims``."""

    ndims: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: DType = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_features=num_features)
        self.num_features, self.eps = num_features, check_eps(eps)
        self.momentum = None if momentum is None else check_probability(momentum)
        self.affine, self.track_running_stats = affine, track_running_stats
        self.weight = constant(num_features, 1.0, dtype, device) if affine else None
        self.bias = constant(num_features, 0.0, dtype, device) if affine else None
        start = {"running_mean": constant(num_features, 0.0, dtype, device).detach(),
                 "running_var": constant(num_features, 1.0, dtype, device).detach(),
                 "num_batches_tracked": np.zeros((), np.int64)}  # fmt: skip
        for name, value in start.items():
            self.register_buffer(name, value if track_running_stats else None)

    def forward(self, x: TensorLike) -> Tensor:
        """``x`` normalized; in training the running statistics move."""
        shape = as_operand(x).shape
        if len(shape) not in self.ndims or shape[1] != self.num_features:
            wanted = " or ".join("(N, " + ", ".join(("C", "L") if n == 3 else ("C", "H", "W")[: n - 1]) + ")"
                                 for n in self.ndims)  # fmt: skip
            raise ShapeError(f"x {wanted} with C = {self.num_features}", f"shape {shape}",
                             "the second axis counts channels")  # fmt: skip
        share = self.momentum
        if self.training and self.track_running_stats and not runs_again():
            self.num_batches_tracked.data = self.num_batches_tracked.data + 1
            share = 1 / float(self.num_batches_tracked) if share is None else share
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, share or 0.0, self.eps
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"


class BatchNorm1d(_BatchNorm):
    """``(x - mean) / √(variance + eps) · weight + bias`` for each channel of (N, C) or (N, C, L).

    In training mean and variance are those of the batch, and ``running_mean`` and ``running_var`` move towards them by
    the share ``momentum`` (None: they are the mean over all batches); in evaluation those are taken.
    Ioffe and Szegedy, "Batch Normalization" (2015).

    >>> import minigrad as mg
    >>> norm = BatchNorm1d(1, eps=0.0)
    >>> print(norm(mg.Tensor([[1.0], [3.0]], dtype="float32")).data.T, norm.running_mean.data)
    [[-1.  1.]] [0.2]
    """

    ndims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Normalisation of each channel of (N, C, H, W): as :class:`BatchNorm1d`.

    >>> import minigrad as mg
    >>> BatchNorm2d(3)(mg.ones((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    ndims = (4,)
