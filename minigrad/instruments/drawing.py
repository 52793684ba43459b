"""``draw``: the graph behind a tensor as a picture, with shapes, values and gradients, whole or folded into modules.

A graph knows nothing of modules. ``fold`` reads them off the names of the parameters: an operation that uses most of
its parameters from ``layers.0`` belongs to ``layers.0``. One without a parameter belongs to the module that ran both
before and after it, since modules run one after another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import array_module, is_array, to_numpy
from minigrad.engine.backward import Pass, nodes_behind
from minigrad.engine.core import Node
from minigrad.engine.recording import no_grad
from minigrad.errors import ArgumentError, DTypeError, GraphError, MiniGradError
from minigrad.instruments.observe import argument_name
from minigrad.serialize import checked_path
from minigrad.tensor import Tensor

SMALL = 6  # up to so many numbers are shown; of more, only the norm of the gradient


# ---- what is known of a graph ---------------------------------------------------------------------------------------


class _Graph(NamedTuple):
    """Nodes by ascending number; for an edge (a node or a leaf) its value and its gradient, where they are known."""

    root: Any
    nodes: list[Node]
    values: dict[Any, Any]
    gradients: dict[Any, Any]


def _graph(t: Any, gradients: bool) -> _Graph:
    if not isinstance(t, Tensor):
        hint = "the result of minigrad's operations, such as a loss"
        raise DTypeError("a Tensor, whose graph is to be drawn", type(t).__name__, hint)
    root = t.node or t
    if isinstance(root, Node) and root.parents is None:
        hint = "draw it before backward, or call backward(retain_graph=True)"
        raise GraphError("a graph that is still there", "one that a backward pass has freed", hint)
    nodes = sorted(nodes_behind([root], None), key=lambda node: node.number)
    values = {root: t._data} | _values(nodes)
    wanted = gradients and t._requires_grad and t.size == 1 and _is_whole(nodes)
    return _Graph(root, nodes, values, _gradients(t, root, nodes) if wanted else _leaf_gradients(nodes))


def _values(nodes: Iterable[Node]) -> dict[Any, Any]:
    """The data of leaves, and the results that a node keeps: its own, or those of its parents."""
    values: dict[Any, Any] = {}
    for node in nodes:
        kept = _kept(node)
        values[node] = values.get(node, kept.get("out"))
        for position, edge in zip(node.plan.wrt, node.parents or (), strict=False):
            found = edge._data if isinstance(edge, Tensor) else kept.get(argument_name(node.primitive, position))
            if found is not None:
                values[edge] = found
    return {edge: value for edge, value in values.items() if is_array(value)}


def _kept(node: Node) -> dict[str, Any]:
    """The residuals by name."""
    return dict(zip(node.plan.names, node.residuals or (), strict=False))


def _is_whole(nodes: Iterable[Node]) -> bool:
    """Whether a backward pass can run: nothing freed, nothing changed since."""
    try:
        for node in nodes:
            node.check()
    except GraphError:
        return False
    return True


def _gradients(t: Any, root: Any, nodes: Sequence[Node]) -> dict[Any, Any]:
    """The gradient of the number ``t`` with respect to everything it was made from; no ``.grad`` is touched."""
    targets = {root, *nodes, *(edge for node in nodes for edge in node.parents)}
    work = Pass(retain_graph=True, targets=targets)
    with no_grad():
        work.run([(root, array_module(t._data).ones(t.shape, t.dtype))])
    return {
        edge: np.asarray(g) if isinstance(g, np.generic) else g
        for edge, g in work.found.items()
        if type(g) is not tuple
    }


def _leaf_gradients(nodes: Iterable[Node]) -> dict[Any, Any]:
    leaves = {edge for node in nodes for edge in node.parents or () if isinstance(edge, Tensor)}
    return {leaf: leaf.grad for leaf in leaves if leaf.grad is not None}


# ---- which module a node belongs to ---------------------------------------------------------------------------------


def _module_of(edge: Any, depth: int) -> str:
    """The first ``depth`` names of a parameter's modules, numbers counted with the name before them; "" for the rest.

    ``layers.0.attn.q_proj.weight`` is of ``layers.0`` at depth 1 and of ``layers.0.attn`` at depth 2.
    """
    found = re.match(rf"([^.]+(\.\d+)*\.){{0,{depth}}}", (edge.name or "") if isinstance(edge, Tensor) else "")
    return found[0][:-1] if found else ""


def _modules(nodes: Sequence[Node], depth: int) -> list[str]:
    """The module of each node, "" where none is."""
    modules: list[str] = []
    passed: dict[Any, str] = {}  # views and casts of parameters
    for node in nodes:
        used = [m for edge in node.parents or () if (m := passed.get(edge) or _module_of(edge, depth))]
        most, count = Counter(used).most_common(1)[0] if used else ("", 1)
        modules.append(most if 2 * count > len(used) else "")  # the weight of a norm within a product has no say
        if node.primitive.view or node.primitive.name == "astype":
            passed[node] = modules[-1]

    def nearest(last: str, own: str) -> str:
        return own or last

    before, after = accumulate(modules, nearest), [*accumulate(reversed(modules), nearest)][::-1]
    return [a if a == b else "" for a, b in zip(before, after, strict=True)]


class _Group(NamedTuple):
    """Nodes that share a box: those of one run of a module, or a single one, whose ``module`` is ""."""

    module: str
    nodes: list[Node]


def _grouped(nodes: Sequence[Node], depth: int) -> list[_Group]:
    """The nodes in the boxes that they go to, in the order of the computation; depth 0 folds nothing."""
    groups: list[_Group] = []
    home: dict[Any, _Group] = {}
    for node, module in zip(nodes, _modules(nodes, depth), strict=True):
        sources = [home[edge] for edge in node.parents or () if isinstance(edge, Node)]
        if module and groups and groups[-1].module == module:
            group = groups[-1]
        elif not module and len(sources) > 1 and sources[0].module and all(s is sources[0] for s in sources):
            group = sources[0]  # joins two results of one module, as a residual connection at its end does
        else:
            group = _Group(module, [])
            groups.append(group)
        group.nodes.append(node)
        home[node] = group
    return groups


# ---- boxes and arrows -----------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a drawing: its lines of text, the first a title, and what it stands for."""

    lines: tuple[str, ...]
    kind: str  # "leaf", "operation", "module" or "more"


def _numbers(array: Any) -> str:
    """All numbers of a small array on one line; "" for a larger one."""
    if array.size > SMALL:
        return ""
    text = np.array2string(to_numpy(array), separator=", ", formatter={"float_kind": lambda x: f"{x:.4g}"})
    return " ".join(text.split()).replace("[ ", "[")


def _norm(arrays: Iterable[Any]) -> str:
    with np.errstate(over="ignore"):
        squares = sum(float((to_numpy(array).astype(np.float64) ** 2).sum()) for array in arrays)
    return f"‖∂‖ = {squares**0.5:.3g}"


def _facts(edge: Any, graph: _Graph) -> list[str]:
    """Dtype and shape of a leaf or a result, its value and its gradient."""
    several = edge.dtype is None or isinstance(edge.dtype, tuple)
    lines = [f"{len(edge.shape)} results" if several else f"{edge.dtype} {edge.shape}"]
    value, g = graph.values.get(edge), graph.gradients.get(edge)
    if value is not None and (numbers := _numbers(value)):
        lines.append(f"= {numbers}")
    if g is not None:
        lines.append(f"∂ {_numbers(g)}" if g.size <= SMALL else _norm([g]))
    return lines


def _leaf_box(leaf: Any, graph: _Graph) -> Box:
    return Box((leaf.name or "leaf", *_facts(leaf, graph)), "leaf")


def _operation_box(node: Node, graph: _Graph) -> Box:
    title = node.primitive.label
    if node.primitive.elementwise:
        wrt = {argument_name(node.primitive, position) for position in node.plan.wrt}
        constants = {name: a for name, a in _kept(node).items() if name in node.primitive.position and name not in wrt}
        given = [f"{name}={a}" for name, a in constants.items() if not isinstance(a, bool) and np.size(a) == 1]
        title += f"({', '.join(given)})" if given else ""
    return Box((title, *(_facts(node, graph) if node.parents is not None else ["freed"])), "operation")


def _module_box(group: _Group, run: int, leaves: Collection[Any], graph: _Graph) -> Box:
    last = group.nodes[-1]
    count = sum(leaf.size for leaf in leaves)
    lines = [group.module + (f" ({run})" if run > 1 else "")]
    lines.append(f"{len(group.nodes)} operation{'s'[: len(group.nodes) > 1]}, {count:,} parameters")
    lines.append(f"gives {last.dtype} {last.shape}")
    if leaves and all(leaf in graph.gradients for leaf in leaves):
        lines.append(_norm(graph.gradients[leaf] for leaf in leaves))
    return Box(tuple(lines), "module")


def _laid_out(graph: _Graph, depth: int, max_nodes: int) -> Drawing:
    """The last ``max_nodes`` boxes with their leaves, and one in front that stands for all that is left out."""
    boxes: list[Box] = []
    place: dict[Any, int] = {}  # the box of a node or a leaf; what has none is in box 0, that of what is left out
    arrows: dict[tuple[int, int], str] = {}
    runs: Counter[str] = Counter()

    def put(edges: Iterable[Any], box: Box) -> None:
        place.update(dict.fromkeys(edges, len(boxes)))
        boxes.append(box)

    groups = _grouped(graph.nodes, depth)
    if left_out := sum(len(group.nodes) for group in groups[:-max_nodes]):
        put((), Box((f"{left_out:,} more operations", f"max_nodes={max_nodes}"), "more"))
    for group in groups[-max_nodes:]:
        edges = dict.fromkeys(edge for node in group.nodes for edge in node.parents or ())
        inside = {edge: None for edge in edges if group.module and _module_of(edge, depth) == group.module}
        for leaf in edges:
            if isinstance(leaf, Tensor) and leaf not in inside and leaf not in place:
                put([leaf], _leaf_box(leaf, graph))
        runs[group.module] += 1
        folded = _module_box(group, runs[group.module], inside, graph) if group.module else None
        put(group.nodes, folded or _operation_box(group.nodes[0], graph))
        here = len(boxes) - 1
        for edge in edges:
            source = place.get(edge, 0)
            if edge not in inside and source != here:
                arrows[source, here] = str(edge.shape) if boxes[source].kind == "module" else ""
    if not groups:
        put((), _leaf_box(graph.root, graph))
    return Drawing(tuple(boxes), tuple((*pair, label) for pair, label in arrows.items()))


# ---- the picture ----------------------------------------------------------------------------------------------------

_STYLES = {
    "leaf": 'style="filled,rounded", fillcolor="#dbeafe"',
    "operation": 'style="filled", fillcolor="#ffffff"',
    "module": 'style="filled", fillcolor="#fef3c7"',
    "more": 'style="dashed"',
}
_LAID_OUT = {".svg", ".png", ".pdf"}  # by Graphviz
_TEXTS = {".dot": "dot", ".gv": "dot", ".txt": "text"}


@dataclass(frozen=True)
class Drawing:
    """A graph as boxes and arrows ``(from, to, label)`` between their numbers; the last box is the result.

    ``text`` and ``dot`` write it down, ``svg()`` and ``save(path)`` draw it. A notebook shows it by itself.
    """

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int, str], ...]

    @property
    def text(self) -> str:
        """One line for each box, with the numbers of the boxes that go into it."""
        lines = []
        for k, box in enumerate(self.boxes):
            sources = [str(a) for a, b, _ in self.arrows if b == k]
            lines.append(f"{k}: {'  '.join(box.lines)}" + (f"  from {', '.join(sources)}" if sources else ""))
        return "\n".join(lines)

    @property
    def dot(self) -> str:
        """The graph in Graphviz's language."""
        lines = ["digraph {", '  node [shape=box, fontname="Helvetica", fontsize=11, margin="0.12,0.06"]']
        lines.append('  edge [fontname="Helvetica", fontsize=10, color="#475569"]')
        for k, box in enumerate(self.boxes):
            bold = ", penwidth=2" if k == len(self.boxes) - 1 else ""
            lines.append(f'  b{k} [label="{_dot_text(box.lines)}", {_STYLES[box.kind]}{bold}]')
        for source, target, label in self.arrows:
            lines.append(f"  b{source} -> b{target}" + (f' [label="{label}"]' if label else ""))
        return "\n".join([*lines, "}"]) + "\n"

    def svg(self) -> str:
        """The picture, laid out by Graphviz; an error where its program ``dot`` is not installed."""
        return _graphviz(self.dot, "svg").decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file of the kind its suffix says: svg, png, pdf (by Graphviz), dot, gv, txt."""
        suffix = Path(checked_path(path, example="graph.svg")).suffix.lower()
        if suffix in _LAID_OUT:
            Path(path).write_bytes(_graphviz(self.dot, suffix[1:]))
        elif suffix in _TEXTS:
            Path(path).write_text(getattr(self, _TEXTS[suffix]), encoding="utf-8")
        else:
            got, hint = str(path), "graph.txt needs no Graphviz"
            raise ArgumentError(f"a file name that ends in {' '.join(sorted(_LAID_OUT | set(_TEXTS)))}", got, hint)

    def _repr_svg_(self) -> str | None:
        return self.svg() if shutil.which("dot") else None

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def _dot_text(lines: Iterable[str]) -> str:
    quoted = (line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return "\\n".join(quoted)


def _graphviz(dot: str, kind: str) -> bytes:
    program = shutil.which("dot")
    if program is None:
        hint = "install it (apt install graphviz, brew install graphviz), or use .dot or .text"
        raise MiniGradError("Graphviz, whose program 'dot' lays out pictures", "no 'dot' on the PATH", hint)
    return subprocess.run([program, f"-T{kind}"], input=dot.encode(), stdout=subprocess.PIPE, check=True).stdout


def draw(t: Any, fold: bool | int = False, gradients: bool = True, max_nodes: int = 200) -> Drawing:
    """The graph that ``t`` was made by, as a :class:`Drawing`: operations, leaves, shapes, small values and gradients.

    fold       show each module as one box: True for the outermost ones (``layers.0``), 2 for those inside of them, ...
    gradients  those of ``t`` with respect to each box, if ``t`` is one number, by a backward pass of its own that
               changes no ``.grad`` (hooks are called); else, or where it can't run any more, the leaves' ``.grad``
    max_nodes  boxes of operations to show, counted from the result; one more says how many operations were left out

    Values of results are shown where the graph keeps them. A graph that backward has freed raises a GraphError.

    >>> import minigrad as mg
    >>> x = mg.Tensor(3.0, requires_grad=True)
    >>> print(draw(mg.exp(-x)))
    0: leaf  float64 ()  = 3  ∂ -0.04979
    1: negative  float64 ()  ∂ 0.04979  from 0
    2: exp  float64 ()  = 0.04979  ∂ 1  from 1
    """
    if not (isinstance(fold, int) and isinstance(max_nodes, int) and fold >= 0 and max_nodes >= 1):
        got, hint = f"fold={fold!r}, max_nodes={max_nodes!r}", "fold=0 draws every node by itself"
        raise ArgumentError("whole numbers, fold from 0 and max_nodes from 1", got, hint)
    return _laid_out(_graph(t, gradients), int(fold), max_nodes)
