"""On a GPU too, attention whose scores leave the range of float chooses as if they did not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.simulated import kernels

import minigrad as mg
from minigrad.backend import as_dtype
from minigrad.kernels.attention import attention

T, D = 70, 16  # more than a tile of queries and of keys
FAR = [1, 5, 33, 40, 66]


def drawn(dtype: str) -> list[np.ndarray]:
    """q, k, v and the gradient of the result; the keys are huge, and so are some queries, the others small."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    q, k, v, g = (np.random.default_rng(n).standard_normal((1, 2, T, D)) for n in range(4))
    k *= 2.0**66
    q *= 2.0**-66
    q[:, :, FAR] *= 2.0**132
    k[:, :, :, 1], q[:, :, 5, 1] = 2.0**66, -(2.0**75)  # all scores of row 5 are far below 0
    q[:, :, 33] = 2.0**100 * np.resize([1, -1], D)  # sums of both signs
    return [x.astype(as_dtype(dtype)) for x in (q, k, v, g)]


def right(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, ...]:
    """The result and the gradients in float64, and what scales the gradients of q and k."""
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(D), -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    out, up = p @ v, g @ v.swapaxes(-1, -2)
    ds = p * (up - (p * up).sum(-1, keepdims=True)) / np.sqrt(D)
    return out, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


def run(arrays: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    q, k, v = (mg.Tensor(x, requires_grad=True, device="cuda") for x in arrays[:3])
    if "mask" in options:
        options["mask"] = mg.asarray(options["mask"], device="cuda")
    out = attention(q, k, v, **options)
    out.backward(mg.asarray(arrays[3], device="cuda").data)
    return [mg.backend.to_numpy(x).astype(np.float64) for x in (out.data, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_overflow(dtype: str, kind: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key with the largest score has all weight. Other rows are what they are, gradients too."""
    monkeypatch.setattr(kernels, "order", int(kind == "causal"))
    arrays = drawn(dtype)
    seen = {
        "all": np.ones((T, T), bool),
        "causal": np.tri(T, dtype=bool),
        "mask": np.add.outer(np.arange(T), 3 * np.arange(T)) % 5 > 0,
    }[kind]
    options = {"all": {}, "causal": {"is_causal": True}, "mask": {"mask": seen}}[kind]
    found, wanted, eps = run(arrays, **options), right(*arrays, seen), 1e-5 if dtype == "float32" else 2e-2
    near = np.delete(np.arange(T), FAR)
    np.testing.assert_allclose(found[0], wanted[0], atol=eps)
    np.testing.assert_allclose(found[3], wanted[3], atol=4 * eps)
    np.testing.assert_allclose(found[1][:, :, near] / 2.0**66, wanted[1][:, :, near] / 2.0**66, atol=4 * eps)
    assert np.isfinite(found[1]).all() and np.isfinite(found[2]).all()
    # A far row's slope is 0, but for what was rounded, times a key.
    assert np.abs(found[1][:, :, FAR]).max() <= eps * T * 2.0**69


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_far_row_changes_no_bit_of_its_neighbours(dtype: str, gpu: Any) -> None:
    arrays = drawn(dtype)
    near = np.delete(np.arange(T), FAR)
    before = run(arrays)
    arrays[0][:, :, FAR] = 0
    for a, b in zip(before[:2], run(arrays)[:2], strict=True):
        np.testing.assert_array_equal(a[:, :, near], b[:, :, near])
