"""The digits are read, a run that was cut in two ends in the same bits, and frozen layers stay as they were."""

from __future__ import annotations

from pathlib import Path

import digits
import numpy as np
import pytest

import minigrad as mg

pytest.importorskip("sklearn")


def run(out: Path, *flags: str) -> float:
    return digits.main([f"--out-dir={out}", "--batch-size=32", *flags])


@pytest.mark.parametrize(("model", "epochs", "least"), [("mlp", 8, 0.93), ("cnn", 4, 0.96)])
def test_held_out_digits_are_read(tmp_path, capsys, model, epochs, least):
    assert run(tmp_path, f"--model={model}", f"--epochs={epochs}") > least
    text = capsys.readouterr().out
    assert "total" in text and f"epoch {epochs:3}" in text and "of the held-out digits are read" in text


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_resuming_changes_no_bit(tmp_path, model):
    """Dropout, shuffling, moments, running statistics and the schedule go on where they were."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, f"--model={model}", "--epochs=3", "--step-size=1")
    run(cut, f"--model={model}", "--epochs=1", "--step-size=1")
    run(cut, f"--model={model}", "--epochs=3", "--step-size=1", "--seed=5", "--resume")  # another start counts nothing
    ours, theirs = (mg.load(folder / f"{model}.safetensors") for folder in (whole, cut))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    facts = [mg.load_metadata(folder / f"{model}.safetensors") for folder in (whole, cut)]
    assert facts[0] == facts[1]


def test_it_stops_when_validation_gets_no_better(tmp_path, capsys):
    run(tmp_path, "--model=mlp", "--epochs=50", "--patience=2", "--lr=0.3")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    losses = [float(line.split("validation ")[1].split()[0]) for line in lines]
    assert len(lines) < 50 and len(losses) - 1 - int(np.argmin(losses)) == 2


def test_a_new_head_learns_on_frozen_layers(tmp_path, capsys):
    accuracy = run(tmp_path, "--model=cnn", "--epochs=3", "--odd")
    assert accuracy > 0.85  # a coin says half
    before, after = mg.load(tmp_path / "cnn.safetensors"), mg.load(tmp_path / "cnn-odd.safetensors")
    for name in (name for name in after if name.startswith("model/") and not name.startswith("model/10.")):
        np.testing.assert_array_equal(after[name], before[name.replace("model/", "best/")], err_msg=name)
    assert "frozen" in capsys.readouterr().out
    assert {name for name in after if name.startswith("optimizer/")} == {
        f"optimizer/{place}.{state}" for place in (0, 1) for state in ("step", "exp_avg", "exp_avg_sq")
    }


def test_gradient_norms_are_those_of_the_layers():
    model = digits.mlp()
    for k, parameter in enumerate(model.parameters()):
        parameter.grad = np.full(parameter.shape, k + 1.0, np.float32)
    found = digits.gradient_norms(model)
    assert found == pytest.approx({
        "1 Linear": np.sqrt(64 * 64 * 1 + 64 * 4), "4 Linear": np.sqrt(64 * 10 * 9 + 10 * 16)
    })  # fmt: skip


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, "--model=mlp", "--epochs=1")
    assert (tmp_path / "mlp.png").stat().st_size > 1000


@pytest.mark.parametrize("flag", ["epochs", "patience", "batch-size", "step-size"])
def test_counts_begin_at_one(tmp_path, capsys, flag):
    for value in ("0", "-1", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            digits.main([f"--out-dir={tmp_path}", f"--{flag}={value}"])
        assert f"argument --{flag}: " in capsys.readouterr().err
