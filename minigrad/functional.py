"""Transforms of functions: gradients, and products with Jacobians and Hessians.

Each calls ``fn`` with its arguments as Tensors (arrays and numbers become Tensors) and leaves nobody's ``.grad``
changed. Arguments and results may be containers: dicts, lists, tuples, named ones too, and dataclasses, nested as one
likes; derivatives come in the same form, Tensors in the places of arrays, and None in those of strings and their like.
Keyword arguments are passed on and not differentiated. With ``has_aux`` the function returns a pair, of which the
second part, whatever it is, is handed on.

They nest: where an argument, or a tensor that ``fn`` reads from outside, belongs to a graph that is being recorded, the
results belong to it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import numpy as np

from minigrad import ops
from minigrad.backend import array_module, is_array
from minigrad.checkpointing import Function, T, several
from minigrad.checkpointing import checkpoint as checkpoint
from minigrad.creation import asarray, zeros_like
from minigrad.engine.backward import gradients
from minigrad.engine.recording import enable_grad, is_grad_enabled
from minigrad.errors import ArgumentError, CallError, GraphError, ShapeError
from minigrad.forward import Calls, products
from minigrad.messages.arguments import as_int, tensors_in
from minigrad.messages.explain import describe, explained
from minigrad.rows import at_once, pull_rows
from minigrad.tensor import Tensor, TensorLike
from minigrad.traced import Argnums, Traced, grads
from minigrad.trees import filled, leaves, matched

# ---- vectors for products -------------------------------------------------------------------------------------------


def _tangents(args: Any, given: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The positions of the arguments that have a tangent, and those of their leaves, in their shapes.

    None in the place of a tangent passes that argument through. For a single argument its tangent alone will do.
    """
    candidates = [given] * isinstance(given, tuple | list) + [(given,)] * (len(args) == 1)
    for k, candidate in enumerate(candidates or [(given,)]):
        try:
            if len(candidate) != len(args):
                what = f"{len(args)} vectors, one for each argument"
                raise ArgumentError(what, f"{len(candidate)}", "None passes an argument through")
            places = tuple(i for i, t in enumerate(candidate) if t is not None)
            pairs = [pair for i in places for pair in _matched_pairs(args[i], candidate[i], f"vector {i}")]
            shapes, found = [np.shape(a) for a, _ in pairs], [np.shape(t) for _, t in pairs]
            if shapes != found:
                raise ShapeError(f"vectors of the shapes {shapes}", str(found), "one for each argument, in its shape")
            return places, [t for _, t in pairs]
        except (ArgumentError, ShapeError):
            if k == len(candidates) - 1 or not candidates:
                raise
    raise AssertionError


def _matched_pairs(arg: Any, given: Any, what: str) -> list[tuple[Any, Any]]:
    """Each leaf of an argument with its tangent; numbers in a list may be Tensors there."""
    tangents = (asarray(t) if next(tensors_in([t]), None) is not None else t for t in matched(arg, given, what))
    return list(zip((a for _, a in leaves(arg)), tangents, strict=True))


def _typed(value: Any, like: Tensor) -> Tensor:
    """``value`` as a Tensor, a number or an array in the dtype of ``like``."""
    tensor = value if isinstance(value, Tensor) else asarray(value, like.dtype)
    return tensor if tensor.dtype == like.dtype else tensor.astype(like.dtype)


def _recorded(values: Iterable[Any]) -> bool:
    return is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


# ---- gradients ------------------------------------------------------------------------------------------------------


@overload
def grad(outputs: Function, inputs: Argnums = 0, *, has_aux: bool = False) -> Function: ...
@overload
def grad(
    outputs: Tensor | Iterable[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor, ...]: ...
@overload
def grad(outputs: Function, *, argnums: Argnums = 0, has_aux: bool = False) -> Function: ...
@explained
def grad(
    outputs: Any,
    inputs: Any = None,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
) -> Any:
    """Gradients of ``outputs`` with respect to ``inputs``, a tuple of Tensors; for a function its gradient function.

    ``grad(fn, argnums=0)`` is the function of the gradient of ``fn``, which returns a scalar, with respect to the
    arguments ``argnums``: one, or a tuple of them. With ``has_aux`` it gives (gradient, aux).

    ``grad(outputs, inputs)`` changes no leaf's ``.grad``; inputs may be leaves or results. With ``create_graph`` the
    gradients are recorded and can be differentiated again. grad_outputs are the gradients of non-scalar outputs. An
    input that no output depends on is an error, or None under ``allow_unused``.

    >>> import minigrad as mg
    >>> print(mg.grad(lambda x: x**3)(3.0).item(), mg.grad(mg.grad(lambda x: x**3))(3.0).item())
    27.0 18.0
    >>> x = mg.Tensor(3.0, requires_grad=True)
    >>> (dx,) = mg.grad(x**3, x, create_graph=True)
    >>> (ddx,) = mg.grad(dx, x)
    >>> print(dx.item(), ddx.item())
    27.0 18.0
    """
    if callable(outputs):
        return _gradient(outputs, argnums if inputs is None else inputs, has_aux)
    if inputs is None:
        raise CallError("inputs, the tensors to differentiate by", "none", "grad(loss, [x, y]), or grad(fn)(x, y)")
    outputs, inputs = _listed(outputs), _listed(inputs)
    given = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
    if len(given) != len(outputs):
        raise ArgumentError(f"{len(outputs)} grad_outputs, one for each output", f"{len(given)}", "put them in a list")
    for i, tensor in enumerate(inputs):
        if not (isinstance(tensor, Tensor) and tensor.requires_grad):
            got = tensor._brief() if isinstance(tensor, Tensor) else describe(tensor)
            raise GraphError(f"input {i} to be a Tensor with requires_grad=True", got, "x.requires_grad = True first")
    retain = create_graph if retain_graph is None else retain_graph
    found = gradients(outputs, inputs, given, retain, create_graph)
    missing = [i for i, g in enumerate(found) if g is None]
    if missing and not allow_unused:
        raise GraphError("outputs made from every input", f"no path to input {missing[0]}", "or pass allow_unused=True")
    return tuple(found)


def _listed(value: Any) -> list[Any]:
    """A list of tensors; a single tensor becomes a list of one."""
    single = isinstance(value, Tensor | str) or is_array(value) or not isinstance(value, Iterable)
    return [value] if single else list(value)


def _named(name: str, fn: Function) -> Callable[[Function], Function]:
    """Give a transformed function the name and the text of the one that it was made from."""

    def decorate(made: Function) -> Function:
        functools.update_wrapper(made, fn, ("__module__", "__doc__"), ())
        made.__name__ = made.__qualname__ = f"{name} of {getattr(fn, '__name__', type(fn).__name__)}"
        return made

    return decorate


def _gradient(fn: Function, argnums: Argnums, has_aux: bool) -> Function:
    both = value_and_grad(fn, argnums, has_aux)  # type: ignore[call-overload]

    @_named("gradient", fn)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        value, slope = both(*args, **kwargs)
        return (slope, value[1]) if has_aux else slope

    return transformed


@overload
def value_and_grad(fn: Function, argnums: int = 0) -> Callable[..., tuple[Tensor, Tensor]]: ...
@overload
def value_and_grad(fn: Function, argnums: tuple[int, ...]) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]: ...
@overload
def value_and_grad(fn: Function, argnums: int | tuple[int, ...] = 0, *, has_aux: bool) -> Callable[..., Any]: ...
@explained
def value_and_grad(fn: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Function:
    """A function that returns ``fn``'s value, a scalar, and its gradient with respect to the arguments ``argnums``.

    argnums  a position, also counted from the end, or a tuple of positions
    has_aux  whether ``fn`` returns (scalar, aux); then the value is that pair

    >>> value, slope = value_and_grad(lambda x: (x * x).sum())(np.array([1.0, 2.0]))
    >>> print(value.item(), slope.data)
    5.0 [2. 4.]
    """
    for i in several(argnums):
        as_int(i, "argnums")

    @_named("value and gradient", fn)
    @explained
    def transformed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = Traced(fn, args, kwargs, argnums, has_aux)
        call.scalar()
        found = call.in_form(call.grads([None], call.nested))
        return call.with_aux(call.detached(), has_aux=has_aux), found

    return transformed


@explained
def elementwise_grad(fn: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    """A function that returns the gradient of the sum of ``fn``'s result: the derivative, if ``fn`` is elementwise.

    >>> print(elementwise_grad(lambda x: x**3)(np.array([1.0, 2.0])).data)
    [ 3. 12.]
    """

    @_named("derivative", fn)
    @explained
    def transformed(*args: Any, **kwargs: Any) -> Any:
        call = Traced(fn, args, kwargs, argnums)
        ones = [array_module(o.data).ones(o.shape, o.dtype) for o in call.outs]
        return call.in_form(call.grads(ones, call.nested))

    return transformed


# ---- products with the Jacobian and the Hessian ---------------------------------------------------------------------


@explained
def vjp(
    fn: Callable[..., T], *args: Any, argnums: Argnums = None, has_aux: bool = False, **kwargs: Any
) -> tuple[T, Function]:
    """``fn(*args)``, and a function that maps a gradient ``u`` of the result to ``uᵀ J``, as often as one likes.

    ``argnums`` names the arguments to differentiate by, by default all. With ``has_aux`` it gives (out, pullback, aux).

    >>> out, pullback = vjp(lambda x: x * x, np.array([1.0, 2.0]))
    >>> print(pullback(np.array([1.0, 10.0])).data)
    [ 2. 40.]
    """
    call = Traced(fn, args, kwargs, argnums, has_aux)

    @explained
    def pullback(u: Any) -> Any:
        parts_of_u = matched(call.out, u, "the gradient")
        seeds = [
            s if isinstance(s, Tensor) else asarray(s, o.dtype) for s, o in zip(parts_of_u, call.outs, strict=True)
        ]
        return call.in_form(call.grads(seeds, call.nested or any(s.requires_grad for s in seeds), retain=True))

    return call.with_aux(call.detached(), pullback, has_aux=has_aux)  # type: ignore[no-any-return]


@explained
def jvp(fn: Callable[..., T], args: Any, tangents: Any, has_aux: bool = False, **kwargs: Any) -> tuple[T, T]:
    """``fn(*args)`` and the product ``J t`` with tangents of the shapes of the arguments: forward mode.

    ``args`` is a tuple or list of arguments, or one alone, and so is ``tangents``; an argument whose tangent is None
    is a constant. ``fn`` runs once, and the graph is walked upwards (``minigrad/forward.py``).

    >>> out, product = jvp(lambda x: x * x, np.array([1.0, 2.0]), np.array([1.0, 10.0]))
    >>> print(product.data)
    [ 2. 40.]
    """
    args = several(args)
    places, given = _tangents(args, tangents)
    with Calls() as calls:
        call = Traced(fn, args, kwargs, places, has_aux)
    t = [_typed(v, variable) for v, variable in zip(given, call.variables, strict=True)]
    call.nested = call.nested or _recorded(t)
    product = _pushed(call, t, calls)
    return call.with_aux(call.detached(), filled(call.out, iter(product)), has_aux=has_aux)  # type: ignore[no-any-return]


def _pushed(call: Traced, t: Sequence[Tensor], calls: Calls) -> list[Tensor]:
    """``J t`` for each result of a call."""
    edges: dict[Any, Any] = dict(zip((v.node or v for v in call.variables), t, strict=True))
    found = products(call.outs, edges, calls, call.nested)
    return [zeros_like(o) if f is None else asarray(f) for f, o in zip(found, call.outs, strict=True)]


@explained
def hvp(fn: Function, args: Any, vectors: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """``fn(*args)``, a scalar, and the product ``H v`` of its Hessian with vectors of the shapes of the arguments.

    >>> out, product = hvp(lambda x: (x**3).sum(), np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    >>> print(product.data)
    [ 6. 12.]
    """
    args = several(args)
    places, given = _tangents(args, vectors)
    call = Traced(fn, args, kwargs, places)
    call.single = len(args) == 1
    call.scalar()
    v = [_typed(vector, variable) for vector, variable in zip(given, call.variables, strict=True)]
    with enable_grad():
        slopes = call.grads([None], create=True)
    call.nested = call.nested or _recorded(v)
    return call.detached(), call.in_form(grads(slopes, call.variables, v, call.nested))


# ---- whole Jacobians and Hessians -----------------------------------------------------------------------------------


@overload
def jacobian(fn: Function, arg: TensorLike, /, *, mode: str | None = None) -> Tensor: ...
@overload
def jacobian(fn: Function, arg: TensorLike, /, *args: TensorLike, mode: str | None = None) -> tuple[Tensor, ...]: ...
@overload
def jacobian(
    fn: Function, /, *args: Any, mode: str | None = None, argnums: Argnums = None, has_aux: bool = False, **kwargs: Any
) -> Any: ...
@explained
def jacobian(
    fn: Function, /, *args: Any, mode: str | None = None, argnums: Argnums = None, has_aux: bool = False, **kwargs: Any
) -> Any:
    """All partial derivatives: for each argument an array of shape ``out.shape + arg.shape``.

    mode     "reverse" makes a row for each result, many in one pass; "forward" a column for each element of the
             arguments; None chooses the one that takes fewer
    argnums  the arguments to differentiate by, by default all
    has_aux  whether ``fn`` returns (out, aux); then the result is (jacobian, aux)

    Without arguments it returns the function that computes the Jacobian, with respect to the first argument unless
    ``argnums`` says otherwise. Where ``fn`` returns a container, the Jacobians stand in one like it.

    >>> print(jacobian(lambda x: x * x, np.array([1.0, 2.0])).data)
    [[2. 0.]
     [0. 4.]]
    """
    if mode not in (None, "forward", "reverse"):
        raise ArgumentError('mode "forward", "reverse" or None', repr(mode), "None chooses by shape")
    if not args:
        options: dict[str, Any] = {"mode": mode, "argnums": 0 if argnums is None else argnums, "has_aux": has_aux}

        @_named("Jacobian", fn)
        def transformed(*args: Any, **named: Any) -> Any:
            return jacobian(fn, *_some(args, "jacobian"), **options, **kwargs, **named)

        return transformed
    with Calls() as calls:
        call = Traced(fn, args, kwargs, argnums, has_aux)
    columns, rows = (sum(t.size for t in tensors) for tensors in (call.variables, call.outs))
    forward = mode == "forward" or (mode is None and columns < rows)
    blocks = _by_columns(call, calls) if forward else [_by_rows(call, out) for out in call.outs]
    return call.with_aux(filled(call.out, map(call.in_form, blocks)), has_aux=has_aux)


def _some(args: Sequence[Any], name: str) -> Sequence[Any]:
    """The arguments of a transformed function, of which there must be one."""
    if not args:
        raise CallError("at least one argument to differentiate by", "none", f"{name}(fn)(x), or {name}(fn, x)")
    return args


def _by_rows(call: Traced, out: Tensor) -> list[Tensor]:
    """The blocks of one result by each variable, from reverse passes."""
    if not out.requires_grad:
        return [_block(out, v) for v in call.variables]
    xp, most = array_module(out.data), at_once([out], hooks=True)
    found: list[list[Any]] = [[] for _ in call.variables]
    for start in range(0, out.size, most):
        count = min(most, out.size - start)
        units = xp.eye(count, out.size, start, dtype=out.dtype).reshape(count, *out.shape)
        if most == 1:
            part = grads([out], call.variables, [Tensor._wrap(units[0])], call.nested, retain=True)
            rows: list[Any] = [ops.reshape(g, (1, *g.shape)) for g in part]
        else:
            rows = pull_rows(out, call.variables, units, call.nested)
        for pieces, piece, v in zip(found, rows, call.variables, strict=True):
            pieces.append(xp.zeros((count, *v.shape), v.dtype) if piece is None else piece)
    return [_block(out, v, pieces) for v, pieces in zip(call.variables, found, strict=True)]


def _block(out: Tensor, variable: Tensor, pieces: Sequence[Any] = (), axis: int = 0) -> Tensor:
    shape = out.shape + variable.shape
    if not pieces:
        return Tensor._wrap(array_module(variable.data).zeros(shape, variable.dtype))
    whole = pieces[0] if len(pieces) == 1 else ops.concatenate(list(pieces), axis)
    whole = ops.reshape(whole, shape)
    return whole if isinstance(whole, Tensor) else Tensor._wrap(array_module(whole).array(whole))


def _by_columns(call: Traced, calls: Calls) -> list[list[Tensor]]:
    """For each result its blocks by each variable, from forward passes, each with the columns of many elements."""
    blocks: list[list[Tensor]] = [[] for _ in call.outs]
    most = at_once(call.outs, hooks=False)
    for variable in call.variables:
        columns: list[list[Any]] = [[] for _ in call.outs]
        xp = array_module(variable.data)
        for start in range(0, variable.size, most):
            count = min(most, variable.size - start)
            units = xp.eye(count, variable.size, start, dtype=variable.dtype).reshape(count, *variable.shape)
            tangents = {variable.node or variable: Tensor._wrap(units)}
            found = products(call.outs, tangents, calls, call.nested, count)
            for column, product, out in zip(columns, found, call.outs, strict=True):
                column.append(xp.zeros((count, *out.shape), out.dtype) if product is None else product)
        for block, out, pieces in zip(blocks, call.outs, columns, strict=True):
            block.append(_block(out, variable, [ops.moveaxis(piece, 0, -1) for piece in pieces], axis=-1))
    return blocks


@overload
def hessian(fn: Function, arg: TensorLike, /) -> Tensor: ...
@overload
def hessian(fn: Function, arg: TensorLike, /, *args: TensorLike) -> tuple[tuple[Tensor, ...], ...]: ...
@overload
def hessian(fn: Function, /, *args: Any, argnums: Argnums = None, **kwargs: Any) -> Any: ...
@explained
def hessian(fn: Function, /, *args: Any, argnums: Argnums = None, **kwargs: Any) -> Any:
    """All second derivatives of a scalar function: ``arg.shape + arg.shape``, or a tuple of tuples for several args.

    ``argnums`` names the arguments to differentiate by, by default all. Without arguments it returns the
    function that computes the Hessian, with respect to the first argument unless ``argnums`` says otherwise.

    >>> print(hessian(lambda x: (x**3).sum(), np.array([1.0, 2.0])).data)
    [[ 6.  0.]
     [ 0. 12.]]
    """
    if not args:
        first = 0 if argnums is None else argnums

        @_named("Hessian", fn)
        def transformed(*args: Any, **named: Any) -> Any:
            return hessian(fn, *_some(args, "hessian"), argnums=first, **kwargs, **named)

        return transformed
    every = tuple(range(len(args))) if len(args) > 1 else 0
    places = every if argnums is None else argnums
    return jacobian(_gradient(fn, places, False), *args, mode="reverse", argnums=places, **kwargs)
