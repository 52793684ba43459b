"""Every registered operation against NumPy, torch and finite differences, with every dtype and awkward input.

Nothing here names an operation: whoever registers one gets these tests for free. The cases are in ``support/cases.py``,
and ``PYTHONPATH=.:tests python -m support.count_cases`` counts them.
"""

import doctest
import gc
import importlib
import inspect
import itertools
import pkgutil
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import (
    CASES,
    DIFFERENTIABLE,
    FINITE,
    FUSED,
    IN_NUMPY,
    IN_TORCH,
    LAYOUTS,
    NUMPYS,
    OPERATIONS,
    PARTS,
    WHOLE,
    WITHOUT_DERIVATIVE,
    Case,
    check_close,
    differentiated,
    emptied,
    leaf,
    listed,
    opened,
    over,
    scalars,
    upstream,
)
from support.twins import twin

import minigrad
import minigrad as mg
import nn
import optim
from minigrad.errors import MiniGradError

# ---- values and derivatives -----------------------------------------------------------------------------------------


@over(IN_NUMPY)
def test_numpy(case):
    """The value is that of the NumPy function, or of the formula in NumPy."""
    args, kwargs = case.inputs()
    theirs = listed(twin(case.operation, np)(*args, **kwargs))
    check_close(listed(case.operation(*args, **kwargs)), theirs)


def torch_of(value: Any) -> Any:
    """Arrays, also in lists, as torch's; a fresh copy, since torch refuses negative strides."""
    if isinstance(value, list):
        return [torch_of(v) for v in value]
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


@over(IN_TORCH)
def test_torch(case):
    """The value and, for random upstream gradients, the gradients are torch's."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    options = kwargs if "index" in kwargs else {k: torch_of(v) for k, v in kwargs.items()}
    outs = listed(twin(case.operation, torch)(*map(torch_of, join(leaves)), **options))
    values, grads = differentiated(case.operation, args, kwargs)
    check_close(values, [out.detach().numpy() for out in outs])
    pairs = [(out, torch.tensor(g)) for out, g in zip(outs, upstream(values), strict=True) if out.requires_grad]
    recorded, gradients = zip(*pairs, strict=True) if pairs else ((), ())
    assert bool(recorded) == (case.operation.name not in WITHOUT_DERIVATIVE)
    found = torch.autograd.grad(recorded, leaves, gradients, allow_unused=True) if recorded else [None] * len(leaves)
    check_close(grads, [np.zeros(a.shape) if g is None else g.numpy() for a, g in zip(arrays, found, strict=True)])


@over(FINITE)
@pytest.mark.parametrize("check", [mg.gradcheck, mg.gradgradcheck], ids=["first", "second"])
def test_differences(case, check):
    """First and second derivatives are those of central differences."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    assert check(lambda *tensors: case.operation(*join(tensors), **kwargs), arrays)


@over(FUSED)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_kernel_is_its_definition(case, dtype):
    """Kernels give the value and the gradients of the definition, to rounding."""
    args, kwargs = case.inputs(dtype)
    kwargs = {key: mg.asarray(v).data if isinstance(v, np.ndarray) else v for key, v in kwargs.items()}
    kernel = differentiated(case.operation, args, kwargs)
    definition = differentiated(case.operation.definition, args, kwargs)
    for ours, theirs in zip(kernel, definition, strict=True):
        check_close(ours, theirs)


# ---- types ----------------------------------------------------------------------------------------------------------


@over(CASES)
def test_raw_call_is_tensor_call(case):
    """Without a Tensor among the arguments the result is a plain array, with one a Tensor: the same bits."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    raw = listed(case.operation(*args, **kwargs))
    for tensors in ([mg.asarray(a) for a in arrays], [leaf(a) for a in arrays]):
        outs = listed(case.operation(*join(tensors), **kwargs))
        assert all(
            isinstance(out, mg.Tensor) and not isinstance(r, mg.Tensor) for out, r in zip(outs, raw, strict=True)
        )
        check_close([out.data for out in outs], raw, roundings=0)


@over([case for case in NUMPYS if case.operation.name != "reciprocal"])
def test_integers(case):
    """Integers give what NumPy gives: integers where those are exact, else float64. (But our 1 / 2 is never 0.)"""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    with np.errstate(all="ignore"):
        whole = join([np.rint(a * 3).astype(np.int64) for a in arrays])
        try:
            theirs = listed(twin(case.operation, np)(*whole, **kwargs))
        except (ValueError, TypeError):
            with pytest.raises(MiniGradError):
                case.operation(*whole, **kwargs)
        else:
            check_close(listed(case.operation(*whole, **kwargs)), theirs)


@over(DIFFERENTIABLE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dtype(case, dtype):
    """Results and gradients keep the dtype and the shape, and differ from those in float64 by a few roundings."""
    args, kwargs = case.inputs(dtype)
    arrays, join = opened(args)
    narrow = differentiated(case.operation, args, kwargs)
    with np.errstate(over="ignore"):
        wide = differentiated(case.operation, join([a.astype(np.float64) for a in arrays]), kwargs)
    assert [(g.shape, g.dtype) for g in narrow[1]] == [(a.shape, dtype) for a in arrays]
    for out, exact in zip(narrow[0], wide[0], strict=True):
        assert out.dtype == (dtype if exact.dtype == np.float64 and "dtype" not in kwargs else exact.dtype)
    for ours, theirs in zip(narrow, wide, strict=True):
        check_close(ours, [exact.astype(out.dtype) for out, exact in zip(ours, theirs, strict=True)])


@over(DIFFERENTIABLE)
@pytest.mark.cpu_only("a GPU has one byte order and no long double")
def test_bytes_in_another_order_and_long_doubles(case):
    """Arrays of another byte order are those of ours; long doubles give float64's results, or are refused in words."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    expected = differentiated(case.operation, args, kwargs)
    swapped = differentiated(case.operation, join([a.astype(a.dtype.newbyteorder()) for a in arrays]), kwargs)
    for ours, theirs in zip(swapped, expected, strict=True):
        check_close(ours, theirs, roundings=0)
    try:
        wide = differentiated(case.operation, join([a.astype(np.longdouble) for a in arrays]), kwargs)
    except MiniGradError as error:
        assert "unsupported" in str(error) or "not supported" in str(error)  # by NumPy's or SciPy's function
        return
    for ours, theirs in zip(wide, expected, strict=True):
        check_close([np.asarray(out).astype(exact.dtype) for out, exact in zip(ours, theirs, strict=True)], theirs)


# ---- awkward inputs -------------------------------------------------------------------------------------------------


@over(WHOLE)
def test_scalar_and_empty(case, pytestconfig):
    """Arrays of shape () and without elements: what NumPy takes, we take, and what it refuses, we refuse in our words.

    The gradients have the shapes of the inputs. An operation without a twin in NumPy computes or refuses as it will.
    """
    if case.operation.name == "transposed_convolution" and pytestconfig.getoption("--device") != "cpu":
        pytest.skip("on the CPU only: its definition makes windows, and an empty kernel has none")
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    reference = twin(case.operation, np) or case.operation
    for changed in [scalars(arrays), *emptied(arrays)]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # the mean of nothing
                theirs = listed(reference(*join(changed), **kwargs))
        except (ValueError, TypeError, IndexError):
            with pytest.raises(MiniGradError):
                case.operation(*join([leaf(a) for a in changed]), **kwargs)
            continue
        values, grads = differentiated(case.operation, join(changed), kwargs)
        if reference is not case.operation:
            check_close(values, theirs)
        assert [g.shape for g in grads] == [a.shape for a in changed]


@over([c for c in IN_NUMPY if c in WHOLE and c.operation.name not in PARTS
       and not c.operation.function.__module__.startswith("minigrad.kernels")])  # fmt: skip
def test_a_number_beside_a_tensor(case):
    """A number of Python in the place of one array is what it is to NumPy, and doesn't widen the others."""
    args, kwargs = case.inputs()
    places = [i for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    for i, number in itertools.product(places if len(places) > 1 else [], (0.5, 1)):
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                given = [number if k == i else a for k, a in enumerate(args)]
                theirs = listed(twin(case.operation, np)(*given, **kwargs))
        except (ValueError, TypeError, IndexError, AttributeError):
            continue

        def called(dtype, given=given, i=i):
            return listed(case.operation(*[leaf(a.astype(dtype)) if k in places and k != i else a
                                           for k, a in enumerate(given)], **kwargs))  # fmt: skip

        try:
            check_close([mg.asarray(out).numpy() for out in called(np.float64)], theirs)
        except MiniGradError as error:
            assert "has no attribute" not in str(error)
            continue
        outs = called(np.float32)
        assert len(outs) > 1 or outs[0].dtype in (np.float32, bool)


@over([case for case in IN_NUMPY if case in WHOLE and case.operation.name not in ("drop", "reciprocal")])
@pytest.mark.parametrize("number", [0.5, 2])
def test_a_number_alone(case, number):
    """A number in the place of the only array is what it is to NumPy; what NumPy refuses may have a result."""
    args, kwargs = case.inputs()
    if sum(isinstance(a, np.ndarray) for a in args) != 1 or not isinstance(args[0], np.ndarray):
        return
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            theirs = listed(twin(case.operation, np)(number, *args[1:], **kwargs))
        except (ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError):
            theirs = None
        try:
            ours = listed(case.operation(number, *args[1:], **kwargs))
        except MiniGradError as error:
            assert theirs is None and "has no attribute" not in str(error)
        else:
            check_close(ours, theirs or ours)


@over([case for case in DIFFERENTIABLE if case in WHOLE])
def test_rules_take_numbers_of_numpy(case):
    """Where a gradient has the shape (), NumPy hands rules and kernels a number: the same as an array of that shape.

    Indices of shape () are tried too, and axes 0 and -1, which NumPy lets a single number have.
    """
    args, kwargs = case.inputs()

    def whole(value):
        return scalars([value])[0] if isinstance(value, np.ndarray) and value.dtype.kind in "iub" else value

    def behind(product):
        return lambda *given, **named: [product(out) for out in listed(case.operation(*given, **named))]

    arrays, join = opened([whole(value) for value in args])
    options = [kwargs, {key: whole(value) for key, value in kwargs.items()}]
    if "axis" in case.operation.parameters:
        options += [{**kwargs, "axis": axis} for axis in (0, -1)]
    for changed in (arrays, scalars(arrays)):
        for named in options:
            try:
                case.operation(*join(changed), **named)
            except MiniGradError:
                continue
            number = differentiated(behind(lambda out: out * 1.5), join(changed), named)
            array = differentiated(behind(lambda out: (out.reshape(-1) * 1.5).reshape(out.shape)), join(changed), named)
            for ours, theirs in zip(number, array, strict=True):
                check_close(ours, theirs, roundings=4)


@over(DIFFERENTIABLE)
def test_layout(case):
    """Views with any strides give what contiguous arrays give, to rounding: NumPy may have another loop for them.

    Inputs and upstream gradients that can't be written to prove that nothing is changed.
    """
    args, kwargs = case.inputs()
    contiguous = differentiated(case.operation, args, kwargs, np.copy)
    for layout in LAYOUTS:
        strided = differentiated(case.operation, args, kwargs, layout)
        for ours, theirs in zip(strided, contiguous, strict=True):
            check_close(ours, theirs)


# ---- memory ---------------------------------------------------------------------------------------------------------


@over(DIFFERENTIABLE)
def test_gradients_belong_to_their_leaves(case):
    """Each ``.grad`` is an array of its own, shared with no input, result, upstream gradient or other ``.grad``."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    leaves = [leaf(a) for a in arrays]
    outs = [out for out in listed(case.operation(*join(leaves), **kwargs)) if out.requires_grad]
    gradients = upstream(outs)
    for out, g in zip(outs, gradients, strict=True):
        out.backward(g, retain_graph=True)
    grads = [x.grad for x in leaves if x.grad is not None]
    others = [*arrays, *gradients, *(out.data for out in outs)]
    for k, g in enumerate(grads):
        assert g.flags.writeable
        assert not any(np.may_share_memory(g, other) for other in [*others, *grads[:k]])


def _use(case: Case, how: str) -> list[Any]:
    """Record the operation, use the graph in one way, and give weak references to all Tensors of it."""
    args, kwargs = case.inputs()
    arrays, join = opened(args)
    leaves = [leaf(a) for a in arrays]
    outs = listed(case.operation(*join(leaves), **kwargs))
    recorded = [out for out in outs if out.requires_grad]
    found: Any = ()
    if how == "backward":
        for out in recorded:
            out.backward(np.ones(out.shape), retain_graph=out is not recorded[-1])
    elif how == "create_graph":
        found = mg.grad(recorded, leaves, upstream(recorded), create_graph=True, allow_unused=True)
    elif how == "failed":
        recorded[0].backward(np.ones(recorded[0].shape))
        with pytest.raises(MiniGradError, match="retain_graph"):
            recorded[0].backward(np.ones(recorded[0].shape))
    return [weakref.ref(t) for t in (*leaves, *outs, *found) if t is not None]


@over(DIFFERENTIABLE)
def test_graph_dies_by_reference_counting(case):
    """With the garbage collector off, nothing of a graph outlives the last variable that names its result."""
    gc.disable()
    try:
        for how in ("forward", "backward", "create_graph", "failed"):
            assert all(ref() is None for ref in _use(case, how)), how
    finally:
        gc.enable()


# ---- the gate -------------------------------------------------------------------------------------------------------

PUBLIC = [name for name, operation in OPERATIONS.items() if getattr(mg, name, None) is operation]
NO_METHOD = {"partition"}  # in NumPy it changes the array
ITS_OWN_SIGNATURE = {"transpose"}  # x.transpose(1, 0) as x.transpose((1, 0))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_operation(name):
    """Each public name has an example; methods have the same defaults, and no method of NumPy's arrays is missing."""
    function = mg.REGISTRY[name]
    assert ">>>" in function.__doc__
    assert (name in WITHOUT_DERIVATIVE) == any(s in function.__doc__ for s in ("no derivative", "without a derivative"))
    assert hasattr(mg.Tensor, name) or not hasattr(np.ndarray, name) or name in NO_METHOD
    if hasattr(mg.Tensor, name) and name not in ITS_OWN_SIGNATURE:
        parameters = inspect.signature(function).parameters
        defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
        method = inspect.signature(getattr(mg.Tensor, name)).parameters
        assert {k: method[k].default for k in defaults} == defaults


def test_every_operation_has_samples_and_a_twin():
    """An operation of minigrad has samples, and says what it does by its twin in NumPy or torch."""
    assert {case.operation.name for case in CASES} == set(OPERATIONS)
    for operation in OPERATIONS.values():
        assert any(twin(operation, module) for module in (np, torch)), operation


MODULES = [
    name
    for package in (minigrad, nn, optim)
    for name in [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
]


ON_THE_CPU = {
    "minigrad.integrate", "minigrad.ops.decompositions", "minigrad.ops.matrix_equations", "minigrad.ops.special",
    "optim.sharded",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    """Every ``>>>`` example gives what it says."""
    if name in ON_THE_CPU and mg.asarray(np.zeros(1)).device != "cpu":
        pytest.skip("it has examples of what CuPy lacks, or ranks don't exchange")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0
