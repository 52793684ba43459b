"""The wheel: it holds every file, and ``minigrad.nn`` is ours beside any other ``nn``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import minigrad as mg

ROOT = Path(__file__).parents[2]
PACKAGES = ("minigrad", "nn", "optim")
SOURCES = {
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.suffix in (".py", ".pyi", ".cu", ".cuh", ".txt") or path.name == "py.typed"
}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, made from a copy: setuptools leaves build/ where it works."""
    copy, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(made), str(copy))
    (found,) = made.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that sees this one's NumPy, but none of its editable installs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("**/site-packages")
    (site / "this_one.pth").write_text(str(Path(np.__file__).parents[1]))
    return folder


@pytest.fixture
def site(environment: Path, wheel: Path) -> Iterator[Path]:
    """The environment's site-packages with the wheel installed by pip."""
    (site,) = environment.glob("**/site-packages")
    pip(
        "--python",
        str(python_of(environment)),
        "install",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        "--no-compile",
        str(wheel),
    )
    yield site
    for package in PACKAGES:
        shutil.rmtree(site / package, ignore_errors=True)


def python_of(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def run(environment: Path, folder: Path, code: str) -> str:
    """What ``code`` prints as a script that lies in ``folder``."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([python_of(environment), script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_every_file_and_nn_and_optim_twice(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    bundled = {f"minigrad/bundled/{name}" for name in SOURCES if not name.startswith("minigrad/")}
    assert held == SOURCES | bundled
    assert len(bundled) > 30


def test_its_version_is_that_of_the_module(wheel: Path) -> None:
    assert wheel.name == f"minigrad_numpy-{mg.__version__}-py3-none-any.whl"


ONE = """
    import minigrad as mg, minigrad.nn, minigrad.optim, minigrad.nn.functional as ours
    import nn, optim, nn.functional as F
    assert mg.__file__.startswith({site!r}), mg.__file__
    assert minigrad.nn is nn and minigrad.optim is optim and ours is F
    from minigrad.nn import Linear
    from minigrad.nn.linear import Linear as deeper
    assert Linear is deeper is nn.Linear
"""

TRAIN = """
    import pickle
    import numpy as np
    import minigrad as mg, minigrad.nn as nn, minigrad.optim as optim
    from minigrad.nn import Linear
    from minigrad.nn.functional import mse_loss
    assert mg.__file__.startswith({site!r}), mg.__file__
    layer = Linear(1, 1)
    assert isinstance(layer, nn.Module)
    step = optim.SGD(layer.parameters(), lr=0.1)
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(8, 1)
    for _ in range(300):
        step.zero_grad()
        mse_loss(layer(x), 3 * x + 1).backward()
        step.step()
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is Linear
    print(round(again.weight.data.item(), 3), round(again.bias.data.item(), 3))
"""
FOREIGN = "import nn, optim\nassert nn.Linear == optim.SGD == 'another'"


def test_alone_both_names_are_one_module(environment: Path, site: Path, tmp_path: Path) -> None:
    run(environment, tmp_path, ONE.format(site=str(site)))
    assert run(environment, tmp_path, TRAIN.format(site=str(site))) == "3.0 1.0\n"


@pytest.mark.parametrize("where", ["over our files", "in the script's folder", "in modules of one file"])
def test_beside_another_nn_minigrad_nn_is_ours(environment: Path, site: Path, tmp_path: Path, where: str) -> None:
    """The other ``nn`` and ``optim`` stay what they are, whichever is imported first."""
    for name, attribute in (("nn", "Linear"), ("optim", "SGD")):
        text = f"{attribute} = 'another'\n"
        if where == "in modules of one file":
            (tmp_path / f"{name}.py").write_text(text)
        else:
            folder = site / name if where == "over our files" else tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text(text)
            (folder / "linear.py").write_text("raise ImportError('not ours')\n")
    train = textwrap.dedent(TRAIN.format(site=str(site)))
    assert run(environment, tmp_path, f"{train}\n{FOREIGN}") == "3.0 1.0\n"
    assert run(environment, tmp_path, f"{FOREIGN}\n{train}") == "3.0 1.0\n"


def test_a_damaged_copy_of_ours_is_not_taken_for_ours(environment: Path, site: Path, tmp_path: Path) -> None:
    """Another distribution wrote over one module of ours and no other."""
    (site / "nn" / "linear.py").write_text("class Linear: pass\n")
    (site / "optim" / "sgd.py").unlink()
    assert run(environment, tmp_path, TRAIN.format(site=str(site))) == "3.0 1.0\n"
