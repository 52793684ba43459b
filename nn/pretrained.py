"""Pretrained models in and out: folders of Hugging Face's transformers to TransformerLM and back.

A folder holds config.json and safetensors; ``families.py`` says what each family calls its settings and parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from minigrad import load, save
from minigrad.backend import Array, DType, to_numpy
from minigrad.errors import ArgumentError, FileFormatError, StateError
from minigrad.files import read_json, write_whole
from minigrad.messages.explain import describe
from minigrad.serialize import checked_path, load_shapes
from .checks import check_probability, is_whole
from .families import CONFIG, FAMILIES, WRITERS, Family, arguments_from, arguments_of, config_of, model_type_of
from .parameter import hollow
from .transformer import TransformerLM

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE_MODEL = f"the weights and {CONFIG} must be of one model"
TABLES = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # of angles and masks, in files of old versions


def load_pretrained(
    folder: str | os.PathLike[str],
    context_length: int | None = None,
    *,
    dtype: DType = None,
    device: str | None = None,
    ignore: Iterable[str] = (),
) -> TransformerLM:
    """The TransformerLM of a folder with a decoder of Hugging Face's transformers, in evaluation mode.

    The families are LLaMA, Mistral, Qwen2, Qwen3, Gemma, GPT-2 and Phi-3: docs/models.md is their table. The folder
    holds config.json and model.safetensors, whole or in shards with an index; nothing is unpickled. Numbers of any
    precision are cast to ``dtype`` (float32 if not given).

    - context_length: max_position_embeddings if not given; less keeps the tables and caches small
    - ignore: names of settings to pass over that this function doesn't know

    Raises an ArgumentError that names all settings which TransformerLM has no counterpart for, and a FileFormatError
    for a folder that isn't one, or whose weights are not those of its config.json.

    >>> import nn, tempfile
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2, rope_layout="half")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     again = load_pretrained(folder)
    >>> bool((again([[1, 2, 3]]).data == model([[1, 2, 3]]).data).all())
    True
    """
    folder = Path(checked_path(folder, "a folder", "models/llama"))
    config = _read_config(folder / CONFIG)
    arguments = arguments_of(config, ignore)
    family, most = FAMILIES[config["model_type"]], arguments["context_length"]
    if context_length is not None and not (is_whole(context_length, 1) and context_length <= most):
        hint = "None takes all of it"
        raise ArgumentError(f"a context_length up to max_position_embeddings = {most}", repr(context_length), hint)
    arguments["context_length"] = context_length or most
    places = _places_of_weights(folder, family)
    files = sorted({file for file, _ in places.values()})
    shapes = {file: load_shapes(file) for file in files}
    found = {name: shapes[file][there] for name, (file, there) in places.items() if there in shapes[file]}
    if is_whole(layers := arguments["num_layers"], 1) and layers > len(found):
        raise FileFormatError(f"weights of {layers} layers", f"{len(found)} arrays", ONE_MODEL)
    with hollow():  # names and shapes are compared before any memory is taken
        model = TransformerLM(**arguments, dtype=dtype, device=device)
    parts = _parts(model, family)
    needed = {name: _their_shape(family, group, most) for name, group in parts.items()}
    _check_weights(found, needed, arguments["tie_embeddings"])
    try:
        model.load_state_dict(dict(_our_arrays(family, parts, places, files)))
    except StateError as error:  # tied embeddings, and two of them
        raise FileFormatError(error.expected, error.got, ONE_MODEL) from None
    dropouts = [check_probability(config.get(name) or 0.0) for name in family.dropouts]
    attention, branches, embeddings = (*dropouts, 0.0, 0.0)[:3]
    model.dropout.p = embeddings
    for layer in model.layers:
        layer.attn.dropout, layer.dropout.p = attention, branches
    return model.eval()


def save_pretrained(
    model: TransformerLM,
    folder: str | os.PathLike[str],
    *,
    model_type: str | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write ``model`` as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` loads, same logits.

    config.json and model.safetensors; the folder is made, and each file is whole or not there. model_type names one of
    the families of docs/models.md, by default the first that has such models. Rows of the projections
    of queries and keys are put into the order of the "half" layout, which transformers has, and a scale of the
    embeddings that a family hasn't is multiplied into them. eos_token_id: with this token transformers ends a text.

    >>> import nn, os, tempfile
    >>> model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     print(sorted(os.listdir(folder)))
    ['config.json', 'model.safetensors']
    """
    if not isinstance(model, TransformerLM):
        raise ArgumentError("a TransformerLM", type(model).__name__, "no other has a counterpart in transformers")
    _check_parts(model)
    kind = model_type_of(model, model_type)
    family = FAMILIES[kind]
    scaled = bool(family.options.get("scale_embeddings"))
    scale = 1.0 if scaled else model.embedding_scale or 1.0
    if scaled and model.embedding_scale is None:
        raise ArgumentError(f"scale_embeddings=True in a model of {kind}", "False", "a Gemma scales its embeddings")
    config = {**config_of(model, kind), "pad_token_id": None}
    for name, token in {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}.items():
        if token is not None and not (is_whole(token, 0) and token < model.vocab_size):
            raise ArgumentError(
                f"{name}, an id from 0 to {model.vocab_size - 1}, or None", repr(token), "ids count from 0"
            )
        config[name] = None if token is None else int(token)
    folder = prepared(folder)
    config["tie_word_embeddings"] = tied = config["tie_word_embeddings"] and scale == 1.0
    state, weights = model.state_dict(), {}
    for name, group in _parts(model, family).items():
        array = np.concatenate([in_half_layout(model, ours, state[ours]) for ours, _ in group])
        array = array - array.dtype.type(family.norm_offset) if family.norm_offset and _is_norm(group) else array
        weights[name] = np.ascontiguousarray(array.T) if _is_transposed(family, group) else array
    if scale != 1.0:
        weights[family.theirs("token_embeddings.weight")] *= scale
    if tied:
        del weights["lm_head.weight"]
    save(folder / WEIGHTS, weights, {"format": "pt"})
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


load_llama, save_llama = load_pretrained, save_pretrained  # their names while LLaMA was the only family


def _check_parts(model: TransformerLM) -> None:
    """Refuse a model whose parts were exchanged for some that none of a family has."""
    settings = {tuple(vars(norm)["eps"] for norm in _norms(block)) for block in model.layers}
    widths: set[Any] = {getattr(block.ffn.w1, "out_features", None) for block in model.layers}
    if len({model.ln_final.eps, *(eps for group in settings for eps in group)}) > 1 or len(widths) > 1:
        got = f"eps of {sorted(settings)} and {model.ln_final.eps} at the end, d_ff of {sorted(widths)}"
        raise ArgumentError("one eps in all norms, and one d_ff in all layers", got, "config.json has one of each")
    if 0 in model.windows:
        return  # refused by the family
    with hollow():
        twin = TransformerLM(**arguments_from(model))
    changed = model.state_dict().keys() ^ twin.state_dict().keys()
    kinds = ({name: (type(m), getattr(m, "activation", None)) for name, m in x.named_modules()} for x in (model, twin))
    ours, theirs = kinds
    odd = sorted(changed) or sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    if odd:
        expected, got = "a TransformerLM with the parts that it was made with", f"missing, added or changed: {odd[:9]}"
        raise ArgumentError(expected, got, "transformers has no others")


def _norms(block: Any) -> list[Any]:
    norms = block.ln1, block.ln2, getattr(block.attn, "q_norm", None), getattr(block.attn, "k_norm", None)
    return [norm for norm in norms if norm is not None]


def prepared(folder: str | os.PathLike[str], files: Iterable[str] = (WEIGHTS, CONFIG)) -> Path:
    """Make the folder for these files, by default those of ``save_pretrained``, where it isn't there.

    One that holds another model's shards is refused, and one with a link where a file will be: no link is followed.
    """
    folder = Path(checked_path(folder, "a folder", "models/llama"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        got = f"{str(folder)!r}, where a file is in the way"
        raise ArgumentError("a folder to save in", got, "it is made where it isn't there") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentError("a folder to save in", f"{str(folder)!r}, which may not be written", "name another one")
    if WEIGHTS in files and (folder / INDEX).exists():
        raise ArgumentError("a folder of its own", f"{folder}, which holds a model in shards", "name a new one")
    for path in (folder / file for file in files):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ArgumentError("a folder of regular files", f"{str(path)!r}, which is none", "name a new folder")
    return folder


# ---- weights ---------------------------------------------------------------------------------------------------------

Group = list[tuple[str, tuple[int, ...]]]  # names and shapes of our parameters that are one array of theirs


def _parts(model: TransformerLM, family: Family) -> dict[str, Group]:
    """Their name of each array, and those of our parameters that lie in it below each other."""
    parts: dict[str, Group] = {}
    for name, tensor in model._named_tensors(True, bool):
        parts.setdefault(family.theirs(name), []).append((name, tensor.shape))
    return parts


def _their_shape(family: Family, group: Group, context_length: int) -> tuple[int, ...]:
    name, (_, *rest) = group[0]
    rows = context_length if name.startswith("position_embeddings") else sum(shape[0] for _, shape in group)
    return (*rest, rows) if _is_transposed(family, group) else (rows, *rest)


def _is_transposed(family: Family, group: Group) -> bool:
    name, shape = group[0]
    return family.transposed and name.startswith("layers.") and len(shape) == 2


def _is_norm(group: Group) -> bool:
    return re.search(r"(ln1|ln2|ln_final|_norm)\.weight$", group[0][0]) is not None


def _our_arrays(
    family: Family, parts: Mapping[str, Group], places: Mapping[str, tuple[Path, str]], files: Iterable[Path]
) -> Iterator[tuple[str, Array]]:
    """Our parameters by name, from the arrays of the files."""
    for file in files:
        arrays = load(file)
        for name, (path, there) in places.items():
            if path != file:
                continue
            array, group = arrays[there], parts[name]
            array = array.T if _is_transposed(family, group) else array
            array = array.astype(np.float32) + family.norm_offset if family.norm_offset and _is_norm(group) else array
            ends = [*accumulate(shape[0] for _, shape in group)]
            for (ours, shape), end in zip(group, ends, strict=True):
                yield ours, array[end - shape[0] : end]


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
    turned = re.search(r"\.[qk]_(proj|norm)\.", name)
    if not turned or attn.rope is None or attn.rope.layout == "half":
        return array
    split = (2, attn.head_dim // 2) if back else (attn.head_dim // 2, 2)
    return array.reshape(-1, *split, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _places_of_weights(folder: Path, family: Family) -> dict[str, tuple[Path, str]]:
    """The file of each array and its name there, by its full name; without the tables that old versions stored.

    A folder of the decoder alone has names without the prefix of the family.
    """
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
    whole = any(name.startswith(family.prefix) for name in places)
    return {
        name if whole or name == "lm_head.weight" else family.prefix + name: (folder / file, name)
        for name, file in places.items()
        if not TABLES.search(name)
    }


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, f"a folder of transformers, with {path.name}", WRITERS)
