"""The matrix of Pythons and NumPys: ``nox`` runs all tests on each pair, ``nox -s quick`` a choice that needs no torch.

``nox -s "quick(python='3.13', numpy='newest')"`` runs one. An interpreter that isn't there is skipped, and said.
"""

import nox

nox.options.sessions = ["full"]
nox.options.error_on_missing_interpreters = False

OLDEST, NEWEST = "2.0.*", "newest"
PAIRS = [
    ("3.10", OLDEST),
    ("3.10", NEWEST),  # NumPy 2.2, the last one for it
    ("3.11", OLDEST),
    ("3.11", "2.2.*"),
    ("3.11", NEWEST),
    ("3.12", OLDEST),
    ("3.12", NEWEST),
    ("3.13", "2.1.*"),  # the oldest with wheels for it
    ("3.13", NEWEST),
    ("3.14", NEWEST),  # untested: no interpreter was at hand
]
matrix = nox.parametrize("python,numpy", PAIRS)

# Files that need neither torch nor minutes, from every package of the tests.
QUICK = [
    "tests/packaging",
    "tests/engine/test_tiny.py",
    "tests/engine/test_serialize.py",
    "tests/engine/test_parallel.py",
    "tests/engine/test_state_machine.py",
    "tests/ops/test_erf.py",
    "tests/ops/test_extremes.py",
    "tests/ops/test_ops_edge.py",
    "tests/optim/test_schedules.py",
    "tests/instruments",
    "tests/docs/test_docs.py",
]


def install(session: nox.Session, numpy: str, *others: str) -> None:
    """The package and ``others``, with the NumPy asked for."""
    session.install(*others, "numpy" if numpy == NEWEST else f"numpy=={numpy}")
    session.run("python", "-c", "import sys, numpy; print(sys.version.split()[0], 'NumPy', numpy.__version__)")


@nox.session
@matrix
def quick(session: nox.Session, numpy: str) -> None:
    """A choice of the tests, which needs no torch."""
    install(session, numpy, "-e", ".[scipy]", "pytest>=8", "hypothesis>=6.100", "ml_dtypes>=0.5", "setuptools>=77")
    session.run("pytest", "-q", *(session.posargs or QUICK), env={"HYPOTHESIS_PROFILE": "few"})
    session.run("pytest", "-q", "--doctest-modules", "minigrad", "nn", "optim")


@nox.session
@matrix
def full(session: nox.Session, numpy: str) -> None:
    """All tests."""
    install(session, numpy, "-e", ".[test]")
    session.run("pytest", "-q", *session.posargs, env={"HYPOTHESIS_PROFILE": "few"})
