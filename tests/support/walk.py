"""Something to train that needs no model, a walk of random steps, and a program that trains it, with a diary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from training.console import run_program
from training.flags import RunFlags, flag, integer
from training.run import Run, open_run


@dataclass(kw_only=True)
class Config(RunFlags):
    width: int = flag(3, integer(1), "of the walk")


class Walk:
    """Something to train: its state moves by a random step with every update."""

    def __init__(self, width: int) -> None:
        self.place, self.random = np.zeros(width), np.random.default_rng(1)

    def move(self) -> None:
        self.place = self.place + self.random.normal(size=self.place.shape)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.random.bit_generator.state = state["place"], state["random"]


class Trainer:
    """The loop of a trainer, with a diary; ``during`` is called within each update, ``losses`` are the evaluations'."""

    def __init__(self, losses: Callable[[int], float] = lambda step: 5.0 - step / 10) -> None:
        self.losses = losses
        self.during: Callable[[Run], None] = lambda run: None
        self.evaluated: list[int] = []
        self.updated: list[int] = []
        self.sampled: list[int] = []

    def __call__(self, *flags: str) -> int:
        argv = ["--no-progress", *flags]
        return run_program("walk.py", lambda: self.train(*open_run(Config, argv, "walk.py", "Walk.")))

    def train(self, config: Config, run: Run) -> int:
        walk = Walk(config.width)
        run.attach(walk=walk)
        with run.writing():
            while True:
                if run.evaluation_due:
                    self.evaluated.append(run.step)
                    run.evaluated(self.losses(run.step))
                run.report()
                if run.checkpoint_due:
                    run.save()
                if run.sample_due:
                    self.sampled.append(run.step)
                if run.finished:
                    return run.conclude()
                run.begin_update()
                walk.move()
                self.during(run)
                self.updated.append(run.step)
                run.end_update(loss=2.0, lr=0.1, grad_norm=1.0, tokens=10)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
