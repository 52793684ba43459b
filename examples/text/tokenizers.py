"""Tokenizers: a text to token ids and back, by bytes, characters or byte-pair encoding, or as the ids themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from training.flags import Kind, encodable, how_to_install, named, raise_any

from minigrad.errors import ArgumentError, FileFormatError, MiniGradError
from nn.checks import is_whole

Ids = NDArray[Any]


class Tokenizer(Protocol):
    """Text to token ids and back. ``as_json`` is what a checkpoint keeps of it, for ``tokenizer_from_json``."""

    vocab_size: int

    def encode(self, text: str) -> Ids: ...
    def decode(self, ids: Sequence[int] | Ids) -> str: ...
    def as_json(self) -> dict[str, Any]: ...

    def byte_lengths(self) -> Ids | None:
        """How many bytes of text each token stands for; None where that isn't known."""

    def hf_json(self) -> str | None:
        """The tokenizer.json that gives the same ids in Hugging Face's libraries; None where there is none.

        One difference is left: a character that is an error of ours is passed over by the tokenizers library.
        """


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

    def hf_json(self) -> str:
        library = tokenizers_library()
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        made = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = library.decoders.ByteLevel()
        return str(made.to_str())


def byte_characters() -> list[str]:
    """The printable character by which the library's byte level writes each of the 256 bytes.

    Printable bytes of Latin-1 are themselves, the others follow from code point 256 on.

    >>> byte_characters()[65], byte_characters()[0], byte_characters()[32]
    ('A', 'Ā', 'Ġ')
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


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

    def hf_json(self) -> str:
        library = tokenizers_library()
        vocabulary = {character: i for i, character in enumerate(self.characters)}
        made = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
        made.decoder = library.decoders.Fuse()
        return str(made.to_str())


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


class BpeTokenizer:
    """Byte-pair encoding by the ``tokenizers`` library, from the JSON text of one of its tokenizers.

    Truncation and padding, which a tokenizer.json may ask for, are left out.
    """

    def __init__(self, form: str, source: object = "one") -> None:
        library = tokenizers_library()
        with _complaints_as(FileFormatError, "a tokenizer.json of the tokenizers library", f"{source}, where"):
            self._form = {**json.loads(form), "truncation": None, "padding": None}
            self._tokenizer = library.Tokenizer.from_str(json.dumps(self._form))
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # ids may have holes

    @classmethod
    def trained(cls, text: str, vocab_size: int) -> BpeTokenizer:
        """Learn up to ``vocab_size`` tokens from ``text``, beginning with the 256 bytes, so no text is unknown."""
        library = tokenizers_library()
        vocab_size = min(vocab_size, 256 + len(text.encode()))  # each joins two; the library takes memory for all
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([text], trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> Ids:
        # One without an unknown token may not know a text.
        expected = "a text that the tokenizer.json can encode"
        with _complaints_as(ArgumentError, expected, "one where"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            dropped = self._dropped(text)
        if dropped:
            got = f"one whose {''.join(dropped[:20])!r} it leaves out without a word"
            raise ArgumentError(expected, got, "--tokenizer byte knows all texts")
        return np.array(ids, id_dtype(self.vocab_size))

    def start(self) -> list[int]:
        """The special tokens that it would put before a text."""
        with _complaints_as(FileFormatError, "a tokenizer.json of the tokenizers library", "one where"):
            whole, plain = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
        places = range(len(whole) - len(plain) + 1)
        return next((list(whole[:i]) for i in places if whole[i : i + len(plain)] == plain), [])

    def _dropped(self, text: str) -> list[str]:
        """Characters that go to BPE and are none of its tokens: where it has no unknown token either, they vanish."""
        facts = self._form["model"]
        whole = ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
        if facts.get("type") != "BPE" or any(facts.get(name) for name in whole):
            return []
        for token in self._form.get("added_tokens", ()):
            text = text.replace(token["content"], "")
        first, split = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        found = []
        for character in sorted(set(text)):
            changed = first.normalize_str(character) if first else character
            pieces = [piece for piece, _ in split.pre_tokenize_str(changed)] if split else [changed]
            if any(self._tokenizer.model.token_to_id(part) is None for part in "".join(pieces)):
                found.append(character)
        return found

    def decode(self, ids: Sequence[int] | Ids) -> str:
        with _complaints_as(ArgumentError, "ids that the tokenizer.json can decode", "some where"):
            return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokenizer": json.dumps(self._form, ensure_ascii=False)}

    def byte_lengths(self) -> Ids | None:
        first = self._form.get("pre_tokenizer") or {}
        if (
            (self._form.get("decoder") or {}).get("type") != "ByteLevel"
            or self._form.get("normalizer")
            or any(map(_changes_text, first.get("pretokenizers", [first])))
            or any(token.get("lstrip") or token.get("rstrip") for token in self._form.get("added_tokens", ()))
            or not {*tokenizers_library().pre_tokenizers.ByteLevel.alphabet()} <= self._tokenizer.get_vocab().keys()
        ):
            return None
        added = self._tokenizer.get_added_tokens_decoder()  # these are plain text; else a character is a byte
        names = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        return np.array([len(name.encode() if token in added else name) for token, name in enumerate(names)])

    def hf_json(self) -> str:
        return str(self.as_json()["tokenizer"])


@contextmanager
def _complaints_as(kind: type[MiniGradError], expected: str, got: str) -> Iterator[None]:
    """What the tokenizers library complains of, plain Exceptions and its panics, which are none, as one error of ours.

    A panic writes its own lines to standard error; they are kept from there.
    """
    aside, before = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    try:
        os.dup2(aside, 2)
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(expected, f"{got}: {error}", "--tokenizer byte knows all texts") from None
    finally:
        os.dup2(before, 2)
        os.close(aside)
        os.close(before)


def _changes_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer may add or drop characters, or leave out the byte level."""
    kind = step.get("type")
    spaces = step.get("add_prefix_space", kind == "ByteLevel")
    return kind not in ("ByteLevel", "Split", "Digits") or spaces or step.get("behavior") == "Removed"


def tokenizers_library() -> Any:
    """The package tokenizers with its submodules; an error that says how to install it where it is missing."""
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
        for place, word in enumerate(text.split(), 1):
            if not (word.isdecimal() and len(word) < 20 and int(word) < self.vocab_size):
                got = f"{word[:20]!r} as number {place}"
                raise ArgumentError(
                    f"ids from 0 to {self.vocab_size - 1}, separated by spaces", got, "such as 17 4 256"
                )
        return np.array([int(word) for word in text.split()], id_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return " ".join(str(i) for i in ids)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocab_size": self.vocab_size}

    def byte_lengths(self) -> None:
        return None

    def hf_json(self) -> None:
        return None


#: How the flag --tokenizer makes one, by name: from a text, its training part and --vocab-size.
MADE: dict[str, Callable[[str, str, int | None], Tokenizer]] = {
    "byte": lambda text, training, vocab_size: ByteTokenizer(),
    "char": lambda text, training, vocab_size: CharTokenizer(text),
    "bpe": lambda text, training, vocab_size: BpeTokenizer.trained(training, vocab_size or 1024),
}

#: What the flag takes.
TOKENIZER = Kind(
    "NAME",
    f"{', '.join(MADE)} or the path of a tokenizer.json",
    convert=lambda name: name if name in MADE else os.path.abspath(named(name)),
    legal=lambda name: name in MADE or name.endswith(".json") or Path(name).is_file(),
)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """The ids of what --prompt gives, at least one."""
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise_any([f"--prompt: expected a text of at least one token, got {prompt!r}"])
    return ids


def tokenizer_from_json(form: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint describes."""
    given = form if isinstance(form, dict) else {}
    kind, characters, size = str(given.get("kind")), given.get("characters"), given.get("vocab_size")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char" and isinstance(characters, str) and characters and encodable(characters):
        return CharTokenizer(characters)
    if kind == "bpe" and isinstance(given.get("tokenizer"), str):
        return BpeTokenizer(given["tokenizer"])
    if kind == "ids" and isinstance(size, int) and is_whole(size, 1) and size <= 1 << 32:
        return IdTokenizer(size)
    raise FileFormatError("a tokenizer of a checkpoint", repr(form)[:99])
