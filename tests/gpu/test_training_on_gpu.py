"""The trainer on the GPU: the CPU's losses, and between two lines of the log the host waits for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_lm
from training import loop as training_loop
from training.checkpoint import open_checkpoint
from training.run import read_metrics

import minigrad as mg
import nn
import optim
from minigrad.backend import to_numpy

FLAGS = [
    *("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "16", "--batch-size", "4"),
    *("--max-iters", "20", "--warmup-iters", "5", "--log-interval", "5", "--eval-iters", "1", "--sample-tokens", "3"),
    *("--no-progress", "--checkpoint-interval", "10", "--seed", "3"),
]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines for key in ("train_loss", "val_loss") if line[key] is not None]


def test_train_lm_has_the_losses_of_the_cpu(tmp_path: Path, gpu: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        assert train_lm.main([*FLAGS, "--device", device, "--out-dir", str(folder), "--grad-clip", "0.5"]) == 0
        found.append(losses(folder))
    (cpu, cuda) = found
    assert [step for step, _ in cpu] == [step for step, _ in cuda] and len(cpu) >= 6
    np.testing.assert_allclose([loss for _, loss in cuda], [loss for _, loss in cpu], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_waits_between_two_lines_of_the_log(
    tmp_path: Path, simulated: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    waited = {}
    plain = training_loop.update

    def counting(*args: Any) -> None:
        before = simulated.synchronisations
        plain(*args)
        waited[args[1].step] = simulated.synchronisations - before

    monkeypatch.setattr(training_loop, "update", counting)
    flags = [*FLAGS, "--gradient-accumulation-steps", "2", "--dropout", "0.1", "--dtype", dtype]
    assert train_lm.main([*flags, "--device", "cuda", "--out-dir", str(tmp_path / "run")]) == 0
    assert {step: n for step, n in waited.items() if step % 5} == {step: 0 for step in range(1, 20) if step % 5}
    assert all(waited[step] <= 3 for step in (5, 10, 15, 20))  # loss, norm, and whether a step was not finite


def test_a_step_that_is_not_finite_is_left_out_and_named_at_the_next_line(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = optim.clip_grad_norm

    def poisoned(params: Any, max_norm: float) -> Any:
        params = list(params)
        count.append(1)
        if len(count) == 7:
            params[0].grad[0, 0] = np.nan
        return plain(params, max_norm)

    count: list[int] = []
    monkeypatch.setattr(optim, "clip_grad_norm", poisoned)
    flags = [*FLAGS, "--device", "cuda", "--no-cuda-graph"]  # which would run this function twice
    assert train_lm.main([*flags, "--out-dir", str(tmp_path / "run")]) == 1
    assert "first at step 7" in capsys.readouterr().err
    assert len(count) == 10


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, gpu: Any) -> None:
    """With dropout, whose choices go on where they were; sums on the device are formed in one order: the same bits."""
    flags = [*FLAGS, "--dropout", "0.2", "--device", "cuda"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_lm.main([*flags, "--out-dir", str(whole), "--lr-decay-iters", "20"]) == 0
    assert train_lm.main([*flags, "--out-dir", str(parts), "--lr-decay-iters", "20", "--max-iters", "10"]) == 0
    assert train_lm.main([*flags, "--out-dir", str(parts), "--lr-decay-iters", "20"]) == 0
    assert losses(whole)[-1] == losses(parts)[-1]


def test_a_run_goes_on_on_another_device(tmp_path: Path, gpu: Any) -> None:
    """To the GPU and back: weights, moments, batches, and what dropout chooses are those of a run on the CPU alone."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*FLAGS, "--dropout", "0.2", "--lr-decay-iters", "20", "--log-interval", "1"]
    assert train_lm.main([*flags, "--device", "cpu", "--out-dir", str(whole)]) == 0
    for device, until in (("cpu", "6"), ("cuda", "13"), ("cpu", "20")):
        assert train_lm.main([*flags, "--device", device, "--out-dir", str(parts), "--max-iters", until]) == 0
        assert open_checkpoint(parts).meta["config"]["device"] == device
    stayed, moved = ([line["train_loss"] for line in read_metrics(out / "metrics.jsonl")[1:]] for out in (whole, parts))
    assert len(stayed) == len(moved) == 20
    np.testing.assert_allclose(moved, stayed, atol=1e-4)


def test_ids_that_do_not_fit_are_refused_before_they_are_uploaded(gpu: Any) -> None:
    model = nn.TransformerLM(10, context_length=8, d_model=16, num_layers=1, num_heads=2, device="cuda")
    for ids in ([[1, 10]], [[-1, 2]]):
        with pytest.raises(IndexError, match="every id from 0 to 9"):
            model(np.array(ids))
        with pytest.raises(IndexError, match="every id from 0 to 9"):
            model(mg.Tensor(ids, device="cuda"))
        with pytest.raises(IndexError, match="every class from 0 to 9"):
            model.loss(np.array([[1, 2]]), np.array(ids))


def test_an_encoder_decoder_with_padding_and_dropout_is_the_same_by_kernels(gpu: Any) -> None:
    """Masks of padding and dropout, also of weights of attention, are taken by the kernels, and drop the same."""
    source, target = np.array([[3, 4, 5, 0], [1, 2, 0, 0]]), np.array([[1, 2, 3], [4, 5, 0]])
    options: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "pad_id": 0}
    found, state = [], None
    for device in ("cpu", "cuda"):
        model = nn.Transformer(20, 20, **options, attention_dropout=0.3, device=device)
        state = state or {name: np.asarray(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        mg.random.seed(5)
        with mg.profile() as p:
            out = model(source, target)
            (out * out).sum().backward()
        assert not [row.label for row in p.rows if row.label == "attention (definition)"]
        found.append([out.numpy(), *(to_numpy(q.grad) for q in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1, np.abs(theirs).max()))
