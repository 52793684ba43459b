"""Two processes of one thread each beside one process of two threads, and beside torch's DDP over gloo.

    python benchmarks/distributed.py                      the four configs, about a minute and a half each
    python benchmarks/distributed.py --configs nano       one of them
    python benchmarks/distributed.py --exchanges          one all-reduce, by 2 and by 4 processes

All ways are alive at once and take turns, from the same weights on the same global batch; where their losses differ by
more than 1e-3, the run is void. Efficiency is the time of one process of one thread over twice the time of the way, the
median of the ratios of each round. Bytes and waiting are counted by the communicator; memory is the peak above what the
imports take, of the rank with most. The long config has a batch of two, one row a rank. Needs an MPI and torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for _folder in (HERE, HERE.parent):
    sys.path.insert(0, str(_folder))

import numpy as np
from harness import measuring, tables
from harness.configs import CONFIGS, MAX_NORM, Config, batches, initial_weights

WAYS = {  # processes, threads of each
    "one process, 1 thread": ("minigrad", 1, 1),
    "one process, 2 threads": ("minigrad", 1, 2),
    "2 ranks": ("minigrad", 2, 1),
    "2 ranks, overlap": ("minigrad+overlap", 2, 1),
    "2 ranks, sharded": ("minigrad+sharded", 2, 1),
    "torch, 2 threads": ("torch", 1, 2),
    "torch DDP, 2 ranks": ("torch", 2, 1),
}
TURN = 1.0  # seconds
Step = Callable[[np.ndarray, np.ndarray], float]


def sized(name: str) -> Config:
    """A config whose batch two ranks can share."""
    config = CONFIGS[name]
    return dataclasses.replace(config, batch_size=max(2, config.batch_size))


# ---- a rank ----------------------------------------------------------------------------------------------------------


def minigrad_rank(kind: str, config: Config) -> tuple[int, int, Callable[..., Any], Step, Callable[[], Any]]:
    """Rank, size, how to tell all ranks a number, the step, and what was sent and waited so far."""
    from engines.minigrad_lm import TrainingStep

    import minigrad as mg
    import optim

    ranks: Any = mg.distributed.init()
    trained = TrainingStep(config, initial_weights(config))
    model, sharded = trained.model, kind.endswith("sharded")
    optimizer: Any = optim.ShardedOptimizer(trained.optimizer) if sharded else trained.optimizer
    overlap = mg.distributed.Overlap(model.parameters()) if kind.endswith("overlap") else None

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = model.loss(tokens, targets)
        if overlap:
            overlap.backward(loss)
        else:
            loss.backward()
        if sharded:
            optimizer.step(max_norm=MAX_NORM)
        else:
            if not overlap and ranks.size > 1:
                mg.distributed.average_gradients(model.parameters())
            optim.clip_grad_norm(model.parameters(), MAX_NORM)
            optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    watch = getattr(ranks, "watch", None)
    return (
        ranks.rank,
        ranks.size,
        lambda numbers: ranks.all_gather(np.array([numbers], float)),
        step,
        lambda: (ranks.sent, watch.waited if watch else 0.0),
    )


def torch_rank(kind: str, config: Config) -> tuple[int, int, Callable[..., Any], Step, Callable[[], Any]]:
    """The same of torch."""
    import torch
    from engines import torch_lm
    from harness.configs import ADAMW
    from torch import distributed, nn

    torch.set_num_threads(int(os.environ["MINIGRAD_NUM_THREADS"]))
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model: Any = torch_lm.TransformerLM(config, initial_weights(config))
    if size > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: np.ndarray, targets: np.ndarray) -> float:
        loss = model(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def gather(numbers: Any) -> Any:
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(size)]
        if size == 1:
            return mine.numpy()[None]
        distributed.all_gather(found, mine)
        return torch.stack(found).numpy()

    return rank, size, gather, step, lambda: (0, 0.0)


def serve(kind: str, name: str) -> None:
    """Make steps when rank 0 is told how many on its standard input, and say how long they took."""
    config = sized(name)
    made = torch_rank if kind == "torch" else minigrad_rank
    rank, size, gather, step, counted = made(kind, config)
    measuring.trim()
    before = measuring.resident_mb()
    measuring.reset_peak()
    source = batches(config)
    rows = slice(rank * config.batch_size // size, (rank + 1) * config.batch_size // size)
    while steps := int(gather([float(sys.stdin.readline() or 0) if rank == 0 else 0.0])[0, 0]):
        seconds, losses, (sent, waited) = [], [], counted()
        for _ in range(steps):
            tokens, targets = next(source)
            start = time.perf_counter()
            losses.append(step(tokens[rows], targets[rows]))
            seconds.append(time.perf_counter() - start)
        now_sent, now_waited = counted()
        facts = gather(
            [(now_sent - sent) / steps, (now_waited - waited) / steps, measuring.peak_mb() - before, *losses]
        )
        if rank == 0:
            answer = {
                "ms": [1e3 * s for s in seconds],
                "sent_mb": facts[:, 0].max() / 2**20,
                "waited_ms": 1e3 * facts[:, 1].mean(),
                "memory_mb": facts[:, 2].max(),
                "losses": facts[:, 3:].mean(0).tolist(),
            }
            print(json.dumps(answer), flush=True)


# ---- all of them -----------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of one way, which make steps when told to."""

    def __init__(self, way: str, config: str, port: int) -> None:
        kind, self.size, threads = WAYS[way]
        command = [sys.executable, __file__, "--serve", kind, config]
        environment = {**os.environ, "MINIGRAD_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self.processes = []
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        if kind == "torch" and self.size > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.size)}
            for rank in range(self.size):
                self.processes.append(subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes))
        else:
            launcher = [launched(), "-n", str(self.size)] if self.size > 1 else []
            self.processes.append(subprocess.Popen([*launcher, *command], env=environment, **pipes))

    def ask(self, steps: int) -> dict[str, Any]:
        """Let them make so many steps."""
        first = self.processes[0]
        assert first.stdin and first.stdout
        print(steps, file=first.stdin, flush=True)
        answer: dict[str, Any] = json.loads(first.stdout.readline())
        return answer

    def close(self) -> None:
        """Let them end."""
        for process in self.processes:
            process.communicate("0\n" if process is self.processes[0] else None, timeout=60)


def launched() -> str:
    """The mpiexec beside this Python, else that on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def compare(config: str, rounds: int) -> dict[str, dict[str, Any]]:
    """What was measured of each way."""
    ranks = {way: Ranks(way, config, 29500 + i) for i, way in enumerate(WAYS)}
    first = {way: held.ask(2) for way, held in ranks.items()}
    expected = first["torch, 2 threads"]["losses"]
    for way, answer in first.items():
        if not np.allclose(answer["losses"], expected, rtol=1e-3):
            raise SystemExit(f"void: the losses of {way} are {answer['losses']}, those of torch {expected}")
    steps = {way: max(1, round(1e3 * TURN / min(answer["ms"]))) for way, answer in first.items()}
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for i in range(rounds):
        order = list(WAYS)
        for way in order[i % len(order) :] + order[: i % len(order)]:
            time.sleep(0.2)
            turns[way].append(ranks[way].ask(steps[way]))
    for held in ranks.values():
        held.close()
    found = {}
    alone = [statistics.median(turn["ms"]) for turn in turns["one process, 1 thread"]]
    for way, taken in turns.items():
        medians = [statistics.median(turn["ms"]) for turn in taken]
        ratios = [one / (2 * ms) for one, ms in zip(alone, medians, strict=True)]
        found[way] = {
            "ms": statistics.median(medians),
            "efficiency": statistics.median(ratios),
            "sent_mb": taken[-1]["sent_mb"],
            "waited_ms": statistics.median(turn["waited_ms"] for turn in taken),
            "memory_mb": max(turn["memory_mb"] for turn in taken),
        }
    return found


def exchange() -> None:
    """On each rank: the best of 15 all-reduces of float32 of a size, in each order."""
    import minigrad as mg

    ranks: Any = mg.distributed.init("mpi")
    for megabytes in (1, 25):
        array = np.ones(megabytes * 2**18, np.float32)
        best = {"carrier": np.inf, "ordered": np.inf}
        for _ in range(15):
            for reduce in best:
                mg.distributed.barrier()
                start = time.perf_counter()
                mg.distributed.all_reduce(array, reduce=reduce)
                best[reduce] = min(best[reduce], 1e3 * (time.perf_counter() - start))
        if ranks.rank == 0:
            print(json.dumps([f"{ranks.size}, {megabytes} MB", *best.values()]), flush=True)


def main() -> None:
    """Print the tables that are asked for."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    if sys.argv[1:2] == ["--exchange"]:
        return exchange()
    parser = tables.parser(__doc__)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: 5)")
    parser.add_argument("--exchanges", action="store_true", help="time single all-reduces instead")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.exchanges:
        rows = []
        for size in ("2", "4"):
            done = subprocess.run(
                [launched(), "-n", size, sys.executable, __file__, "--exchange"],
                capture_output=True,
                text=True,
                check=True,
            )
            rows += [json.loads(line) for line in done.stdout.splitlines()]
        print(tables.table(["ranks, float32", "carrier ms", "ordered ms"], rows))
        return tables.write_json(options.json, rows)
    for config in options.configs:
        results[config] = compare(config, options.rounds)
        headers = [config, "ms", "efficiency", "sent MB", "waited ms", "memory MB"]
        rows = [[way, *facts.values()] for way, facts in results[config].items()]
        print(tables.table(headers, rows), end="\n\n", flush=True)
    return tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
