"""Whether a change made training slower: an old and a new checkout of minigrad take turns at the same steps.

    git worktree add /tmp/old v0.1.0
    python benchmarks/alternate.py /tmp/old . --configs nano small cs336 long --pairs 30

Each checkout has a process of its own; both are alive, one works at a time. A pair is a turn of each, the new one first
in every other pair; a turn is a step that isn't counted and then steps for about ``--seconds``, at least one. The
figure is the median over the pairs of new time over old time, with its 95 % confidence interval. The losses of the
first steps must agree.

Both processes run the ``harness/`` and ``engines/`` beside this file, which use public names of ``minigrad``, ``nn``
and ``optim`` alone; so either checkout may have its modules in other places.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import FIRST_STEPS, PAUSE, TOLERANCE
from harness import measuring, tables
from harness.configs import CONFIGS, initial_weights
from harness.processes import Worker
from safetensors.numpy import save_file


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by order statistics; infinite for fewer than six values.

    It reaches from the k-th smallest to the k-th largest value. The median lies below the k-th smallest if fewer than k
    values lie below the median, each of which does so with probability 1/2: k is the largest for which that has a
    probability of at most 2.5 %. Nothing is assumed of the distribution, only that the values are independent.

    >>> median_interval([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])  # wrong if all six lie on one side: 2 of 64
    (1.0, 6.0)
    """
    n, ranked = len(values), sorted(values)
    k, tail = 0, 2.0**-n  # the chance that at most k values lie below the median
    while tail <= 0.025:
        k += 1
        tail += math.comb(n, k) / 2**n
    return (ranked[k - 1], ranked[n - k]) if k else (-math.inf, math.inf)


def start(name: str, engine: str, checkouts: Sequence[Path], directory: Path) -> list[Worker]:
    """A worker for each checkout, past its first steps; ends the program if their losses differ."""
    weights = directory / f"{name}.safetensors"
    save_file(initial_weights(CONFIGS[name]), weights)
    workers, losses = [], []
    for i, checkout in enumerate(checkouts):
        worker = Worker(engine, CONFIGS[name], weights, None, directory / f"{name}-{i}.log", checkout)
        workers.append(worker)
        worker.start(timeout=120)
        if (origin := Path(worker.ask("origin"))) != checkout:
            sys.exit(f"{checkout}: expected the packages of this checkout, got those of {origin}")
        losses.append([worker.ask("first_step")["loss"] for _ in range(FIRST_STEPS)])
    if any(abs(old - new) > TOLERANCE * abs(old) for old, new in zip(*losses, strict=True)):
        sys.exit(f"{name}: the run is void, since the losses differ\n{losses[0]}\n{losses[1]}")
    return workers


def alternate(name: str, engine: str, checkouts: Sequence[Path], pairs: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step in each turn of both checkouts, and what follows from them."""
    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as directory:
        workers = start(name, engine, checkouts, Path(directory))
        try:
            for i in range(pairs):
                for which in ((0, 1), (1, 0))[i % 2]:
                    time.sleep(PAUSE)
                    turn = workers[which].ask("turn", seconds=seconds)
                    times[which].append(1e3 * statistics.median(turn["seconds"]))
        finally:
            for worker in workers:
                worker.close()
    ratios = [new / old for old, new in zip(*times, strict=True)]
    low, high = median_interval(ratios)
    return {
        "old_ms": statistics.median(times[0]),
        "new_ms": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "times_ms": times,
    }


def main() -> None:
    """Print a row for each config as soon as it is measured, and the table last."""
    parser = tables.parser(__doc__)
    parser.add_argument("old", type=Path, help="the folder of the old checkout")
    parser.add_argument("new", type=Path, help="the folder of the new checkout")
    parser.add_argument(
        "--configs", "--config", nargs="+", choices=CONFIGS, default=["nano"], metavar="NAME", help=", ".join(CONFIGS)
    )
    parser.add_argument("--engine", default="minigrad", metavar="NAME", help="of engines/ (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of turns (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn (default: %(default)s)")
    options = parser.parse_args()
    checkouts = [options.old.resolve(), options.new.resolve()]
    print(f"{measuring.machine()}; {options.pairs} pairs, {options.engine}\n")
    others, results = measuring.OtherWork(), {}
    rows = []
    for name in options.configs:
        r = results[name] = alternate(name, options.engine, checkouts, options.pairs, options.seconds)
        low, high = r["interval"]
        rows.append([name, r["old_ms"], r["new_ms"], f"{r['ratio']:.4f}", f"{low:.4f} to {high:.4f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(tables.table(["config", "old ms", "new ms", "new / old", "95 % interval"], rows))
    if (share := others.share()) is not None:
        print(f"\nOther processes took {share:.0%} of the cores' time.")
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
