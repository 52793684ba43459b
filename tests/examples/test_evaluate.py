"""The scores of a checkpoint, against a loop that predicts one token at a time."""

import math
import re
from pathlib import Path

import evaluate
import numpy as np
import pytest
import train_lm
from text.models import load_model
from training.checkpoint import open_checkpoint

import minigrad as mg

pytestmark = pytest.mark.cpu_only("programs that are given --device cpu")

TINY = "--n-layer 1 --n-head 2 --n-embd 16 --d-ff 16 --block-size 8 --batch-size 2 --eval-iters 3 --sample-tokens 5"
TEXT = "".join(f"{number} bottles – naïve 字!\n" for number in range(40))
OTHER = "12 bottles – 字 naïve!\n" * 2


@pytest.fixture(params=["byte", "char", "bpe", "ids"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of each kind of tokenizer, after a few updates; beside it the text ``other`` to score."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(OTHER)
    np.save(tmp_path / "text.npy", np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16))
    np.save(tmp_path / "other.npy", np.frombuffer(OTHER.encode(), np.uint8).astype(np.uint16))
    flags = {"ids": "--vocab-size 256", "bpe": "--tokenizer bpe --vocab-size 300"}
    if request.param == "bpe":
        pytest.importorskip("tokenizers")
    data = tmp_path / ("text.npy" if request.param == "ids" else "text.txt")
    given = flags.get(request.param, f"--tokenizer {request.param}")
    train = f"{TINY} {given} --data {data} --out-dir {tmp_path / 'run'} --device cpu --no-progress --max-iters 3"
    assert train_lm.main(train.split()) == 0
    return tmp_path / "run"


def naive(run: Path, tokens: list[int], stride: int) -> float:
    """Σ -log p(token | context) where the context reaches back to the first window that holds the token as a target."""
    model, _ = load_model(open_checkpoint(run), "cpu")
    total = 0.0
    for target in range(1, len(tokens)):
        start = max(0, math.ceil((target - 8) / stride)) * stride
        logits = model(np.array([tokens[start:target]])).numpy()[0, -1].astype(np.float64)
        total += math.log(np.exp(logits).sum()) - logits[tokens[target]]
    return total


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_token_is_scored_once(run: Path, capsys: pytest.CaptureFixture[str], stride: int) -> None:
    _, tokenizer = load_model(open_checkpoint(run), "cpu")
    kind = tokenizer.as_json()["kind"]
    ids = np.load(run.with_name("other.npy")).tolist() if kind == "ids" else tokenizer.encode(OTHER).tolist()
    data = run.with_name("other.npy" if kind == "ids" else "other.txt")
    capsys.readouterr()
    assert evaluate.main([f"--checkpoint={run}", f"--data={data}", f"--stride={stride}", "--batch-size=3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    total = naive(run, ids, stride)
    assert f"{len(ids) - 1:,} tokens scored in windows of 8, {stride} apart" in first
    shown = re.fullmatch(r"loss (\S+) nats a token, perplexity (\S+), (\S+) bits per byte", second)
    assert shown
    assert float(shown[1]) == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    assert float(shown[2]) == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-4)
    if kind == "ids":
        assert shown[3] == "unknown"
    else:
        size = len(OTHER.encode()) - len(tokenizer.decode(ids[:1]).encode())
        assert float(shown[3]) == pytest.approx(total / math.log(2) / size, abs=1e-4)


@pytest.mark.parametrize("run", ["byte"], indirect=True)
def test_the_default_text_is_what_the_run_validates_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert evaluate.main(["--checkpoint", str(run)]) == 0
    shown = capsys.readouterr().out
    validation = TEXT[len(TEXT) - len(TEXT) // 10 :].encode()
    assert f"validation text: {len(validation) - 1:,} tokens scored in windows of 8, 8 apart" in shown
    assert f"loss {naive(run, list(validation), 8) / (len(validation) - 1):.4f} " in shown
    run.with_name("text.txt").write_text(TEXT + "!")
    assert evaluate.main(["--checkpoint", str(run)]) == 2
    assert "which changed since" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["byte"], indirect=True)
def test_what_cannot_be_evaluated_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags, words in (
        ("--stride=9", "--stride: expected at most the model's context, 8 tokens, got 9"),
        ("--data=none.txt", "none.txt, which does not exist"),
        (f"--data={run.with_name('one')}", "a text of at least 2 tokens"),
    ):
        run.with_name("one").write_text("a")
        capsys.readouterr()
        assert evaluate.main([f"--checkpoint={run}", flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    monkeypatch.chdir(run)
    assert evaluate.main([]) == 2
    assert "no run of it in runs/" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["ids"], indirect=True)
def test_a_text_for_a_model_of_ids_is_one_short_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert evaluate.main([f"--checkpoint={run}", f"--data={run.with_name('text.txt')}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ids from 0 to 255" in line and "'bottles' as number 2" in line and len(line) < 200


@pytest.mark.parametrize("run", ["byte"], indirect=True)
def test_weights_that_are_not_finite_end_with_a_failing_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in run.rglob("model.safetensors"):
        mg.save(file, {name: np.full_like(array, np.nan) for name, array in mg.load(file).items()})
    for program, flags in ((evaluate, [f"--checkpoint={run}"]), (train_lm, [f"--resume={run}", "--eval-only"])):
        capsys.readouterr()
        assert program.main(flags) == 1
        assert "expected a finite loss of the evaluation, got nan" in capsys.readouterr().err
