"""Curves beside each other in a small SVG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "minigrad", "font.size": 9}


class Panel(NamedTuple):
    """Curves by their names: points (x, y, scatter)."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float, float]]]
    log_y: bool = False
    limits: tuple[float, float] | None = None  # of y
    log_x: bool = True


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels to ``path``, in one row beside one legend."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(3.6 * len(panels), 6.0), 3.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            for i, (name, points) in enumerate(panel.curves.items()):
                if not points:
                    continue
                drawn = {"marker": "os^vD*PX<>"[i % 10], "color": f"C{i % 10}", "markersize": 4, "linewidth": 1}
                x, y, scatter = zip(*points, strict=True)
                axes.plot(x, y, label=name, **drawn)
                if any(scatter):
                    axes.errorbar(x, y, scatter, color=f"C{i % 10}", capsize=2, linewidth=1)
            axes.set(yscale="log" if panel.log_y else "linear", ylim=panel.limits)
            axes.grid(alpha=0.3)
            if not panel.log_x:
                continue
            axes.set_xscale("log")
            across = [math.log(x, 4) for points in panel.curves.values() for x, _, _ in points] or [0]
            ticks = [4**n for n in range(math.ceil(min(across)), math.floor(max(across)) + 1)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xticks([], minor=True)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
