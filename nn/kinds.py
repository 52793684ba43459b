"""Layers that a model may choose by a word: kinds of attention with their options, of norm, of feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minigrad.errors import ArgumentError
from .attention import MultiHeadAttention
from .feedforward import GEGLU, FeedForward, SwiGLU
from .linear_attention import LinearAttention
from .module import Module
from .normalization import LayerNorm, RMSNorm

# The kinds of attention, and the option that says more of each.
KINDS = {"full": "", "window": "window", "blocks": "pattern", "linear": "linear"}
NORMS: dict[str, type[Module]] = {"rms": RMSNorm, "layer": LayerNorm}
FEED_FORWARD = ("swiglu", "geglu", "gelu")


def norm_of(kind: str) -> Any:
    """The class of norms, RMSNorm or LayerNorm, that is called so."""
    if kind not in NORMS:
        raise ArgumentError(f"a norm of {', '.join(map(repr, NORMS))}", repr(kind), "'rms' has no mean and no bias")
    return NORMS[kind]


def feed_forward(kind: str, d_model: int, d_ff: int | None, recompute: bool | str, **options: Any) -> Module:
    """The feed-forward layer of a block: one with a gate, or two matrices with biases and GELU (4 d_model wide)."""
    if kind not in FEED_FORWARD:
        raise ArgumentError(f"an ffn of {', '.join(map(repr, FEED_FORWARD))}", repr(kind), "'swiglu' is LLaMA's")
    if kind != "gelu":
        return (SwiGLU if kind == "swiglu" else GEGLU)(d_model, d_ff, recompute=recompute, **options)
    if recompute:
        got = f"recompute={'ffn' if recompute is True else recompute!r} and ffn='gelu'"
        raise ArgumentError("recompute='none' or 'block' without a gate", got, "'block' computes all of it again")
    return FeedForward(d_model, 4 * d_model if d_ff is None else d_ff, "gelu_tanh", **options)


def self_attention(
    d_model: int, num_heads: int, num_kv_heads: int | None, linear: Mapping[str, Any] | None, **options: Any
) -> MultiHeadAttention:
    """The layer of a block: linear attention where there are options of it, which may be none: {}."""
    if linear is None:
        return MultiHeadAttention(d_model, num_heads, num_kv_heads, **options)
    options.pop("dropout", None)  # of weights, which it hasn't
    return LinearAttention(d_model, num_heads, num_kv_heads, **options, **linear)


def turned_size(head_dim: int, linear: Mapping[str, Any] | None) -> int | None:
    """The size of queries and keys that rope turns in a layer, None where it turns none."""
    linear = linear or {}
    return (linear.get("feature_dim") or head_dim) if linear.get("rope_place", "before") else None


def window_of(attention: Any) -> int | None:
    """How many keys a layer keeps: its window, None for all of them, 0 where it has a state."""
    return 0 if isinstance(attention, LinearAttention) else getattr(attention, "window", None)


def shapes_of(num_layers: int, attention: Any, **options: Any) -> list[dict[str, Any]]:
    """What the options of kinds are in each layer, from options that are one for all layers or a list.

    >>> shapes_of(2, ["full", "window"], window=8, pattern=None)
    [{'window': None, 'pattern': None}, {'window': 8, 'pattern': None}]
    """
    given = {"attention": attention, **options}
    lists = {name: list(x) if isinstance(x, list | tuple) else [x] * num_layers for name, x in given.items()}
    for name, values in lists.items():
        if len(values) != num_layers:
            raise ArgumentError(f"{name}, one or one for each of {num_layers} layers", f"{len(values)}", "None is none")
    kinds = lists.pop("attention")
    if wrong := [kind for kind in kinds if kind not in (None, *KINDS)]:
        raise ArgumentError(f"attention of the kinds {', '.join(map(repr, KINDS))}", repr(wrong[0]), "'full' is usual")
    shapes = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    if attention is None:
        return shapes
    for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if kind == "linear" and shape["linear"] is None:
            shape["linear"] = {}  # elu + 1
        for name, value in shape.items():
            if not isinstance(given[name], list | tuple) and name != KINDS[kind]:
                shape[name] = None  # of the other layers
            elif (value is not None) != (name == KINDS[kind]):
                got = f"attention={kind!r} and {name}={value} in layer {i}"
                raise ArgumentError(
                    f"a {name} in layers of its kind, and in no others", got, "a list may have None for those"
                )
    if unused := [name for name in shapes[0] if given[name] is not None and all(s[name] is None for s in shapes)]:
        got = f"{unused[0]}={given[unused[0]]}, attention={attention!r}"
        raise ArgumentError(f"a layer that takes the {unused[0]}", got, "leave one of them out")
    return shapes
