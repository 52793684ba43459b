"""Every optimizer follows its PyTorch twin through a noisy quadratic, weights and moments."""

import inspect

import numpy as np
import pytest
import torch

import minigrad as mg
import optim

SHAPES = [(), (7,), (2, 3, 4), (5, 3), (3, 0)]
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}  # of the largest entry, or of 1 (the weights' scale)
CASES = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-3}),
    ("AdamW", {"lr": 0.01, "betas": (0.0, 0.0)}),
]


def relative_error(ours, theirs):
    theirs = theirs.detach().numpy()
    return np.abs(ours - theirs).max(initial=0) / max(1, np.abs(theirs).max(initial=0))


def compare(optimizer, twin, ours, theirs, dtype):
    for p, t, state in zip(ours, theirs, optimizer.state, strict=True):
        assert p.dtype == dtype
        assert relative_error(p.data, t) <= TOLERANCE[dtype]
        for moment, value in state.items():
            if moment != "step":
                assert value.dtype == dtype
                assert relative_error(value, twin.state[t][moment]) <= TOLERANCE[dtype]
            elif "step" in twin.state[t]:
                assert value == twin.state[t]["step"]


@pytest.mark.parametrize(
    ("name", "options", "dtype", "steps"),
    [(*case, dtype, 1000) for case in (CASES[4], CASES[6], CASES[8]) for dtype in TOLERANCE]
    + [(*case, "float64", 100) for case in CASES],
)
def test_follows_torch(name, options, dtype, steps):
    rng = np.random.default_rng(0)
    start = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    start.append(np.asfortranarray(rng.standard_normal((6, 4)).astype(dtype))[::2])  # neither C nor F order
    ours = [mg.asarray(x) for x in start]
    theirs = [torch.tensor(x.copy(), requires_grad=True) for x in start]
    for p in ours:
        p.requires_grad = True
    half = len(ours) // 2
    late = {"lr": 0.5 * options.get("lr", 1e-3), "weight_decay": 0.05}  # the second group has options of its own
    optimizer = getattr(optim, name)([{"params": ours[:half]}, {"params": ours[half:], **late}], **options)
    twin = getattr(torch.optim, name)([{"params": theirs[:half]}, {"params": theirs[half:], **late}], **options)
    for step in range(steps):
        for i, (p, t) in enumerate(zip(ours, theirs, strict=True)):
            noise = np.asarray(1 + 0.1 * rng.standard_normal(p.shape)).astype(dtype)
            p.grad, t.grad = np.asarray(p.data - noise), t.detach() - torch.from_numpy(noise)
            if i == 1 and step % 3 == 0:
                p.grad = t.grad = None  # skipped: its step count falls behind the others'
        for group, other in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group["lr"] = other["lr"] = other["lr"] * 0.999
        optimizer.step()
        twin.step()
        if step in (0, 1, 9, steps - 1):
            compare(optimizer, twin, ours, theirs, dtype)


def test_options_stand_in_torchs_order() -> None:
    for name in ("SGD", "Adam", "AdamW"):
        names = [list(inspect.signature(getattr(package, name)).parameters) for package in (optim, torch.optim)]
        assert names[0] == names[1][: len(names[0])]
