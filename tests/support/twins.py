"""How NumPy and torch are asked for the same thing, where name, arguments or axes differ from ours.

Each function gets the module, then our arguments. What stands in no table here is called by the name that the
operation declares (``torch="nn.functional.silu"``) or by its own. One that declares ``numpy=False``, since NumPy has no
such function, may have a formula here. Twins follow definitions, not our code.
"""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import scipy.integrate
import scipy.linalg

from minigrad.engine.registry import Operation


def twin(operation: Operation[Any], module: Any) -> Callable[..., Any] | None:
    """What does the same as ``operation`` in ``module``, NumPy or torch; None where it says that nothing does."""
    library = module.__name__
    own = {"numpy": NUMPY, "torch": TORCH}[library].get(operation.name)
    declared = getattr(operation, library)
    assert not (own and declared), f"{operation.name} has two twins: {library}= where it is defined, and a line here"
    declared = own or declared
    if callable(declared):
        return lambda *args, **kwargs: declared(module, *args, **kwargs)
    return None if declared is False else attrgetter(declared or operation.name)(module)


# ---- NumPy ----------------------------------------------------------------------------------------------------------


def _scatter(n, x, indices, values, axis=-1):
    out = n.array(x)
    grid = list(n.indices(n.shape(indices)))
    grid[axis] = indices
    n.add.at(out, tuple(grid), values)
    return out


def _put(n, x, indices, values, axis=-1):
    out = n.array(x)
    for place in n.ndindex(n.shape(indices)):
        to = list(place)
        to[axis] = indices[place]
        out[tuple(to)] = n.broadcast_to(values, n.shape(indices))[place]
    return out


def _add_at(n, g, index, shape):
    out = n.zeros(shape, g.dtype)
    n.add.at(out, index, g)
    return out


def _recurrence(n, a, b):
    rows = [b[..., 0]] if b.shape[-1] else []
    for t in range(1, b.shape[-1]):
        rows.append(b[..., t] + a[..., t] * rows[-1])
    return n.stack(rows, -1) if rows else n.zeros_like(b)


def _cumulated(name, first):
    """In NumPy since 2.1; the same calls of torch."""

    def run(n, x, axis=None, include_initial=False):
        x, axis = n.atleast_1d(x), axis or 0
        out = getattr(n, name)(x, axis)
        return n.concat([n.full_like(n.sum(out, axis, keepdims=True), first), out], axis) if include_initial else out

    return run


CUMULATED = {"cumulative_sum": _cumulated("cumsum", 0), "cumulative_prod": _cumulated("cumprod", 1)}


def _norm(n, x, ord=2, axis=None, keepdims=False):
    if ord == math.inf and not x.size:  # 0, in NumPy from 2.4 on
        return n.max(abs(x), axis, keepdims=keepdims, initial=0)
    return n.linalg.vector_norm(x, ord=ord, axis=axis, keepdims=keepdims)


def _of_matrices(function, signature):
    """A function of SciPy for stacks of matrices, which not every version takes."""
    stacked = np.vectorize(function, otypes=[float], signature=signature)
    return lambda n, *matrices: stacked(*matrices)


def _topk(n, x, k, axis=-1):
    order = n.argsort(-x, axis, kind="stable").take(range(k), axis)
    return n.take_along_axis(x, order, axis), order


def _hash(seed, row, column):
    """Of dropout: a number of 32 bits from the seed and the place, in integers without limit."""
    key = (row + seed) * 0x9E3779B97F4A7C15 % 2**64
    key = (key ^ key >> 32) * 0xD6E8FEB86659FD93 % 2**64 >> 32
    number = key ^ column * 0x9E3779B9 % 2**32
    number = (number ^ number >> 16) * 0x7FEB352D % 2**32
    number = (number ^ number >> 15) * 0x846CA68B % 2**32
    return number ^ number >> 16


def _drop(n, x, p, seed):
    x = n.asarray(x)
    width = x.shape[-1] if x.ndim else 1
    kept = [_hash(seed, *divmod(i, max(width, 1))) >= p * 2**32 for i in range(x.size)]
    return n.where(n.reshape(kept, x.shape), x / (1 - p), 0).astype(x.dtype)


# Formulas of the fused operations, from their papers. Samples are small numbers, so nothing here can overflow.
# What the operations refuse by their contract, NumPy's formulas must be told to refuse.


def _logistic(n, x):
    return 1 / (1 + n.exp(-x))


def _normal(n, x):
    """The distribution function of the standard normal."""
    return n.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)), otypes=[float])(x)


def _gelu(n, x, approximate="none"):
    if approximate == "none":
        return x * _normal(n, x)
    return x * (1 + n.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _softmax(n, x, axis=-1):
    x.shape[axis]  # which a single number doesn't have
    return n.exp(x) / n.exp(x).sum(axis, keepdims=True)


def _normalized_axes(x, normalized_shape, weight):
    shape = tuple(normalized_shape or (x.shape[-1:] if weight is None else weight.shape))
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError("no such axes")
    return tuple(range(-len(shape), 0))


def _rms_norm(n, x, normalized_shape=None, weight=None, eps=1e-5):
    axes = _normalized_axes(x, normalized_shape, weight)
    y = x / n.sqrt((x**2).mean(axes, keepdims=True) + eps)
    return y if weight is None else y * weight


def _layer_norm(n, x, normalized_shape=None, weight=None, bias=None, eps=1e-5):
    axes = _normalized_axes(x, normalized_shape, weight)
    y = (x - x.mean(axes, keepdims=True)) / n.sqrt(x.var(axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _linear(n, x, weight, bias=None):
    y = n.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _qkv(n, x, wq, wk, wv, gain=None, eps=1e-5, cos=None, sin=None):
    rows = x if gain is None else _rms_norm(n, x, None, gain, eps)
    q, k, v = (_linear(n, rows, w) for w in (wq, wk, wv))
    return [q, k, v] if cos is None else [_turned_rows(n, q, cos, sin), _turned_rows(n, k, cos, sin), v]


def _turned_rows(n, x, cos, sin):
    """Heads cut out of the rows, each turned."""
    if not cos.shape[1]:
        raise ValueError("heads without features")
    heads = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * cos.shape[1]), 2 * cos.shape[1])
    a, b, cos, sin = heads[..., ::2], heads[..., 1::2], cos[:, None], sin[:, None]
    return n.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def _swiglu_ffn(n, x, w1, w3, w2, gain=None, eps=1e-5, recompute=False):
    rows = x if gain is None else _rms_norm(n, x, None, gain, eps)
    gate = _linear(n, rows, w1)
    return _linear(n, gate * _logistic(n, gate) * _linear(n, rows, w3), w2)


def _embedding(n, ids, weight, padding_idx=None):
    return weight.reshape(weight.shape[0], weight.shape[1])[ids]


def _cross_entropy(n, logits, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    classes = n.arange(logits.shape[-1])
    if not classes.size:
        raise ValueError("no classes")
    log_p = logits - n.log(n.exp(logits).sum(-1, keepdims=True))
    counted = n.ones(logits.shape[:-1], bool) if targets.dtype.kind == "f" else targets != ignore_index
    p = targets if targets.dtype.kind == "f" else targets[..., None] == classes
    p = (1 - label_smoothing) * p + n.divide(label_smoothing, classes.size)
    rows = n.where(counted, -(p * log_p).sum(-1), 0)
    if reduction == "none":
        return rows
    return n.asarray(rows.sum() / (max(counted.sum(), 1) if reduction == "mean" else 1))


def _attention(n, q, k, v, mask=None, is_causal=False, scale=None, dropout_p=0.0, seed=0, window=None, pattern=None):
    (heads,) = n.broadcast_shapes(*[(1, *x.shape)[-3:-2] for x in (k, v)])
    if q.ndim > 2 and heads and q.shape[-3] != 1:
        k, v = (n.repeat(x, q.shape[-3] // heads, -3) if x.shape[-3] > 1 else x for x in (k, v))
    i, j = n.arange(q.shape[-2])[:, None], n.arange(k.shape[-2])
    seen = (j > i - (window or math.inf)) & (j < i + (1 if is_causal else window or math.inf))
    if pattern is not None:
        seen = (
            seen & n.kron(pattern.blocks, n.ones((pattern.size, pattern.size), bool))[: seen.shape[0], : seen.shape[1]]
        )
    scores = n.einsum("...id,...jd->...ij", q, k) * (scale or max(q.shape[-1], 1) ** -0.5)
    if mask is not None:
        seen, scores = (seen & mask, scores) if mask.dtype.kind == "b" else (seen, scores + mask)
    weights = n.where(seen, n.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    return n.einsum("...ij,...jd->...id", weights / n.where(total == 0, 1, total), v)


def _linear_attention(n, q, k, v, mask=None, is_causal=False, feature_map="elu+1", decay=None, chunk=None):
    (heads,) = n.broadcast_shapes(*[(1, *x.shape)[-3:-2] for x in (k, v)])
    products = {
        "elu+1": lambda q, k: _elu_plus_1(n, q) @ n.swapaxes(_elu_plus_1(n, k), -1, -2),
        "taylor": lambda q, k: (1 + ((q @ k.mT) * max(q.shape[-1], 1) ** -0.5 + 1) ** 2) / 2,
        "identity": lambda q, k: (q @ k.mT) * max(q.shape[-1], 1) ** -0.5,
    }
    if q.ndim > 2 and heads and q.shape[-3] != 1:
        k, v = (n.repeat(x, q.shape[-3] // heads, -3) if x.shape[-3] > 1 else x for x in (k, v))
    i, j = n.arange(q.shape[-2])[:, None], n.arange(k.shape[-2])
    seen = (j <= i) | (not is_causal)
    weights = n.where(seen if mask is None else seen & mask, products[feature_map](q, k), 0)
    if decay is not None:
        fading = n.repeat(n.broadcast_to(n.asarray(decay), (heads,)), q.shape[-3] // heads)[:, None, None]
        weights = weights * fading ** n.where(seen, i - j, 0)
    if decay is None and feature_map != "identity":
        total = weights.sum(-1, keepdims=True)
        weights = weights / n.where(total == 0, 1, total)
    return n.einsum("...ij,...jd->...id", weights, v)


def _elu_plus_1(n, x):
    return n.where(x > 0, x + 1, n.exp(n.minimum(x, 0)))


def _triangular(n, a, b, trans=0, lower=False, unit_diagonal=False):
    a = (n.tril if lower else n.triu)(a)
    a = n.where(n.eye(a.shape[-1]), 1, a) if unit_diagonal else a
    return n.linalg.solve(n.swapaxes(a, -1, -2) if trans in (1, "T") else a, b)


def _lstsq(n, a, b, rcond=None):
    x, squares, rank, s = n.linalg.lstsq(a, b, rcond)
    return x, squares, n.asarray(rank, int), s


def _symmetric(n, x, lower):
    """The symmetric matrix of which x has one triangle, for libraries whose gradient goes to both."""
    return n.tril(x) + n.tril(x, -1).mT if lower else n.triu(x) + n.triu(x, 1).mT


def _matrix_norm(n, x, keepdims=False, ord="fro"):
    if not x.size and ord in (1, 2, math.inf):  # 0, in NumPy from 2.4 on
        return n.zeros((*x.shape[:-2], *(1, 1) * keepdims), x.dtype)
    return n.linalg.matrix_norm(x, ord=ord, keepdims=keepdims)


NUMPY = {
    **CUMULATED,
    "matrix_norm": _matrix_norm,
    "substitute": lambda n, a, b, lower, unit_diagonal: _triangular(n, a, b, 0, lower, unit_diagonal),
    "solve_triangular": _triangular,
    "orthogonal_triangle": lambda n, x: n.linalg.qr(x),
    "real_eigen": lambda n, x: tuple(part.real for part in n.linalg.eig(x)),
    "trajectory": lambda n, y0, t, theta, func, options: scipy.integrate.odeint(func, y0, t, (theta,), **options),
    "solve_banded": lambda n, l_and_u, ab, b: scipy.linalg.solve_banded(l_and_u, ab, b),
    "solve_bands": lambda n, ab, b, lower, upper: scipy.linalg.solve_banded((lower, upper), ab, b),
    "solve_sylvester": _of_matrices(scipy.linalg.solve_sylvester, "(m,m),(n,n),(m,n)->(m,n)"),
    "sqrtm": _of_matrices(scipy.linalg.sqrtm, "(n,n)->(n,n)"),
    "eigen": lambda n, x, lower=True: n.linalg.eigh(x, "L" if lower else "U"),
    "eigenvalues": lambda n, x, lower=True: n.linalg.eigvalsh(x, "L" if lower else "U"),
    "singular": lambda n, x: n.linalg.svd(x, full_matrices=False),
    "cofactors": lambda n, x: n.linalg.det(x)[..., None, None] * n.linalg.inv(x).mT,
    "least_squares": lambda n, a, b: n.linalg.pinv(a) @ b,
    "lstsq": _lstsq,
    "matrix_rank": lambda n, x: n.asarray(n.linalg.matrix_rank(x)),
    "nuclear": lambda n, x: n.linalg.svd(x, compute_uv=False).sum(-1),
    "polar": lambda n, x: n.matmul(*n.linalg.svd(x, full_matrices=False)[::2]),
    "drop": _drop,
    "sigmoid": _logistic,
    "softplus": lambda n, x: n.log(1 + n.exp(x)),
    "erf": lambda n, x: n.vectorize(math.erf, otypes=[float])(x),
    "logsumexp": lambda n, x, axis=None, keepdims=False: n.log(n.sum(n.exp(x), axis, keepdims=keepdims)),
    "masked_fill": lambda n, x, mask, value: n.where(mask, value, x),
    "lerp": lambda n, start, end, weight: (1 - weight) * start + weight * end,
    "clip": lambda n, x, min=None, max=None: n.clip(x, min, max),  # NumPy 2.0 has other keywords
    "clip_to_numbers": lambda n, x, min, max: n.clip(x, min, max),
    "reshape": lambda n, x, shape: n.reshape(x, shape),  # NumPy 2.0 has another keyword
    "norm": _norm,
    "root_sum_square": lambda n, x, axis, keepdims: n.sqrt((x**2).sum(axis, keepdims=keepdims)),
    "root_sum_power": lambda n, x, ord, axis, keepdims: (abs(x) ** ord).sum(axis, keepdims=keepdims) ** (1 / ord),
    "linear_recurrence": _recurrence,
    "getitem": lambda n, x, index: x[index],
    "add_at": _add_at,
    "scatter_add": _scatter,
    "put_along_axis": _put,
    "topk": _topk,
    "pad_constant": lambda n, x, widths, value: n.pad(x, widths, constant_values=value),
    "einsum_explicit": lambda n, operands, subscripts: n.einsum(subscripts, *operands),
    "astype": lambda n, x, dtype: x.astype(dtype),
    "stop_gradient": lambda n, x: x,
    "transfer": lambda n, x, device: x,
    "relu": lambda n, x: n.maximum(x, 0),
    "silu": lambda n, x: x * _logistic(n, x),
    "swiglu": lambda n, gate, up: gate * _logistic(n, gate) * up,
    "gelu": _gelu,
    "softmax": _softmax,
    "log_softmax": lambda n, x, axis=-1: n.log(_softmax(n, x, axis)),
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "qkv_projection": _qkv,
    "swiglu_ffn": _swiglu_ffn,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": lambda n, x, w, *rest, **named: _cross_entropy(n, _linear(n, x, w), *rest, **named),
    "attention": _attention,
    "linear_attention": _linear_attention,
    "split_heads": lambda n, x, heads: n.stack(n.split(x, heads, -1), -3),
    "merge_heads": lambda n, x: n.concatenate([x[..., :0, :, :].sum(-3)[..., :0], *n.moveaxis(x, -3, 0)], -1),
}

# ---- torch ----------------------------------------------------------------------------------------------------------


def _axes(x, axis):
    return tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)


def _filled(t, x, where, value):
    """``x`` with a neutral value where the mask of a reduction leaves elements out: torch has no ``where=``."""
    return x if where is None else t.where(where, x, value)


def _sum(t, x, axis=None, keepdims=False, where=None):
    return t.sum(_filled(t, x, where, 0), _axes(x, axis), keepdims)


def _mean(t, x, axis=None, keepdims=False, where=None):
    ones = _filled(t, t.ones_like(x), where, 0)
    return _sum(t, x, axis, keepdims, where) / t.sum(ones, _axes(x, axis), keepdims)


def _var(t, x, axis=None, ddof=0, keepdims=False, where=None):
    off = _filled(t, x - _mean(t, x, axis, True, where), where, 0)
    ones = _filled(t, t.ones_like(x), where, 0)
    return t.sum(off**2, _axes(x, axis), keepdims) / (t.sum(ones, _axes(x, axis), keepdims) - ddof)


def _prod(t, x, axis=None, keepdims=False, where=None):
    x = _filled(t, x, where, 1)
    for a in sorted((a % x.ndim for a in _axes(x, axis)), reverse=True):
        x = t.prod(x, a, keepdims)
    return x


def _max(t, x, axis=None, keepdims=False, where=None, initial=None):
    out = t.amax(_filled(t, x, where, -t.inf), _axes(x, axis), keepdims)
    return out if initial is None else t.clamp(out, min=initial)


def _min(t, x, axis=None, keepdims=False, where=None, initial=None):
    out = t.amin(_filled(t, x, where, t.inf), _axes(x, axis), keepdims)
    return out if initial is None else t.clamp(out, max=initial)


def _running(name):
    return lambda t, x, axis=None: getattr(t, name)(x.ravel() if axis is None else x, axis or 0)


def _clip(t, x, min=None, max=None):
    if isinstance(min, t.Tensor):
        return t.minimum(t.maximum(x, min), max)
    return t.clamp(x, min, max)


def _numbered(t, x, index):
    """``x`` at any NumPy index, as torch's gather of the numbers that NumPy gives to the elements."""
    numbers = np.arange(x.numel()).reshape(x.shape)[index]
    return x.ravel()[t.as_tensor(np.ascontiguousarray(numbers))]


def _take(t, x, indices, axis=None):
    return _numbered(t, x.ravel(), indices) if axis is None else _numbered(t, x, (*[slice(None)] * axis, indices))


def _torch_add_at(t, g, index, shape):
    numbers = t.as_tensor(np.arange(math.prod(shape)).reshape(shape)[index].copy())
    return t.zeros(math.prod(shape), dtype=g.dtype).index_add(0, numbers.ravel(), g.ravel()).reshape(shape)


def _torch_put(t, x, indices, values, axis=-1):
    """One scatter for each place along the axis, so that the last of repeated ones wins."""
    values = values.expand(indices.shape)
    for k in range(indices.shape[axis]):
        place = t.as_tensor([k])
        x = x.scatter(axis, indices.index_select(axis, place), values.index_select(axis, place))
    return x


def _pad(t, x, pad_width, mode="constant", constant_values=0.0):
    if mode == "constant":
        widths = np.broadcast_to(pad_width, (x.ndim, 2))[::-1]
        return t.nn.functional.pad(x, widths.ravel().tolist(), value=constant_values)
    numbers = np.pad(np.arange(x.numel()).reshape(x.shape), pad_width, mode=mode)
    return x.ravel()[t.as_tensor(numbers)]


def _vector_or_columns(function, a, b):
    return function(a, b.unsqueeze(-1)).squeeze(-1) if b.ndim == 1 else function(a, b)


def _signed(t, vectors, theirs):
    """Vectors in columns with the signs of NumPy's: those of LAPACK, of which the two libraries may have another."""
    signs = (vectors.detach() * t.tensor(theirs)).sum(-2, keepdim=True).sign()
    return vectors * signs, signs


def _eigh(t, x, UPLO="L"):
    values, vectors = t.linalg.eigh(_symmetric(t, x, UPLO == "L"))
    return values, _signed(t, vectors, np.linalg.eigh(x.detach().numpy(), UPLO).eigenvectors)[0]


def _svd(t, x, full_matrices=True):
    u, s, vh = t.linalg.svd(x, full_matrices=False)
    u, signs = _signed(t, u, np.linalg.svd(x.detach().numpy(), full_matrices=False).U)
    return u, s, vh * signs.mT


def _qr(t, x, mode="reduced"):
    q, r = t.linalg.qr(x)
    q, signs = _signed(t, q, np.linalg.qr(x.detach().numpy()).Q)
    return r * signs.mT if mode == "r" else (q, r * signs.mT)


TORCH = {
    "solve_triangular": lambda t, a, b, trans=0, lower=False, unit_diagonal=False: _vector_or_columns(
        lambda x, y: t.linalg.solve_triangular(
            x.mT if trans in (1, "T") else x, y, upper=lower == (trans in (1, "T")), unitriangular=unit_diagonal
        ),
        a,
        b,
    ),
    "solve": lambda t, a, b: _vector_or_columns(t.linalg.solve, a, b),  # torch takes a stack of vectors for a matrix
    "cholesky": lambda t, x, upper=False: t.linalg.cholesky(_symmetric(t, x, not upper), upper=upper),
    "eigh": _eigh,
    "eigvalsh": lambda t, x, UPLO="L": t.linalg.eigvalsh(_symmetric(t, x, UPLO == "L")),
    "qr": _qr,
    "svd": _svd,
    "cond": lambda t, x, p=2: (
        t.linalg.cond(x)
        if p == 2
        else t.linalg.norm(x, p, (-2, -1))
        * t.linalg.norm(t.linalg.inv(x) if x.shape[-1] == x.shape[-2] else t.linalg.pinv(x), p, (-2, -1))
    ),  # its own changes in place
    "matrix_norm": lambda t, x, keepdims=False, ord="fro": t.linalg.matrix_norm(x, ord, keepdim=keepdims),
    "vector_norm": lambda t, x, axis=None, keepdims=False, ord=2: t.linalg.vector_norm(x, ord, axis, keepdims),
    "multi_dot": lambda t, arrays: t.linalg.multi_dot(arrays),
    "matrix_transpose": lambda t, x: x.mT,
    "power": lambda t, x, y: t.pow(x, y),
    "clip": _clip,
    "clip_to_numbers": lambda t, x, min, max: t.clamp(x, min, max),
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": lambda t, *args, **kwargs: t.sqrt(_var(t, *args, **kwargs)),
    "prod": _prod,
    "max": _max,
    "min": _min,
    "amax": _max,
    "amin": _min,
    "logsumexp": lambda t, x, axis=None, keepdims=False: t.logsumexp(x, _axes(x, axis), keepdims),
    "norm": lambda t, x, ord=2, axis=None, keepdims=False: t.linalg.vector_norm(x, ord, axis, keepdims),
    "root_sum_square": lambda t, x, axis, keepdims: t.linalg.vector_norm(x, 2, axis, keepdims),
    "root_sum_power": lambda t, x, ord, axis, keepdims: t.linalg.vector_norm(x, ord, axis, keepdims),
    "cumsum": _running("cumsum"),
    "cumprod": _running("cumprod"),
    **CUMULATED,
    "linear_recurrence": _recurrence,
    "any": lambda t, x, axis=None, keepdims=False: t.any(x, _axes(x, axis), keepdims),
    "all": lambda t, x, axis=None, keepdims=False: t.all(x, _axes(x, axis), keepdims),
    "count_nonzero": lambda t, x, axis=None, keepdims=False: t.sum(x != 0, _axes(x, axis), keepdims),
    "transpose": lambda t, x, axes=None: x.permute(axes or tuple(range(x.ndim))[::-1]),
    "permute_dims": lambda t, x, axes: x.permute(axes),
    "swapaxes": lambda t, x, axis1, axis2: t.swapaxes(x, axis1, axis2),
    "expand_dims": lambda t, x, axis=0: (
        x[tuple(None if k in axis else slice(None) for k in range(x.ndim + len(axis)))]
        if isinstance(axis, tuple)
        else t.unsqueeze(x, axis)
    ),
    "broadcast_to": lambda t, x, shape: x.expand(shape),
    "flip": lambda t, x, axis=None: t.flip(x, _axes(x, axis)),
    "rot90": lambda t, x, k=1, axes=(0, 1): t.rot90(x, k, axes),
    "concatenate": lambda t, arrays, axis=0: t.cat(arrays, axis),
    "split": lambda t, x, indices_or_sections, axis=0: t.tensor_split(x, indices_or_sections, axis),
    "array_split": lambda t, x, indices_or_sections, axis=0: t.tensor_split(x, indices_or_sections, axis),
    "tile": lambda t, x, reps: t.tile(x, (reps,) if isinstance(reps, int) else reps),
    "repeat": lambda t, x, repeats, axis=None: t.repeat_interleave(x, t.as_tensor(repeats), axis),
    "roll": lambda t, x, shift, axis=None: t.roll(x, shift, axis),
    "pad": _pad,
    "pad_constant": lambda t, x, widths, value: _pad(t, x, widths, constant_values=value),
    "meshgrid": lambda t, *arrays, indexing="xy": t.meshgrid(*arrays, indexing=indexing),
    "diagonal": lambda t, x, offset=0, axis1=0, axis2=1: t.diagonal(x, offset, axis1, axis2),
    "diag": lambda t, x, k=0: t.diag(x, k),
    "tril": lambda t, x, k=0: t.tril(x, k),
    "triu": lambda t, x, k=0: t.triu(x, k),
    "trace": lambda t, x, offset=0, axis1=0, axis2=1: t.diagonal(x, offset, axis1, axis2).sum(-1),
    "getitem": _numbered,
    "add_at": _torch_add_at,
    "take": _take,
    "take_along_axis": lambda t, x, indices, axis=-1: t.take_along_dim(x, indices, axis),
    "scatter_add": lambda t, x, indices, values, axis=-1: x.scatter_add(axis, indices, values.expand(indices.shape)),
    "put_along_axis": _torch_put,
    "argsort": lambda t, x, axis=-1: t.argsort(x, dim=axis, stable=True),
    "sort": lambda t, x, axis=-1: t.sort(x, dim=axis, stable=True).values,
    "topk": lambda t, x, k, axis=-1: tuple(t.topk(x, k, axis)),
    "dot": lambda t, x, y: x * y if not (x.ndim and y.ndim) else t.tensordot(x, y, ([-1], [max(y.ndim - 2, 0)])),
    "vdot": lambda t, x, y: t.dot(x.ravel(), y.ravel()),
    "outer": lambda t, x, y: t.outer(x.ravel(), y.ravel()),
    "tensordot": lambda t, x, y, axes=2: t.tensordot(x, y, axes),
    "einsum_explicit": lambda t, operands, subscripts: t.einsum(subscripts, *operands),
    "astype": lambda t, x, dtype: x.to(getattr(t, dtype.name)),
    "stop_gradient": lambda t, x: x.detach(),
    "transfer": lambda t, x, device: x.clone(),
}
