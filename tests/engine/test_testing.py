"""The tester tested: right derivatives pass, and every rule that is wrong by a thousandth is caught and named."""

import functools

import numpy as np
import pytest
from support.cases import FINITE, opened, over

import minigrad as mg
from minigrad.backend import array_module, array_of
from minigrad.engine.core import Primitive, SequencePrimitive
from minigrad.engine.fused import Fused
from minigrad.errors import CallError, DTypeError, GradientError
from minigrad.testing import sample_inputs

RNG = np.random.default_rng(0)

# ---- right ones pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [mg.gradcheck, mg.gradgradcheck])
@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda x: mg.sin(x) * x, RNG.normal(size=1000).astype(np.float32)),  # lifted to float64
        (lambda x: mg.sin(x) * x, mg.Tensor(RNG.normal(size=(2, 3)), requires_grad=True, dtype="float16")),
        (lambda x: mg.sin(x) * x, np.array(0.5)),
        (lambda x: mg.sin(x) * x, np.zeros((0, 3))),
        (lambda x: (mg.sin(x) * x).mean(), RNG.normal(size=5000)),
        (lambda x: (mg.sin(x), [mg.argmax(x), x @ x]), [RNG.normal(size=4)]),
        (lambda x, n, y: x**n * y, (RNG.uniform(1, 2, 4), 3, RNG.normal(size=(2, 1)))),
        (lambda x, unused: x * x, (RNG.normal(size=4), RNG.normal(size=4))),
        (lambda x: mg.exp(x / 1e8), np.array([1e8, -2e8])),  # the step grows with the input
    ],
    ids=[
        "float32",
        "float16",
        "scalar",
        "empty",
        "large",
        "several results",
        "several inputs",
        "unused",
        "big numbers",
    ],
)
def test_right_derivatives_pass(check, fn, inputs):
    assert check(fn, inputs) is True


def test_only_tensors_that_require_a_gradient_are_checked_if_there_are_any():
    x, y = mg.Tensor([1.0, 2.0], requires_grad=True), mg.Tensor([3.0, 4.0])
    assert mg.gradcheck(lambda x, y: x * y.detach(), (x, y))
    with pytest.raises(GradientError, match=r"argument 1 \('y'\)"):
        mg.gradcheck(lambda x, y: x * y.detach(), (x.data, y))
    assert x.grad is None
    assert x.requires_grad
    assert not y.requires_grad


# ---- wrong ones are caught and named --------------------------------------------------------------------------------


def off_by_a_thousandth(gradient):
    """The gradient with its largest entry, and no other, multiplied by 1.001."""
    array = np.array(gradient)
    place = np.unravel_index(np.argmax(np.abs(array)), array.shape)
    array[place] *= 1.001
    return array


def mutated(rule, joint, k):
    """``rule`` with the gradient of its k-th argument off."""

    @functools.wraps(rule)  # so that the signature, which says what to keep, stays
    def wrong(*args):
        found = rule(*args)
        if not joint:
            return off_by_a_thousandth(found)
        return [off_by_a_thousandth(g) if i == k else g for i, g in enumerate(found)]

    return wrong


FLAT = {("copysign", 1)}  # arguments on which a result doesn't depend but by jumps
CONSTANT = {"ceil", "floor", "gammasgn", "round", "sign", "trunc"}  # a thousandth of nothing is nothing
MUTABLE = [
    c for c in FINITE if c.number == 0 and isinstance(c.operation, Primitive) and c.operation.name not in CONSTANT
]


def has_kernel(operation, args, kwargs):
    """Whether a kernel takes these arguments, rather than that the definition runs."""
    arrays = map(array_of, operation._bind(tuple(args), kwargs))
    return array_module(*args) is np or (operation.gpu is not None and operation.gpu.fits(*arrays))


@over(MUTABLE)
def test_every_rule_is_caught_when_one_entry_is_off(case):
    """Each rule of each primitive and kernel in turn gets one gradient entry wrong by 0.1 %."""
    operation = case.operation
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    if isinstance(operation, Fused) and not has_kernel(operation, join([mg.asarray(a) for a in arrays]), kwargs):
        pytest.skip("no kernel on this device takes float64: the definition runs, whose parts are tested")
    rules = list(operation.rules)
    floating = [
        operation.position[name] for name, value in zip(operation.position, args, strict=False) if opened([value])[0]
    ]
    caught = 0
    for number, declared in enumerate(rules):
        joint = declared.joint or isinstance(operation, SequencePrimitive)
        for k, position in enumerate(declared.positions):
            if position not in floating or (operation.name, position) in FLAT:
                continue
            operation.rules[number] = declared._replace(rule=mutated(declared.rule, joint, k))
            operation.plans.clear()
            try:
                with pytest.raises(GradientError, match=r"off by 0\.1") as error:
                    mg.gradcheck(lambda *tensors: operation(*join(tensors), **kwargs), arrays)
            finally:
                operation.rules[:] = rules
                operation.plans.clear()
            assert f"by argument {floating.index(position)}" in str(error.value)
            caught += 1
    assert caught == sum((operation.name, position) not in FLAT for position in floating)


WRONG = {
    "add": [(lambda g: g, lambda g: 1.001 * g), "y"],
    "multiply": [(lambda g, y: g * y * 0.999, lambda g, x: g * x), "x"],
    "divide": [(lambda g, y: g / y, lambda g, y, x: -1.001 * g * x / (y * y)), "y"],
    "power": [(lambda g, x, y: g * y * x ** (y - 1.001), lambda g, x, out: g * out * np.log(x)), "x"],
    "square": [(lambda g, x: g * 2.002 * x,), "x"],
    "reciprocal": [(lambda g, out: -g * out**2 * 1.001,), "x"],
    "sqrt": [(lambda g, out: g / (1.998 * out),), "x"],
    "exp": [(lambda g, out: g * (out + 0.001),), "x"],
    "expm1": [(lambda g, out: g * (out + 1.001),), "x"],
    "exp2": [(lambda g, out: g * out * 0.694,), "x"],
    "log": [(lambda g, x: g / (x + 0.001),), "x"],
    "log10": [(lambda g, x: g / (x * 2.3),), "x"],
    "sigmoid": [(lambda g, out: g * out * (1.001 - out),), "x"],
    "tanh": [(lambda g, out: g * (1 - 1.001 * out * out),), "x"],
    "sin": [(lambda g, x: g * np.cos(1.001 * x),), "x"],
    "cos": [(lambda g, x: -g * np.sin(x) - 0.001 * g,), "x"],
    "tan": [(lambda g, out: g * (1.001 + out * out),), "x"],
    "arcsin": [(lambda g, x: g / np.sqrt(1.001 - x * x),), "x"],
    "arctan": [(lambda g, x: g / (1.001 + x * x),), "x"],
    "arctan2": [
        (lambda g, y, x: g * x / (x * x + y * y), lambda g, y, x: -1.001 * g * y / (x * x + y * y)),
        "x",
    ],
    "erf": [(lambda g, x: g * 1.1273 * np.exp(-x * x),), "x"],
    "logaddexp": [
        (lambda g, x, out: g * np.exp(x - out), lambda g, x, out: 1.001 * g * (1 - np.exp(x - out))),
        "y",
    ],
    "maximum": [(lambda g, x, y: g * (x > y), lambda g, x, y: g * (y > x) * 0.999), "y"],
    "matmul": [(lambda g, y: np.outer(g, y).reshape(-1)[:3] * 1.001, lambda g, x: g * x), "x"],
    "sum": [(lambda g, x_shape: np.broadcast_to(1.001 * g, x_shape),), "x"],
    "mean": [(lambda g, x_shape: np.broadcast_to(g / (np.prod(x_shape) + 0.01), x_shape),), "x"],
    "prod": [(lambda g, x, out: g * out / (x + 0.001),), "x"],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_formula_is_caught_and_named(name):
    """A rule as one may mistype it: a constant, a sign of a small term, a factor off by about a thousandth."""
    operation, (rules, guilty) = mg.REGISTRY[name], WRONG[name]
    wrong = Primitive(operation.function, elementwise=operation.elementwise).defvjp(*rules)
    args, _ = sample_inputs(operation, 0)[0]
    with pytest.raises(GradientError, match=rf"by argument \d \('{guilty}'\)"):
        mg.gradcheck(wrong, args)


@pytest.mark.parametrize("shape", [(), (40,), (3000,), (200, 300)])
@pytest.mark.parametrize("scalar", [False, True], ids=["elementwise", "summed"])
def test_the_worst_entry_is_named_in_arrays_of_any_size(shape, scalar):
    """One wrong entry among 60 000 shows in random directions and is found by halving them."""
    wrong = Primitive(lambda x: x * x).defvjp(lambda g, x: off_by_a_thousandth(g * 2 * x))
    x = RNG.uniform(1, 2, shape)
    fn = (lambda x: wrong(x).sum()) if scalar else wrong
    if scalar:  # with several results, which entry is off depends on the direction
        place = list(map(int, np.unravel_index(np.argmax(x), shape))) if shape else ""
        with pytest.raises(GradientError) as error:
            mg.gradcheck(fn, x)
        assert f"by argument 0 ('x'){place}:" in str(error.value)
        expected, got = error.value.expected.split(": ")[1], error.value.got
        assert float(expected.split(",")[0]) == pytest.approx(2 * x.max(), rel=1e-5)
        assert float(got.split(",")[0]) == pytest.approx(2.002 * x.max(), rel=1e-5)
    else:
        with pytest.raises(GradientError, match=r"off by 0\.1"):
            mg.gradcheck(fn, x)


def test_second_derivatives_that_are_cut_off_are_caught():
    """A rule that is right itself and wrong when differentiated, since it hides a dependence."""
    right_once = Primitive(lambda x: x**3).defvjp(lambda g, x: g * 3 * mg.stop_gradient(x) * x)
    assert mg.gradcheck(right_once, RNG.uniform(1, 2, 3))
    with pytest.raises(GradientError, match=r"argument 0 \('x'\)"):
        mg.gradgradcheck(right_once, RNG.uniform(1, 2, 3))


def test_a_missing_dependence_is_caught():
    with pytest.raises(GradientError, match="Got: 0, off by 100"):
        mg.gradcheck(lambda x: mg.exp(x.detach()), np.array([1.0]))


# ---- what it can't check, it says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "inputs", "error", "words"),
    [
        (mg.exp, np.arange(3), DTypeError, "floating-point input"),
        (mg.exp, 0.5, CallError, "a sequence"),
        (mg.argmax, np.ones(3), DTypeError, "floating-point result"),
        (lambda x: x.astype("float32"), np.ones(3), DTypeError, "float32"),
        (lambda x: np.exp(x.data), np.ones(3), DTypeError, "returns Tensors"),
        (lambda x: x * RNG.normal(), np.ones(3), GradientError, "generator"),
        (mg.absolute, np.zeros(3), GradientError, "kink"),
        (lambda x: mg.where(x == 1, np.nan, x), np.ones(2), GradientError, "nan"),
    ],
    ids=["integers", "a number", "no result", "float32 inside", "arrays out", "random", "kink", "nan"],
)
def test_what_cannot_be_checked(fn, inputs, error, words):
    if words == "kink":
        inputs = inputs + 3e-7  # the step crosses it
    with pytest.raises(error, match=words):
        mg.gradcheck(fn, inputs)


# ---- random inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absolute", "clip", "floor", "round", "max", "sort", "maximum", "norm"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_samples_keep_away_from_kinks_and_ties(name, dtype):
    """Ten steps of 1e-6 from the kinks of the operation and, in absolute value, from every other number of a call."""
    operation = mg.REGISTRY[name]
    for seed in range(20):
        for args, _ in sample_inputs(operation, seed, dtype):
            arrays, _ = opened(args)
            assert all(a.dtype == dtype for a in arrays)
            numbers = np.concatenate([a.ravel() for a in arrays]).astype(np.float64)
            assert all(np.abs(numbers - kink).min() >= 1e-5 for kink in operation.kinks)
            assert np.diff(np.sort(np.abs(numbers))).min(initial=1) >= 1e-5
            assert numbers.min() >= operation.domain[0] - 1e-3
            assert numbers.max() <= operation.domain[1] + 1e-3


def test_samples_are_those_of_their_seed():
    first, second, other = (sample_inputs(mg.REGISTRY["add"], seed)[0][0][0] for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
