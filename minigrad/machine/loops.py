"""Loops that numba compiles, where it is installed: each stands beside the NumPy tile that it replaces.

A tile of a NumPy kernel makes a pass over the cache for every operation; a loop makes one for all. ::

    @loop(numpy_tile)
    def units(gate, up, out):
        for i in range(out.size):
            out[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i]

Where all arrays are contiguous, and float32 if they hold fractions, the loop runs; else the NumPy tile, with the same
arguments. A loop is plain Python in numba's subset. Its literals and its arguments of type float are float32; whole
numbers only index. It releases the interpreter's lock, and the pool of ``parallel`` shares out the tiles. ``contract``
lets a product and a sum be rounded once; nothing else of the mathematics may change, but for the order of sums in
helpers that allow it, such as ``dot``.

What was compiled is kept on the disk. numba looks only at the file of a function to see whether it has changed, so
each loop has a folder named by a hash of its code and of all that it calls.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from minigrad.errors import ArgumentError, MissingPackageError

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# ---- whether loops are compiled -------------------------------------------------------------------------------------


class _State:
    """What this process has found out about numba."""

    def __init__(self) -> None:
        self.wanted = _wish()
        self.numba: Any = None  # the module; False where there is none that works
        self.lock = threading.RLock()


def _wish() -> bool:
    wish = os.environ.get("MINIGRAD_COMPILED", "1")
    if wish not in ("0", "1"):
        raise ArgumentError("MINIGRAD_COMPILED to be 0 or 1", repr(wish), "unset it to compile where numba is there")
    return wish == "1"


def is_compiled() -> bool:
    """Whether kernels run as loops that numba compiled: it is installed, works, and :func:`set_compiled` allows it.

    >>> is_compiled() in (True, False)
    True
    """
    return _state.wanted and bool(_numba())


def set_compiled(flag: bool) -> None:
    """Let kernels run as compiled loops, or as NumPy alone; results differ in their last bits.

    At import it is True, unless the environment says ``MINIGRAD_COMPILED=0``, and nothing is compiled where numba isn't
    installed. Asked for by name, numba's absence is a MissingPackageError.

    >>> before = is_compiled()
    >>> set_compiled(False)
    >>> is_compiled()
    False
    >>> if before: set_compiled(True)
    """
    if not isinstance(flag, bool | np.bool_):
        raise ArgumentError("True or False", repr(flag), "mg.set_compiled(False) lets NumPy do all")
    if flag and not _numba():
        raise MissingPackageError(
            "numba, which compiles loops", "none that works", "pip install -e '.[fast]', of minigrad"
        )
    _state.wanted = bool(flag)


def _numba() -> Any:
    """numba, imported when it is first asked for; False where there is none that works."""
    if _state.numba is None:
        with _state.lock:
            if _state.numba is None:
                try:
                    import numba

                    _state.numba = numba
                except ModuleNotFoundError as error:
                    _state.numba = False
                    if error.name != "numba":
                        _warn(error)
                except Exception as error:  # an ImportError where it is too old for NumPy, or an error of LLVM
                    _give_up(error)
    return _state.numba


def _give_up(error: Exception) -> None:
    """Let NumPy do all from here on, and say why, once."""
    with _state.lock:
        if _state.numba is not False:
            _state.numba = False
            _warn(error)


def _warn(error: Exception) -> None:
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"numba is installed but doesn't work, so kernels run on NumPy alone: {type(error).__name__}: {first}"
    warnings.warn(f"{text}. MINIGRAD_COMPILED=0 says so in silence.", RuntimeWarning, stacklevel=2)


# ---- the choice -----------------------------------------------------------------------------------------------------


def loop(tile: Callable[P, T]) -> Callable[[Callable[..., object]], Callable[P, T]]:
    """Decorate a loop that does the work of ``tile``, a function on NumPy arrays, with the same arguments by position.

    >>> @loop(lambda x, out: np.multiply(x, 2, out=out))
    ... def double(x, out):
    ...     for i in range(out.size):
    ...         out[i] = 2.0 * x[i]
    >>> x, out = np.arange(3, dtype=np.float32), np.empty(3, np.float32)
    >>> _ = double(x, out)
    >>> print(out)
    [0. 2. 4.]

    A loop that returns False hands its arguments to the tile: it treats ordinary numbers alone. Until then it may have
    written only what it doesn't read. A loop may call another loop, and looks at what that one returns.
    """

    def decorate(function: Callable[..., object]) -> Callable[P, T]:
        def choose(*args: Any) -> Any:
            if not (_state.wanted and _fit(args) and _numba()):
                return tile(*args)  # type: ignore[call-arg]
            try:
                done = _run(function, args)
            except Exception as error:  # a loop itself raises none: it is numba that failed, before anything ran
                done = _anew(function, args, error)
            return tile(*args) if done is False else done  # type: ignore[call-arg]

        choose.tile, choose.loop = tile, function  # type: ignore[attr-defined]
        _loops.add(function)
        return functools.wraps(function)(choose)  # type: ignore[return-value]

    return decorate


ARRAYS = {np.dtype(kind) for kind in ("float32", "complex64", "intp", "uint32", "bool")}
OTHERS = {int, bool, type(None)}
LARGEST = float(np.finfo(np.float32).max)


def _fit(args: tuple[Any, ...]) -> bool:
    """Whether all arrays are NumPy's, contiguous and of these types, and all numbers in the range of float32."""
    for x in args:
        if isinstance(x, np.ndarray):
            fits = x.flags.c_contiguous and x.dtype in ARRAYS
        else:
            fits = abs(x) <= LARGEST if type(x) is float else type(x) in OTHERS
        if not fits:
            return False
    return True


# ---- compiling ------------------------------------------------------------------------------------------------------

_loops: set[Callable[..., Any]] = set()
_helpers: dict[Callable[..., Any], set[str]] = {}  # functions that loops call, and what their compiler may do
_made: dict[Callable[..., Any], Any] = {}


def helper(*fastmath: str) -> Callable[[F], F]:
    """Decorate a function that loops call; ``fastmath`` names what its compiler may do beside contracting."""

    def decorate(function: F) -> F:
        _helpers[function] = {"contract", *fastmath}
        return function

    return decorate


def _make(function: Callable[..., Any]) -> Any:
    """A loop, compiled or read from the disk, where it is then kept, or a helper; its types are those of its calls."""
    with _state.lock:
        if function is prefetch:
            _made[function] = _intrinsic()
        if function not in _made:
            fastmath = _helpers.get(function, {"contract"})
            compiled = _state.numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(_in_float32(function))
            folder = None if function in _helpers else _folder(digest(function))
            if folder is not None:
                config = _state.numba.config
                config.CACHE_DIR, before = str(folder), config.CACHE_DIR
                try:
                    compiled.enable_caching()
                except RuntimeError:  # typed into an interpreter: there is no file
                    pass
                finally:
                    config.CACHE_DIR = before
            _made[function] = compiled
        return _made[function]


def _run(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    compiled = _made.get(function) or _make(function)
    return compiled(*[np.float32(x) if type(x) is float else x for x in args])


def _anew(function: Callable[..., Any], args: Sequence[Any], error: Exception) -> Any:
    """What a loop returns that is compiled once more, since its file may be broken; False where numba fails again."""
    with _state.lock:
        try:
            _made.pop(function, None)
            shutil.rmtree(cache_folder() / digest(function), ignore_errors=True)
            return _run(function, args)
        except Exception:
            _give_up(error)
            return False


def _in_float32(function: Callable[..., Any]) -> types.FunctionType:
    """A copy of a function whose literals and global numbers are float32, and whose helpers are compiled.

    numba would take 0.5 as a float64, and compute all that it touches in float64.
    """
    code, space = function.__code__, {**function.__globals__, **_globals_of(function)}
    for name, value in _globals_of(function).items():
        space[name] = _make(value) if callable(value) else _narrow(value)
    constants = tuple(_narrow(value) for value in code.co_consts)
    return types.FunctionType(code.replace(co_consts=constants), space, function.__name__, function.__defaults__)


def _narrow(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrow(part) for part in value)
    return np.float32(value) if isinstance(value, float) else value


def _globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The numbers, helpers and other loops that a function reads by a name of its module."""
    space = function.__globals__
    named = {name: getattr(space[name], "loop", space[name]) for name in function.__code__.co_names if name in space}
    return {name: x for name, x in named.items() if isinstance(x, int | float | tuple) or _is_compiled(x)}


def _is_compiled(x: Any) -> bool:
    return callable(x) and (x in _helpers or x in _loops)


def digest(function: Callable[..., Any]) -> str:
    """A hash of the code of a loop or helper and of everything that it reads: its helpers, their helpers, numbers."""
    code = function.__code__
    known = (
        code.co_names,
        code.co_varnames,
        [c for c in code.co_consts if c != function.__doc__],
        sorted(_helpers.get(function, ())),
    )
    parts = [code.co_code.hex(), repr(known)]
    for name, value in sorted(_globals_of(function).items()):
        parts.append(f"{name}={digest(value) if callable(value) else value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _folder(name: str) -> Path | None:
    """The folder of this name for compiled code; None where none can be written, and one warning says so."""
    try:
        folder = cache_folder() / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        if not _unwritable:
            _unwritable.append(error)
            text = f"compiled loops can't be kept, and each process compiles them anew: {error}"
            warnings.warn(f"{text}. MINIGRAD_CACHE_DIR names another folder.", RuntimeWarning, stacklevel=2)
        return None


_unwritable: list[Exception] = []


def cache_folder() -> Path:
    """Where compiled code is kept: ``MINIGRAD_CACHE_DIR``, else where the system keeps what can be made again."""
    if wish := os.environ.get("MINIGRAD_CACHE_DIR"):
        return Path(wish)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    else:
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
        base = Path(os.environ.get("XDG_CACHE_HOME") or home)
    return base / "minigrad" / "loops"


# ---- what loops call ------------------------------------------------------------------------------------------------

MAGIC = 12582912.0  # 1.5 · 2²³: a number to which it is added is rounded to a whole one, which stands in its last bits
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n times the first is exact


@helper()
def exp(x: Any) -> Any:
    """e^x by 2ⁿ e^r, |r| <= ln 2 / 2, and a polynomial: error below 1 unit in the last place; no branch, so vectors.

    Beyond the range of float32 it is 0 or ∞, below its normal numbers rounded once, as NumPy's is; NaN stays.
    """
    x = 90.0 if x > 90.0 else x
    x = -105.0 if x < -105.0 else x
    shifted = np.float32(x * 1.4426950408889634 + MAGIC)
    n = shifted - MAGIC
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = ((0.0001979029912 * r + 0.00139447033871) * r + 0.00833349768072) * r + 0.04166629537940  # least relative error
    p = ((p * r + 0.16666665673256) * r + 0.5) * (r * r) + r + 1.0
    whole = shifted.view(np.int32) - 0x4B400000
    half = whole >> 1  # 2ⁿ in two factors: n may be 128, or that of a number below the normal ones
    first = np.int32((half + 127) << 23)
    second = np.int32((whole - half + 127) << 23)
    return p * first.view(np.float32) * second.view(np.float32)


@helper()
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), exact in both tails. 1 - sigmoid(x) is sigmoid(-x), by the same exponential."""
    e = exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


@helper("reassoc", "nsz")
def dot(a: Any, b: Any) -> Any:
    """Σ a b, in an order that lets the processor add vectors."""
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@helper()
def prefetch(numbers: Any, i: int) -> None:
    """Let the cache line of ``numbers[i]``, of one contiguous axis, be fetched while the loop goes on.

    A processor foresees what lies ahead of a row, but not beyond a page of memory.
    """


def _intrinsic() -> Any:
    """``prefetch`` as numba compiles it: an instruction of LLVM. A loop's hash has its name alone."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    tools: Any = cgutils
    ir = tools.ir

    def typed(_: Any, numbers: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(numbers)(context, builder, args[0]).data
            address = builder.bitcast(builder.gep(data, [args[1]]), tools.voidptr_t)
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
            builder.call(function, [address, number(0), number(3), number(1)])  # to read, into all caches, data
            return context.get_dummy_value()

        return types.void(numbers, types.intp), generate

    return intrinsic(typed)


_state = _State()
