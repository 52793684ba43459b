"""Which parameters an optimizer works on: lists of them, checked, and the groups that weight decay asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minigrad.backend import Array, is_array
from minigrad.errors import DTypeError, ShapeError
from minigrad.messages.explain import explained
from minigrad.tensor import Tensor


def as_parameters(params: Any) -> list[Tensor]:
    """A list of Tensors from any iterable of them, or a DTypeError that says what came instead and where."""
    if isinstance(params, Tensor | set) or not isinstance(params, Iterable):
        raise DTypeError("a list or generator of Tensors", _kind(params), _hint(params))
    found = list(params)
    for place, param in enumerate(found):
        if not isinstance(param, Tensor):
            raise DTypeError("Tensors as parameters", f"{_kind(param)} at position {place}", _hint(param))
    return found


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{value!r}, of type {kind}" if isinstance(value, str | int | float) else kind


def _hint(value: Any) -> str:
    if isinstance(value, Tensor):
        return "put a single parameter into a list: [p]"
    if isinstance(value, set):
        return "a set has no order; make it a list"
    if hasattr(value, "parameters"):
        return "pass model.parameters()"
    return "pass model.parameters(), or a list of dicts with 'params' and options of their own"


def param_name(param: Tensor, place: int) -> str:
    """How messages call a parameter: by its name where a module gave it one, else by its place in the list."""
    return f"parameter {param.name!r}" if param.name else f"parameter {place} of shape {param.shape}"


def gradient_of(param: Tensor, place: int) -> Array:
    """``param.grad``, checked: a plain array in the parameter's shape."""
    grad: Array = param.grad
    if not is_array(grad):
        raise DTypeError(f"a plain array as gradient of {param_name(param, place)}", _kind(grad), "assign g.data")
    if grad.shape != param.shape:
        hint = "sum it over the axes that were broadcast"
        raise ShapeError(
            f"a gradient of shape {param.shape} for {param_name(param, place)}", f"shape {grad.shape}", hint
        )
    return grad


@explained
def decay_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups in which weight decay acts on matrices only.

    Arrays of two and more dimensions (weights of linear layers, embeddings) are multiplied into activations, and decay
    keeps their scale in check. Biases and gains of norms, the vectors, have no scale to keep in check: decay would only
    pull them to 0, so theirs is 0. Frozen parameters are kept (an optimizer skips them while they are frozen); an empty
    group is left out. The rule is that of GPT-3 and its successors (Brown et al. 2020, appendix B; nanoGPT).

    >>> import minigrad as mg
    >>> named = [("weight", mg.ones((2, 3), requires_grad=True)), ("bias", mg.zeros(2, requires_grad=True))]
    >>> [(len(group["params"]), group["weight_decay"]) for group in decay_groups(named, 0.1)]
    [(1, 0.1), (1, 0.0)]
    """
    pairs = list(named_parameters)
    for place, pair in enumerate(pairs):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            got = f"{type(pair).__name__} at position {place}"
            raise DTypeError("pairs of a name and a Tensor", got, "pass model.named_parameters()")
    matrices = [param for _, param in pairs if param.ndim >= 2]
    vectors = [param for _, param in pairs if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
