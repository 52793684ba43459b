"""An exported folder gives transformers the tokens, the logits and the greedy text of the model that was trained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from text.hf_export import HfExport
from text.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    byte_characters,
    tokenizer_from_json,
)
from training.checkpoint import save_checkpoint
from training.flags import FlagErrors

import nn
from minigrad.errors import ArgumentError

TEXT = "To be, or not to be:\n\n  that is — the “question”.\tΔ𝄞 1½ \r\n" * 3
TOKENIZERS = {
    "byte": ByteTokenizer,
    "char": lambda: CharTokenizer(TEXT),
    "bpe": lambda: BpeTokenizer.trained(TEXT, 300),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_model_and_greedy_text_are_the_same(transformers, tmp_path, kind):
    pytest.importorskip("tokenizers")
    tokenizer = TOKENIZERS[kind]()
    model = nn.TransformerLM(tokenizer.vocab_size, 64, 24, 2, 4, generator=1).eval()
    assert "AutoTokenizer" in HfExport(tmp_path / "out", tokenizer).write(model)

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs(TEXT)["input_ids"]
    assert ids == tokenizer.encode(TEXT).tolist()
    assert theirs.decode(ids) == TEXT == tokenizer.decode(ids)
    assert theirs.decode(theirs("a b c , . 'll")["input_ids"]) == "".join(
        c for c in "a b c , . 'll" if kind != "char" or c in TEXT
    )

    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = theirs("To be", return_tensors="pt")
    text = there.generate(**prompt, max_new_tokens=30, do_sample=False)[0]
    ours = nn.generate(model, tokenizer.encode("To be"), 30, temperature=0)
    assert text.tolist() == ours.tolist()
    assert theirs.decode(text) == tokenizer.decode(ours)


def test_every_byte_has_its_character():
    library = pytest.importorskip("tokenizers")
    characters = byte_characters()
    assert sorted(characters) == sorted(library.pre_tokenizers.ByteLevel.alphabet())
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in map(chr, (*range(128), 0xE9, 0x3A9, 0x1D11E)):
        ((pieces, _),) = level.pre_tokenize_str(text)
        assert pieces == "".join(characters[byte] for byte in text.encode())


def test_ids_have_no_tokenizer(tmp_path):
    model = nn.TransformerLM(30, 16, 8, 1, 2, generator=1)
    assert "without a tokenizer" in HfExport(tmp_path, IdTokenizer(30)).write(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_ids_exported_over_a_model_of_text_leave_no_tokenizer_of_it(tmp_path):
    pytest.importorskip("tokenizers")
    model = nn.TransformerLM(256, 16, 8, 1, 2, generator=1)
    HfExport(tmp_path, ByteTokenizer()).write(model)
    assert (tmp_path / "tokenizer.json").is_file()
    HfExport(tmp_path, IdTokenizer(256), overwrite=True).write(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("there", ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_another_model_is_not_overwritten_unasked(tmp_path, there):
    (tmp_path / there).write_bytes(b"another's")
    with pytest.raises(FlagErrors, match=f"which holds {there}.*--overwrite"):
        HfExport(tmp_path, IdTokenizer(30))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"another's"]
    HfExport(tmp_path, IdTokenizer(30), overwrite=True).write(nn.TransformerLM(30, 16, 8, 1, 2, generator=1))
    assert nn.load_pretrained(tmp_path).vocab_size == 30


def test_a_checkpoint_is_never_exported_into(tmp_path):
    step = save_checkpoint(tmp_path, 1, {"model": {"x": np.ones(2)}}, {})
    before = {path: path.read_bytes() for path in step.iterdir()}
    for overwrite in (False, True):
        with pytest.raises(FlagErrors, match="holds a checkpoint"):
            HfExport(step, IdTokenizer(30), overwrite)
    assert {path: path.read_bytes() for path in step.iterdir()} == before


def test_a_folder_that_may_not_be_written_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ArgumentError, match="may not be written"):
        HfExport(tmp_path, ByteTokenizer())


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs of Unix")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_an_export_goes_through_no_link(tmp_path, name):
    mine, folder = tmp_path / "mine", tmp_path / "ex"
    mine.write_text("mine")
    folder.mkdir()
    (folder / name).symlink_to(mine)
    pytest.importorskip("tokenizers")
    try:
        HfExport(folder, ByteTokenizer(), overwrite=True).write(nn.TransformerLM(256, 16, 8, 1, 2, generator=1))
    except ArgumentError as error:
        assert name in ("config.json", "model.safetensors"), error
    assert mine.read_text() == "mine"
    for other in folder.iterdir():
        other.unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ArgumentError, match="regular files"):
        HfExport(folder, ByteTokenizer(), overwrite=True)


def test_a_tokenizer_json_is_handed_on():
    pytest.importorskip("tokenizers")
    tokenizer = BpeTokenizer.trained(TEXT, 300)
    again = tokenizer_from_json({"kind": "bpe", "tokenizer": tokenizer.hf_json()})
    np.testing.assert_array_equal(again.encode(TEXT), tokenizer.encode(TEXT))
