"""A table of what a model learns."""

from __future__ import annotations

import re

from minigrad.errors import DTypeError
from minigrad.instruments.observe import scaled, table
from minigrad.messages.explain import describe, explained
from .module import Module


@explained
def summary(model: Module) -> str:
    """The parameters by name with shape, count and memory, for print; those of numbered layers share a line.

    What ``requires_grad_(False)`` froze is marked, and summed up on a line of its own.

    >>> import nn
    >>> print(summary(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2).requires_grad_(False))))
    parameter  shape   count  memory
    0.weight   (8, 4)     32   128 B
    0.bias     (8,)        8    32 B
    1.weight   (2, 8)     16    64 B  frozen
    1.bias     (2,)        2     8 B  frozen
    total                 58   232 B
    frozen                18    72 B
    """
    if not isinstance(model, Module):
        raise DTypeError("a model, an nn.Module", describe(model), "summary(model)")
    rows: dict[tuple[str, tuple[int, ...], bool], list[int]] = {}
    for name, parameter in model.named_parameters():
        key = re.sub(r"\.\d+\.", ".*.", name), parameter.shape, parameter.requires_grad
        row = rows.setdefault(key, [0, 0, 0])
        for column, value in enumerate((1, parameter.size, parameter.size * parameter.dtype.itemsize)):
            row[column] += value
    lines = [("parameter", "shape", "count", "memory", "")]
    for (name, shape, learns), (copies, count, memory) in rows.items():
        text = f"{copies} × {shape}" if copies > 1 else str(shape)
        lines.append((name, text, f"{count:,}", scaled(memory, "B"), "" if learns else "frozen"))
    for name, kinds in (("total", (True, False)), ("frozen", (False,))):
        counts = [row for (_, _, learns), row in rows.items() if learns in kinds]
        if counts or name == "total":
            count, memory = (sum(row[column] for row in counts) for column in (1, 2))
            lines.append((name, "", f"{count:,}", scaled(memory, "B"), ""))
    return table(lines, left=2)
