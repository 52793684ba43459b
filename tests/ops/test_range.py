"""Results that fit their dtype, of elements whose squares, sums or powers don't: right, and without a warning.

The oracle is the formula in ``numpy.longdouble``, whose exponents reach to ±16 000.
"""

import numpy as np
import pytest

import minigrad as mg
import nn.functional as F

WIDE = np.longdouble
host_alone = pytest.mark.cpu_only("a GPU doesn't look for a sum or product that left the range: docs/cuda.md")
ORDERS = (2, 3, 0.5, -1, -2, 12)


def norm(x, ord):
    top = abs(x).max(-1, keepdims=True)
    return top * ((abs(x) / top) ** WIDE(ord)).sum(-1, keepdims=True) ** (1 / WIDE(ord))


def off(x):
    return x - x.mean(-1, keepdims=True)


def deviation(x, ddof):
    return np.sqrt((off(x) ** 2).sum(-1, keepdims=True) / (x.shape[-1] - ddof))


def smooth(x):
    """The derivative of a logarithm of a sum of exponentials."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# name: (the operation over the last axis, its value, its gradient), in the widest float there is
FORMULAS = {
    **{
        f"norm {p}": (
            lambda x, p=p: x.norm(p, -1, True),
            lambda x, p=p: norm(x, p),
            lambda x, p=p: np.sign(x) * (abs(x) / norm(x, p)) ** WIDE(p - 1),
        )
        for p in ORDERS
    },
    **{
        f"std {d}": (
            lambda x, d=d: x.std(-1, d, True),
            lambda x, d=d: deviation(x, d),
            lambda x, d=d: off(x) / (x.shape[-1] - d) / deviation(x, d),
        )
        for d in (0, 1)
    },
    "var": (
        lambda x: x.var(-1, keepdims=True),
        lambda x: deviation(x, 0) ** 2,
        lambda x: 2 * off(x) / x.shape[-1],
    ),
    "mean": (lambda x: x.mean(-1, True), lambda x: x.mean(-1, keepdims=True), lambda x: np.ones_like(x) / x.shape[-1]),
    "logsumexp": (
        lambda x: x.logsumexp(-1, True),
        lambda x: x.max(-1, keepdims=True) + np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)),
        smooth,
    ),
}
ROWS = [[3.0, 4.0, 1.5], [-1.0, 1.75, -1.25], [1.0, 1.0, 1.5]]
EXPONENTS = [-0.99, -0.8, -0.55, -0.45, -0.2, 0.0, 0.2, 0.45, 0.55, 0.8, 1.0]  # of the way to the ends of the range


def stored(values, dtype):
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=[host_alone] * (name == "mean" and part == 1))
        for name in FORMULAS
        for part in EXPONENTS
    ],
)
def test_values_and_gradients_over_the_whole_range(name, part, dtype):
    """Rows of ordinary numbers, shifted by a power of two, alone and side by side with rows of ordinary size."""
    info = np.finfo(dtype)
    shift = np.ldexp(1.0, int(part * (info.maxexp - 3 if part > 0 else -info.minexp)))
    op, value, gradient = FORMULAS[name]
    for rows in (np.multiply(ROWS, shift), np.multiply(ROWS, [[shift], [1.0], [1.0]])):
        x = mg.Tensor(stored(rows, dtype), requires_grad=True)
        exact = x.data.astype(WIDE)
        with np.errstate(all="ignore"):
            wanted, slope = value(exact), 4 * gradient(exact)
        fits = abs(wanted) <= info.max
        with np.errstate(all="warn" if fits.all() else "ignore", under="ignore"):
            out = op(x)
            out.backward(np.full(out.shape, 4, dtype))
        # A gradient of a norm is a power, up to the eleventh, of a ratio of two rounded numbers.
        tolerance = {"rtol": 16 * float(info.eps), "atol": 4 * float(info.smallest_subnormal)}
        np.testing.assert_allclose(out.data, stored(wanted, dtype), **tolerance)
        some = fits[:, 0]
        np.testing.assert_allclose(x.grad[some], stored(slope, dtype)[some], **tolerance)


@pytest.mark.parametrize(
    ("dtype", "op", "x", "value", "gradient"),
    [
        (np.float32, lambda x: x.norm(), [3e20, 4e20], 5e20, [0.6, 0.8]),
        (np.float32, lambda x: x.norm(), [3e-30, 4e-30], 5e-30, [0.6, 0.8]),
        (np.float64, lambda x: x.norm(), [3e200, 4e200], 5e200, [0.6, 0.8]),
        (np.float32, lambda x: x.norm(), [[3e20, 0.0], [0.0, 4e20]], 5e20, [[0.6, 0], [0, 0.8]]),
        (np.float32, lambda x: x.norm(axis=0), [3e20, 4e20], 5e20, [0.6, 0.8]),
        (np.float32, lambda x: x.std(), [1e30, 3e30], 1e30, [-0.5, 0.5]),
        (np.float32, lambda x: x.std(), [1e-30, 3e-30], 1e-30, [-0.5, 0.5]),
        (np.float32, lambda x: x.std(), [3e38, -3e38, -3e38], 8**0.5 * 1e38, [2 / 18**0.5, *[-1 / 18**0.5] * 2]),
        *(
            pytest.param(np.float32, op, x, 3e38, gradient, marks=host_alone)
            for op, x, gradient in [
                (lambda x: x.mean(), [3e38, 3e38], [0.5, 0.5]),
                (lambda x: x.mean(where=np.array([1, 0, 1], bool)), [3e38, np.inf, 3e38], [0.5, 0, 0.5]),
            ]
        ),
        (np.float32, lambda x: x.std(where=np.array([1, 0, 1], bool)), [1e30, np.nan, 3e30], 1e30, [-0.5, 0, 0.5]),
        (np.float32, lambda x: x.var(), [1e19, -1e19, *[0.0] * 8], 2e37, [2e18, -2e18, *[0.0] * 8]),
        (np.float32, lambda x: x.logsumexp(), [1e8, 1e8], 1e8, [0.5, 0.5]),
        (np.float32, lambda x: x.logsumexp(), [3e38, -3e38], 3e38, [1, 0]),
    ],
)  # fmt: skip
def test_value_and_gradient(dtype, op, x, value, gradient):
    x = mg.Tensor(np.array(x, dtype), requires_grad=True)
    out = op(x)
    out.backward()
    np.testing.assert_allclose(out.item(), value, 4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(x.grad, gradient, 8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["norm", "std"])
@pytest.mark.parametrize("size", [1e200, 1.0, 1e-200])
def test_second_derivatives_of_any_size(name, size):
    """The gradient doesn't grow with x; its derivative is that of x of ordinary size, over the size."""
    base = np.array([0.5, -1.0, 2.0])

    def curvature(x):
        x = mg.Tensor(x, requires_grad=True)
        (g,) = mg.grad(getattr(x, name)(), x, create_graph=True)
        (h,) = mg.grad((g * [1.0, 2.0, -1.0]).sum(), x)
        return h.data

    np.testing.assert_allclose(curvature(base * size), curvature(base) / size, 1e-13)


def test_zeros_infinities_and_nan_stay_what_they_are():
    x = mg.Tensor([[0.0, 0.0], [np.inf, 1.0], [np.nan, 1.0], [-np.inf, np.inf]], dtype="float32", requires_grad=True)
    for p in (2, 3, 0.5):
        np.testing.assert_array_equal(x.norm(p, 1).data, [0, np.inf, np.nan, np.inf])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(x.std(1).data, [0, np.nan, np.nan, np.nan])
        np.testing.assert_array_equal(x.mean(1).data, [0, np.inf, np.nan, np.nan])


# ---- normalisation --------------------------------------------------------------------------------------------------

NORMS = {
    "rms_norm": lambda x, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + WIDE(eps)),
    "layer_norm": lambda x, eps: off(x) / np.sqrt((off(x) ** 2).mean(-1, keepdims=True) + WIDE(eps)),
}


def pulled_back(name, x, eps, g):
    """The gradient of x for the gradient g of the normalised row."""
    centred, g_centred = (off(x), off(g)) if name == "layer_norm" else (x, g)
    size = np.sqrt((centred**2).mean(-1, keepdims=True) + WIDE(eps))
    n = centred / size
    return (g_centred - n * (g * n).mean(-1, keepdims=True)) / size


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("part", EXPONENTS[1:-1])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NORMS)
def test_normalised_rows_of_any_size(name, dtype, part, eps, kernel):
    info = np.finfo(dtype)
    shift = np.ldexp(1.0, int(part * (info.maxexp - 3 if part > 0 else -info.minexp)))
    for rows in (np.multiply(ROWS, shift), np.multiply(ROWS, [[1.0], [shift], [1.0]])):
        check_norm(name, rows.astype(dtype), eps, kernel)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NORMS)
def test_normalised_rows_at_the_ends_of_the_range(name, dtype, kernel):
    """Centred numbers may be twice the largest there is, and an inverse may be infinite where no eps bounds it."""
    if kernel and dtype == np.float32 and mg.ones(1).device != "cpu":
        pytest.skip("numbers that kernels of a GPU count as 0")
    largest = float(np.finfo(dtype).max)
    far = np.array([[1.0, -1.0, -1.0], [0.9, 0.9, -0.5], [0.0, 0.0, 1.0]]) * largest
    check_norm(name, far.astype(dtype), 1e-5, kernel)
    tiny = np.array([[1.0, -1.0, 3.0]] * 2) * float(np.finfo(dtype).tiny) / 64
    operation = mg.REGISTRY[name] if kernel else mg.REGISTRY[name].definition
    tiny[1] = 1e20, -2e20, 3e20
    out = operation(mg.Tensor(tiny, dtype=dtype), None, mg.ones(3, dtype=dtype), eps=0.0)
    np.testing.assert_allclose(out.data, stored(NORMS[name](tiny.astype(dtype).astype(WIDE), 0), dtype), 1e-6)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(name, bad):
    x = mg.Tensor([[1.0, bad, 2.0], [3.0, 1.0, 2.0]], dtype="float32", requires_grad=True)
    alone = mg.Tensor([[3.0, 1.0, 2.0]], dtype="float32", requires_grad=True)
    weight = mg.ones(3)
    with np.errstate(invalid="ignore"):
        (mg.REGISTRY[name](x, None, weight) ** 2).backward(np.ones((2, 3), np.float32))
    (mg.REGISTRY[name](alone, None, weight) ** 2).backward(np.ones((1, 3), np.float32))
    assert np.isnan(x.grad[0]).any()
    np.testing.assert_allclose(x.grad[1:], alone.grad, rtol=1e-5, atol=1e-6)


ROWS_AT = {  # an operation on rows, and the share of the way to the end of the range at which it takes another way
    "norm": (lambda x: x.norm(2, -1, True), -0.7),
    "norm 3": (lambda x: x.norm(3, -1, True), -0.5),
    "std": (lambda x: x.std(-1, keepdims=True), -0.7),
    "gelu": (mg.REGISTRY["gelu"], 0.6),
    "rms_norm": (mg.REGISTRY["rms_norm"], 0.0),
    "layer_norm": (mg.REGISTRY["layer_norm"], 0.0),
    "layer_norm, large": (mg.REGISTRY["layer_norm"], 1.0),
    "layer_norm, definition": (mg.REGISTRY["layer_norm"].definition, 1.0),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", ROWS_AT)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_before_or_behind_that_is_not_finite_changes_no_other(name, bad, dtype):
    operation, part = ROWS_AT[name]
    size = float(np.finfo(dtype).max) ** part if part else 1.0
    rows = (np.array([[0.9, -0.9, 0.5], [-0.2, 0.5, 0.9]]) * size).astype(dtype)

    def both(x):
        leaf = mg.Tensor(x, requires_grad=True)
        with np.errstate(invalid="ignore"):
            out = operation(leaf)
            out.backward(np.broadcast_to(np.array([1.0, 2.0, -1.0], dtype)[: out.shape[-1]], out.shape))
        return mg.asarray(out).detach().numpy(), mg.asarray(leaf.grad).numpy()

    alone = [both(row[None]) for row in rows]
    for place in (0, 2):
        found = both(np.insert(rows, place, [1.0, bad, 2.0], axis=0))
        for k, part in enumerate(found):
            expected = np.concatenate([pair[k] for pair in alone])
            np.testing.assert_allclose(np.delete(part, place, 0), expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def check_norm(name, rows, eps, kernel, device="cpu"):
    operation = mg.REGISTRY[name] if kernel else mg.REGISTRY[name].definition
    weight = np.array([1.0, 2.0, -1.0], rows.dtype)
    x, w = (mg.Tensor(a, requires_grad=True, device=device) for a in (rows, weight))
    g = np.array([[1.0, -2.0, 0.5]] * 3, rows.dtype)
    out = operation(x, None, w, eps=eps)
    out.backward(mg.asarray(g, device=device).data)
    exact, tiny = rows.astype(WIDE), float(np.finfo(rows.dtype).smallest_subnormal)
    normed = NORMS[name](exact, eps)
    for ours, wanted in (
        (out.numpy(), normed * weight),
        (w.grad, (g * normed).sum(0)),
        (x.grad, pulled_back(name, exact, eps, g * weight)),
    ):
        ours = mg.asarray(ours).numpy()
        size = abs(wanted).max(-1, keepdims=True)  # of the row: a centred number, or an inner product, may cancel
        bound = 32 * float(np.finfo(rows.dtype).eps) * size + 4 * tiny
        assert (abs(ours - stored(wanted, rows.dtype)) <= bound).all()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("part", [*EXPONENTS[1:-1], 1.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_normalised_channels_of_any_size(dtype, part, eps, kernel):
    """Channels of a batch are rows of layer_norm: one of another size, and all; without a warning."""
    info = np.finfo(dtype)
    shift = (
        0.5 * float(info.max) if part == 1 else np.ldexp(1.0, int(part * (info.maxexp if part > 0 else -info.minexp)))
    )
    operation = mg.REGISTRY["normalize_batch"] if kernel else mg.REGISTRY["normalize_batch"].definition
    one, weight = (
        np.multiply([[1.0, -1.0, 1.75, -2.0]] * 3, [[1.0], [shift], [1.0]]),
        np.array([1.0, 2.0, -1.0], dtype),
    )
    g = np.array([[1.0, -2.0, 0.5, 0.25]] * 3, dtype)
    for rows in [one] if part == 1 else [one, np.multiply(ROWS, shift / 8 if part > 0 else shift)]:
        x, w = mg.Tensor(rows.T[:, :, None].astype(dtype), requires_grad=True), mg.Tensor(weight, requires_grad=True)
        up, exact = g[:, : rows.shape[1]], rows.astype(dtype).astype(WIDE)
        with np.errstate(all="warn", under="ignore"):
            y, mean, var = operation(x, w, eps=eps)
            y.backward(up.T[:, :, None])
        normed, slope = NORMS["layer_norm"](exact, eps), pulled_back("layer_norm", exact, eps, up * weight[:, None])
        with np.errstate(over="ignore"):
            wide_var = (off(exact) ** 2).mean(-1).astype(dtype)
        for ours, wanted in (
            (y.data[..., 0].T, normed * weight[:, None]),
            (w.grad[:, None], (up * normed).sum(-1, keepdims=True)),
            (x.grad[..., 0].T, slope),
            (mean.data[:, None], exact.mean(-1, keepdims=True)),
            (var.data[:, None], wide_var[:, None]),
        ):
            size = abs(wanted).max(-1, keepdims=True) if ours is not mean else abs(exact).max(-1, keepdims=True)
            bound = 64 * float(info.eps) * np.where(np.isfinite(size), size, 0) + 64 * float(info.smallest_subnormal)
            with np.errstate(invalid="ignore"):
                fine = (abs(ours - stored(wanted, dtype)) <= bound) | (ours == stored(wanted, dtype))
            assert fine.all()


# ---- sums and products ----------------------------------------------------------------------------------------------


def others(x):
    """For each element the product of the others."""
    return np.stack([np.delete(x, k, -1).prod(-1) for k in range(x.shape[-1])], -1)


@host_alone
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_products_whose_partial_products_leave_the_range(dtype):
    """Factors of any size whose products may still fit, some of them 0; in units of the last place of the result."""
    info, generator = np.finfo(dtype), np.random.default_rng(0)
    eps, most = float(info.eps), int(0.97 * np.log10(info.max))
    for shape in [(40, 2), (40, 3), (40, 8)]:
        factors = (10.0 ** generator.uniform(-most, most, shape) * generator.choice([-1, 1], shape)).astype(dtype)
        factors[::5, -1] = 0
        x, exact = mg.Tensor(factors, requires_grad=True), factors.astype(WIDE)
        g = (10.0 ** generator.uniform(-5, 5, shape)).astype(dtype)
        with np.errstate(over="ignore"):  # of those that don't fit
            product, running = x.prod(-1), x.cumprod(-1)
            (slope,) = mg.grad(product, x, g[:, 0], create_graph=True)
            ones = mg.grad(running[:, -1], x, np.ones(shape[0], dtype))[0]
        wide = g.astype(WIDE)
        for ours, wanted in (
            (product, exact.prod(-1)),
            (running, np.cumprod(exact, -1)),
            (slope, others(exact) * wide[:, :1]),
            (ones, others(exact)),
        ):
            fits = (abs(wanted) < WIDE(info.max) / 4) & (abs(wanted) > info.tiny)
            assert fits.sum() > 10
            error = abs(ours.data.astype(WIDE) - wanted)
            assert (error[fits] <= 4 * eps * abs(wanted)[fits]).all()


@host_alone
def test_products_in_half_precision_and_over_several_axes():
    x = mg.Tensor(np.full((2, 4, 3), 1e-30, np.float32), requires_grad=True)
    x.data[:, 2:] = 1e30
    x.prod((1, 2), keepdims=True).sum().backward()
    np.testing.assert_allclose(x.prod((1, 2)).data, [1, 1], rtol=1e-5)
    np.testing.assert_allclose(x.grad, 1 / x.data.astype(np.float64), rtol=1e-5)
    half = mg.Tensor([300.0, 300.0, 0.003, 0.003], dtype="float16", requires_grad=True)
    half.prod().backward()
    np.testing.assert_allclose(half.grad, 0.81 / half.data.astype(float), rtol=2e-3)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "definition"])
def test_means_of_losses_whose_sum_leaves_the_range(kernel):
    operation = mg.REGISTRY["cross_entropy"] if kernel else mg.REGISTRY["cross_entropy"].definition
    x = mg.Tensor([[-3e38, 0.0], [0.0, -2e38]], dtype="float32", requires_grad=True)
    loss = operation(x, np.array([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(2.5e38, rel=1e-6)
    np.testing.assert_allclose(x.grad, [[-0.5, 0.5], [0.5, -0.5]])


@host_alone
def test_sums_whose_partial_sums_leave_the_range():
    rows = np.array([[3e38, 3e38, -3e38, 1.0], [1e-40, 3e-40, 0, 0], [1.0, np.inf, 2.0, 3.0]], np.float32)
    x = mg.Tensor(rows, requires_grad=True)
    np.testing.assert_array_equal(x.sum(1).data, rows.astype(WIDE).sum(1).astype(np.float32))
    np.testing.assert_array_equal(x.mean(1).data, (rows.astype(WIDE).sum(1) / 4).astype(np.float32))
    assert x[0].sum().item() == np.float32(3e38)
    with pytest.warns(RuntimeWarning, match="overflow"):
        assert x[0, :2].sum().item() == np.inf
        np.testing.assert_array_equal(x[0].cumsum().data, np.float32([3e38, np.inf, 3e38, 3e38]))


# ---- quotients, which stay the same where both parts are multiplied by a power of two --------------------------------

QUOTIENTS = {  # of arrays x and y; the results of x · 2^i and y · 2^j are those of x and y, times 2^i for the average
    "average": lambda x, y, power: mg.average(x, 1, abs(y)) / power,
    "average of all": lambda x, y, power: mg.average(x, weights=y) / power,
    "corrcoef": lambda x, y, power: mg.corrcoef(mg.concatenate([x, y])),
    "corrcoef of columns": lambda x, y, power: mg.corrcoef(mg.concatenate([x, y]).T, rowvar=False),
    "corrcoef of a vector": lambda x, y, power: mg.corrcoef(x[0]) + mg.corrcoef(y[1]),
    "cosine_similarity": lambda x, y, power: F.cosine_similarity(x, y, eps=0.0),
    "cosine_embedding_loss": lambda x, y, power: F.cosine_embedding_loss(x, y, np.array([1, -1], x.dtype), -1.0),
}


@host_alone
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_whose_parts_leave_the_range(name, dtype):
    rows = np.array([[3.0, 4.0, 1.5], [-1.0, 1.75, -1.25]]), np.array([[1.0, -2.0, 2.5], [0.5, 3.0, 1.0]])
    far = 2.0 ** (np.finfo(dtype).maxexp * 3 // 4)
    least = 1.0 if name == "cosine_embedding_loss" else 1 / far  # it has an eps of its own

    def result(powers):
        x, y = (
            mg.Tensor((row * power).astype(dtype), requires_grad=True) for row, power in zip(rows, powers, strict=True)
        )
        with np.errstate(all="raise", under="ignore"):
            out = QUOTIENTS[name](x, y, dtype(powers[0]))
            gradients = mg.grad(out, [x, y], np.cos(np.arange(out.size)).reshape(out.shape).astype(dtype))
        return [out.data, *(g.data * dtype(power) for g, power in zip(gradients, powers, strict=True))]

    plain = result((1.0, 1.0))
    for powers in [(far, far), (far, 1.0), (1.0, far), (least, least), (least, far), (far, least), (1.0, least)]:
        for found, wanted in zip(result(powers), plain, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=2e-6)


def test_a_square_over_a_variance_that_fits():
    x, v = (mg.Tensor(np.array([n], np.float32), requires_grad=True) for n in (1e20, 1e30))
    loss = F.gaussian_nll_loss(x, np.zeros(1, np.float32), v)
    loss.backward()
    np.testing.assert_allclose(loss.item(), 0.5 * (np.log(1e30) + 1e10), rtol=1e-6)
    np.testing.assert_allclose(x.grad, 1e-10, rtol=1e-6)
    np.testing.assert_allclose(v.grad, 0.5 * (1e-30 - 1e-20), rtol=1e-6)
