"""Flags: spelling, defaults, every mistake reported, and what a continued run may be given."""

import dataclasses
import re
import sys
from dataclasses import dataclass

import evaluate
import g2p
import generate
import pytest
import train_lm
from training import flags as tf
from training import loop


@dataclass(kw_only=True)
class Config(tf.Flags):
    """Flags of a test."""

    max_iters: int = tf.changeable_flag(10, tf.integer(0), "updates")
    learning_rate: float = tf.flag(1e-3, tf.positive, "rate, 100 % of it")
    dropout: float = tf.flag(0.0, tf.fraction, "dropout")
    data: tuple[str, ...] | None = tf.flag(None, tf.path, "files", many=True)
    tie: bool = tf.flag(False, None, "a switch")

    def check(self) -> list[str]:
        return [*super().check(), *(["--tie: not with dropout"] if self.tie and self.dropout else [])]


def parse(line: str) -> dict[str, object]:
    given, problems = tf.parse(Config, line.split(), "prog", "About.")
    assert problems == []
    return given


def problems(line: str) -> list[str]:
    with pytest.raises(tf.FlagErrors) as caught:
        tf.complete(Config, *tf.parse(Config, line.split(), "prog", "About."))
    return caught.value.problems


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("", {}),
        ("--max-iters 5", {"max_iters": 5}),
        ("--max_iters=5 --learning_rate 2e-4", {"max_iters": 5, "learning_rate": 2e-4}),
        ("--data a.txt b_c.txt --tie", {"data": ["a.txt", "b_c.txt"], "tie": True}),
        ("--max-iters 1 --max-iters 2", {"max_iters": 2}),
        ("--data a b --tie --data=c d", {"data": ["c", "d"], "tie": True}),
    ],
)
def test_only_what_was_given_is_parsed(line: str, given: dict[str, object]) -> None:
    assert parse(line) == given


def test_every_mistake_is_reported_at_once() -> None:
    found = problems("--max-iters few --learning-rate 0 --beta 1 --max_itters 3 --device tpu --tie --dropout 0.5")
    assert [text.partition(":")[0] for text in found] == [
        "--max-iters",
        "--learning-rate",
        "--device",
        "--beta",
        "--max-itters",
        "--tie",
    ]
    assert "did you mean --max-iters" in found[-2]
    assert all("got" in text for text in found[:3])


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "x", ""])
def test_numbers_out_of_range_are_refused(value: str) -> None:
    (problem,) = problems(f"--learning-rate={value}")
    assert problem.startswith("--learning-rate: expected a number above 0")


@pytest.mark.parametrize("line", ["--max-iters", "--max-iters --tie", "--max-iters -1", "--max-iters 1.5"])
def test_missing_and_unfit_values_name_their_flag(line: str) -> None:
    (problem,) = problems(line)
    assert problem.startswith("--max-iters: ")


@pytest.mark.parametrize("flag", ["sample-tokens", "eval-iters"])
def test_what_would_never_end_is_refused_also_in_a_checkpoint(flag: str) -> None:
    for value in ("1000001", "1" + "0" * 99):
        with pytest.raises(tf.FlagErrors, match=f"--{flag}: expected a whole number from 0 to 1000000"):
            tf.complete(train_lm.Config, *tf.parse(train_lm.Config, [f"--{flag}={value}"], "train_lm.py", ""))
    with pytest.raises(tf.FlagErrors, match=f"--{flag}: the run that is continued has 10000000"):
        tf.merge(train_lm.Config, {}, {flag.replace("-", "_"): 10**99})


def test_values_may_begin_with_a_dash_or_be_empty() -> None:
    assert parse("--learning-rate 1 --data -x -1 --tie") == {"learning_rate": 1.0, "data": ["-x", "-1"], "tie": True}
    assert tf.parse(train_lm.Config, ["--prompt="], "prog", "")[0] == {"prompt": ""}


@pytest.mark.parametrize("config", [train_lm.Config, generate.Config, evaluate.Config, g2p.Config])
def test_no_value_that_a_flag_takes_is_too_large_or_no_path(config: type) -> None:
    """Of each flag of each program: a whole number that no float is, a path that names nothing, or that no file has."""
    fields = [field for field in dataclasses.fields(config) if field.metadata["kind"]]
    wrong = {"N": ["1" + "0" * 400, str(2**53 + 1)], "PATH": ["", "a\0b"], "NAME": ["", "a\0.json"]}
    tried = 0
    for field in fields:
        for value in wrong.get(field.metadata["kind"].metavar, []):
            given, (problem,) = tf.parse(config, [f"{tf.spelling(field.name)}={value}"], "prog", "")
            assert given == {} and problem.startswith(f"{tf.spelling(field.name)}: expected "), (field.name, problem)
            tried += 1
    assert tried > 4


@pytest.mark.parametrize("line", ["--help", "-h", "-hx", "--help=foo", "--max-iters few --help"])
def test_help_in_any_form_ends_the_program(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(line)
    assert capsys.readouterr().out.startswith("usage: prog [FLAG [VALUE]] ...")


def test_values_without_a_flag_and_flags_that_contradict_each_other() -> None:
    assert problems("stray") == ["'stray': a value without a flag"]
    assert problems("--tie=no --max-iters 1 2") == ["'no': a value without a flag", "'2': a value without a flag"]
    assert problems("--tie --dropout 0.5") == ["--tie: not with dropout"]


def test_a_continued_run_keeps_its_flags_and_may_change_the_free_ones() -> None:
    stored = {"max_iters": 10, "learning_rate": 2e-3, "dropout": 0.5, "data": None, "tie": False, "device": "cpu"}
    config, found = tf.merge(Config, {"max_iters": 20, "dropout": 0.5}, stored)
    assert found == []
    assert (config.max_iters, config.learning_rate, config.dropout) == (20, 2e-3, 0.5)
    _, found = tf.merge(Config, {"learning_rate": 1e-3, "tie": True, "max_iters": 20}, stored)
    assert [text.partition(":")[0] for text in found][:2] == ["--learning-rate", "--tie"]


def test_cuda_without_a_gpu_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    (problem,) = problems("--device cuda")
    words = r"expected CuPy, which runs the GPU, found .*cupy.*pip install -e '.\[cuda\]'.*; or take --device cpu"
    assert re.match(f"--device: {words}", problem)
    assert tf.complete(Config, {}).device == "cpu"


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "100 % of it (default: 0.001)" in shown
    assert "--max-iters N" in shown
    assert "--device {auto,cpu,cuda}" in shown


def test_help_shows_examples_and_the_flags_of_a_class_under_its_docstring() -> None:
    """With other defaults too; a field that a subclass declares anew stays where it was."""
    about = "What it does.\n\n    prog --tie\n\nHow to read the source."
    shown = tf.help_text(tf.with_defaults(Config, device="cpu", max_iters=3), "prog", about)
    parts = [
        "What it does.\n\n    prog --tie\n",
        "Flags of a test:",
        "--max-iters",
        "What every program is told:",
        "--device",
    ]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert "How to read" not in shown


def test_bfloat16_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "find_spec", lambda name: None)
    assert tf.RunFlags(device="cpu", dtype="float16").check() == []
    (problem,) = tf.RunFlags(device="cpu", dtype="bfloat16").check()
    assert problem == "--dtype: bfloat16 needs the package ml_dtypes: pip install ml_dtypes"


def trainer_problems(line: str) -> list[str]:
    try:
        tf.complete(tf.TrainingFlags, *tf.parse(tf.TrainingFlags, line.split(), "prog", "About."))
    except tf.FlagErrors as error:
        return error.problems
    return []


def test_noam_has_no_end_that_a_flag_could_set() -> None:
    assert trainer_problems("--schedule noam --device cpu") == []
    found = trainer_problems("--schedule noam --min-lr 1e-5 --lr-decay-iters 9 --device cpu")
    assert [text.partition(":")[0] for text in found] == ["--min-lr", "--lr-decay-iters"]


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rate_of_noam_reaches_the_learning_rate_and_falls_with_the_root(warmup: int) -> None:
    config = tf.TrainingFlags(schedule="noam", learning_rate=0.5, warmup_iters=warmup, device="cpu")
    rates = [loop.learning_rate(config, step) for step in (1, 2, 4, 16, 10**6)]
    peak = 0.5 * (warmup or 1) ** 0.5
    assert rates == pytest.approx(
        [0.125, 0.25, 0.5, 0.25, 1e-3] if warmup else [peak * n**-0.5 for n in (1, 2, 4, 16, 1e6)]
    )


def test_a_continued_run_of_noam_keeps_its_schedule() -> None:
    stored = dataclasses.asdict(tf.TrainingFlags(schedule="noam", device="cpu"))
    config, found = tf.merge(tf.TrainingFlags, {}, stored)
    assert (config.schedule, config.min_lr, config.lr_decay_iters, found) == ("noam", None, None, [])
    older = {name: value for name, value in stored.items() if name not in ("schedule", "label_smoothing")}
    assert tf.merge(tf.TrainingFlags, {}, older)[0].schedule == "cosine"
