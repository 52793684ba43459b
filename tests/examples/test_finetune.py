"""Fine-tuning by each method: stopped and continued, saved and read back, beside transformers; what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import finetune
import generate
import numpy as np
import pytest
import train_lm
from text.models import fingerprint, open_language
from training.checkpoint import open_checkpoint

import minigrad as mg
import nn

pytestmark = pytest.mark.cpu_only("programs that are given --device cpu")

TINY = "--n-layer 2 --n-head 2 --n-embd 16 --d-ff 16 --block-size 8 --n-kv-head 1"
COMMON = "--batch-size 2 --eval-iters 3 --sample-tokens 5 --device cpu --no-progress"
COMMON += " --learning-rate 0.02 --warmup-iters 2"
TEXT = "".join(f"{number} bottles of beer on the wall,\n{number} bottles of beer!\n" for number in range(40))
CODE = "".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(60))
METHODS = {
    "full": "--method full",
    "lora": "--method lora --rank 2 --lora-dropout 0.1 --targets attn.* w2",
    "adapters": "--method adapters --adapter-size 3",
    "prefix": "--method prefix --prefix-text abc",
}

Tune = Callable[..., int]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model in ``run``, the same for transformers in ``hf``, and a text to go on with."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text(TEXT)
    (folder / "code.txt").write_text(CODE)
    pytest.importorskip("tokenizers")
    flags = f"{TINY} {COMMON} --data {folder / 'text.txt'} --max-iters 20 --out-dir {folder / 'run'}"
    assert train_lm.main([*flags.split(), "--export-hf", str(folder / "hf")]) == 0
    return folder


@pytest.fixture
def tune(base: Path, tmp_path: Path) -> Tune:
    """Fine-tune that model: the name of the run's folder, then flags."""

    def run(name: str, flags: str, start: str = "run") -> int:
        given = f"{COMMON} --data {base / 'code.txt'} --init-from {base / start} --out-dir {tmp_path / name}"
        return finetune.main(f"{given} {flags}".split())

    return run


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if line["val_loss"] is not None]


def loss_of(capsys: pytest.CaptureFixture[str], flags: str) -> float:
    """What evaluate.py says on the text that was trained on."""
    capsys.readouterr()
    assert evaluate.main(f"--device cpu {flags}".split()) == 0
    found = re.search(r"loss (\d+\.\d+)", capsys.readouterr().out)
    assert found
    return float(found[1])


@pytest.mark.parametrize("start", ["run", "hf"])
@pytest.mark.parametrize("method", METHODS)
def test_five_and_five_updates_are_ten(tune: Tune, tmp_path: Path, method: str, start: str) -> None:
    flags = f"{METHODS[method]} --eval-interval 3 --lr-decay-iters 10"
    assert tune("whole", f"{flags} --max-iters 10", start) == 0
    assert tune("parts", f"{flags} --max-iters 5", start) == 0
    assert tune("parts", f"{flags} --max-iters 10", start) == 0
    for part in ("model", "optimizer"):
        parts, whole = (tmp_path / name / "step_00000010" / f"{part}.safetensors" for name in ("parts", "whole"))
        assert parts.read_bytes() == whole.read_bytes()
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]


@pytest.mark.parametrize("method", ["lora", "adapters", "prefix"])
def test_what_is_learned_is_saved_alone_and_read_back(
    tune: Tune, base: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fingerprint(open_language(str(base / "run")).model)
    assert tune("out", f"{METHODS[method]} --max-iters 12") == 0
    assert fingerprint(open_language(str(base / "run")).model) == before
    held = mg.load(open_checkpoint(tmp_path / "out").path / "model.safetensors")
    assert held and all(".adapters.default." in name for name in held)
    adapter = tmp_path / "out" / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    expected = {"lora": "LORA", "prefix": "PREFIX_TUNING", "adapters": "adapters"}[method]
    assert settings.get("peft_type", settings.get("method")) == expected
    code = f"--data {base / 'code.txt'}"
    alone = loss_of(capsys, f"--checkpoint {base / 'run'} {code}")
    tuned = loss_of(capsys, f"--checkpoint {tmp_path / 'out'} {code}")
    assert tuned < alone - 0.02
    assert loss_of(capsys, f"--adapter {adapter} {code}") == pytest.approx(tuned, abs=2e-4)
    assert loss_of(capsys, f"--checkpoint {base / 'hf'} --adapter {adapter} {code}") == pytest.approx(tuned, abs=2e-4)
    model = nn.load_adapter(nn.load_pretrained(base / "hf"), adapter).eval()
    prompt = np.frombuffer(b"def f", np.uint8)
    written = bytes(nn.generate(model, prompt, 6, temperature=0).tolist()).decode(errors="replace")
    for flags in (f"--checkpoint {tmp_path / 'out'}", f"--adapter {adapter}"):
        capsys.readouterr()
        given = f"{flags} --device cpu --temperature 0 --max-new-tokens 6".split()
        assert generate.main([*given, "--prompt", "def f"]) == 0
        assert capsys.readouterr().out == mg.errors.printable(written) + "\n"


def test_a_whole_model_needs_no_base_to_be_read(
    tune: Tune, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And can be the base of another run, or be exported, merged where it was a LoRA."""
    assert tune("full", "--method full --max-iters 6", "hf") == 0
    meta = open_checkpoint(tmp_path / "full").path / "meta.json"
    meta.write_text(meta.read_text().replace(str(base), "/nowhere"))
    full = loss_of(capsys, f"--checkpoint {tmp_path / 'full'} --data {base / 'code.txt'}")
    lora = f"{METHODS['lora']} --max-iters 6 --init-from {tmp_path / 'full'} --export-hf {tmp_path / 'merged'}"
    assert tune("lora", lora) == 0
    code = f"--data {base / 'code.txt'}"
    tuned = loss_of(capsys, f"--checkpoint {tmp_path / 'lora'} {code}")
    assert tuned < full
    assert loss_of(capsys, f"--checkpoint {tmp_path / 'merged'} {code}") == pytest.approx(tuned, abs=2e-4)
    assert tune("lora", f"--eval-only --init-from {tmp_path / 'full'}") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_a_signal_saves_the_adapter_and_the_same_command_goes_on(
    base: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    flags = (
        f"{COMMON} {METHODS['lora']} --data {base / 'code.txt'} --init-from {base / 'run'} --out-dir {tmp_path / 'out'}"
    )
    command = [sys.executable, finetune.__file__, *flags.split(), "--log-interval", "1", "--eval-interval", "0"]
    running = [*command, "--max-iters", "1000000"]
    process = subprocess.Popen(running, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout
    for line in process.stdout:
        if line.startswith(b"step 3/"):
            process.send_signal(signal.SIGTERM)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    step = open_checkpoint(tmp_path / "out").step
    assert step >= 3 and (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    again = subprocess.run([*command, f"--max-iters={step + 2}"], capture_output=True, env=environment, timeout=60)
    assert again.returncode == 0, again.stderr
    assert open_checkpoint(tmp_path / "out").step == step + 2


# ---- folders of transformers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of transformers, whose tokenizer lets texts begin with <s>, and has fewer tokens than the model rows."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("llama")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=300, max_position_embeddings=64, initializer_range=0.5, bos_token_id=0, eos_token_id=1, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def their_parts(folder: Path) -> tuple[Any, Any, Any]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return torch, transformers.AutoTokenizer.from_pretrained(folder), model


def test_a_folder_of_transformers_writes_what_transformers_writes(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, tokenizer, model = their_parts(theirs)
    ids = tokenizer("99 bottles", return_tensors="pt").input_ids
    assert ids[0, 0] == 0
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    given = f"--checkpoint {theirs} --device cpu --temperature 0 --max-new-tokens 20".split()
    capsys.readouterr()
    assert generate.main([*given, "--prompt", "99 bottles"]) == 0
    assert capsys.readouterr().out == mg.errors.printable(expected) + "\n"


def test_a_text_ends_with_the_tokens_that_the_folder_says(theirs: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((theirs / name).read_bytes())
    assert open_language(str(tmp_path)).stops == [1]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert open_language(str(tmp_path)).stops == [1, 7]


@pytest.mark.parametrize("block", [8, 64])
def test_a_text_is_scored_as_transformers_scores_it(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], block: int
) -> None:
    torch, tokenizer, model = their_parts(theirs)
    (tmp_path / "other.txt").write_text(TEXT[:100])
    tokens = tokenizer(TEXT[:100]).input_ids
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, block):
            window = torch.tensor([tokens[start : start + block]])
            targets = torch.tensor([tokens[start + 1 : start + block + 1]])
            log_p = torch.log_softmax(model(window).logits.double(), -1)[:, : targets.shape[1]]
            total -= log_p.gather(2, targets[..., None]).sum().item()
    flags = f"--checkpoint {theirs} --data {tmp_path / 'other.txt'} --block-size {block}"
    assert loss_of(capsys, flags) == pytest.approx(total / (len(tokens) - 1), abs=2e-4)
    assert evaluate.main(f"--device cpu {flags}".split()) == 0
    bits = total / math.log(2) / 100
    assert float(re.findall(r"(\S+) bits per byte", capsys.readouterr().out)[0]) == pytest.approx(bits, abs=2e-4)


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def of_another_family(folder: Path) -> None:
    change(folder, model_type="bloom")


def with_longrope(folder: Path) -> None:
    change(folder, rope_parameters=None, rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 4})


def with_a_setting_of_tomorrow(folder: Path) -> None:
    change(folder, attention_sink_of_tomorrow=3)


def with_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_an_odd_end(folder: Path) -> None:
    change(folder, eos_token_id="end")


def with_too_many_tokens(folder: Path) -> None:
    form = json.loads((folder / "tokenizer.json").read_text())
    first = form["added_tokens"][0]
    form["added_tokens"] += [{**first, "id": i, "content": f"<{i}>"} for i in range(280, 301)]
    (folder / "tokenizer.json").write_text(json.dumps(form))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    (folder / "generation_config.json").unlink(missing_ok=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (without_tokenizer, "tokenizer.json"),
        (of_another_family, "bloom"),
        (with_longrope, "longrope"),
        (with_a_setting_of_tomorrow, "attention_sink_of_tomorrow"),
        (with_pickled_weights, "pickled"),
        (with_an_odd_end, "eos_token_id"),
        (with_too_many_tokens, "tokens"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    theirs: Path, tmp_path: Path, spoil: Callable[[Path], None], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in theirs.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    programs = {
        generate.main: "--prompt 99",
        evaluate.main: f"--data {theirs / 'config.json'}",
        finetune.main: f"--data {theirs / 'config.json'} --init-from {tmp_path}",
    }
    for main, flags in programs.items():
        capsys.readouterr()
        where = "" if main is finetune.main else f"--checkpoint {tmp_path}"
        assert main(f"--device cpu {where} {flags}".split()) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and word in errors


@pytest.mark.parametrize(
    ("main", "flags", "named"),
    [
        (generate.main, "--checkpoint {theirs}", "--prompt"),
        (evaluate.main, "--checkpoint {theirs}", "--data"),
        (evaluate.main, "--checkpoint {theirs} --data {data} --block-size 65", "--block-size"),
        (generate.main, "--checkpoint {base}/run --block-size 9", "--block-size"),
        (generate.main, "--checkpoint {base}/run --adapter {theirs}", "adapter_config.json"),
        (generate.main, "--adapter {theirs}", "adapter_config.json"),
        (finetune.main, "", "--init-from"),
        (finetune.main, "--init-from {base}/run", "--data"),
        (finetune.main, "--init-from {base}/nowhere --data {data}", "nowhere"),
        (finetune.main, "--init-from {base} --data {data}", "checkpoint"),
        (finetune.main, "--init-from {base}/run --data {data} --method full --rank 3", "--rank"),
        (finetune.main, "--init-from {base}/run --data {data} --method prefix --adapter-size 3", "--adapter-size"),
        (finetune.main, "--init-from {base}/run --data {data} --method adapters --export-hf x", "--export-hf"),
        (finetune.main, "--init-from {base}/run --data {data} --block-size 9", "--block-size"),
        (finetune.main, "--init-from {base}/run --data {data} --rank 300", "rank"),
        (finetune.main, "--init-from {base}/run --data {data} --targets nowhere", "nowhere"),
        (finetune.main, "--resume {base}/run", "finetune.py"),
    ],
)
def test_a_misuse_is_one_line(
    main: Callable[[list[str]], int],
    flags: str,
    named: str,
    base: Path,
    theirs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    given = flags.format(base=base, theirs=theirs, data=base / "code.txt")
    assert main(f"--device cpu {given}".split()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert any(named in line for line in errors) and len(errors) <= 3


def test_a_base_that_changed_is_refused(
    tune: Tune, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base / "run", tmp_path / "own")
    flags = f"{METHODS['adapters']} --init-from {tmp_path / 'own'}"
    assert tune("out", f"{flags} --max-iters 1") == 0
    assert tune("other", f"--init-from {tmp_path / 'out'}") == 2
    assert "without adapters" in capsys.readouterr().err
    weights = open_checkpoint(tmp_path / "own").path / "model.safetensors"
    mg.save(weights, {name: array + (name == "ln_final.weight") for name, array in mg.load(weights).items()})
    assert generate.main(f"--device cpu --checkpoint {tmp_path / 'out'}".split()) == 2
    assert "its weights have changed" in capsys.readouterr().err
    assert tune("out", f"{flags} --max-iters 2") == 2
    assert "--init-from" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "own")
    assert generate.main(f"--device cpu --checkpoint {tmp_path / 'out'}".split()) == 2
    assert "own" in capsys.readouterr().err


KEPT = {
    "ewc": "--ewc 5 --replay-data {text} --replay-size 4",
    "ewc of what the base writes": "--ewc 5 --fisher-labels data --replay-size 3",
    "l2": "--l2-to-base 0.1",
    "replay": "--replay 0.5 --replay-data {text} --replay-size 6",
    "generated": "--replay 0.5 --replay-size 3",
}


@pytest.mark.parametrize("way", KEPT)
def test_what_is_not_to_be_forgotten_is_part_of_the_checkpoint(
    tune: Tune, base: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle and continued, all files of the run are the same bits; old examples aren't made again."""
    flags = f"--method full {KEPT[way]} --eval-interval 3 --lr-decay-iters 8".format(text=base / "text.txt")
    assert tune("whole", f"{flags} --max-iters 8") == 0
    assert tune("parts", f"{flags} --max-iters 4") == 0
    monkeypatch.setattr(nn, "fisher", None)
    assert tune("parts", f"{flags} --max-iters 8 --sample-tokens 0") == 0
    parts, whole = (tmp_path / name / "step_00000008" for name in ("parts", "whole"))
    names = sorted(file.name for file in whole.glob("*.safetensors"))
    assert names == sorted(file.name for file in parts.glob("*.safetensors"))
    assert ("ewc.safetensors" in names) == ("replay" not in way and way != "generated")
    assert all((parts / name).read_bytes() == (whole / name).read_bytes() for name in names)
    states = [json.loads((folder / "meta.json").read_text()) for folder in (parts, whole)]
    assert states[0]["parts"] == states[1]["parts"]


def test_a_strong_hold_keeps_the_weights_and_old_rows_keep_the_old_loss(tune: Tune, base: Path, tmp_path: Path) -> None:
    start = mg.load(open_checkpoint(base / "run").path / "model.safetensors")

    def distance(name: str, flags: str) -> float:
        assert tune(name, f"--method full --max-iters 12 {flags}") == 0
        end = mg.load(open_checkpoint(tmp_path / name).path / "model.safetensors")
        return math.sqrt(sum(float(((end[key] - start[key]) ** 2).sum()) for key in start))

    plain, held = distance("plain", ""), distance("held", "--l2-to-base 100")
    assert held < plain / 3
    assert distance("ewc", f"--ewc 1e5 --replay-data {base / 'text.txt'} --replay-size 8") < plain / 2
    assert tune("old", f"--method full --max-iters 12 --replay 1 --replay-data {base / 'text.txt'}") == 0
    tokens = np.frombuffer(TEXT.encode(), np.uint8)
    old, forgot = (nn.perplexity(open_language(str(tmp_path / name)).model, tokens, 8, 8) for name in ("old", "plain"))
    assert old < forgot


def test_training_stops_after_so_many_evaluations_without_a_better_loss(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate that only harms, the best loss is the first; patience counts from it, also in a continued run."""
    flags = "--method full --learning-rate 3 --warmup-iters 0 --grad-clip 0 --eval-interval 2"
    assert tune("out", f"{flags} --max-iters 40 --patience 3") == 0
    found = losses(tmp_path / "out")
    assert len(found) == 4 and min(found) == found[0]
    assert "stopped early: 3 evaluations in a row" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").step == 6
    assert tune("out", f"{flags} --patience 5") == 0
    assert open_checkpoint(tmp_path / "out").step == 10
    assert tune("out", f"{flags} --patience 5") == 0
    assert open_checkpoint(tmp_path / "out").step == 10


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--method lora --ewc 1", "--ewc: expected --method full with it, got lora"),
        ("--method full --ewc 1 --l2-to-base 1", "--l2-to-base: expected none beside --ewc"),
        ("--method full --replay-data code.txt", "--replay-data: expected --replay or --ewc with it"),
        ("--method full --replay 1.5", "--replay: expected a share from 0 to 1, got '1.5'"),
        ("--method full --replay 0.5 --replay-data absent.txt", "--replay-data: expected a file to read, got"),
        ("--patience 2 --eval-interval 0", "--patience: expected --eval-interval above 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    tune: Tune, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    assert tune("out", f"{flags} --max-iters 2") == 2
    assert said in capsys.readouterr().err


def test_old_examples_shorter_than_a_block_are_refused(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    assert tune("out", f"--method full --replay 0.5 --replay-data {tmp_path / 'short.txt'} --max-iters 2") == 2
    assert "--replay-data: expected more than 8 tokens" in capsys.readouterr().err
