"""Derivatives at the ends of a dtype's range: right wherever they are numbers of that dtype."""

from __future__ import annotations

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import DTypeError, GraphError, ShapeError

POINTS = {
    np.float16: [(300, 300), (6e4, 300), (1e-3, 1e-3), (1e-4, 1e-4), (2, 5e4)],
    np.float32: [(3e19, 3e19), (1e-23, 1e-23), (2.0, 3e30)],
    np.float64: [(3e200, 4e200), (1e-170, 1e-170)],
}
BINARY = ["divide", "hypot", "arctan2", "maximum", "logaddexp", "subtract", "fmax"]
UNARY = [
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "arctan",
    "arcsinh",
    "arccosh",
    "tanh",
    "sigmoid",
    "softplus",
    "absolute",
]


def exact(name: str, values: list[float]) -> list[float]:
    """The gradients in the widest float there is, by formulas of their own."""
    x, *rest = (np.longdouble(v) for v in values)
    y = rest[0] if rest else None
    formulas = {
        "divide": lambda: (1 / y, -x / y / y),
        "hypot": lambda: (x / np.hypot(x, y), y / np.hypot(x, y)),
        "arctan2": lambda: (y / np.hypot(x, y) ** 2, -x / np.hypot(x, y) ** 2),
        "maximum": lambda: ((x > y) + (x == y) / 2, (y > x) + (x == y) / 2),
        "fmax": lambda: ((x > y) + (x == y) / 2, (y > x) + (x == y) / 2),
        "logaddexp": lambda: (1 / (1 + np.exp(y - x)), 1 / (1 + np.exp(x - y))),
        "subtract": lambda: (1, -1),
        "log": lambda: (1 / x,),
        "log2": lambda: (1 / x / np.log(np.longdouble(2)),),
        "log10": lambda: (1 / x / np.log(np.longdouble(10)),),
        "log1p": lambda: (1 / (1 + x),),
        "sqrt": lambda: (0.5 / np.sqrt(x),),
        "arctan": lambda: (1 / (1 + x * x),),
        "arcsinh": lambda: (1 / np.sqrt(1 + x * x),),
        "arccosh": lambda: (1 / np.sqrt(x * x - 1),),
        "tanh": lambda: (1 / np.cosh(np.minimum(x, 1000)) ** 2,),
        "sigmoid": lambda: (1 / (2 + np.exp(np.minimum(x, 5000)) + np.exp(-x)),),
        "softplus": lambda: (1 / (1 + np.exp(-x)),),
        "absolute": lambda: (1,),
    }
    return [float(g) for g in formulas[name]()]


CASES = [(n, d, p) for d, points in POINTS.items() for p in points for n in BINARY]
CASES += [(n, d, (x,)) for d, points in POINTS.items() for x, _ in points for n in UNARY if n != "arccosh" or x > 1]


@pytest.mark.parametrize(("name", "dtype", "point"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_gradients_far_out(name: str, dtype: type, point: tuple[float, ...]) -> None:
    leaves = [mg.Tensor(np.array(v, dtype), requires_grad=True) for v in point]
    with np.errstate(all="ignore"):
        getattr(mg, name)(*leaves).backward()
        wanted = exact(name, [float(leaf.data) for leaf in leaves])
        steps = np.finfo(dtype)
        for leaf, expected in zip(leaves, wanted, strict=True):
            as_stored = float(np.array(expected).astype(dtype))
            np.testing.assert_allclose(
                float(leaf.grad), as_stored, rtol=8 * steps.eps, atol=2 * steps.smallest_subnormal
            )


@pytest.mark.parametrize("n", [65535, 65536, 70000])
@pytest.mark.parametrize("loss", ["mean", "mse", "nll", "kl"])
def test_means_of_more_than_half_precision_can_count(n: int, loss: str) -> None:
    x = mg.Tensor(np.full((n, 1), -1.0, np.float16), requires_grad=True)
    zeros = np.zeros((n, 1), np.float16)
    out = {
        "mean": lambda: -x.mean(),
        "mse": lambda: F.mse_loss(x, zeros),
        "nll": lambda: F.nll_loss(x, np.zeros(n, int)),
        "kl": lambda: F.kl_div(x, zeros + 1, reduction="batchmean"),
    }[loss]()
    assert out.dtype == np.float16 and out.item() == 1.0
    (out * 1024).backward()
    slope = -2048 / n if loss == "mse" else -1024 / n
    np.testing.assert_allclose(x.grad.astype(float), slope, rtol=2e-3)


def test_a_squeeze_of_nothing_shares_the_version_of_its_argument() -> None:
    b, x = mg.Tensor([1.0, 2.0]), mg.Tensor([1.0, 1.0], requires_grad=True)
    for view in (
        mg.squeeze(b),
        mg.squeeze(b, ()),
        b.reshape(2),
        b.transpose(),
        b.broadcast_to((2,)),
        mg.stop_gradient(b),
    ):
        y = (x * view).sum()
        b[0] = 50.0
        with pytest.raises(GraphError, match="as it was in the forward pass"):
            y.backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, pair: x * pair,
        lambda x, pair: mg.concatenate([x, pair]),
        lambda x, pair: mg.exp(pair),
        lambda x, pair: mg.sum([x, pair], 0),
        lambda x, pair: x @ pair,
        lambda x, pair: mg.where(True, pair, x),
    ],
)
def test_a_list_of_recorded_tensors_is_their_stack(call) -> None:
    found = []
    for join in (list, mg.stack):
        x = mg.Tensor([3.0, 4.0], requires_grad=True)
        out = call(x, join([x[0] * x[1], x[1]]))
        found.append([out.data, *mg.grad(out.sum(), [x])])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1].data, found[1][1].data)


def test_lists_of_numbers_and_tensors_as_an_index_are_fine() -> None:
    x = mg.Tensor([3.0, 4.0], requires_grad=True)
    (x * [2.0, 3.0] + x[[0, mg.Tensor(1)]]).sum().backward()
    np.testing.assert_array_equal(x.grad, [3.0, 4.0])


def test_a_hook_keeps_shape_and_dtype() -> None:
    x = mg.Tensor(np.ones(2, np.float32), requires_grad=True)
    handle = x.register_hook(lambda g: g.astype(np.float64) * 2)
    x.sum().backward()
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [2.0, 2.0]
    handle.remove()
    x.register_hook(lambda g: g[:1])
    with pytest.raises(ShapeError, match="hook"):
        x.sum().backward()


def test_an_array_does_not_take_the_place_of_a_parameter() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(DTypeError, match="Parameter"):
        layer.weight = np.ones((2, 2))
    assert "weight" in layer.state_dict()
