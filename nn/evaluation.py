"""How well a language model predicts a text: its loss over every token, in windows, and the perplexity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minigrad import asarray, no_grad
from minigrad.backend import to_numpy
from minigrad.errors import ArgumentError, DTypeError, ShapeError
from minigrad.messages.explain import explained
from .checks import check_sizes
from .continuation import evaluating

IGNORED = -100  # a target that doesn't count


@explained
def total_loss(
    model: Any, tokens: Any, window: int | None = None, stride: int | None = None, batch_size: int = 8
) -> tuple[float, int]:
    """The summed loss of a text in nats, and the number of tokens predicted: each but the first, exactly once.

    tokens is one text (N,), or several (texts, N). The model reads windows of ``window`` tokens (default: its
    context_length) that begin ``stride`` tokens apart (default: the window). A window that overlaps the one before
    counts its new tokens alone, so a smaller stride gives each token more context. The model is in evaluation mode
    meanwhile, and no graph is recorded.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=4, d_model=16, num_layers=1, num_heads=2)
    >>> total_loss(model, [1, 2, 3, 4, 5, 6, 7])[1]
    6
    """
    window = model.context_length if window is None else window
    stride = window if stride is None else stride
    check_sizes(window=window, stride=stride, batch_size=batch_size)
    if stride > window:
        hint = "tokens between would be left out"
        raise ArgumentError(f"a stride of at most the window, {window}", str(stride), hint)
    total, count = 0.0, 0
    with evaluating(model), no_grad():
        for inputs, targets in sliding_windows(_texts(tokens), window, stride, batch_size):
            total += float(model.loss(inputs, targets, ignore_index=IGNORED, reduction="sum"))
            count += int((targets != IGNORED).sum())
    return total, count


@explained
def perplexity(
    model: Any, tokens: Any, window: int | None = None, stride: int | None = None, batch_size: int = 8
) -> float:
    """``exp(total loss / total tokens)`` of a text: as many equally likely tokens would be as hard to guess.

    Every token counts the same, in whichever window it stands; the arguments are those of ``total_loss``.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=4, d_model=16, num_layers=1, num_heads=2)
    >>> model.lm_head.weight.data[...] = 0
    >>> round(perplexity(model, [1, 2, 3, 4, 5, 6, 7]), 4)
    10.0
    """
    total, count = total_loss(model, tokens, window, stride, batch_size)
    with np.errstate(over="ignore"):
        return float(np.exp(total / count))


def sliding_windows(texts: Any, window: int, stride: int, batch_size: int, count: int = 0) -> Iterator[tuple[Any, Any]]:
    """Batches of inputs and targets (batch, window) from a text (N,) or texts (texts, N), read in overlapping windows.

    The windows of a text begin ``stride`` tokens apart. Each token after the first is a target exactly once, in the
    first window that reaches it, with at least window - stride tokens of context where the text has them. Other targets
    are IGNORED. A ``count`` limits the number of batches; their windows then lie at even distances over the texts, the
    same at every call.

    >>> for inputs, targets in sliding_windows(np.arange(6), window=3, stride=2, batch_size=2):
    ...     print(inputs.tolist(), targets.tolist())
    [[0, 1, 2], [2, 3, 4]] [[1, 2, 3], [-100, 4, 5]]
    """
    texts = np.atleast_2d(texts)
    last = texts.shape[1] - 1  # tokens that have a target
    starts = range(0, max(last - window, 0) + stride, stride)
    windows = range(len(texts) * len(starts))
    wanted = count * batch_size or len(windows)
    chosen = windows if wanted >= len(windows) else [i * len(windows) // wanted for i in range(wanted)]
    for first in range(0, len(chosen), batch_size):
        text, number = np.divmod(np.array(chosen[first : first + batch_size])[:, None], len(starts))
        begin = number * stride
        places = begin + np.arange(min(window, last))
        inputs, targets = (texts[text, np.minimum(places + ahead, last)].astype(np.int64) for ahead in (0, 1))
        new = (places < last) & ((begin == 0) | (places >= begin + window - stride))
        yield inputs, np.where(new, targets, IGNORED)


def _texts(tokens: Any) -> np.ndarray[Any, Any]:
    texts = to_numpy(asarray(tokens).data)
    if texts.dtype.kind not in "iu":
        raise DTypeError("token ids as integers", f"dtype {texts.dtype}", "encode text with the tokenizer first")
    if texts.ndim not in (1, 2) or texts.shape[-1] < 2 or not texts.size:
        hint = "each token but the first is predicted"
        raise ShapeError("tokens (N,) or (texts, N) with N at least 2", f"shape {texts.shape}", hint)
    return np.atleast_2d(texts)
