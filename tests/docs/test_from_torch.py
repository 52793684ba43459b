"""Names that mean different things in torch and here: each row of docs/from-torch.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import minigrad as mg
import nn
from minigrad.errors import AttributeHintError, CallError, GraphError

X = np.array([[3.0, 1.0, 2.0], [0.5, 2.5, 2.5]])
OURS = mg.asarray(X)
THEIRS = torch.from_numpy(X)


def same(ours, theirs) -> None:
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12)


def test_repeat_is_elementwise_and_tile_is_torchs_repeat() -> None:
    same(OURS.repeat(2, axis=1), THEIRS.repeat_interleave(2, dim=1))
    same(OURS.tile((2, 1)), THEIRS.repeat(2, 1))


def test_split_counts_pieces() -> None:
    assert [p.shape for p in OURS.split(3, axis=1)] == [(2, 1)] * 3
    assert [tuple(p.shape) for p in THEIRS.split(3, dim=1)] == [(2, 3)]


def test_transpose_permutes_and_swapaxes_is_torchs_transpose() -> None:
    cube, other = mg.asarray(np.arange(24.0).reshape(2, 3, 4)), torch.arange(24.0).reshape(2, 3, 4)
    same(cube.transpose(2, 0, 1), other.permute(2, 0, 1))
    assert cube.transpose().shape == (4, 3, 2)
    same(cube.swapaxes(0, 2), other.transpose(0, 2))


def test_std_and_var_divide_by_n() -> None:
    same(OURS.std(axis=1, ddof=1), THEIRS.std(dim=1))
    same(OURS.var(axis=1), THEIRS.var(dim=1, correction=0))


def test_max_and_sort_give_values() -> None:
    same(OURS.max(axis=1), THEIRS.max(dim=1).values)
    same(OURS.sort(axis=1), THEIRS.sort(dim=1).values)
    same(OURS.argmax(axis=1), THEIRS.max(dim=1).indices)
    same(OURS.argsort(axis=1), THEIRS.sort(dim=1, stable=True).indices)


def test_size_is_a_number_and_sum_over_no_axis_sums_nothing() -> None:
    assert OURS.size == 6
    assert OURS.sum(axis=()).shape == (2, 3) and THEIRS.sum(dim=()).shape == ()


def test_take_is_of_the_flattened_array_or_along_an_axis() -> None:
    same(OURS.take([0, 5]), THEIRS.take(torch.tensor([0, 5])))
    same(OURS.take([2, 0], axis=1), THEIRS.index_select(1, torch.tensor([2, 0])))


def test_assignment_is_refused_where_it_is_recorded() -> None:
    with pytest.raises(GraphError, match="scatter_add"):
        mg.Tensor([1.0], requires_grad=True)[0] = 2.0


def test_classes_are_the_last_axis() -> None:
    logits, targets = np.random.default_rng(0).normal(size=(2, 5, 3)), np.array([[0, 1, 2, 0, 1]] * 2)
    ours = nn.functional.cross_entropy(mg.asarray(logits), targets)
    theirs = torch.nn.functional.cross_entropy(torch.from_numpy(logits).movedim(-1, 1), torch.from_numpy(targets))
    same(ours, theirs)


def test_float_literals_are_float64_and_own_numbers_float32() -> None:
    assert mg.Tensor([1.0]).dtype == np.float64 and torch.tensor([1.0]).dtype == torch.float32
    assert mg.zeros(2).dtype == mg.random.normal(size=2).dtype == nn.Linear(2, 2).weight.dtype == np.float32


@pytest.mark.cpu_only("about arrays of NumPy")
def test_float64_data_widen_a_float32_layer() -> None:
    with pytest.warns(UserWarning, match="astype"):
        assert nn.Linear(3, 2)(X).dtype == np.float64
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.Linear(3, 2)(THEIRS)


def test_numpy_serves_a_recorded_tensor() -> None:
    ours, theirs = mg.Tensor(X, requires_grad=True), THEIRS.clone().requires_grad_()
    np.testing.assert_array_equal((ours * 2).numpy(), X * 2)
    with pytest.raises(RuntimeError, match="detach"):
        (theirs * 2).numpy()


def test_an_array_made_of_a_recorded_tensor_is_refused() -> None:
    ours, theirs = mg.Tensor(X, requires_grad=True), THEIRS.clone().requires_grad_()
    with pytest.raises(RuntimeError):
        np.asarray(theirs)
    for form in (np.asarray, lambda x: np.zeros(X.shape).__setitem__(..., x)):
        with pytest.raises(GraphError, match="NumPy array"):
            form(ours)
    np.exp(ours).sum().backward()
    np.testing.assert_allclose(ours.grad, np.exp(X), rtol=1e-14)
    with mg.no_grad():
        np.testing.assert_array_equal(np.asarray(ours), X)


def test_float_gives_the_number_outside_of_a_transform() -> None:
    ours, theirs = mg.Tensor(2.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    assert math.exp(ours) == math.exp(2)
    with pytest.warns(UserWarning, match="detach"):
        assert math.exp(theirs) == math.exp(2)
    with pytest.raises(GraphError, match=r"x\.item\(\)"):
        mg.value_and_grad(lambda x: x * math.exp(x))(ours)
    assert mg.value_and_grad(lambda x: x * x.item())(ours)[1].item() == 2


def test_keywords_and_methods_of_habit_are_errors_that_name_ours() -> None:
    for call in (lambda: mg.softmax(OURS, dim=1), lambda: OURS.softmax(dim=1), lambda: nn.functional.glu(OURS, dim=1)):
        with pytest.raises(CallError, match="axis= takes the place of dim="):
            call()
    with pytest.raises(CallError, match="keepdims="):
        mg.sum(OURS, axis=1, keepdim=True)
    with pytest.raises(CallError, match=r"flip\(…, axis\)"):
        OURS.sort(axis=1, descending=True)
    same(mg.flip(OURS.sort(axis=1), axis=1), THEIRS.sort(dim=1, descending=True).values)
    with pytest.raises(CallError, match="topk of -x"):
        mg.topk(OURS, 1, largest=False)
    same(-mg.topk(-OURS, 1)[0], THEIRS.topk(1, largest=False).values)
    with pytest.raises(CallError, match="counts the pieces"):
        mg.split(OURS, split_size=1)
    with pytest.raises(AttributeHintError, match=r"x\.node is None"):
        _ = OURS.is_leaf
    with pytest.raises(AttributeHintError, match="reshape"):
        OURS.view(3, 2)
    with pytest.raises(AttributeHintError, match="transpose"):
        OURS.permute(1, 0)
    with pytest.raises(AttributeHintError, match="in place"):
        OURS.add_(1)


def test_gather_and_scatter_add() -> None:
    index, values = np.array([[2, 0], [1, 1]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    same(OURS.take_along_axis(index, axis=1), THEIRS.gather(1, torch.from_numpy(index)))
    theirs = THEIRS.scatter_add(1, torch.from_numpy(index), torch.from_numpy(values))
    same(OURS.scatter_add(index, values, axis=1), theirs)


CHECKED = {
    "`repeat`": test_repeat_is_elementwise_and_tile_is_torchs_repeat,
    "`split`": test_split_counts_pieces,
    "`transpose`": test_transpose_permutes_and_swapaxes_is_torchs_transpose,
    "`std`, `var`": test_std_and_var_divide_by_n,
    "`max`, `min` with an axis": test_max_and_sort_give_values,
    "`sort`": test_max_and_sort_give_values,
    "`t.size`": test_size_is_a_number_and_sum_over_no_axis_sums_nothing,
    "`sum(axis=())`": test_size_is_a_number_and_sum_over_no_axis_sums_nothing,
    "`take`": test_take_is_of_the_flattened_array_or_along_an_axis,
    "`t[i] = v`": test_assignment_is_refused_where_it_is_recorded,
    "`cross_entropy` classes": test_classes_are_the_last_axis,
    "float literals": test_float_literals_are_float64_and_own_numbers_float32,
    "float64 data into a float32 layer": test_float64_data_widen_a_float32_layer,
    "`x.numpy()` of a recorded tensor": test_numpy_serves_a_recorded_tensor,
    "`np.asarray(x)` of a recorded tensor": test_an_array_made_of_a_recorded_tensor_is_refused,
    "`float(x)`, `math.exp(x)`": test_float_gives_the_number_outside_of_a_transform,
    "`dim=`, `keepdim=`": test_keywords_and_methods_of_habit_are_errors_that_name_ours,
    "`t.view`, `t.permute`, …": test_keywords_and_methods_of_habit_are_errors_that_name_ours,
    "scatter and gather": test_gather_and_scatter_add,
}


def test_every_row_of_the_page_has_its_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-torch.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")][2:]
    assert rows == list(CHECKED)
