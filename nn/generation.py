"""Text from a model, token by token: drawn from its probabilities, or the likeliest one each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad import no_grad, random
from minigrad.errors import CallError
from minigrad.messages.explain import describe, explained
from .continuation import Continuation, as_prompts, as_stops, check_new_tokens, check_stops, evaluating
from .sampling import check_sampling, drawn, likeliest, next_token_probabilities


@explained
def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: Any = None,
    generator: Any = None,
    *,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    sinks: int = 0,
    source: Any = None,
    callback: Callable[[Any], Any] | None = None,
) -> Any:
    """The prompt and up to ``max_new_tokens`` tokens that the model writes after it, as an int64 array.

    prompt is one sequence (T,) of at least one token, or several (batch, T); the result has as many axes. Each token is
    drawn from ``next_token_probabilities``, whose options these are; temperature 0 takes the likeliest, and no random
    number is drawn. The repetition penalty counts the tokens of the prompt too.

    - eos: a sequence ends with this token, or one of these; in a batch it is filled up with (the first) eos until all
      have ended
    - source: for a model with an encoder, ids (S,) or (batch, S); a prompt (T,) then begins the target of each. With a
      pad_id of the model, sources may be a list of different lengths
    - callback is called with each new token, an int, or the new tokens (batch,) of several sequences, as they come;
      where it returns True the texts end
    - generator: a ``numpy.random.Generator`` or a seed, by default that of ``minigrad.random``

    A list of prompts of different lengths gives a list of arrays, each cut after its eos. Every sequence is continued
    as if it were alone (when tokens are drawn, with other random numbers).

    Keys and values are cached, so a token costs one position. Once the context is full, the last half of it
    (context_length // 2 tokens) is encoded afresh, and the text goes on from there. Nothing is encoded afresh where all
    layers have a window, nor with ``sinks``: see :class:`KVCache`. The model is in evaluation mode while it writes, and
    no graph is recorded.

    >>> import nn
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> generate(model, [1, 2, 3], 20).shape
    (23,)
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    check_new_tokens(max_new_tokens)
    if callback is not None and not callable(callback):
        raise CallError("a function as callback", describe(callback), "callback=print shows each token")
    prompts, source, ndim = as_prompts(prompt, model, source)
    draw = random.generator(generator) if temperature else None
    stops = as_stops(eos)
    ended = np.zeros(len(prompts), bool)
    lengths = [len(row) + max_new_tokens for row in prompts]
    with evaluating(model), no_grad():
        text = Continuation(model, prompts, max_new_tokens, source, sinks)
        for step in range(max_new_tokens):
            logits = text.next_logits()
            if not step:
                check_stops(stops, logits.shape[-1])
            seen = text.seen(logits.shape[-1]) if repetition_penalty != 1 else None
            if draw is None:
                new = likeliest(logits, repetition_penalty, seen)
            else:
                options = temperature, top_k, top_p, min_p, repetition_penalty, seen
                new = drawn(next_token_probabilities(logits, *options), draw)
            new = np.where(ended, stops[0], new) if ended.any() else new
            text.append(new)
            stopped = callback is not None and callback(int(new[0]) if ndim == 1 else new) is True
            for row in np.flatnonzero(np.isin(new, stops) & ~ended) if stops.size else ():
                ended[row], lengths[row] = True, len(prompts[row]) + step + 1
            if stopped or ended.all():
                break
    if ndim == 0:
        return [text.text(i)[:length] for i, length in enumerate(lengths)]
    return text.tokens if ndim == 2 else text.tokens[0]
