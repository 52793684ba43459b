"""What ways of adapting a model cost, learn and forget, beside full fine-tuning: from the plays on to Python.

    python benchmarks/adapting.py             some half an hour on one thread; a run that was stopped goes on
    python benchmarks/adapting.py --timing    the times of an update alone, in turns, on an idle machine

A small TransformerLM learns the ten plays. Then each way trains it on files of Python's standard library, from the same
weights on the same batches. The learning rate of each method is chosen on the validation part, the losses are those of
parts that nothing was chosen on: the text's last tenth. ``--quick`` is for the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np
from harness import measuring, pictures, tables

import minigrad as mg
import nn
import optim

PLAYS = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
FILES = (
    "argparse.py", "ast.py", "calendar.py", "configparser.py", "csv.py", "datetime.py", "difflib.py", "fractions.py",
    "heapq.py", "inspect.py", "logging/__init__.py", "pathlib.py", "pickle.py", "random.py", "shutil.py",
    "statistics.py", "tarfile.py", "textwrap.py", "threading.py", "zipfile.py",
)  # fmt: skip
SHA256 = "b7c6191efc6e98caa91d6b7571f68b7071120338d8b88a5d4c35260b3e8cc773"  # of these files of Python 3.11
SIZES: dict[str, Any] = {"vocab_size": 256, "context_length": 64, "d_model": 64, "num_layers": 3, "num_heads": 4}
TARGETS: dict[str, dict[str, Any]] = {  # of each method, by the part of a block that is adapted
    "LoRA": {"attention": "attn.*", "feed-forward": "ffn.*", "all": ("attn.*", "ffn.*")},
    "adapters": {"attention": "output_proj", "feed-forward": "w2", "all": ("output_proj", "w2")},
    "prefix": {"attention": "*attn"},
}
UNITS = {"LoRA": "rank", "adapters": "size", "prefix": "length"}
RATES = {
    "full": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "LoRA": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "adapters": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "prefix": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}


class Plan(NamedTuple):
    """How long everything takes."""

    base_updates: int = 2000
    updates: int = 500
    batch_size: int = 16
    windows: int = 256  # of a loss
    sizes: Mapping[str, tuple[int, ...]] = MappingProxyType(
        {"LoRA": (1, 4, 16), "adapters": (4, 16, 64), "prefix": (4, 16, 64)}
    )
    seeds: tuple[int, ...] = (0, 1, 2)


FEW = MappingProxyType({"LoRA": (1, 2), "adapters": (2, 3), "prefix": (2, 3)})
QUICK = Plan(base_updates=4, updates=1, batch_size=2, windows=4, sizes=FEW, seeds=(0, 1))


class Way(NamedTuple):
    """A way of training on: a method and its rate, how much of it and where; "full" is all weights, "frozen" none."""

    method: str
    rate: float = 0.0
    size: int = 0
    where: str = ""
    start: str = ""  # of a prefix: "text", that it has read some of the target text

    @property
    def title(self) -> str:
        """Its name in the table."""
        if self.method in UNITS:
            read = ", from a text" if self.start else ""
            return f"{self.method}, {UNITS[self.method]} {self.size}, {self.where}{read}"
        return {"full": "full fine-tuning", "frozen": "frozen"}[self.method]


def parts(text: bytes) -> dict[str, np.ndarray]:
    """Training, validation and test: eight tenths, one and one."""
    ids, tenth = np.frombuffer(text, np.uint8).astype(np.int64), len(text) // 10
    return {"training": ids[: -2 * tenth], "validation": ids[-2 * tenth : -tenth], "test": ids[-tenth:]}


def python_text() -> bytes:
    """The files of the standard library, one after the other; other versions of Python have others."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join((library / file).read_bytes() for file in FILES if (library / file).exists())


def drawn(ids: np.ndarray, plan: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A batch of sequences and of the bytes that follow."""
    starts = rng.integers(len(ids) - SIZES["context_length"], size=(plan.batch_size, 1))
    rows = ids[starts + np.arange(SIZES["context_length"] + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.TransformerLM, ids: np.ndarray, plan: Any) -> float:
    """Nats a byte on windows that lie evenly over the text."""
    length = SIZES["context_length"]
    starts = np.linspace(0, len(ids) - length - 1, plan.windows).astype(int)[:, None]
    rows = ids[starts + np.arange(length + 1)]
    with mg.no_grad():
        return float(model.loss(rows[:, :-1], rows[:, 1:]).item())


def trainer(model: nn.TransformerLM, ids: np.ndarray, plan: Any, rate: float, updates: int, seed: int) -> Any:
    """A function that does the next update, AdamW with a warm-up and a cosine."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, rng, done = optim.AdamW(trained, lr=rate), np.random.default_rng(seed), 0

    def update() -> None:
        nonlocal done
        done += 1
        for group in optimizer.param_groups:
            group["lr"] = optim.cosine_schedule(min(done, updates), rate, rate / 10, updates // 20, updates)
        model.loss(*drawn(ids, plan, rng)).backward()
        optim.clip_grad_norm(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def adapted(base: dict[str, Any], way: Way, seed: int, text: np.ndarray) -> nn.TransformerLM:
    """The base, ready to be trained in this way; a prefix may begin as what stands somewhere in the text."""
    model = nn.TransformerLM(**SIZES, generator=0)
    model.load_state_dict(base)
    if way.method not in TARGETS:
        return model
    targets = TARGETS[way.method][way.where]
    if way.method == "LoRA":
        return nn.lora(model, way.size, 2 * way.size, targets, generator=seed)
    if way.method == "adapters":
        return nn.adapters(model, way.size, targets, generator=seed)
    place = np.random.default_rng(seed).integers(len(text) - way.size)
    tokens = text[place : place + way.size] if way.start else None
    return nn.prefixes(model, way.size, targets, tokens=tokens, generator=seed)


def trained_base(texts: dict[str, dict[str, np.ndarray]], plan: Any, path: Path) -> dict[str, Any]:
    """The model of the plays, from the folder where it was made before."""
    if not path.exists():
        model = nn.TransformerLM(**SIZES, generator=0)
        update = trainer(model, texts["plays"]["training"], plan, 3e-3, plan.base_updates, seed=0)
        for _ in range(plan.base_updates):
            update()
        mg.save(path, model.state_dict())
    return mg.load(path)


def run(base: dict[str, Any], texts: dict[str, dict[str, np.ndarray]], plan: Plan, way: Way, seed: int) -> Any:
    """What a way of training comes to."""
    ids = texts["python"]["training"]
    model = adapted(base, way, seed, ids)
    numbers = [p.size for p in model.parameters() if p.requires_grad] if way.rate else []
    found = {"trained": sum(numbers), "share": 100 * sum(numbers) / sum(map(np.size, base.values()))}
    if way.rate:
        update = trainer(model, ids, plan, way.rate, plan.updates, seed)
        with mg.track_memory() as memory:
            update()
        found["graph"], found["states"] = memory.peak / 1e6, 12 * sum(numbers) / 1e6  # a gradient and two moments
        for _ in range(plan.updates - 1):
            update()
    losses = {f"{text} {part}": loss_of(model, texts[text][part], plan) for text in texts for part in texts[text]}
    return {**found, **{name: loss for name, loss in losses.items() if "training" not in name}}


class Results:
    """What was found so far, in a file: a run that was stopped goes on after its last result."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def once(self, key: str, function: Callable[[], Any]) -> Any:
        """The result under this key, computed if it isn't there."""
        if key not in self.found:
            started = time.perf_counter()
            self.found[key] = function()
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")
            print(f"{key}: {time.perf_counter() - started:.0f} s", flush=True)
        return self.found[key]


def grid(plan: Plan, rates: Mapping[str, float]) -> list[Way]:
    """All rows of the table, in its order."""
    adapted = [
        Way(method, rates[method], size, where)
        for method in TARGETS
        for where in TARGETS[method]
        for size in plan.sizes[method]
    ]
    read = Way("prefix", rates["prefix"], plan.sizes["prefix"][1], "attention", "text")
    return [Way("frozen"), Way("full", rates["full"]), *adapted, read]


def tried(plan: Plan) -> dict[str, list[Way]]:
    """What the rate of each method is chosen by: its middle size, in all parts that it can adapt."""
    return {
        method: [
            Way(method, rate, plan.sizes[method][1], list(TARGETS[method])[-1])
            if method in UNITS
            else Way(method, rate)
            for rate in rates
        ]
        for method, rates in RATES.items()
    }


class Study:
    """The results of all ways, each computed when it is first asked for."""

    def __init__(self, results: Results, base: dict[str, Any], texts: Any, plan: Plan) -> None:
        self.results, self.base, self.texts, self.plan = results, base, texts, plan
        self.tried = tried(plan)
        best = {
            method: min(ways, key=lambda way: self.of(way)["python validation"]) for method, ways in self.tried.items()
        }
        self.ways = grid(plan, {method: way.rate for method, way in best.items()})

    def of(self, way: Way, seed: int = 0) -> Any:
        """What a way comes to."""
        return self.results.once(f"{way} seed {seed}", partial(run, self.base, self.texts, self.plan, way, seed))

    def losses(self, way: Way, part: str = "validation") -> tuple[float, float]:
        """Those on Python and on the plays, at the first seed."""
        found = self.of(way)
        return found[f"python {part}"], found[f"plays {part}"]

    def table(self) -> str:
        """A row for each way; the largest of each method is a mean over all seeds."""
        largest = {way.method: way for way in self.ways if not way.start}  # the last one of each
        rows = []
        for way in self.ways:
            seeds = self.plan.seeds if way in largest.values() and way.rate else self.plan.seeds[:1]
            found = [self.of(way, seed) for seed in seeds]
            losses = [[one[f"{text} test"] for one in found] for text in self.texts]
            spread = max(max(values) - min(values) for values in losses)
            first = found[0]
            costs = first["share"], first.get("graph"), first.get("states")
            rows.append([way.title, *costs, *map(statistics.mean, losses), spread or None])
        headers = ["way", "weights trained, %", "graph, MB", "gradients and moments, MB"]
        return tables.table([*headers, "loss on Python", "on the plays", "range over seeds"], rows)

    def rates(self) -> str:
        """A row for each rate that was tried."""
        ways = [way for several in self.tried.values() for way in several]
        rows = [[way.title, f"{way.rate:g}", *self.losses(way)] for way in ways]
        return tables.table(["way", "rate", "validation: Python", "plays"], rows)

    def panels(self) -> list[pictures.Panel]:
        """What is learned and forgotten at each rate, and what each size learns."""
        by_rate = {ways[0].title: [(*self.losses(way), 0.0) for way in ways] for ways in self.tried.values()}
        by_size: dict[str, list[tuple[float, float, float]]] = {}
        for way in self.ways:
            if way.size and not way.start:
                point = self.of(way)["share"], self.losses(way, "test")[0], 0.0
                by_size.setdefault(f"{way.method}, {way.where}", []).append(point)
        titles = "each rate that was tried", "each size, at the best rate"
        loss = "loss on Python"
        return [
            pictures.Panel(titles[0], loss, "loss on the plays", by_rate, log_x=False),
            pictures.Panel(titles[1], "weights trained, %", loss, by_size),
        ]


def timing(base: dict[str, Any], texts: Any, plan: Plan, ways: list[Way], rounds: int) -> str:
    """ms an update of each way, and its ratio to full fine-tuning, in turns of one update."""
    updates = [
        trainer(
            adapted(base, way, 0, texts["python"]["training"]),
            texts["python"]["training"],
            plan,
            way.rate,
            plan.updates,
            0,
        )
        for way in ways
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 2):
        for update, found in zip(updates, seconds, strict=True):
            started = time.perf_counter()
            update()
            if number >= 2:  # the first ones load and allocate
                found.append(time.perf_counter() - started)
    ratios = [statistics.median(a / b for a, b in zip(found, seconds[0], strict=True)) for found in seconds]
    rows = [[w.title, 1e3 * statistics.median(s), r] for w, s, r in zip(ways, seconds, ratios, strict=True)]
    return tables.table(["way", "ms an update", "ratio to full"], rows)


def main() -> None:
    """Print the tables."""
    parser = tables.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/adapting"), help="of the base and the results")
    parser.add_argument("--quick", action="store_true", help="a few updates, to see that all runs")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the pictures there")
    parser.add_argument("--timing", action="store_true", help="times alone")
    options = parser.parse_args()
    mg.set_num_threads(1)
    plan = QUICK if options.quick else Plan()
    folder = options.folder / ("quick" if options.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    text = python_text()
    digest = hashlib.sha256(text).hexdigest()
    texts = {"python": parts(text), "plays": parts(PLAYS.read_bytes())}
    base = trained_base(texts, plan, folder / "base.safetensors")
    same = "the pinned one" if digest == SHA256 else "another than the pinned one, of another Python"
    print(f"{measuring.machine()}, 1 thread; text of Python: {len(text)} bytes, {same} ({digest[:16]})\n")
    if options.timing:
        ways = grid(plan, dict.fromkeys(RATES, 1e-3))[1:]
        print(timing(base, texts, plan, ways, 3 if options.quick else 40))
        return
    results = Results(folder / "results.json")
    study = Study(results, base, texts, plan)
    print(f"{study.table()}\n\n{study.rates()}")
    if options.plot:
        for panel, name in zip(study.panels(), ("rates", "sizes"), strict=True):
            pictures.draw(options.plot / f"adapting-{name}.svg", [panel])
    tables.write_json(options.json, results.found)


if __name__ == "__main__":
    main()
