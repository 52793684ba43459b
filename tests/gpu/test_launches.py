"""How many kernels a training step launches: they, and not the arithmetic, take the time of a small model on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn
import optim


def launches(layers: int, dtype: str, state: Any) -> dict[str, int]:
    """Of the third step of a language model with AdamW and clipping, by what they do."""
    model = nn.TransformerLM(40, context_length=16, d_model=32, num_layers=layers, num_heads=4, device="cuda")
    optimizer, ids = optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0).integers(0, 40, (2, 17))
    for _ in range(3):
        state.launches.clear()
        with mg.autocast(dtype):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
    return dict(state.launches)


@pytest.mark.parametrize(
    ("layers", "dtype", "most"), [(4, "float32", 220), (4, "bfloat16", 250), (12, "bfloat16", 700)]
)
def test_a_step_launches_few_kernels(layers: int, dtype: str, most: int, simulated: Any) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    found = launches(layers, dtype, simulated)
    assert sum(found.values()) <= most, found
    assert found["attention_forward"] == found["joined_swiglu"] == layers  # what is counted has run
