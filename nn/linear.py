"""Linear and Embedding: the two layers that are one matrix, multiplied by rows or looked up in."""

from __future__ import annotations

from typing import Any

from minigrad.backend import DType
from minigrad.errors import IndexRangeError
from minigrad.tensor import Tensor, TensorLike
from . import functional as F
from .checks import as_ids, check_sizes
from .module import Module, is_plain
from .parameter import constant, matrix, truncated_normal


class Linear(Module):
    """``y = x Wᵀ + b``, from (..., in_features) to (..., out_features).

    weight (out_features, in_features) starts as normals with σ² = 2/(in + out) cut at 3σ, bias (out_features,) as 0.

    >>> import minigrad as mg
    >>> Linear(3, 2)(mg.ones((4, 3))).shape
    (4, 2)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = matrix(out_features, in_features, dtype, device, generator)
        self.bias = constant(out_features, 0.0, dtype, device) if bias else None

    def forward(self, x: TensorLike) -> Tensor:
        """``x Wᵀ + b``."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def head_loss(head: Any, hidden: TensorLike, targets: TensorLike, *options: Any) -> Tensor:
    """Cross-entropy of ``head(hidden)`` against ``targets``; the options are those of ``F.cross_entropy``.

    The logits never exist all at once where the head is a Linear without bias that nothing watches.

    >>> head_loss(Linear(3, 2, bias=False), [[0.0, 0.0, 0.0]], [1]).round(4)
    Tensor(0.6931, made by round)
    """
    if is_plain(head, Linear) and head.bias is None:
        loss: Tensor = F.linear_cross_entropy(hidden, head.weight, targets, *options)
    else:
        loss = F.cross_entropy(head(hidden), targets, *options)
    return loss


class Embedding(Module):
    """Row ``weight[id]`` of a table for each integer id, from (...) to (..., embedding_dim).

    weight (num_embeddings, embedding_dim) starts as N(0, std²) cut at 3 std. The row ``padding_idx`` starts as zeros
    and gets no gradient. An id that is negative, or num_embeddings and more, raises an IndexRangeError (an IndexError).

    >>> Embedding(10, 4)([[1, 2, 3]]).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        dtype: DType = None,
        device: str | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            got, hint = str(padding_idx), "None trains every row"
            raise IndexRangeError(f"a padding_idx from {-num_embeddings} to {num_embeddings - 1}", got, hint)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        shape = (num_embeddings, embedding_dim)
        self.weight = truncated_normal(shape, std, dtype=dtype, device=device, generator=generator)
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    def forward(self, ids: TensorLike) -> Tensor:
        """The rows of ``ids``."""
        return F.embedding(as_ids(ids, self.weight.device), self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
