"""The README's way to transformers, typed as it stands there, with a smaller model and fewer updates."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "--n-layer 1 --n-embd 32 --eval-iters 1 --sample-tokens 1 --warmup-iters 2 --no-progress".split()  # noqa: SIM905


def blocks() -> tuple[list[list[str]], str]:
    """The commands of the section but pip's, split into words, and its Python code."""
    section = (ROOT / "README.md").read_text().split("## To Hugging Face's transformers, and back")[1].split("\n## ")[0]
    (shell,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line) for line in shell.splitlines() if line.startswith("python ")], code


@pytest.mark.usefixtures("transformers")
def test_transformers_writes_the_greedy_text_of_the_trained_model(tmp_path, environment):
    pytest.importorskip("tokenizers")

    def run(*words: str) -> str:
        options = {"cwd": tmp_path, "env": {**environment, "HF_HUB_OFFLINE": "1"}, "text": True}
        done = subprocess.run([sys.executable, *words], capture_output=True, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (train, generate), code = blocks()
    assert train[1:4] == ["examples/train_lm.py", "--max-iters", "200"]
    assert re.search(r"exported to \S*exported, ", run(str(ROOT / train[1]), "--max-iters", "8", *train[4:], *TINY))
    text = run(str(ROOT / generate[1]), *generate[2:])
    assert text.startswith("MACBETH.") and len(text) > 40
    assert run("-c", code) == text
