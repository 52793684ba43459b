"""Adapters in and out: the folders of Hugging Face's PEFT where it has the method, else folders of our own.

Both hold adapter_config.json and adapter_model.safetensors. Ours say their ``method`` there, and have our names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigrad import load, save
from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, FileFormatError, MiniGradError
from minigrad.files import read_json, write_whole
from minigrad.serialize import checked_path
from ..module import Module
from ..parameter import hollow
from ..pretrained import prepared
from . import peft, peft_prefixes
from .adapted import AdaptedLinear, M, adapter_of, add, check_adapter, check_name, few, layers_for
from .adapters import Bottleneck
from .lora import LowRank
from .peft import WEIGHTS, WRITERS, Files
from .prefixes import Prefix, PrefixedAttention

CONFIG = "adapter_config.json"
SETTINGS: dict[str, dict[str, type]] = {  # of each method that we have a format of our own for
    "adapters": {"size": int, "activation": str},
    "prefixes": {"length": int},
}


def save_adapter(
    model: Module, folder: str | os.PathLike[str], name: str = "default", *, base_model: str | None = None
) -> None:
    """Write the adapter ``name`` as a folder, which ``peft.PeftModel.from_pretrained`` loads where PEFT has the method.

    adapter_config.json and adapter_model.safetensors; the folder is made. PEFT has LoRA, and prefixes of all layers of
    a TransformerLM with full attention and rotary positions: they get transformers' names and order of features, with
    the same logits. A Phi-3 is adapted under the names of the LLaMA or Mistral that save_pretrained makes of it.
    LoRA of other models keeps their names. What PEFT hasn't, other prefixes and ``nn.adapters``, has a format of its
    own, with the names that the parts have here. base_model: the name or folder of the base, for who reads it.

    >>> import nn, os, tempfile
    >>> model = nn.lora(nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2), rank=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nn.save_adapter(model, folder)
    ...     print(sorted(os.listdir(folder)))
    ['adapter_config.json', 'adapter_model.safetensors']
    """
    check_adapter(model, name)
    parts = adapter_of(model, name)
    folder = prepared(folder, (WEIGHTS, CONFIG))
    kind = type(next(iter(parts.values())))
    if kind is LowRank:
        config, arrays = peft.files_of(model, parts, base_model)
    elif kind is Prefix and peft_prefixes.maps(model, set(parts)):
        config, arrays = peft_prefixes.files_of(model, parts, base_model)
    else:
        config, arrays = _own_files(parts, "prefixes" if kind is Prefix else "adapters", base_model)
    save(folder / WEIGHTS, arrays, {"format": "pt"})
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def load_adapter(model: M, folder: str | os.PathLike[str], name: str = "default") -> M:
    """Adapt ``model`` in place by the adapter in a folder of PEFT or of ``save_adapter``, under ``name``.

    As after ``nn.lora`` the adapter is active and can be trained on, and the model is returned. Which layers it adapts,
    the file says. An ArgumentError names the settings and methods that have no counterpart, and a FileFormatError tells
    of an adapter that is of another model, or of a folder that isn't one.

    >>> import nn, tempfile
    >>> sizes = {"vocab_size": 10, "context_length": 8, "d_model": 16, "num_layers": 1, "num_heads": 2}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nn.save_adapter(nn.lora(nn.TransformerLM(**sizes), rank=2), folder)
    ...     model = nn.load_adapter(nn.TransformerLM(**sizes), folder)
    >>> model.layers[0].attn.q_proj.adapters["default"]
    LowRank(rank=2, alpha=16.0, dropout=0.0)
    """
    folder = Path(checked_path(folder, "a folder", "adapters/code"))
    config = read_json(folder / CONFIG, f"a folder of PEFT, with {CONFIG}", WRITERS)
    readers: dict[Any, Any] = {
        "LORA": peft.load_lora,
        "PREFIX_TUNING": peft_prefixes.load_prefix,
        **dict.fromkeys(SETTINGS, _load_own),
    }
    method = config.get("peft_type", config.get("method"))
    if not isinstance(method, str) or method not in readers:
        expected = "a peft_type of 'LORA' or 'PREFIX_TUNING', or our 'adapters' or 'prefixes' as method"
        raise ArgumentError(expected, repr(method), "other methods compute something else")
    adapted: M = readers[method](model, config, load(folder / WEIGHTS), name)
    return adapted


# ---- our own format --------------------------------------------------------------------------------------------------


def _own_files(parts: Mapping[str, Any], method: str, base_model: str | None) -> Files:
    first = next(iter(parts.values()))
    config = {"method": method, "base_model_name_or_path": base_model}
    config |= {name: getattr(first, name) for name in SETTINGS[method]}
    return config, {
        f"{path}.{name}".lstrip("."): to_numpy(array)
        for path, part in parts.items()
        for name, array in part.state_dict().items()
    }


def _load_own(model: M, config: Mapping[str, Any], arrays: Mapping[str, Array], name: str) -> M:
    method = config["method"]
    settings = {key: config.get(key) for key in SETTINGS[method]}
    if wrong := {key: value for key, value in settings.items() if type(value) is not SETTINGS[method][key]}:
        raise FileFormatError(f"settings {list(settings)} in {CONFIG}", f"{wrong}", "nn.save_adapter writes them")
    if other := {key: x for key, x in config.items() if key not in {*settings, "method", "base_model_name_or_path"}}:
        raise ArgumentError(f"settings {list(settings)}", f"{other}", "load_adapter has no counterpart")
    check_name(model, name)
    kind: Any = PrefixedAttention if method == "prefixes" else AdaptedLinear
    paths = sorted({key.rpartition(".")[0] for key in arrays})
    layers = layers_for(model, kind)
    own = "it must be the adapter's own base"
    if not paths or (absent := [path for path in paths if path not in layers]):
        got = f"arrays of {few(absent)}" if paths else "no array"
        raise FileFormatError(f"arrays of layers of this model in {WEIGHTS}", got, own)
    made: dict[str, Module] = {}
    try:
        for path in paths:
            with hollow():  # shapes are compared before any memory is taken
                made[path] = _empty(method, layers[path], settings)
            start = f"{path}." if path else ""
            state = {k.removeprefix(start): array for k, array in arrays.items() if k.rpartition(".")[0] == path}
            made[path].load_state_dict(state)
    except MiniGradError as error:
        raise FileFormatError(f"an adapter of this model, {error.expected}", error.got, own) from None
    return add(model, {path: layers[path] for path in paths}, kind, made, name)


def _empty(method: str, layer: Any, settings: Mapping[str, Any]) -> Module:
    """A part of an adapter, whose numbers are to be loaded."""
    if method == "prefixes":
        return Prefix(layer, settings["length"], 0)
    return Bottleneck(layer, settings["size"], settings["activation"], 0)
