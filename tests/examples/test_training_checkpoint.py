"""Checkpoints are whole or absent, whatever happens while they are written."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training import checkpoint as tc

from minigrad.errors import MiniGradError

STATES = {
    "model": {"weight": np.arange(6.0, dtype=np.float32).reshape(2, 3), "scale": np.array(2.5)},
    "optimizer": {"state": {"0.step": np.array(7), "0.m": np.ones(3)}, "param_groups": [{"params": [0], "lr": 0.1}]},
    "batches": {"random": {"position": 2**90, "kind": "PCG64"}},
}


def save(out: Path, step: int, states: dict[str, object] = STATES) -> Path:
    return tc.save_checkpoint(out, step, states, {"note": "é"})


def test_states_come_back_as_they_were(tmp_path: Path) -> None:
    path = save(tmp_path, 250)
    assert sorted(file.name for file in path.iterdir()) == ["meta.json", "model.safetensors", "optimizer.safetensors"]
    assert (tmp_path / "latest").read_text() == "step_00000250\n"
    checkpoint = tc.open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.meta["note"]) == (250, "é")
    for part in STATES:
        np.testing.assert_equal(checkpoint.load(part), STATES[part])
    assert checkpoint.load("model")["scale"].shape == ()


def test_an_optimizer_without_moments_has_its_file_too(tmp_path: Path) -> None:
    path = save(tmp_path, 0, {"optimizer": {"state": {}, "param_groups": []}})
    assert (path / "optimizer.safetensors").is_file()
    assert tc.open_checkpoint(path).load("optimizer") == {"state": {}, "param_groups": []}


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    (tmp_path / "step_00000015").mkdir()  # no meta.json: not one of ours
    (tmp_path / ".step_00000020.77.88.tmp").mkdir()  # killed while it was written
    (tmp_path / ".latest.77.88.tmp").write_text("step_0")
    (tmp_path / ".dropped-step_00000001").mkdir()
    (tmp_path / ".partial-thesis").mkdir()  # not one of ours
    (tmp_path / "latest").write_text("step_00000005\n")  # killed before it was rewritten
    assert tc.steps_in(tmp_path) == [5, 10]
    assert tc.open_checkpoint(tmp_path).step == 10
    assert tc.open_checkpoint(tmp_path / "step_00000005").step == 5
    tc.tidy(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".partial-thesis", "latest", *(f"step_{n:08}" for n in (5, 10, 15))]


def test_a_newer_format_is_refused_and_one_from_before_there_were_numbers_is_read(tmp_path: Path) -> None:
    meta = save(tmp_path, 1) / "meta.json"
    facts = json.loads(meta.read_text())
    assert facts["format"] == 1
    for newer in (2, "1.0"):
        meta.write_text(json.dumps({**facts, "format": newer}))
        with pytest.raises(MiniGradError, match=rf"of a format up to 1\n.*format {newer!r} in .*meta\.json"):
            tc.open_checkpoint(tmp_path)
    del facts["format"]
    meta.write_text(json.dumps(facts))
    np.testing.assert_equal(tc.open_checkpoint(tmp_path).load("model"), STATES["model"])


def test_no_checkpoint_and_a_damaged_one_are_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(MiniGradError, match="none at"):
        tc.open_checkpoint(tmp_path / "nowhere")
    path = save(tmp_path, 1)
    for content in ("{", "[]", '{"step": 1}'):
        (path / "meta.json").write_text(content)
        with pytest.raises(MiniGradError, match=r"meta\.json"):
            tc.open_checkpoint(tmp_path)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_file_that_is_gone_is_said_to_be_gone(tmp_path: Path, part: str) -> None:
    path = save(tmp_path, 1)
    (path / f"{part}.safetensors").unlink()
    with pytest.raises(MiniGradError, match=rf"no file '.*/step_00000001/{part}\.safetensors'"):
        tc.open_checkpoint(path).load(part)


def test_an_error_while_writing_leaves_the_old_ones(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        save(tmp_path, 2, {**STATES, "unfit": {"fact": object()}})  # type: ignore[dict-item]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert tc.open_checkpoint(tmp_path).step == 1


# Saves checkpoints 1 to 3 and keeps the last two, and is killed (SIGKILL) at its n-th access to a file or half-way
# through a write, for n = 1, 2, … until it comes through. After each kill the parent says what was complete before, and
# what can be continued from.
KILLED = """
import json, os, shutil, signal, sys
import numpy as np
from training import checkpoint as tc
from pathlib import Path

def saves(out, last):
    states = {"model": {"w": np.full(1000, 0.0)}}
    for step in range(1, 4):
        states["model"]["w"][:] = step
        tc.save_checkpoint(out, step, states, {})
        os.write(last, bytes([step]))
        tc.drop_checkpoints(out, tc.steps_in(out)[:-2])

root, n, survived = Path(sys.argv[1]), 0, False
while not survived:
    n += 1
    out = root / str(n)
    out.mkdir()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        count = 0
        def moment():
            global count
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
        def write_in_halves(path, content, *encoding):
            content = content.encode() if encoding else content
            with open(path, "wb", buffering=0) as file:
                file.write(content[: len(content) // 2])
                moment()
                file.write(content[len(content) // 2 :])
        Path.write_text = Path.write_bytes = write_in_halves
        events = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}
        sys.addaudithook(lambda event, arguments: event in events and moment())
        saves(out, write)
        os._exit(0)
    os.close(write)
    survived = os.waitpid(child, 0)[1] == 0
    complete = len(os.read(read, 100))
    os.close(read)
    steps = tc.steps_in(out)
    newest = tc.open_checkpoint(out) if steps else None
    whole = [float(tc.open_checkpoint(out / tc.folder_name(s)).load("model")["w"].sum()) == 1000 * s for s in steps]
    tc.tidy(out)
    left = sorted(path.name for path in out.iterdir() if path.name.startswith("."))
    print(json.dumps([n, complete, steps, newest and newest.step, all(whole), left]))
    shutil.rmtree(out)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork and no SIGKILL on Windows")
def test_a_kill_at_any_file_access_loses_nothing_that_was_complete(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stderr
    assert len(lines) > 40  # kills
    for _, complete, steps, newest, whole, left in lines:
        assert whole
        assert left == []
        assert (newest or 0) >= complete
        if complete:
            assert set(range(max(1, complete - 1), complete + 1)) & set(steps)
