"""``detect_anomaly`` names the operation at fault and where it was called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
import optim
from minigrad.errors import NonFiniteError


def leaf(values: Any, dtype: Any = np.float64, name: str | None = None) -> Any:
    t = mg.Tensor(values, requires_grad=True, dtype=dtype)
    t.name = name
    return t


def here() -> int:
    """The number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


# ---- who is at fault ------------------------------------------------------------------------------------------------


def untaken_exp() -> Any:
    x = leaf([1000.0])
    return mg.where(x <= 0, mg.exp(x), 1 + x)


def untaken_sqrt() -> Any:
    x = leaf([0.0])
    return mg.where(x == 0, 0, x * mg.sqrt(x))


def broken_rule() -> Any:
    @mg.primitive
    def odd(x: Any) -> Any:
        return x + 0

    odd.defvjp(lambda g: g * np.nan)
    return odd(leaf([1.0]))


def inside_of_checkpoint() -> Any:
    return mg.checkpoint(lambda x: mg.sqrt(x * 0) + x, leaf([1.0]))


FAULTS: list[tuple[str, str, Callable[[], Any]]] = [
    ("result", "exp", untaken_exp),
    ("gradients", "sqrt", untaken_sqrt),
    ("result", "log", lambda: mg.log(leaf([1.0, 0.0]))),
    ("result", "divide", lambda: 1 / leaf([0.0])),
    ("result", "divide", lambda: leaf([0.0]) / 0.0),
    ("result", "multiply", lambda: leaf([1e30], np.float32) * leaf([1e30], np.float32)),
    ("result", "matmul", lambda: leaf([[1e200, 1.0]]) @ leaf([[1e200], [1.0]])),
    ("result", "astype", lambda: leaf([1e6]).astype("float16")),
    ("result", "sum", lambda: leaf(np.full(100, 60000.0), np.float16).sum()),
    ("result", "subtract", lambda: leaf([np.inf]) - leaf([np.inf])),  # NaN, though its inputs are not finite
    ("result", "multiply", lambda: leaf([0.0]) * np.array([np.inf])),
    ("result", "log", lambda: mg.log(mg.Tensor([-1.0]))),  # NaN, recorded or not
    ("result", "subtract", lambda: (lambda y: y - y)(mg.exp(leaf([1000.0])))),
    ("result", "exp", lambda: mg.exp(leaf([1000.0])) + 1),
    ("gradients", "power", lambda: leaf([0.0]) ** 0.5),
    ("gradients", "log", lambda: mg.log(leaf([5e-324])) * 0.0 + mg.log(leaf([5e-324]))),
    ("gradients", "add", lambda: leaf(np.ones((70000, 1)), np.float16) + leaf([0.0], np.float16)),  # summed in fit
    ("gradients", "odd", broken_rule),
    ("gradients", "sqrt", inside_of_checkpoint),
]


@pytest.mark.parametrize(("kind", "operation", "make"), FAULTS)
def test_the_operation_at_fault_is_named(kind: str, operation: str, make: Callable[[], Any]) -> None:
    with pytest.raises(NonFiniteError, match=f"Expected: a? ?finite {kind} of {operation!r}"), mg.detect_anomaly():
        out = make()
        out.backward(np.ones(out.shape))


def masked_softmax() -> Any:
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    return x, mg.softmax(mg.where(np.tril(np.ones((2, 2), bool)), x, -np.inf)) ** 2


def masked_logsumexp() -> Any:
    x = leaf([[1.0, 2.0], [3.0, 4.0]])
    return x, mg.logsumexp(mg.where(np.array([[True, False], [False, False]]), x, -np.inf), axis=1, keepdims=True)[:1]


def masked_attention() -> Any:
    q, mask = leaf(np.linspace(-1, 1, 12).reshape(1, 3, 4)), np.zeros((3, 3))
    mask[0], mask[1, 2] = -np.inf, -np.inf  # the first row allows nothing
    return q, F.scaled_dot_product_attention(q, q, q, attn_mask=mg.Tensor(mask)) ** 2


def infinite_constant() -> Any:
    x = leaf([1.0, 2.0])
    return x, mg.minimum(x, np.array([np.inf, 1.0])) * 3


def recipe_exp() -> Any:
    x = leaf([1000.0])
    safe = mg.where(x <= 0, x, 0)
    return x, mg.where(x <= 0, mg.exp(safe), 1 + x)


def recipe_sqrt() -> Any:
    x = leaf([0.0])
    safe = mg.where(x == 0, 1, x)
    return x, mg.where(x == 0, 0, safe * mg.sqrt(safe))


def check_that_watching_changes_nothing(make: Callable[[], Any], x: Any, plain: Any) -> None:
    """``make`` gives a leaf and a result: those of an unwatched run are ``x`` and ``plain``."""
    plain.sum().backward()
    with mg.detect_anomaly():
        watched, out = make()
        out.sum().backward()
    assert np.isfinite(watched.grad).all()
    np.testing.assert_array_equal(out.data, plain.data)
    np.testing.assert_array_equal(watched.grad, x.grad)


@pytest.mark.parametrize(
    "make", [masked_softmax, masked_logsumexp, masked_attention, infinite_constant, recipe_exp, recipe_sqrt]
)
def test_a_mask_is_no_fault_and_nothing_is_changed(make: Callable[[], Any]) -> None:
    check_that_watching_changes_nothing(make, *make())


def slope_that_relu_multiplies_out() -> Any:
    x = leaf([-1.0, 4.0])
    return x, mg.sqrt(F.relu(x))


def infinity_that_nothing_uses() -> Any:
    x = leaf([0.0, 4.0])
    mg.log(x).max(), (1 / x).argmax()
    return x, mg.where((1 / x).data > 3, 0, x)


@pytest.mark.parametrize("make", [slope_that_relu_multiplies_out, infinity_that_nothing_uses])
def test_an_infinity_that_does_not_arrive_is_no_fault(make: Callable[[], Any]) -> None:
    with np.errstate(divide="ignore"):
        x, plain = make()
        check_that_watching_changes_nothing(make, x, plain)


def test_where_is_blamed_only_behind_a_where() -> None:
    """The slope of sqrt at 0 is infinite in both; a where multiplies it by 0 in one."""
    for make, behind in (
        (lambda x: mg.sqrt(x), False),
        (lambda x: 0 * mg.sqrt(x), False),
        (lambda x: mg.where(x == 0, 0, mg.sqrt(x)), True),
    ):
        with pytest.raises(NonFiniteError, match="finite gradients of 'sqrt'") as caught, mg.detect_anomaly():
            make(leaf([0.0, 4.0])).sum().backward()
        assert ("'where'" in caught.value.hint) == behind


def test_a_nan_of_infinities_names_who_made_them() -> None:
    with pytest.raises(NonFiniteError, match="finite result of 'subtract'") as caught, mg.detect_anomaly():
        y = mg.exp(leaf([1000.0]))
        y - y
    assert "made by exp(x: float64 (1,))" in caught.value.hint
    with pytest.raises(NonFiniteError, match="finite gradients of 'sqrt'"), mg.detect_anomaly():
        mg.sqrt(leaf([0.0]) * 0.0).sum().backward()  # ∞ times the 0 that multiplies the leaf


def test_infinite_constants_may_give_infinite_results_and_gradients() -> None:
    x = leaf([1.0, 2.0])
    with mg.detect_anomaly():
        (x * np.array([np.inf, 1.0])).sum().backward()
    assert x.grad.tolist() == [np.inf, 1.0]


def test_nan_that_comes_in_is_told_as_such() -> None:
    weight = leaf([[np.nan, 1.0]], name="layers.3.ffn.w1.weight")
    with pytest.raises(NonFiniteError) as caught, mg.detect_anomaly():
        F.linear(mg.Tensor([[1.0, 1.0]]), weight)
    assert "1 NaN of 2 numbers in argument 'weight' of linear(" in caught.value.got
    assert "weight: float64 (1, 2) 'layers.3.ffn.w1.weight'" in caught.value.got


def test_a_derivative_that_is_recorded_is_named_by_its_operation() -> None:
    """The rule of sqrt divides by zero; at fault is sqrt, at the line where sqrt was called."""
    with pytest.raises(NonFiniteError, match="finite gradients of 'sqrt'") as caught, mg.detect_anomaly():
        x = leaf([0.0])
        line = here() + 1
        y = mg.sqrt(x)
        mg.grad(y.sum(), x, create_graph=True)
    assert f"{__file__}:{line}: y = mg.sqrt(x)" in caught.value.got


@pytest.mark.parametrize("scale", [1.0, 2.0**60])
def test_overflow_behind_a_scaled_loss_is_left_to_the_scaler_and_a_kink_is_not(scale: float) -> None:
    """2^60 is no number of float16; what sqrt does at 0 has nothing to do with scales."""
    scaler, x = optim.GradScaler(init_scale=scale), mg.Tensor([0.0, 4.0], dtype="float32", requires_grad=True)
    with mg.detect_anomaly():
        with mg.autocast("float16"):
            product = x @ x
        scaler.scale(product * 1).backward(retain_graph=True)
        assert bool(np.isfinite(x.grad).all()) == (scale == 1)
        with pytest.raises(NonFiniteError, match="finite gradients of 'sqrt'"):
            scaler.scale(mg.where(x == 0, 0, x * mg.sqrt(x)).sum()).backward()
        if scale > 1:
            with pytest.raises(NonFiniteError, match="finite gradients of"):
                (product.astype("float32") * scale).backward()


def test_a_derivative_of_a_derivative_is_named_by_both() -> None:
    """1/x is finite at 1e-200, and -1/x² is not; the division was called by mg.grad, for log."""
    with pytest.raises(NonFiniteError, match="finite gradients of 'divide'") as caught, mg.detect_anomaly():
        x = leaf([1e-200])
        y = mg.log(x).sum()
        line = here() + 1
        (slope,) = mg.grad(y, x, create_graph=True)
        mg.grad(slope.sum(), x)
    assert f"in the derivative of log, called at {__file__}:{line}: (slope,) = " in caught.value.got


def test_higher_orders_of_fused_operations_are_named_by_the_operation() -> None:
    x = leaf([[3e38, 1.0]], np.float32)
    with pytest.raises(NonFiniteError, match="finite gradients of 'swiglu'"), mg.detect_anomaly():
        out = F.swiglu(x * 1e-30, leaf([[1e-30, 1.0]], np.float32))
        mg.grad(out, x, mg.Tensor(np.full((1, 2), 3e38, np.float32)) * 1, create_graph=True)


# ---- where it was called --------------------------------------------------------------------------------------------


def test_the_line_is_the_users_forward_call_and_the_layers_line_is_told_too() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.data = np.full((2, 2), 3e38, np.float32)
    with pytest.raises(NonFiniteError) as caught, mg.detect_anomaly():
        x = mg.Tensor(np.full((1, 2), 2.0, np.float32))
        line = here() + 1
        layer(x).sum().backward()
    assert re.search(
        rf"called at {re.escape(__file__)}:{line}: layer\(x\)\.sum\(\)\.backward\(\) \(through .*linear\.py:\d+: ",
        caught.value.got,
    )


def test_backward_alone_asks_for_the_forward_pass() -> None:
    y = mg.sqrt(leaf([0.0]))
    with pytest.raises(NonFiniteError, match="put the forward pass into detect_anomaly") as caught, mg.detect_anomaly():
        y.sum().backward()
    assert "sqrt, result float64 (1,)" in caught.value.got


def test_shapes_dtypes_and_counts_are_told() -> None:
    with pytest.raises(NonFiniteError) as caught, mg.detect_anomaly():
        leaf(np.zeros((2, 3)), np.float32) / np.array([0.0, 1.0, 0.0], np.float32)
    assert caught.value.got.startswith("4 NaN of 6 numbers in the result of divide(x: float32 (2, 3), y: float32 (3,))")


@pytest.mark.parametrize("kind", ["warn", "raise"])
def test_numpy_says_nothing_first_and_its_settings_come_back(kind: Any) -> None:
    with np.errstate(all=kind):
        before = np.geterr()
        with pytest.raises(NonFiniteError), mg.detect_anomaly():
            mg.exp(leaf([1000.0])).backward(np.ones(1))
        assert np.geterr() == before


def test_kernels_on_the_pool_are_silent_too() -> None:
    x = leaf(np.full((4096, 2048), 2e38), np.float32)
    with pytest.raises(NonFiniteError, match="'swiglu'"), mg.detect_anomaly():
        F.swiglu(x, x).sum().backward()
