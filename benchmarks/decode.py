"""Decoding: tokens a second that a model writes with its key/value cache, for one sequence and for several at once.

    pip install -e '.[hf]'            # without transformers, minigrad is measured alone
    python benchmarks/decode.py

``nn.generate`` with temperature 0, from random weights, and in turn with it Hugging Face's transformers on the same
model, exported: its ``generate``, and bare loops over its forward pass, with both kinds of attention and of caches. All
must write the same tokens. Each position reads every weight once, whatever the size
of the batch; so for a batch of 1 the floor is the time to read them, measured as one matrix-vector product of as many
bytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from engines.minigrad_lm import build_model
from harness import measuring, tables
from harness.configs import CONFIGS, Config, batches, initial_weights

import minigrad as mg
import nn

try:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
except ImportError:
    transformers = None  # type: ignore[assignment]

PROMPT = 16
Writer = Callable[[np.ndarray, int], np.ndarray]  # a prompt (batch, T) and a number of tokens to the whole text


def read_bytes(config: Config) -> int:
    """Bytes of the weights that one position multiplies with: all but the embeddings."""
    weights = initial_weights(config)
    return sum(w.nbytes for name, w in weights.items() if not name.startswith("token_embeddings"))


def vector_product_ms(nbytes: int) -> float:
    """Time of a float32 matrix-vector product whose matrix has about ``nbytes``."""
    columns = 1024
    matrix, vector = np.ones((nbytes // 4 // columns, columns), np.float32), np.ones(columns, np.float32)
    return 1e3 * measuring.median_seconds(lambda: matrix @ vector, seconds=0.3)


def writers(model: nn.TransformerLM) -> dict[str, Writer]:
    """Who writes: minigrad, and transformers with the same weights and as many threads, where it is installed."""
    found: dict[str, Writer] = {"minigrad": lambda prompt, count: nn.generate(model, prompt, count, temperature=0)}
    if transformers is not None:
        torch.set_num_threads(mg.get_num_threads())
        with tempfile.TemporaryDirectory() as folder:
            nn.save_pretrained(model, folder)
            load = transformers.AutoModelForCausalLM.from_pretrained
            models = {kind: load(folder, attn_implementation=kind) for kind in ("sdpa", "eager")}
        found["transformers.generate"] = partial(generated, models["sdpa"])
        for kind, theirs in models.items():
            for cache in ("dynamic", "static"):
                found[f"a loop, {kind}, {cache} cache"] = partial(looped, theirs, cache)
    return found


def generated(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """A text by ``generate`` of transformers."""
    ids = torch.tensor(prompt)
    options = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return np.asarray(model.generate(ids, **options))


def looped(model: Any, kind: str, prompt: np.ndarray, count: int) -> np.ndarray:
    """A text by the forward pass of transformers alone, with a cache of this kind."""
    static = {"config": model.config, "max_cache_len": prompt.shape[1] + count}
    cache = transformers.StaticCache(**static) if kind == "static" else transformers.DynamicCache()
    new = ids = torch.tensor(prompt)
    with torch.inference_mode():
        for start in range(prompt.shape[1], prompt.shape[1] + count):
            place = torch.arange(start - new.shape[1], start)
            logits = model(new, past_key_values=cache, cache_position=place, logits_to_keep=1).logits
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
    return np.asarray(ids)


def check_same(found: dict[str, Writer], prompt: np.ndarray, count: int) -> None:
    """Stop where two write different tokens: then they don't do the same work."""
    texts = {name: write(prompt, count) for name, write in found.items()}
    for name, text in texts.items():
        if not np.array_equal(text, texts["minigrad"]):
            place = int((text != texts["minigrad"]).any(axis=0).argmax())
            raise SystemExit(f"void: {name} writes other tokens than minigrad from position {place} on")


def measure(name: str, sizes: list[int], rounds: int, new_tokens: int) -> list[dict[str, Any]]:
    """For each batch and writer: tokens a second, ms a position, and how many times that is the floor."""
    config = CONFIGS[name]
    model = build_model(config, initial_weights(config))
    text = np.concatenate(next(batches(config)), axis=1).reshape(-1)
    prompts = {size: np.resize(text, (size, PROMPT)) for size in sizes}
    new_tokens = min(new_tokens, config.context_length - PROMPT)
    found = writers(model)
    for prompt in prompts.values():
        check_same(found, prompt, new_tokens)
    times: dict[tuple[int, str], list[float]] = {(size, writer): [] for size in sizes for writer in found}
    floors = []
    for _ in range(rounds):
        floors.append(vector_product_ms(read_bytes(config)))
        for size, writer in times:
            start = time.perf_counter()
            found[writer](prompts[size], new_tokens)
            times[size, writer].append(1e3 * (time.perf_counter() - start) / new_tokens)
    floor = statistics.median(floors)
    rows = []
    for (size, writer), measured in times.items():
        ms = statistics.median(measured)
        row = {"config": name, "batch": size, "writer": writer, "tokens_per_s": 1e3 * size / ms, "ms": ms}
        rows.append({**row, "floor_ms": floor})
    return rows


def main() -> None:
    """Print the table."""
    parser = tables.parser(__doc__)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=["nano", "small", "cs336"], metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: 5)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens, at most the context (default: 200)")
    options = parser.parse_args()
    results = [r for name in options.configs for r in measure(name, options.batches, options.rounds, options.tokens)]
    headers = ["config", "batch", "", "tokens/s", "ms/position", "reading the weights ms", "floor = 1"]
    rows = [
        [
            r["config"],
            str(r["batch"]),
            r["writer"],
            f"{r['tokens_per_s']:.0f}",
            r["ms"],
            r["floor_ms"],
            r["ms"] / r["floor_ms"],
        ]
        for r in results
    ]
    print(tables.table(headers, rows))
    tables.write_json(options.json, results)


if __name__ == "__main__":
    main()
