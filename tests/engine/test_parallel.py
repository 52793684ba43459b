"""The thread pool: the same results, whatever runs where, and peace with the threads of BLAS."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg
from minigrad.errors import ArgumentError, CallError
from minigrad.machine import parallel

pytestmark = pytest.mark.cpu_only("threads of the CPU")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def two_threads():
    mg.set_num_threads(2)
    yield
    mg.set_num_threads(parallel._default_threads())


def blas_sizes():
    return [library.get_num_threads() for library in parallel._blas.libraries]


# ---- tiles and tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_ns", [1e-3, 1e9])
@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 8), (1, 8), (1000, 1000), (7, 10**9), (10**6, 1), (1025, 512)])
def test_tiles_cover_the_rows_once_whatever_the_threads(rows, row_bytes, row_ns):
    cuts = []
    for threads in (1, 2, 3):
        mg.set_num_threads(threads)
        tiles = []
        parallel.for_rows(lambda start, stop, tiles=tiles: tiles.append((start, stop)), rows, row_bytes, row_ns)
        tiles.sort()
        assert [i for start, stop in tiles for i in (start, stop)][1:-1:2] == [start for start, _ in tiles][1:]
        assert (tiles[0][0], tiles[-1][1]) == (0, rows) if rows else not tiles
        assert all(stop - start == 1 or (stop - start) * row_bytes <= parallel.TILE_BYTES for start, stop in tiles)
        cuts.append(tiles)
    assert cuts[0] == cuts[1] == cuts[2]


def test_tasks_run_side_by_side():
    """Two tasks that wait for each other end only if each has a thread."""
    barrier = threading.Barrier(2, timeout=60)
    names = []

    def task():
        barrier.wait()
        names.append(threading.current_thread().name)

    parallel.run([task, task])
    assert len(set(names)) == 2
    assert threading.current_thread().name in names


def test_short_work_stays_in_the_calling_thread():
    names = set()
    parallel.run([lambda: names.add(threading.current_thread().name)] * 50, work_ns=1000)
    assert names == {threading.current_thread().name}


def test_one_thread_makes_no_other():
    mg.set_num_threads(1)
    names = set()
    parallel.run([lambda: names.add(threading.current_thread().name)] * 50)
    assert names == {threading.current_thread().name}


def test_a_call_inside_a_task_runs_there(monkeypatch):
    """Nothing is handed to the pool by a task, which would have to wait for threads that wait for it."""
    given = []
    submit = parallel._pool.submit
    monkeypatch.setattr(parallel._pool, "submit", lambda job: (given.append(threading.current_thread()), submit(job)))
    seen = []

    def outer():
        inner = set()
        parallel.run([lambda: inner.add(threading.current_thread().name)] * 8)
        seen.append(inner == {threading.current_thread().name})

    parallel.run([outer] * 8)
    assert seen == [True] * 8
    assert given == [threading.current_thread()]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_the_first_exception_is_raised_and_the_pool_goes_on(kind, threads):
    mg.set_num_threads(threads)
    barrier = threading.Barrier(threads, timeout=60)

    def fail(number):
        barrier.wait()
        raise kind(number)

    with pytest.raises(kind, match="0"):
        parallel.run([lambda: fail(0), lambda: fail(1)])
    assert blas_sizes() == [threads] * len(blas_sizes())
    done = []
    parallel.run([lambda: done.append(1)] * 20)
    assert len(done) == 20


def test_threads_of_the_user():
    """Regions of several threads at once: each gets its own result, and BLAS its threads back at the end."""
    x = np.random.default_rng(0).standard_normal((600, 64))
    results = {}

    def work(number):
        for _ in range(20):
            out = np.empty_like(x)
            parallel.for_rows(lambda a, b, out=out: np.multiply(x[a:b], number, out=out[a:b]), 600, 10**5, 10**4)
            results[number] = out

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        np.testing.assert_array_equal(results[number], x * number)
    assert blas_sizes() == [2] * len(blas_sizes())


def test_scratch_belongs_to_a_thread_and_a_key():
    a = parallel.scratch((4, 5), np.float32, "test a")
    assert parallel.scratch((20,), np.dtype(np.float64), "test b").dtype == np.float64
    assert np.shares_memory(a, parallel.scratch((2, 3), np.float64, "test a"))
    assert not np.shares_memory(a, parallel.scratch((4, 5), np.float32, "test b"))
    assert not np.shares_memory(a, parallel.scratch((400, 5), np.float32, "test a"))  # grown, the old one left alone
    other = []
    thread = threading.Thread(target=lambda: other.append(parallel.scratch((4, 5), np.float32, "test a")))
    thread.start()
    thread.join()
    assert not np.shares_memory(other[0], parallel.scratch((4, 5), np.float32, "test a"))


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", None, True])
def test_a_number_of_threads_is_checked(n):
    with pytest.raises((ArgumentError, CallError)):
        mg.set_num_threads(n)


# ---- BLAS -----------------------------------------------------------------------------------------------------------


def test_blas_has_one_thread_inside_and_its_own_outside():
    inside = []
    parallel.run([lambda: inside.append(blas_sizes())] * 4)
    assert inside == [[1] * len(blas_sizes())] * 4
    assert blas_sizes() == [2] * len(blas_sizes())


def test_regions_of_blas_threads_overlap():
    """The first region's number stays until the last has left, in whatever order they leave."""
    first, second = parallel.blas_threads(1), parallel.blas_threads(2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas_sizes() == [1] * len(blas_sizes())
    second.__exit__(None, None, None)
    assert blas_sizes() == [2] * len(blas_sizes())
    with pytest.raises(ZeroDivisionError), parallel.blas_threads(1):
        raise ZeroDivisionError
    assert blas_sizes() == [2] * len(blas_sizes())


# ---- processes ------------------------------------------------------------------------------------------------------


def python(code, **environment):
    """What a fresh interpreter prints; a variable given as None is taken out of its environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env = {key: value for key, value in env.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ASK = """
import sys
import numpy as np
a = np.ones((300, 300), np.float32)
assert (a @ a == 300).all()
import minigrad as mg
from minigrad.machine import parallel
assert (a @ a == 300).all()
libraries = [library.dynlib for library in parallel._blas.libraries]
print(*[lib.openblas_thread_timeout() for lib in libraries if hasattr(lib, "openblas_thread_timeout")])
"""


@pytest.mark.parametrize("first", ["numpy", "minigrad"])
@pytest.mark.parametrize("user", [None, "20"])
def test_openblas_is_calmed_in_either_import_order_unless_the_user_spoke(first, user):
    code = ASK if first == "numpy" else "import minigrad\n" + ASK
    found = python(code, OPENBLAS_THREAD_TIMEOUT=user)
    assert set(found) <= {user or parallel.SPIN}
    assert python(
        "import minigrad, os; print(os.environ.get('OPENBLAS_THREAD_TIMEOUT'))", OPENBLAS_THREAD_TIMEOUT=user
    ) == [str(user)]  # the environment of child processes is as the user left it


def test_the_environment_names_the_threads():
    code = "import minigrad as mg; from minigrad import parallel; print(mg.get_num_threads())"
    assert python(code, MINIGRAD_NUM_THREADS="3") == ["3"]
    assert python(code, MINIGRAD_NUM_THREADS=None) == [str(len(os.sched_getaffinity(0)))]
    with pytest.raises(AssertionError, match="ArgumentError"):
        python(code, MINIGRAD_NUM_THREADS="two")


FORK = """
import os, threading, warnings
import numpy as np
import minigrad as mg
from minigrad.machine import parallel
warnings.simplefilter("ignore")  # that forking beside threads is delicate is the point
mg.set_num_threads(2)

def work():
    barrier = threading.Barrier(2, timeout=60)
    parallel.run([barrier.wait, barrier.wait])

def fork_in_task():
    child = os.fork()
    if not child:
        work_alone = []
        parallel.run([lambda: work_alone.append(1)] * 3)
        os._exit(0 if len(work_alone) == 3 and np.ones((300, 300)) @ np.ones(300) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0

work()
child = os.fork()
if not child:
    work()
    os._exit(0 if [b.get_num_threads() for b in parallel._blas.libraries] == [2] * len(parallel._blas.libraries) else 1)
assert os.waitpid(child, 0)[1] == 0
work()
parallel.run([fork_in_task])
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_pool_of_its_own():
    assert python(FORK) == ["done"]
