"""docs/kinks.md is a table of conventions; here it is read, and every row of it is checked."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import minigrad as mg
import nn.functional as F
from minigrad.errors import DeviceError

PAGE = Path(__file__).parents[2] / "docs" / "kinks.md"
ROWS = [re.findall("`([^`]*)`", line)[:4] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
NAMES = {**vars(F), **vars(mg), "inf": math.inf, "nan": math.nan, "pi": math.pi, "whole": np.array}


def assigned(text):
    """The inputs that ``x = 1; y = [2]`` names: leaves in float64, and masks and class numbers without a gradient."""
    found = {}
    exec(text, NAMES.copy(), found)

    def tensor(value):
        if isinstance(value, np.ndarray) or np.array(value).dtype == bool:
            return mg.Tensor(value)
        return mg.Tensor(value, dtype=float, requires_grad=True)

    return {name: tensor(value) for name, value in found.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " at ".join(row[:2]))
def test_convention(row):
    """The value and the gradients are those of the row; without a warning, unless one of them is not finite."""
    function, text, value, gradients = row
    inputs = assigned(text)
    leaves = [x for x in inputs.values() if x.requires_grad]
    expected = [np.array(eval(part, NAMES.copy()), dtype=float) for part in [value, *gradients.split(";")]]
    finite = all(np.isfinite(a).all() for a in expected) or not all(np.isfinite(x.data).all() for x in leaves)
    with np.errstate() if finite else np.errstate(all="ignore"):
        try:
            out = eval(function, {**NAMES, **inputs})
        except DeviceError:
            pytest.skip("CuPy lacks it")
        out.sum().backward()
    for got, wanted in zip([out.data, *(x.grad for x in leaves)], expected, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


def test_every_row_is_read():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(ROWS) == len([line for line in lines if not line.startswith(("| function", "|---"))])
    assert all(len(row) == 4 for row in ROWS)


SILENT = {
    "sin arcsinh expm1 tanh erf square negative exp2 arctan sinh cosh": [0.0, -0.0],
    "arcsin arccos arctanh": [-1.0, 0.0, 1.0],
    "arccosh": [1.0, 2.0],
    "log1p": [-1.0, 0.0],
    "log2 log10 reciprocal": [0.0, 1.0],
    "exp cosh sinh": [-1e3, 1e3],
    "softplus sigmoid tanh erf arctan": [-math.inf, math.inf],
}


@pytest.mark.parametrize(("name", "point"), [(n, p) for names, p in SILENT.items() for n in names.split()])
def test_where_no_row_speaks_torch_does(name, point):
    """At the ends of the domain and beyond: torch's gradient, be it infinite."""
    x, t = mg.Tensor(point, requires_grad=True), torch.tensor(point, dtype=torch.float64, requires_grad=True)
    with np.errstate(all="ignore"):
        mg.REGISTRY[name](x).sum().backward()
    getattr(torch.nn.functional if name == "softplus" else torch, {"negative": "neg"}.get(name, name))(
        t
    ).sum().backward()
    np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=1e-12)
