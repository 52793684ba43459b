"""train_lm.py --teacher: a run that learns from another goes on with the same bits, and refuses what doesn't fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import train_lm

pytestmark = pytest.mark.cpu_only("programs that are given --device cpu")

TINY = "--n-head 2 --n-embd 16 --d-ff 16 --batch-size 2 --eval-iters 3 --sample-tokens 5 --device cpu --no-progress"
TEXT = "".join(f"{number} bottles of beer on the wall,\n{number} bottles of beer!\n" for number in range(40))
Train = Callable[..., int]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run the program on a text: the name of the run's folder, then flags."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(name: str, flags: str) -> int:
        given = f"{TINY} --data {tmp_path / 'text.txt'} --out-dir {tmp_path / name} {flags}"
        return train_lm.main(given.split())

    return run


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if line["val_loss"] is not None]


def test_a_student_goes_on_with_the_same_bits_and_the_tokens_of_its_teacher(train: Train, tmp_path: Path) -> None:
    assert train("teacher", "--tokenizer char --block-size 8 --n-layer 2 --max-iters 6") == 0
    teacher = f"--teacher {tmp_path / 'teacher'} --block-size 8 --n-layer 1"
    assert train("whole", f"{teacher} --max-iters 6 --eval-interval 3 --lr-decay-iters 6") == 0
    assert train("parts", f"{teacher} --max-iters 3 --eval-interval 3 --lr-decay-iters 6") == 0
    assert train("parts", f"{teacher} --max-iters 6 --eval-interval 3 --lr-decay-iters 6") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert train("alone", "--tokenizer char --block-size 8 --n-layer 1 --max-iters 6 --eval-interval 3") == 0
    assert losses(tmp_path / "alone") != losses(tmp_path / "whole")


def test_what_does_not_fit_is_one_line(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("teacher", "--tokenizer char --block-size 8 --n-layer 1 --max-iters 2") == 0
    teacher = f"--teacher {tmp_path / 'teacher'} --n-layer 1 --max-iters 2"
    assert train("student", f"{teacher} --block-size 8") == 0
    assert train("teacher", "--tokenizer char --block-size 8 --n-layer 1 --max-iters 4") == 0  # another than before
    for name, flags, said in (
        ("a", f"{teacher} --block-size 16", "--block-size: expected at most the model's context, 8 tokens, got 16"),
        ("b", f"{teacher} --block-size 8 --tokenizer byte", "--tokenizer: expected that of --teacher"),
        ("c", f"{teacher} --block-size 8 --label-smoothing 0.1", "--label-smoothing: expected 0 with --teacher"),
        ("d", f"{teacher} --block-size 8 --teacher-share 1.5", "--teacher-share"),
        ("e", f"{teacher} --block-size 8 --teacher-temperature 0", "--teacher-temperature"),
        ("f", f"--teacher {tmp_path / 'none'} --block-size 8 --max-iters 2", "none"),
        ("student", f"{teacher} --block-size 8 --max-iters 4", "is not the model that the run began with"),
    ):
        capsys.readouterr()
        try:
            status = train(name, flags)
        except SystemExit as end:  # flags that are wrong by themselves
            status = end.code  # type: ignore[assignment]
        assert status == 2, name
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
