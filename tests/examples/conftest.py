"""What the tests of the programs share: the environment in which they run as a user would run them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a subprocess that finds minigrad and the modules beside the programs."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
