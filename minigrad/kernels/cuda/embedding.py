"""Embedding on a GPU: a block copies a row forward, and sums the gradients of a row backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad import captures
from minigrad.backend import Array, array_module, device_of, made_on
from minigrad.kernels.cuda.launching import launch, pack_of, threads_for, uniform
from minigrad.kernels.embedding import check_embedding, embedding


def _forward(ids: Any, weight: Array, padding_idx: int | None) -> tuple[Array, dict[str, Any]]:
    check_embedding(ids, weight, padding_idx)
    captures.again(lambda: check_embedding(ids, weight, padding_idx))
    xp, width = array_module(weight), weight.shape[1]
    weight = xp.ascontiguousarray(weight)
    places = _places(ids, weight)
    out = xp.empty((*ids.shape, width), weight.dtype)
    if out.size:
        pack = pack_of(width, weight, out)
        threads = threads_for(width // pack)
        launch("embedding.cu", "embedding_forward", weight, pack, ids.size, threads, weight, places, out, width)
    return out, {}


def _places(ids: Any, like: Array) -> Array:
    """Ids as the kernels read them, on the device of ``like``; ids of the host are uploaded."""
    return made_on(device_of(like), lambda: ids.astype(np.int64, copy=False).reshape(-1), ids)


def _backward(g: Array, ids: Any, weight_shape: Any, weight_dtype: Any, padding_idx: int | None) -> tuple[Array]:
    xp, (rows, width) = array_module(g), weight_shape
    g, places = xp.ascontiguousarray(g), _places(ids, g)
    order = xp.argsort(places, kind="stable")
    out = xp.empty(weight_shape, g.dtype)
    none = -1 if padding_idx is None else padding_idx % rows
    if out.size:
        pack = pack_of(width, g, out)
        args = (g, places[order], order, out, len(places), width, none)
        launch("embedding.cu", "embedding_backward", g, pack, rows, threads_for(width // pack), *args)
    return (out.astype(weight_dtype, copy=False),)


embedding.defgpu(_forward, _backward, lambda ids, weight, padding_idx: uniform(weight))
