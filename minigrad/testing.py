"""``gradcheck`` compares derivatives with central differences; ``sample_inputs`` draws inputs for any operation.

A derivative is right if it agrees with ``(f(x + h) - f(x - h)) / 2h``. In float64 with h = 1e-6 this quotient is off by
about h², the order of its truncation, and by 1e-16 / h from rounding: 1e-10 in all. A rule that is wrong by a
thousandth stands out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minigrad.backend import DType, array_of, device_of, is_array, is_floating, to_numpy
from minigrad.engine.core import Primitive
from minigrad.engine.registry import Operation, Sample, sample
from minigrad.errors import ArgumentError, CallError, DTypeError, GradientError
from minigrad.functional import grad
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor
from minigrad.trees import filled, leaves, parts

Host: TypeAlias = "np.ndarray[Any, Any]"

LIMIT = 1024  # the most inputs and results whose Jacobian is compared entry by entry; beyond, in random directions
DIRECTIONS = 8  # each random direction touches all entries, so one wrong entry shows in all of them
ROUNDING = 8 * float(np.finfo(np.float64).eps)  # relative error of a result that went through a few operations
GAP = 1e-5  # ten default steps: how far sample inputs keep from kinks and ties


# ---- comparison with central differences ----------------------------------------------------------------------------


@explained
def gradcheck(fn: Callable[..., Any], inputs: Any, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 5e-4) -> bool:
    """True if the derivatives of ``fn`` at ``inputs`` are what the central differences ``q = Δf / 2h`` find.

    fn          a function of Tensors with one result or several, the same at every call
    inputs      a Tensor or array, or a sequence of arguments, also containers of them such as a model's parameters.
                The Tensors that require a gradient are checked, or all floating-point arrays and Tensors if none does;
                the others are constants. All is computed in float64.
    eps         the step h, times the size of an element where that is above 1; keep 10 steps away from kinks
    atol, rtol  a derivative may differ by ``atol + rtol·|q|``, and by what rounding can do to q

    Up to 1024 inputs and results every entry of the Jacobian is compared; beyond, random directions are, to within the
    tolerance of a single entry. Raises a GradientError that names the argument and its worst entry.

    >>> import minigrad as mg
    >>> gradcheck(lambda x, y: mg.sin(x) * y, (np.array([0.3, 2.0]), np.array(1.5)))
    True
    """
    _Function(fn, inputs).check(eps, atol, rtol)
    return True


@explained
def gradgradcheck(
    fn: Callable[..., Any], inputs: Any, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 5e-4
) -> bool:
    """True if the second derivatives of ``fn`` are right: :func:`gradcheck` of its first ones.

    The gradient of ``fn`` is taken for random upstream gradients, and differentiated by ``inputs`` and by those.

    >>> import minigrad as mg
    >>> gradgradcheck(mg.tanh, np.array([0.3, 2.0]))
    True
    """
    first = _Function(fn, inputs)
    rng = np.random.default_rng(0)
    outs = first.run(first.point)[1]
    upstream = [rng.normal(size=out.shape) for out in outs]
    n = len(first.point)

    def gradient(*tensors: Tensor) -> list[Tensor]:
        recorded = [(out, g) for out, g in zip(first.apply(tensors[:n]), tensors[n:], strict=True) if out.requires_grad]
        outs, gradients = [out for out, _ in recorded], [g for _, g in recorded]
        found = grad(outs, tensors[:n], gradients, create_graph=True, allow_unused=True) if outs else ()
        return [g for g in found if g is not None] or [tensors[0] * 0]

    names = [*first.names, *(f"the gradient of result {k}" for k in range(len(upstream)))]
    devices = [*first.devices, *(out.device for out in outs)]
    _Function(gradient, [*first.point, *upstream], names, devices).check(eps, atol, rtol)
    return True


class _Miss(NamedTuple):
    """The worst disagreement so far: how many tolerances wide, at which probe and direction, and the two numbers."""

    size: float
    probe: int
    direction: Host
    expected: float
    got: float


class _Function:
    """``fn`` as a map from float64 arrays, those of its inputs that are checked, to its floating-point results."""

    def __init__(self, fn: Callable[..., Any], inputs: Any, names: Any = None, devices: Any = None) -> None:
        self.trees = _sequence(inputs)
        labels = names or _labels(fn, range(len(self.trees)))
        found = [pair for label, tree in zip(labels, self.trees, strict=False) for pair in leaves(tree, label)]
        given = [value for _, value in found]
        wanted = [k for k, v in enumerate(given) if isinstance(v, Tensor) and v.requires_grad]
        self.places = wanted or [k for k, v in enumerate(given) if _is_floating_array(v)]
        if not self.places:
            raise DTypeError("at least one floating-point input", describe(self.trees), "write 1.0 for 1")
        self.fn = fn
        self.given = [v.astype(np.float64) if _is_floating_array(v) else v for v in given]
        arrays = [array_of(given[k]) for k in self.places]
        self.devices = devices or list(map(device_of, arrays))
        self.point: list[Host] = [to_numpy(a).astype(np.float64) for a in arrays]
        self.names = [found[k][0] for k in self.places]

    def run(self, arrays: Sequence[Host]) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh leaves with these numbers, and the results at them."""
        leaves = [Tensor(a, requires_grad=True, device=d) for a, d in zip(arrays, self.devices, strict=True)]
        return leaves, self.apply(leaves)

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The floating-point results of ``fn`` with these Tensors in the checked places."""
        values = list(self.given)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        rest = iter(values)
        arguments = [filled(tree, rest) for tree in self.trees]
        results = [out for out in _flattened(self.fn(*arguments)) if is_floating(out.dtype)]
        if not results:
            hint = "integers and booleans have no derivative"
            raise DTypeError("a function with a floating-point result", "none among its results", hint)
        for out in results:
            if out.dtype != np.float64:
                hint = "take the change of dtype out of the function: its steps hide the differences"
                raise DTypeError("results in float64, in which all is computed here", str(out.dtype), hint)
        return results

    def values(self, arrays: Sequence[Host]) -> Host:
        """All results at ``arrays`` in one flat array."""
        return np.concatenate([to_numpy(out.data).reshape(-1) for out in self.run(arrays)[1]])

    def check(self, eps: float, atol: float, rtol: float) -> None:
        """Compare the derivatives by each argument with central differences, or raise a GradientError."""
        leaves, outs = self.run(self.point)
        values = np.concatenate([to_numpy(out.data).reshape(-1) for out in outs])
        if not np.array_equal(values, self.values(self.point), equal_nan=True):
            hint = "draw random numbers from a generator that each call makes afresh"
            raise GradientError("a function that gives the same results at every call", "different ones", hint)
        entrywise = values.size <= LIMIT and all(x.size <= LIMIT for x in self.point)
        rng = np.random.default_rng(0)
        probes = np.eye(values.size) if entrywise or values.size <= DIRECTIONS else _signs(rng, values.size)
        for k, rows in enumerate(_pullbacks(probes, leaves, outs)):
            size = self.point[k].size
            directions = np.eye(size) if size <= LIMIT else _signs(rng, size)
            misses = [self.miss(k, d, probes, rows, entrywise, eps, atol, rtol) for d in directions if len(probes)]
            worst = max(misses, key=lambda miss: miss.size, default=None)
            if worst is not None and worst.size > 1:
                while np.count_nonzero(worst.direction) > 1:
                    halves = _halves(worst.direction)
                    misses = [self.miss(k, d, probes, rows, entrywise, eps, atol, rtol) for d in halves]
                    worst = max(misses, key=lambda miss: miss.size)
                raise self.complaint(k, worst, outs, single=len(probes) == values.size)

    def miss(
        self, k: int, direction: Host, probes: Host, rows: Host, entrywise: bool, eps: float, atol: float, rtol: float
    ) -> _Miss:
        """Where along ``direction`` of argument k the products ``rows @ direction`` are furthest from differences."""
        x = self.point[k]
        step = direction.reshape(x.shape) * np.maximum(np.abs(x), 1) * eps
        above, below = x + step, x - step
        up, down = (self.values([*self.point[:k], y, *self.point[k + 1 :]]) for y in (above, below))
        moved = (above - below).reshape(-1)
        places, width = np.flatnonzero(moved), np.abs(moved).max()
        moves = rows[:, places] * (moved[places] / width)  # what each element adds to each probe
        with np.errstate(invalid="ignore"):
            slope, noise = (up - down) / width, (np.abs(up) + np.abs(down)) * (ROUNDING / width)
            got, expected, entry = moves.sum(axis=1), slope, np.abs(slope)
            if not entrywise:  # each probe is a sum of all results with signs; an entry of it has their typical size
                expected, noise, entry = probes @ slope, np.linalg.norm(noise), np.minimum(_rms(moves), _rms(slope))
            sizes = np.abs(got - expected) / (atol + rtol * entry + noise)
        sizes[np.isnan(sizes)] = np.inf
        worst = int(np.argmax(sizes))
        return _Miss(float(sizes[worst]), worst, direction, float(expected[worst]), float(got[worst]))

    def complaint(self, k: int, worst: _Miss, outs: Sequence[Tensor], single: bool) -> GradientError:
        """The error that names the argument, its worst entry, and the two numbers."""
        place = int(np.flatnonzero(worst.direction)[0])
        entry = _entry(place, self.point[k].shape)
        result = _result(worst.probe, outs) if single else "a random sum of the results"
        off = abs(worst.got - worst.expected) / abs(worst.expected) if worst.expected else np.inf
        return GradientError(
            f"the derivative of {result} by {self.names[k]}{entry}: {worst.expected:.9g}, from central differences",
            f"{worst.got:.9g}, off by {off:.2%}",
            "the rule for this argument is wrong, or the point lies within a step of a kink",
        )


def _pullbacks(probes: Host, leaves: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Host]:
    """For each leaf the matrix whose rows are the gradients that the rules give for each probe of the results."""
    rows = [np.zeros((len(probes), leaf.size)) for leaf in leaves]
    cuts = np.cumsum([out.size for out in outs])[:-1]
    recorded = [k for k, out in enumerate(outs) if out.requires_grad]
    for i, probe in enumerate(probes if recorded else ()):
        parts = np.split(probe, cuts)
        upstream = [Tensor(parts[k].reshape(outs[k].shape), device=outs[k].device) for k in recorded]
        found = grad([outs[k] for k in recorded], leaves, upstream, retain_graph=True, allow_unused=True)
        for row, g in zip(rows, found, strict=True):
            row[i] = 0 if g is None else to_numpy(g.data).reshape(-1)
    return rows


def _signs(rng: np.random.Generator, size: int) -> Host:
    return rng.choice([-1.0, 1.0], size=(DIRECTIONS, size))


def _halves(direction: Host) -> tuple[Host, Host]:
    """A direction as the sum of two that share its non-zero entries evenly."""
    places = np.flatnonzero(direction)
    first = np.zeros_like(direction)
    first[places[: len(places) // 2]] = direction[places[: len(places) // 2]]
    return first, direction - first


def _rms(rows: Host) -> Host:
    """Root mean square of what isn't 0 along the last axis."""
    sizes: Host = np.sqrt((rows**2).sum(-1) / np.maximum(np.count_nonzero(rows, -1), 1))
    return sizes


def _sequence(inputs: Any) -> list[Any]:
    if isinstance(inputs, Tensor) or is_array(inputs) or (parts(inputs) and not isinstance(inputs, list | tuple)):
        return [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        hint = "gradcheck(fn, [x, y])"
        raise CallError("inputs, a Tensor, an array or a sequence of arguments", describe(inputs), hint)
    return list(inputs)


def _flattened(value: Any) -> list[Tensor]:
    """The Tensors in a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if (found := parts(value)) is not None:
        return [tensor for _, part in found for tensor in _flattened(part)]
    raise DTypeError("a function that returns Tensors", describe(value), "compute with minigrad's operations")


def _is_floating_array(value: Any) -> bool:
    return (isinstance(value, Tensor) or is_array(value)) and is_floating(value.dtype)


def _labels(fn: Callable[..., Any], places: Sequence[int]) -> list[str]:
    """``argument 1 ('y')`` for each place; without the name where the signature of ``fn`` doesn't give one."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [f"argument {k}" + (f" ({plain[k]!r})" if k < len(plain) else "") for k in places]


def _entry(flat: int, shape: tuple[int, ...]) -> str:
    return str([int(i) for i in np.unravel_index(flat, shape)]) if shape else ""


def _result(flat: int, outs: Sequence[Tensor]) -> str:
    """The result and the entry in it that a place in the flat array of all results belongs to."""
    k = 0
    while flat >= outs[k].size:
        flat, k = flat - outs[k].size, k + 1
    return f"result {k}{_entry(flat, outs[k].shape)}"


# ---- random inputs --------------------------------------------------------------------------------------------------


def sample_inputs(operation: Operation[Any], rng: Any = None, dtype: DType = np.float64) -> list[tuple[Any, Any]]:
    """Calls of a registered operation for tests, as pairs ``(args, kwargs)``, one for each of its samples.

    Shapes become random arrays of ``dtype``, lists of shapes lists of such; other arguments stay as they are, but
    floating-point arrays get the dtype. The numbers lie in ``operation.domain``, ten steps of 1e-6 away from its kinks,
    and their absolute values as far from one another, so that no maximum, order or pair is near a tie.

    >>> import minigrad as mg
    >>> [(args, kwargs)] = sample_inputs(mg.REGISTRY["stack"], rng=0)[:1]
    >>> [array.shape for array in args[0]], kwargs
    ([(2, 3), (2, 3)], {})
    """
    generator = np.random.default_rng(rng)
    return [_draw(operation, s, generator, np.dtype(dtype)) for s in operation.samples or _elementwise(operation)]


def _elementwise(operation: Operation[Any]) -> list[Sample]:
    """Shapes for an elementwise operation: plain, scalar and, for several arguments, broadcast."""
    if not (isinstance(operation, Primitive) and operation.elementwise):
        raise ArgumentError("an operation with samples", f"{operation.name!r} without", "declare samples=[sample(...)]")
    n = operation.required
    broadcast = [sample((2, 3), *[(3,)] * (n - 1)), sample(*[(2, 1)] * (n - 1), (3,)), sample((), *[(2,)] * (n - 1))]
    return [sample(*[(2, 3)] * n), *(broadcast if n > 1 else [sample(())])]


def _draw(operation: Operation[Any], call: Sample, rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    shapes = [s for value in call.arrays for s in (value if _is_shapes(value) else [value]) if _is_shape(s)]
    numbers = _apart(sum(int(np.prod(s)) for s in shapes), operation, rng, dtype)

    def fill(value: Any) -> Any:
        nonlocal numbers
        if _is_shapes(value):
            return [fill(shape) for shape in value]
        if _is_shape(value):
            count = int(np.prod(value))
            taken, numbers = numbers[:count].reshape(value), numbers[count:]
            return taken.copy() if isinstance(operation.domain, tuple) else operation.domain(taken)
        return value.astype(dtype) if _is_floating_array(value) else value

    return tuple(fill(value) for value in call.arrays), dict(call.params)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _is_shapes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_shape(part) for part in value)


def _apart(count: int, operation: Operation[Any], rng: np.random.Generator, dtype: Any) -> Host:
    """Uniform numbers of the domain, those too near to a kink or to another's absolute value drawn anew."""
    interval = operation.domain if isinstance(operation.domain, tuple) else (-1.0, 1.0)
    values: Host = rng.uniform(*interval, count).astype(dtype)
    for _ in range(100):
        sizes = np.abs(values.astype(np.float64))
        order = np.argsort(sizes)
        near = np.zeros(count, bool)
        near[order[1:]] = np.diff(sizes[order]) < GAP
        for kink in operation.kinks:
            near |= np.abs(values.astype(np.float64) - kink) < GAP
        if not near.any():
            return values
        values[near] = rng.uniform(*interval, np.count_nonzero(near)).astype(dtype)
    hint = "widen the domain, or name fewer kinks"
    raise ArgumentError(f"a domain with room for {count} numbers of {dtype}", str(interval), hint)
