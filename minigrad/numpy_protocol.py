"""What NumPy's functions do with a Tensor: ours run in their place, under NumPy's signature, or a refusal says so.

NumPy asks ``Tensor.__array_function__`` and ``Tensor.__array_ufunc__`` before it touches a Tensor. Both tables are
keyed by the function object, since a bare name means different things in ``numpy`` and ``numpy.linalg``. A function in
neither table runs on plain arrays if nothing among its arguments is recorded. Otherwise it is refused: its result would
be cut from the graph without a word.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad import linalg, ops
from minigrad.backend import array_module, as_dtype, is_array, to_gpu_of_any
from minigrad.engine import core
from minigrad.engine.recording import current_mode
from minigrad.engine.registry import REGISTRY
from minigrad.errors import CallError
from minigrad.messages.arguments import as_operand, tensors_in
from minigrad.messages.explain import FOREIGN, describe, translate
from minigrad.ops.special import i0, of_scipy

ABSENT = np._NoValue  # what NumPy's functions have as a default where None means something
NEEDLESS = {
    "casting",
    "copy",
    "device",
    "kind",
    "like",
    "optimize",
    "overwrite_input",
    "stable",
    "subok",
}  # they don't change the numbers
ORDERS = (None, "C", "K", "A")  # of memory; the rows' order is the only one that a Tensor promises

# ---- NumPy's signatures ---------------------------------------------------------------------------------------------


class Adapter(NamedTuple):
    """One of our operations under NumPy's signature.

    takes     NumPy's parameters in order; ``theirs=ours`` where the names differ, after ``|`` those by keyword alone
    combined  how an ``initial`` value enters the result
    many      the first argument is a sequence of arrays
    """

    name: str
    operation: Callable[..., Any]
    takes: str
    combined: Callable[..., Any] | None = None
    many: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.bound(args, kwargs)
        for name, value in list(given.items()):
            if name in NEEDLESS or (name == "order" and value in ORDERS) or (name == "out" and value is None):
                del given[name]
            elif name in ("out", "order"):
                hint = "nothing works in place" if name == "out" else "the order of rows is the only one"
                raise CallError(f"{self.name} without {name}=", f"{name}={describe(value)}", hint)
        dtype, initial = given.pop("dtype", None), (given.pop("initial", None) if self.combined else None)
        ours = dict(pair.partition("=")[::2] for pair in self.takes.replace("|", "").split())
        call = {ours[name] or name: value for name, value in given.items()}
        first = next(iter(call))
        x = call.pop(first)
        if dtype is not None:
            x = [_cast(part, dtype) for part in x] if self.many else _cast(x, dtype)
        result = self.operation(x, **call)
        return result if initial is None else self.combined(result, initial)  # type: ignore[misc]

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by NumPy's names, those left out not among them."""
        places, _, named = self.takes.partition("|")
        names = [pair.partition("=")[0] for pair in places.split()]
        known = {*names, *(pair.partition("=")[0] for pair in named.split())}
        unknown = [name for name in kwargs if name not in known or name in names[: len(args)]]
        if len(args) > len(names) or unknown:
            got = f"{unknown[0]}=" if unknown else f"{len(args)} arguments"
            raise CallError(
                f"{self.name}({', '.join(names)})", got, "the other options of NumPy have no derivative here"
            )
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: value for name, value in given.items() if value is not ABSENT}


def _cast(x: Any, dtype: Any) -> Any:
    return ops.astype(x if hasattr(x, "dtype") else np.asarray(x), as_dtype(dtype))


def _adapters(*rows: tuple[Any, ...]) -> dict[Any, Any]:
    return {row[0]: Adapter(full_name(row[0]), *row[1:]) for row in rows}


def full_name(function: Any) -> str:
    """How a user writes a function of NumPy, or of another library.

    >>> full_name(np.linalg.norm), full_name(np.exp)
    ('np.linalg.norm', 'np.exp')
    """
    module = getattr(function, "__module__", None) or ("numpy" if hasattr(np, function.__name__) else "")
    prefix = "np" + module.removeprefix("numpy") if module.split(".")[0] == "numpy" else module
    return f"{prefix}.{function.__name__}".lstrip(".")


# ---- functions whose meaning differs from ours ----------------------------------------------------------------------


def _flat_first(operation: Callable[..., Any]) -> Callable[..., Any]:
    """``operation`` along an axis, where None means that of the flattened array."""

    def along(x: Any, axis: Any = -1, **rest: Any) -> Any:
        return operation(ops.ravel(x), axis=0, **rest) if axis is None else operation(x, axis=axis, **rest)

    return along


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    return array_function(np.nonzero, (condition,), {}) if x is None and y is None else ops.where(condition, x, y)


def _average(x: Any, axis: Any = None, weights: Any = None, returned: Any = False, keepdims: Any = False) -> Any:
    if returned:
        raise _refused("np.average with returned=True", "w.sum(axis) is the sum of the weights")
    return ops.average(x, axis, weights, keepdims)


def _clip(x: Any, a_min: Any = None, a_max: Any = None, min: Any = None, max: Any = None) -> Any:
    return ops.clip(x, a_min if min is None else min, a_max if max is None else max)


def _svd(x: Any, full_matrices: Any = True, compute_uv: Any = True) -> Any:
    return linalg.svd(x, full_matrices) if compute_uv else linalg.svdvals(x)


def _einsum(*operands: Any, out: Any = None, optimize: Any = False, **options: Any) -> Any:
    """``np.einsum`` of a text, or of arrays each followed by the list of its axes."""
    if out is not None or options:
        raise CallError(
            "np.einsum without options but optimize=", ", ".join(options) or "out=", "nothing works in place"
        )
    return ops.einsum(*operands)


def _like(value: Any) -> Callable[..., Any]:
    """``np.zeros_like`` and its kind: x gives the shape and dtype; a gradient flows to the value that fills it."""

    def made(x: Any, fill: Any = value, dtype: Any = None, shape: Any = None) -> Any:
        wanted = None if dtype is None else as_dtype(dtype)
        if not _recorded(fill):
            return core.Tensor._wrap(array_module(x).full_like(_plain(x), _plain(fill), dtype=wanted, shape=shape))
        return ops.broadcast_to(ops.astype(fill, wanted or x.dtype), np.shape(_plain(x)) if shape is None else shape)

    return made


def _of_several(function: Any, operation: Callable[..., Any]) -> Callable[..., Any]:
    """A function of several arrays: ours if one is recorded, else NumPy's, from which SciPy takes plain arrays."""

    def tensor(x: Any) -> Any:
        return x if isinstance(x, core.Tensor) else core.Tensor._wrap(np.asarray(x))

    return lambda *arrays: operation(*map(tensor, arrays)) if _recorded(arrays) else function(*_plain(arrays))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **_adapters(
        # ---- reductions ----
        (np.sum, ops.sum, "a=x axis dtype out keepdims initial where", ops.add),
        (np.prod, ops.prod, "a=x axis dtype out keepdims initial where", ops.multiply),
        (np.mean, ops.mean, "a=x axis dtype out keepdims | where"),
        (np.max, ops.max, "a=x axis out keepdims initial where"),
        (np.min, ops.min, "a=x axis out keepdims initial where"),
        (np.amax, ops.amax, "a=x axis out keepdims initial where"),
        (np.amin, ops.amin, "a=x axis out keepdims initial where"),
        (np.var, ops.var, "a=x axis dtype out ddof keepdims | where correction=ddof"),
        (np.std, ops.std, "a=x axis dtype out ddof keepdims | where correction=ddof"),
        (np.any, ops.any, "a=x axis out keepdims"),
        (np.all, ops.all, "a=x axis out keepdims"),
        (np.count_nonzero, ops.count_nonzero, "a=x axis | keepdims"),
        (np.argmax, ops.argmax, "a=x axis out | keepdims"),
        (np.argmin, ops.argmin, "a=x axis out | keepdims"),
        (np.cumsum, ops.cumsum, "a=x axis dtype out"),
        (np.cumprod, ops.cumprod, "a=x axis dtype out"),
        *(
            (
                getattr(np, f"cumulative_{name}"),
                getattr(ops, f"cumulative_{name}"),
                "x | axis dtype out include_initial",
            )
            for name in ("sum", "prod")
            if hasattr(np, "cumulative_sum")
        ),  # 2.1
        (np.trace, ops.trace, "a=x offset axis1 axis2 dtype out"),
        (np.average, _average, "a=x axis weights returned | keepdims"),
        (np.cov, ops.cov, "m=x | rowvar ddof"),
        (np.corrcoef, ops.corrcoef, "x | rowvar"),
        (np.median, ops.median, "a=x axis out overwrite_input keepdims"),
        (np.quantile, ops.quantile, "a=x q axis out | keepdims"),
        (np.percentile, ops.percentile, "a=x q axis out | keepdims"),
        (np.nansum, ops.nansum, "a=x axis dtype out keepdims | where"),
        (np.nanmean, ops.nanmean, "a=x axis dtype out keepdims | where"),
        (np.nanmax, ops.nanmax, "a=x axis out keepdims"),
        (np.nanmin, ops.nanmin, "a=x axis out keepdims"),
        # ---- along an axis ----
        (np.diff, ops.diff, "a=x n axis prepend append"),
        (np.trapezoid, ops.trapezoid, "y x dx axis"),
        (np.interp, ops.interp, "x xp fp left right period"),
        (np.unwrap, ops.unwrap, "p=x discont axis | period"),
        (np.convolve, ops.convolve, "a=x v=y mode"),
        (np.correlate, ops.correlate, "a=x v=y mode"),
        (np.sinc, ops.sinc, "x"),
        (np.i0, i0, "x"),
        # ---- shapes ----
        (np.reshape, ops.reshape, "a=x shape order | copy"),
        (np.ravel, ops.ravel, "a=x order"),
        (np.transpose, ops.transpose, "a=x axes"),
        (np.permute_dims, ops.transpose, "a=x axes"),
        (np.swapaxes, ops.swapaxes, "a=x axis1 axis2"),
        (np.moveaxis, ops.moveaxis, "a=x source destination"),
        (np.squeeze, ops.squeeze, "a=x axis"),
        (np.expand_dims, ops.expand_dims, "a=x axis"),
        (np.broadcast_to, ops.broadcast_to, "array=x shape subok"),
        (np.flip, ops.flip, "m=x axis"),
        (np.roll, ops.roll, "a=x shift axis"),
        (np.rot90, ops.rot90, "m=x k axes"),
        (np.tile, ops.tile, "A=x reps"),
        (np.repeat, ops.repeat, "a=x repeats axis"),
        (np.pad, ops.pad, "array=x pad_width mode | constant_values"),
        (np.tril, ops.tril, "m=x k"),
        (np.triu, ops.triu, "m=x k"),
        (np.diag, ops.diag, "v=x k"),
        (np.diagonal, ops.diagonal, "a=x offset axis1 axis2"),
        (np.split, ops.split, "ary=x indices_or_sections axis"),
        (np.array_split, ops.array_split, "ary=x indices_or_sections axis"),
        (np.concatenate, ops.concatenate, "arrays axis out | dtype casting", None, True),
        (np.stack, ops.stack, "arrays axis out | dtype casting", None, True),
        (np.hstack, ops.hstack, "tup=arrays | dtype casting", None, True),
        (np.vstack, ops.vstack, "tup=arrays | dtype casting", None, True),
        (np.dstack, ops.dstack, "tup=arrays", None, True),
        (np.column_stack, ops.column_stack, "tup=arrays", None, True),
        (np.append, ops.append, "arr=x values axis"),
        (np.hsplit, ops.hsplit, "ary=x indices_or_sections"),
        (np.vsplit, ops.vsplit, "ary=x indices_or_sections"),
        (np.dsplit, ops.dsplit, "ary=x indices_or_sections"),
        (np.flipud, ops.flipud, "m=x"),
        (np.fliplr, ops.fliplr, "m=x"),
        (np.rollaxis, ops.rollaxis, "a=x axis start"),
        (np.copy, lambda x: x.copy(), "a=x order subok"),
        # ---- picking and sorting ----
        (np.take, ops.take, "a=x indices axis out"),
        (np.partition, _flat_first(ops.partition), "a=x kth axis kind order"),
        (np.select, ops.select, "condlist choicelist default"),
        (np.take_along_axis, _flat_first(ops.take_along_axis), "arr=x indices axis"),
        (np.sort, _flat_first(ops.sort), "a=x axis kind order | stable"),
        (np.argsort, _flat_first(ops.argsort), "a=x axis kind order | stable"),
        (np.clip, _clip, "a=x a_min a_max out | min max"),
        (np.nan_to_num, ops.nan_to_num, "x copy nan posinf neginf"),
        (np.round, ops.round, "a=x decimals out"),
        (np.around, ops.round, "a=x decimals out"),
        # ---- products ----
        (np.dot, ops.dot, "a=x b=y out"),
        (np.vdot, ops.vdot, "a=x b=y"),
        (np.inner, ops.inner, "a=x b=y"),
        (np.outer, ops.outer, "a=x b=y out"),
        (np.kron, ops.kron, "a=x b=y"),
        (np.tensordot, ops.tensordot, "a=x b=y axes"),
        (np.cross, ops.cross, "a=x b=y axisa axisb axisc axis"),
        *([(np.vecdot, ops.vecdot, "x1=x x2=y | axis")] if hasattr(np, "vecdot") else []),
        (np.matrix_transpose, linalg.matrix_transpose, "x"),
        # ---- linear algebra ----
        (np.linalg.norm, linalg.norm, "x ord axis keepdims"),
        (np.linalg.vector_norm, linalg.vector_norm, "x | axis keepdims ord"),
        (np.linalg.matrix_norm, linalg.matrix_norm, "x | keepdims ord"),
        (np.linalg.trace, linalg.trace, "x | offset dtype"),
        (np.linalg.diagonal, linalg.diagonal, "x | offset"),
        (np.linalg.matmul, linalg.matmul, "x1=x x2=y"),
        (np.linalg.outer, linalg.outer, "x1=x x2=y"),
        (np.linalg.tensordot, linalg.tensordot, "x1=x x2=y | axes"),
        (np.linalg.matrix_transpose, linalg.matrix_transpose, "x"),
        (np.linalg.matrix_power, linalg.matrix_power, "a=x n"),
        (np.linalg.multi_dot, linalg.multi_dot, "arrays out"),
        (np.linalg.solve, linalg.solve, "a b"),
        (np.linalg.lstsq, linalg.lstsq, "a b rcond"),
        (np.linalg.inv, linalg.inv, "a=x"),
        (np.linalg.tensorinv, linalg.tensorinv, "a=x ind"),
        (np.linalg.tensorsolve, linalg.tensorsolve, "a b axes"),
        (np.linalg.cross, linalg.cross, "x1=x x2=y | axis"),
        *([(np.linalg.vecdot, linalg.vecdot, "x1=x x2=y | axis")] if hasattr(np.linalg, "vecdot") else []),
        (np.linalg.pinv, linalg.pinv, "a=x rcond | rtol=rcond"),
        (np.linalg.det, linalg.det, "a=x"),
        (np.linalg.slogdet, linalg.slogdet, "a=x"),
        (np.linalg.cholesky, linalg.cholesky, "a=x | upper"),
        (np.linalg.qr, linalg.qr, "a=x mode"),
        (np.linalg.eig, linalg.eig, "a=x"),
        (np.linalg.eigvals, linalg.eigvals, "a=x"),
        (np.linalg.eigh, linalg.eigh, "a=x UPLO"),
        (np.linalg.eigvalsh, linalg.eigvalsh, "a=x UPLO"),
        (np.linalg.svd, _svd, "a=x full_matrices compute_uv"),
        (np.linalg.svdvals, linalg.svdvals, "x"),
        (np.linalg.cond, linalg.cond, "x p"),
        # ---- constants ----
        (np.zeros_like, _like(0), "a=x dtype order subok shape | device"),
        (np.ones_like, _like(1), "a=x dtype order subok shape | device"),
        (np.full_like, _like(0), "a=x fill_value=fill dtype order subok shape | device"),
    ),
    **({np.astype: lambda x, dtype, copy=True, device=None: _cast(x, dtype)} if hasattr(np, "astype") else {}),  # 2.1
    np.broadcast_arrays: _of_several(np.broadcast_arrays, lambda *x: ops.broadcast_arrays(*x)),
    **{f: _of_several(f, getattr(ops, f.__name__)) for f in (np.atleast_1d, np.atleast_2d, np.atleast_3d)},
    **({np.unstack: lambda x, /, *, axis=0: ops.unstack(x, axis)} if hasattr(np, "unstack") else {}),  # 2.1
    np.gradient: lambda f, *steps, axis=None, edge_order=1: ops.gradient(f, *steps, axis=axis, edge_order=edge_order),
    np.real: lambda val: val,  # all numbers are
    np.real_if_close: lambda a, tol=100: a,
    np.imag: _like(0),
    np.einsum: _einsum,
    np.where: _where,
    np.meshgrid: lambda *arrays, copy=True, indexing="xy": ops.meshgrid(*arrays, indexing=indexing),
}
"""Functions that ours take the place of."""

INSPECTING = {
    np.shape, np.ndim, np.size, np.allclose, np.isclose, np.array_equal, np.array_equiv, np.array_repr, np.array_str,
    np.array2string, np.iscomplexobj, np.isrealobj, np.iscomplex, np.isreal, np.result_type, np.can_cast,
    np.may_share_memory, np.shares_memory, np.searchsorted, np.nonzero, np.flatnonzero, np.argwhere, np.digitize,
    np.argpartition, np.lexsort, np.isin, np.nanargmax, np.nanargmin, np.empty_like, np.isposinf, np.isneginf,
    np.linalg.matrix_rank,
}  # fmt: skip
"""Functions that look at numbers and make none through which a gradient could flow."""

WRITING = {np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal}
"""Functions that write into their first argument."""

# ---- ufuncs ---------------------------------------------------------------------------------------------------------

COMPARISONS = {
    np.equal: "==", np.not_equal: "!=", np.less: "<", np.less_equal: "<=", np.greater: ">", np.greater_equal: ">=",
    np.bitwise_and: "&", np.bitwise_or: "|", np.bitwise_xor: "^", np.invert: "~",
    np.logical_and: "logical_and", np.logical_or: "logical_or", np.logical_xor: "logical_xor",
    np.logical_not: "logical_not", np.signbit: "signbit",
}  # fmt: skip
"""Comparisons and bitwise operations, which give plain boolean tensors, with the sign that a user writes."""


def compare(name: str, *values: Any) -> Any:
    """A comparison or a bitwise operation, NumPy's of this name: a plain tensor, without a derivative."""
    sign = COMPARISONS[getattr(np, name)]
    if core.observers:
        core.notify("read", values)
    arrays = [v._data if isinstance(v, core.Tensor) else as_operand(v, f"each side of {sign}") for v in values]
    arrays = [to_gpu_of_any(a, values) if isinstance(v, list) else a for v, a in zip(values, arrays, strict=True)]
    try:
        return core.Tensor._wrap(getattr(array_module(*arrays), name)(*arrays))
    except FOREIGN as error:
        call = f" {sign} ".join(map(describe, arrays)) if len(arrays) > 1 else f"{sign}{describe(arrays[0])}"
        raise translate(call, sign, arrays, error) from None


UFUNCS: dict[Any, Any] = {
    **{
        getattr(np, name): operation
        for name, operation in REGISTRY.items()
        if isinstance(getattr(np, name, None), np.ufunc)
    },
    np.deg2rad: ops.deg2rad,
    np.radians: ops.deg2rad,
    np.rad2deg: ops.rad2deg,
    np.degrees: ops.rad2deg,
    np.fabs: ops.absolute,
    np.positive: lambda x: x,
    np.conjugate: lambda x: x,
    np.rint: ops.round,
    np.float_power: ops.power,
    **{ufunc: functools.partial(compare, ufunc.__name__) for ufunc in COMPARISONS},
}
REDUCED: dict[Any, Any] = {  # what ``ufunc.reduce`` is, and ``ufunc.accumulate``; both go along axis 0 by default
    np.add: (np.sum, np.cumsum), np.multiply: (np.prod, np.cumprod), np.maximum: (np.max, None),
    np.minimum: (np.min, None), np.logical_and: (np.all, None), np.logical_or: (np.any, None),
}  # fmt: skip


def _is_known(ufunc: Any) -> bool:
    """Whether one of ours takes the place of ``ufunc``; SciPy's enter the table once SciPy is there."""
    if ufunc not in UFUNCS and "scipy.special" in sys.modules:
        UFUNCS.update(of_scipy())
    return ufunc in UFUNCS


def _of_pairs(ufunc: Any, x: Any, y: Any) -> Any:
    """``ufunc.outer``: the function of each element of x with each of y."""
    return UFUNCS[ufunc](ops.reshape(x, (*np.shape(x), *[1] * np.ndim(y))), y)


# ---- the two entrances ----------------------------------------------------------------------------------------------


def array_function(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)``, a function of NumPy with a Tensor among its arguments."""
    ours = FUNCTIONS.get(function)
    if ours is not None:
        return ours(*args, **kwargs)
    if function in INSPECTING:
        return _wrapped(function(*_plain(args), **_plain(kwargs)))
    if function in WRITING and isinstance(args[0] if args else None, core.Tensor):
        raise _refused(full_name(function), "nothing works in place: minigrad.where, put_along_axis, x[i] = v")
    if _recorded((args, kwargs)):
        raise _refused(full_name(function))
    return function(*_plain(args), **_plain(kwargs))


def array_ufunc(ufunc: Any, method: str, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """``ufunc(*inputs)`` or a method of it, with a Tensor among the inputs or outputs."""
    name = full_name(ufunc) + ("" if method == "__call__" else f".{method}")
    into = options.get("out") or ()
    if any(isinstance(array, core.Tensor) for array in into):
        raise _refused(f"{name} with out=", "nothing works in place")
    options = {key: value for key, value in options.items() if key not in ("casting", "order", "subok")}
    if not into and options.get("where", True) is True:
        dtype = options.get("dtype")
        if method == "__call__" and _is_known(ufunc) and set(options) <= {"dtype", "where"}:
            return UFUNCS[ufunc](*(inputs if dtype is None else [_cast(x, dtype) for x in inputs]))
        if method == "outer" and _is_known(ufunc) and not options:
            return _of_pairs(ufunc, *inputs)
    if ufunc in REDUCED and method in ("reduce", "accumulate"):
        function = REDUCED[ufunc][method == "accumulate"]
        if function is not None:
            return FUNCTIONS[function](inputs[0], **{"axis": 0, **options, "out": into[0] if into else None})
    if _recorded((inputs, options)):
        raise _refused(name + " with out=" * bool(into), "nothing works in place" * bool(into))
    return getattr(ufunc, method)(*_plain(inputs), **_plain(options))


def _refused(name: str, hint: str = "") -> CallError:
    way = "x.numpy() gives a plain array, through which no gradient flows"
    return CallError("a NumPy function that minigrad differentiates", name, hint or way)


def _recorded(value: Any) -> bool:
    """Whether a Tensor in ``value`` belongs to a graph that is being recorded."""
    return current_mode().recording and any(tensor._requires_grad for tensor in tensors_in([value]))


def _plain(value: Any) -> Any:
    """``value`` with the Tensors in it replaced by arrays."""
    if isinstance(value, core.Tensor):
        return value._data
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def _wrapped(value: Any) -> Any:
    """``value`` with the arrays in it as Tensors."""
    if is_array(value):
        return core.Tensor._wrap(value)
    return tuple(map(_wrapped, value)) if type(value) is tuple and any(map(is_array, value)) else value
