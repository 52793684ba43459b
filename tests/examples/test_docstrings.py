"""The examples in the docstrings of the programs' modules are true."""

import doctest
import importlib

import pytest

MODULES = [
    "evaluate",
    "g2p",
    "generate",
    "hf_export",
    "lexicon",
    "lm_text",
    "train_lm",
    "training_checkpoint",
    "training_console",
    "training_flags",
    "training_loop",
    "training_memory",
    "training_run",
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
