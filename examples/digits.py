"""An ordinary experiment: an MLP or a CNN learns to read the 1797 handwritten digits of scikit-learn, in seconds.

    pip install -e '.[examples,plot]'
    python examples/digits.py --model cnn
    python examples/digits.py --model cnn --resume           # goes on where the last epoch was saved
    python examples/digits.py --model cnn --resume --odd     # freezes all but a new head, which tells odd from even

Mini-batches, a schedule, early stopping, saving model and optimizer, freezing, gradient norms by layer, a plot: each is
a few lines below, to be copied. The images are 8 by 8; of each ten one is for validation and one is held out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import minigrad as mg
import nn
import nn.functional as F
import optim

Pair = tuple[Any, Any]  # images (N, 1, 8, 8) and their classes (N,)


# ---- data and models -------------------------------------------------------------------------------------------------


def digits() -> tuple[Pair, Pair, Pair]:
    """Images and digits for training, for validation and held out, in an order that never changes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, None] / 16 - 0.5).astype(np.float32)
    pairs = [(images[part], data.target[order][part]) for part in np.split(np.arange(len(order)), [1437, 1617])]
    return pairs[0], pairs[1], pairs[2]


def mlp() -> nn.Sequential:
    """A multilayer perceptron, which doesn't know that pixels have neighbours."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 10))


def cnn() -> nn.Sequential:
    """Two convolutions with batch norm, each followed by pooling, and a linear head."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding="same"), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding="same"), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def evaluate(model: nn.Module, data: Pair) -> tuple[float, float]:
    """Mean loss and accuracy, without dropout, by running statistics, and without a graph."""
    x, y = data
    model.eval()
    with mg.no_grad():
        logits = model(x)
        loss = float(F.cross_entropy(logits, y))
    return loss, float((logits.argmax(-1).numpy() == y).mean())


# ---- training --------------------------------------------------------------------------------------------------------


class Experiment:
    """A model in training, with all that the next epoch depends on; ``save`` and ``load`` lose no bit of it."""

    def __init__(self, model: nn.Module, lr: float, step_size: int, batch_size: int) -> None:
        self.model, self.lr, self.step_size, self.batch_size = model, lr, step_size, batch_size
        learned = [p for p in model.parameters() if p.requires_grad]  # frozen ones need no moments
        self.optimizer = optim.AdamW(learned, lr=lr, weight_decay=0.01)
        self.best = model.state_dict()
        self.history: list[dict[str, Any]] = []

    def epoch(self, train: Pair, validation: Pair) -> dict[str, Any]:
        """Every example once; then what the model does on validation, noted in ``history``."""
        rate = optim.step_schedule(len(self.history), self.lr, self.step_size, gamma=0.3)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        train_mode(self.model)
        losses, norms = [], []
        for x, y in nn.batches(*train, self.batch_size):
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            norms.append(gradient_norms(self.model))
            optim.clip_grad_norm(self.model.parameters(), max_norm=5.0)
            self.optimizer.step()
            losses.append(float(loss))
        validation_loss, accuracy = evaluate(self.model, validation)
        by_layer = {name: float(np.mean([norm[name] for norm in norms])) for name in norms[0]}
        note = {"train": float(np.mean(losses)), "validation": validation_loss, "accuracy": accuracy}
        self.history.append(note | {"lr": rate, "norms": by_layer})
        if self.waited() == 0:
            self.best = self.model.state_dict()
        return self.history[-1]

    def waited(self) -> int:
        """How many epochs ago the validation loss was lowest: the measure of early stopping."""
        losses = [note["validation"] for note in self.history]
        return len(losses) - 1 - int(np.argmin(losses))

    def save(self, path: Path) -> None:
        """One file: model, optimizer and best model as arrays; options, notes and random numbers as text."""
        state = self.optimizer.state_dict()
        parts = {"model": self.model.state_dict(), "optimizer": state["state"], "best": self.best}
        arrays = {f"{part}/{name}": array for part, named in parts.items() for name, array in named.items()}
        facts = {"groups": state["param_groups"], "history": self.history, "random": mg.random.get_state()}
        mg.save(path, arrays, {"facts": json.dumps(facts)})

    def load(self, path: Path) -> None:
        """Continue from a file of ``save``."""
        arrays, facts = mg.load(path), json.loads(mg.load_metadata(path)["facts"])

        def part(name: str) -> dict[str, Any]:
            return {key.removeprefix(f"{name}/"): a for key, a in arrays.items() if key.startswith(f"{name}/")}

        self.model.load_state_dict(part("model"))
        self.optimizer.load_state_dict({"state": part("optimizer"), "param_groups": facts["groups"]})
        self.best, self.history = part("best"), facts["history"]
        mg.random.set_state(facts["random"])


def train_mode(model: nn.Module) -> None:
    """Training mode, but for frozen layers: the running statistics of their batch norms stay as they are."""
    model.train()
    for layer in model.modules():
        frozen = [not p.requires_grad for p in layer.parameters()]
        if frozen and all(frozen):
            layer.eval()


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of the gradient of each layer that has one: where it vanishes, and where it explodes."""
    layers = [(name, list(layer.parameters())) for name, layer in model.named_children()]
    return {
        f"{name} {type(getattr(model, name)).__name__}": float(optim.clip_grad_norm(learned, max_norm=np.inf))
        for name, parameters in layers
        if (learned := [p for p in parameters if p.grad is not None])
    }


def fit(experiment: Experiment, data: tuple[Pair, Pair], epochs: int, patience: int, path: Path) -> None:
    """Train for so many epochs in all, or until validation got no better for ``patience`` of them; the best stays."""
    while len(experiment.history) < epochs and (not experiment.history or experiment.waited() < patience):
        note = experiment.epoch(*data)
        experiment.save(path)
        print(
            f"epoch {len(experiment.history):3}  lr {note['lr']:.1e}  loss {note['train']:.4f}  "
            f"validation {note['validation']:.4f}  accuracy {note['accuracy']:.1%}"
        )
    experiment.model.load_state_dict(experiment.best)


def plot(history: Iterable[dict[str, Any]], path: Path) -> None:
    """Losses and gradient norms by epoch as a picture; without matplotlib, a line says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("for a picture of the losses: pip install matplotlib")
        return
    notes = list(history)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, norms = figure.subplots(1, 2)
    for name in ("train", "validation"):
        losses.plot([note[name] for note in notes], label=name)
    losses.set(xlabel="epoch", ylabel="cross-entropy (nats)", yscale="log")
    for name in notes[0]["norms"]:
        norms.plot([note["norms"][name] for note in notes], label=name)
    norms.set(xlabel="epoch", ylabel="norm of the gradient", yscale="log")
    losses.legend(), norms.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"losses and gradient norms are drawn in {path}")


# ---- the program -----------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number from 1, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return number


def main(argv: list[str] | None = None) -> float:
    """Train, say what came of it, and return the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("mlp", "cnn"), default="cnn")
    parser.add_argument("--epochs", type=count, default=30)
    parser.add_argument("--patience", type=count, default=6, help="epochs without a better validation loss")
    parser.add_argument("--batch-size", type=count, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--step-size", type=count, default=10, help="epochs until the rate falls to 0.3 of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--resume", action="store_true", help="go on from the file in --out-dir")
    parser.add_argument(
        "--odd", action="store_true", help="then freeze the layers, and learn odd and even by a new head"
    )
    flags = parser.parse_args(argv)
    mg.random.seed(flags.seed)
    flags.out_dir.mkdir(parents=True, exist_ok=True)
    *data, held_out = digits()
    model = {"mlp": mlp, "cnn": cnn}[flags.model]()
    options = (flags.lr, flags.step_size, flags.batch_size)
    print(nn.summary(model))
    experiment, path = Experiment(model, *options), flags.out_dir / f"{flags.model}.safetensors"
    if flags.resume:
        experiment.load(path)
    started = time.perf_counter()
    fit(experiment, (data[0], data[1]), flags.epochs, flags.patience, path)
    loss, accuracy = evaluate(model, held_out)
    print(f"{time.perf_counter() - started:.1f} s; {accuracy:.1%} of the held-out digits are read, loss {loss:.4f}")
    plot(experiment.history, path.with_suffix(".png"))
    if not flags.odd:
        return accuracy

    model.requires_grad_(False)  # freeze what was learned,
    setattr(model, str(len(model) - 1), nn.Linear(model[-1].in_features, 2))  # and give it a head for the new task
    print(nn.summary(model))
    parity = [(x, y % 2) for x, y in (*data, held_out)]
    head = Experiment(model, *options)
    fit(head, (parity[0], parity[1]), flags.epochs, flags.patience, flags.out_dir / f"{flags.model}-odd.safetensors")
    accuracy = evaluate(model, parity[2])[1]
    print(f"{accuracy:.1%} of the held-out digits are known as odd or even")
    return accuracy


if __name__ == "__main__":
    main()
