"""Learning without forgetting, and learning from little: what a model of plays loses, and what it gains.

    python benchmarks/forgetting.py [--folder runs/forgetting] [--plot docs] [--json PATH] [--quick]

The study is resumable: what was found is in the folder, and a second run computes what is missing. The base, the texts
and the batches are those of adapting.py: ten plays, then Python's standard library. Each way of training on has an
update of as many rows, so replay learns fewer new ones. Losses are followed on the validation parts, settings are
chosen by the mean of the two, and the table has those of the test parts. Little text is 20 kB of Python's own manual,
whose author is in neither. ``--quick`` is for the tests.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import adapting
import numpy as np
from adapting import PLAYS, SIZES, Results, drawn, loss_of, parts, python_text, trained_base
from harness import measuring, pictures, tables

import minigrad as mg
import nn
import optim

RATE = 3e-3  # of all ways but those whose rate is swept
LIMIT = 20_000  # bytes of the author to train on, and as many to validate on
SHA256 = "105fd3707509e367921bd6f153ca1fc314090d8acbfaeefadc300f76436b1c26"  # of the author's bytes, in Python 3.11
SWEEPS: dict[str, tuple[float, ...]] = {  # of each way, what is swept: its rate, its λ or the share of old rows
    "full": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "EWC": (1.0, 10.0, 100.0, 1000.0),
    "L2": (0.003, 0.03, 0.3, 3.0),
    "replay": (1 / 16, 1 / 8, 1 / 4, 1 / 2),
    "generated": (1 / 8, 1 / 4, 1 / 2),
    "LoRA": (1e-3, 3e-3, 1e-2),
}
LITTLE: dict[str, dict[str, Any]] = {  # ways of learning from little, and their options
    "from scratch": {},
    "dropout 0.2": {"dropout": 0.2},
    "weight decay 1": {"weight_decay": 1.0},
    "label smoothing 0.1": {"label_smoothing": 0.1},
    "all three": {"dropout": 0.2, "weight_decay": 1.0, "label_smoothing": 0.1},
    "fine-tuned": {"base": True, "rate": 1e-3},
    "fine-tuned, dropout 0.2": {"base": True, "rate": 1e-3, "dropout": 0.2},
    "fine-tuned, L2 0.03": {"base": True, "rate": 1e-3, "l2": 0.03},
}


class Plan(NamedTuple):
    """How long everything takes."""

    base_updates: int = 2000
    updates: int = 300
    batch_size: int = 16
    windows: int = 256  # of a loss in the table
    along: int = 64  # of a loss along the way
    every: int = 50  # updates between those
    old: int = 256  # examples in the reservoir
    measured: int = 64  # of them the Fisher is measured on
    little_updates: int = 600
    sweeps: Mapping[str, tuple[float, ...]] = MappingProxyType(SWEEPS)
    seeds: tuple[int, ...] = (0, 1, 2)


FEW = MappingProxyType({kind: values[:2] for kind, values in SWEEPS.items()})
QUICK = Plan(2, 2, 2, windows=2, along=2, every=1, old=2, little_updates=2, sweeps=FEW, seeds=(0, 1))
UNITS = {"full": "rate", "LoRA": "rate", "EWC": "λ", "L2": "λ", "replay": "share", "generated": "share"}


class Way(NamedTuple):
    """A way of training on, and what of it is swept; "frozen" is none, "joint" is on both texts from the beginning."""

    kind: str
    value: float = 0.0

    @property
    def title(self) -> str:
        """Its name in the table."""
        return f"{self.kind}, {UNITS[self.kind]} {self.value:g}" if self.kind in UNITS else self.kind

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.value if UNITS.get(self.kind) == "rate" else RATE


def author_text() -> bytes:
    """The manual that comes with Python, by its topics; other versions have others."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()[: 5 * LIMIT]


class Drawing:
    """Batches of a text, for ``nn.Replay``."""

    def __init__(self, ids: np.ndarray, plan: Plan, seed: int) -> None:
        self.draw = partial(drawn, ids, plan, np.random.default_rng(seed))


def reservoir(base: nn.TransformerLM, ids: np.ndarray, plan: Plan, seed: int, generated: bool = False) -> nn.Reservoir:
    """Old examples: windows of the old text, or what the base writes itself from a new line on.

    Of what is written the last part is taken, so that examples begin anywhere, as windows do.
    """
    kept, length = nn.Reservoir(plan.old, generator=seed), SIZES["context_length"]
    if not generated:
        kept.add(*drawn(ids, plan._replace(batch_size=plan.old), np.random.default_rng(seed + 100)))
        return kept
    prompts = np.full((plan.old, 1), ord("\n"))
    rows = nn.generate(base, prompts, 2 * length, generator=seed)[:, -length - 1 :]
    kept.add(rows[:, :-1], rows[:, 1:])
    return kept


def train(model: nn.TransformerLM, draw: Any, loss: Any, rate: float, updates: int, decay: float, after: Any) -> None:
    """AdamW with a warm-up and a cosine, as in adapting.py; ``after`` is called with the number of updates done."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.AdamW(optim.decay_groups(model.named_parameters(), decay), lr=rate)
    after(0)
    for done in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = optim.cosine_schedule(done, rate, rate / 10, updates // 20, updates)
        loss(*draw()).backward()
        optim.clip_grad_norm(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(done)


def loaded(base: Mapping[str, Any], **options: Any) -> nn.TransformerLM:
    """The model of the plays."""
    model = nn.TransformerLM(**SIZES, generator=0, **options)
    model.load_state_dict(dict(base))
    return model


def fisher_of(base: Mapping[str, Any], plays: np.ndarray, plan: Plan, seed: int) -> dict[str, Any]:
    """How much the plays need each weight, by the base's own labels."""
    inputs, labels = reservoir(loaded(base), plays, plan, seed).columns
    return nn.fisher(loaded(base), [(inputs[: plan.measured], labels[: plan.measured])], generator=seed)


def run(base: Mapping[str, Any], texts: Any, plan: Plan, way: Way, seed: int) -> Any:
    """What a way comes to: the losses on both texts along the way, and on the test parts at its end."""
    plays, code = texts["plays"]["training"], texts["python"]["training"]
    model = loaded(base)
    batches: Any = Drawing(code, plan, seed)
    loss, updates = model.loss, plan.updates
    if way.kind == "LoRA":
        nn.lora(model, 8, 16, generator=seed)
    elif way.kind in ("EWC", "L2"):
        term = nn.EWC(model, way.value, fisher_of(base, plays, plan, seed) if way.kind == "EWC" else None)
        loss = lambda *batch: model.loss(*batch) + term()
    elif way.kind in ("replay", "generated"):
        batches = nn.Replay(batches, reservoir(model, plays, plan, seed, way.kind == "generated"), way.value)
    elif way.kind == "joint":
        model = nn.TransformerLM(**SIZES, generator=seed)
        loss, updates = model.loss, plan.base_updates + plan.updates
        rng = np.random.default_rng(seed)
        batches.draw = lambda: drawn((plays, code)[rng.integers(2)], plan, rng)
    along: list[Any] = []
    brief = plan._replace(windows=plan.along)

    def after(done: int) -> None:
        if done % plan.every == 0 or done == updates:
            along.append([done, *(loss_of(model, texts[text]["validation"], brief) for text in ("python", "plays"))])

    if way.kind != "frozen":
        train(model, batches.draw, loss, way.rate, updates, 0.01, after)
    losses = {f"{t} {part}": loss_of(model, texts[t][part], plan) for t in texts for part in ("validation", "test")}
    return {**losses, "along": along}


# ---- little text -----------------------------------------------------------------------------------------------------


def learn_little(base: Mapping[str, Any], author: Any, plan: Plan, options: Mapping[str, Any], seed: int) -> Any:
    """Losses on training, validation and test along the way: [updates, each of these]."""
    dropout = options.get("dropout", 0.0)
    model = (
        loaded(base, dropout=dropout)
        if "base" in options
        else nn.TransformerLM(**SIZES, generator=seed, dropout=dropout)
    )
    term = nn.EWC(model, options["l2"]) if "l2" in options else None
    along: list[Any] = []
    every = max(1, plan.little_updates // 20)

    def loss(inputs: np.ndarray, targets: np.ndarray) -> Any:
        found = model.loss(inputs, targets, label_smoothing=options.get("label_smoothing", 0.0))
        return found if term is None else found + term()

    def after(done: int) -> None:
        if done % every == 0:
            model.eval()
            brief = plan._replace(windows=2 * plan.along)
            along.append([done, *(loss_of(model, author[part], brief) for part in ("training", "validation", "test"))])
            model.train()

    draw = Drawing(author["training"], plan, seed).draw
    train(model, draw, loss, options.get("rate", RATE), plan.little_updates, options.get("weight_decay", 0.01), after)
    return along


def stopped(along: list[Any], patience: int = 3) -> Any:
    """The line of the best validation loss, where training stops after so many without a better one."""
    best = along[0]
    for line in along:
        best = line if line[2] < best[2] else best
        if line[0] > best[0] and along.index(line) - along.index(best) >= patience:
            break
    return best


# ---- the study -------------------------------------------------------------------------------------------------------


class Study:
    """The results of all ways, each computed when it is first asked for."""

    def __init__(self, results: Results, base: Any, texts: Any, author: Any, plan: Plan) -> None:
        self.results, self.base, self.texts, self.author, self.plan = results, base, texts, author, plan
        self.ways = {kind: [Way(kind, value) for value in values] for kind, values in plan.sweeps.items()}
        self.best = {kind: min(ways, key=self.mean) for kind, ways in self.ways.items()}

    def of(self, way: Way, seed: int = 0) -> Any:
        """What a way comes to."""
        return self.results.once(f"{way} seed {seed}", partial(run, self.base, self.texts, self.plan, way, seed))

    def mean(self, way: Way) -> float:
        """The mean of both validation losses, by which settings are chosen."""
        return statistics.fmean(self.of(way)[f"{text} validation"] for text in self.texts)

    def little(self, name: str, seed: int = 0) -> Any:
        """How learning from little went."""
        task = partial(learn_little, self.base, self.author, self.plan, LITTLE[name], seed)
        return self.results.once(f"little: {name} seed {seed}", task)

    def table(self) -> str:
        """A row for each way; the best of each kind, and plain training, are means over all seeds."""
        rows = []
        several = {*self.best.values(), Way("full", RATE)}
        for way in [Way("frozen"), *(way for ways in self.ways.values() for way in ways), Way("joint")]:
            found = [self.of(way, seed) for seed in (self.plan.seeds if way in several else self.plan.seeds[:1])]
            losses = [[one[f"{text} test"] for one in found] for text in ("python", "plays")]
            spread = max(max(values) - min(values) for values in losses) if len(found) > 1 else None
            both = statistics.mean(map(statistics.mean, losses))
            rows.append([way.title, *map(statistics.mean, losses), both, spread])
        return tables.table(["way", "loss on Python", "on the plays", "mean", "range over seeds"], rows)

    def little_table(self) -> str:
        """A row for each way of learning from little."""
        rows = []
        for name in LITTLE:
            along = self.little(name)
            last, best = along[-1], stopped(along)
            rows.append([name, last[1], last[3], best[3], str(best[0])])
        headers = ["way", "training loss at the end", "test loss at the end", "test loss, stopped early", "stopped at"]
        return tables.table(headers, rows)

    def panels(self) -> dict[str, list[pictures.Panel]]:
        """Old loss against new for each setting, both along the way, and learning from little."""
        plane = {
            kind: [(*(self.of(way)[f"{text} test"] for text in ("python", "plays")), 0.0) for way in ways]
            for kind, ways in self.ways.items()
        }
        plane |= {
            kind: [(*(self.of(Way(kind))[f"{text} test"] for text in ("python", "plays")), 0.0)] for kind in ["joint"]
        }
        shown = {"full": Way("full", RATE), **{k: w for k, w in self.best.items() if k != "full"}}
        path = {
            kind: [(new, old, 0.0) for _, new, old in self.of(way)["along"] if new < 3] for kind, way in shown.items()
        }
        axes = "loss on Python", "loss on the plays"
        little = {
            part: {
                name: [(float(line[0]), line[column], 0.0) for line in self.little(name)[2:]]
                for name in ("from scratch", "dropout 0.2", "all three", "fine-tuned")
            }
            for part, column in (("training", 1), ("test", 3))
        }
        return {
            "forgetting": [
                pictures.Panel("each setting, at its end", *axes, plane, log_x=False),
                pictures.Panel("from 50 updates on", *axes, path, log_x=False),
            ],
            "little": [
                pictures.Panel(f"20 kB: {part}", "updates", "loss", curves, log_x=False, limits=(0.5, 3.0))
                for part, curves in little.items()
            ],
        }


def main() -> None:
    """Print the tables."""
    parser = tables.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/forgetting"), help="of the base and the results")
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that all runs")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the pictures there")
    options = parser.parse_args()
    mg.set_num_threads(1)
    plan = QUICK if options.quick else Plan()
    folder = options.folder / ("quick" if options.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    code, author = python_text(), author_text()
    texts = {"python": parts(code), "plays": parts(PLAYS.read_bytes())}
    ids = np.frombuffer(author, np.uint8).astype(np.int64)
    little = {"training": ids[:LIMIT], "validation": ids[LIMIT : 2 * LIMIT], "test": ids[2 * LIMIT :]}
    pinned = hashlib.sha256(code).hexdigest() == adapting.SHA256 and hashlib.sha256(author).hexdigest() == SHA256
    print(f"{measuring.machine()}, 1 thread; {'the pinned texts' if pinned else 'other texts than the pinned ones'}\n")
    base = trained_base(texts, plan, folder / "base.safetensors")
    results = Results(folder / "results.json")
    study = Study(results, base, texts, little, plan)
    print(f"{study.table()}\n\n{study.little_table()}")
    if options.plot:
        for name, panels in study.panels().items():
            pictures.draw(options.plot / f"{name}.svg", panels)
    tables.write_json(options.json, results.found)


if __name__ == "__main__":
    main()
