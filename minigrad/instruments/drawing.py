"""``draw``: the graph behind a tensor as a picture, with shapes, values and gradients, whole or folded into modules.

The graph knows of no modules. They are read off the names of the parameters: an operation that uses
``layers.0.attn.q_proj.weight`` belongs to ``layers.0.attn.q_proj``, one that uses several to the innermost module that
holds most of them, and one without a parameter to the innermost module that holds both the last operation before it and
the first after it that have one, since modules run one after another.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
    nodes = sorted(nodes_behind([root], lambda node: False), key=lambda node: node.number)
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


def _module_of(leaf: Any) -> str:
    """``layers.0.attn.q_proj`` for the parameter ``layers.0.attn.q_proj.weight``; "" for what has no such name."""
    return (leaf.name or "").rpartition(".")[0] if isinstance(leaf, Tensor) else ""


def _common(a: str, b: str) -> str:
    """The innermost module that holds both."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(name for name, _ in shared)


def _majority(paths: Sequence[str]) -> str:
    """The innermost module that holds more than half of the paths: that of a norm within a product has no say."""
    prefixes = Counter(".".join(names[:n]) for names in (p.split(".") for p in paths) for n in range(1, len(names) + 1))
    return max((p for p, count in prefixes.items() if 2 * count > len(paths)), key=len, default="")


def _unit(path: str, depth: int) -> str:
    """The module to fold into: the first ``depth`` names of the path, a number counted with the name before it."""
    unit: list[str] = []
    for part in path.split("."):
        if unit and not part.isdigit():
            depth -= 1
        if depth > 0:
            unit.append(part)
    return ".".join(unit)


def _modules(nodes: Sequence[Node]) -> list[str]:
    """For each node the path of the innermost module that it belongs to, as far as names tell."""
    paths = _own_modules(nodes)
    following = list(paths)
    for k in range(len(nodes) - 2, -1, -1):
        following[k] = paths[k] or following[k + 1]
    before = ""
    for k, path in enumerate(paths):
        paths[k] = path or _common(before, following[k])
        before = path or before
    return paths


def _own_modules(nodes: Sequence[Node]) -> list[str]:
    """The modules of the nodes that use a parameter, or a view or cast of one; "" for the others."""
    casts: dict[Any, str] = {}
    paths = []
    for node in nodes:
        used = [path for edge in node.parents or () if (path := casts.get(edge) or _module_of(edge))]
        path = _majority(used)
        if node.primitive.view or node.primitive.name == "astype":
            casts[node] = path
        paths.append(path)
    return paths


@dataclass
class _Group:
    """Nodes that share a box: those of one run of a module, or a single one (``unit`` is "")."""

    unit: str
    nodes: list[Node]


def _grouped(nodes: Sequence[Node], depth: int) -> list[_Group]:
    """The nodes in the boxes that they go to, in the order of the computation; depth 0 folds nothing."""
    leaves = {edge for node in nodes for edge in node.parents or () if isinstance(edge, Tensor)}
    units = {_unit(_module_of(leaf), depth) for leaf in leaves} - {""} if depth else set()
    paths = _modules(nodes) if depth else [""] * len(nodes)
    groups: list[_Group] = []
    home: dict[Any, _Group] = {}
    for node, path in zip(nodes, paths, strict=True):
        unit = _unit(path, depth)
        sources = [home[edge] for edge in node.parents or () if isinstance(edge, Node)]
        if unit in units and groups and groups[-1].unit == unit:
            group = groups[-1]
        elif unit not in units and len(sources) > 1 and sources[0].unit and all(s is sources[0] for s in sources):
            group = sources[0]  # joins two results of one module, as a residual connection at its end does
        else:
            group = _Group(unit if unit in units else "", [])
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


def _operation_box(node: Node, graph: _Graph) -> Box:
    title = node.primitive.label
    if node.primitive.elementwise:
        wrt = {argument_name(node.primitive, position) for position in node.plan.wrt}
        constants = {name: a for name, a in _kept(node).items() if name in node.primitive.position and name not in wrt}
        given = [f"{name}={a}" for name, a in constants.items() if not isinstance(a, bool) and np.size(a) == 1]
        title += f"({', '.join(given)})" if given else ""
    if node.parents is None:
        return Box((title, "freed"), "operation")
    return Box((title, *_facts(node, graph)), "operation")


def _module_box(group: _Group, run: int, leaves: Collection[Any], graph: _Graph) -> Box:
    last = group.nodes[-1]
    count = sum(leaf.size for leaf in leaves)
    lines = [group.unit + (f" ({run})" if run > 1 else "")]
    lines.append(f"{len(group.nodes)} operation{'s'[: len(group.nodes) > 1]}, {count:,} parameters")
    lines.append(f"gives {last.dtype} {last.shape}")
    if leaves and all(leaf in graph.gradients for leaf in leaves):
        lines.append(_norm(graph.gradients[leaf] for leaf in leaves))
    return Box(tuple(lines), "module")


class _Layout:
    """Boxes and arrows as they come, a group at a time: its leaves that have no box yet, then its own."""

    def __init__(self, graph: _Graph, depth: int) -> None:
        self.graph, self.depth = graph, depth
        self.boxes: list[Box] = []
        self.arrows: dict[tuple[int, int], str] = {}
        self.place: dict[Any, int] = {}  # the box of a node or a leaf; what has none is in box 0, if anything
        self.runs: dict[str, int] = {}  # of each module so far

    def add(self, group: _Group) -> None:
        edges = dict.fromkeys(edge for node in group.nodes for edge in node.parents or ())
        inside = {e: None for e in edges if group.unit and _unit(_module_of(e), self.depth) == group.unit}
        for leaf in edges:
            if isinstance(leaf, Tensor) and leaf not in inside and leaf not in self.place:
                self.put([leaf], Box((leaf.name or "leaf", *_facts(leaf, self.graph)), "leaf"))
        self.runs[group.unit] = run = self.runs.get(group.unit, 0) + 1
        folded = group.unit != ""
        box = _module_box(group, run, inside, self.graph) if folded else _operation_box(group.nodes[0], self.graph)
        here = self.put(group.nodes, box)
        for edge in edges:
            source = self.place.get(edge, 0)
            if edge not in inside and source != here:
                self.arrows[source, here] = str(edge.shape) if self.boxes[source].kind == "module" else ""

    def put(self, edges: Iterable[Any], box: Box) -> int:
        """A new box, the place of these; its number."""
        self.boxes.append(box)
        self.place |= dict.fromkeys(edges, len(self.boxes) - 1)
        return len(self.boxes) - 1


def _laid_out(graph: _Graph, depth: int, max_nodes: int) -> Drawing:
    """The last ``max_nodes`` boxes with their leaves, and one that stands for all that was left out."""
    groups = _grouped(graph.nodes, depth)
    layout = _Layout(graph, depth)
    left_out = sum(len(group.nodes) for group in groups[:-max_nodes])
    if left_out:
        layout.put((), Box((f"{left_out:,} more operations", f"max_nodes={max_nodes}"), "more"))
    for group in groups[-max_nodes:]:
        layout.add(group)
    if not groups:
        layout.put((), Box((graph.root.name or "leaf", *_facts(graph.root, graph)), "leaf"))
    return Drawing(tuple(layout.boxes), tuple((*pair, label) for pair, label in layout.arrows.items()))


# ---- the picture ----------------------------------------------------------------------------------------------------

_STYLES = {
    "leaf": 'style="filled,rounded", fillcolor="#dbeafe"',
    "operation": 'style="filled", fillcolor="#ffffff"',
    "module": 'style="filled", fillcolor="#fef3c7"',
    "more": 'style="dashed"',
}
_LAID_OUT = {".svg", ".png", ".pdf"}  # by Graphviz
_TEXTS = {".dot": "dot", ".gv": "dot", ".mmd": "mermaid", ".mermaid": "mermaid", ".txt": "text"}


@dataclass(frozen=True)
class Drawing:
    """A graph as boxes and arrows ``(from, to, label)`` between their numbers; the last box is the result.

    ``dot`` and ``mermaid`` are it as text, ``svg()`` and ``save(path)`` as a picture; a notebook shows it by itself.
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

    @property
    def mermaid(self) -> str:
        """The graph in Mermaid's language, which GitHub and notebooks show inside of Markdown."""
        shapes = {"leaf": ("([", "])"), "module": ("[[", "]]"), "operation": ("[", "]"), "more": ("[", "]")}
        lines = ["flowchart TD"]
        for k, box in enumerate(self.boxes):
            opening, closing = shapes[box.kind]
            lines.append(f'  b{k}{opening}"{_mermaid_text(box.lines)}"{closing}')
        for source, target, label in self.arrows:
            lines.append(f"  b{source} -->" + (f'|"{label}"|' if label else "") + f" b{target}")
        return "\n".join(lines) + "\n"

    def svg(self) -> str:
        """The picture, laid out by Graphviz; an error where its program ``dot`` is not installed."""
        return _graphviz(self.dot, "svg").decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file of the kind its suffix says: svg, png, pdf (by Graphviz), dot, gv, mmd, mermaid, txt."""
        suffix = Path(checked_path(path, example="graph.svg")).suffix.lower()
        if suffix in _LAID_OUT:
            Path(path).write_bytes(_graphviz(self.dot, suffix[1:]))
        elif suffix in _TEXTS:
            Path(path).write_text(getattr(self, _TEXTS[suffix]), encoding="utf-8")
        else:
            got, hint = str(path), "graph.mmd needs no Graphviz"
            raise ArgumentError(f"a file name that ends in {' '.join(sorted(_LAID_OUT | set(_TEXTS)))}", got, hint)

    def _repr_svg_(self) -> str | None:
        return self.svg() if shutil.which("dot") else None

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def _dot_text(lines: Iterable[str]) -> str:
    quoted = (line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return "\\n".join(quoted)


def _mermaid_text(lines: Iterable[str]) -> str:
    quoted = (line.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;") for line in lines)
    return "<br>".join(quoted)


def _graphviz(dot: str, kind: str) -> bytes:
    program = shutil.which("dot")
    if program is None:
        hint = "install it (apt install graphviz, brew install graphviz), or use .dot, .mermaid or .text"
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
