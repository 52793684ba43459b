"""Files and folders appear whole: with several threads, after errors and kills, through links, or are refused."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import minigrad as mg
from minigrad import serialize
from minigrad.errors import ArgumentError, FileFormatError
from minigrad.files import atomic_write, read_json, write_whole
from minigrad.serialize import load_shapes


def test_threads_that_save_to_one_path_do_not_meet(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for _ in range(30):
                mg.save(tmp_path / "a.safetensors", {"x": np.full(1000, number)})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(mg.load(tmp_path / "a.safetensors")["x"].tolist())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def fill(temporary: Path, folder: bool) -> None:
    if folder:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("new")
    else:
        temporary.write_text("new")


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_written_appears_at_once_and_not_after_an_error(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "made"
    with pytest.raises(ZeroDivisionError), atomic_write(path, folder) as temporary:
        fill(temporary, folder)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_write(path, folder) as temporary:
        fill(temporary, folder)
        assert not path.exists()
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "sub" / "a" if folder else path).read_text() == "new"


@pytest.mark.parametrize("folder", [False, True])
def test_everything_is_on_the_disk_before_it_has_its_name_and_the_name_is_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    flushed: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / "made").exists()))

    if not sys.platform.startswith("linux"):
        pytest.skip("/proc says which file a descriptor is of")
    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(tmp_path / "made", folder) as temporary:
        fill(temporary, folder)
    inside = ["", "/sub", "/sub/a"] if folder else [""]
    assert sorted(flushed[:-1]) == [(f"{temporary}{part}", False) for part in inside]
    assert flushed[-1] == (str(tmp_path), True)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions and links of Unix")
def test_permissions_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "there").chmod(0o640)
    (tmp_path / "link").symlink_to("there")
    mg.save(tmp_path / "link", {"x": np.ones(2)})
    assert (tmp_path / "link").is_symlink()
    np.testing.assert_array_equal(mg.load(tmp_path / "there")["x"], [1, 1])
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(sys.platform == "win32", reason="links of Unix")
@pytest.mark.parametrize("target", ["there", "nowhere", "folder"])
def test_what_programs_write_replaces_a_link_and_never_follows_it(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(target)
    waiting = tmp_path / f".link.{os.getpid()}.{threading.get_ident()}.tmp"  # the very name that it will write to
    waiting.symlink_to("there")
    write_whole(tmp_path / "link", b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"
    assert (tmp_path / "there").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "there"]


def test_only_regular_files_are_read_and_written(tmp_path: Path) -> None:
    paths = [tmp_path, tmp_path / "nul\0", tmp_path / ("n" * 300), tmp_path / "file" / "below"]
    (tmp_path / "file").write_bytes(b"{}")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "loop").symlink_to("loop")
        paths += [tmp_path / "fifo", tmp_path / "loop", Path("/dev/zero")]
        for device in (tmp_path / "fifo", Path("/dev/zero")):
            with pytest.raises(ArgumentError, match="device or FIFO"):
                mg.save(device, {"x": np.ones(1)})
    for path in paths:
        for read in (mg.load, mg.load_metadata, lambda path: read_json(path, "JSON")):
            with pytest.raises(FileFormatError, match=r"^Expected: .*\nGot: no file "):
                read(path)


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**6, b'{"a":' * 65 + b"1" + b"}" * 65, b"[]", b"\xff", b"{", b'{"a": ' + b"9" * 5000 + b"}"],
    ids=lambda content: repr(content[:9]),
)
def test_json_of_a_stranger_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"a\.json"):
        read_json(tmp_path / "a.json", "facts")
    (tmp_path / "a.json").write_bytes(b'{"a":' * 64 + b"1" + b"}" * 64)
    assert list(read_json(tmp_path / "a.json", "facts")) == ["a"]


def test_shapes_are_read_without_the_arrays(tmp_path: Path) -> None:
    mg.save(tmp_path / "a.safetensors", {"x": np.ones((2, 3)), "y": np.ones(())})
    assert load_shapes(tmp_path / "a.safetensors") == {"x": (2, 3), "y": ()}


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    """A map of it would end the process."""
    path, header = tmp_path / "a.safetensors", serialize._header
    mg.save(path, {"x": np.ones(10**5), "y": np.zeros(10**5)})

    def cut_after(file: Any) -> Any:
        found = header(file)
        os.truncate(path, int(left * path.stat().st_size))
        return found

    monkeypatch.setattr(serialize, "_header", cut_after)
    with pytest.raises(FileFormatError, match=r"it ends within '[xy]'"):
        mg.load(path)


def whole(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234567", (10**12).to_bytes(8, "little") + b"{}", whole(b"{"), whole(b"[]"), whole(b"\xff{}"),
        whole(b'{"a":' * 10**5), whole({"a": 1}), whole({"a": {}}), whole({"a": {"dtype": "F32"}}),
        whole({"a": entry()}), whole({"a": entry()}, b"1234567"), whole({"a": entry()}, b"123456789"),
        whole({"a": entry(offsets=(1, 9))}, b"123456789"), whole({"a": entry(offsets=(8, 0))}, b"12345678"),
        whole({"a": entry(offsets=(0, 8, 9))}, b"12345678"), whole({"a": entry(shape=[2.0])}, b"12345678"),
        whole({"a": entry("U8", [True] * 8, (0, 1))}, b"1"), whole({"a": entry(shape=[-1, -2])}, b"12345678"),
        whole({"a": entry(shape=[2**63, 0], offsets=(0, 0))}),
        whole({"a": entry(shape=[1] * 70, offsets=(0, 4))}, b"1234"),
        whole({"a": entry("I3")}, b"12345678"),
        whole({"a": entry(7)}, b"12345678"), whole({"a": entry(shape=3)}, b"12345678"),
        whole({"a": entry("F8_E4M3", [8])}, b"12345678"), whole({"a": entry(), "b": entry()}, b"12345678"),
        whole({"a": entry(), "b": entry(offsets=(9, 17))}, b"1" * 17), whole({"__metadata__": {"a": 1}}),
        whole({"__metadata__": "a"}), whole({"a": entry("F32", [9**99], (0, 4 * 9**99))}, b"12345678"),
        whole(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', b"12345678"),
    ],
)  # fmt: skip
def test_malformed_safetensors_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        mg.load(tmp_path / "a.safetensors")
    assert len(str(caught.value).splitlines()) == 3


def test_files_of_the_library_are_read_as_it_reads_them(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.safetensors", np.random.default_rng(0)
    kinds = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
    arrays = {f"{kind} é": rng.integers(0, 2, (3, 1, 2)).astype(kind) for kind in kinds}
    arrays |= {"nothing": np.ones((0, 3)), "number": np.array(2.5)}
    safetensors.numpy.save_file(arrays, path, {"a": "b"})
    found = mg.load(path)
    assert found.keys() == arrays.keys() and mg.load_metadata(path) == {"a": "b"}
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
        found[name][...] = 1  # it is the caller's


def test_bfloat16_from_torch_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    half, path = torch.tensor([1.0, -2.5, 3e38]).to(torch.bfloat16), tmp_path / "half.safetensors"
    importlib.import_module("safetensors.torch").save_file({"x": half}, path)
    np.testing.assert_array_equal(mg.load(path)["x"].astype(np.float32), half.float().numpy())


def test_what_killed_writers_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.1.2.tmp", ".a.1.3.tmp", ".b.1.2.tmp"))
    for left in (old, new, other):
        left.mkdir()
    for left in (old, other):
        os.utime(left, (time.time() - 3700,) * 2)
    write_whole(tmp_path / "a", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.1.3.tmp", ".b.1.2.tmp", "a"]


@pytest.mark.parametrize(
    ("name", "metadata"),
    [("__metadata__", None), ("\ud800", None), ("x", {"\ud800": "y"}), ("x", {"y": "a\udcff"})],
)
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path, name: str, metadata: dict[str, str] | None) -> None:
    mg.save(tmp_path / "a", {"x": np.ones(2)})
    with pytest.raises(ArgumentError):
        mg.save(tmp_path / "a", {name: np.zeros(2)}, metadata)
    assert mg.load(tmp_path / "a")["x"].tolist() == [1, 1]
    for path in ("a\0", Path("a\0")):
        with pytest.raises(ArgumentError, match="null byte"):
            mg.save(path, {"x": np.ones(2)})


def test_a_missing_file_and_arguments_in_torchs_order_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.safetensors"):
        mg.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(TypeError, match=r"the path comes first: save\(path, arrays\)"):
        mg.save({"x": np.ones(1)}, tmp_path / "a.safetensors")  # type: ignore[arg-type, dict-item]
    mg.save(tmp_path / "a.safetensors", {"x": np.ones(1)}, {"note": "é"})
    assert mg.load_metadata(tmp_path / "a.safetensors") == {"note": "é"}
