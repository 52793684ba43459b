"""Decoding: tokens a second that a model writes with its key/value cache, for one sequence and for several at once.

    python benchmarks/decode.py

``nn.generate`` with temperature 0, from random weights. Each position reads every weight once, whatever the size of the
batch; so for a batch of 1 the floor is the time to read them, measured as one matrix-vector product of as many bytes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from engines.minigrad_lm import build_model
from harness import measuring, tables
from harness.configs import CONFIGS, Config, batches, initial_weights

import nn

PROMPT = 16


def read_bytes(config: Config) -> int:
    """Bytes of the weights that one position multiplies with: all but the embeddings."""
    weights = initial_weights(config)
    return sum(w.nbytes for name, w in weights.items() if not name.startswith("token_embeddings"))


def vector_product_ms(nbytes: int) -> float:
    """Time of a float32 matrix-vector product whose matrix has about ``nbytes``."""
    columns = 1024
    matrix, vector = np.ones((nbytes // 4 // columns, columns), np.float32), np.ones(columns, np.float32)
    return 1e3 * measuring.median_seconds(lambda: matrix @ vector, seconds=0.3)


def measure(name: str, sizes: list[int], rounds: int, new_tokens: int) -> list[dict[str, Any]]:
    """For each batch: tokens a second, ms a position, and how many times that is the floor."""
    config = CONFIGS[name]
    model = build_model(config, initial_weights(config))
    text = np.concatenate(next(batches(config)), axis=1).reshape(-1)
    prompts = {size: np.resize(text, (size, PROMPT)) for size in sizes}
    new_tokens = min(new_tokens, config.context_length - PROMPT)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    floors = []
    for i in range(rounds + 1):
        floors.append(vector_product_ms(read_bytes(config)))
        for size, prompt in prompts.items():
            start = time.perf_counter()
            nn.generate(model, prompt, new_tokens, temperature=0)
            if i:
                times[size].append(1e3 * (time.perf_counter() - start) / new_tokens)
    floor = statistics.median(floors)
    found = []
    for size, measured in times.items():
        ms = statistics.median(measured)
        found.append({"config": name, "batch": size, "tokens_per_s": 1e3 * size / ms, "ms": ms, "floor_ms": floor})
    return found


def main() -> None:
    """Print the table."""
    parser = tables.parser(__doc__)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=["nano", "small", "cs336"], metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: 5)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens, at most the context (default: 200)")
    options = parser.parse_args()
    results = [r for name in options.configs for r in measure(name, options.batches, options.rounds, options.tokens)]
    headers = ["config", "batch", "tokens/s", "ms/position", "reading the weights ms", "floor = 1"]
    rows = [
        [r["config"], str(r["batch"]), f"{r['tokens_per_s']:.0f}", r["ms"], r["floor_ms"], r["ms"] / r["floor_ms"]]
        for r in results
    ]
    print(tables.table(headers, rows))
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
