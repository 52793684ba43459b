"""Rows whose squares leave the range of the dtype, normalised on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.test_range import NORMS, ROWS, check_norm


@pytest.mark.parametrize("size", [1e30, 1e-30])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
@pytest.mark.parametrize("name", NORMS)
def test_normalised_rows_of_any_size(name: str, kernel: bool, eps: float, size: float, gpu: Any) -> None:
    rows = np.multiply(ROWS, [[1.0], [size], [1.0]]).astype(np.float32)
    check_norm(name, rows, eps, kernel, device="cuda")
