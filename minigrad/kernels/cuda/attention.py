"""Attention on a GPU: sizes, strides and options of a call, in the form that the kernels read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad import captures
from minigrad.backend import Array, NDArray, array_module, to_device
from minigrad.kernels.attention import attention
from minigrad.kernels.attention_patterns import Pattern, pattern_of
from minigrad.kernels.attention_tiles import dropout_scale, mask_shape, scale_of, sizes_of, threshold
from minigrad.kernels.cuda.launching import THREADS, launch, seed_arguments, uniform

FAR = 1 << 40
PLACES = ("q", "k", "v", "g", "out", "dq", "dk", "dv")


class Tile(NamedTuple):
    """How many queries and keys a tile has, the threads of a block, and how many elements it loads at once."""

    rows: int
    keys: int
    threads: int
    pack: int


def kernels_for(head: int, itemsize: int) -> tuple[str, Tile]:
    """The source for heads of so many features in shared memory: half precision is for tensor cores."""
    if itemsize == 2:
        return "attention_mma", Tile(64, 64, 128, 8)
    return "attention", Tile(16 if head > 64 else 32, 32, THREADS, 4)  # what fits into shared memory


def defines(head: int, itemsize: int, **options: bool) -> dict[str, int | str]:
    """What the source is compiled with for heads of so many features in shared memory."""
    tile = kernels_for(head, itemsize)[1]
    sizes: dict[str, int | str] = {"HEAD": head, "KEYS": tile.keys, "ROWS": tile.rows, "PLACES": ",".join(PLACES)}
    return sizes | {name.upper(): int(there) for name, there in options.items()}


def _fits(
    q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, dropout_p: float, seed: int, window: Any,
    pattern: Any,
) -> bool:  # fmt: skip
    """Heads of up to 128 features, of floats of at most 32 bits; masks of numbers are left to the definition."""
    return (
        uniform(q, k, v)
        and q.itemsize <= 4
        and (mask is None or (mask.dtype == bool and not isinstance(mask, np.ndarray)))
        and all(x.ndim >= 2 and x.size for x in (q, k, v))
        and k.shape == v.shape
        and q.shape[-1] <= 128
        and q.shape[:-3] == k.shape[:-3]
        and (1, *q.shape)[-3] % (1, *k.shape)[-3] == 0
    )


class _Call:
    """A call brought to one form: q (n, h·group, queries, d), k and v (n, h, keys, d)."""

    def __init__(
        self, q: Array, k: Array, v: Array, mask: Array | None, is_causal: bool, scale: Any, dropout_p: float,
        seed: Any, *shape: Any,
    ) -> None:  # fmt: skip
        self.xp, self.sizes, self.d = array_module(q), sizes_of(q, k, v, mask), q.shape[-1]
        n, h, group = math.prod(self.sizes.lead), self.sizes.heads, self.sizes.group
        self.rows, self.heads = n * h * group, n * h
        self.queries, self.keys = q.shape[-2], k.shape[-2]
        head = _tiles(self.d, 16) * 16
        self.stem, self.tile = kernels_for(head, q.itemsize)
        pattern = pattern_of(is_causal, *shape)
        pattern.check(self.queries, self.keys)
        device = self.xp.cuda.Device().id
        self.grid = captures.keep(_grid(device, pattern, self.queries, self.keys, self.tile)) if pattern.grid else ()
        mask, steps = self.spread(mask)
        self.numbers = (*steps, h, group, self.queries, self.keys, self.d, *_band(pattern, self.grid))
        chance = *seed_arguments(seed), threshold(dropout_p), dropout_scale(dropout_p)
        self.options = (scale_of(scale, q), mask, *chance)
        self.defines = defines(
            head, q.itemsize, mask=mask is not None, dropout=dropout_p > 0, grid=pattern.grid is not None
        )

    def spread(self, mask: Array | None) -> tuple[Array | None, tuple[int, ...]]:
        """The mask with axes (n, h·group, queries, keys), and its steps along them, 0 where it is the same."""
        if mask is None:
            return None, (0, 0, 0, 0)
        shape = mask_shape(mask, self.sizes)
        mask = self.xp.broadcast_to(mask, shape).reshape(math.prod(shape[:-3]), *shape[-3:])
        return mask, tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.strides, strict=True))

    def form(self, x: Array, heads: int) -> Array:
        """``x`` with axes (n, heads, t, d), as a view where that can be."""
        x = x if x.strides[-1] == x.itemsize else self.xp.ascontiguousarray(x)
        return x.reshape(math.prod(self.sizes.lead), heads, *x.shape[-2:])

    def forms(self, wide: Sequence[Array], narrow: Sequence[Array]) -> list[Array]:
        """Arrays like q and arrays like k."""
        h, group = self.sizes.heads, self.sizes.group
        return [self.form(x, h * group) for x in wide] + [self.form(x, h) for x in narrow]

    def like(self, x: Array) -> Array:
        """An array for results in the memory order of x where that keeps features together, as transposed heads do."""
        made = self.xp.empty_like(x)
        return made if x.ndim <= 4 and made.strides[-1] == made.itemsize else self.xp.empty(x.shape, x.dtype)

    def launch(self, stem: str, name: str, grid: tuple[int, int], places: dict[str, Array], *args: Any) -> None:
        """Launch a kernel of a source; it is given the strides of ``places``, arrays by their names in the source."""
        steps = {n: [x.strides[axis] // x.itemsize for axis in range(3)] for n, x in places.items()}
        strides = [s for name in PLACES for s in steps.get(name, (0, 0, 0))]
        call = captures.keep(_uploaded(self.xp, self.xp.cuda.Device().id, (*strides, *self.numbers)))
        inputs: list[Any] = list(places.values())
        pack = self.tile.pack
        aligned = all(x.data.ptr % (pack * x.itemsize) == 0 for x in inputs) and not any(s % pack for s in strides)
        pack, threads = pack if aligned else 1, self.tile.threads
        launch(f"{stem}.cu", name, inputs[0], pack, grid, threads, call, *args, **self.defines)


@functools.lru_cache(maxsize=256)
def _uploaded(xp: Any, device: int, numbers: tuple[int, ...]) -> Array:
    """The facts of a call on the device; the same call again costs no upload."""
    return to_device(np.array(numbers, np.int64), f"cuda:{device}")


def _band(pattern: Pattern, grid: tuple[Array, ...]) -> tuple[int, ...]:
    """The last numbers of a call: the band, and sizes and addresses of the grid."""
    left, right = pattern.left - pattern.start, pattern.right + pattern.start
    band = tuple(FAR if x == math.inf else int(x) for x in (left, right))
    sizes = (pattern.grid.size, pattern.grid.blocks.shape[1]) if pattern.grid else (1, 1)
    arrays: list[Any] = [*grid]
    return *band, pattern.start, *sizes, *([x.data.ptr for x in arrays] or [0, 0, 0])


@functools.lru_cache(maxsize=64)
def _grid(device: int, pattern: Pattern, queries: int, keys: int, tile: Tile) -> tuple[Array, ...]:
    """The grid on the device, for each tile of queries the tiles of keys that it sees, and the other way round."""
    assert pattern.grid is not None
    meets = np.zeros((_tiles(queries, tile.rows), _tiles(keys, tile.keys)), bool)
    for i, row in enumerate(meets):
        for first, last in pattern.spans(i * tile.rows, min((i + 1) * tile.rows, queries), keys):
            row[first // tile.keys : _tiles(last, tile.keys)] = True
    arrays = (pattern.grid.blocks, _lists(meets), _lists(meets.T))
    return tuple(to_device(x, f"cuda:{device}") for x in arrays)


def _lists(meets: NDArray) -> NDArray:
    """Where the list of each row begins and the last one ends, and then the lists: where a row is True."""
    places = np.cumsum([len(meets) + 1, *meets.sum(1)])
    return np.concatenate([places, np.nonzero(meets)[1]]).astype(np.int32)


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _forward(q: Array, k: Array, v: Array, *options: Any) -> tuple[Array, dict[str, Any]]:
    call = _Call(q, k, v, *options)
    result = call.like(q)
    q, out, k, v = call.forms((q, result), (k, v))
    total, shift = (call.xp.empty((call.rows, call.queries), np.float32) for _ in range(2))
    places = {"q": q, "k": k, "v": v, "out": out}
    grid = (call.rows, _tiles(call.queries, call.tile.rows))
    call.launch(call.stem, f"{call.stem}_forward", grid, places, q, k, v, out, total, shift, *call.options)
    return result, {"total": total, "shift": shift}


def _backward(
    g: Array, q: Array, k: Array, v: Array, mask: Any, is_causal: Any, scale: Any, dropout_p: Any, seed: Any,
    window: Any, pattern: Any, out: Array, total: Array, shift: Array, needs: tuple[bool, ...]
) -> tuple[Any, ...]:  # fmt: skip
    call = _Call(q, k, v, mask, is_causal, scale, dropout_p, seed, window, pattern)
    gradients = [call.like(x) for x in (q, k, v)]
    q, g, out, dq, k, v, dk, dv = call.forms((q, g, out, gradients[0]), (k, v, *gradients[1:]))
    dots = call.xp.empty(total.shape, np.float32)
    places = {"q": q, "k": k, "v": v, "g": g, "out": out, "dq": dq, "dk": dk, "dv": dv}
    queries, read = (call.rows, _tiles(call.queries, call.tile.rows)), (q, k, v, g, total, shift, dots)
    warps = (call.rows, _tiles(call.queries, call.tile.threads // 32))
    call.launch("row_dots", "attention_row_dots", warps, places, g, out, dots)
    if needs[0]:
        call.launch(call.stem, f"{call.stem}_backward_q", queries, places, *read, dq, *call.options)
    if needs[1] or needs[2]:
        keys = (call.heads, _tiles(call.keys, call.tile.keys))
        call.launch(call.stem, f"{call.stem}_backward_kv", keys, places, *read, dk, dv, *call.options)
    return *(x if need else None for x, need in zip(gradients, needs, strict=False)), None


attention.defgpu(_forward, _backward, _fits)
