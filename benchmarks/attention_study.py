"""What models with other kinds of attention learn, at equal parameters and tokens: associative recall, and ten plays.

    python benchmarks/attention_study.py                             all that isn't in the results yet; an hour and more
    python benchmarks/attention_study.py --tasks recall --kinds full window
    python benchmarks/attention_study.py --trials 0 --plot docs      no training: the tables and pictures of the results
    python benchmarks/attention_study.py --quick                     two updates in each trial, to see that it runs

- recall: pairs of keys and values, then keys that ask (study/recall.py); accuracy, by the size of a head
- language: the trainers' ten plays in a vocabulary of 512 (study/language.py); validation loss, with a longer context,
  and on tokens that repeat a bigram

Every kind and size is trained once at each learning rate, from seed 0, and at the best one from two more seeds. A
trial takes one thread and is kept as soon as it is done: the program goes on where it ended, and may run several times
at once with other kinds. ``--write`` puts the tables into docs/attention.md.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before NumPy is imported
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import pictures, records, tables
from study import language, recall
from study.models import KINDS

import minigrad as mg

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "attention_study.jsonl"
PAGE = ROOT / "docs" / "attention.md"
SEEDS = (0, 1, 2)
Found = dict[str, Any]
Column = Callable[[Found], float]


class Task(NamedTuple):
    """A way to train and judge a model, a kind's sizes of a head, the rates to try, and what makes a result better."""

    trial: Callable[..., Found]
    sizes: Callable[[str], tuple[int, ...]]
    rates: tuple[float, ...]
    score: Callable[[Found], float]


TASKS = {
    "recall": Task(
        recall.trial, lambda kind: KINDS[kind].heads, (0.003, 0.006), lambda found: sum(found["accuracy"].values())
    ),
    "language": Task(language.trial, lambda kind: (language.HEAD,), (0.008, 0.016), lambda found: -found["loss"]),
}


class Trial(NamedTuple):
    """One training."""

    task: str
    kind: str
    head_dim: int
    rate: float
    seed: int


Results = dict[Trial, Found]


def read(path: Path) -> Results:
    """The results in a file."""
    kept = records.read(path)
    return {Trial(**{name: record[name] for name in Trial._fields}): record["found"] for record in kept}


def best_rate(results: Results, task: str, kind: str, head_dim: int) -> float | None:
    """The learning rate that was best with the first seed; None before all were tried."""
    of = {rate: results.get(Trial(task, kind, head_dim, rate, SEEDS[0])) for rate in TASKS[task].rates}
    scores = {rate: TASKS[task].score(found) for rate, found in of.items() if found is not None}
    return max(scores, key=lambda rate: scores[rate]) if len(scores) == len(of) else None


def trials(tasks: Sequence[str], kinds: Sequence[str], results: Results) -> Iterator[Trial]:
    """Those that are missing: all rates with the first seed, then the others with what ``results`` say is best."""
    for seed in SEEDS:
        for task in tasks:
            for kind in kinds:
                for size in TASKS[task].sizes(kind):
                    best = best_rate(results, task, kind, size)
                    rates = TASKS[task].rates if seed == SEEDS[0] else [best] if best else []
                    missing = [Trial(task, kind, size, rate, seed) for rate in rates]
                    yield from (trial for trial in missing if trial not in results)


def run(
    tasks: Sequence[str], kinds: Sequence[str], results: Results, path: Path | None, most: float, quick: bool
) -> None:
    """Train what is missing, ``most`` of it, and keep each result."""
    for number, trial in enumerate(trials(tasks, kinds, results)):
        if number >= most:
            break
        start = time.process_time()
        found = TASKS[trial.task].trial(KINDS[trial.kind], *trial[2:], quick)
        results[trial] = found = {**found, "seconds": round(time.process_time() - start, 1)}
        print(*trial, found, flush=True)
        if path is not None:
            records.add(path, {**trial._asdict(), "found": found})


# ---- tables ----------------------------------------------------------------------------------------------------------


def entry(name: str, *, key: int | None = None, times: float = 1.0) -> Column:
    """What a result has under a name, or in the mapping that is there under the key."""
    return lambda found: times * (found[name] if key is None else found[name][str(key)])


LOSSES = {language.LENGTH: entry("loss"), **{n: entry("longer", key=n) for n in language.LONGER}}
COLUMNS: dict[str, dict[str, Column]] = {
    "recall": {f"{n} pairs": entry("accuracy", key=n, times=100) for n in recall.PAIRS},
    "language": {
        **{f"T = {n}": column for n, column in LOSSES.items()},
        **{name: entry(name) for name in language.PARTS[1:]},
    },
}
DIGITS = {"recall": 1, "language": 3}


def of_seeds(results: Results, task: str, kind: str, head_dim: int) -> list[Found]:
    """What was found with the best rate, for each seed."""
    rate = best_rate(results, task, kind, head_dim)
    return [results[t] for seed in SEEDS if (t := Trial(task, kind, head_dim, rate or 0.0, seed)) in results]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the standard deviation; 0 of one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(results: Results, task: str) -> str:
    """A row for each kind and size: its state and rate, and mean and scatter of each column over the seeds."""
    rows, digits = [], DIGITS[task]
    for kind in KINDS:
        for head_dim in TASKS[task].sizes(kind):
            if of := of_seeds(results, task, kind, head_dim):
                named = [f"{of[0]['state']}", f"{of[0]['parameters']}", f"{best_rate(results, task, kind, head_dim)}"]
                spreads = [spread([column(found) for found in of]) for column in COLUMNS[task].values()]
                scatter = [f" ± {of_one:.{digits}f}" if len(of) > 1 else "" for _, of_one in spreads]
                figures = [f"{mean:.{digits}f}{more}" for (mean, _), more in zip(spreads, scatter, strict=True)]
                rows.append([kind, str(head_dim), *named, str(len(of)), *figures])
    return tables.table(["attention", "head", "state", "parameters", "rate", "seeds", *COLUMNS[task]], rows)


# ---- pictures --------------------------------------------------------------------------------------------------------


def over_state(results: Results, task: str, column: Column) -> dict[str, list[tuple[float, float, float]]]:
    """A curve for each kind: state, mean and scatter of a column, for each size."""
    return {
        kind: [
            (of[0]["state"], *spread([column(found) for found in of]))
            for head_dim in TASKS[task].sizes(kind)
            if (of := of_seeds(results, task, kind, head_dim))
        ]
        for kind in KINDS
    }


def over_context(results: Results) -> dict[str, list[tuple[float, float, float]]]:
    """A curve for each kind: the validation loss with contexts of other lengths."""
    found = {kind: of_seeds(results, "language", kind, language.HEAD) for kind in KINDS}
    return {
        kind: [(n, *spread([column(one) for one in of])) for n, column in LOSSES.items() if of]
        for kind, of in found.items()
    }


def panels(results: Results, task: str) -> list[pictures.Panel]:
    """Of recall: accuracy over the state. Of language: loss over the state, and over the context."""
    state, loss = "numbers in the state", "nats a token"
    if task == "recall":
        return [
            pictures.Panel(name, state, "right answers, %", over_state(results, task, column), limits=(0, 102))
            for name, column in COLUMNS[task].items()
        ]
    parts = {"all tokens": "loss", "tokens that repeat a rare bigram": "rare repeats"}
    made = [pictures.Panel(title, state, loss, over_state(results, task, entry(name))) for title, name in parts.items()]
    return [*made, pictures.Panel("longer contexts", "T", loss, over_context(results))]


def page(results: Results) -> str:
    """docs/attention.md with the tables of these results."""
    text = PAGE.read_text()
    for task in TASKS:
        text = tables.put(text, f"attention_study.py {task}", table(results, task))
    return text


def main() -> None:
    """Train what is missing, and show all that is there."""
    parser = tables.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--trials", type=int, metavar="N", help="train at most so often (default: until all is there)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"(default: {RESULTS.name})")
    parser.add_argument("--quick", action="store_true", help="two updates in each trial, and nothing kept")
    parser.add_argument("--write", action="store_true", help=f"put the tables into docs/{PAGE.name}")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the pictures there")
    options = parser.parse_args()
    mg.set_num_threads(1)
    most = math.inf if options.trials is None else options.trials
    results = {} if options.quick else read(options.results)
    run(options.tasks, options.kinds, results, None if options.quick else options.results, most, options.quick)
    for task in options.tasks:
        print(f"\n{table(results, task)}")
    if options.write:
        PAGE.write_text(page(results))
    for task in options.tasks if options.plot else []:
        pictures.draw(options.plot / f"attention-{task}.svg", panels(results, task))
    tables.write_json(options.json, [{**trial._asdict(), "found": found} for trial, found in results.items()])


if __name__ == "__main__":
    main()
