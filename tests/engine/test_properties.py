"""Random shapes, axes, indices and subscripts: values of NumPy, gradients of torch or of counting."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given
from support.cases import check_close, differentiated, upstream
from support.twins import twin

import minigrad as mg

BINARY = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "power",
    "arctan2",
    "hypot",
    "maximum",
    "minimum",
    "logaddexp",
    "fmax",
]
REDUCTIONS = ["sum", "mean", "prod", "max", "min", "logsumexp", "var"]
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
seeds = st.integers(0, 2**32 - 1)


def numbers(seed, *shapes, low=0.5, high=2.0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.uniform(low, high, shape)) for shape in shapes]


def counted(places, weights, size):
    """The sum of the weights that fall on each place."""
    return np.bincount(places, weights, size).astype(float)


def check_against_torch(operation, args, kwargs):
    """The value and, for random upstream gradients, the gradients of all arrays among ``args``."""
    values, grads = differentiated(operation, args, kwargs)
    leaves = [torch.tensor(a, requires_grad=True) if isinstance(a, np.ndarray) else a for a in args]
    out = twin(operation, torch)(*leaves, **kwargs)
    check_close(values, [out.detach().numpy()])
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    found = torch.autograd.grad(out, tensors, torch.tensor(upstream(values)[0]))
    check_close(grads, [g.numpy() for g in found])


@given(
    hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3), st.sampled_from(BINARY), seeds
)
def test_broadcasting(shapes, name, seed):
    check_against_torch(mg.REGISTRY[name], numbers(seed, *shapes.input_shapes), {})


@given(st.data(), st.sampled_from(REDUCTIONS), st.booleans(), seeds)
def test_reductions(data, name, keepdims, seed):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=4))
    axis = data.draw(
        st.none() | hnp.valid_tuple_axes(len(shape), min_size=1) | st.integers(-len(shape), len(shape) - 1)
    )
    check_against_torch(mg.REGISTRY[name], numbers(seed, shape), {"axis": axis, "keepdims": keepdims})


@given(st.data(), seeds)
def test_indices(data, seed):
    """Slices, integers, None and ``...``, integer and boolean arrays, mixed: each element adds up what it gave."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    basic = hnp.basic_indices(shape, allow_newaxis=True)
    advanced = hnp.integer_array_indices(shape, result_shape=hnp.array_shapes(max_dims=2, max_side=3))
    mixed = st.tuples(*[hnp.arrays(int, 3, elements=st.integers(-n, n - 1)) | hnp.basic_indices((n,)) for n in shape])
    mask = hnp.arrays(bool, shape)
    index = data.draw(basic | advanced | mixed | mask)
    if isinstance(index, tuple) and any(isinstance(part, tuple) for part in index):
        index = tuple(part[0] if isinstance(part, tuple) and part else part for part in index)
        index = tuple(slice(None) if isinstance(part, tuple) else part for part in index)
    if isinstance(index, tuple) and sum(part is ... for part in index) > 1:
        index = tuple(slice(None) if part is ... else part for part in index)
    (x,) = numbers(seed, shape)
    values, grads = differentiated(mg.getitem, [x], {"index": index})
    check_close(values, [x[index]], roundings=0)
    places = np.ravel(np.arange(x.size).reshape(shape)[index]).astype(int)
    check_close([g.ravel() for g in grads], [counted(places, np.ravel(upstream(values)[0]), x.size)])


@given(st.data(), seeds)
def test_matmul(data, seed):
    shapes = data.draw(
        hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=3, max_side=3, min_side=0)
    )
    check_against_torch(mg.REGISTRY["matmul"], numbers(seed, *shapes.input_shapes), {})


@given(st.data(), seeds)
def test_einsum(data, seed):
    """One to three operands; repeated, lonely and broadcast subscripts; with and without an output."""
    sizes = {c: data.draw(st.integers(1, 3), label=c) for c in "ijkl"}
    terms = data.draw(st.lists(st.text("ijkl", max_size=3), min_size=1, max_size=3))
    used = sorted(set("".join(terms)))
    spread = data.draw(st.booleans())
    lead = [(2, 1), (1, 3), (3,)] if spread else [()] * 3
    subscripts = ",".join("..." * spread + term for term in terms)
    if data.draw(st.booleans()):
        subscripts += (
            "->"
            + "..." * spread
            + "".join(data.draw(st.lists(st.sampled_from(used), unique=True) if used else st.just([])))
        )
    shapes = [lead[i] + tuple(sizes[c] for c in term) for i, term in enumerate(terms)]
    check_against_torch(mg.REGISTRY["einsum"], [subscripts, *numbers(seed, *shapes)], {})


@given(st.data(), seeds)
def test_rearranging(data, seed):
    """Each gives back to every element what it gave, counted by moving the numbers of the elements."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    small = st.integers(-5, 5)
    calls = {
        "flip": {"axis": data.draw(st.none() | st.just(axis))},
        "roll": {"shift": data.draw(small), "axis": data.draw(st.none() | st.just(axis))},
        "moveaxis": {"source": axis, "destination": data.draw(st.integers(-len(shape), len(shape) - 1))},
        "swapaxes": {"axis1": axis, "axis2": data.draw(st.integers(-len(shape), len(shape) - 1))},
        "tile": {"reps": data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))},
        "repeat": {"repeats": data.draw(st.integers(0, 3)), "axis": data.draw(st.none() | st.just(axis))},
        "pad": {"pad_width": data.draw(st.integers(0, 2)), "mode": data.draw(st.sampled_from(["edge", "wrap"]))},
        "take": {"indices": data.draw(hnp.arrays(int, (2, 2), elements=st.integers(0, shape[axis] - 1))), "axis": axis},
        "array_split": {"indices_or_sections": data.draw(st.integers(1, 5)), "axis": axis},
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(calls)))
    (x,) = numbers(seed, shape)
    values, grads = differentiated(mg.REGISTRY[name], [x], calls[name])
    moved = getattr(np, name)(np.arange(x.size).reshape(shape), **calls[name])
    places = np.concatenate([np.ravel(p) for p in (moved if isinstance(moved, list) else [moved])]).astype(int)
    weights = np.concatenate([np.ravel(g) for g in upstream(values)])
    check_close([np.concatenate([np.ravel(v) for v in values])], [x.ravel()[places]], roundings=0)
    check_close([g.ravel() for g in grads], [counted(places, weights, x.size)])
