"""Beam search: the likeliest of the texts that can be reached by keeping a few at each length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minigrad import no_grad
from minigrad.backend import Array
from minigrad.errors import ArgumentError
from minigrad.messages.explain import explained
from .checks import check_sizes
from .continuation import Continuation, as_prompts, as_stops, check_new_tokens, check_stops, evaluating
from .sampling import log_probabilities


class Beam(NamedTuple):
    """A text that beam search found: the prompt and what follows, eos included; log P of what follows; its score."""

    tokens: Array
    log_probability: float
    score: float


class Finished:
    """The ``size`` best texts that have ended, of one prompt."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.beams: list[Beam] = []

    @property
    def bar(self) -> float:
        """The score above which another text would be among them."""
        return self.beams[-1].score if len(self.beams) == self.size else -np.inf

    def add(self, tokens: Array, log_probability: float, score: float) -> None:
        """Take a text in if it is good enough; of equal ones the first stays first."""
        if score > self.bar:
            self.beams = sorted([*self.beams, Beam(tokens, log_probability, score)], key=lambda beam: -beam.score)
            del self.beams[self.size :]


@explained
def beam_search(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    beam_size: int = 4,
    *,
    length_penalty: float = 0.0,
    eos: Any = None,
    source: Any = None,
) -> Any:
    """Up to ``beam_size`` texts that continue the prompt, ``Beam(tokens, log_probability, score)``, best score first.

    At each length the beam_size likeliest unfinished texts are kept. A text is finished with the token ``eos``, or one
    of these, or at max_new_tokens. ``score = log P / ((5 + n) / 6)^length_penalty`` with n new tokens, eos counted: 0
    ranks by probability, more favours longer texts. The search ends when no unfinished text can beat those found.

    prompt and source are those of ``generate``. One sequence gives a list of beams, several a list of such lists.

    Wu et al., "Google's Neural Machine Translation System" (2016), eq. 14 without the coverage; the original
    Transformer is decoded with ``beam_size=4, length_penalty=0.6``. Hugging Face's transformers divides by
    ``n^length_penalty`` instead (1 by default), finishes a text only where its eos is among the best of all
    candidates, and may stop earlier.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> beams = beam_search(model, [1, 2, 3], 5, beam_size=2, eos=0)
    >>> len(beams), beams[0].score >= beams[1].score
    (2, True)
    """
    check_sizes(beam_size=beam_size)
    check_new_tokens(max_new_tokens)
    penalties, stops = _penalties(length_penalty, max_new_tokens + 2), as_stops(eos)
    prompts, source, ndim = as_prompts(prompt, model, source)
    found = [Finished(beam_size) for _ in prompts]
    with evaluating(model), no_grad():
        text = Continuation(model, prompts, max_new_tokens, source)
        _search(text, found, max_new_tokens, penalties, stops)
    results = [finished.beams for finished in found]
    return results[0] if ndim == 1 else results


def _search(text: Continuation, found: list[Finished], max_new_tokens: int, penalties: Array, stops: Array) -> None:
    """Fill ``found``, which has an entry for each sequence of ``text``."""
    size = found[0].size
    totals = np.zeros((len(found), 1))  # (prompts, beams): log P of the unfinished texts, the rows of ``text``
    for length in range(1, max_new_tokens + 1):
        candidates = totals[..., None] + log_probabilities(text.next_logits()).reshape(*totals.shape, -1)
        prompts, beams, vocab_size = candidates.shape
        for stop in check_stops(stops, vocab_size):
            _finish(text, found, candidates[..., stop], penalties[length], [stop])
            candidates[..., stop] = -np.inf
        best = np.argsort(-candidates.reshape(prompts, -1), axis=-1, kind="stable")[:, :size]
        totals = np.take_along_axis(candidates.reshape(prompts, -1), best, axis=-1)
        hope = totals[:, 0] / max(penalties[min(length + 1, max_new_tokens)], penalties[max_new_tokens])
        going = np.array([h > finished.bar for h, finished in zip(hope, found, strict=True)])
        if not going.any():
            return
        parents = best // vocab_size + beams * np.arange(prompts)[:, None]
        text.select(parents[going].reshape(-1))
        text.append((best % vocab_size)[going].reshape(-1))
        totals, found = totals[going], [finished for finished, on in zip(found, going, strict=True) if on]
    _finish(text, found, totals, penalties[max_new_tokens], [])


def _penalties(alpha: Any, count: int) -> Array:
    """What log P is divided by, for texts of up to ``count`` new tokens."""
    with np.errstate(over="ignore", under="ignore"):
        finite = isinstance(alpha, int | float | np.number) and np.isfinite(alpha)
        penalties: Array = ((5 + np.arange(count)) / 6) ** (float(alpha) if finite else np.nan)
    if not (np.isfinite(penalties) & (penalties > 0)).all():
        raise ArgumentError("a finite length_penalty, with which lengths keep their order", repr(alpha), "0.6 is usual")
    return penalties


def _finish(text: Continuation, found: list[Finished], totals: Array, penalty: float, ending: list[int]) -> None:
    """Take in the texts, with ``ending`` after them, that are among the best of their prompt."""
    for prompt, finished in enumerate(found):
        for beam in np.flatnonzero(totals[prompt] / penalty > finished.bar):
            tokens = text.text(prompt * totals.shape[1] + beam)
            total = float(totals[prompt, beam])
            finished.add(np.append(tokens, np.array(ending, tokens.dtype)), total, float(total / penalty))
