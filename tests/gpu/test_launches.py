"""How many kernels a training step launches: they, and not the arithmetic, take the time of a small model on a GPU.

python tests/gpu/test_launches.py       # the table of docs/cuda.md
"""

from __future__ import annotations

import itertools
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


def launches(layers: int, dtype: str, captured: bool = False) -> tuple[dict[str, int], int]:
    """Of the third step of a language model with AdamW and clipping, by their kinds; and calls of our own functions."""
    model = nn.TransformerLM(40, context_length=16, d_model=32, num_layers=layers, num_heads=4, device="cuda")
    optimizer, ids = optim.AdamW(model.parameters(), lr=1e-3), np.random.default_rng(0).integers(0, 40, (2, 17))
    calls = [0]

    def step(ids: Any) -> Any:
        with mg.autocast(dtype):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def count(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    run = mg.cuda.graph(step) if captured else step
    run(ids)
    run(ids)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        device.state.launches.clear()
        run(ids)
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
    attention = "attention_mma_forward" if dtype == "bfloat16" else "attention_forward"
    assert found[attention] == found["joined_swiglu"] == layers  # what is counted has run


@pytest.mark.parametrize("layers", [2, 4])
def test_a_replay_launches_as_much_for_any_number_of_layers(layers: int, simulated: Any) -> None:
    found, calls = launches(layers, "float32", captured=True)
    assert found == {"upload": 1, "setitem": 1, "graph": 1, "copy": 1} and calls < 1000


if __name__ == "__main__":
    with device.installed():
        for layers, dtype, captured in itertools.product((4, 12), ("float32", "bfloat16"), (False, True)):
            found, calls = launches(layers, dtype, captured)
            print(
                f"{layers:2} layers, {dtype + (' captured' if captured else ''):18}{sum(found.values()):5} launches, "
                f"{found.get('astype', 0):3} of them casts{calls:7,} calls of our own functions"
            )
