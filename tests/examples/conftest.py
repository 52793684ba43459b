"""What the tests of the programs share: the environment in which they run as a user would run them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a subprocess that finds minigrad and the modules beside the programs."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> Iterator[None]:
    """Signals do here what they do in a terminal, also where ``nohup`` or a background shell ignores them."""
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    numbers = {name: getattr(signal, name) for name in usual if hasattr(signal, name)}  # Windows has no SIGHUP
    before = {number: signal.signal(number, usual[name]) for name, number in numbers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
