"""A training step of small convolutional networks, beside torch's, on one thread and on two.

    python benchmarks/cnn.py [--rounds 15] [--threads 1 2]

Both start from the same weights and see the same images; the losses of the first steps must agree. They take turns in
one process: a turn is a step that isn't counted and then ten; who begins changes from round to round, and a pause lets
the threads of the other fall asleep. Given are the fastest step of each in milliseconds, the ratio of those, and the
median over the rounds of the ratio of the turns' fastest steps. On one thread the times are of the processor, which
other work on the machine changes less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import tables

import minigrad as mg
import nn
import optim

STEPS, PAUSE, FIRST_STEPS, TOLERANCE = 10, 0.1, 5, 1e-3


class Config(NamedTuple):
    """Square images, and the channels after each block of convolution, batch norm, ReLU and pooling."""

    side: int
    colours: int
    channels: tuple[int, ...]
    batch: int
    classes: int = 10


CONFIGS = {
    "digits": Config(8, 1, (16, 32), 64),  # examples/digits.py
    "mnist": Config(28, 1, (16, 32), 64),
    "cifar": Config(32, 3, (32, 64, 128), 32),
}


def layers(config: Config, library: Any) -> Any:
    """The network with the modules of nn or of torch.nn, which have the same names."""
    blocks: list[Any] = []
    before, side = config.colours, config.side
    for channels in config.channels:
        blocks += [library.Conv2d(before, channels, 3, padding=1), library.BatchNorm2d(channels)]
        blocks += [library.ReLU(), library.MaxPool2d(2)]
        before, side = channels, side // 2
    return library.Sequential(*blocks, library.Flatten(), library.Linear(before * side * side, config.classes))


def steps_of(config: Config) -> dict[str, Callable[[], float]]:
    """A training step of each library, which gives its loss."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((config.batch, config.colours, config.side, config.side), np.float32)
    y = draw.integers(0, config.classes, config.batch)
    mg.random.seed(0)
    ours, theirs = layers(config, nn), layers(config, torch.nn)
    theirs.load_state_dict({name: torch.tensor(array) for name, array in ours.state_dict().items()})
    adam, torchs = optim.AdamW(ours.parameters(), lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    images, targets = torch.from_numpy(x), torch.from_numpy(y)

    def minigrad_step() -> float:
        loss = nn.functional.cross_entropy(ours(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        return float(loss)

    def torch_step() -> float:
        loss = torch.nn.functional.cross_entropy(theirs(images), targets)
        torchs.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torchs.step()
        return loss.item()

    return {"minigrad": minigrad_step, "torch": torch_step}


def fastest(step: Callable[[], float], clock: Callable[[], float]) -> float:
    """Milliseconds of the fastest step of a turn."""
    time.sleep(PAUSE)
    step()
    times = []
    for _ in range(STEPS):
        start = clock()
        step()
        times.append(1e3 * (clock() - start))
    return min(times)


def compare(config: Config, threads: int, rounds: int) -> dict[str, float]:
    """The fastest step of each library in milliseconds, and how many times torch's ours takes."""
    mg.set_num_threads(threads)
    torch.set_num_threads(threads)
    steps = steps_of(config)
    for _ in range(FIRST_STEPS):
        ours, theirs = (step() for step in steps.values())
        if abs(ours - theirs) > TOLERANCE * abs(theirs):
            raise SystemExit(f"the run is void, since the losses differ: {ours} and torch's {theirs}")
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name in sorted(steps, reverse=bool(i % 2)):
            turns[name].append(fastest(steps[name], time.process_time if threads == 1 else time.perf_counter))
    pairs = zip(turns["minigrad"], turns["torch"], strict=True)
    found = {name: min(times) for name, times in turns.items()}
    ratio = found["minigrad"] / found["torch"]
    return found | {"ratio": ratio, "median": statistics.median(ours / theirs for ours, theirs in pairs)}


def main() -> None:
    """Print a row for each network and number of threads."""
    parser = tables.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each library (default: 15)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    options = parser.parse_args()
    measured = [
        {"config": name, "threads": threads, **compare(CONFIGS[name], threads, options.rounds)}
        for name in options.configs
        for threads in options.threads
    ]
    headers = ["network", "threads", "minigrad ms", "torch ms", "ratio of the fastest", "median ratio of a turn"]
    rows = [
        [m["config"], str(m["threads"]), m["minigrad"], m["torch"], f"{m['ratio']:.2f}", f"{m['median']:.2f}"]
        for m in measured
    ]
    print(tables.table(headers, rows))
    tables.write_json(options.json, {"cnn": measured})


if __name__ == "__main__":
    main()
