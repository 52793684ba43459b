"""The first thing that a program imports: it stays civil where Ctrl-C comes while the rest is still imported."""

from __future__ import annotations

import sys
from types import TracebackType


def greet_ctrl_c(program: str) -> None:
    """Let a Ctrl-C that nobody catches end ``program`` with one line instead of a traceback."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{program}: interrupted, nothing was saved", file=sys.stderr)
        else:
            otherwise(kind, error, traceback)

    sys.excepthook = hook
