"""Every registered operation on the GPU: value and gradients are those of the CPU, in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cases import CASES, LACKING, Case, listed, opened, over, upstream

import minigrad as mg
from minigrad.backend import as_dtype
from minigrad.errors import DeviceError

ROUNDING = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}


def on(device: str, value: Any) -> Any:
    """Arrays, also in lists, on a device."""
    if isinstance(value, list):
        return [on(device, part) for part in value]
    return mg.asarray(value, device=device).data if isinstance(value, np.ndarray) else value


def differentiated(case: Case, dtype: str, device: str) -> list[Any]:
    """Results and gradients, for random upstream gradients, as NumPy arrays."""
    args, kwargs = case.inputs(np.float64)
    arrays, _ = opened(args)
    leaves = [mg.Tensor(a, dtype=dtype, requires_grad=True, device=device) for a in arrays]
    given = iter(leaves)
    taken = [
        [next(given) if part.dtype.kind == "f" else on(device, part) for part in value]
        if isinstance(value, list) and value and isinstance(value[0], np.ndarray)
        else next(given) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else on(device, value)
        for value in args
    ]  # fmt: skip
    outs = listed(case.operation(*taken, **{key: on(device, value) for key, value in kwargs.items()}))
    recorded = [(out, mg.asarray(g, out.dtype, device).data) for out, g in zip(outs, seeds(outs), strict=True)
                if out.requires_grad]  # fmt: skip
    found = mg.grad([o for o, _ in recorded], leaves, [g for _, g in recorded], allow_unused=True)
    return [out.numpy() for out in (*outs, *found) if out is not None]


def seeds(outs: list[Any]) -> list[Any]:
    return upstream([np.empty(out.shape, np.float64) for out in outs])


@pytest.mark.parametrize("dtype", ROUNDING)
@over([case for case in CASES if case.operation.name not in ("transfer",)])
def test_it_is_the_same_on_the_gpu(case: Case, dtype: str, gpu: Any) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    as_dtype(dtype)
    if case.operation.name in LACKING:
        with pytest.raises(
            DeviceError, match=rf"on the CPU for {LACKING[case.operation.name]}\n.*CuPy has no such function"
        ):
            differentiated(case, dtype, "cuda")
        return
    ours, theirs = differentiated(case, dtype, "cuda"), differentiated(case, dtype, "cpu")
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    wide = [[x if x.dtype.kind in "biu" else x.astype(np.float64) for x in xs] for xs in (ours, theirs)]
    for x, y in zip(*wide, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, ROUNDING[dtype], ROUNDING[dtype])
