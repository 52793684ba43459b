"""Transforms of functions: gradients, and products with Jacobians and Hessians.

Each calls ``fn`` on its arguments as Tensors (arrays and numbers become Tensors) and leaves nobody's ``.grad`` changed.
Results for one argument are a Tensor, for several a tuple. They nest: where an argument, or a tensor that ``fn`` reads
from outside, belongs to a graph that is being recorded, the results belong to it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from minigrad import ops
from minigrad.backend import array_module, is_floating
from minigrad.checkpointing import Function, T, alike, several
from minigrad.checkpointing import checkpoint as checkpoint
from minigrad.creation import asarray
from minigrad.engine.backward import grad, nodes_behind
from minigrad.engine.core import node_ids
from minigrad.engine.recording import Setting, enable_grad, is_grad_enabled
from minigrad.errors import ArgumentError, CallError, DTypeError, ShapeError
from minigrad.messages.arguments import as_int
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor, TensorLike

# ---- arguments and results ------------------------------------------------------------------------------------------


class _Variable(Tensor):
    """A leaf that a transform made, and when: what was made while a function ran is no outer graph to it."""

    __slots__ = ("birth",)
    birth: int

    def _in_place(self, sign: str, made: Tensor) -> Tensor:
        return made  # the name belongs to the function, which may give it to another tensor


def _now() -> int:
    return next(node_ids)


def _variable(value: Any) -> Tensor:
    """``value`` as something to differentiate by: a new leaf, or a new result of a tensor that is being recorded."""
    tensor = asarray(value)
    if tensor.requires_grad and is_grad_enabled():
        return ops.reshape(tensor, tensor.shape)
    if not is_floating(tensor.dtype):
        raise DTypeError("floating-point arguments to differentiate by", describe(tensor), "write 1.0 for 1")
    leaf = _Variable.__new__(_Variable)
    leaf._fill(tensor.data)
    leaf._requires_grad, leaf.birth = True, _now()
    return leaf


def _called(fn: Function, args: Sequence[Any], wanted: Sequence[int]) -> tuple[Any, list[Tensor], bool]:
    """``fn`` on ``args``, those of ``wanted`` as variables: (result, the variables, whether an outer graph goes on)."""
    if not args:
        raise CallError("at least one argument to differentiate by", "none", "they follow the function: (fn, x)")
    outer = is_grad_enabled()
    values = [_variable(a) if i in wanted else asarray(a) if _is_number(a) else a for i, a in enumerate(args)]
    variables = [values[i] for i in wanted]
    start = _now()
    with enable_grad(), Setting(transforming=True):
        out = fn(*values)
    results = out if isinstance(out, tuple | list) else (out,)
    for result in results:
        if not isinstance(result, Tensor):
            hint = "compute with minigrad, not with .data or NumPy alone"
            raise DTypeError("a function that returns Tensors", describe(result), hint)
    edges = {v.node or v for v in variables}
    behind = nodes_behind([r.node for r in results], lambda node: node in edges)
    sources = {edge for node in behind for edge in node.parents} - edges
    leaves = [e for e in sources if isinstance(e, Tensor) and not (isinstance(e, _Variable) and e.birth > start)]
    foreign = bool(leaves) or any(v.node for v in variables)
    return out, variables, outer and foreign


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | float)


def _grads(outs: Any, variables: list[Tensor], g: Any, create: bool, retain: bool = False) -> list[Tensor]:
    """Gradients of ``outs`` with respect to the variables; zeros where nothing depends on one."""
    pairs = [(o, s) for o, s in zip(outs, g, strict=True) if o.requires_grad]
    if not pairs:
        found: tuple[Any, ...] = (None,) * len(variables)
    else:
        found = grad(
            [o for o, _ in pairs], variables, [s for _, s in pairs], retain or create, create, allow_unused=True
        )
    return [Tensor._wrap(ops.zeros_like(v)) if f is None else f for f, v in zip(found, variables, strict=True)]


def _one_or_all(results: Sequence[Any], single: bool) -> Any:
    return results[0] if single else tuple(results)


def _detached(out: Any, nested: bool) -> Any:
    if nested:
        return out
    return alike(out, [o.detach() for o in several(out)])


def _tangents(variables: Sequence[Tensor], given: Any) -> list[Tensor]:
    """One vector for each variable, in its shape; for a single variable also nested lists of numbers."""
    shapes = [v.shape for v in variables]
    parts = several(given)
    if len(shapes) == 1 and (len(parts) != 1 or np.shape(parts[0]) != shapes[0]):
        parts = (given,)
    found = [np.shape(part) for part in parts]
    if found != shapes:
        raise ShapeError(f"vectors of the shapes {shapes}", str(found), "one for each argument, in its shape")
    return [p if isinstance(p, Tensor) else asarray(p, v.dtype) for p, v in zip(parts, variables, strict=True)]


# ---- transforms -----------------------------------------------------------------------------------------------------


@overload
def value_and_grad(fn: Function, argnums: int = 0) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(fn: Function, argnums: tuple[int, ...]) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]: ...
@explained
def value_and_grad(fn: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    """A function that returns ``fn``'s value, a scalar, and its gradient with respect to the arguments ``argnums``.

    >>> value, slope = value_and_grad(lambda x: (x * x).sum())(np.array([1.0, 2.0]))
    >>> print(value.item(), slope.data)
    5.0 [2. 4.]
    """
    wanted = tuple(as_int(i, "argnums") for i in several(argnums))

    def transformed(*args: Any) -> tuple[Any, Any]:
        if any(not 0 <= i < len(args) for i in wanted):
            raise ArgumentError(f"argnums among the {len(args)} arguments", str(argnums), "the first is 0")
        out, variables, nested = _called(fn, args, wanted)
        _check_scalar(out)
        found = _grads([out], variables, [None], nested)
        return _detached(out, nested), _one_or_all(found, isinstance(argnums, int))

    return transformed


def _check_scalar(out: Any) -> None:
    if not isinstance(out, Tensor) or out.size != 1:
        raise ShapeError("a function that returns a scalar", describe(out), "call .sum() or .mean() at its end")


@explained
def vjp(fn: Callable[..., T], *args: Any) -> tuple[T, Function]:
    """``fn(*args)``, and a function that maps a gradient ``u`` of the result to ``uᵀ J``, as often as one likes.

    >>> out, pullback = vjp(lambda x: x * x, np.array([1.0, 2.0]))
    >>> print(pullback(np.array([1.0, 10.0])).data)
    [ 2. 40.]
    """
    out, variables, nested = _called(fn, args, range(len(args)))
    outs = several(out)

    @explained
    def pullback(u: Any) -> Any:
        if len(several(u)) != len(outs):
            got, hint = str(len(several(u))), "one for each result, in its shape"
            raise ArgumentError(f"{len(outs)} gradients, of the results", got, hint)
        seeds = [
            asarray(s, dtype=o.dtype) if not isinstance(s, Tensor) else s for s, o in zip(several(u), outs, strict=True)
        ]
        again = nested or any(s.requires_grad for s in seeds)
        return _one_or_all(_grads(outs, variables, seeds, again, retain=True), len(args) == 1)

    return _detached(out, nested), pullback


@explained
def jvp(fn: Callable[..., T], args: Any, tangents: Any) -> tuple[T, T]:
    """``fn(*args)`` and the product ``J t`` with tangents of the shapes of the arguments.

    It is made of two reverse passes: ``u -> uᵀ J`` is linear in u, and the gradient of ``uᵀ J t`` by u is ``J t``.

    >>> out, product = jvp(lambda x: x * x, np.array([1.0, 2.0]), np.array([1.0, 10.0]))
    >>> print(product.data)
    [ 2. 40.]
    """
    args = several(args)
    out, variables, nested = _called(fn, args, range(len(args)))
    outs, t = several(out), _tangents(variables, tangents)
    dummies = [Tensor._wrap(ops.zeros_like(o)) for o in outs]
    for dummy in dummies:
        dummy.requires_grad = True
    with enable_grad():
        pulled = _grads(outs, variables, dummies, create=True)
    nested = nested or (is_grad_enabled() and any(v.requires_grad for v in t))
    products = _grads(pulled, dummies, t, nested)
    return _detached(out, nested), _one_or_all(products, not isinstance(out, tuple | list))


@explained
def hvp(fn: Function, args: Any, vectors: Any) -> tuple[Tensor, Any]:
    """``fn(*args)``, a scalar, and the product ``H v`` of its Hessian with vectors of the shapes of the arguments.

    >>> out, product = hvp(lambda x: (x**3).sum(), np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    >>> print(product.data)
    [ 6. 12.]
    """
    args = several(args)
    out, variables, nested = _called(fn, args, range(len(args)))
    _check_scalar(out)
    v = _tangents(variables, vectors)
    with enable_grad():
        slopes = _grads([out], variables, [None], create=True)
    nested = nested or (is_grad_enabled() and any(vector.requires_grad for vector in v))
    products = _grads(slopes, variables, v, nested)
    return _detached(out, nested), _one_or_all(products, len(args) == 1)


@overload
def jacobian(fn: Function, arg: TensorLike, /) -> Tensor: ...
@overload
def jacobian(fn: Function, arg: TensorLike, /, *args: TensorLike) -> tuple[Tensor, ...]: ...
@explained
def jacobian(fn: Function, *args: Any) -> Any:
    """All partial derivatives: for each argument an array of shape ``out.shape + arg.shape``, one pass for each row.

    >>> print(jacobian(lambda x: x * x, np.array([1.0, 2.0])).data)
    [[2. 0.]
     [0. 4.]]
    """
    out, variables, nested = _called(fn, args, range(len(args)))
    if not isinstance(out, Tensor):
        raise DTypeError("a function that returns one Tensor", describe(out), "stack joins several results")
    rows: list[list[Tensor]] = []
    for k in range(out.size):
        unit = array_module(out._data).zeros(out.size, out.dtype)
        unit[k] = 1
        rows.append(_grads([out], variables, [Tensor._wrap(unit.reshape(out.shape))], nested, retain=True))
    blocks = [_stacked([row[i] for row in rows], out, v) for i, v in enumerate(variables)]
    return _one_or_all(blocks, len(args) == 1)


def _stacked(rows: list[Tensor], out: Tensor, variable: Tensor) -> Tensor:
    shape = out.shape + variable.shape
    if not rows:
        return Tensor._wrap(array_module(variable._data).zeros(shape, variable.dtype))
    return ops.reshape(ops.stack(rows), shape)


@overload
def hessian(fn: Function, arg: TensorLike, /) -> Tensor: ...
@overload
def hessian(fn: Function, arg: TensorLike, /, *args: TensorLike) -> tuple[tuple[Tensor, ...], ...]: ...
@explained
def hessian(fn: Function, *args: Any) -> Any:
    """All second derivatives of a scalar function: ``arg.shape + arg.shape``, or a tuple of tuples for several args.

    >>> print(hessian(lambda x: (x**3).sum(), np.array([1.0, 2.0])).data)
    [[ 6.  0.]
     [ 0. 12.]]
    """

    def slope(i: int) -> Function:
        return lambda *values: value_and_grad(fn, i)(*values)[1]

    if not args:
        _called(fn, args, ())  # says so
    rows = [jacobian(slope(i), *args) for i in range(len(args))]
    return rows[0] if len(args) == 1 else tuple(rows)
