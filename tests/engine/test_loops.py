"""Compiled loops: when they run and when NumPy does, what is kept on the disk, and their exponential."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import ArgumentError, MissingPackageError
from minigrad.machine import loops
from minigrad.machine.loops import dot, exp, helper, loop, prefetch

pytestmark = pytest.mark.cpu_only("loops of the CPU")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiled():
    pytest.importorskip("numba", reason="numba is not installed")
    mg.set_compiled(True)
    yield
    mg.set_compiled(loops._wish())


def by_numpy(x, out):
    out[...] = 2


@loop(by_numpy)
def which(x, out):
    """1 if the loop runs, 2 if NumPy does."""
    for i in range(out.size):
        out[i] = 1.0


@loop(lambda x, out: np.exp(x, out=out))
def exponentials(x, out):
    for i in range(out.size):
        out[i] = exp(x[i])


# ---- the choice -----------------------------------------------------------------------------------------------------


def ran(x, size=3):
    out = np.zeros(size, np.float32)
    which(x, out)
    return {1: "loop", 2: "NumPy"}[out[0]]


def test_contiguous_float32_takes_the_loop_and_all_else_numpy(compiled):
    x = np.ones((4, 4), np.float32)
    assert [ran(x), ran(x[1:]), ran(x[1]), ran(np.arange(3)), ran(None), ran(2.5)] == ["loop"] * 6
    others = [x.T[:2], x[:, 1:], x[::2], x[::-1], x.astype(np.float64), x.astype(np.float16), np.asfortranarray(x)]
    others += [x.astype(">f4"), x.astype(np.longdouble), [1.0], np.float64(1), 1e39, np.inf]
    assert [ran(other) for other in others] == ["NumPy"] * len(others)


def test_it_can_be_switched_off_and_on(compiled):
    assert mg.is_compiled()
    mg.set_compiled(False)
    assert (mg.is_compiled(), ran(None)) == (False, "NumPy")
    mg.set_compiled(True)
    assert (mg.is_compiled(), ran(None)) == (True, "loop")
    with pytest.raises(ArgumentError, match="Expected: True or False"):
        mg.set_compiled("no")


def test_a_loop_that_returns_false_hands_over(compiled):
    @loop(by_numpy)
    def only_small(x, out):
        for i in range(out.size):
            if x[i] > 1.0:
                return False
            out[i] = 1.0
        return True

    out = np.zeros(3, np.float32)
    only_small(np.ones(3, np.float32), out)
    assert out.tolist() == [1, 1, 1]
    only_small(np.array([0, 0, 2], np.float32), out)
    assert out.tolist() == [2, 2, 2]


def test_literals_numbers_of_the_module_and_arguments_are_float32(compiled):
    """With a third as a float64 the product would be rounded once, from a double."""

    @loop(lambda x, factor, out: None)
    def scaled(x, factor, out):
        for i in range(out.size):
            out[i] = x[i] * 0.1 * factor * loops_third

    x, out, f = np.linspace(1, 2, 1000, dtype=np.float32), np.empty(1000, np.float32), np.float32
    scaled(x, 0.7, out)
    np.testing.assert_array_equal(out, x * f(0.1) * f(0.7) * f(loops_third))


loops_third = 1 / 3


def test_the_lock_of_the_interpreter_is_free_meanwhile(compiled):
    @loop(lambda turns, out: None)
    def long(turns, out):
        for _ in range(turns):
            out[0] = out[0] * 0.5 + 1.0

    started, out = threading.Event(), np.zeros(1, np.float32)
    long(1, out)  # compiles
    thread = threading.Thread(target=lambda: (started.set(), long(200_000_000, out)))
    thread.start()
    started.wait()
    time.sleep(0.01)
    assert thread.is_alive()  # we could not look before its end if it held the lock
    thread.join()


# ---- without a numba that works -------------------------------------------------------------------------------------

USE = """
import warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    import sys, numpy as np, minigrad as mg
    from minigrad.machine.loops import loop
    early = "numba" in sys.modules
    @loop(lambda x, out: np.multiply(x, 2, out=out))
    def double(x, out):
        for i in range(out.size):
            out[i] = 2.0 * x[i]
    x, out = np.arange(3, dtype=np.float32), np.empty(3, np.float32)
    for _ in range(2):
        double(x, out)
print(early, "numba" in sys.modules, mg.is_compiled(), out.tolist(), len(caught))
for warning in caught:
    print(warning.message)
"""


def run(tmp_path, code=USE, **environment):
    """What a fresh interpreter prints, where modules in ``tmp_path`` hide others."""
    (tmp_path / "program.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {"MINIGRAD_CACHE_DIR": str(tmp_path / "cache"), "MINIGRAD_COMPILED": "1"}
    env = {**os.environ, **env, "PYTHONPATH": paths, **environment}
    out = subprocess.run([sys.executable, tmp_path / "program.py"], env=env, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    return out.stdout.splitlines()


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')", None),
        ("raise ImportError('Numba needs NumPy 1.26 or less. Got NumPy 2.4.')", "Numba needs NumPy 1.26 or less"),
        ("raise AttributeError('no such symbol')", "AttributeError: no such symbol"),
        ("raise ModuleNotFoundError(\"No module named 'llvmlite'\", name='llvmlite')", "No module named 'llvmlite'"),
        ("class config: CACHE_DIR = ''\ndef njit(**k): raise RuntimeError('no LLVM')", "RuntimeError: no LLVM"),
    ],
    ids=["absent", "too old", "broken", "half installed", "fails to compile"],
)
def test_numpy_does_all_where_numba_is_absent_or_broken_and_one_warning_tells(tmp_path, module, told):
    (tmp_path / "numba.py").write_text(module)
    first, *warnings = run(tmp_path)
    early, _, *rest = first.split(" ", 2)
    assert (early, *rest) == ("False", f"False [0.0, 2.0, 4.0] {int(told is not None)}")
    assert len(warnings) == (told is not None)
    assert told is None or (told in warnings[0] and "MINIGRAD_COMPILED=0" in warnings[0])


def test_asked_for_by_name_its_absence_is_an_error(monkeypatch):
    monkeypatch.setattr(loops._state, "numba", False)
    assert not mg.is_compiled()
    with pytest.raises(MissingPackageError, match="pip install"):
        mg.set_compiled(True)


def test_the_environment_switches_it_off(tmp_path):
    pytest.importorskip("numba", reason="numba is not installed")
    assert run(tmp_path, MINIGRAD_COMPILED="0") == ["False False False [0.0, 2.0, 4.0] 0"]
    assert not (tmp_path / "cache").exists()
    assert run(tmp_path) == ["False True True [0.0, 2.0, 4.0] 0"]
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 1
    with pytest.raises(AssertionError, match="MINIGRAD_COMPILED to be 0 or 1"):
        run(tmp_path, MINIGRAD_COMPILED="no")


def test_where_the_cache_cannot_be_written_loops_are_compiled_for_the_process(tmp_path):
    pytest.importorskip("numba", reason="numba is not installed")
    (tmp_path / "file").write_text("")
    first, warning = run(tmp_path, MINIGRAD_CACHE_DIR=str(tmp_path / "file"))
    assert first == "False True True [0.0, 2.0, 4.0] 1"
    assert "can't be kept" in warning and "MINIGRAD_CACHE_DIR" in warning


# ---- the cache ------------------------------------------------------------------------------------------------------

CALLER = """
import numpy as np
from minigrad.machine.loops import loop, _made
from helpers import changed, FACTOR
@loop(lambda x, out: None)
def caller(x, out):
    for i in range(out.size):
        out[i] = changed(x[i]) * FACTOR
out = np.empty(1, np.float32)
caller(np.ones(1, np.float32), out)
print(out[0], sum(_made[caller.loop].stats.cache_hits.values()))
"""
HELPERS = """
from minigrad.machine.loops import helper
FACTOR = {factor}
@helper()
def inner(x):
    return x + {term}
@helper()
def changed(x):
    return inner(x)
"""


def test_code_on_the_disk_is_used_again_but_not_after_a_change_in_another_file(tmp_path):
    """numba itself would take no notice: it looks at the file of the loop alone."""
    pytest.importorskip("numba", reason="numba is not installed")
    found = []
    for factor, term in ((1.0, 2.0), (1.0, 2.0), (1.0, 4.0), (3.0, 4.0), (1.0, 2.0)):
        (tmp_path / "helpers.py").write_text(HELPERS.format(factor=factor, term=term))
        found += run(tmp_path, CALLER, PYTHONDONTWRITEBYTECODE="1")
    assert found == ["3.0 0", "3.0 1", "5.0 0", "15.0 0", "3.0 1"]


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[: len(whole) // 2]], ids=["empty", "half"])
def test_a_broken_file_is_compiled_anew(tmp_path, kind, damage):
    pytest.importorskip("numba", reason="numba is not installed")
    run(tmp_path)
    (file,) = (tmp_path / "cache").rglob(kind)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert run(tmp_path) == ["False True True [0.0, 2.0, 4.0] 0"]
    (file,) = (tmp_path / "cache").rglob(kind)
    assert len(file.read_bytes()) == len(whole)


@loop(lambda x, out: np.sqrt(x, out=out))
def inner_loop(x, out):
    for i in range(out.size):
        if x[i] < 0:
            return False
        out[i] = np.sqrt(x[i])
    return True


def outer_tile(x, out):
    out[:] = -1


@loop(outer_tile)
def outer_loop(x, out):
    if not inner_loop(x, out):
        return False
    for i in range(out.size):
        prefetch(x, i + 1000)  # what lies beyond is fetched, not read
        out[i] += 1.0
    return True


def test_a_loop_calls_another_and_learns_whether_it_was_done():
    pytest.importorskip("numba", reason="numba is not installed")
    mg.set_compiled(True)
    x, out = np.array([4, 9], np.float32), np.empty(2, np.float32)
    outer_loop(x, out)
    assert out.tolist() == [3.0, 4.0]
    outer_loop(-x, out)
    assert out.tolist() == [-1.0, -1.0]
    assert loops._globals_of(outer_loop.loop)["inner_loop"] is inner_loop.loop  # so its code is in the hash


def test_the_folder_is_named_by_all_that_a_loop_reads():
    def made(term, options=()):
        @helper(*options)
        def inner(x):
            return x

        inner.__code__ = inner.__code__.replace(co_consts=(None, term))
        space = {"inner": inner}
        exec("def outer(x): return inner(x)", space)
        return loops.digest(space["outer"])

    assert made(1.0) == made(1.0)
    assert len({made(1.0), made(2.0), made(1.0, ["reassoc"])}) == 3


# ---- what loops call ------------------------------------------------------------------------------------------------


def exp_of(x):
    out = np.empty_like(x)
    exponentials(x, out)
    return out


def test_exp_is_off_by_less_than_one_unit_in_the_last_place(compiled):
    bits = np.arange(0, 1 << 32, 1021, dtype=np.uint32)  # every exponent and sign
    x = np.concatenate([bits.view(np.float32), np.linspace(-104, 89, 1_000_003, dtype=np.float32)])
    x = x[np.abs(x) < 110]
    exact = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore", under="ignore"):
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    units = np.abs(exp_of(x)[finite] - exact[finite]) / np.spacing(rounded[finite]).astype(np.float64)
    assert units.max() < 1
    np.testing.assert_array_equal(exp_of(x)[~finite], np.inf)


@pytest.mark.parametrize("size", [1, 3, 7, 15, 17, 33, 1000])
def test_exp_at_the_edges_is_that_of_numpy(compiled, size):
    """NaN, infinities, overflow, numbers below the normal ones; in vectors and in what is left over at their end."""
    x = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 88.72283, 88.72284, 1e30, -87.4, -103.9, -104.0, -1e30, 3e-39])
    x = np.resize(x, size)
    with np.errstate(all="ignore"):
        np.testing.assert_array_max_ulp(exp_of(x), np.exp(x), maxulp=1)


@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17, 63, 100, 4099])
def test_dot_adds_all(compiled, size):
    @loop(lambda a, b, out: None)
    def product(a, b, out):
        out[0] = dot(a, b)

    a, b = np.random.default_rng(size).integers(-9, 9, (2, size)).astype(np.float32)
    out = np.empty(1, np.float32)
    product(a, b, out)
    assert out[0] == np.vdot(a, b)  # whole numbers: any order gives the same
