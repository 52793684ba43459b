"""The text that a language model learns: reading it as token ids, splitting it, and drawing batches from it.

``read_corpus`` is the way in. It takes UTF-8 text files, or one file of token ids that stays on the disk and is mapped
into memory; the first nine tenths are for training, the last tenth for validation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from training.flags import raise_any

from minigrad.errors import ArgumentError, FileFormatError, IndexRangeError
from text.tokenizers import MADE, BpeTokenizer, Ids, IdTokenizer, Tokenizer, tokenizer_from_json

SHAKESPEARE = Path(__file__).parents[1] / "data" / "shakespeare.txt"
TOKEN_FILES = (".npy", ".bin")
CHUNK = 1 << 24  # ids checked at a time, so that a token file is never read whole
OF_IDS = "give either --vocab-size N, or --tokenizer byte or PATH of the tokenizer.json that made it"


@dataclass(frozen=True)
class Corpus:
    """Token ids for training and for validation, the tokenizer that made them, and a hash of the files' contents."""

    training: Ids
    validation: Ids
    tokenizer: Tokenizer
    fingerprint: str


def read_corpus(
    paths: Sequence[Path],
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    stored: dict[str, Any] | None = None,
) -> Corpus:
    """Read text files, one after the other, or one token file.

    tokenizer is ``byte`` (that of a text if not given), ``char``, ``bpe`` (trained on the training part) or the path of
    a tokenizer.json; a continued run gives the one that it ``stored`` instead. vocab_size is that of a bpe to train, or
    of the ids of a token file whose tokenizer we don't have.
    """
    raise_any(reading_problems(paths, tokenizer, vocab_size) if stored is None else [])
    made = None if stored is None else tokenizer_from_json(stored)
    if is_token_file(paths[0]):
        made = made or (IdTokenizer(vocab_size) if vocab_size else _make_tokenizer(tokenizer, None, "", ""))
        ids, fingerprint = _checked_ids(paths[0], made)
        split = len(ids) - len(ids) // 10
        return Corpus(ids[:split], ids[split:], made, fingerprint)
    text = "".join(_read_text(path) for path in paths)
    split = len(text) - len(text) // 10
    made = made or _make_tokenizer(tokenizer, vocab_size, text, text[:split])
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Corpus(made.encode(text[:split]), made.encode(text[split:]), made, fingerprint)


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer) -> Ids:
    """The ids of text files, one after the other, or of one token file, whole."""
    if any(map(is_token_file, paths)):
        raise_any(reading_problems(paths, "byte", None))
        return _checked_ids(paths[0], tokenizer)[0]
    return tokenizer.encode("".join(_read_text(path) for path in paths))


def is_token_file(path: Path) -> bool:
    """Whether the file holds token ids, by its name."""
    return path.suffix in TOKEN_FILES


def reading_problems(paths: Sequence[Path], tokenizer: str | None, vocab_size: int | None) -> list[str]:
    """What is wrong with the flags --data, --tokenizer and --vocab-size, seen together and before anything is read."""
    problems = [f"--data: expected a file to read, got {obstacle}" for path in paths if (obstacle := _obstacle(path))]
    ids = [path for path in paths if is_token_file(path)]
    if ids and len(paths) > 1:
        problems.append(f"--data: expected text files, or one token file, got {len(paths)} files with {ids[0]}")
    elif ids and tokenizer in MADE.keys() - {"byte"}:
        problems.append(f"--tokenizer: {tokenizer} is made from a text, and {ids[0]} holds token ids; {OF_IDS}")
    elif ids and (tokenizer is None) == (vocab_size is None):
        problems.append(f"--vocab-size: expected one thing that says which ids {ids[0]} may hold; {OF_IDS}")
    elif not ids and vocab_size is not None and tokenizer != "bpe":
        name = tokenizer or "byte"
        problems.append(f"--vocab-size: {name} brings a vocabulary of its own; the flag goes with --tokenizer bpe")
    elif not ids and vocab_size is not None and vocab_size < 256:
        problems.append(f"--vocab-size: bpe begins with the 256 bytes, got {vocab_size}")
    return problems


def _make_tokenizer(name: str | None, vocab_size: int | None, text: str, training: str) -> Tokenizer:
    if name is None or name in MADE:
        return MADE[name or "byte"](text, training, vocab_size)
    path = Path(name)
    return BpeTokenizer(_read_text(path), path)


def _obstacle(path: Path) -> str:
    """Why the file ``path`` can't be read, in words; empty where it can."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        return f"{path}, which {what}"
    if not os.access(path, os.R_OK):
        return f"{path}, which is not yours to read"
    return f"{path}, which is empty" if path.stat().st_size == 0 else ""


def _read_text(path: Path) -> str:
    if obstacle := _obstacle(path):
        raise FileFormatError("a text", obstacle)
    content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        got = f"{path} with byte 0x{content[error.start]:02x} at offset {error.start} ({error.reason})"
        binary = any(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in content[:1024])
        hint = (
            "it looks like binary data; token files end in .npy or .bin"
            if binary
            else ("if it is a text in another encoding, such as Latin-1: iconv -f LATIN1 -t UTF-8")
        )
        raise FileFormatError("UTF-8 text", got, hint) from None


def _checked_ids(path: Path, tokenizer: Tokenizer) -> tuple[Ids, str]:
    """The ids of a token file, mapped into memory and each checked once, and a hash of them."""
    ids, size = _map_ids(path, tokenizer.vocab_size), tokenizer.vocab_size
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(ids), CHUNK):
        chunk = np.ascontiguousarray(ids[start : start + CHUNK])
        wrong = np.flatnonzero((chunk < 0) | (chunk >= size))
        if wrong.size:
            got = f"{path} with id {chunk[wrong[0]]} at position {start + wrong[0]}"
            raise IndexRangeError(f"ids from 0 to {size - 1}", got, OF_IDS)
        digest.update(chunk.data)
    return ids, digest.hexdigest()


def _map_ids(path: Path, vocab_size: int) -> Ids:
    """The ids of a ``.npy`` file, or of a ``.bin`` file: raw little-endian uint16, uint32 for over 65536 ids."""
    if obstacle := _obstacle(path):
        raise FileFormatError("token ids", obstacle)
    try:
        if path.suffix == ".npy":
            ids: Ids = np.lib.format.open_memmap(path, mode="r")
        else:
            ids = np.memmap(path, "<u2" if vocab_size <= 1 << 16 else "<u4", mode="r")
    except Exception as error:  # the header of a .npy is Python, and any of its errors may come
        raise FileFormatError(f"a NumPy array of token ids in {path}", str(error)) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise FileFormatError("one dimension of integer ids", f"{path} with {ids.dtype} of shape {ids.shape}")
    return ids.view(MappedIds)


class MappedIds(np.memmap):
    """Ids on the disk; an error where the file has become shorter, since reading what is gone ends the program."""

    def __getitem__(self, index: Any) -> Any:
        mapping = getattr(self, "_mmap", None)
        if mapping is not None and mapping.size() < len(mapping):
            got = f"{self.filename}, which became shorter"
            raise FileFormatError("the token file that was opened", got, "copy files to another name, and then rename")
        return super().__getitem__(index)


# ---- batches ---------------------------------------------------------------------------------------------------------


def check_length(corpus: Corpus, block_size: int) -> None:
    """Refuse a corpus that is too short to train on blocks of ``block_size`` tokens, or to validate on at all."""
    if len(corpus.training) <= block_size or len(corpus.validation) < 2:
        got = f"{len(corpus.training)} to train on and {len(corpus.validation)} to validate on"
        hint = "a longer text, or a smaller --block-size"
        raise ArgumentError(f"a text of more than {block_size} tokens (a block and its next token)", got, hint)


class RandomBlocks:
    """Blocks of the training text at random places, without end; its state is the position in the data."""

    def __init__(self, tokens: Ids, batch_size: int, block_size: int, seed: int, repeat_first: bool = False) -> None:
        self.tokens, self.batch_size, self.block_size = tokens, batch_size, block_size
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._only = self._draw() if repeat_first else None

    def draw(self) -> tuple[Ids, Ids]:
        """Inputs and targets, both (batch, block): the target is the token that follows."""
        return self._draw() if self._only is None else self._only

    def _draw(self) -> tuple[Ids, Ids]:
        starts = self._random.integers(len(self.tokens) - self.block_size, size=self.batch_size)
        blocks = self.tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return blocks[:, :-1], blocks[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The state of the random numbers, ready for JSON."""
        return {"random": self._random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._random.bit_generator.state = state["random"]
