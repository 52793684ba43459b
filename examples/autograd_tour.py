"""A tour of automatic differentiation: from the chain rule on two numbers to a network that bends around two moons.

    python examples/autograd_tour.py [--out-dir tour]

Each stop prints what is computed, and checks it against mathematics done by hand.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

import minigrad as mg
import nn
import optim


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def chain_rule() -> None:
    heading("1. The chain rule on numbers")
    x = mg.Tensor(0.5, requires_grad=True)
    u = x * x  # du/dx = 2x
    y = mg.sin(u)  # dy/du = cos(u)
    y.backward()
    by_hand = math.cos(0.25) * 2 * 0.5
    print(f"y = sin(x²) at x = 0.5      dy/dx = {float(x.grad):.6f}    by hand cos(x²) · 2x = {by_hand:.6f}")
    assert math.isclose(float(x.grad), by_hand)


def what_a_node_keeps() -> None:
    heading("2. What is remembered of each operation")
    x = mg.Tensor([1.0, 2.0], requires_grad=True)
    y = mg.exp(x) + x
    node = y.node
    while node is not None:
        print(f"{node.primitive.name:4} keeps {list(node.plan.names) or 'nothing'}")
        node = next((parent for parent in node.parents if not isinstance(parent, mg.Tensor)), None)
    print("add's derivative reads nothing; exp's reads its own result.")


def logistic_regression_by_hand() -> None:
    heading("3. A gradient checked by hand: logistic regression")
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(6, 3)), rng.integers(0, 2, size=6).astype(float)
    w = mg.Tensor(np.zeros(3), requires_grad=True)
    loss = nn.functional.binary_cross_entropy_with_logits(mg.asarray(features) @ w, labels)
    loss.backward()
    by_hand = features.T @ (1 / (1 + np.exp(-features @ w.data)) - labels) / 6  # Xᵀ (σ(Xw) - y) / n
    print("autograd", w.grad.round(6), "   by hand Xᵀ(σ(Xw) - y)/n", by_hand.round(6))
    np.testing.assert_allclose(w.grad, by_hand)


def finite_differences() -> None:
    heading("4. gradcheck: the derivative against small steps")

    def f(a: Any, b: Any) -> Any:
        return mg.logsumexp(a @ b, axis=-1)

    inputs = [np.random.default_rng(1).normal(size=shape) for shape in ((2, 3), (3, 4))]
    print("first derivative ", mg.gradcheck(f, inputs))
    print("second derivative", mg.gradgradcheck(f, inputs))


def second_derivative() -> None:
    heading("5. A derivative of a derivative")
    x = mg.Tensor(np.linspace(-1, 1, 5), requires_grad=True)
    (slope,) = mg.grad(mg.tanh(x).sum(), x, create_graph=True)
    (curvature,) = mg.grad(slope.sum(), x)
    t = np.tanh(x.data)
    print("tanh''(x)    ", curvature.data.round(4))
    print("-2t(1 - t²)  ", (-2 * t * (1 - t * t)).round(4))
    np.testing.assert_allclose(curvature.data, -2 * t * (1 - t * t), atol=1e-12)


def two_moons(n: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """``n`` points on two interleaved half circles with noise, (n, 2), and which of the two each is on, (n,)."""
    angle, which = rng.uniform(0, math.pi, n), rng.integers(0, 2, n)
    x = np.where(which == 0, np.cos(angle), 1 - np.cos(angle))
    y = np.where(which == 0, np.sin(angle), 0.5 - np.sin(angle))
    return (np.stack([x, y], axis=1) + rng.normal(scale=0.1, size=(n, 2))).astype(np.float32), which


def train_on_two_moons() -> tuple[nn.Module, Any, Any]:
    heading("6. A network learns two moons")
    rng = np.random.default_rng(2)
    mg.random.seed(2)
    points, labels = two_moons(400, rng)
    model = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 301):
        loss = nn.functional.cross_entropy(model(mg.asarray(points)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, 10, 100, 300):
            print(f"step {step:3}  loss {loss.item():.4f}")
    with mg.no_grad():
        fresh, truth = two_moons(1000, rng)
        right = float((model(mg.asarray(fresh)).argmax(axis=1).data == truth).mean())
    print(f"accuracy on 1000 new points: {right:.1%}")
    assert right > 0.97
    return model, points, labels


def draw(model: nn.Module, points: Any, labels: Any, path: Path) -> None:
    """The plane coloured by the model's probability of the second moon, and the points it learned from."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is missing; pip install -e '.[plot]' in the folder of minigrad brings it")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y = np.meshgrid(np.linspace(-1.6, 2.6, 160), np.linspace(-1.2, 1.7, 120))
    with mg.no_grad():
        grid = mg.asarray(np.stack([x.ravel(), y.ravel()], axis=1).astype(np.float32))
        probability = nn.functional.softmax(model(grid), axis=-1)[:, 1].numpy().reshape(x.shape)
    figure, axes = plt.subplots(figsize=(6, 4.2))
    axes.contourf(x, y, probability, levels=20, cmap="RdBu_r", alpha=0.7)
    axes.scatter(points[:, 0], points[:, 1], c=labels, cmap="RdBu_r", edgecolors="black", s=18)
    axes.set(title="Two moons", xlabel="x", ylabel="y")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    print(f"picture: {path}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=Path("runs/tour"), help="where the picture goes")
    args = parser.parse_args(argv)
    chain_rule()
    what_a_node_keeps()
    logistic_regression_by_hand()
    finite_differences()
    second_derivative()
    draw(*train_on_two_moons(), args.out_dir / "two_moons.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
