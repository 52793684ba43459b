"""The gradient of one update over several micro-batches, and what to say when it is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import minigrad as mg
from minigrad.backend import array_module
from minigrad.errors import NonFiniteError


def backward(loss_of: Callable[..., Any], micro_batches: Sequence[tuple[Any, ...]], counts: Sequence[int]) -> Any:
    """The loss over all counted tokens of the micro-batches, with its gradient added to that of the parameters.

    It is a number on the device of the parameters, which nobody waits for.

    ``loss_of(*micro_batch)`` is the mean over the tokens of one micro-batch; ``counts`` says how many these are. With
    n_i tokens in micro-batch i, loss = Σ n_i loss_i / Σ n_i: the same as one batch of them all, whatever their lengths.
    """
    total = sum(counts) or 1
    result: Any = 0.0
    for micro_batch, count in zip(micro_batches, counts, strict=True):
        loss = loss_of(*micro_batch) * (count / total)
        loss.backward()
        result = result + loss.data
    return result


def first_bad(before: Any, step: int, good: Any) -> Any:
    """The first step that was not ``good``, 0 so far; a number where ``good`` is, on the host or on a GPU."""
    return array_module(good).where((before > 0) | good, before, step)


def non_finite(what: str, model: Any, forward: Callable[[], Any]) -> NonFiniteError:
    """The error for a loss or a gradient (``what``) that is not finite; it names the first tensor at fault.

    First in the order of the computation: the weights, the modules' outputs when ``forward`` runs once more, and the
    gradients, from the last parameter to the first.
    """
    parameters = list(model.named_parameters())
    culprit = (
        _first((f"weight {name}", parameter.data) for name, parameter in parameters)
        or _first((f"output of {name}", out.data) for name, out in _outputs(model, forward))
        or _first((f"gradient of {name}", p.grad) for name, p in reversed(parameters) if p.grad is not None)
        or "no output of a module"
    )
    hint = "a lower --learning-rate, or --detect-anomaly, which names the operation"
    return NonFiniteError(f"a finite {what}", f"NaN or infinity, first in {culprit}", hint)


def _first(arrays: Iterable[tuple[str, Any]]) -> str:
    for name, array in arrays:
        if not bool(array_module(array).isfinite(array).all()):
            return name
    return ""


def _outputs(model: Any, forward: Callable[[], Any]) -> list[tuple[str, Any]]:
    """The output of each module, by name, in the order in which ``forward`` computes them."""
    outputs: list[tuple[str, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.append((name, output))

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with mg.no_grad(), np.errstate(all="ignore"):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return outputs
