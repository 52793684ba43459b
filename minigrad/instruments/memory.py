"""``memory_summary`` and ``track_memory``: the bytes that a graph holds for its derivatives, now and at the peak.

A node holds its residuals. Several nodes may hold one array, or views of it. Its memory is counted once, under the
operation and the residual that have held it longest. The data of a leaf, such as a weight, would be there without the
graph and are counted apart.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from minigrad.engine.backward import nodes_behind
from minigrad.engine.core import Node
from minigrad.errors import DTypeError
from minigrad.instruments.observe import Instrument, arrays_in, base_of, node_of, notes, scaled, table
from minigrad.messages.explain import explained
from minigrad.tensor import Tensor

Place = tuple[str, str]  # an operation, and the name of one of its residuals


class Held(NamedTuple):
    """What the nodes of one operation hold under one name."""

    operation: str
    residual: str
    arrays: int
    bytes: int


def _shown(rows: Iterable[Held], total: str) -> str:
    rows = list(rows)
    lines = [("operation", "residual", "arrays", "bytes")]
    lines += [(row.operation, row.residual, str(row.arrays), scaled(row.bytes, "B")) for row in rows]
    lines += [(total, "", str(sum(row.arrays for row in rows)), scaled(sum(row.bytes for row in rows), "B"))]
    return table(lines, left=2)


class _Buffer(NamedTuple):
    """Memory that nodes hold: its size, and the places that hold it, the oldest first."""

    bytes: int
    places: list[Place]


class _Ledger:
    """The buffers that nodes hold now, and the rows of the moment when they held most."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buffers: dict[int, _Buffer] = {}  # by the id of the owning array, alive as long as it is in here
        self.leaves: dict[int, Any] = {}  # the same of leaves: a weak reference to the leaf
        self.current = self.peak = 0
        self._at_peak: list[Held] | None = None

    def hold(self, node: Node) -> list[tuple[int, Place]]:
        """Count what ``node`` holds. The result goes to :meth:`drop` once the node lets go of it."""
        with self.lock:
            self.leaves.update((_key(leaf), weakref.ref(leaf)) for leaf in node.parents if isinstance(leaf, Tensor))
            keys = []
            for name, residual in zip(node.plan.names, node.residuals or (), strict=False):
                for base in map(base_of, arrays_in(residual)):
                    if not self.is_leaf(id(base)):
                        keys.append((id(base), (node.primitive.label, name)))
                        self._add(base, keys[-1][1])
            if self.current > self.peak:
                self.peak, self._at_peak = self.current, None
            return keys

    def is_leaf(self, key: int) -> bool:
        """Whether this memory is the data of a leaf that is alive and has not been given other data."""
        leaf = self.leaves[key]() if key in self.leaves else None
        return leaf is not None and _key(leaf) == key

    def _add(self, base: Any, place: Place) -> None:
        if id(base) not in self.buffers:
            self.buffers[id(base)] = _Buffer(base.nbytes, [])
            self.current += base.nbytes
        self.buffers[id(base)].places.append(place)

    def drop(self, keys: list[tuple[int, Place]]) -> None:
        """Take off what a node let go of."""
        with self.lock:
            if self.current == self.peak and self._at_peak is None:
                self._at_peak = self.rows()
            for key, place in keys:
                buffer = self.buffers[key]
                buffer.places.remove(place)
                if not buffer.places:
                    del self.buffers[key]
                    self.current -= buffer.bytes

    def rows(self) -> list[Held]:
        """What is held now by operation and residual, the largest first."""
        found: dict[Place, list[int]] = {}
        for buffer in self.buffers.values():
            found.setdefault(buffer.places[0], []).append(buffer.bytes)
        rows = [Held(*place, len(sizes), sum(sizes)) for place, sizes in found.items()]
        return sorted(rows, key=lambda row: (-row.bytes, row[:2]))

    def rows_at_peak(self) -> list[Held]:
        """The same for the moment when most was held."""
        return self.rows() if self._at_peak is None else self._at_peak


def _key(leaf: Any) -> int:
    return id(base_of(leaf._data))


def _leaves(edges: Iterable[Any]) -> Iterator[Any]:
    return (edge for edge in edges if isinstance(edge, Tensor))


class _Hold:
    """Lies on a node and dies with it, or when it is released. Then the ledger learns that the memory is free."""

    __slots__ = ("keys", "ledger")

    def __init__(self, ledger: _Ledger, keys: list[tuple[int, Place]]) -> None:
        self.ledger, self.keys = ledger, keys

    def __del__(self) -> None:
        self.ledger.drop(self.keys)


# ---- the instruments ------------------------------------------------------------------------------------------------


class MemorySummary(NamedTuple):
    """What a graph holds; printed as a table. ``bytes`` is the memory that would be free if the graph were gone."""

    rows: list[Held]
    nodes: int
    leaves: int
    leaf_bytes: int
    grad_bytes: int

    @property
    def bytes(self) -> int:
        """All that is held besides the leaves' own data and gradients."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        own = f"{scaled(self.leaf_bytes, 'B')} of data and {scaled(self.grad_bytes, 'B')} of gradients of their own"
        return f"{_shown(self.rows, 'total')}\nnodes: {self.nodes}, leaves: {self.leaves}, with {own}"


@explained
def memory_summary(results: Any) -> MemorySummary:
    """What the graph of ``results``, a Tensor or a list, tuple or dict of them, holds, by operation and residual.

    Each array is counted once, by the memory under it, even if others hold it too. The rows leave out the data of
    leaves. A graph that a backward pass has freed holds nothing. Sizes are in bytes, 1 kB = 1000 B.

    >>> import minigrad as mg
    >>> x = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> y = mg.exp(x)
    >>> print(memory_summary((y * mg.sin(y)).sum()))
    operation  residual  arrays  bytes
    exp        out            1   16 B
    multiply   y              1   16 B
    total                     2   32 B
    nodes: 4, leaves: 1, with 16 B of data and 0 B of gradients of their own
    """
    roots = [t.node or t for t in _tensors(results)]
    nodes = sorted(nodes_behind(roots, None), key=lambda node: node.number)
    edges = [*roots, *(edge for node in nodes for edge in node.parents or ())]
    leaves = list(dict.fromkeys(_leaves(edges)))
    ledger = _Ledger()
    ledger.leaves = {_key(leaf): weakref.ref(leaf) for leaf in leaves}
    for node in nodes:
        if node.parents is not None:
            ledger.hold(node)
    own = {_key(leaf): base_of(leaf._data).nbytes for leaf in leaves}
    grads = {id(base_of(leaf.grad)): base_of(leaf.grad).nbytes for leaf in leaves if leaf.grad is not None}
    return MemorySummary(ledger.rows(), len(nodes), len(leaves), sum(own.values()), sum(grads.values()))


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    else:
        hint = "of a model: list(model.parameters())"
        raise DTypeError("a Tensor, or a list, tuple or dict of them", type(value).__name__, hint)


class track_memory(Instrument):
    """Follow what graphs hold while they are recorded, freed and dropped inside of a ``with`` block.

    ``current`` is the number of bytes that nodes hold now, ``peak`` the largest so far. ``history`` has the number
    after each operation and each node of a backward pass. Printed, it is the table of the peak. The numbers are exact
    for what nodes hold. They leave out gradients, and arrays that a computation makes and drops on its way.

    >>> import minigrad as mg
    >>> x = mg.Tensor([1.0, 2.0], requires_grad=True)
    >>> with track_memory() as memory:
    ...     mg.exp(mg.exp(x)).sum().backward()
    >>> memory.peak, memory.current
    (32, 0)
    """

    def __init__(self) -> None:
        self._ledger = _Ledger()
        self.history: list[int] = []

    @property
    def current(self) -> int:
        """Bytes held now."""
        return self._ledger.current

    @property
    def peak(self) -> int:
        """The most bytes ever held."""
        return self._ledger.peak

    @property
    def rows(self) -> list[Held]:
        """What was held at the peak, by operation and residual, the largest first."""
        return self._ledger.rows_at_peak()

    def forward(self, primitive: Any, arguments: list[Any], out: Any, result: Any, started: float) -> None:
        """Count what the new node holds."""
        node = node_of(result)
        if node is not None:
            notes(node)[self] = _Hold(self._ledger, self._ledger.hold(node))
        self.history.append(self.current)

    def backward(self, node: Node, g: Any, gradients: list[Any], started: float) -> None:
        """Note the number. The ledger learns by itself that the node is freed."""
        self.history.append(self.current)

    def __str__(self) -> str:
        return _shown(self.rows, "peak")
