"""Arrays of NumPy's subclasses enter as plain arrays, whatever they mean by ``*``; masks are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.errors import DTypeError

pytestmark = pytest.mark.cpu_only("about subclasses of NumPy's arrays")


class Reversing(np.ndarray):
    """One whose operators mean something else."""

    def __mul__(self, other: Any) -> Any:
        return np.asarray(self)[::-1] * np.asarray(other)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return -1.0


A = np.array([[1.0, 2.0], [3.0, 4.0]])
KINDS: dict[str, Callable[[Any], Any]] = {
    "matrix": np.asmatrix,
    "subclass": lambda a: a.view(Reversing),
    "memory map": lambda a: a.view(np.memmap),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_are_plain_arrays_on_entry_and_as_factors(kind: str, tmp_path: Path) -> None:
    a = KINDS[kind](A.copy())
    for tensor in (
        mg.Tensor(a, requires_grad=True),
        mg.asarray(a),
        mg.Tensor(A, dtype="float32"),
        mg.exp(mg.asarray(a)),
    ):
        assert type(tensor.data) is np.ndarray
    x = mg.Tensor(a, requires_grad=True)
    (x * x).sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * A)
    products = [lambda x: x * a, lambda x: mg.multiply(a, x), lambda x: np.multiply(x, a), lambda x: np.multiply(a, x)]
    if kind != "subclass":  # a subclass on the left comes first, with its own operator
        products.append(lambda x: a * x)
    for product in products:
        x = mg.Tensor(np.ones((2, 2)), requires_grad=True)
        out = product(x)
        np.testing.assert_array_equal(out.data, A)
        out.sum().backward()
        np.testing.assert_array_equal(x.grad, A)
    x = mg.Tensor(np.ones((2, 2)), requires_grad=True)
    (x * x).backward(a)
    np.testing.assert_array_equal(x.grad, 2 * A)
    x.data = a
    assert type(x.data) is np.ndarray
    np.testing.assert_array_equal(mg.sum(a), 10.0)
    np.testing.assert_array_equal(mg.multiply(a, a), A * A)
    mg.save(tmp_path / "a.safetensors", {"a": a})
    np.testing.assert_array_equal(mg.load(tmp_path / "a.safetensors")["a"], A)


MASKED = np.ma.masked_array(A, mask=[[0, 1], [0, 0]])
IDS = np.ma.masked_array([0, 1], mask=[0, 1])
X = mg.Tensor(A, requires_grad=True)
USES: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: mg.Tensor(MASKED),
    "asarray": lambda: mg.asarray(MASKED),
    "in a list": lambda: mg.Tensor([MASKED, MASKED]),
    "right": lambda: X * MASKED,
    "left": lambda: MASKED * X,
    "left sum": lambda: MASKED + X,
    "np.ma": lambda: np.ma.multiply(X, MASKED),
    "ufunc": lambda: np.multiply(X, MASKED),
    "function": lambda: mg.maximum(MASKED, MASKED),
    "of a list": lambda: mg.concatenate([X, MASKED]),
    "comparison": lambda: X > MASKED,
    "index": lambda: X[IDS],
    "mask as index": lambda: X[MASKED > 1],
    "take": lambda: mg.take(X, IDS),
    "data": lambda: setattr(X, "data", MASKED),
    "values": lambda: mg.Tensor(A).__setitem__(0, MASKED[0]),
    "upstream": lambda: (X * X).backward(MASKED),
    "layer": lambda: nn.Linear(2, 1, dtype="float64")(MASKED),
    "ids": lambda: nn.Embedding(2, 2)(IDS),
    "state": lambda: nn.Linear(2, 2, bias=False).load_state_dict({"weight": MASKED}),
    "file": lambda: mg.save("/nowhere/at/all", {"a": MASKED}),
}


@pytest.mark.parametrize("use", USES)
def test_masks_are_refused(use: str) -> None:
    with pytest.raises(DTypeError, match=r"masked array(?s:.)*filled"):
        USES[use]()
