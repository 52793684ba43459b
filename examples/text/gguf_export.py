"""A trained language model as a GGUF file that llama.cpp runs, with its tokenizer.

A byte vocabulary becomes SentencePiece's byte tokens, since llama.cpp refuses a BPE without merges. A learned BPE stays
one. llama.cpp gives every vocabulary a token that ends a text; here it is the one of the byte 0, which no text has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.flags import raise_any

import nn
from minigrad.errors import ArgumentError
from nn.compressing.gguf import gguf_library
from text.tokenizers import Tokenizer, byte_characters

NORMAL, BYTE = 1, 6  # kinds of tokens
SPACE = "▁"  # in whose place SentencePiece has spaces


class GgufExport:
    """An export to a file, which is looked at before the training: ``write(model)`` writes it."""

    def __init__(self, file: Path, weights: str, tokenizer: Tokenizer, overwrite: bool = False) -> None:
        if file.exists() and not (overwrite and file.is_file()):
            raise_any([f"--export-gguf: expected a new file, got {file}; take another, or --overwrite with --resume"])
        file.parent.mkdir(parents=True, exist_ok=True)
        gguf_library()
        self.file, self.weights, self.tokenizer = file, weights, gguf_tokenizer(tokenizer)

    def write(self, model: nn.TransformerLM) -> str:
        """Write the file; a line for people that says so."""
        nn.save_gguf(model, self.file, weights=self.weights, tokenizer=self.tokenizer)
        ids = "" if self.tokenizer else ", without a tokenizer: the ids of a token file have none"
        return f"exported to {self.file} ({self.file.stat().st_size / 1e6:.1f} MB, {self.weights}), for llama.cpp{ids}"


def gguf_tokenizer(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The keys of GGUF that say what a tokenizer is; None for one of ids alone.

    >>> from text.tokenizers import ByteTokenizer
    >>> gguf_tokenizer(ByteTokenizer())["tokenizer.ggml.tokens"][30:34]
    ['<0x1E>', '<0x1F>', '▁', '<0x21>']
    """
    form = tokenizer.as_json()
    if form["kind"] == "ids":
        return None
    if form["kind"] == "byte":
        tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens[ord(" ")] = SPACE  # what llama.cpp looks up for a space
        kinds = [NORMAL if token == SPACE else BYTE for token in tokens]
        return _facts("llama", tokens, kinds, end=0) | {"tokenizer.ggml.scores": [0.0] * 256}
    if form["kind"] != "bpe":
        hint = "--tokenizer byte or bpe"
        raise ArgumentError("a tokenizer that llama.cpp has", f"one of kind {form['kind']!r}", hint)
    return _learned(json.loads(form["tokenizer"]), tokenizer.vocab_size)


def _learned(form: dict[str, Any], size: int) -> dict[str, Any]:
    """Those of a byte-level BPE such as BpeTokenizer learns; others split texts in ways that have other names there."""
    model, split = form["model"], form.get("pre_tokenizer") or {}
    plain = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    vocabulary = {number: token for token, number in model.get("vocab", {}).items()} if model["type"] == "BPE" else {}
    whole = set(vocabulary.values()) >= set(byte_characters()) and sorted(vocabulary) == list(range(size))
    if not (plain and whole and model.get("merges")) or form.get("normalizer") or form.get("added_tokens"):
        got = "a tokenizer.json of another kind, or with tokens of its own"
        raise ArgumentError("a byte-level BPE as --tokenizer bpe learns it", got, "llama.cpp's converter knows others")
    tokens = [vocabulary[number] for number in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    facts = _facts("gpt2", tokens, [NORMAL] * size, end=tokens.index(byte_characters()[0]))
    return facts | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges}


def _facts(model: str, tokens: list[str], kinds: list[int], end: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": model, "tokens": tokens, "token_type": kinds}
    facts |= {"bos_token_id": end, "eos_token_id": end, "unknown_token_id": end, "padding_token_id": end}
    facts |= {"add_bos_token": False, "add_eos_token": False, "add_space_prefix": False}
    return {f"tokenizer.ggml.{name}": value for name, value in facts.items()}
