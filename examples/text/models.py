"""Language models to go on with: from a run of train_lm.py or finetune.py, or from a folder of transformers.

``open_language`` is the way in. A run's checkpoint holds the model, or, where finetune.py trained an adapter, what was
learned beside a base that lies elsewhere. A folder of transformers holds config.json, safetensors and tokenizer.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from training.checkpoint import Checkpoint, is_complete, open_newest, steps_in, understood
from training.flags import Flags, flag, integer, path, raise_any

import nn
from minigrad.backend import to_numpy
from minigrad.errors import ArgumentError, FileFormatError, StateError
from minigrad.files import read_json
from nn.checks import is_whole
from nn.families import arguments_of
from text.tokenizers import BpeTokenizer, Ids, Tokenizer, encode_prompt, tokenizer_from_json

PROGRAMS = ("train_lm.py", "finetune.py")
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
ADAPTER = "adapter_config.json"
METHODS: dict[str, Any] = {"lora": nn.lora, "adapters": nn.adapters, "prefix": nn.prefixes}  # beside "full"
NEST = 8  # bases of bases that are followed


@dataclass(kw_only=True)
class ModelFlags(Flags):
    """Which model."""

    checkpoint: str | None = flag(
        None, path, "run folder, step folder, or a folder of Hugging Face's transformers (default: the newest run)"
    )
    adapter: str | None = flag(
        None, path, "folder of an adapter of this model, such as RUN/adapter; without --checkpoint it names its base"
    )
    block_size: int | None = flag(None, integer(1), "tokens the model sees at once (default: all of its context)")


@dataclass(frozen=True)
class Language:
    """A language model in evaluation mode, its tokenizer, and what else is known of it."""

    path: Path
    model: nn.TransformerLM
    tokenizer: Tokenizer
    arguments: Mapping[str, Any]  # that TransformerLM made it from
    checkpoint: Checkpoint | None = None  # None: a folder of transformers
    prompt: Ids | None = None  # that the run's own samples begin with
    start: list[int] = field(default_factory=list)  # tokens that come before a prompt
    stops: list[int] = field(default_factory=list)  # tokens that end a text

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are beside its weights."""
        return any(".adapters." in name for name, _ in self.model.named_parameters())

    def encoded(self, prompt: str) -> Ids:
        """The ids of what --prompt gives, after those that the tokenizer lets every text begin with."""
        return np.array([*self.start, *encode_prompt(self.tokenizer, prompt)])


def open_asked(flags: ModelFlags) -> Language:
    """What the flags ask for."""
    where = flags.checkpoint
    if flags.adapter is not None and where is None:
        where = base_of(Path(flags.adapter))
    language = open_language(where, flags.device, flags.block_size)
    if flags.adapter is not None:
        if language.is_adapted:
            raise_any([f"--adapter: expected none beside a run with one of its own, got {flags.adapter}"])
        nn.load_adapter(language.model, flags.adapter).eval()
    return language


def open_language(path: str | None, device: str = "cpu", block_size: int | None = None, depth: int = 0) -> Language:
    """The model at ``path``, by default that of the newest run, which then sees ``block_size`` tokens at most."""
    if depth > NEST:
        raise FileFormatError(f"at most {NEST} bases, one of the other", f"more, up to {path}")
    folder = None if path is None else Path(path)
    if folder is not None and (folder / CONFIG).is_file() and not (is_complete(folder) or steps_in(folder)):
        return open_folder(folder, device, block_size)
    checkpoint = open_newest(path, PROGRAMS)
    model, tokenizer = load_model(checkpoint, device, depth)
    if block_size is not None:
        raise_any(context_problems(block_size, model.context_length))
        model.context_length = block_size
    prompt = np.array(checkpoint.fact("prompt"))
    return Language(checkpoint.path, model, tokenizer, checkpoint.meta.get("model", {}), checkpoint, prompt)


def context_problems(block_size: int, most: int) -> list[str]:
    """What is wrong with --block-size for a model that sees ``most`` tokens."""
    fits = block_size <= most
    return [] if fits else [f"--block-size: expected at most the model's context, {most} tokens, got {block_size}"]


# ---- from a run ------------------------------------------------------------------------------------------------------


def load_model(checkpoint: Checkpoint, device: str, depth: int = 0) -> tuple[nn.TransformerLM, Tokenizer]:
    """The language model of a checkpoint, in evaluation mode, and its tokenizer."""
    if "adapting" in checkpoint.meta:
        model = _beside_base(checkpoint, device, depth)
    else:
        model = checkpoint.empty_model(nn.TransformerLM, device)
        with understood(checkpoint.path):
            model.load_state_dict(checkpoint.load("model"))
    with understood(checkpoint.path):
        tokenizer = tokenizer_from_json(checkpoint.fact("corpus")["tokenizer"])
    spare = checkpoint.meta.get("program") == "finetune.py"  # models of others may have rows for no token
    if tokenizer.vocab_size > model.vocab_size or (tokenizer.vocab_size < model.vocab_size and not spare):
        got = f"{tokenizer.vocab_size} and {model.vocab_size}"
        raise FileFormatError("a tokenizer and a model of as many tokens", got, str(checkpoint.path))
    return model.eval(), tokenizer


def _beside_base(checkpoint: Checkpoint, device: str, depth: int) -> Any:
    """The model that finetune.py adapted: its base, with what was learned beside it."""
    with understood(checkpoint.path):
        base, adapting = checkpoint.fact("base"), dict(checkpoint.fact("adapting"))
        where, expected = str(base["path"]), base["fingerprint"]
    model = open_language(where, device, depth=depth + 1).model
    if fingerprint(model) != expected:
        raise FileFormatError(f"the base of {checkpoint.path}", f"another model at {where}", "its weights have changed")
    with understood(checkpoint.path):
        adapted(model, adapting)
        Learned(model).load_state_dict(checkpoint.load("model"))
    return model


def adapted(model: nn.TransformerLM, adapting: Mapping[str, Any], **start: Any) -> nn.TransformerLM:
    """The model, adapted in place by the method and the options of ``adapting``."""
    options = {name: value for name, value in adapting.items() if name != "method"}
    METHODS[adapting["method"]](model, **options, **start)
    return model


class Learned:
    """The parameters of a model that are trained, as a part of a checkpoint: the others are in the base."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Copies of them, by name."""
        return {name: p.data.copy() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them; a StateError tells of names that aren't theirs."""
        own = {name for name, p in self.model.named_parameters() if p.requires_grad}
        if odd := sorted(own ^ state.keys()):
            raise StateError(f"the {len(own)} parameters that are trained", f"others: {odd[:4]}", "another adapter?")
        self.model.load_state_dict(state, strict=False)


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(model.state_dict().items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(to_numpy(array).tobytes())
    return digest.hexdigest()


# ---- from transformers -----------------------------------------------------------------------------------------------


def open_folder(folder: Path, device: str, block_size: int | None = None) -> Language:
    """The model of a folder of transformers; its texts begin and end as its tokenizer and its settings say."""
    if not (folder / TOKENIZER).is_file():
        hint = "AutoTokenizer.from_pretrained(…).save_pretrained(folder) writes it for a fast tokenizer"
        raise FileFormatError(f"{TOKENIZER} beside {CONFIG}", f"none in {folder}", hint)
    config = read_json(folder / CONFIG, "the settings of a model of transformers")
    most: Any = config.get("max_position_embeddings", config.get("n_positions"))
    if block_size is not None and is_whole(most, 1):
        raise_any(context_problems(block_size, most))
    model = nn.load_pretrained(folder, block_size, device=device)
    tokenizer = BpeTokenizer((folder / TOKENIZER).read_text("utf-8"), folder / TOKENIZER)
    if tokenizer.vocab_size > model.vocab_size:
        got = f"{tokenizer.vocab_size} and {model.vocab_size}"
        raise FileFormatError("a tokenizer of at most as many tokens as the model", got, str(folder))
    arguments = {**arguments_of(config), "context_length": model.context_length, "dtype": "float32"}
    stops = _stops(folder, config, model)
    return Language(folder, model, tokenizer, arguments, start=tokenizer.start(), stops=stops)


def _stops(folder: Path, config: Mapping[str, Any], model: nn.TransformerLM) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: none, one or several."""
    said = config
    if (folder / GENERATION).is_file():
        said = {**config, **read_json(folder / GENERATION, "settings of transformers")}
    given = said.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if odd := [token for token in ids if not (is_whole(token, 0) and token < model.vocab_size)]:
        raise FileFormatError(f"eos_token_id, ids below {model.vocab_size}", repr(odd), str(folder))
    return ids


def base_of(folder: Path) -> str:
    """The base that an adapter's folder names."""
    config = read_json(folder / ADAPTER, f"the folder of an adapter, with {ADAPTER}")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ArgumentError("an adapter that names the folder of its base", repr(base), "name the base by --checkpoint")
    return base
