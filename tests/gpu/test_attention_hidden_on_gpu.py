"""On a GPU too, what a query may not see never changes a bit of its result or of its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulated import kernels

import minigrad as mg
from minigrad.backend import as_dtype
from minigrad.kernels.attention import attention
from minigrad.kernels.attention_patterns import BlockPattern

T, HIDDEN = 40, 21  # tiles of 32 or 64 queries and keys; the queries before HIDDEN don't see the keys from there on
DTYPES = ["float32", "float16", "bfloat16"]


def drawn(dtype: str) -> list[Any]:
    """q, k, v and the gradient of the result."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    return [np.random.default_rng(n).standard_normal((1, 2, T, 16)).astype(as_dtype(dtype)) for n in range(4)]


def run(q: Any, k: Any, v: Any, g: Any, options: dict[str, Any]) -> list[Any]:
    options = {name: mg.asarray(x, device="cuda") if name == "mask" else x for name, x in options.items()}
    tensors = [mg.Tensor(x, requires_grad=True, device="cuda") for x in (q, k, v)]
    out = attention(*tensors, **options)
    out.backward(mg.asarray(g, device="cuda").data)
    return [mg.backend.to_numpy(x) for x in (out.data, *(tensor.grad for tensor in tensors))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"mask": np.add.outer(np.arange(T), -np.arange(T)) > -5},
        {"pattern": BlockPattern([[True, False], [True, True]], HIDDEN)},
    ],
    ids=["causal", "mask", "blocks"],
)
def test_hidden_numbers_change_no_bit(options: dict[str, Any], dtype: str, gpu: Any) -> None:
    q, k, v, g = drawn(dtype)
    hidden = HIDDEN + 4 if "mask" in options else HIDDEN
    before = run(q, k, v, g, options)
    for factor in (1e20, 3e38, np.inf, np.nan):
        for changed in ((k,), (v,), (k, v)):
            arrays = [x.copy() for x in (k, v)]
            with np.errstate(over="ignore"):
                for x, old in zip(arrays, (k, v), strict=True):
                    if any(old is one for one in changed):
                        x[:, :, hidden:] = (old[:, :, hidden:].astype(np.float32) * np.float32(factor)).astype(x.dtype)
            after = run(q, *arrays, g, options)
            for a, b in zip(before[:2], after[:2], strict=True):
                np.testing.assert_array_equal(a[:, :, :HIDDEN], b[:, :, :HIDDEN], f"{factor}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_queries_change_no_bit_of_a_key(dtype: str, gpu: Any) -> None:
    """The first queries don't see the keys from HIDDEN on: of whose gradients they are no part, whatever they hold."""
    q, k, v, g = drawn(dtype)
    before = run(q, k, v, g, {"is_causal": True})
    for number in (np.inf, np.nan):
        q[:, :, :HIDDEN], g[:, :, 3:HIDDEN] = number, number
        after = run(q, k, v, g, {"is_causal": True})
        for a, b in zip(before[2:], after[2:], strict=True):
            np.testing.assert_array_equal(a[:, :, HIDDEN:], b[:, :, HIDDEN:], f"{number}")
            assert not np.isfinite(b[:, :, :HIDDEN].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_sees_a_nonfinite_value_gets_it(dtype: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order of the warps: no one may replace a number that another has yet to read."""
    q, k, v, g = drawn(dtype)
    for order, number in enumerate((np.inf, -np.inf, np.nan)):
        monkeypatch.setattr(kernels, "order", order % 2)
        v[0, 0, HIDDEN, 5] = number
        out = run(q, k, v, g, {"is_causal": True})[0]
        np.testing.assert_array_equal(out[0, 0, HIDDEN:, 5], np.full(T - HIDDEN, number))
        out[0, 0, HIDDEN:, 5] = 0
        assert np.isfinite(out.astype(np.float32)).all()
