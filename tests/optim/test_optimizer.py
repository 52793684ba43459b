"""Groups and options, skipped and refused parameters, half precision, threads, and state that survives a save."""

import copy
import json
import math

import numpy as np
import pytest

import minigrad as mg
import optim
from minigrad.backend import as_dtype, is_array
from minigrad.errors import (
    ArgumentError,
    DTypeError,
    GraphError,
    MiniGradError,
    NonFiniteError,
    ShapeError,
    StateError,
)
from minigrad.machine import parallel
from optim.tiles import TILE

ALL = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 0.1}),
    (optim.AdamW, {"lr": 0.1}),
]


def parameters(*shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return [mg.Tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True) for shape in shapes]


def set_gradients(params, seed=1, scale=1.0):
    rng = np.random.default_rng(seed)
    for p in params:
        p.grad = np.asarray(scale * rng.standard_normal(p.shape)).astype(p.dtype)


def train(optimizer, params, steps, seed=1):
    for step in range(steps):
        set_gradients(params, seed=seed + step)
        optimizer.step()


def same_bits(xs, ys):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(xs, ys, strict=True)
    )


# ---- groups and options ---------------------------------------------------------------------------------------------


def test_groups_have_torch_shape_and_options_of_their_own():
    a, b, c = parameters((2,), (3,), (4,))
    optimizer = optim.SGD([{"params": [a]}, {"params": (p for p in [b]), "lr": 0.01}], lr=0.1)
    optimizer.add_param_group({"params": [c], "lr": 1})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 1.0]
    assert [group["params"] for group in optimizer.param_groups] == [[a], [b], [c]]
    assert {"lr", "momentum", "weight_decay", "nesterov", "dampening", "params"} == optimizer.param_groups[0].keys()
    before = [p.data.copy() for p in (a, b, c)]
    for p in (a, b, c):
        p.grad = np.ones(p.shape)
    optimizer.step()
    for p, old, lr in zip((a, b, c), before, (0.1, 0.01, 1.0), strict=True):
        np.testing.assert_array_equal(p.data, old - lr)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_numpy_learning_rate_is_that_number(make, options):
    weights = []
    for number in (float, np.float64):  # which, unlike a Python float, would make float32 arrays float64
        (p,) = parameters((200,), dtype="float32")
        optimizer = make([p], **options)
        optimizer.param_groups[0]["lr"] = number(0.1)
        train(optimizer, [p], 3)
        weights.append(p.data)
    assert same_bits(weights[:1], weights[1:])
    json.dumps(optimizer.state_dict()["param_groups"])
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ArgumentError, match="lr=nan"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "options"),
    [(optim.AdamW, {name: value}) for name in ("lr", "eps", "weight_decay") for value in (-1, math.nan, math.inf, "1")]
    + [(optim.Adam, {"betas": betas}) for betas in ((1.0, 0.9), (0.9, -0.1), 0.9, (0.9,), ("a", "b"), (math.nan, 0))]
    + [(optim.SGD, {"momentum": -0.1}), (optim.SGD, {"dampening": math.nan}), (optim.SGD, {"lr": True})]
    + [(optim.SGD, {"nesterov": True}), (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1})],
)
def test_options_out_of_range_are_refused(make, options):
    with pytest.raises(ArgumentError, match=r"Expected: .*\nGot: .*"):
        make(parameters((2,)), **options)
    name = next(iter(options))
    with pytest.raises(ArgumentError, match=name if name != "nesterov" else "momentum"):
        make([{"params": parameters((2,)), **options}])


class Model:
    def parameters(self):
        return []


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda p: [], ArgumentError, "an empty list"),
        (lambda p: iter(()), ArgumentError, "an empty list"),
        (lambda p: [{"params": []}], ArgumentError, "an empty list"),
        (lambda p: p, DTypeError, r"Tensor\nHint: put a single parameter into a list"),
        (lambda p: {p}, DTypeError, r"set\nHint: a set has no order"),
        (lambda p: [p, 3.0], DTypeError, "3.0, of type float at position 1"),
        (lambda p: [np.ones(2)], DTypeError, "ndarray at position 0"),
        (lambda p: {"w": p}, DTypeError, "'w', of type str at position 0"),
        (lambda p: Model(), DTypeError, r"pass model.parameters\(\)"),
        (lambda p: [p, p], ArgumentError, "twice"),
        (lambda p: [{"params": [p]}, {"params": [p]}], ArgumentError, "twice"),
        (lambda p: [{"params": [p]}, p], ArgumentError, "a dict with 'params'"),
        (lambda p: [{"lr": 0.1}], ArgumentError, "a dict with 'params'"),
        (lambda p: [{"params": [p], "weight_decy": 0.1}], ArgumentError, "weight_decy"),
        (lambda p: [p * 2], GraphError, "the result of 'multiply'"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params, error, message):
    (p,) = parameters((2,))
    with pytest.raises(error, match=message):
        optim.AdamW(params(p))


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    a, b = parameters((2,), (2,))
    optimizer = optim.SGD([a])
    for group in ({"params": [b, a]}, {"params": [b], "lr": -1.0}):
        with pytest.raises(ArgumentError):
            optimizer.add_param_group(group)
    optimizer.add_param_group({"params": [b]})
    assert len(optimizer.param_groups) == len(optimizer.state) == 2


def test_decay_groups_decay_matrices_only():
    matrix, vector, scalar, cube = parameters((2, 3), (3,), (), (2, 2, 2))
    named = [("embedding", matrix), ("gain", vector), ("scale", scalar), ("cube", cube)]
    groups = optim.decay_groups((pair for pair in named), 0.1)
    assert groups == [
        {"params": [matrix, cube], "weight_decay": 0.1},
        {"params": [vector, scalar], "weight_decay": 0.0},
    ]
    assert optim.decay_groups(named[1:2], 0.1) == [{"params": [vector], "weight_decay": 0.0}]
    optimizer = optim.AdamW(groups, lr=0.1)
    before = [p.data.copy() for _, p in named]
    for _, p in named:
        p.grad = np.zeros(p.shape)
    optimizer.step()
    for (_, p), old in zip(named, before, strict=True):
        np.testing.assert_array_equal(p.data, old * (1 - 0.1 * 0.1) if p.ndim >= 2 else old)
    with pytest.raises(DTypeError, match="named_parameters"):
        optim.decay_groups([matrix], 0.1)


# ---- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "options"), ALL)
def test_frozen_parameters_and_those_without_gradient_are_skipped(make, options):
    frozen, missing, moved = params = parameters((3,), (3,), (3,))
    optimizer = make(params, **options)
    set_gradients(params)
    frozen.requires_grad, missing.grad = False, None
    before = [p.data.copy() for p in params]
    optimizer.step()
    assert same_bits([frozen.data, missing.data], before[:2])
    assert (moved.data != before[2]).all()
    assert optimizer.state[:2] == [{}, {}]


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_zero_gradient_without_decay_leaves_fresh_weights_exact(make, options):
    params = parameters((3,), (2, 2), dtype="float32")
    optimizer = make(params, **options, weight_decay=0.0)
    before = [p.data.copy() for p in params]
    set_gradients(params, scale=0.0)
    optimizer.step()
    assert same_bits([p.data for p in params], before)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_step_is_in_place_and_leaves_the_gradient_alone(make, options):
    (p,) = parameters((40, 3))
    data = p.data
    p.grad = np.broadcast_to(np.float64(2.0), p.shape)  # read-only, as a borrowed gradient may be
    make([p], **options).step()
    assert p.data is data or np.shares_memory(p.data, data)
    assert (p.grad == 2).all()


def test_a_graph_recorded_before_a_step_is_stale_after_it():
    (x,) = parameters((3,))
    x.name = "weight"
    y = (x * x).sum()
    x.grad = np.ones(3)
    optim.SGD([x]).step()
    with pytest.raises(GraphError, match="weight"):
        y.backward()


@pytest.mark.cpu_only("a read-only array of NumPy's")
def test_gradients_and_parameters_that_do_not_fit_are_refused_before_anything_moves():
    params = parameters((2,), (3,))
    optimizer = optim.AdamW(params)
    before = [p.data.copy() for p in params]
    set_gradients(params)
    params[1].data.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"parameter 1 of shape \(3,\), read-only"):
        optimizer.step()
    assert same_bits([p.data for p in params], before)
    assert optimizer.state == [{}, {}]


def test_zero_grad():
    a, b = parameters((2,), (3,))
    optimizer = optim.SGD([a, b])
    a.grad = np.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert (a.grad == 0).all() and b.grad is None
    optimizer.zero_grad()
    assert a.grad is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("make", "options"), ALL)
@pytest.mark.cpu_only("threads of the CPU")
def test_the_same_bits_on_any_number_of_threads_and_any_tiles(make, options, dtype, monkeypatch):
    def run(threads, tile):
        parallel.set_num_threads(threads)
        monkeypatch.setattr("optim.tiles.TILE", tile)
        params = parameters((700, 500), (3,), (5, 70000), dtype=dtype)
        train(make(params, **options), params, 3)
        return [p.data for p in params]

    before = parallel.get_num_threads()
    try:
        assert same_bits(run(1, 128 * 1024), run(2, 128 * 1024))
        assert same_bits(run(1, 128 * 1024), run(2, 70 * 1024))
    finally:
        parallel.set_num_threads(before)


# ---- half precision -------------------------------------------------------------------------------------------------


def test_half_precision_adam_keeps_its_state_in_float32():
    p = mg.Tensor(np.array([1.0], "float16"), requires_grad=True)
    optimizer = optim.Adam([p], lr=1e-3)
    p.grad = np.array([1e-4], "float16")
    optimizer.step()
    gradient = float(np.float16(1e-4))
    assert {k: v.dtype for k, v in optimizer.state[0].items() if k != "step"} == dict.fromkeys(
        ["exp_avg", "exp_avg_sq", "master"], np.float32
    )
    np.testing.assert_allclose(optimizer.state[0]["exp_avg_sq"], 1e-3 * gradient**2, rtol=1e-5)
    np.testing.assert_allclose(1 - optimizer.state[0]["master"], 1e-3 * gradient / (gradient + 1e-8), rtol=1e-4)
    assert p.dtype == np.float16
    assert float(p.data[0]) == 0.9990234375
    for _ in range(2000):
        optimizer.step()
    assert np.isfinite(p.data).all()
    assert float(p.data[0]) == pytest.approx(1 - 2001e-3, abs=1e-3)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_half_precision_follows_float32_through_updates_too_small_for_it(make, options):
    options = {**options, "lr": 1e-5}
    half = [mg.Tensor(np.ones(shape, "float16"), requires_grad=True) for shape in ((3, 2), ())]
    full = [mg.Tensor(np.ones(shape, "float32"), requires_grad=True) for shape in ((3, 2), ())]
    optimizer, other = make(half, **options), make(full, **options)
    for _ in range(300):
        for p in (*half, *full):
            p.grad = np.ones(p.shape, p.dtype)
        optimizer.step()
        other.step()
    assert all((p.data < 1).all() for p in half)
    assert same_bits([p.data for p in half], [p.data.astype("float16") for p in full])


def test_half_precision_master_follows_an_assignment():
    p = mg.Tensor(np.ones(4, "float16"), requires_grad=True)
    optimizer = optim.SGD([p], lr=1e-5)
    p.grad = np.ones(4, "float16")
    optimizer.step()
    p.data[:2] = 3.0
    optimizer.step()
    np.testing.assert_allclose(optimizer.state[0]["master"], [3 - 1e-5, 3 - 1e-5, 1 - 2e-5, 1 - 2e-5], rtol=1e-6)
    np.testing.assert_array_equal(p.data, np.array([3, 3, 1, 1], "float16"))


# ---- saving and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_run_continued_from_its_state_dict_is_the_same_run(make, options, dtype, tmp_path):
    shapes = [(3, 2), (), (4,)]

    def build(seed):
        params = parameters(*shapes, dtype=dtype, seed=seed)
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}]
        return params, make(groups, **options)

    params, optimizer = build(seed=0)
    params[2].requires_grad = False
    train(optimizer, params, 3)
    optimizer.param_groups[1]["lr"] = 0.05
    saved = optimizer.state_dict()
    weights = [p.data.copy() for p in params]
    assert all(isinstance(key, str) and is_array(value) for key, value in saved["state"].items())
    mg.save(tmp_path / "optimizer.safetensors", saved["state"])
    groups = json.loads(json.dumps(saved["param_groups"]))
    from_files = {"state": mg.load(tmp_path / "optimizer.safetensors"), "param_groups": groups}
    train(optimizer, params, 3, seed=9)  # must not reach into what was saved

    others, resumed = build(seed=5)
    others[2].requires_grad = False
    for p, w in zip(others, weights, strict=True):
        p.data = w.copy()
    resumed.load_state_dict(from_files)
    again = resumed.state_dict()
    assert again["param_groups"] == saved["param_groups"]
    assert again["state"].keys() == saved["state"].keys()
    assert same_bits(again["state"].values(), [saved["state"][key] for key in again["state"]])
    train(resumed, others, 3, seed=9)
    assert same_bits([p.data for p in others], [p.data for p in params])
    assert same_bits(again["state"].values(), [from_files["state"][key] for key in again["state"]])  # copied


def test_a_deep_copy_goes_on_by_itself():
    params = parameters((3,), (2, 2))
    optimizer = optim.AdamW(params)
    train(optimizer, params, 2)
    twin = copy.deepcopy(optimizer)
    copies = [p for group in twin.param_groups for p in group["params"]]
    train(optimizer, params, 2)
    train(twin, copies, 2)
    assert same_bits([p.data for p in params], [p.data for p in copies])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("state"), "'state' and 'param_groups'"),
        (lambda s: s["param_groups"].pop(), r"groups of \[1, 2\] parameters\nGot: groups of \[1\]"),
        (lambda s: s["param_groups"][1]["params"].pop(), r"groups of \[1, 1\]"),
        (lambda s: s["param_groups"][0].pop("betas"), "betas"),
        (lambda s: s["param_groups"][0].update(lr=-1), "lr=-1"),
        (lambda s: s["state"].update({"0.exp_avg": np.zeros((2, 3))}), r"shape \(3, 2\) for '0.exp_avg'"),
        (lambda s: s["state"].update({"3.exp_avg": np.zeros(2)}), "3.exp_avg"),
        (lambda s: s["state"].update({"0.velocity": np.zeros((3, 2))}), "0.velocity"),
        (lambda s: s["state"].update({0: {}}), "names such as"),
        (lambda s: s["state"].pop("0.exp_avg_sq"), "exp_avg_sq"),
        (lambda s: s["state"].pop("0.step"), "step"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(change, message):
    params = parameters((3, 2), (2,), (2,))
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    train(optimizer, params, 2)
    before, bad = optimizer.state_dict(), optimizer.state_dict()
    change(bad)
    bad.get("param_groups", [{}])[-1]["lr"] = 0.5
    with pytest.raises(MiniGradError, match=message) as caught:
        optimizer.load_state_dict(bad)
    assert isinstance(caught.value, StateError | ArgumentError)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert same_bits(after["state"].values(), before["state"].values())


def test_repr_shows_groups():
    optimizer = optim.SGD(parameters((2, 3), (4,)), lr=0.5)
    assert "SGD(" in repr(optimizer) and "2 parameters, 10 entries: lr=0.5" in repr(optimizer)


def test_what_is_no_gradient_of_the_parameter_is_refused_where_it_is_assigned():
    (p,) = parameters((3,))
    with pytest.raises(ShapeError, match=r"a gradient of shape \(3,\)\nGot: shape \(2,\)"):
        p.grad = np.ones(2)
    with pytest.raises(
        DTypeError, match=r"a plain array .*\nGot: a float64 tensor of shape \(3,\)\nHint: assign g.data"
    ):
        p.grad = mg.Tensor([1.0, 1.0, 1.0])
    assert p.grad is None


# ---- gradients whose squares leave the range of the dtype -----------------------------------------------------------


def adam_in_float64(start, gradients, lr, eps, decay):
    """AdamW's weights by the formulas of its docstring."""
    w, m, v = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        g = g.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = (1 - lr * decay) * w - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
    return w


out_of_range = pytest.mark.cpu_only("a GPU doesn't look for squares that float32 can't hold: docs/cuda.md")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "eps"),
    [*(pytest.param(*c, marks=out_of_range) for c in [(1e25, 1e-8), (3e38, 1e-8), (1e-23, 0.0), (1e-37, 0.0)]), (1, 0)],
)
def test_adam_moves_by_huge_and_tiny_gradients(dtype, size, eps):
    """Right also in later steps, beside entries of ordinary size, in many tiles, and after saving and loading."""
    rng = np.random.default_rng(0)
    dtype = as_dtype(dtype)
    start = rng.normal(size=(3, TILE)).astype(dtype)
    gradients = [rng.uniform(0.5, 1, (3, TILE)) * np.where(np.arange(3)[:, None] == 1, size, 1) for _ in range(4)]
    gradients = [(g * (-1) ** k).astype(dtype) for k, g in enumerate(gradients)]
    w = mg.Tensor(start, requires_grad=True)
    optimizer = optim.AdamW([w], lr=0.1, eps=eps)
    for k, g in enumerate(gradients):
        w.grad = g.copy()
        optimizer.step()
        if k == 1:
            saved = optimizer.state_dict()
            optimizer = optim.AdamW([w], lr=0.1, eps=eps)
            optimizer.load_state_dict(saved)
    tolerance = 1e-5 if dtype == np.float32 else 2.0**-7
    wanted = adam_in_float64(start, gradients, 0.1, eps, 0.01)
    np.testing.assert_allclose(w.data.astype(float), wanted, tolerance, tolerance)
    wide = size in (1e25, 3e38, 1e-23, 1e-37)
    assert optimizer.state[0]["exp_avg_sq"].dtype == (np.float64 if wide else np.float32)


@out_of_range
def test_adam_names_the_parameter_whose_squares_no_dtype_holds():
    x = mg.Tensor([1.0, 1.0], requires_grad=True)
    x.name = "scale"
    x.grad = np.array([1e200, 1.0])
    with pytest.raises(NonFiniteError, match="scale"):
        optim.Adam([x]).step()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_long_doubles_and_other_byte_orders_move_as_float64(kind):
    moved = []
    for dtype in (np.float64, np.longdouble, ">f8"):
        p = mg.Tensor(np.array([1.0, 2.0], dtype), requires_grad=True)
        optimizer = kind([p], lr=0.1)
        for _ in range(3):
            p.grad = np.array([3.0, -4.0], dtype)
            optim.clip_grad_norm([p], 1.0)
            optimizer.step()
        moved.append(np.asarray(p.data, np.float64))
    np.testing.assert_allclose(moved[1:], [moved[0]] * 2, 1e-14)
