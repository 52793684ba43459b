"""What a teacher of four layers gives a student of two: at equal tokens, and at equal time, on ten plays.

    python benchmarks/distillation.py                   all that isn't in the results yet; ten minutes of a core
    python benchmarks/distillation.py --trials 0 --write           no training: the table into docs/compression.md
    python benchmarks/distillation.py --quick                      two updates in each trial, to see that it runs

The teacher is trained once. Students are trained without it, and with it at several temperatures τ and shares m of the
distance in the loss, from seed 0; the best of these, and the students without, from two more seeds. Those "at equal
time" have no teacher either, but as many more updates as fit into the time of a student with one, by the time of the
process.
The loss is that of the validation text, every window of it. A trial is kept as soon as it is done.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before NumPy is imported
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import records, tables

import minigrad as mg
import nn
import optim

ROOT = Path(__file__).parents[1]
PLAYS = ROOT / "examples" / "data" / "shakespeare.txt"
RESULTS = Path(__file__).parent / "results" / "distillation.jsonl"
PAGE = ROOT / "docs" / "compression.md"
SEEDS = (0, 1, 2)
BLENDS = ((1.0, 0.5), (2.0, 0.5), (2.0, 0.9), (4.0, 0.5), (4.0, 0.9))  # τ and m that are tried
LENGTH, BATCH, RATE = 64, 12, 2e-3
UPDATES = {"teacher": 2000, "student": 800}
LAYERS = {"teacher": 4, "student": 2}
SIZES: dict[str, Any] = {"vocab_size": 256, "context_length": LENGTH, "d_model": 128, "num_heads": 4}
Found = dict[str, Any]


class Trial(NamedTuple):
    """One training; without a temperature there is no teacher."""

    who: str
    temperature: float | None
    mix: float | None
    seed: int
    updates: int


Results = dict[Trial, Found]


def text(quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the plays: nine tenths to train on, the last to validate on."""
    tokens = np.frombuffer(PLAYS.read_bytes(), np.uint8).astype(np.int64)
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:][: 4 * LENGTH if quick else None]


def batches(tokens: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random pieces of the text, and the tokens that follow each of theirs."""
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(tokens) - LENGTH, BATCH)
        blocks = tokens[starts[:, None] + np.arange(LENGTH + 1)]
        yield blocks[:, :-1], blocks[:, 1:]


def trained(trial: Trial, tokens: np.ndarray, teacher: nn.TransformerLM | None) -> nn.TransformerLM:
    """A model after its updates: AdamW, a warm-up of a tenth, a cosine down to a tenth of the rate, clipped at 1."""
    model = nn.TransformerLM(num_layers=LAYERS[trial.who], generator=trial.seed, **SIZES)
    optimizer = optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.99), weight_decay=0.1)
    drawn = batches(tokens, trial.seed)
    for update in range(1, trial.updates + 1):
        optimizer.param_groups[0]["lr"] = optim.cosine_schedule(
            update, RATE, RATE / 10, trial.updates // 10, trial.updates
        )
        if teacher is None:
            loss = model.loss(*next(drawn))
        else:
            assert trial.temperature is not None and trial.mix is not None
            loss = nn.distillation_loss(model, teacher, *next(drawn), trial.temperature, trial.mix)
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def validation(model: nn.TransformerLM, tokens: np.ndarray) -> float:
    """The mean loss over the validation text, in nats a byte."""
    total = count = 0
    with mg.no_grad():
        for inputs, targets in nn.sliding_windows(tokens, LENGTH, LENGTH, 64):
            total += model.loss(inputs, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
    return float(total / count)


# ---- which trials, in which order ------------------------------------------------------------------------------------


def of(results: Results, who: str, seed: int | None = None, taught: bool | None = None) -> list[tuple[Trial, Found]]:
    """The trials of a kind that are done."""
    return [
        (trial, found)
        for trial, found in results.items()
        if trial.who == who and seed in (None, trial.seed) and taught in (None, trial.mix is not None)
    ]


def best_blend(results: Results) -> tuple[float, float]:
    """Temperature and share of the best student of the first seed."""
    trial = min(of(results, "student", SEEDS[0], taught=True), key=lambda pair: pair[1]["loss"])[0]
    assert trial.temperature is not None and trial.mix is not None
    return trial.temperature, trial.mix


def planned(results: Results, updates: dict[str, int]) -> Iterator[Trial]:
    """All trials; what depends on results comes after those."""
    n = updates["student"]
    yield Trial("teacher", None, None, SEEDS[0], updates["teacher"])
    yield Trial("student", None, None, SEEDS[0], n)
    for temperature, mix in BLENDS:
        yield Trial("student", temperature, mix, SEEDS[0], n)
    for seed in SEEDS[1:]:
        yield Trial("student", None, None, seed, n)
        yield Trial("student", *best_blend(results), seed, n)
    for seed in SEEDS:
        yield Trial("student", None, None, seed, equal_time(results, n))


def equal_time(results: Results, updates: int) -> int:
    """Updates without a teacher in the time of those with one, in the mean over all trials of so many updates."""
    alone, taught = (
        statistics.fmean(
            found["seconds"] for trial, found in of(results, "student", taught=taught) if trial.updates == updates
        )
        for taught in (False, True)
    )
    return max(updates + 1, round(updates * taught / alone)) if alone else updates + 1


def run(results: Results, keep: Path | None, most: float, quick: bool, folder: Path) -> None:
    """Train what is missing, ``most`` of it, and keep each result; the teacher's weights stay in the folder."""
    training, held_out = text(quick)
    updates = dict.fromkeys(UPDATES, 2) if quick else UPDATES
    done, weights = 0, folder / "teacher.safetensors"
    for trial in planned(results, updates):
        missing = trial not in results or (trial.who == "teacher" and not weights.exists())
        if not missing or done >= most:
            if missing:
                return
            continue
        teacher = None
        if trial.mix is not None:
            teacher = nn.TransformerLM(num_layers=LAYERS["teacher"], **SIZES).eval()
            teacher.load_state_dict(mg.load(weights))
        start = time.process_time()
        model = trained(trial, training, teacher)
        seconds = time.process_time() - start
        if trial.who == "teacher":
            mg.save(weights, model.state_dict())
        results[trial] = found = {"loss": validation(model, held_out), "seconds": round(seconds, 1)}
        print(*trial, found, flush=True)
        if keep is not None:
            records.add(keep, {**trial._asdict(), "found": found})
        done += 1


# ---- the table -------------------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """A row for each kind: loss with its scatter over the seeds, the share of the gap that is closed, and the time."""
    teacher = of(results, "teacher")[0]
    usual = min(trial.updates for trial, _ in of(results, "student"))
    plain = [found["loss"] for trial, found in of(results, "student", taught=False) if trial.updates == usual]
    gap = statistics.fmean(plain) - teacher[1]["loss"]
    rows = []
    for name, kind in kinds(results, usual).items():
        losses = [found["loss"] for _, found in kind]
        scatter = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        closed = (statistics.fmean(plain) - statistics.fmean(losses)) / gap if gap else math.nan
        seconds = statistics.fmean(found["seconds"] for _, found in kind)
        share = f"{100 * closed:.0f} %" if kind[0][0].who == "student" else ""
        rows.append(
            [
                name,
                f"{kind[0][0].updates}",
                f"{len(kind)}",
                f"{statistics.fmean(losses):.3f}{scatter}",
                share,
                f"{seconds:.0f}",
            ]
        )
    return tables.table(["model", "updates", "seeds", "loss", "gap closed", "seconds"], rows)


def kinds(results: Results, usual: int) -> dict[str, list[tuple[Trial, Found]]]:
    """The trials of each row of the table."""
    plain = of(results, "student", taught=False)
    found = {
        "teacher, 4 layers": of(results, "teacher"),
        "student, 2 layers": [pair for pair in plain if pair[0].updates == usual],
        "the same at equal time": [pair for pair in plain if pair[0].updates != usual],
    }
    for temperature, mix in BLENDS:
        blend = [pair for pair in of(results, "student", taught=True) if pair[0][1:3] == (temperature, mix)]
        found[f"with the teacher, τ = {temperature:g}, m = {mix:g}"] = blend
    return {name: pairs for name, pairs in found.items() if pairs}


def main() -> None:
    """Train what is missing, and show all that is there."""
    parser = tables.parser(__doc__)
    parser.add_argument("--trials", type=int, metavar="N", help="train at most so often (default: until all is there)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"(default: {RESULTS.name})")
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="for the teacher's weights (default: a temporary one)"
    )
    parser.add_argument("--quick", action="store_true", help="two updates in each trial, and nothing kept")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    options = parser.parse_args()
    mg.set_num_threads(1)
    kept = [] if options.quick else records.read(options.results)
    results = {Trial(**{name: record[name] for name in Trial._fields}): record["found"] for record in kept}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        most = math.inf if options.trials is None else options.trials
        run(results, None if options.quick else options.results, most, options.quick, folder)
    found = table(results)
    print(f"\n{found}")
    if options.write:
        PAGE.write_text(tables.put(PAGE.read_text(), PAGE.name + " distillation", found))
    tables.write_json(options.json, [{**trial._asdict(), "found": found} for trial, found in results.items()])


if __name__ == "__main__":
    main()
