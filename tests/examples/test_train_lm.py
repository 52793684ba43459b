"""The language model trainer and its companion, on a tiny model."""

import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import generate
import numpy as np
import pytest
import train_lm
from text.corpus import RandomBlocks, read_corpus
from text.models import load_model
from text.tokenizers import BpeTokenizer
from training import loop as training_loop
from training import memory as training_memory
from training.checkpoint import open_checkpoint, open_newest, steps_in
from training.flags import FlagErrors, parse

import minigrad as mg
import nn
import optim
from minigrad.errors import printable

pytestmark = pytest.mark.cpu_only("programs that are given --device cpu")

TINY = "--n-layer 1 --n-head 2 --n-embd 16 --d-ff 16 --block-size 8 --batch-size 2 --eval-iters 3 --sample-tokens 5"
TEXT = "".join(f"{number} bottles of beer on the wall,\n{number} bottles of beer!\n" for number in range(40))

Train = Callable[..., int]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def train(text: Path) -> Train:
    """Train a tiny model: the name of the run's folder, then flags."""

    def run(name: str, flags: str = "") -> int:
        given = f"{TINY} --data {text} --out-dir {text.parent / name} --device cpu --no-progress {flags}"
        return train_lm.main(given.split())

    return run


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path, step: int) -> list[bytes]:
    return [(out / f"step_{step:08}" / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")]


# ---- the whole program -----------------------------------------------------------------------------------------------


def test_a_run_from_end_to_end(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        train("run", "--max-iters 40 --eval-interval 20 --log-interval 10 --learning-rate 1e-2 --warmup-iters 5") == 0
    )
    shown = capsys.readouterr().out
    assert re.search(r"layers\.\*\.attn\.q_proj\.weight +\(16, 16\) +256 +1\.02 kB", shown)
    assert "16 tokens an iteration" in shown
    assert re.search(r"step 40/40 \| loss \d\.\d+ \| val \d\.\d+ \| lr \S+ \| norm \S+ \| ms \S+ \| tok/s \S+\n", shown)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 10, 20, 30, 40]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] - 0.5
    assert {path.name for path in (tmp_path / "run" / "step_00000040").iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "meta.json",
    }


@pytest.mark.parametrize(
    "flags",
    [
        "--dropout 0.1",
        "--tie-embeddings --n-kv-head 1 --gradient-accumulation-steps 2",
        "--dropout 0.1 --dtype float16",
    ],
)
def test_five_and_five_updates_are_ten(
    train: Train, tmp_path: Path, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 with a first loss scale so high that updates before and after the interruption are left out."""
    monkeypatch.setattr(optim, "GradScaler", functools.partial(optim.GradScaler, init_scale=2.0**32))
    assert train("whole", f"--max-iters 10 --eval-interval 3 {flags}") == 0
    assert train("parts", f"--max-iters 5 --lr-decay-iters 10 --eval-interval 3 {flags}") == 0
    assert train("parts", "--max-iters 10") == 0
    assert weights(tmp_path / "parts", 10) == weights(tmp_path / "whole", 10)
    keys = ("step", "val_loss", "train_loss", "lr", "grad_norm", "skipped", "loss_scale")
    parts = {tuple(line.get(key) for key in keys) for line in metrics(tmp_path / "parts")}
    assert {tuple(line.get(key) for key in keys) for line in metrics(tmp_path / "whole")} <= parts
    if "float16" in flags:
        states = [open_checkpoint(tmp_path / name / f"step_{n:08}").load("scaler") for name, n in SAVED]
        assert 0 < states[0]["skipped"] < states[1]["skipped"]
        assert states[1] == states[2]


def test_smoothing_scaling_and_noam_do_what_they_say(train: Train, text: Path, tmp_path: Path) -> None:
    flags = "--scale-embeddings --label-smoothing 0.5 --schedule noam --warmup-iters 4 --learning-rate 0.01"
    assert train("run", f"{flags} --max-iters 9 --log-interval 1 --checkpoint-interval 1 --keep-checkpoints 20") == 0
    assert train("run", "--max-iters 16") == 0  # goes on as it was
    lines = metrics(tmp_path / "run")
    assert [line["lr"] for line in lines[1:]] == pytest.approx([0.01 * min(n / 4, 2 * n**-0.5) for n in range(1, 17)])
    saved = open_checkpoint(tmp_path / "run" / "step_00000015")
    model = saved.empty_model(nn.TransformerLM, "cpu")
    model.load_state_dict(saved.load("model"))
    assert model.embedding_scale == 4.0
    batches = RandomBlocks(read_corpus([text], None, None).training, 2, 8, 0)
    batches.load_state_dict(saved.load("batches"))
    inputs, targets = batches.draw()
    log_p = mg.log_softmax(model(inputs)).numpy()
    own = np.take_along_axis(log_p, np.asarray(targets)[..., None], -1).mean()
    assert lines[16]["train_loss"] == pytest.approx(-0.5 * own - 0.5 * log_p.mean(), rel=1e-5)


@pytest.mark.parametrize("flags", ["--dropout 0.1", "--dtype float16"])
def test_what_is_computed_again_may_change_in_a_run(train: Train, tmp_path: Path, flags: str) -> None:
    """Also in one that an older version began, which had no such flag."""
    assert train("whole", f"--max-iters 6 {flags}") == 0
    assert train("parts", f"--max-iters 2 --lr-decay-iters 6 --recompute block {flags}") == 0
    facts = open_checkpoint(tmp_path / "parts").path / "meta.json"
    meta = json.loads(facts.read_text())
    assert meta["config"].pop("recompute") == "block"
    assert "recompute" not in meta["model"]
    facts.write_text(json.dumps(meta))
    for iterations, word in ((3, "none"), (4, "ffn"), (6, "half")):
        assert train("parts", f"--max-iters {iterations}" + f" --recompute {word}" * (word != "none")) == 0
        assert open_checkpoint(tmp_path / "parts").meta["config"]["recompute"] == word
    assert weights(tmp_path / "parts", 6) == weights(tmp_path / "whole", 6)


SAVED = [("parts", 5), ("parts", 10), ("whole", 10)]


@pytest.mark.parametrize(("dtype", "eps"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_half_precision_products_leave_the_losses_where_they_are(
    train: Train, tmp_path: Path, dtype: str, eps: float
) -> None:
    """Losses differ from float32's, by roundings of the products alone; the weights are float32."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    flags = "--max-iters 30 --log-interval 1 --learning-rate 1e-2 --warmup-iters 5 --eval-interval 0"
    for name in ("float32", dtype):
        assert train(name, f"{flags} --dtype {name}") == 0
    losses, exact = (
        np.array([line[key] for line in metrics(tmp_path / name) for key in ("train_loss", "val_loss") if line[key]])
        for name in (dtype, "float32")
    )
    assert exact[-1] < exact[0] - 0.5
    assert 0 < np.abs(losses - exact).max() < 2 * eps * exact.max()
    saved = open_checkpoint(tmp_path / dtype)
    assert {array.dtype.name for array in saved.load("model").values()} == {"float32"}
    assert saved.meta["model"]["dtype"] == "float32"


def test_updates_that_overflow_are_left_out_and_reported(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale of 2^60 is halved until a gradient fits into float16; from there the weights move. No anomaly, that."""
    monkeypatch.setattr(optim, "GradScaler", functools.partial(optim.GradScaler, init_scale=2.0**60))
    assert train("run", "--max-iters 60 --log-interval 1 --eval-interval 0 --dtype float16 --detect-anomaly") == 0
    shown, lines = capsys.readouterr().out, metrics(tmp_path / "run")
    skipped = [line["skipped"] for line in lines]
    assert skipped[:11] == list(range(11)) and 30 < skipped[-1] < 59
    assert [line["loss_scale"] for line in lines] == [2 ** (60 - n) for n in skipped]
    assert [line["grad_norm"] is None for line in lines[1:]] == [b > a for a, b in itertools.pairwise(skipped)]
    assert re.search(
        r"step 10/60 \| loss \d.* \| norm - \| .* \| skipped 10 \| loss scale 1,125,899,906,842,624\n", shown
    )
    assert optim_steps(tmp_path / "run", 60) == {60 - skipped[-1]}


def optim_steps(out: Path, step: int) -> set[int]:
    state = open_checkpoint(out / f"step_{step:08}").load("optimizer")["state"]
    return {int(value) for name, value in state.items() if name.endswith(".step")}


def test_overflow_whatever_the_loss_scale_is_an_error(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One update of 1e30 is more than float16 can hold: after 2^16 has been halved 17 times there is no use."""
    flags = "--max-iters 50 --learning-rate 1e30 --warmup-iters 0 --eval-interval 0 --log-interval 2 --dtype float16"
    assert train("run", flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"gradients that float16 can hold at step 18, got overflow, .* in 17 updates", line)
    assert "--dtype bfloat16" in line
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


def test_what_only_looks_changes_nothing(train: Train, tmp_path: Path) -> None:
    """Samples, evaluations, the log and the search for anomalies leave the training as it is, bit for bit."""
    assert train("plain", "--max-iters 4 --dropout 0.1 --eval-interval 0") == 0
    assert train("busy", "--max-iters 4 --dropout 0.1 --eval-interval 1 --log-interval 1 --sample-every 1") == 0
    assert train("checked", "--max-iters 4 --dropout 0.1 --eval-interval 0 --detect-anomaly") == 0
    assert weights(tmp_path / "plain", 4) == weights(tmp_path / "busy", 4) == weights(tmp_path / "checked", 4)


def test_the_seed_is_the_run(train: Train, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(name, f"--max-iters 2 --seed {seed}") == 0
    same, again, other = (weights(tmp_path / name, 2)[0] for name in "abc")
    assert same == again != other


def test_no_updates_and_evaluation_only(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--max-iters 0") == 0
    (line,) = metrics(tmp_path / "run")
    assert line["step"] == 0
    assert line["perplexity"] == pytest.approx(math.exp(line["val_loss"]))
    assert steps_in(tmp_path / "run") == [0]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    assert train("run", "--eval-only") == 0
    assert f"validation loss {line['val_loss']:.4f}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_a_signal_from_outside_saves_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    program = Path(train_lm.__file__)
    command = [sys.executable, str(program), *TINY.split(), "--data", str(text), "--out-dir", str(tmp_path / "run")]
    flags = ["--max-iters", "1000000", "--log-interval", "1", "--eval-interval", "0"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout
    for line in process.stdout:
        if line.startswith(b"step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert rest.splitlines()[-1].startswith(b"stopped by SIGTERM")
    assert errors.count(b"\n") == 2  # an empty line and the answer to the signal
    assert b"SIGTERM: this update is finished and saved first" in errors
    step = open_checkpoint(tmp_path / "run").step
    assert step >= 3
    again = subprocess.run([*command, f"--max-iters={step + 2}"], capture_output=True, env=environment, timeout=60)
    assert again.returncode == 0, again.stderr
    assert open_checkpoint(tmp_path / "run").step == step + 2


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--max-iters=-1 --beta1=1 --nonsense=3 --dtype=float8", ["--max-iters", "--beta1", "--dtype", "--nonsense"]),
        ("--n-head 3 --seed x --resume nowhere", ["--seed", "--resume", "--n-embd, --n-head"]),
        ("--tokenizer foo --data nowhere.txt --n-kv-head 3", ["--tokenizer", "--data", "--n-kv-head"]),
        ("--vocab-size 300 --tokenizer char", ["--vocab-size"]),
        ("--n-head 4 --n-kv-head 3", ["--n-kv-head"]),
        ("--learning-rate 1e-5 --min-lr 1e-4", ["--min-lr"]),
    ],
)
def test_bad_flags(flags: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lm.main(flags.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == named
    assert "float8" not in flags or any("float16 or bfloat16, the types it trains in" in line for line in lines)


def test_other_data_and_an_unknown_prompt_are_refused(
    train: Train, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--max-iters 1") == 0
    text.write_text(TEXT + "!")
    assert train("run", "--max-iters 2") == 2
    assert "--data:" in capsys.readouterr().err
    text.write_text(TEXT)
    assert train("char", "--tokenizer char --prompt Z") == 2
    assert "'Z' at character 0" in capsys.readouterr().err
    text.write_text("too short")
    assert train("short") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--block-size" in line


@pytest.mark.parametrize(
    ("tokens", "prompt", "words"),
    [
        ("--tokenizer byte", "\udcff", "--prompt: expected text in the encoding of the terminal"),
        ("--vocab-size 256", " ", "--prompt: expected a text of at least one token, got ' '"),
        ("--vocab-size 256", "²", "got '²' as number 1"),
    ],
)
def test_unfit_prompts_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: str, prompt: str, words: str
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(700) % 7 + 1)
    flags = f"{TINY} {tokens} --data {tmp_path / 'ids.npy'} --out-dir {tmp_path / 'run'} --max-iters 0 --no-progress"
    assert train_lm.main(flags.split()) == 0
    capsys.readouterr()
    for program, given in (
        (train_lm, [*flags.split(), "--overwrite"]),
        (generate, [f"--checkpoint={tmp_path / 'run'}"]),
    ):
        assert program.main([*given, "--prompt", prompt]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_a_tokenizer_json_is_the_same_however_it_is_written_and_needed_once(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    for name in ("tok.json", "other.json"):
        Path(name).write_text(BpeTokenizer.trained(TEXT, 300).as_json()["tokenizer"])
    assert train("run", "--max-iters 1 --tokenizer tok.json") == 0
    assert train("run", "--max-iters 2 --tokenizer ./tok.json") == 0
    assert train("run", "--max-iters 3 --tokenizer other.json") == 2
    assert "--tokenizer: the run that is continued has" in capsys.readouterr().err
    Path("tok.json").unlink()
    assert train("run", "--max-iters 3 --tokenizer tok.json") == 0
    assert steps_in(tmp_path / "run")[-1] == 3
    assert train("new", "--tokenizer tok.json --n-kv-head 3") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["--n-kv-head", "--tokenizer"]


def test_a_checkpoint_of_another_model_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the layout of RoPE, which no flag says, had been another when the run began; nothing said, as of old."""
    assert train("run", "--max-iters 1") == 0
    meta = tmp_path / "run" / "step_00000001" / "meta.json"
    facts = json.loads(meta.read_text())
    assert facts["model"]["rope_layout"] == "interleaved"
    facts["model"]["rope_layout"] = "half"
    meta.write_text(json.dumps(facts))
    assert train("run", "--max-iters 2") == 2
    assert "another in rope_layout: ['half']" in capsys.readouterr().err
    del facts["model"]["rope_layout"]
    meta.write_text(json.dumps(facts))
    assert train("run", "--max-iters 2") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_a_signal_ends_a_long_sample(text: Path) -> None:
    config = train_lm.Config(block_size=8, sample_tokens=100_000, device="cpu")
    corpus, run = read_corpus([text]), train_lm.Run(config, None)
    model, asked = nn.TransformerLM(256, 8, 16, 1, 2), 0

    class Signalled(nn.TransformerLM):
        def next_logits(self, tokens: Any, cache: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().next_logits(tokens, cache)

    model.__class__ = Signalled
    with run.stop:
        train_lm.sample(config, model, corpus, corpus.training[:1], run)
    assert asked == 5


@pytest.mark.parametrize("program", ["train_lm.py", "finetune.py", "generate.py", "evaluate.py", "g2p.py"])
def test_help_without_docstrings(program: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-OO", str(Path(train_lm.__file__).with_name(program)), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: {program} [FLAG [VALUE]] ...")
    assert "--device" in shown.stdout


def test_a_loss_that_is_not_finite_names_step_and_tensor(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--max-iters 50 --learning-rate 1e30 --warmup-iters 0 --grad-clip 0 --eval-interval 0"
    with np.errstate(all="ignore"):
        assert train("run", flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"at step \d+, got NaN or infinity, first in (weight|output of|gradient of) \w+", line)
    assert "--detect-anomaly" in line
    assert steps_in(tmp_path / "run") == [0]
    assert train("run", f"{flags} --detect-anomaly --overwrite") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"(from|of) '\w+', into which (in)?finite numbers went at step \d+", line)


@pytest.mark.parametrize("name", ["layers.0.ffn.w1.weight", "ln_final.weight"])
def test_the_first_tensor_that_is_not_finite(name: str) -> None:
    model = nn.TransformerLM(10, 4, 8, 2, 2)
    parameter = dict(model.named_parameters())[name]
    tokens = np.zeros((1, 4), int)
    assert "first in no output" in str(training_loop.non_finite("loss", model, lambda: model(tokens)))
    original = parameter.data.copy()
    parameter.data = np.full_like(original, np.inf)
    assert f"first in weight {name}" in str(training_loop.non_finite("loss", model, lambda: model(tokens)))
    parameter.data = np.full_like(original, 3e38)
    error = str(training_loop.non_finite("loss", model, lambda: model(tokens)))
    assert f"first in output of {name.rpartition('.')[0]}" in error


@pytest.mark.parametrize("flags", ["--block-size 1000000", "--batch-size 10000000", "--n-embd 1000000"])
def test_a_step_that_no_machine_can_hold_is_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lm.main(["--device=cpu", "--n-layer=100", *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"--block-size.*expected a training step that fits into \d+\.\d GiB .* needs about \d+\.\d GiB", line
    )


@pytest.mark.parametrize("vocab_size", [50, 3000])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--n-kv-head 1 --tie-embeddings --d-ff 200",
        "--n-layer 3 --n-head 2 --n-embd 96 --dtype float16",
        "--n-embd 32 --n-head 8 --block-size 300 --batch-size 1",
        "--n-embd 32 --n-head 8 --dtype float16",
        "--n-embd 256 --n-head 4 --n-kv-head 2 --block-size 16 --batch-size 1 --dtype float16",
        "--d-ff 1000 --n-embd 64 --n-head 1 --dtype float64",
        "--d-ff 64 --n-layer 7 --block-size 33 --batch-size 5",
        "--recompute half",
        "--recompute ffn --d-ff 500",
    ],
)
def test_the_memory_of_a_step_is_known_before_it(flags: str, vocab_size: int) -> None:
    """The estimate against what the engine's own instrument counts in the graph of a real step.

    The loss holds the gradient of the head already; the estimate counts that with the weights.
    """
    given, _ = parse(train_lm.Config, flags.split(), "", "")
    config = train_lm.Config(**{"n_layer": 2, "block_size": 128, "batch_size": 4, "dropout": 0.0, **given})
    model = train_lm.build_model(config, vocab_size, train_lm.Run(config, None))
    weights, activations = train_lm.numbers_in_a_step(config, vocab_size)
    assert weights == pytest.approx(sum(parameter.size for parameter in model.parameters()), rel=0.01)
    with mg.autocast(config.dtype):
        graph = mg.memory_summary(model.loss(*np.zeros((2, config.batch_size, config.block_size), int)))
    held = graph.bytes / np.dtype(config.weights_dtype).itemsize - vocab_size * config.n_embd
    assert activations == pytest.approx(held, rel=0.02)


def test_the_memory_that_may_be_used_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    machine = training_memory.memory_of("cpu")
    (tmp_path / "memory.max").write_text("max\n")
    assert training_memory.memory_of("cpu") == machine
    (tmp_path / "memory.max").write_text("1000\n")
    assert training_memory.memory_of("cpu") == 1000
    training_memory.check_memory("cpu", weights=50, activations=50, itemsize=4, flags="--x")
    with pytest.raises(FlagErrors, match=r"--x: .* fits into 1000 B of memory, got one that needs about 1004 B"):
        training_memory.check_memory("cpu", weights=50, activations=51, itemsize=4, flags="--x")


@pytest.mark.parametrize("program", ["train_lm.py", "finetune.py", "generate.py", "evaluate.py", "g2p.py"])
def test_ctrl_c_during_the_imports_is_silent(program: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "numpy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = Path(train_lm.__file__).with_name(program)
    listening = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # even where this run ignores Ctrl-C
    run = f"sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(path)!r}, run_name='__main__')"
    command = [sys.executable, "-c", f"import runpy, signal, sys; {listening}; {run}"]
    ended = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert ended.stderr == b""
    assert ended.returncode == -signal.SIGINT


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_micro_batches_weigh_by_their_tokens() -> None:
    """Token losses 1, 1, 1, 1, 1 and 7 in two micro-batches: 12 / 6, and the gradient of one batch of six."""
    w = mg.Tensor(np.ones(1), requires_grad=True)
    losses = [np.ones(5), np.array([7.0])]
    batches, scaler = [(x,) for x in losses], optim.GradScaler(enabled=False)
    loss = training_loop.backward(lambda x: (w * x).mean(), batches, [5 / 6, 1 / 6], "float64", scaler)
    assert loss == pytest.approx(2.0)
    np.testing.assert_allclose(w.grad, [np.concatenate(losses).mean()])


def test_accumulation_keeps_the_schedule(train: Train, tmp_path: Path) -> None:
    flags = "--max-iters 12 --warmup-iters 4 --log-interval 1 --learning-rate 1e-2 --min-lr 1e-3"
    assert train("one", flags) == 0
    assert train("eight", f"{flags} --gradient-accumulation-steps 8") == 0
    rates, others = ([line["lr"] for line in metrics(tmp_path / name)[1:]] for name in ("one", "eight"))
    assert rates == others
    cosine = [1e-3 + 0.5 * (1 + math.cos(math.pi * (n - 4) / 8)) * 9e-3 for n in range(4, 13)]
    np.testing.assert_allclose(rates, [0.0025, 0.005, 0.0075, *cosine], rtol=1e-12)


def test_the_validation_loss_is_the_mean_over_its_tokens(text: Path) -> None:
    config = train_lm.Config(block_size=8, batch_size=3, eval_iters=0)
    corpus = read_corpus([text], "byte", None)
    run = train_lm.Run(config, None)
    model = nn.TransformerLM(256, 8, 16, 1, 2, dropout=0.5)
    loss, _ = train_lm.evaluate(config, model, corpus, run) or (math.nan, {})
    model.eval()
    tokens, total = corpus.validation.astype(int), 0.0
    for start in range(0, len(tokens) - 1, 8):
        window = tokens[start : start + 9]
        logits = model(window[None, :-1]).numpy()[0].astype(np.float64)
        log_sum = np.log(np.exp(logits).sum(-1))
        total += (log_sum - logits[np.arange(len(window) - 1), window[1:]]).sum()
    assert loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)


def test_one_batch_can_be_learned_by_heart(train: Train, tmp_path: Path) -> None:
    flags = "--overfit-single-batch --max-iters 150 --learning-rate 3e-2 --warmup-iters 10 --weight-decay 0"
    assert train("run", f"{flags} --batch-size 1 --eval-interval 0") == 0
    assert metrics(tmp_path / "run")[-1]["train_loss"] < 0.05


# ---- tokenizers, and sampling from a checkpoint ----------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_a_checkpoint_is_all_that_sampling_needs(
    train: Train, text: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    out = text.parent / "run"
    size = "--vocab-size 300" if tokenizer == "bpe" else ""
    assert train("run", f"--max-iters 2 --tokenizer {tokenizer} {size}") == 0
    text.unlink()
    samples = []
    for flags in ("--seed 1", "--seed 1", "--seed 2", "--temperature 0 --top-k 3", "--top-k 1 --top-p 0.5"):
        capsys.readouterr()
        command = ["--checkpoint", str(out), "--prompt", "7 bottles", "--max-new-tokens", "20", *flags.split()]
        assert generate.main(command) == 0
        samples.append(capsys.readouterr().out)
    assert all(sample.startswith("7 bottles") for sample in samples)
    assert samples[0] == samples[1] != samples[2]
    assert samples[3] == samples[4]


def test_a_window_is_that_of_the_checkpoint_and_of_all_that_read_it(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--max-iters 2 --window 3") == 0
    (meta,) = (json.loads(file.read_text()) for file in (tmp_path / "run").glob("step_00000002/meta.json"))
    assert meta["model"]["window"] == meta["config"]["window"] == 3
    checkpoint = ["--checkpoint", str(tmp_path / "run")]
    model, tokenizer = load_model(open_newest(checkpoint[1], "train_lm.py"), "cpu")
    assert set(model.windows) == {3}
    capsys.readouterr()
    assert generate.main([*checkpoint, "--prompt", "7", "--max-new-tokens", "40", "--temperature", "0"]) == 0
    text = tokenizer.decode(nn.generate(model, tokenizer.encode("7"), 40, temperature=0))
    assert capsys.readouterr().out == printable(text) + "\n"
    assert evaluate.main(checkpoint) == 0


def test_kinds_of_attention_take_turns_and_are_those_of_the_checkpoint(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--n-layer 3 --attention linear full --feature-map taylor --feature-dim 2"
    assert train("run", f"--max-iters 2 {flags}") == 0
    (meta,) = (json.loads(file.read_text()) for file in (tmp_path / "run").glob("step_00000002/meta.json"))
    assert meta["model"]["attention"] == ["linear", "full", "linear"]
    assert meta["model"]["linear"] == {"feature_map": "taylor", "feature_dim": 2}
    checkpoint = ["--checkpoint", str(tmp_path / "run")]
    model, tokenizer = load_model(open_newest(checkpoint[1], "train_lm.py"), "cpu")
    assert model.windows == [0, None, 0]
    capsys.readouterr()
    assert generate.main([*checkpoint, "--prompt", "7", "--max-new-tokens", "40", "--temperature", "0"]) == 0
    text = tokenizer.decode(nn.generate(model, tokenizer.encode("7"), 40, temperature=0))
    assert capsys.readouterr().out == printable(text) + "\n"
    assert train("other", "--attention linear full window --decay 0.5 --n-layer 2") == 2
    assert "--window" in (shown := capsys.readouterr().err) and "no more kinds" in shown
    assert train("other", "--feature-dim 2") == 2
    assert "--feature-dim: expected --attention linear" in capsys.readouterr().err


def test_a_window_is_exported(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "hf"
    assert train("run", f"--max-iters 1 --window 3 --export-hf {folder}") == 0
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 3
    assert set(nn.load_pretrained(folder).windows) == {3}


def test_several_samples_and_no_checkpoint(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert generate.main([]) == 2
    assert "no run of it in runs/" in capsys.readouterr().err
    assert train("runs/one", "--max-iters 1") == 0
    capsys.readouterr()
    assert generate.main(["--num-samples", "3", "--max-new-tokens", "4", "--prompt", "on"]) == 0
    assert capsys.readouterr().out.count("on") >= 3
    assert generate.main(["--top-p", "0", "--temperature=-1"]) == 2
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [" --top-p", " --temperature"]


def test_token_files_train_too(train: Train, text: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16))
    assert train("text", "--max-iters 2") == 0
    flags = f"{TINY} --device cpu --no-progress --max-iters 2 --data {tmp_path / 'ids.npy'} --out-dir {tmp_path}"
    assert train_lm.main(f"{flags}/bytes --tokenizer byte".split()) == 0
    assert weights(tmp_path / "bytes", 2) == weights(tmp_path / "text", 2)
    assert train_lm.main(f"{flags}/ids --vocab-size 256".split()) == 0
    assert weights(tmp_path / "ids", 2) == weights(tmp_path / "text", 2)


@pytest.mark.parametrize("flags", ["", "--prompt="])
@pytest.mark.parametrize(
    ("tokens", "start"), [("", "\n"), ("--tokenizer char", "a"), ("--vocab-size 10", "1 ")], ids=["byte", "char", "ids"]
)
def test_without_a_prompt_samples_begin_with_a_new_line_or_else_as_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, tokens: str, start: str
) -> None:
    data = tmp_path / ("ids.npy" if "size" in tokens else "letters.txt")
    np.save(tmp_path / "ids.npy", np.arange(700) % 7 + 1)
    (tmp_path / "letters.txt").write_text("abc" * 99)
    given = f"{TINY} --max-iters 0 --data {data} --out-dir {tmp_path / 'run'} --no-progress {tokens} {flags}"
    assert train_lm.main(given.split()) == 0
    assert capsys.readouterr().out.partition("sample at step 0\n")[2].startswith(start)
    assert generate.main(["--checkpoint", str(tmp_path / "run"), *flags.split()]) == 0
    assert capsys.readouterr().out.startswith(start)
