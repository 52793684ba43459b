"""A TransformerLM as a GGUF file, which llama.cpp runs: weights as they are or in blocks, settings, a tokenizer.

Its architecture there is "llama", which turns pairs of neighbours (our "interleaved" layout). In a model of the "half"
layout the rows of the projections of queries and keys are put into that order. A row is whole blocks, so the order of
rows doesn't touch what is quantized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, MissingFileError, MissingPackageError
from minigrad.files import atomic_write
from minigrad.kernels.quantized_blocks import LAYOUTS, encoded
from minigrad.serialize import checked_path
from ..activation import Dropout
from ..attention import MultiHeadAttention
from ..containers import ModuleList
from ..families import TRAITS, arguments_from
from ..feedforward import SwiGLU
from ..linear import Embedding, Linear
from ..normalization import RMSNorm
from ..positional import RotaryEmbedding
from ..transformer import TransformerBlock, TransformerLM
from .quantization import Quantized, QuantizedEmbedding, QuantizedLinear

# Our name of a part -> that of GGUF.
BLOCK = {
    "ln1": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.output_proj": "attn_output",
    "ln2": "ffn_norm",
    "ffn.w1": "ffn_gate",
    "ffn.w2": "ffn_down",
    "ffn.w3": "ffn_up",
}
OUTER = {"token_embeddings": "token_embd", "ln_final": "output_norm", "lm_head": "output"}
TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
FILE_TYPES = {"float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7}  # general.file_type
PARTS = {
    TransformerLM, TransformerBlock, ModuleList, MultiHeadAttention, RotaryEmbedding, SwiGLU, RMSNorm, Dropout, Linear,
    Embedding, QuantizedLinear, QuantizedEmbedding,
}  # fmt: skip


def save_gguf(
    model: TransformerLM,
    path: str | os.PathLike[str],
    *,
    weights: str = "float16",
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` as a GGUF file of the architecture "llama", which llama.cpp runs to the same logits.

    - weights: how matrices are written that aren't quantized yet: "float32", "float16", "q8_0", "q4_0" or "q4_1", where
      a width that is no multiple of 32 is float16. Those of ``nn.quantize`` are written as they are; norms and biases
      are float32
    - tokenizer: keys of GGUF with their values, as ``{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": […],
      …}``; None is a file whose prompts are ids

    An ArgumentError names what the model has that the architecture hasn't: windows, linear attention, GELU, LayerNorm,
    learned positions, qk_norm, a bias of the head, a scaling of rope but "linear", adapters. Needs the package gguf.
    The format: llama.cpp's docs/gguf.md.

    >>> import nn
    >>> model = nn.TransformerLM(256, context_length=8, d_model=32, num_layers=1, num_heads=2, ffn="gelu")
    >>> try:
    ...     save_gguf(model, "model.gguf")
    ... except ArgumentError as error:
    ...     print(error.got)
    ffn='gelu'
    """
    if not isinstance(model, TransformerLM):
        raise ArgumentError("a TransformerLM", type(model).__name__, "no other has a counterpart in llama.cpp")
    if weights not in TYPES:
        raise ArgumentError(f"weights of {', '.join(map(repr, TYPES))}", repr(weights), "'float16' is usual")
    _check_words(model)
    path = Path(checked_path(path, "a file", "model.gguf"))
    if not path.parent.is_dir():
        raise MissingFileError("a folder to save in", f"no folder {str(path.parent)!r}", "os.makedirs makes it")
    library = gguf_library()
    with atomic_write(path) as temporary:
        writer = library.GGUFWriter(temporary, "llama")
        _add_settings(writer, model, weights)
        for key, value in (tokenizer or {"tokenizer.ggml.model": "no_vocab"}).items():
            _add(writer, key, value)
        for name, array, kind in _tensors(model, weights):
            writer.add_tensor(name, array, raw_dtype=library.GGMLQuantizationType[TYPES[kind]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gguf_library() -> Any:
    """The package gguf; an error that says how to install it where it is missing."""
    try:
        import gguf
    except ImportError:
        raise MissingPackageError("the package gguf", "none", "pip install -e '.[gguf]', of minigrad") from None
    return gguf


def _check_words(model: TransformerLM) -> None:
    """Refuse what the architecture has no word for."""
    attns = [getattr(block, "attn", None) for block in model.layers]
    traits = {name: value for name, value in model.traits.items() if name != "attention_bias" and value != TRAITS[name]}
    faults = [f"{name}={value!r}" for name, value in traits.items()]
    if 0 in model.windows:
        faults.append("linear attention")
    elif set(model.windows) != {None}:
        faults.append(f"windows of {model.windows}")
    if any(getattr(attn, "pattern", None) is not None for attn in attns):
        faults.append("a pattern of attention")
    if getattr(model.lm_head, "bias", None) is not None:
        faults.append("a bias of the head")
    scaling = {} if faults else dict(model.layers[0].attn.rope.scaling or {})
    if (kind := scaling.get("rope_type", scaling.get("type"))) not in (None, "default", "linear"):
        faults.append(f"rope_scaling {kind!r}")
    if isinstance(model.token_embeddings, Quantized) and model.embedding_scale is not None:
        faults.append("a scale of quantized embeddings")
    odd = [path for path, part in model.named_modules() if type(part) not in PARTS or "forward" in vars(part)]
    if odd and not faults:
        faults.append(f"parts of other classes: {', '.join(odd[:4])}")
    if not faults and len({norm.eps for norm in model.modules() if isinstance(norm, RMSNorm)}) > 1:
        faults.append("several eps of norms")
    if not faults and len({block.ffn.w1.out_features for block in model.layers}) > 1:
        faults.append("several d_ff")
    if faults:
        hint = "nn.save_pretrained writes other families, which llama.cpp converts"
        if any("adapters" in path for path in odd):
            hint = "nn.merge_adapters(model) first"
        expected = 'a model that llama.cpp\'s architecture "llama" has words for'
        raise ArgumentError(expected, ", ".join(faults), hint)


def _add_settings(writer: Any, model: TransformerLM, weights: str) -> None:
    sizes, attn = arguments_from(model), model.layers[0].attn
    writer.add_name("minigrad")
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_context_length(sizes["context_length"])
    writer.add_embedding_length(sizes["d_model"])
    writer.add_block_count(sizes["num_layers"])
    writer.add_feed_forward_length(sizes["d_ff"])
    writer.add_head_count(sizes["num_heads"])
    writer.add_head_count_kv(sizes["num_kv_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["norm_eps"])
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_rope_freq_base(float(attn.rope.theta))
    if attn.rope.scaling and (factor := attn.rope.scaling.get("factor")):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", float(factor))
    kinds = [layer.layout for layer in model.modules() if isinstance(layer, Quantized)]
    writer.add_file_type(FILE_TYPES[max(kinds, key=kinds.count) if kinds else weights])
    writer.add_quantization_version(2)


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    kinds.get(type(value), writer.add_array)(key, value)


def _tensors(model: TransformerLM, weights: str) -> Iterator[tuple[str, Array, str]]:
    """Each array under GGUF's name, and what its numbers are."""
    tied = model.lm_head.weight is model.token_embeddings.weight and model.embedding_scale is None
    for path, layer in _layers(model):
        for kind in ("weight", "bias"):
            tensor = getattr(layer, kind, None)
            if tensor is None or (path == "lm_head" and tied):
                continue
            array = _in_pairs(model, path, to_numpy(tensor.data))
            if path == "token_embeddings" and model.embedding_scale is not None:
                array = array * array.dtype.type(model.embedding_scale)
            layout = "float32" if array.ndim == 1 else weights
            if array.ndim == 2 and isinstance(layer, Quantized):
                layout = layer.layout
            elif layout in LAYOUTS:
                layout = "float16" if array.shape[1] % LAYOUTS[layout].numbers else layout
                array = encoded(array, layout)
            yield f"{_theirs(path)}.{kind}", _as_written(array, layout), layout


def _layers(model: TransformerLM) -> Iterator[tuple[str, Any]]:
    """The parts that have weights, by their names; a block that stands twice comes twice."""
    yield "token_embeddings", model.token_embeddings
    for number, block in enumerate(model.layers):
        for part in BLOCK:
            layer: Any = block
            for name in part.split("."):
                layer = getattr(layer, name)
            yield f"layers.{number}.{part}", layer
    yield "ln_final", model.ln_final
    yield "lm_head", model.lm_head


def _theirs(path: str) -> str:
    if path in OUTER:
        return OUTER[path]
    _, number, part = path.split(".", 2)
    return f"blk.{number}.{BLOCK[part]}"


def _in_pairs(model: TransformerLM, path: str, array: Array) -> Array:
    """Rows of a projection of queries or keys of the half layout, those that are turned together next to each other."""
    attn = model.layers[0].attn
    if not path.endswith((".q_proj", ".k_proj")) or attn.rope.layout != "half":
        return array
    split = array.reshape(-1, 2, attn.head_dim // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def _as_written(array: Array, layout: str) -> Array:
    """The array in the dtype that the package expects: bytes for blocks."""
    if layout == "float16":
        return np.ascontiguousarray(array).view(np.float16)
    return np.ascontiguousarray(array, np.float32 if layout == "float32" else np.uint8)
