"""Every error that minigrad raises, in one form: what was expected, what came, and what to do.

Each kind is also the built-in exception that a Python programmer would catch, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import re

import numpy as np

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")  # not \t, \n, \r\n


def printable(text: str) -> str:
    r"""The text with characters that would steer a terminal written as escapes: names in files are a stranger's words.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class MiniGradError(Exception):
    """The root of all errors of minigrad, printed as Expected / Got / Hint.

    >>> print(MiniGradError("a scalar", "shape (3,)", "call .sum() first"))
    Expected: a scalar
    Got: shape (3,)
    Hint: call .sum() first
    """

    layer = ""  # the path of the module whose forward failed, where modules contain each other
    origin: Exception  # what this one explains, where it came from inside

    def __init__(self, expected: str, got: str, hint: str = "") -> None:
        self.expected, self.got, self.hint = expected, got, hint
        Exception.__init__(self, expected, got, hint)  # not super(): NumPy's AxisError has arguments of its own

    def __str__(self) -> str:
        lines = [f"Expected: {self.expected}", f"Got: {self.got}" + (f", in {self.layer}" if self.layer else "")]
        return printable("\n".join(lines + ([f"Hint: {self.hint}"] if self.hint else [])))


class ShapeError(MiniGradError, ValueError):
    """Shapes that do not fit together, or do not fit the operation."""


class ArgumentError(MiniGradError, ValueError):
    """A value outside of what a function accepts."""


class DTypeError(MiniGradError, TypeError):
    """A dtype or a Python type that the operation can't work with."""


class IndexRangeError(MiniGradError, IndexError):
    """An index, class or token id outside of its axis."""


class GraphError(MiniGradError, RuntimeError):
    """A backward pass that can't run: freed, changed since, or never recorded."""


class DeviceError(MiniGradError, RuntimeError):
    """A device that is absent, or arrays of different devices in one operation."""


class StateError(MiniGradError, KeyError):
    """A state dict whose names or shapes are not those of the module or optimizer."""

    __str__ = MiniGradError.__str__  # KeyError would print the repr of its argument


class FileFormatError(MiniGradError, ValueError):
    """A file that is not what its reader expects."""


class NonFiniteError(MiniGradError, FloatingPointError):
    """A NaN or an infinity where every number must be finite."""


class OutOfMemoryError(MiniGradError, MemoryError):
    """A device without room for an allocation, after its free blocks were returned."""


class AttributeHintError(MiniGradError, AttributeError):
    """A name that another library uses for something that minigrad calls differently."""


class GradientError(MiniGradError, AssertionError):
    """A derivative that central differences contradict, or that they can't be asked about."""


class CallError(MiniGradError, TypeError):
    """A call whose arguments don't match the signature of the function."""


class AxisError(MiniGradError, np.exceptions.AxisError):
    """An axis that the array doesn't have: a ValueError and an IndexError, as NumPy's is."""


class LinAlgError(MiniGradError, np.linalg.LinAlgError):
    """A matrix that is singular, not positive definite or not square where it must be."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file or a folder that isn't there."""


class MissingPackageError(MiniGradError, ImportError):
    """A package that is not installed, and that only some functions need."""
