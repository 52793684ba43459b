"""Distillation: a small model learns the probabilities of a large one beside the tokens of a text."""

from __future__ import annotations

from typing import Any

from minigrad import concatenate, no_grad
from minigrad.backend import array_module
from minigrad.errors import ArgumentError, StateError
from minigrad.messages.explain import describe
from minigrad.tensor import Tensor, TensorLike
from .. import functional as F
from ..checks import as_ids
from ..linear import Linear
from ..module import is_plain


def distillation_loss(
    student: Any,
    teacher: Any,
    tokens: TensorLike,
    targets: TensorLike,
    temperature: float = 2.0,
    mix: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``m τ² KL(p ‖ q) + (1 - m) cross-entropy`` of a TransformerLM that learns from another: see linear_distillation.

    p and q are what teacher and student think of the next token, their logits divided by the temperature τ. tokens and
    targets are (batch, sequence); ignore_index and reduction are those of ``TransformerLM.loss``. Nothing of the
    teacher is recorded, and neither model's logits ever exist all at once. At a mix of 0 it is ``student.loss``.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015). Raises a StateError for a teacher that still
    trains, a ShapeError for one with another vocabulary, and an ArgumentError for a head that isn't an ``nn.Linear``
    without hooks.

    >>> import nn
    >>> sizes = {"vocab_size": 65, "context_length": 16, "d_model": 32, "num_heads": 4}
    >>> teacher, student = (nn.TransformerLM(num_layers=n, **sizes) for n in (4, 1))
    >>> loss = distillation_loss(student, teacher.eval(), [[1, 2, 3]], [[2, 3, 4]])
    >>> loss.backward()
    """
    if teacher.training:
        raise StateError(
            "a teacher that is no longer trained", "one in training mode", "teacher.eval() ends its dropout"
        )
    targets = as_ids(targets, student.token_embeddings.weight.device)
    with no_grad():
        known, teacher_weight = (part.detach() for part in _head(teacher, tokens))
    hidden, weight = _head(student, tokens)
    loss: Tensor = F.linear_distillation(
        hidden, weight, known, teacher_weight, targets, temperature, mix, ignore_index, reduction
    )
    return loss


def _head(model: Any, tokens: TensorLike) -> tuple[Any, Any]:
    """The input of a model's head and its matrix; a bias becomes a column of it, beside a 1 in the input."""
    head = model.lm_head
    if not is_plain(head, Linear):
        raise ArgumentError("a head that is an nn.Linear without hooks", describe(head), "its logits never exist whole")
    hidden = model.hidden(tokens)
    if head.bias is None:
        return hidden, head.weight
    ones = array_module(hidden).ones((*hidden.shape[:-1], 1), hidden.dtype)
    return concatenate([hidden, ones], -1), concatenate([head.weight, head.bias[:, None]], -1)
