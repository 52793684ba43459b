"""The benchmarks do the same work in every engine, and their statistics are right."""

from __future__ import annotations

import math
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import accuracy
import adapting
import compression
import forgetting
import op_cost
from alternate import median_interval
from compare import quartiles
from engines import ENGINES
from harness.configs import Config, batches, initial_weights
from small import operations, with_autograd, with_minigrad, works

import minigrad as mg
from minigrad.machine import allocator

pytestmark = pytest.mark.cpu_only("the engines choose their devices")

TINY = Config(vocab_size=19, d_model=24, num_layers=2, num_heads=3, d_ff=40, context_length=10, batch_size=3)


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_trains_the_same_model_as_minigrad_in_both_forms(compiled: bool) -> None:
    """Losses of steps from the same weights: those of the second step on show that the gradients agree too."""
    torch = pytest.importorskip("torch")
    module, _ = ENGINES["torch"].load()
    model = module.TransformerLM(TINY, initial_weights(TINY), compiled)
    weight = model.layers[1].attn.qkv_proj.weight
    expected = [initial_weights(TINY)[f"layers.1.attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(weight.detach(), np.concatenate(expected))
    minigrad, _ = ENGINES["minigrad"].load()
    ours = minigrad.TrainingStep(TINY, initial_weights(TINY))
    optimizer = torch.optim.AdamW(model.parameters(), **module.ADAMW)
    for tokens, targets in islice(batches(TINY), 4):
        loss = model(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), module.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        assert ours(tokens, targets) == pytest.approx(loss.item(), rel=1e-5)


def test_recomputing_changes_no_loss() -> None:
    losses = []
    for name in ("minigrad", "minigrad+recompute"):
        module, options = ENGINES[name].load()
        step = module.training_step(TINY, initial_weights(TINY), **options)
        losses.append([step(*batch) for batch in islice(batches(TINY), 3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_torch_can_be_given_what_minigrad_asks_of_malloc() -> None:
    given = {name: int(value) for name, value in ENGINES["torch+malloc"].environment.items()}
    asked = {"MMAP": allocator.LARGEST_IN_HEAP, "TRIM": allocator.NEVER_TRIM}
    assert given == {f"MALLOC_{name}_THRESHOLD_": value for name, value in asked.items()}


@pytest.mark.parametrize("n", [6, 7, 20, 30, 31])
def test_the_interval_of_the_median_misses_it_in_at_most_5_percent(n: int) -> None:
    """And the next narrower one in more: by the binomial distribution of how many values lie below the median."""
    low, high = median_interval([float(i) for i in range(1, n + 1)])
    assert low + high == n + 1

    def missed(k: int) -> float:
        return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert missed(int(low)) <= 0.05 < missed(int(low) + 1)


def test_the_interval_of_few_values_is_the_whole_line() -> None:
    assert median_interval([1.0] * 5) == (-math.inf, math.inf)


def test_quartiles() -> None:
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", works(0.02))
def test_small_work_is_the_same_in_minigrad_and_autograd(name: str) -> None:
    pytest.importorskip("autograd")
    work = works(0.02)[name]
    ours, theirs = with_minigrad(work)(), with_autograd(work)()
    assert [np.shape(result) for result in ours] == [np.shape(result) for result in theirs]
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", operations())
def test_recorded_operations_are_the_same_in_minigrad_and_torch(name: str) -> None:
    for got, expected in zip(*(run() for run in operations()[name]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_the_work_of_each_operation_runs() -> None:
    """And two checkouts are timed in turn: here this one and itself."""
    gradients = {name: make()() for name, make in op_cost.works(1000, np.float32).items()}
    x, g = (np.random.default_rng(seed).standard_normal(1000).astype(np.float32) for seed in range(2))
    np.testing.assert_allclose(gradients["tanh"], g / np.cosh(x) ** 2, rtol=1e-5)
    np.testing.assert_allclose(gradients["expm1"], g * np.exp(x), rtol=1e-5)
    checkouts = [op_cost.Checkout(Path(__file__).parents[2]) for _ in range(2)]
    found = op_cost.compare(checkouts, "tanh", "float32", size=1000, pairs=2, seconds=0.0)
    for checkout in checkouts:
        checkout.close()
    assert [len(times) for times in found["times_us"]] == [2, 2] and found["ratio"] > 0


def test_the_page_of_accuracy_is_what_its_program_writes() -> None:
    """All but the figures of the table: the operations, the limits and what they cost."""
    written = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
    assert written.endswith(accuracy.limits() + accuracy.NOTES)
    listed = sorted((case for case in accuracy.CASES if case.public), key=str)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in written.split("## Above")[0].splitlines()]
    assert [row for row in rows if row in {case.title for case in listed}] == [case.title for case in listed] * 2
    few = [case for case in listed if case.title in ("exp", "multiply")]
    assert accuracy.page(5, few).count("\n| exp |") == 2


@pytest.mark.parametrize("study", [adapting, forgetting], ids=lambda study: study.__name__)
def test_a_study_of_adapting_runs_and_goes_on_where_it_was_stopped(study, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [f"{study.__name__}.py", "--quick", "--folder", str(tmp_path)])
    threads = mg.get_num_threads()
    study.main()
    first = capsys.readouterr().out
    study.main()
    mg.set_num_threads(threads)
    again = capsys.readouterr().out
    assert "seed 1:" in first and "seed" not in again.split("range")[0]  # nothing is computed twice
    assert first.split("| way")[1] == again.split("| way")[1]


def test_the_measurement_of_compression_runs_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys) -> None:
    threads = mg.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["compression.py", "--quick", "--folder", str(tmp_path)])
    monkeypatch.setattr(compression, "KINDS", ("float32", "q4_0"))
    monkeypatch.setattr(compression, "resident_apart", lambda kind, quick: 1.0)  # seconds to start each process
    compression.main()
    first = capsys.readouterr()
    compression.main()
    again = capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--timing"])
    compression.main()
    mg.set_num_threads(threads)
    assert "q4_0 …" in first.err and not again.err and first.out == again.out
    assert "+0.0000 ± 0.0000 | 0.00000 ± 0.00000 | 100.0 %" in first.out
    assert capsys.readouterr().out.count("\n| q4_0") == 1
