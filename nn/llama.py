"""LLaMA in and out: folders of Hugging Face's transformers (config.json and safetensors) to TransformerLM and back.

Every setting of a config.json is read, known to leave the logits alone, or refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minigrad import load, save
from minigrad.backend import Array, DType, to_numpy
from minigrad.errors import ArgumentError, FileFormatError, StateError
from minigrad.files import read_json
from minigrad.messages.explain import describe
from minigrad.serialize import checked_path, load_shapes, write_whole
from .checks import check_probability, is_whole
from .parameter import hollow
from .transformer import TransformerLM

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
WRITERS = "save_pretrained of transformers writes such files, and save_llama"
ONE_MODEL = f"the weights and {CONFIG} must be of one model"

# Our name of a part of a block -> theirs.
PARTS = {
    "ln1": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "ln2": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
OUTER = {"token_embeddings": "model.embed_tokens", "ln_final": "model.norm", "lm_head": "lm_head"}

# Their sizes -> our arguments.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
}

# Settings that must have this value, since TransformerLM has no other.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
FAMILY = ("llama", "mistral")
LONGEST = "max_position_embeddings"
DEFAULT_WINDOW = {"llama": None, "mistral": 4096}  # of transformers, where a config.json doesn't say

# Settings that the logits don't depend on: of training, of the tokenizer, of how transformers runs or generates.
IRRELEVANT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "max_length", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "sep_token_id", "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip


def load_llama(
    folder: str | os.PathLike[str],
    context_length: int | None = None,
    *,
    dtype: DType = None,
    device: str | None = None,
    ignore: Iterable[str] = (),
) -> TransformerLM:
    """The TransformerLM of a folder with a LLaMA of Hugging Face's transformers, in evaluation mode.

    The folder holds config.json and model.safetensors, whole or in shards with an index; nothing is unpickled. Grouped
    queries, tied embeddings, the sliding window of a Mistral, and rope_scaling "linear" and "llama3" are carried over;
    numbers of any precision are cast
    to ``dtype`` (float32 if not given).

    - context_length: max_position_embeddings if not given; less keeps the tables and caches small
    - ignore: names of settings to pass over that this function doesn't know

    Raises an ArgumentError that names all settings which TransformerLM has no counterpart for, and a FileFormatError
    for a folder that isn't one, or whose weights are not those of its config.json.

    >>> import nn, tempfile
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2, rope_layout="half")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_llama(model, folder)
    ...     again = load_llama(folder)
    >>> bool((again([[1, 2, 3]]).data == model([[1, 2, 3]]).data).all())
    True
    """
    folder = Path(checked_path(folder, "a folder", "models/llama"))
    config = _read_config(folder / CONFIG)
    arguments = arguments_of(config, ignore)
    most = arguments["context_length"]
    if context_length is not None and not (is_whole(context_length, 1) and context_length <= most):
        hint = "None takes all of it"
        raise ArgumentError(f"a context_length up to max_position_embeddings = {most}", repr(context_length), hint)
    arguments["context_length"] = context_length or most
    places = _places_of_weights(folder)
    files = sorted(set(places.values()))
    found = {name: shape for file in files for name, shape in load_shapes(file).items() if places.get(name) == file}
    if is_whole(layers := arguments["num_layers"], 1) and layers > len(found):
        raise FileFormatError(f"weights of {layers} layers", f"{len(found)} arrays", ONE_MODEL)
    with hollow():  # names and shapes are compared before any memory is taken
        model = TransformerLM(**arguments, dtype=dtype, device=device)
    tensors = {theirs(name): (name, tensor.shape) for name, tensor in model._named_tensors(True, bool)}
    _check_weights(found, {name: shape for name, (_, shape) in tensors.items()}, arguments["tie_embeddings"])
    arrays = ((name, array) for file in files for name, array in load(file).items() if places.get(name) == file)
    try:
        model.load_state_dict({tensors[name][0]: array for name, array in arrays})
    except StateError as error:  # tied embeddings, and two of them
        raise FileFormatError(error.expected, error.got, ONE_MODEL) from None
    for layer in model.layers:
        layer.attn.dropout = check_probability(config.get("attention_dropout") or 0.0)
    return model.eval()


def save_llama(
    model: TransformerLM,
    folder: str | os.PathLike[str],
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write ``model`` as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` loads, same logits.

    config.json and model.safetensors; the folder is made, and each file is whole or not there. Rows of the projections
    of queries and keys are put into the order of the "half" layout, which transformers has, and a scale of the
    embeddings is multiplied into them. eos_token_id: with this token transformers ends a text.

    >>> import nn, os, tempfile
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_llama(model, folder)
    ...     print(sorted(os.listdir(folder)))
    ['config.json', 'model.safetensors']
    """
    if not isinstance(model, TransformerLM):
        raise ArgumentError("a TransformerLM", type(model).__name__, "no other has a counterpart in transformers")
    _check_parts(model)
    config = {**config_of(model), "pad_token_id": None}
    for name, token in {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}.items():
        if token is not None and not (is_whole(token, 0) and token < model.vocab_size):
            raise ArgumentError(
                f"{name}, an id from 0 to {model.vocab_size - 1}, or None", repr(token), "ids count from 0"
            )
        config[name] = None if token is None else int(token)
    folder = prepared(folder)
    tied = model.lm_head.weight is model.token_embeddings.weight and model.embedding_scale is None
    weights = {theirs(name): in_half_layout(model, name, array) for name, array in model.state_dict().items()}
    if model.embedding_scale is not None:
        weights["model.embed_tokens.weight"] *= model.embedding_scale
    if tied:
        del weights["lm_head.weight"]
    save(folder / WEIGHTS, weights, {"format": "pt"})
    config["tie_word_embeddings"] = tied
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _check_parts(model: TransformerLM) -> None:
    """Refuse a model whose parts were exchanged for some that a LLaMA of transformers doesn't have."""
    parts = [*OUTER, *(f"layers.{i}.{part}" for i in range(len(model.layers)) for part in PARTS)]
    if odd := sorted(model.state_dict().keys() ^ {f"{part}.weight" for part in parts}):
        expected, got = "a TransformerLM with the parts that it was made with", f"missing or added: {odd[:9]}"
        raise ArgumentError(expected, got, "a LLaMA of transformers has no others")
    settings = {(block.ln1.eps, block.ln2.eps, block.ffn.w1.out_features) for block in model.layers}
    if settings != {(model.ln_final.eps, model.ln_final.eps, model.layers[0].ffn.w1.out_features)}:
        got = f"(ln1.eps, ln2.eps, d_ff) of {sorted(settings)}, ln_final.eps of {model.ln_final.eps}"
        raise ArgumentError("one eps in all norms, and one d_ff in all layers", got, "config.json has one of each")
    if 0 in model.windows:
        raise ArgumentError(
            "full attention, or that of a window, in all layers", "linear attention", "a LLaMA has no other"
        )
    if len(set(model.windows)) > 1 or any(block.attn.pattern is not None for block in model.layers):
        got = f"windows of {model.windows}" + ", and patterns" * (len(set(model.windows)) < 2)
        raise ArgumentError(
            "one window in all layers, or none, and no pattern", got, "a Mistral has no other attention"
        )


def prepared(folder: str | os.PathLike[str], files: Iterable[str] = (WEIGHTS, CONFIG)) -> Path:
    """Make the folder for these files, by default those of ``save_llama``, where it isn't there.

    One that holds another model's shards is refused, and one with a link where a file will be: no link is followed.
    """
    folder = Path(checked_path(folder, "a folder", "models/llama"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        got = f"{str(folder)!r}, where a file is in the way"
        raise ArgumentError("a folder to save in", got, "it is made where it isn't there") from None
    if WEIGHTS in files and (folder / INDEX).exists():
        raise ArgumentError("a folder of its own", f"{folder}, which holds a model in shards", "name a new one")
    for path in (folder / file for file in files):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ArgumentError("a folder of regular files", f"{str(path)!r}, which is none", "name a new folder")
    return folder


# ---- settings --------------------------------------------------------------------------------------------------------


def arguments_of(config: Mapping[str, Any], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of TransformerLM for a config.json; an ArgumentError names what there is no argument for."""
    _check_settings(config, set(ignore))
    given = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in given):
        raise FileFormatError(f"rope_scaling and rope_parameters in {CONFIG} as objects, or null", repr(given), WRITERS)
    rope = {**given[0], **given[1]}
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    plain = rope.keys() <= {"rope_type", "type"} and all(value == "default" for value in rope.values())
    return {
        **{ours: config[name] for name, ours in SIZES.items()},
        "context_length": config[LONGEST],
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": theta,
        "rope_scaling": None if plain else rope,
        "rope_layout": "half",
        "window": _window_of(config) if "sliding_window" not in ignore else None,
    }


def _window_of(config: Mapping[str, Any]) -> Any:
    """The sliding window of a config.json, None where it is as wide as the context."""
    window, longest = config.get("sliding_window", DEFAULT_WINDOW[config["model_type"]]), config[LONGEST]
    return None if is_whole(window, 1) and is_whole(longest, 1) and window >= longest else window


def _check_settings(config: Mapping[str, Any], ignore: set[str]) -> None:
    if config.get("model_type") not in FAMILY:
        hint = "other families compute something else"
        raise ArgumentError(f"a model_type of {FAMILY}", repr(config.get("model_type")), hint)
    needed = {*SIZES, LONGEST}
    if missing := sorted(needed - config.keys()):
        raise FileFormatError(f"{CONFIG} with {sorted(needed)}", f"none of {missing}", WRITERS)
    found = {name: config.get(name, value) for name, value in FIXED.items()}
    if config["model_type"] == "mistral" or _window_of(config) is None:
        found["sliding_window"] = None  # an argument, or as wide as the context
    wrong = [f"{name}={value!r}" for name, value in found.items() if value != FIXED[name] and name not in ignore]
    if wrong:
        expected = ", ".join(f"{name}={FIXED[name]!r}" for name in FIXED if f"{name}={found[name]!r}" in wrong)
        raise ArgumentError(expected, ", ".join(wrong), "TransformerLM has no counterpart")
    known = {*needed, *FIXED, *IRRELEVANT, *ignore, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"}
    known |= {"rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_dropout"}
    if unknown := sorted(config.keys() - known):
        hint = f"if the logits don't depend on them: ignore={unknown}"
        raise ArgumentError("settings that load_llama knows", ", ".join(f"{n}={config[n]!r}" for n in unknown), hint)


def config_of(model: TransformerLM) -> dict[str, Any]:
    """The settings of config.json for a model, all but which tokens are special."""
    block = model.layers[0]
    rope = block.attn.rope
    scaling = dict(rope.scaling or {})
    if scaling:
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
    width = model.token_embeddings.embedding_dim
    window = block.attn.window
    family = "mistral" if window or width % block.attn.num_heads else "llama"  # a LLaMA has no window, nor such a width
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "sliding_window": window,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "hidden_size": width,
        "intermediate_size": block.ffn.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": block.attn.num_heads,
        "num_key_value_heads": block.attn.num_kv_heads,
        "head_dim": block.attn.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.ln1.eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": block.attn.dropout,
        "torch_dtype": str(model.lm_head.weight.dtype),
    }


# ---- weights ---------------------------------------------------------------------------------------------------------


def theirs(name: str) -> str:
    """The name that transformers has for a parameter.

    >>> theirs("layers.3.attn.output_proj.weight")
    'model.layers.3.self_attn.o_proj.weight'
    """
    path = name.removesuffix(".weight")
    if path in OUTER:
        return f"{OUTER[path]}.weight"
    _, number, part = path.split(".", 2)
    return f"model.layers.{number}.{PARTS[part]}.weight"


def _check_weights(weights: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    """Refuse arrays whose names and shapes are not those of the model; with tied embeddings lm_head may be absent."""
    needed = shapes.keys() - ({"lm_head.weight"} if tied else set())
    common = sorted(weights.keys() & shapes.keys())
    faults = {
        "missing": sorted(needed - weights.keys()),
        "unexpected": sorted(weights.keys() - shapes.keys()),
        "wrong shape": [f"{n} {weights[n]}, not {shapes[n]}" for n in common if weights[n] != shapes[n]],
    }
    if any(faults.values()):
        got = ", ".join(f"{kind}: {names[:9]}" for kind, names in faults.items() if names)
        raise FileFormatError(f"the {len(needed)} arrays that {CONFIG} asks for", got, ONE_MODEL)


def in_half_layout(model: TransformerLM, name: str, array: Array, back: bool = False) -> Array:
    """Rows of a projection of queries or keys as in the half layout: first of each pair of a head, then the second.

    ``back`` puts rows of that layout into the model's.
    """
    array = to_numpy(array)
    attn = model.layers[0].attn
    if not name.endswith(("q_proj.weight", "k_proj.weight")) or attn.rope.layout == "half":
        return array
    split = (2, attn.head_dim // 2) if back else (attn.head_dim // 2, 2)
    return array.reshape(-1, *split, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _places_of_weights(folder: Path) -> dict[str, Path]:
    """The file of each array by its name, without the tables of angles that old versions stored."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file() and list(folder.glob("*.bin")):
            hint = "transformers writes safetensors: from_pretrained(…).save_pretrained(…, safe_serialization=True)"
            raise FileFormatError(f"{WEIGHTS}", "pickled weights, which are not read", hint)
        places: Any = dict.fromkeys(load_shapes(folder / WEIGHTS), WEIGHTS)
    else:
        places = _read_config(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise FileFormatError(f"{INDEX} with a weight_map of names and files", describe(places), WRITERS)
        for file in sorted(set(places.values())):
            if Path(file).name != file:
                raise FileFormatError("shards in the folder itself", repr(file), f"{INDEX} names each without a path")
    return {name: folder / file for name, file in places.items() if not name.endswith("rotary_emb.inv_freq")}


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, f"a folder of transformers, with {path.name}", WRITERS)
