"""Make the pictures of docs/instruments.md: ``python docs/make_pictures.py`` writes three small SVG files beside it.

Graphviz lays out the graphs. Their boxes may have other sizes elsewhere, since fonts differ, but the same texts. The
curve of memory is written by this file and is the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import minigrad as mg
import nn
import nn.functional as F

HERE = Path(__file__).parent


def regression() -> Any:
    """The loss of one linear neuron on two examples."""
    x = mg.Tensor([[1.0, 2.0], [3.0, 4.0]])
    w = mg.Tensor([[0.5], [-0.25]], requires_grad=True)
    b = mg.Tensor([0.5], requires_grad=True)
    w.name, b.name = "w", "b"
    return ((x @ w + b - np.array([[1.0], [2.0]])) ** 2).mean()


def language_model() -> Any:
    """The loss of a small transformer of two blocks."""
    mg.random.seed(0)
    model = nn.TransformerLM(vocab_size=64, context_length=32, d_model=32, num_layers=2, num_heads=4)
    tokens = np.arange(32).reshape(2, 16)
    return F.cross_entropy(model(tokens), tokens)


def layers(x: Any, count: int) -> Any:
    """Layers that each keep their result, 64 × 64 numbers of 8 bytes."""
    for _ in range(count):
        x = mg.tanh(x * 1.5)
    return x


def whole(x: Any) -> Any:
    """Twelve layers, all of which keep their result."""
    return layers(x, 12)


def in_checkpoints(x: Any) -> Any:
    """The same in four checkpoints of three layers."""
    for _ in range(4):
        x = mg.checkpoint(lambda y: layers(y, 3), x)
    return x


def histories() -> dict[str, list[int]]:
    """Bytes held after each step of a forward and a backward pass."""
    result = {}
    for name, model in (("twelve layers", whole), ("in four checkpoints", in_checkpoints)):
        with mg.track_memory() as memory:
            model(mg.Tensor(np.ones((64, 64)), requires_grad=True)).sum().backward()
        result[name] = memory.history
    return result


def memory_curves() -> str:
    """The histories as step lines over the operations, in kB."""
    curves = histories()
    across = max(map(len, curves.values()))
    top = max(max(history) for history in curves.values())
    x0, y0, width, height = 60, 220, 480, 190
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="580" height="270" font-family="Helvetica,sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{x0} {y0 - height}V{y0}H{x0 + width}" fill="none" stroke="#475569"/>',
        f'<text x="{x0 + width}" y="{y0 + 18}" text-anchor="end">operations and derivatives, in order</text>',
        f'<text x="{x0 - 8}" y="{y0 + 4}" text-anchor="end">0 kB</text>',
    ]
    for k, (name, history) in enumerate(curves.items()):
        color = ("#1d4ed8", "#b45309")[k]
        points = [(x0 + width * i / across, y0 - 0.95 * height * held / top) for i, held in enumerate(history)]
        path = f"M{x0} {y0}" + "".join(f"V{y:.1f}H{x + width / across:.1f}" for x, y in points)
        peak = y0 - 0.95 * height * max(history) / top
        parts += [
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<text x="{x0 - 8}" y="{peak + 4:.1f}" text-anchor="end" fill="{color}">'
            f"{max(history) / 1000:.0f} kB</text>",
            f'<text x="{x0 + 10 + 200 * k}" y="{y0 + 40}" fill="{color}">— {name}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def graphviz(t: Any, **options: Any) -> str:
    """The picture of a graph, without the comments that tell Graphviz's version."""
    return re.sub(r"<!--.*?-->\n?", "", mg.draw(t, **options).svg(), flags=re.DOTALL)


PICTURES: dict[str, Callable[[], str]] = {
    "graph.svg": lambda: graphviz(regression()),
    "model.svg": lambda: graphviz(language_model(), fold=True, gradients=False),
    "memory.svg": memory_curves,
}

if __name__ == "__main__":
    for name, make in PICTURES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
        print(f"wrote docs/{name}")
