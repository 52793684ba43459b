"""What a trainer shows and how it ends: tables, throughput, signals, and one clear line for every foreseeable error."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import minigrad as mg
from minigrad.errors import (
    ArgumentError,
    DeviceError,
    FileFormatError,
    IndexRangeError,
    MiniGradError,
    NonFiniteError,
    OutOfMemoryError,
    StateError,
    printable,
)
from training.flags import FlagErrors

#: Errors that come from what the user gave, or from the machine; every other one is a bug and keeps its traceback.
FORESEEN = (ArgumentError, DeviceError, FileFormatError, IndexRangeError, NonFiniteError, OutOfMemoryError, StateError)


# ---- ending ----------------------------------------------------------------------------------------------------------


def run_program(program: str, body: Callable[[], int]) -> int:
    """Run ``body`` and return its exit status; foreseeable errors become one line each on standard error.

    Status 2: a flag, a file or a device that can't be used. 1: it failed under way. 130: ended by Ctrl-C.

    Of several processes that fail alike the first says so, and each returns; one that fails alone ends the others.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sample may hold characters that the terminal lacks
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # the imports are done
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return body()
    except SystemExit as leaving:  # --help
        return int(leaving.code or 0)
    except KeyboardInterrupt as interrupt:  # whoever had saved something raised it anew and says what
        return _complain(
            program, f"interrupted, {interrupt}" if interrupt.args else "interrupted, nothing was saved", 130
        )
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except FlagErrors as error:
        return _complain(program, "\n".join(error.problems), 2)
    except FORESEEN as error:
        return _complain(program, one_line(error), 1 if isinstance(error, (NonFiniteError, OutOfMemoryError)) else 2)
    except MemoryError as error:
        return _complain(program, f"out of memory: {error}. Hint: a smaller --batch-size or a smaller model", 1)
    except OSError as error:
        return _complain(program, f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except Exception:  # a bug
        with mg.distributed.abort_on_error():
            raise


def _complain(program: str, text: str, status: int) -> int:
    ranks = mg.distributed.get_communicator()
    together = ranks.all_fail()
    name = program if together or ranks.rank == 0 else f"{program}: rank {ranks.rank} of {ranks.size}"
    if ranks.rank == 0 or not together:
        for line in text.split("\n"):
            print(shortened(printable(f"{name}: {line}")), file=sys.stderr, flush=True)
    if not together:
        ranks.abort(status)
    return status


def warn(text: str) -> None:
    """Print a line on standard error that calls for attention."""
    if mg.distributed.rank() == 0:
        print(printable(f"warning: {text}"), file=sys.stderr)


def one_line(error: MiniGradError) -> str:
    """The error in one sentence.

    >>> one_line(ArgumentError("a text", "an empty file"))
    'expected a text, got an empty file'
    """
    text = f"expected {error.expected}, got {error.got}" + (f". Hint: {error.hint}" if error.hint else "")
    return " ".join(text.split())


def shortened(text: str, most: int = 1000) -> str:
    """The text, without its middle where it is longer than ``most``: files may hold long words.

    >>> shortened("abcdefghij", 6)
    'abc … hij'
    """
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


class StopSignals:
    """Turns the first signal into a request to stop at the next good moment; another Ctrl-C ends at once.

    Signals are Ctrl-C, SIGTERM, and SIGHUP, with which a terminal goes, unless nohup has it ignored. The first one is
    answered by a line on standard error, since the good moment may be a long update away.

    ``received`` is the signal, or None. Use it as a context manager; only the main thread can take signals. Of several
    processes each hears signals by itself; ``agree`` makes one that any of them has heard received by all.
    """

    def __init__(self) -> None:
        self._heard: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._heard:
            self._heard = signal.Signals(number)
            if mg.distributed.rank():  # the first says it
                return
            answer = f"\n{self._heard.name}: this update is finished and saved first; Ctrl-C (again) stops at once\n"
            for stream, text in ((1, b""), (2, answer.encode())):
                try:
                    os.write(stream, text)  # print may not be called while a print is under way
                except OSError:  # the terminal has gone, and what is printed from now on must not stop us
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

    @property
    def received(self) -> signal.Signals | None:
        """The signal that was heard; of several processes the one that they agreed on."""
        return self._heard if mg.distributed.size() == 1 else self._agreed

    def agree(self) -> None:
        """Receive what any process has heard; all call this at the same places."""
        if heard := int(mg.distributed.all_reduce(int(self._heard or 0), "max")):
            self._agreed = self._heard = signal.Signals(heard)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as shells have it; 0 without a signal."""
        return 128 + self.received if self.received else 0


# ---- showing ---------------------------------------------------------------------------------------------------------


class Throughput:
    """Tokens over the time that their updates took; evaluations and checkpoints don't count.

    The first update of a program, which fills caches and compiles kernels, is left out.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = 0.0
        self._warm = False
        self._seconds, self._tokens, self._updates = 0.0, 0, 0

    def start(self) -> None:
        """An update begins."""
        self._started = self._clock()

    def stop(self, tokens: int) -> None:
        """The update is done; it read ``tokens`` tokens, all micro-batches together."""
        if self._warm:
            self._seconds += self._clock() - self._started
            self._tokens += tokens
            self._updates += 1
        self._warm = True

    def take(self) -> tuple[float | None, float | None]:
        """Milliseconds an update and tokens a second since the last call; None where no update was counted."""
        seconds, tokens, updates = self._seconds, self._tokens, self._updates
        self._seconds, self._tokens, self._updates = 0.0, 0, 0
        if not updates or seconds <= 0:
            return None, None
        return 1000 * seconds / updates, tokens / seconds


def size(count: float) -> str:
    """A number of bytes for people.

    >>> size(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
