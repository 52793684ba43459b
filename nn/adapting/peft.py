"""LoRA in and out as Hugging Face's PEFT writes it, adapter_config.json and adapter_model.safetensors.

Every setting of an adapter_config.json is read, known to leave the result alone, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from minigrad.backend import Array, to_numpy
from minigrad.errors import ArgumentError, FileFormatError
from ..checks import is_whole
from ..families import FAMILIES, model_type_of
from ..linear import Linear
from ..module import Module
from ..pretrained import in_half_layout
from ..transformer import TransformerLM
from .adapted import AdaptedLinear, M, layers_for
from .lora import LowRank, adapt

Files: TypeAlias = tuple[dict[str, Any], dict[str, Array]]  # adapter_config.json, and the arrays by name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRITERS = "save_pretrained of a PeftModel writes such folders, and nn.save_adapter"
PREFIX = "base_model.model."  # of the names that PEFT gives to a model's parts
READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "peft_type", "bias", "init_lora_weights"}
BESIDE_BASE = (None, True, False, "gaussian", "orthogonal", "eva")  # starts that leave the base's weights alone

# Settings that the result doesn't depend on: where the base lies, how PEFT runs, and of methods that are off.
IRRELEVANT = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "loftq_config", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip


def files_of(model: Module, adapters: Mapping[str, LowRank], base_model: str | None) -> Files:
    """adapter_config.json and the arrays of a LoRA, given by our names of its layers."""
    weights = {}
    for path, adapter in adapters.items():
        their_path = f"{PREFIX}{_their_path(model, path)}"
        weights[f"{their_path}.lora_A.weight"] = to_numpy(adapter.lora_A.data)
        weights[f"{their_path}.lora_B.weight"] = _rows(model, path, adapter.lora_B.data)
    first = next(iter(adapters.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model, TransformerLM) else None,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if first.alpha.is_integer() else first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rank_stabilized,
        "target_modules": _targets(model, list(adapters)),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    return config, weights


def load_lora(model: M, config: Mapping[str, Any], arrays: Mapping[str, Array], name: str) -> M:
    """Adapt ``model`` by the LoRA of these files."""
    _check_settings(config)
    layers = {_their_path(model, path): (path, layer) for path, layer in layers_for(model, AdaptedLinear).items()}
    halves = _halves(arrays, {there: layer for there, (_, layer) in layers.items()}, config["r"])
    _check_targets(config.get("target_modules"), set(halves), set(layers))
    adapt(
        model,
        dict(layers[there] for there in halves),
        name,
        config["r"],
        config["lora_alpha"],
        config.get("lora_dropout") or 0.0,
        config.get("use_rslora") or False,
        generator=0,  # all that is drawn is replaced
    )
    for there, (a, b) in halves.items():
        path, layer = layers[there]
        state = {"lora_A": a, "lora_B": _rows(model, path, b, back=True)}
        layer.adapters[name].load_state_dict(state)
    return model


def _their_path(model: Module, path: str) -> str:
    """The name that transformers has for a layer of a TransformerLM; other layers keep ours."""
    if not isinstance(model, TransformerLM):
        return path
    if (kind := model_type_of(model)) == "gpt2":
        hint = "transformers has one layer for queries, keys and values there"
        raise ArgumentError("a family whose layers PEFT knows one by one", repr(kind), hint)
    try:
        return FAMILIES[kind].theirs(f"{path}.weight").removesuffix(".weight")
    except (KeyError, ValueError):  # a part that was exchanged
        return path


def _rows(model: Module, path: str, b: Array, back: bool = False) -> Array:
    """B with its rows in the order that transformers has, or from there ``back`` to ours."""
    return in_half_layout(model, f"{path}.weight", b, back) if isinstance(model, TransformerLM) else to_numpy(b)


def _targets(model: Module, paths: list[str]) -> list[str]:
    """target_modules: the last words of names where they tell the layers from all others, else whole names."""
    adapted = {_their_path(model, path) for path in paths}
    words = {path.rpartition(".")[2] for path in adapted}
    of_them = {
        path
        for path in map(partial(_their_path, model), layers_for(model, AdaptedLinear))
        if path.rpartition(".")[2] in words
    }
    return sorted(words if of_them == adapted else adapted)


def _check_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings that change the result and have no counterpart; what is off says nothing, known or not."""
    other = {name: value for name, value in config.items() if name not in READ | IRRELEVANT and value}
    other |= {"bias": config["bias"]} if config.get("bias", "none") != "none" else {}
    if (start := config.get("init_lora_weights")) not in BESIDE_BASE:
        other["init_lora_weights"] = start
    if other:
        got = ", ".join(f"{name}={value!r}" for name, value in sorted(other.items()))
        raise ArgumentError("settings of a plain LoRA", got, "load_adapter has no counterpart")
    numbers = {"r": is_whole(config.get("r"), 1), "lora_alpha": isinstance(config.get("lora_alpha"), int | float)}
    if wrong := [f"{name}={config.get(name)!r}" for name, right in numbers.items() if not right]:
        raise FileFormatError(f"r, a whole number from 1, and lora_alpha in {CONFIG}", ", ".join(wrong), WRITERS)


def _halves(arrays: Mapping[str, Array], layers: Mapping[str, Linear], rank: int) -> dict[str, tuple[Array, Array]]:
    """A and B of each layer, by its name there, or a FileFormatError that names all that isn't of this model."""
    found: dict[str, dict[str, Array]] = {}
    faults = []
    for name, array in arrays.items():
        there, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        there, part = (there, part) if there else (name.removeprefix(PREFIX).removesuffix(".base_layer.weight"), "base")
        layer = layers.get(there)
        if layer is None or part not in ("A.weight", "B.weight", "base"):
            faults.append(f"{name}, which this model has not")
            continue
        out_features, in_features = layer.weight.shape
        shape = {"A.weight": (rank, in_features), "B.weight": (out_features, rank)}.get(part, layer.weight.shape)
        if array.shape != shape:
            faults.append(f"{name} {array.shape}, not {shape}")
        elif part == "base" and not np.array_equal(array, to_numpy(layer.weight.data)):
            faults.append(f"{name}, a base with other numbers")
        elif part != "base":
            found.setdefault(there, {})[part] = array
    faults += [f"one half of {there}" for there, parts in found.items() if len(parts) < 2]
    if faults or not found:
        got = "; ".join(faults[:4]) + f" and {len(faults) - 4} more" * (len(faults) > 4) or "no array"
        raise FileFormatError(f"A and B of layers of this model in {WEIGHTS}", got, "it must be the adapter's own base")
    return {there: (parts["A.weight"], parts["B.weight"]) for there, parts in found.items()}


def _check_targets(targets: Any, adapted: set[str], layers: set[str]) -> None:
    """Refuse arrays that are not those of all layers that a list of names means.

    A pattern, a text, is not run: it is a stranger's, and the names of the arrays say the same.
    """
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        meant = {path for path in layers if any(path == t or path.endswith(f".{t}") for t in targets)}
        if meant != adapted:
            got = f"arrays for {len(adapted)} layers, {sorted(meant ^ adapted)[:4]} differ"
            raise FileFormatError(
                f"A and B of the {len(meant)} layers that target_modules={targets} means", got, WRITERS
            )
    elif not isinstance(targets, str | None):
        raise FileFormatError(f"target_modules in {CONFIG}, a text or a list of them", repr(targets), WRITERS)
