"""How many kernels a training step launches: they, and not the arithmetic, take the time of a small model on a GPU.

python tests/gpu/test_launches.py       # the table of docs/cuda.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import numpy as np
import pytest
from support.simulated import device

import minigrad as mg
import nn
import optim

OURS = tuple(str(Path(package.__file__ or "").parent) for package in (mg, nn, optim))


def launches(layers: int, dtype: str) -> tuple[dict[str, int], int]:
    """Of the third step of a language model with AdamW and clipping, by their kinds; and calls of our own functions."""
    model = nn.TransformerLM(40, context_length=16, d_model=32, num_layers=layers, num_heads=4, device="cuda")
    optimizer, ids = optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0).integers(0, 40, (2, 17))
    calls = [0]

    def step() -> None:
        device.state.launches.clear()
        with mg.autocast(dtype):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()

    def count(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    step()
    step()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return dict(device.state.launches), calls[0]


@pytest.mark.parametrize(
    ("layers", "dtype", "most"), [(4, "float32", 220), (4, "bfloat16", 250), (12, "bfloat16", 700)]
)
def test_a_step_launches_few_kernels(layers: int, dtype: str, most: int, simulated: Any) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    found, _ = launches(layers, dtype)
    assert sum(found.values()) <= most, found
    assert found["attention_forward"] == found["joined_swiglu"] == layers  # what is counted has run


if __name__ == "__main__":
    with device.installed():
        for layers in (4, 12):
            for dtype in ("float32", "bfloat16"):
                found, calls = launches(layers, dtype)
                print(
                    f"{layers:2} layers, {dtype:9}{sum(found.values()):5} launches, {found['astype']:3} of them casts",
                    end="",
                )
                print(f"{calls:7,} calls of our own functions")
