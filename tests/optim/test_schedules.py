"""Schedules at every corner by closed form, and what holds of them everywhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrad.errors import ArgumentError
from optim import cosine_schedule, noam_schedule, step_schedule

RATES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)
COUNTS = st.integers(0, 300)


@pytest.mark.parametrize(
    ("step", "warmup", "total", "expected"),
    [
        (0, 10, 110, 0.0),
        (1, 10, 110, 0.1),
        (9, 10, 110, 0.9),
        (10, 10, 110, 1.0),
        (35, 10, 110, 0.2 + 0.4 * (1 + math.sqrt(0.5))),
        (60, 10, 110, 0.6),
        (110, 10, 110, 0.2),
        (10**9, 10, 110, 0.2),
        (0, 0, 100, 1.0),  # no warm-up
        (50, 0, 100, 0.6),
        (0, 0, 0, 0.2),  # nothing at all
        (4, 5, 5, 0.8),  # no cosine: the warm-up, then the minimum
        (5, 5, 5, 0.2),
        (2, 5, 3, 0.4),
        (4, 5, 3, 0.8),
        (5, 5, 3, 0.2),
        (0, 5, 0, 0.0),
    ],
)
def test_cosine_corners(step, warmup, total, expected):
    assert cosine_schedule(step, 1.0, 0.2, warmup, total) == pytest.approx(expected, rel=1e-14)


@given(rates=RATES, warmup=COUNTS, total=COUNTS, step=COUNTS)
def test_cosine_rises_then_falls_within_its_bounds(rates, warmup, total, step):
    low, high = rates
    here, after = (cosine_schedule(s, high, low, warmup, total) for s in (step, step + 1))
    if step < warmup:
        assert here == step / warmup * high
        assert step + 1 == warmup or here <= after
    else:
        assert low <= after <= here <= high
        assert here == (low if step >= total else pytest.approx(here))
        turned = cosine_schedule(total + warmup - step, high, low, warmup, total) if step <= total else None
        if turned is not None:  # the half cosine is point-symmetric about its middle
            assert here + turned == pytest.approx(low + high) or total <= warmup


@pytest.mark.parametrize(
    ("step", "warmup", "expected"),
    [
        (0, 4000, 0.0),
        (1, 4000, 512**-0.5 * 4000**-1.5),
        (2000, 4000, 512**-0.5 * 2000 * 4000**-1.5),
        (4000, 4000, (512 * 4000) ** -0.5),
        (16000, 4000, 0.5 * (512 * 4000) ** -0.5),
        (0, 0, 0.0),
        (1, 0, 512**-0.5),
        (4, 0, 0.5 * 512**-0.5),
        (1, 1, 512**-0.5),
    ],
)
def test_noam_corners(step, warmup, expected):
    assert noam_schedule(step, 512, warmup) == pytest.approx(expected, rel=1e-14)
    assert noam_schedule(step, 512, warmup, factor=2.0) == pytest.approx(2 * expected, rel=1e-14)


@given(d_model=st.integers(1, 4096), warmup=st.integers(1, 5000), step=st.integers(1, 20000))
def test_noam_is_the_smaller_branch(d_model, warmup, step):
    branches = step**-0.5, step * warmup**-1.5
    assert noam_schedule(step, d_model, warmup) == pytest.approx(d_model**-0.5 * min(branches), rel=1e-12)
    assert noam_schedule(step, d_model, warmup) <= noam_schedule(warmup, d_model, warmup) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cosine_schedule(-1, 1.0, 0.1, 5, 10), "step=-1"),
        (lambda: cosine_schedule(1, 1.0, 0.1, -5, 10), "warmup_steps=-5"),
        (lambda: cosine_schedule(1, 1.0, 0.1, 5, math.nan), "total_steps=nan"),
        (lambda: cosine_schedule(1, 0.1, 1.0, 5, 10), "min_lr=1.0, max_lr=0.1"),
        (lambda: cosine_schedule(1, math.inf, 0.1, 5, 10), "max_lr=inf"),
        (lambda: noam_schedule(-1, 512), "step=-1"),
        (lambda: step_schedule(-1, 1.0, 5), "step=-1"),
        (lambda: step_schedule(1, 1.0, 0), "step_size=0"),
        (lambda: step_schedule(1, -1.0, 5), "max_lr=-1.0"),
        (lambda: step_schedule(1, 1.0, 5, -0.5), "gamma=-0.5"),
        (lambda: noam_schedule(1, 0), "d_model=0"),
        (lambda: noam_schedule(1, 512, factor=-1.0), "factor=-1.0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_steps_are_those_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for step in range(10):
        assert step_schedule(step, 0.4, 3, 0.5) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14)
        optimizer.step()
        schedule.step()
