"""ZeRO-1: each rank keeps the moments of its share of the entries, updates these, and sends them to the others."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from minigrad.backend import Array, array_module
from minigrad.distributed.communicator import Communicator
from minigrad.distributed.current import get_communicator
from minigrad.distributed.gradients import Bucket, in_buckets, share_of
from minigrad.errors import ArgumentError
from minigrad.messages.explain import explained
from minigrad.tensor import Tensor
from .clipping import check_max_norm, clip_grad_norm, combine, scale_gradients
from .optimizer import Group, Optimizer

Piece: TypeAlias = "tuple[Tensor, slice, slice, Tensor]"  # a parameter; where in the share, in the parameter; its view


class ShardedOptimizer:
    """An optimizer of which every rank holds 1/N of the states: a partition of all entries among N ranks.

    ::

        optimizer = optim.ShardedOptimizer(optim.AdamW(model.parameters(), lr=1e-3))
        model.loss(inputs, labels).backward()                    on every rank, over its own part of the batch
        norm = optimizer.step(count=labels.size, max_norm=1.0)   exchanges, clips and updates
        optimizer.zero_grad()

    In place of ``average_gradients``, each rank receives the averaged gradient of its share alone (reduce-scatter),
    moves it, and all receive the weights (all-gather): as many bytes as an all-reduce. Weights and gradients stay whole
    on every rank. Adam's moments, 8 bytes a float32 parameter, become 8 / N. The weights are those that the optimizer
    gives unsharded, to the last bit where nothing is clipped; the norm to clip by is summed in another order.

    Frozen parameters and those without a gradient on any rank are skipped, as in ``average_gradients``. From
    Rajbhandari et al. 2020, "ZeRO", stage 1, for optimizers that move each entry by itself: SGD, Adam, AdamW. One that
    was stepped before keeps its states.

    >>> import minigrad as mg
    >>> from optim import SGD
    >>> w = mg.Tensor([3.0, 4.0], requires_grad=True)
    >>> optimizer = ShardedOptimizer(SGD([w], lr=1.0))
    >>> (w * w).sum().backward()
    >>> print(optimizer.step(max_norm=5.0), w.data.round(4))
    10.0 [0. 0.]
    """

    @explained
    def __init__(self, optimizer: Optimizer, communicator: Communicator | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            got = type(optimizer).__name__
            raise ArgumentError("an optimizer to shard", got, "such as optim.AdamW(model.parameters())")
        self.ranks = communicator or get_communicator()
        self._whole = optimizer  # its groups and options, and the checks of a state dict; its state stays empty
        self._buckets = [(g, bucket) for g in range(len(self.param_groups)) for bucket in self._of_group(g)]
        self._mine = copy.copy(optimizer)  # the same update, on flat pieces of the parameters
        self._pieces = [self._pieces_of(bucket) for _, bucket in self._buckets]
        self._places = {param: place for place, param in enumerate(optimizer._parameters())}
        self._take(optimizer.state)

    def _of_group(self, g: int) -> list[Bucket]:
        return in_buckets(reversed(self.param_groups[g]["params"]), self.ranks)

    def _pieces_of(self, bucket: Bucket) -> list[Piece]:
        """What this rank has of each parameter, in the order of the bucket."""
        share = bucket.length // self.ranks.size
        begin, found = self.ranks.rank * share, []
        for param, start in zip(bucket.tensors, bucket.starts, strict=True):
            first, last = max(begin, start), min(begin + share, start + param.size)
            if first < last:
                piece = Tensor._wrap(_flat(param)[first - start : last - start])
                piece.requires_grad, piece.name = True, param.name
                found.append((param, slice(first - begin, last - begin), slice(first - start, last - start), piece))
        return found

    @property
    def param_groups(self) -> list[Group]:
        """The groups of the whole optimizer: change ``group["lr"]`` at any time."""
        return self._whole.param_groups

    # ---- one update ------------------------------------------------------------------------------------------------

    def step(self, count: float = 1.0, max_norm: float = math.inf) -> Array:
        """Average the gradients over the labels of all ranks, clip them, and move the parameters; returns the norm.

        count is the number of labels over whose mean this rank's gradients are, as in ``average_gradients``, and the
        norm that of ``clip_grad_norm`` over all parameters. Where it is not finite nothing moves, on no rank. The
        gradients in ``.grad`` stay what this rank's backward passes left.
        """
        check_max_norm(max_norm)
        params = list(self._places)
        share, _, owned = share_of(count, params, self.ranks)
        there = {param for param, owner in zip(params, owned, strict=True) if owner and param.requires_grad}
        for (_, bucket), pieces in zip(self._buckets, self._pieces, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                flat = bucket.pack([p.grad if count and p in there else None for p in bucket.tensors], share)
            mine = self.ranks.reduce_scatter(flat)
            for param, from_share, from_param, piece in pieces:
                piece.data = _flat(param)[from_param]  # someone may have given the parameter another array
                piece._grad = mine[from_share].astype(param.dtype, copy=False) if param in there else None
        tensors = [piece for pieces in self._pieces for *_, piece in pieces]
        mine_norm = clip_grad_norm(tensors, math.inf)
        xp = array_module(params[0].data)  # a rank without a piece has the norm of nothing, NumPy's
        norm = combine(list(self.ranks.all_gather(xp.asarray(mine_norm, np.float64).reshape(1))))
        if np.isfinite(norm):
            scale_gradients([piece for piece in tensors if piece.grad is not None], norm, max_norm)
            self._lend_options()
            self._mine.step()
            self._send_weights(there)
        for piece in tensors:
            piece.grad = None
        return norm

    def _send_weights(self, moved: set[Tensor]) -> None:
        for (_, bucket), pieces in zip(self._buckets, self._pieces, strict=True):
            weights = self._gathered(bucket, pieces, [piece.data for *_, piece in pieces], bucket.tensors[0].dtype)
            for param, whole in zip(bucket.tensors, weights, strict=True):
                if param in moved:
                    param.data[...] = whole
                    param.bump_version()

    def _gathered(self, bucket: Bucket, pieces: Sequence[Piece], values: Sequence[Any], dtype: Any) -> list[Array]:
        """Arrays in the shapes of a bucket's parameters, put together from what all ranks have for their pieces."""
        share = array_module(bucket.tensors[0].data).zeros(bucket.length // self.ranks.size, dtype)
        for (_, from_share, _, _), value in zip(pieces, values, strict=True):
            if value is not None:
                share[from_share] = value
        return bucket.unpack(self.ranks.all_gather(share))

    def _tensors(self) -> list[Tensor]:
        return [param for group in self._mine.param_groups for param in group["params"]]

    def _lend_options(self) -> None:
        for mine, whole in zip(self._mine.param_groups, self.param_groups, strict=True):
            mine |= {name: value for name, value in whole.items() if name != "params"}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zeros, as ``Optimizer.zero_grad`` does."""
        self._whole.zero_grad(set_to_none)

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the whole optimizer, the same on every rank: all ranks must call it.

        It is that of the optimizer unsharded, and loads into one, or into shards of another number of ranks.
        """
        states = dict(zip(map(id, self._tensors()), self._mine.state, strict=True))
        steps = np.zeros(len(self._places), np.int64)
        for param, *_, piece in (piece for pieces in self._pieces for piece in pieces):
            steps[self._places[param]] = states[id(piece)].get("step", 0)
        found: list[dict[str, Any]] = [{"step": int(n)} if n else {} for n in self.ranks.all_reduce(steps, "max")]
        for (g, bucket), pieces in zip(self._buckets, self._pieces, strict=True):
            half = bucket.dtype != bucket.tensors[0].dtype
            for name in (*self._mine._moments_for(self.param_groups[g]), *["master"] * half):
                values = [states[id(piece)].get(name) for *_, piece in pieces]
                widest = max([bucket.dtype.itemsize, *(value.itemsize for value in values if value is not None)])
                dtype = f"f{int(self.ranks.all_reduce(np.array(widest), 'max'))}"  # one rank may have gone to float64
                for param, whole in zip(bucket.tensors, self._gathered(bucket, pieces, values, dtype), strict=True):
                    if state := found[self._places[param]]:
                        state[name] = whole
        try:
            self._whole.state = found
            return self._whole.state_dict()
        finally:
            self._whole.state = [{} for _ in found]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's share of the state of a whole optimizer, and its options."""
        self._whole.load_state_dict(state_dict)
        self._take(self._whole.state)

    def _take(self, states: list[dict[str, Any]]) -> None:
        """Keep of the whole optimizer's states this rank's share."""
        groups = [{**group, "params": []} for group in self.param_groups]
        mine: list[list[dict[str, Any]]] = [[] for _ in groups]
        for (g, _), pieces in zip(self._buckets, self._pieces, strict=True):
            groups[g]["params"] += [piece for *_, piece in pieces]
            for param, _, from_param, _ in pieces:
                state = states[self._places[param]].items()
                mine[g].append(
                    {n: v if n == "step" else array_module(v).array(v.reshape(-1)[from_param]) for n, v in state}
                )
        self._mine.param_groups, self._mine.state = groups, [state for states in mine for state in states]
        self._whole.state = [{} for _ in states]

    def __repr__(self) -> str:
        return f"rank {self.ranks.rank} of {self.ranks.size} of {self._whole!r}"


def _flat(param: Tensor) -> Array:
    """The entries of a parameter in one row, as a view."""
    if not param.data.flags.c_contiguous:
        param.data = array_module(param.data).ascontiguousarray(param.data)
    flat: Array = param.data.reshape(-1)
    return flat
