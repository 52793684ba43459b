"""Text for a language model: reading it, turning it into token ids, splitting it, and drawing batches from it.

``read_corpus`` is the way in. It takes UTF-8 text files, or one file of token ids that stays on the disk and is mapped
into memory; the first nine tenths are for training, the last tenth for validation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from training.flags import Kind, how_to_install, raise_any

from minigrad.errors import ArgumentError, FileFormatError, IndexRangeError

Ids = NDArray[Any]
SHAKESPEARE = Path(__file__).parents[1] / "data" / "shakespeare.txt"
TOKEN_FILES = (".npy", ".bin")
CHUNK = 1 << 24  # ids checked at a time, so that a token file is never read whole
OF_IDS = "give either --vocab-size N, or --tokenizer byte or PATH of the tokenizer.json that made it"


#: What --tokenizer takes.
named = Kind(
    "NAME",
    "byte, char, bpe or the path of a tokenizer.json",
    legal=lambda name: name in ("byte", "char", "bpe") or Path(name).is_file(),
)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """Text to token ids and back. ``as_json`` is what a checkpoint keeps of it, for ``tokenizer_from_json``."""

    vocab_size: int

    def encode(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int] | Ids) -> str: ...
    def as_json(self) -> dict[str, Any]: ...

    def byte_lengths(self) -> Ids | None:
        """How many bytes of text each token stands for; None where that isn't known."""


def id_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer type that holds every id.

    >>> id_dtype(256).__name__, id_dtype(257).__name__, id_dtype(65537).__name__
    ('uint8', 'uint16', 'uint32')
    """
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """The 256 bytes of UTF-8: no training, no unknown character.

    >>> ByteTokenizer().encode("é").tolist()
    [195, 169]
    """

    vocab_size = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")

    def as_json(self) -> dict[str, Any]:
        return {"kind": "byte"}

    def byte_lengths(self) -> Ids:
        return np.ones(256, np.int64)


class CharTokenizer:
    """The characters of one text, by code point; any other character is an error.

    >>> CharTokenizer("abca").encode("cab").tolist()
    [2, 0, 1]
    """

    def __init__(self, text: str) -> None:
        self.characters = "".join(sorted(set(text)))
        self.vocab_size = len(self.characters)
        self._points = _code_points(self.characters)

    def encode(self, text: str) -> Ids:
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = np.flatnonzero(self._points[np.minimum(ids, self.vocab_size - 1)] != points)
        if unknown.size:
            got = f"{text[unknown[0]]!r} at character {unknown[0]}"
            raise ArgumentError("characters that the training text has", got, "--tokenizer byte knows them all")
        return ids.astype(id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return "".join(self.characters[i] for i in ids)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters}

    def byte_lengths(self) -> Ids:
        return np.array([len(character.encode()) for character in self.characters])


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


class BpeTokenizer:
    """Byte-pair encoding by the ``tokenizers`` library, from the JSON text of one of its tokenizers."""

    def __init__(self, form: str, source: object = "one") -> None:
        library = _tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_str(form)
        except Exception as error:  # the library raises plain Exception
            got = f"{source}, where: {error}"
            raise FileFormatError("a tokenizer.json of the tokenizers library", got, "--tokenizer PATH") from None
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    @classmethod
    def trained(cls, text: str, vocab_size: int) -> BpeTokenizer:
        """Learn up to ``vocab_size`` tokens from ``text``, beginning with the 256 bytes, so no text is unknown."""
        library = _tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([text], trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> Ids:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokenizer": self._tokenizer.to_str()}

    def byte_lengths(self) -> Ids | None:
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":  # others add and drop spaces
            return None
        added = self._tokenizer.get_added_tokens_decoder()  # these are plain text; else a character is a byte
        names = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        return np.array([len(name.encode() if token in added else name) for token, name in enumerate(names)])


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ArgumentError("the package tokenizers for bpe", "none", how_to_install("bpe")) from None
    return tokenizers


class IdTokenizer:
    """Ids as numbers, for a token file whose tokenizer we don't have: "17 4 256".

    >>> IdTokenizer(300).decode([17, 299])
    '17 299'
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Ids:
        if not all(word.isdigit() and int(word) < self.vocab_size for word in text.split()):
            raise ArgumentError(f"ids from 0 to {self.vocab_size - 1}, separated by spaces", repr(text))
        return np.array([int(word) for word in text.split()], id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return " ".join(str(i) for i in ids)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocab_size": self.vocab_size}

    def byte_lengths(self) -> None:
        return None


def tokenizer_from_json(form: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint describes."""
    makers = {
        "byte": lambda: ByteTokenizer(),
        "char": lambda: CharTokenizer(form["characters"]),
        "bpe": lambda: BpeTokenizer(form["tokenizer"]),
        "ids": lambda: IdTokenizer(form["vocab_size"]),
    }
    return makers[form["kind"]]()


# ---- reading ---------------------------------------------------------------------------------------------------------


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
    raise_any([] if stored else reading_problems(paths, tokenizer, vocab_size))
    made = tokenizer_from_json(stored) if stored else None
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
    elif ids and tokenizer in ("char", "bpe"):
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
    if name is None or name == "byte":
        return ByteTokenizer()
    if name == "char":
        return CharTokenizer(text)
    if name == "bpe":
        return BpeTokenizer.trained(training, vocab_size or 1024)
    path = Path(name)
    return BpeTokenizer(_read_text(path), path)


def _obstacle(path: Path) -> str:
    """Why the file ``path`` can't be read, in words; empty where it can."""
    if not path.is_file():
        return f"{path}, which {'is a folder' if path.is_dir() else 'does not exist'}"
    if not os.access(path, os.R_OK):
        return f"{path}, which is not yours to read"
    return f"{path}, which is empty" if path.stat().st_size == 0 else ""


def _read_text(path: Path) -> str:
    if obstacle := _obstacle(path):
        raise FileFormatError("a text", obstacle)
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
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
        digest.update(chunk)
    return ids, digest.hexdigest()


def _map_ids(path: Path, vocab_size: int) -> Ids:
    """The ids of a ``.npy`` file, or of a ``.bin`` file: raw little-endian uint16, uint32 for over 65536 ids."""
    if obstacle := _obstacle(path):
        raise FileFormatError("token ids", obstacle)
    try:
        if path.suffix == ".npy":
            ids: Ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            ids = np.memmap(path, "<u2" if vocab_size <= 1 << 16 else "<u4", mode="r")
    except (ValueError, EOFError) as error:
        raise FileFormatError(f"a NumPy array of token ids in {path}", str(error)) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise FileFormatError("one dimension of integer ids", f"{path} with {ids.dtype} of shape {ids.shape}")
    return ids


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


def evaluation_batches(
    tokens: Ids, batch_size: int, block_size: int, count: int = 0, stride: int | None = None, ignore: int = -100
) -> Iterator[tuple[Ids, Ids]]:
    """Up to ``count`` batches (0: all) of blocks, spread evenly over ``tokens``: the same at every call.

    Blocks begin ``stride`` (block_size if not given) tokens apart. Taken all together, each token after the first is a
    target exactly once, in the first block that reaches it: it has at least block_size - stride tokens of context,
    where the text has them. Other targets are ``ignore``.
    """
    stride = stride or block_size
    starts = np.arange(0, max(len(tokens) - 1 - block_size, 0) + stride, stride)
    wanted = count * batch_size
    if count and wanted < len(starts):
        starts = starts[np.arange(wanted) * len(starts) // wanted]
    last = len(tokens) - 1
    for first in range(0, len(starts), batch_size):
        begins = starts[first : first + batch_size, None]
        places = begins + np.arange(block_size)
        inputs, targets = (tokens[np.minimum(places + ahead, last)].astype(np.int64) for ahead in (0, 1))
        new = (begins == 0) | (places >= begins + block_size - stride)
        yield inputs, np.where(new & (places < last), targets, ignore)
