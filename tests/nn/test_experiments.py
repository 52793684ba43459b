"""What an ordinary experiment needs beside layers: batches, and a table of what is learned."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, DTypeError, ShapeError

X, Y = np.arange(14.0).reshape(7, 2), np.arange(7)


def test_an_epoch_has_each_example_once_with_its_target():
    parts = list(nn.batches(mg.Tensor(X), Y.tolist(), 3, 0))
    assert [len(x) for x, _ in parts] == [3, 3, 1]
    for x, y in parts:
        np.testing.assert_array_equal(x[:, 0], 2.0 * y)
    order = np.concatenate([y for _, y in parts])
    assert sorted(order) == list(range(7)) and list(order) != list(range(7))
    assert [len(x) for x, _ in nn.batches(X, Y, 3, drop_last=True)] == [3, 3]


def test_orders_come_from_the_generator_and_differ_by_epoch():
    def order(generator):
        return [int(i) for _, y in nn.batches(X, Y, 2, generator) for i in y]

    generator = np.random.default_rng(1)
    assert order(generator) != order(generator)
    assert order(3) == order(3)
    mg.random.seed(4)
    first = order(None)
    mg.random.seed(4)
    assert order(None) == first
    plain = [int(i) for _, y in nn.batches(X, Y, 2, shuffle=False) for i in y]
    assert plain == list(range(7))


def test_batches_refuse_what_has_no_pairs():
    with pytest.raises(ShapeError, match="as many examples"):
        nn.batches(X, Y[:-1], 2)
    with pytest.raises(ArgumentError, match="batch_size"):
        nn.batches(X, Y, 0)


def test_the_summary_groups_numbered_layers_and_sums_up():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(4))})
    model.head = nn.Linear(5, 1, bias=False, dtype="float64")
    lines = nn.summary(model).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["layers.*.weight", "4", "×", "(2,", "3)", "24", "96", "B"],
        ["head.weight", "(1,", "5)", "5", "40", "B"],
        ["total", "29", "136", "B"],
    ]
    model.head.requires_grad_(False)
    assert [line.split() for line in nn.summary(model).splitlines()[2:]] == [
        ["head.weight", "(1,", "5)", "5", "40", "B", "frozen"],
        ["total", "29", "136", "B"],
        ["frozen", "5", "40", "B"],
    ]
    with pytest.raises(DTypeError, match="a model"):
        nn.summary([model])


def test_a_model_without_parameters_has_a_table_too():
    assert nn.summary(nn.ReLU()).splitlines()[-1].split() == ["total", "0", "0", "B"]
