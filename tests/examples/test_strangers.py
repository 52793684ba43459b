"""A folder from a stranger, and a folder that isn't ours: one clear line, and nothing of anybody's is lost."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import generate
import numpy as np
import pytest
import train_lm
from support.walk import Trainer, metrics
from text.corpus import RandomBlocks, read_corpus
from text.tokenizers import BpeTokenizer
from training.checkpoint import averaged, open_checkpoint, steps_in
from training.console import StopSignals, run_program

import minigrad as mg
from minigrad.errors import FileFormatError, OutOfMemoryError

pytestmark = [
    pytest.mark.cpu_only("programs that are given --device cpu"),
    pytest.mark.skipif(sys.platform == "win32", reason="links, FIFOs and signals of Unix"),
]

TINY = "--n-layer 1 --n-head 2 --n-embd 16 --d-ff 16 --block-size 8 --batch-size 2 --eval-iters 3 --sample-tokens 5"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes | str]:
    """All that is in a folder, links as links."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


# ---- where a run writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "latest", "best", "loss.png"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "folder"])
def test_a_file_of_a_run_that_is_none_is_refused_at_the_start(
    out: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=1") == 0
    mine = out.with_name("mine")
    if kind == "link":
        mine.write_text("mine")
    (out / name).unlink(missing_ok=True)
    if "link" in kind:
        (out / name).symlink_to(mine)
    elif kind == "FIFO":
        os.mkfifo(out / name)
    else:
        (out / name).mkdir()
    trainer = Trainer()
    assert trainer(f"--out-dir={out}", "--max-iters=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{out / name}, which is no regular file; take another folder")
    assert trainer.updated == []
    assert mine.exists() == (kind == "link") and (kind != "link" or mine.read_text() == "mine")


def test_a_lock_that_becomes_a_link_meanwhile_is_not_followed(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = out.with_name("mine")
    mine.write_text("mine")
    out.mkdir()
    (out / ".lock").symlink_to(mine)
    monkeypatch.setattr("training.run.foreign", lambda folder: "")
    assert Trainer()(f"--out-dir={out}") == 2
    assert "a lock file that can be written" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("flags", [(), ("--overwrite",), ("--resume=never",)])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n'),
        ("metrics.jsonl", "my notes"),
        ("best", "friend"),
        ("loss.png", "x"),
    ],
)
def test_a_foreign_folder_is_left_as_it_is(
    out: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, flags: tuple[str, ...]
) -> None:
    out.mkdir()
    for folder in (".partial-thesis", ".dropped-notes", "step_one"):
        (out / folder).mkdir()
        (out / folder / "text").write_text("mine")
    (out / name).write_text(content)
    before = contents(out)
    assert Trainer()(f"--out-dir={out}", *flags) == 2
    assert f"{out / name}, which no run here has written" in capsys.readouterr().err
    assert contents(out) == before
    (out / name).unlink()  # beside what doesn't have a name of ours there is room for a run
    assert Trainer()(f"--out-dir={out}", *flags, "--max-iters=1") == 0
    del before[name]
    assert before.items() <= contents(out).items()


def test_no_run_is_written_into_a_checkpoint(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=1") == 0
    before = contents(out)
    for flags in ((), ("--overwrite",), ("--resume=never",), (f"--resume={out}",)):
        assert Trainer()(f"--out-dir={out / 'step_00000001'}", "--max-iters=3", *flags) == 2
        assert "meta.json, which is a checkpoint's; take another folder" in capsys.readouterr().err
    assert contents(out) == before


def test_a_run_that_ended_before_its_first_checkpoint_is_ours(out: Path) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=1") == 0
    for step in steps_in(out):
        shutil.rmtree(out / f"step_{step:08}")
    assert Trainer()(f"--out-dir={out}", "--max-iters=1") == 0


@pytest.mark.parametrize(
    "name", ["step_00000003", ".partial-step_00000003", ".step_00000003.1.2.tmp", ".latest.1.2.tmp"]
)
def test_a_link_in_the_place_of_a_step_is_removed_and_what_it_points_to_is_kept(
    out: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flags = (f"--out-dir={out}", "--eval-interval=0", "--checkpoint-interval=1", "--keep-checkpoints=1")
    assert Trainer()(*flags, "--max-iters=2") == 0
    mine = out.with_name("mine")
    shutil.copytree(out / "step_00000002", mine)
    (out / name).symlink_to(mine)
    before = contents(mine)
    if not name.startswith("."):
        assert Trainer()(*flags, "--max-iters=5") in (0, 2)
    assert Trainer()(f"--resume={out / 'step_00000002'}", "--overwrite", *flags[1:], "--max-iters=5") == 0
    assert contents(mine) == before
    assert steps_in(out) == [0, 5] or steps_in(out)[-1] == 5
    assert not any(path.is_symlink() for path in out.iterdir())
    assert "w: None" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "device", "more"])
def test_only_listed_regular_files_of_the_best_checkpoint_come_along(
    out: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    private = out.with_name("private")
    private.write_text("private")
    rising = Trainer(losses=lambda step: 1.0 + step)
    common = ("--eval-interval=1", "--checkpoint-interval=1", "--keep-checkpoints=9", "--log-interval=1")
    assert rising(f"--out-dir={out}", "--max-iters=2", *common) == 0
    best = out / (out / "best").read_text().strip()
    if kind == "more":
        (best / "extra").symlink_to(private)
        (best / "notes.txt").write_text("notes")
    else:
        (best / "walk.safetensors").unlink()
        (best / "walk.safetensors").symlink_to(private if kind == "link" else "/dev/zero")
    branch = out.with_name("branch")
    assert rising(f"--out-dir={branch}", "--max-iters=1", *common) == 0
    before = contents(branch)
    status = rising(f"--resume={out}", f"--out-dir={branch}", "--overwrite", "--max-iters=3", *common)
    assert status == (0 if kind == "more" else 2)
    if kind == "more":
        assert sorted(path.name for path in (branch / best.name).iterdir()) == ["meta.json", "walk.safetensors"]
    else:
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert f"{best / 'walk.safetensors'}, which is none" in line
        assert contents(branch) == before


def test_a_bad_line_of_the_log_is_dropped_and_no_other(out: Path) -> None:
    assert Trainer()(f"--out-dir={out}", "--max-iters=4", "--log-interval=1", "--checkpoint-interval=4") == 0
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
    bad = [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"step": "x"}',
        b'{"step": 1e999}',
        b'{"step": 2, "lr": [1]}',
        b"9" * 5000,
    ]
    for place, line in enumerate(bad):
        lines.insert(2 * place % len(lines), line)
    (out / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert Trainer()(f"--out-dir={out}", "--max-iters=6", "--log-interval=1") == 0
    assert [line["step"] for line in metrics(out)] == list(range(7))


# ---- what a run says of itself ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run, to be copied and made wrong."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(60)))
    flags = f"{TINY} --data {folder / 'text.txt'} --out-dir {folder / 'run'} --device cpu --no-progress --max-iters 2"
    assert train_lm.main(flags.split()) == 0
    return folder / "run"


@pytest.fixture
def handed(trained: Path, tmp_path: Path) -> Path:
    """What a stranger hands over."""
    return Path(shutil.copytree(trained, tmp_path / "handed"))


def change(run: Path, path: str, value: Any) -> None:
    """Set the entry at the dotted path in the newest meta.json; ``...`` removes it."""
    file = run / "step_00000002" / "meta.json"
    meta = json.loads(file.read_text())
    *above, name = path.split(".")
    place = meta
    for part in above:
        place = place[part]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    file.write_text(json.dumps(meta))


SIZES = ("vocab_size", "d_model", "num_layers", "d_ff", "num_heads")
NO_SIZES = ("8", 0, -1, 1.5, True, [8], {}, 10**30)
WRONG: list[tuple[str, Any]] = [
    *(("model", value) for value in (..., None, [], "x", {}, {"vocab_size": 1})),
    *((f"model.{name}", value) for name in SIZES for value in NO_SIZES),
    *(("model.context_length", value) for value in NO_SIZES[:-1]),
    ("model.d_model", 2 * 10**7), ("model.num_layers", 4000), ("model.num_layers", 10**9), ("model.norm_eps", "x"),
    ("model.rope_theta", "x"), ("model.rope_layout", 3), ("model.dtype", "x"), ("model.dtype", 3), ("model.other", 1),
    ("model.device", "cpu"),
    *(("corpus", value) for value in (..., None, [], {}, {"tokenizer": 3}, {"tokenizer": {"kind": []}})),
    *(("corpus.tokenizer", {"kind": "char", **more}) for more in ({}, {"characters": [1]}, {"characters": "\ud800"})),
    *(("corpus.tokenizer", {"kind": "ids", **more}) for more in ({}, {"vocab_size": 10**30}, {"vocab_size": 7})),
    ("corpus.tokenizer", {}), ("corpus.tokenizer", {"kind": "bpe", "tokenizer": "["}),
    *(("prompt", value) for value in (..., None, "x", [], ["x"], [1.5], [-1], [256], [10**30], [[1]])),
    *(("parts", value) for value in (None, [], {}, {"model": 3}, {"model": []})),
    *(("step", value) for value in (..., None, "2", -1, 1.5, [2], 10**30)),
    *(("files", value) for value in (None, "x", ["../x"], [3])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_facts_of_a_wrong_kind_are_one_line(
    handed: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any
) -> None:
    change(handed, path, value)
    command = ["--checkpoint", str(handed / "step_00000002"), "--max-new-tokens", "2", "--device", "cpu"]
    assert generate.main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("generate.py: expected ") and len(line) < 1500


WHOLE = ("n_embd", "batch_size", "block_size", "max_iters", "keep_checkpoints", "seed")
NUMBERS = ("learning_rate", "dropout", "beta1", "weight_decay")
CONFIG_WRONG: list[tuple[str, Any]] = [
    *((f"config.{name}", value) for name in WHOLE for value in ("8", -1, 1.5, True, [8], {}, None)),
    *((f"config.{name}", value) for name in NUMBERS for value in ("x", -1, True, [1], None, 10**400)),
    ("config.data", "x"), ("config.data", [3]), ("config.data", []), ("config.dtype", "int8"), ("config.device", 3),
    ("config.tokenizer", 3), ("config.tie_embeddings", 1), ("config.prompt", 3), ("config.n_embd", 10**30),
    ("config", ...), ("config", None), ("config", []), ("random", ...), ("random", 3), ("random", {}),
    ("parts.batches", {}), ("parts.batches", {"random": {"bit_generator": "MT19937"}}), ("parts.optimizer", {}),
    ("parts.optimizer.param_groups", 3), ("last", []), ("last.lr", "x"), ("last.grad_norm", [1]),
    ("best_step", "x"), ("best_loss", []), ("seconds", "x"),
    ("seconds", None),
    ("seconds", 10**400), ("best_loss", 10**400),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), CONFIG_WRONG, ids=lambda value: repr(value)[:30])
def test_a_run_that_is_continued_checks_what_its_flags_would_check(
    handed: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any
) -> None:
    change(handed, path, value)
    assert train_lm.main(["--resume", str(handed), "--max-iters", "3", "--no-progress"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("train_lm.py: ") and len(line) < 1500 for line in lines)


@pytest.mark.parametrize("kind", ["FIFO", "device", "deep"])
def test_facts_that_never_end_are_not_read(handed: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    meta = handed / "step_00000002" / "meta.json"
    meta.unlink()
    if kind == "deep":
        meta.write_text('{"step": 2, "parts": ' + "[" * 10**6)
    elif kind == "device":
        meta.symlink_to("/dev/zero")
    else:
        os.mkfifo(meta)
    assert generate.main(["--checkpoint", str(handed / "step_00000002"), "--device", "cpu"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["token_embeddings.weight", "other"])
def test_an_array_larger_than_memory_is_never_made(handed: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """The file is sparse: it says that it holds a terabyte, and takes no room."""
    file = handed / "step_00000002" / "model.safetensors"
    header = json.dumps({name: {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + 2**40)
    assert generate.main(["--checkpoint", str(handed), "--device", "cpu"]) == 2
    assert name in capsys.readouterr().err
    with pytest.raises(OutOfMemoryError, match=name):
        mg.load(file)


@pytest.mark.parametrize(("part", "of"), [("optimizer", "model"), ("model", "optimizer")])
def test_arrays_in_the_place_of_others_are_refused(
    handed: Path, capsys: pytest.CaptureFixture[str], part: str, of: str
) -> None:
    """The moments of an optimizer would be lost in silence, where what a file holds beside them were passed over."""
    step = handed / "step_00000002"
    shutil.copyfile(step / f"{of}.safetensors", step / f"{part}.safetensors")
    assert train_lm.main(["--resume", str(handed), "--max-iters", "3", "--no-progress"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_lm.py: expected ") and str(step) in line


def test_a_copy_of_a_step_folder_is_averaged_with_itself(handed: Path) -> None:
    copy = handed / "copy"
    shutil.copytree(handed / "step_00000002", copy)
    state, steps = averaged(open_checkpoint(copy))
    assert steps == [2]
    for name, array in open_checkpoint(copy).load("model").items():
        np.testing.assert_array_equal(state[name], array)


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_no_mean_of_checkpoints_with_other_arrays(
    handed: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """A weight that one of two checkpoints lacks would be half as large; a shape that broadcasts would be spread."""
    earlier = handed / "step_00000000"
    earlier.rename(handed / "step_00000001")
    file = handed / "step_00000001" / "model.safetensors"
    arrays = mg.load(file)
    name = "layers.0.attn.q_proj.weight"
    array = arrays.pop(name)
    arrays |= {"more": {name: array, "other": array}, "shape": {name: array[:1]}}.get(change, {})
    mg.save(file, arrays)
    with pytest.raises(FileFormatError, match=r"others in .*step_00000001"):
        averaged(open_checkpoint(handed), share=0.5)


# ---- token files and tokenizers --------------------------------------------------------------------------------------


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775808,), }"),
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (True,), }"),
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }"),
        npy("{'descr': '<u2', 'fortran_order': False, 'sha"),
        npy("(" * 2000),
        npy("{'descr': 'O', 'fortran_order': False, 'shape': (3,), }"),
        npy("{'descr': '<u2'}"),
        b"\x93NUMPY\x01\x00\x40",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff",
        b"PK\x03\x04",
    ],
    ids=lambda content: repr(content[-70:-64]),
)
def test_a_token_file_that_is_none_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ids.npy").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"ids\.npy"):
        read_corpus([tmp_path / "ids.npy"], "byte")


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_a_token_file_that_becomes_shorter_is_an_error_and_no_signal(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ids.{suffix}"
    ids = np.arange(100000).astype("<u2") % 256
    np.save(path, ids) if suffix == "npy" else path.write_bytes(ids.tobytes())
    corpus = read_corpus([path], "byte")
    blocks = RandomBlocks(corpus.training, 4, 8, 1)
    blocks.draw()
    os.truncate(path, 1000)
    for read in (blocks.draw, lambda: corpus.validation[0], lambda: corpus.training[5:9]):
        with pytest.raises(FileFormatError, match="became shorter"):
            read()


BPE: dict[str, Any] = {
    "version": "1.0", "added_tokens": [], "truncation": None, "padding": None, "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Removed", "invert": False}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"model": {"type": "BPE", "vocab": {"a": 2**32}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": []},
    ],
)
def test_a_tokenizer_json_that_is_none_is_one_error(wrong: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(FileFormatError, match=r"a tokenizer\.json"):
        BpeTokenizer(json.dumps({**BPE, **wrong}))
    assert capfd.readouterr().err == ""


def test_a_stride_above_the_length_is_left_out_with_the_truncation() -> None:
    pytest.importorskip("tokenizers")
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9}
    assert BpeTokenizer(json.dumps({**BPE, "truncation": truncation})).encode("abab").tolist() == [0, 1, 0, 1]


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_control_characters_are_shown_escaped(handed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(handed, "prompt", list(b"\x1b[2J\x07\x7fok\r\n\ta\rb"))
    assert generate.main(["--checkpoint", str(handed), "--max-new-tokens", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "\\x1b[2J\\x07\\x7fok\r\n\ta\\rb\n"
    change(handed, "program", "\x1b[31mevil\u202e")
    assert generate.main(["--checkpoint", str(handed), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("of \\x1b[31mevil\\u202e\n")

    def fail() -> int:
        raise FileFormatError("a file", "\x9b2J\x1b]0;title\x07")

    assert run_program("p", fail) == 2
    assert capsys.readouterr().err == "p: expected a file, got \\x9b2J\\x1b]0;title\\x07\n"
    assert str(FileFormatError("a", "\x1b[2J")) == "Expected: a\nGot: \\x1b[2J"


def test_a_terminal_that_goes_saves(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer()
    trainer.during = lambda run: os.kill(os.getpid(), signal.SIGHUP) if run.step == 2 else None
    assert trainer(f"--out-dir={out}", "--max-iters=9") == 129
    assert open_checkpoint(out).step == 2
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_printed_after_the_terminal_has_gone_stops_nothing(
    trained: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    import pty  # of Unix

    out, ours = tmp_path / "run", Path(train_lm.__file__)
    flags = f"{TINY} --data {trained.parent / 'text.txt'} --out-dir {out} --device cpu --max-iters 100000"
    process, terminal = pty.fork()
    if not process:
        os.execve(sys.executable, [sys.executable, str(ours), *flags.split()], environment)
    seen = b""
    while b"step 50/" not in seen:
        seen += os.read(terminal, 10000)
    os.close(terminal)
    status = os.waitpid(process, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 129
    assert open_checkpoint(out).step >= 50
