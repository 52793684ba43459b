"""Prefixes in and out as Hugging Face's PEFT writes them: one array of all keys and values, without a projection.

PEFT puts a prefix into transformers' cache, so positions of the text count from ``length`` there, and from 0 here. A
score depends on the turn between query and key alone: a key of theirs is ours, turned on by ``length`` positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, FileFormatError
from minigrad.messages.explain import describe
from ..attention import MultiHeadAttention
from ..checks import is_whole
from ..module import Module
from ..pretrained import in_half_layout
from ..transformer import TransformerLM
from .adapted import M, layers_for
from .peft import IRRELEVANT, WEIGHTS, WRITERS, Files
from .prefixes import Prefix, PrefixedAttention, adapt, turned_by

ARRAY = "prompt_embeddings"  # (length, layers · 2 · heads · head_dim): of each layer the keys, then the values
# How a prefix was made is done once it is saved: a projection has been applied.
READ = {"peft_type", "num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers"}
MADE = {"encoder_hidden_size", "prefix_projection", "init_weights", "num_transformer_submodules"}


def maps(model: Module, paths: set[str]) -> bool:
    """Whether PEFT can have a prefix of these layers: all those of a TransformerLM, with full attention and a rope."""
    if not isinstance(model, TransformerLM) or set(model.windows) != {None} or model.position_embeddings is not None:
        return False
    return paths == {f"layers.{i}.attn" for i in range(len(model.layers))} and all(
        layer.attn.pattern is None and layer.attn.rope is not None for layer in model.layers
    )


def files_of(model: Any, prefixes: Mapping[str, Prefix], base_model: str | None) -> Files:
    """adapter_config.json and the array of a prefix that ``maps``."""
    attn: MultiHeadAttention = model.layers[0].attn
    parts = []
    for i, layer in enumerate(model.layers):
        prefix = prefixes[f"layers.{i}.attn"]
        keys = turned_by(layer.attn.rope, prefix.keys.data, prefix.length)
        parts += [_in_their_layout(model, i, to_numpy(keys)), to_numpy(prefix.values.data)]
    array = np.stack(parts).transpose(2, 0, 1, 3)  # (length, layers · 2, heads, head_dim)
    config = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "num_virtual_tokens": len(array),
        "token_dim": attn.num_kv_heads * attn.head_dim,
        "num_transformer_submodules": 1,
        "num_attention_heads": attn.num_kv_heads,
        "num_layers": len(model.layers),
        "encoder_hidden_size": attn.num_kv_heads * attn.head_dim,
        "prefix_projection": False,
    }
    return config, {ARRAY: np.ascontiguousarray(array.reshape(len(array), -1))}


def load_prefix(model: M, config: Mapping[str, Any], arrays: Mapping[str, Array], name: str) -> M:
    """Adapt ``model`` by the prefix of these files."""
    layers = layers_for(model, PrefixedAttention)
    if not isinstance(model, TransformerLM) or not maps(model, set(layers)):
        hint = "PEFT's prefixes are of all layers, and count as positions"
        raise ArgumentError("a TransformerLM with full attention and rotary positions", describe(model), hint)
    if other := {n: value for n, value in config.items() if n not in READ | MADE | IRRELEVANT and value}:
        got = ", ".join(f"{n}={value!r}" for n, value in sorted(other.items()))
        raise ArgumentError("settings of plain prefix tuning", got, "load_adapter has no counterpart")
    attn = model.layers[0].attn
    heads, size, count = attn.num_kv_heads, attn.head_dim, len(model.layers)
    length: Any = config.get("num_virtual_tokens")
    array: Any = arrays.get(ARRAY)
    if not is_whole(length, 1) or arrays.keys() != {ARRAY} or array is None:
        got = f"num_virtual_tokens={length!r}, {sorted(arrays)}"
        raise FileFormatError(f"num_virtual_tokens from 1, and {ARRAY} in {WEIGHTS}", got, WRITERS)
    facts = {"token_dim": heads * size, "num_attention_heads": heads, "num_layers": count}
    odd = [f"{n}={config[n]!r}" for n, value in facts.items() if config.get(n, value) not in (value, None)]
    if array.shape != (shape := (length, count * 2 * heads * size)) or odd:
        got = ", ".join([f"{array.shape}", *odd])
        raise FileFormatError(f"a prefix of this model, {shape} with {facts}", got, "it must be the prefix's own base")
    parts = array.reshape(length, 2 * count, heads, size).transpose(1, 2, 0, 3)
    start = {}
    for i, layer in enumerate(model.layers):
        adapted: Any = layers[f"layers.{i}.attn"]
        theirs = _in_their_layout(model, i, parts[2 * i], back=True).astype(layer.attn.k_proj.weight.dtype)
        keys = turned_by(adapted.rope, theirs, -length)
        start[f"layers.{i}.attn"] = keys, parts[2 * i + 1].astype(keys.dtype)
    return adapt(model, layers, length, name, 0, start)


def _in_their_layout(model: TransformerLM, i: int, keys: Array, back: bool = False) -> Array:
    """Keys (heads, n, d) with features in the order that transformers has, or from there ``back`` to ours."""
    rows = keys.swapaxes(1, 2).reshape(-1, keys.shape[1])
    turned = in_half_layout(model, f"layers.{i}.attn.k_proj.weight", rows, back)
    return turned.reshape(keys.shape[0], keys.shape[2], -1).swapaxes(1, 2)
