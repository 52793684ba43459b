"""Texts, tokenizers, token files and batches."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text import corpus as corpora
from text.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    tokenizer_from_json,
)
from training.flags import FlagErrors

import nn
from minigrad.errors import MiniGradError

REFUSED = (MiniGradError, FlagErrors)

TEXT = "Prêt? – naïve 字 coffee.\n" * 40


def tokenizers() -> list[Tokenizer]:
    made: list[Tokenizer] = [ByteTokenizer(), CharTokenizer(TEXT)]
    if find_spec("tokenizers"):
        made.append(BpeTokenizer.trained(TEXT, 300))
    return made


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.as_json()["kind"])
def test_tokenizers_go_there_and_back_and_survive_json(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids.ndim == 1
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.as_json())))
    assert again.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(again.encode(TEXT), ids)


def test_bpe_joins_what_occurs_together() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.trained(TEXT, 400)
    assert len(tokenizer.encode(TEXT)) == 40 * len(["Prêt", "?", " –", " naïve", " 字", " coffee", ".", "\n"])
    assert tokenizer.decode(tokenizer.encode("entirely új")) == "entirely új"


def test_a_vocabulary_larger_than_the_text_can_fill_takes_no_memory() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.trained("abab", 10**30)
    assert tokenizer.vocab_size == 256 + 2  # ab, and abab
    assert tokenizer.as_json() == BpeTokenizer.trained("abab", 1000).as_json()


def test_halves_of_a_character_and_unknown_characters() -> None:
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"
    with pytest.raises(MiniGradError, match="'z' at character 1"):
        CharTokenizer("abc").encode("azb")
    with pytest.raises(MiniGradError, match="ids from 0 to 9"):
        IdTokenizer(10).encode("1 10")


@pytest.mark.parametrize("text", ["²", "1 -2", "9" * 5000, "a text, no ids. " * 1000])
def test_what_is_no_id_is_named_shortly(text: str) -> None:
    with pytest.raises(MiniGradError, match=r"as number [12]") as caught:
        IdTokenizer(300).encode(text)
    assert len(str(caught.value)) < 200


# ---- tokenizer.json in all its forms ---------------------------------------------------------------------------------


def changed(**parts: Any) -> BpeTokenizer:
    """A trained byte-level tokenizer whose tokenizer.json has other ``parts``."""
    pytest.importorskip("tokenizers")
    form = json.loads(BpeTokenizer.trained(TEXT, 300).as_json()["tokenizer"])
    return BpeTokenizer(json.dumps({**form, **parts}))


def test_truncation_and_padding_are_switched_off() -> None:
    whole = changed().encode(TEXT).tolist()
    cut = {"direction": "Right", "max_length": 32, "strategy": "LongestFirst", "stride": 0}
    filled = {"strategy": {"Fixed": 9000}, "direction": "Right", "pad_to_multiple_of": None}
    filled |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    assert len(whole) > 32
    for tokenizer in (changed(truncation=cut), changed(padding=filled)):
        assert tokenizer.encode(TEXT).tolist() == whole
        assert tokenizer_from_json(tokenizer.as_json()).encode(TEXT).tolist() == whole


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {**LEVEL, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, LEVEL]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"decoder": None},
    ],
)
def test_bytes_are_unknown_where_a_tokenizer_changes_the_text(parts: dict[str, Any]) -> None:
    assert changed(**parts).byte_lengths() is None
    cuts = changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, LEVEL]})
    lengths = cuts.byte_lengths()
    assert lengths is not None
    assert lengths[cuts.encode(TEXT)].sum() == len(TEXT.encode())


def test_ids_with_holes_and_a_text_without_an_unknown_token() -> None:
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "?"}
    tokenizer = BpeTokenizer(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}))
    assert tokenizer.vocab_size == 4_000_000_001
    assert tokenizer.encode("b a b").tolist() == [4_000_000_000, 0, 4_000_000_000]
    assert tokenizer_from_json(tokenizer.as_json()).vocab_size == 4_000_000_001
    with pytest.raises(MiniGradError, match=r"a text that the tokenizer\.json can encode"):
        tokenizer.encode("a c")


def test_a_text_of_which_bpe_would_leave_characters_out_is_refused() -> None:
    """One without an unknown token drops what it has no token for; what a normalizer or splitter drops is meant so."""
    pytest.importorskip("tokenizers")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    added = {"id": 3, "content": "<x>", "special": True, **dict.fromkeys(("lstrip", "rstrip", "single_word"), False)}
    facts = {"version": "1.0", "model": model, "added_tokens": [{**added, "normalized": False}]}
    facts |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "normalizer": {"type": "Lowercase"}}
    tokenizer = BpeTokenizer(json.dumps(facts))
    assert tokenizer.encode("ab Ba\n<x>").tolist() == [2, 1, 0, 3]
    with pytest.raises(MiniGradError, match="whose 'cé' it leaves out"):
        tokenizer.encode("ab cab é")
    unknown = {**facts, "model": {**model, "vocab": {"a": 0, "b": 1, "ab": 2, "?": 4}, "unk_token": "?"}}
    assert BpeTokenizer(json.dumps(unknown)).encode("acb").tolist() == [0, 4, 1]


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_the_last_tenth_validates_and_files_are_joined(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a.txt", b"abcdefghij" * 3), write(tmp_path, "b.txt", b"0123456789")
    corpus = corpora.read_corpus([first, second], "byte", None)
    assert bytes(corpus.training) == b"abcdefghij" * 3 + b"012345"
    assert bytes(corpus.validation) == b"6789"
    other = corpora.read_corpus([second, first], "byte", None)
    assert other.fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "empty"),
        (b"good \xff bad", "byte 0xff at offset 5"),
        (b"cut short \xe5\xad", "byte 0xe5 at offset 10"),
        (b"caf\xe9 in Latin-1", "iconv -f LATIN1"),
        (b"PNG\r\n\x1a\n\0\0\0\xff", "looks like binary data"),
    ],
)
def test_unfit_texts_are_refused_in_words(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt" if content is None else write(tmp_path, "text.txt", content)
    with pytest.raises(REFUSED, match=message) as caught:
        corpora.read_corpus([path])
    assert "text.txt" in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    first = write(tmp_path, "a.txt", b"\xef\xbb\xbf" + b"abcde" * 3)
    second = write(tmp_path, "b.txt", b"\xef\xbb\xbf" + b"\xef\xbb\xbf01234")  # the second one is a character
    corpus = corpora.read_corpus([first, second])
    assert bytes(corpus.training) + bytes(corpus.validation) == b"abcde" * 3 + b"\xef\xbb\xbf01234"


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFO on Windows")
def test_what_is_no_regular_file_is_called_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FlagErrors, match=r"pipe, which is no regular file"):
        corpora.read_corpus([tmp_path / "pipe"])


def test_a_folder_a_missing_tokenizer_and_a_short_text(tmp_path: Path) -> None:
    path = write(tmp_path, "text.txt", b"x" * 70)
    with pytest.raises(FlagErrors, match=r"--data: .* is a folder"):
        corpora.read_corpus([tmp_path])
    with pytest.raises(MiniGradError, match=r"missing\.json, which does not exist"):
        corpora.read_corpus([path], str(tmp_path / "missing.json"))
    corpus = corpora.read_corpus([path])  # 63 and 7 tokens
    corpora.check_length(corpus, 62)
    with pytest.raises(MiniGradError, match="more than 63 tokens"):
        corpora.check_length(corpus, 63)


def test_token_files_are_mapped_not_read(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint16) % 300
    np.save(tmp_path / "ids.npy", ids)
    write(tmp_path, "ids.bin", ids.astype("<u2").tobytes())
    for name in ("ids.npy", "ids.bin"):
        corpus = corpora.read_corpus([tmp_path / name], vocab_size=300)
        assert isinstance(corpus.training, np.memmap)
        assert (len(corpus.training), len(corpus.validation), corpus.tokenizer.vocab_size) == (900, 100, 300)
        np.testing.assert_array_equal(corpus.validation, ids[900:])


@pytest.mark.parametrize(
    ("array", "tokenizer", "vocab_size", "message"),
    [
        (np.array([1, 2, 300, 4]), "byte", None, "id 300 at position 2"),
        (np.array([1, -2, 3]), "byte", None, "id -2 at position 1"),
        (np.array([1, 2, 3]), None, 3, "id 3 at position 2"),
        (np.array([1, 2, 3]), None, None, "--vocab-size: expected one thing that says which ids"),
        (np.array([1, 2, 3]), "byte", 256, "--vocab-size: expected one thing that says which ids"),
        (np.ones((2, 2), int), "byte", None, "shape \\(2, 2\\)"),
        (np.ones(5), "byte", None, "float64"),
        (np.ones(5, int), "char", None, "--tokenizer: char is made from a text"),
    ],
)
def test_unfit_token_files_are_refused(
    tmp_path: Path, array: np.ndarray, tokenizer: str | None, vocab_size: int | None, message: str
) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(REFUSED, match=message):
        corpora.read_corpus([tmp_path / "ids.npy"], tokenizer, vocab_size)


@pytest.mark.parametrize(
    ("tokenizer", "size", "message"),
    [
        (None, 300, "byte brings a vocabulary of its own"),
        ("char", 300, "char brings a vocabulary of its own"),
        ("bpe", 255, "bpe begins with the 256 bytes, got 255"),
    ],
)
def test_a_vocabulary_size_is_never_ignored(tmp_path: Path, tokenizer: str | None, size: int, message: str) -> None:
    with pytest.raises(FlagErrors, match=f"--vocab-size: {message}"):
        corpora.read_corpus([write(tmp_path, "text.txt", b"x" * 70)], tokenizer, size)


@pytest.mark.parametrize(
    ("name", "content"), [("a.npy", b"no array"), ("a.npy", b""), ("a.bin", b""), ("a.bin", b"odd")]
)
def test_files_that_hold_no_tokens(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(REFUSED, match=name):
        corpora.read_corpus([write(tmp_path, name, content)], "byte")


def test_random_blocks_predict_the_next_token_and_reach_both_ends() -> None:
    tokens = np.arange(20, dtype=np.uint8)
    blocks = corpora.RandomBlocks(tokens, 500, 8, seed=1)
    inputs, targets = blocks.draw()
    assert inputs.shape == targets.shape == (500, 8)
    np.testing.assert_array_equal(targets, inputs + 1)
    assert inputs.min() == 0
    assert targets.max() == 19


def test_the_position_in_the_data_is_restored() -> None:
    tokens = np.arange(100)
    one, other = corpora.RandomBlocks(tokens, 2, 4, seed=1), corpora.RandomBlocks(tokens, 2, 4, seed=2)
    one.draw()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    np.testing.assert_array_equal(one.draw()[0], other.draw()[0])
    only = corpora.RandomBlocks(tokens, 2, 4, seed=1, repeat_first=True)
    np.testing.assert_array_equal(only.draw()[0], only.draw()[0])


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.as_json()["kind"])
def test_the_bytes_of_tokens_add_up_to_those_of_the_text(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    assert len(lengths) == tokenizer.vocab_size
    assert lengths[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


@pytest.mark.parametrize("length", [2, 8, 9, 10, 17, 50])
@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_overlapping_blocks_score_each_token_once_with_the_context_that_the_stride_gives(
    length: int, stride: int
) -> None:
    tokens, block, contexts = np.arange(length), 8, {}
    for inputs, targets in nn.sliding_windows(tokens, block, stride, 3):
        for row, labels in zip(inputs, targets, strict=True):
            for place in np.flatnonzero(labels != -100):
                assert labels[place] not in contexts
                np.testing.assert_array_equal(row[: place + 1], np.arange(row[0], labels[place]))
                contexts[labels[place]] = place + 1
    assert sorted(contexts) == list(range(1, length))
    assert all(context == token or context > block - stride for token, context in contexts.items())


@pytest.mark.parametrize("length", [2, 9, 10, 17, 100])
def test_a_whole_evaluation_counts_each_token_once(length: int) -> None:
    tokens = np.arange(length, dtype=np.uint8)
    pairs = []
    for inputs, targets in nn.sliding_windows(tokens, 8, 8, 3):
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == min(8, length - 1)
        pairs += list(zip(inputs[targets != -100], targets[targets != -100], strict=True))
    assert pairs == [(i, i + 1) for i in range(length - 1)]


def test_a_short_evaluation_is_spread_over_the_text_and_always_the_same() -> None:
    tokens = np.arange(1001)
    first, again = (list(nn.sliding_windows(tokens, 10, 10, 5, 4)) for _ in range(2))
    starts = np.concatenate([inputs[:, 0] for inputs, _ in first])
    assert starts.tolist() == list(range(0, 1000, 50))
    np.testing.assert_array_equal(first[3][1], again[3][1])
