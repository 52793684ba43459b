"""The study of attention: its tasks are what they are called, and it runs, stops and goes on."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import attention
import attention_study
from attention_study import KINDS, SEEDS, TASKS, Trial, best_rate, of_seeds, trials
from harness import measuring, records, tables
from study import language, recall
from study.models import size

import minigrad as mg
import nn

pytestmark = pytest.mark.cpu_only("the benchmarks choose their devices")


@pytest.mark.parametrize(("length", "pairs", "vocab_size"), [(64, 4, 64), (64, 16, 64), (31, 3, 9)])
def test_recall_asks_for_each_key_once_and_its_value_is_the_target(length: int, pairs: int, vocab_size: int) -> None:
    """Found again token by token: a dictionary of the pairs, and what it says where a target stands."""
    tokens, targets = recall.recall_batch(np.random.default_rng(0), 50, length, pairs, vocab_size)
    assert tokens.shape == targets.shape == (50, length)
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    for sequence, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        known = dict(zip(sequence[0 : 2 * pairs : 2], sequence[1 : 2 * pairs : 2], strict=True))
        assert len(known) == len(set(known.values())) == pairs
        assert all(0 < key < vocab_size // 2 <= value for key, value in known.items())
        asked = {i: answer for i, answer in enumerate(answers) if answer != recall.IGNORED}
        assert all(i >= 2 * pairs and i % 2 == 0 for i in asked)
        assert sorted(sequence[i] for i in asked) == sorted(known)
        assert all(known[sequence[i]] == answer for i, answer in asked.items())


def test_recall_asks_sooner_more_often_than_later() -> None:
    """One pair: the chance of the n-th place is that of the weights, n^(-0.99)."""
    _, targets = recall.recall_batch(np.random.default_rng(1), 20_000, 18, 1, 8)
    counts = (targets[:, 2::2] != recall.IGNORED).mean(axis=0)
    weights = np.arange(1, 9) ** -0.99
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=0.02)


def test_repeats_are_the_bigrams_that_were_there_before() -> None:
    text = np.random.default_rng(0).integers(4, size=(5, 40))
    expected = []
    for row in text.tolist():
        seen: set[tuple[int, int]] = set()
        expected.append([])
        for bigram in pairwise(row):
            expected[-1].append(bigram in seen)
            seen.add(bigram)
    assert 0.1 < np.mean(expected) < 0.9
    np.testing.assert_array_equal(language.repeats(text[:, :-1], text[:, 1:]), expected)


def test_an_ignored_target_is_no_token_of_a_bigram() -> None:
    """A bigram is numbered by its two tokens: -100 mustn't make the number of another."""
    inputs, targets = np.array([[7, 8, 3]]), np.array([[8, -100, 8]])
    assert not language.repeats(inputs, targets).any()


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if len(kind.layers) == 1])
def test_the_state_is_what_a_cache_holds(kind: str) -> None:
    """A layer with a window has room for two of them."""
    sizes = {"vocab_size": 8, "context_length": 64, "d_model": 16, "d_ff": 8, "num_heads": 2}
    model = KINDS[kind].model(2, 64, **sizes)
    cache = nn.KVCache(model, 64)
    for token in range(64):
        model.next_logits([[token % 8]], cache)
    held = measuring.held_mb(cache) * 2**20 / (2 if kind == "window" else 1)
    assert size(model, 64)["state"] * 4 == held


def test_the_study_keeps_what_it_finds_and_goes_on(tmp_path: Path) -> None:
    """Cut off in the middle of a line, it does that trial again and no other; the tables are those of the file."""
    file, heads = tmp_path / "results.jsonl", KINDS["full"].heads
    first: attention_study.Results = {}
    attention_study.run(["recall"], ["full"], first, file, 2, quick=True)
    with file.open("a") as cut:
        cut.write('{"task": "recall", "kind": "fu')
    results = attention_study.read(file)
    assert results == first and len(first) == 2
    attention_study.run(["recall"], ["full"], results, file, math.inf, quick=True)
    assert attention_study.read(file) == results
    assert {trial: results[trial] for trial in first} == first
    assert not list(trials(["recall"], ["full"], results))
    assert len(results) == len(heads) * (len(TASKS["recall"].rates) + len(SEEDS) - 1)
    assert attention_study.table(results, "recall").count("| full ") == len(heads)


def test_the_best_rate_is_that_of_the_first_seed() -> None:
    rates = TASKS["language"].rates
    trial = Trial("language", "full", language.HEAD, rates[0], SEEDS[0])
    results = {trial._replace(rate=rate): {"loss": 2.0 + i * (-1) ** i} for i, rate in enumerate(rates)}
    assert best_rate({trial: {"loss": 1.0}}, *trial[:3]) is None
    assert best_rate(results, *trial[:3]) == rates[1]
    results[trial._replace(seed=SEEDS[1])] = {"loss": 0.0}
    again = trial._replace(rate=rates[1], seed=SEEDS[1])
    results[again] = {"loss": 1.5}
    assert of_seeds(results, *trial[:3]) == [{"loss": 1.0}, {"loss": 1.5}]
    assert attention_study.spread([1.0, 1.5]) == (1.25, pytest.approx(math.sqrt(0.125)))


@pytest.mark.parametrize(("task", "kinds"), [("recall", list(KINDS)), ("language", ["full"])])
def test_the_quick_study_trains_and_draws(
    task: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tokenizers")
    argv = ["attention_study.py", "--quick", "--tasks", task, "--kinds", *kinds, "--plot", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    threads = mg.get_num_threads()
    try:
        attention_study.main()
    finally:
        mg.set_num_threads(threads)
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[2:] == [kind for kind in kinds for _ in TASKS[task].sizes(kind)]
    written = "".join(ElementTree.fromstring((tmp_path / f"attention-{task}.svg").read_text()).itertext())
    assert all(kind in written for kind in kinds)


def test_growth_and_the_length_that_pays() -> None:
    """2 T² against 600 T, which meet at T = 300, between two lengths; and one that never pays, one that always does."""
    lengths = (128, 256, 512, 2048, 4096)
    full, linear = {n: 2.0 * n**2 for n in lengths}, {n: 600.0 * n for n in lengths}
    assert attention.exponent(full) == pytest.approx(2) and attention.exponent(linear) == pytest.approx(1)
    assert attention.pays_from(linear, full) == "300"
    assert attention.pays_from({n: 3 * y for n, y in full.items()}, full) == "> 4096"
    assert attention.pays_from({n: y / 2 for n, y in full.items()}, full) == "≤ 128"


@pytest.mark.parametrize("kind", [kind for kind in attention.KINDS if not kind.startswith("torch")])
def test_a_kind_is_measured(kind: str) -> None:
    found = attention.measure(kind, 300, 0.0)
    assert found["ms"] > 0 and found["token ms"] > 0 and found["cache MB"] > 0


def test_a_page_takes_text_in_its_place() -> None:
    page = "a\n<!-- x -->\nold\n<!-- end -->\n<!-- y -->\nkept\n<!-- end -->\nb\n"
    assert tables.put(page, "x", "new") == page.replace("old", "new")


def test_the_last_record_of_a_thing_counts(tmp_path: Path) -> None:
    for found in (1, 2):
        records.add(tmp_path / "file", {"of": "a", "found": found})
    records.add(tmp_path / "file", {"of": "b", "found": 3})
    assert records.read(tmp_path / "file") == [{"of": "a", "found": 2}, {"of": "b", "found": 3}]
