"""What an editor shows of public calls: mypy's ``reveal_type`` of each, and the errors that it finds in wrong ones."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.signatures import ROOT, STUBS, stub

api = pytest.importorskip("mypy.api")

TENSOR, ARRAY = "minigrad.tensor.Tensor", "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
HEAD = """
from typing import Any
import numpy as np
import minigrad as mg
import nn
import nn.functional as F
import optim

t = mg.Tensor([[1.0, 2.0]], requires_grad=True)
a = np.ones((1, 2))
w = nn.Parameter(a)
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

class Twice(nn.Module):
    def forward(self, x: mg.Tensor, times: int = 2) -> mg.Tensor:
        return times * x
"""
REVEALED = {
    # a Tensor of a Tensor, whatever stands beside it; an array of an array, a number or a list
    "mg.sum(t)": TENSOR,
    "mg.sum(a, axis=1)": ARRAY,
    "mg.exp(a)": ARRAY,
    "mg.exp(w)": TENSOR,
    "mg.sum([1.0, 2.0])": ARRAY,
    "mg.add(t, 2.0)": TENSOR,
    "mg.add(2.0, t)": TENSOR,
    "mg.multiply(a, t)": TENSOR,
    "mg.multiply(a, 2.0)": ARRAY,
    "mg.where(a > 0, t, 0.0)": TENSOR,
    "mg.concatenate([t, t], axis=0)": TENSOR,
    "mg.stack([a, a])": ARRAY,
    "mg.einsum('ij->i', t)": TENSOR,
    "mg.split(t, 2, axis=1)": f"list[{TENSOR}]",
    "mg.topk(a, 1)": f"tuple[{ARRAY}, {ARRAY}]",
    "mg.softmax(t)": TENSOR,
    "mg.linalg.solve(a, t)": TENSOR,
    "mg.linalg.inv(a)": ARRAY,
    "mg.linalg.norm(t, 2)": TENSOR,
    "mg.linalg.eigh(t)": "tuple[Any, Any, fallback=minigrad.ops.decompositions.EighResult]",
    # methods and attributes
    "t.sum()": TENSOR,
    "2.0 * t @ t.T": TENSOR,
    "t == 1": TENSOR,
    "t[0].max(axis=-1)": TENSOR,
    "t.grad": f"{ARRAY} | None",
    "t.data": ARRAY,
    "t.shape": "tuple[int, ...]",
    "t.numpy()": ARRAY,
    "mg.zeros((2, 3))": TENSOR,
    # transforms
    "mg.grad(t.sum(), [t])": f"tuple[{TENSOR}, ...]",
    "mg.value_and_grad(lambda x: x.sum())(t)": f"tuple[{TENSOR}, {TENSOR}]",
    "mg.value_and_grad(lambda x, y: x.sum(), (0, 1))(t, t)": f"tuple[{TENSOR}, tuple[{TENSOR}, ...]]",
    "mg.jacobian(mg.exp, t)": TENSOR,
    "mg.checkpoint(Twice(), t)": TENSOR,
    # layers and losses
    "F.cross_entropy(t, np.array([1]))": TENSOR,
    "F.cross_entropy(a, np.array([1]))": ARRAY,
    "F.linear(a, w)": TENSOR,
    "F.mse_loss(t, a)": TENSOR,
    "F.scaled_dot_product_attention(t, t, t, is_causal=True)": TENSOR,
    "nn.Linear(3, 4)(t)": TENSOR,
    "nn.LayerNorm(2)(t)": TENSOR,
    "nn.Embedding(5, 2)([1, 2])": TENSOR,
    "nn.ReLU()(t)": TENSOR,
    "nn.TransformerLM(5, 8, 4, 1, 1)([[1, 2]])": TENSOR,
    "nn.TransformerLM(5, 8, 4, 1, 1).loss([[1]], [[2]])": TENSOR,
    "Twice()(t, times=3)": TENSOR,
    "optim.clip_grad_norm(model.parameters(), 1.0)": ARRAY,
}
REFUSED = {
    "mg.sum(t, axs=1)": "call-arg",
    "mg.exp(object())": "type-var",
    "t.sum(axis='rows')": "arg-type",
    "t.sumn()": "attr-defined",
    "t + object()": "operator",
    "mg.reshape(t, 'flat')": "arg-type",
    "Twice()(t, times='two')": "arg-type",
    "nn.Linear(3)": "call-arg",
    "optim.AdamW(model.parameters(), lr='fast')": "arg-type",
    "optim.AdamW(0.1)": "arg-type",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, str]]:
    """What mypy says of each line: a note and its text, or an error and its code. All lines are checked in one run."""
    folder = tmp_path_factory.mktemp("types")
    calls = [f"reveal_type({call})" for call in REVEALED] + list(REFUSED)
    (folder / "user.py").write_text("\n".join([*HEAD.strip().splitlines(), *calls]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        options = ["--strict", "--follow-imports=silent", f"--config-file={ROOT / 'pyproject.toml'}"]
        said, trouble, _ = api.run([*options, f"--cache-dir={folder}", "--no-pretty", str(folder / "user.py")])
    assert not trouble
    form = re.compile(r".*?user\.py:(\d+): (note: Revealed type is \"(?P<type>.*)\"|error: .*\[(?P<code>[\w-]+)\])$")
    lines = [match for match in map(form.match, said.splitlines()) if match]
    return {int(line[1]): ("error", line["code"]) if line["code"] else ("type", line["type"]) for line in lines}


FIRST = len(HEAD.strip().splitlines()) + 1


@pytest.mark.parametrize(("place", "call"), list(enumerate(REVEALED, FIRST)), ids=list(REVEALED))
def test_an_editor_knows_what_a_call_gives(place: int, call: str, found: dict[int, tuple[str, str]]) -> None:
    kind, text = found[place]
    assert kind == "type" and re.sub(r"\bbuiltins\.|\btyping\.", "", text) == REVEALED[call]


@pytest.mark.parametrize(("place", "call"), list(enumerate(REFUSED, FIRST + len(REVEALED))), ids=list(REFUSED))
def test_an_editor_marks_a_wrong_call(place: int, call: str, found: dict[int, tuple[str, str]]) -> None:
    assert found.get(place) == ("error", REFUSED[call])


@pytest.mark.parametrize("module", STUBS)
def test_the_signatures_that_an_editor_reads_are_those_of_the_registry(module: str) -> None:
    """To write them again: ``python tests/support/signatures.py``."""
    assert Path(ROOT / STUBS[module]).read_text() == stub(importlib.import_module(module))
