"""Every rank holds the same model: it is sent at the beginning, and compared by a hash whenever one asks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from minigrad.backend import to_numpy
from minigrad.distributed.communicator import Communicator
from minigrad.distributed.current import get_communicator
from minigrad.errors import StateError


def broadcast_model(model: Any, communicator: Communicator | None = None) -> None:
    """Give every rank the weights and buffers that the model has on rank 0, frozen and tied ones too.

    model: a Module, or anything else with ``state_dict`` and ``load_state_dict`` of arrays by name.

    Raises StateError, on every rank, where names, shapes or dtypes differ.

    >>> import minigrad as mg, nn
    >>> layer = nn.Linear(2, 3)
    >>> broadcast_model(layer)
    """
    ranks = communicator or get_communicator()
    state = model.state_dict()
    described = repr([(name, np.shape(array), str(array.dtype)) for name, array in state.items()])
    what, hint = "a model of the same names, shapes and dtypes", "build it from the same flags"
    _compare(hashlib.blake2b(described.encode(), digest_size=16), ranks, what, hint)
    if ranks.size > 1:
        model.load_state_dict({name: ranks.broadcast(array) for name, array in state.items()})


def check_replicas(model: Any, communicator: Communicator | None = None) -> None:
    """Compare the weights and buffers of all ranks by a hash; a StateError, on every rank, where a bit differs.

    >>> import minigrad as mg, nn
    >>> check_replicas(nn.Linear(2, 3))
    """
    ranks = communicator or get_communicator()
    if ranks.size > 1:
        held = hashlib.blake2b(digest_size=16)
        for array in model.state_dict().values():
            held.update(np.ascontiguousarray(to_numpy(array)).reshape(-1).view(np.uint8).data)
        hint = "train on the averaged gradients alone; a buffer that each rank computes must be sent by broadcast_model"
        _compare(held, ranks, "the same bits of weights and buffers", hint)


def _compare(hashed: Any, ranks: Communicator, what: str, hint: str) -> None:
    """A StateError on every rank where one's hash is not that of rank 0."""
    digest = np.frombuffer(hashed.digest(), np.uint8)
    first, *others = ranks.all_gather(digest[None])
    if odd := [rank for rank, other in enumerate(others, start=1) if not np.array_equal(first, other)]:
        got = f"others than rank 0 has, on rank {', '.join(map(str, odd))}"
        raise StateError(f"{what} on all {ranks.size} ranks", got, hint)
