"""Each planted trouble shows its symptom, and is gone when cured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import troubles

import minigrad as mg

pytestmark = pytest.mark.cpu_only("small models of a program for the CPU")

# What is known without a model: the entropy of the data, below which no honest loss lies, and the loss of guessing.
ENTROPY, GUESSING = 0.5623, 2.0794
AS_EXPECTED: dict[str, Callable[[float, float], bool]] = {
    "explodes": lambda sick, cured: sick > 100 and ENTROPY < cured < 0.7,
    "mask": lambda sick, cured: sick < 0.3 and ENTROPY < cured < 0.7,
    "labels": lambda sick, cured: sick < 0.1 and ENTROPY < cured < 0.7,
    "evaluation": lambda sick, cured: sick > cured + 0.02 and ENTROPY < cured < 0.8,
    "temperature": lambda sick, cured: sick > 0.03 and cured < 0.01,
    "detached": lambda sick, cured: (sick, cured) == (1, 0),
}
FOUND = {
    "explodes": r"worse: nan with inf, .* with 100, .* with 10; lowering it helps: 0\.[56]\d with 1",
    "mask": r"by \d\S*; in the cured model by 0$",
    "labels": r"(\d)(, \1){7}\]",
    "evaluation": "training is True",
    "temperature": r"0\.\d%",
    "detached": r": token_embeddings\.weight$",
}


def test_the_data_has_the_entropy_that_the_losses_are_judged_by() -> None:
    tokens = troubles.chains(20_000, np.random.default_rng(1))
    moves = (tokens[:, 1:] - tokens[:, :-1]) % troubles.VOCABULARY
    shares = np.unique(moves, return_counts=True)[1] / moves.size
    assert -(shares * np.log(shares)).sum() == pytest.approx(ENTROPY, abs=0.005)
    assert pytest.approx(ENTROPY, abs=1e-4) == troubles.ENTROPY
    assert np.log(troubles.VOCABULARY) == pytest.approx(GUESSING, abs=1e-4)


@pytest.mark.parametrize("name", troubles.TROUBLES)
def test_a_trouble_is_seen_found_and_cured(name: str) -> None:
    mg.random.seed(0)
    with np.errstate(all="ignore"):
        case = troubles.TROUBLES[name]()
    assert AS_EXPECTED[name](case.sick, case.cured), (case.sick, case.cured)
    assert re.search(FOUND[name], case.found), case.found


def test_the_program_and_the_page_know_the_same_troubles(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(troubles.TROUBLES)
    assert troubles.main(["detached"]) == 0
    assert capsys.readouterr().out.startswith("detached: A part of the model doesn't learn")
    with pytest.raises(SystemExit):
        troubles.main(["rate"])
    assert "expected names of explodes, mask" in capsys.readouterr().err
