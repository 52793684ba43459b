"""Train a LLaMA-style language model on text.

    python examples/train_lm.py                                   the small recipe on the embedded plays, CPU
    python examples/train_lm.py --data book.txt --out-dir runs/b  your own text; the same command again goes on
    mpiexec -n 4 python examples/train_lm.py                      four processes (docs/distributed.md)
    python examples/train_lm.py --help                            every flag

Read it from top to bottom: the configuration, the data, the model, evaluation and samples; then the loop, in
training/loop.py, where the optimizer and the updates are.
"""

from __future__ import annotations

import functools
import itertools
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text import corpus as texts
from text.corpus import Corpus, RandomBlocks
from text.hf_export import HfExport
from text.tokenizers import MADE, TOKENIZER, Ids, encode_prompt
from training import loop as training_loop
from training.console import run_program
from training.flags import (
    FlagErrors,
    TrainingFlags,
    changeable_flag,
    flag,
    fraction,
    integer,
    kept_path,
    not_negative,
    number,
    one_of,
    spelling,
    text,
    transient_flag,
)
from training.memory import check_memory
from training.run import Run, check_loss, open_run, perplexity

import minigrad as mg
import nn
from minigrad.errors import ArgumentError
from nn.feedforward import swiglu_width
from nn.transformer import RECOMPUTED

PROGRAM = "train_lm.py"


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TextFlags(TrainingFlags):
    """What a language model reads at once, and how it is watched while it learns."""

    block_size: int = flag(64, integer(1), "tokens the model sees at once, its context")
    eval_iters: int = changeable_flag(40, integer(0, 10**6), "batches in an evaluation; 0: the whole validation text")
    overfit_single_batch: bool = flag(False, None, "train on one batch again and again: a test of the model")
    sample_tokens: int = changeable_flag(300, integer(0, 10**6), "tokens in a sample")
    prompt: str | None = changeable_flag(None, text, "beginning of the samples (default: a new line)")
    export_hf: str | None = transient_flag(
        None, kept_path, "folder to write the final model to, for Hugging Face's transformers"
    )
    temperature: float = changeable_flag(0.8, not_negative, "of the samples: 0 takes the likeliest token each time")


@dataclass(kw_only=True)
class Config(TextFlags):
    """The flags of this program; the defaults are the small CPU recipe."""

    data: tuple[str, ...] | None = changeable_flag(
        None,
        kept_path,
        "UTF-8 text files, or one .npy or .bin file of token ids (default: ten of Shakespeare's plays)",
        many=True,
    )
    tokenizer: str | None = flag(
        None, TOKENIZER, "byte (the default), char, bpe (learned from the text) or a tokenizer.json"
    )
    vocab_size: int | None = flag(
        None, integer(1), "tokens that bpe learns (default: 1024), or how many ids a token file may hold"
    )

    n_layer: int = flag(4, integer(1), "Transformer blocks")
    n_head: int = flag(4, integer(1), "attention heads")
    n_kv_head: int | None = flag(None, integer(1), "heads of keys and values (default: as many as --n-head)")
    n_embd: int = flag(128, integer(1), "width of the model")
    d_ff: int | None = flag(None, integer(1), "width inside the feed-forward layers (default: 8/3 of --n-embd)")
    window: int | None = flag(None, integer(1), "tokens that a token sees, itself counted (default: all before it)")
    attention: tuple[str, ...] | None = flag(
        None,
        one_of("full", "window", "linear"),
        "kinds of attention, in turn over the blocks (default: window with --window, else full)",
        many=True,
    )
    feature_map: str | None = flag(None, one_of("elu+1", "taylor", "identity"), "of linear attention (default: elu+1)")
    feature_dim: int | None = flag(None, integer(1), "size of queries and keys in linear attention (taylor: 16, say)")
    decay: float | None = flag(
        None, number("a number above 0 and up to 1", lambda x: 0 < x <= 1), "of linear attention, a token (default: 1)"
    )
    dropout: float = flag(0.0, fraction, "share of activations dropped")
    tie_embeddings: bool = flag(False, None, "one matrix for the embeddings and the output")
    scale_embeddings: bool = flag(False, None, "multiply the embeddings by the root of the width")
    recompute: str = changeable_flag(
        "none", one_of(*RECOMPUTED), "less memory: compute these parts of a block again in the backward pass"
    )

    @property
    def files(self) -> list[Path]:
        """What --data names."""
        return [Path(file) for file in self.data or [str(texts.SHAKESPEARE)]]

    def check(self) -> list[str]:
        """What is wrong with the flags together."""
        problems = super().check()
        problems += texts.reading_problems(self.files, self.tokenizer, self.vocab_size)
        if self.n_embd % (2 * self.n_head):
            problems.append(
                f"--n-embd, --n-head: expected a width that is a multiple of twice the heads, got {self.n_embd} and "
                f"{self.n_head}"
            )
        kinds = self.attention or ("window" if self.window else "full",)
        if ("window" in kinds) != (self.window is not None):
            problems.append(f"--window: expected one where --attention has windows, got {self.window} and {kinds}")
        if len(kinds) > self.n_layer:
            problems.append(f"--attention: expected no more kinds than --n-layer {self.n_layer}, got {len(kinds)}")
        if "linear" not in kinds and (given := [spelling(name) for name in LINEAR if getattr(self, name) is not None]):
            problems.append(f"{', '.join(given)}: expected --attention linear with it, got {kinds}")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            problems.append(f"--n-kv-head: expected a divisor of --n-head {self.n_head}, got {self.n_kv_head}")
        return problems

    def check_new(self) -> list[str]:
        """Whether the tokenizer can be read; a continued run has it in its checkpoint."""
        missing = self.tokenizer and self.tokenizer not in MADE and not Path(self.tokenizer).is_file()
        return [f"--tokenizer: expected {TOKENIZER.expected}, got {self.tokenizer}: no such file"] if missing else []


# ---- data ------------------------------------------------------------------------------------------------------------


def read_data(config: Config, run: Run) -> Corpus:
    """The corpus of the run; a continued run must find the one that it began with."""
    before = run.fact("corpus")
    stored = before.get("tokenizer", {}) if run.checkpoint else None
    corpus = texts.read_corpus(config.files, config.tokenizer, config.vocab_size, stored)
    check_corpus(corpus, config, run, config.files)
    return corpus


def check_corpus(corpus: Corpus, config: TextFlags, run: Run, files: Sequence[Path]) -> None:
    """Refuse a corpus that is too short, or another than the run began with; else it is a fact of the run."""
    texts.check_length(corpus, config.block_size)
    before = run.fact("corpus")
    if before and before.get("fingerprint") != corpus.fingerprint:
        raise FlagErrors([f"--data: {', '.join(map(str, files))} is not the text that the run began with"])
    run.about["corpus"] = {"tokenizer": corpus.tokenizer.as_json(), "fingerprint": corpus.fingerprint}


# ---- the model -------------------------------------------------------------------------------------------------------


def build_model(config: Config, vocab_size: int, run: Run) -> nn.TransformerLM:
    """The model, with the arguments that make it again in the checkpoints."""
    arguments: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context_length": config.block_size,
        "d_model": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "num_kv_heads": config.n_kv_head,
        "attention": config.attention and [config.attention[i % len(config.attention)] for i in range(config.n_layer)],
        "window": config.window,
        "linear": {name: value for name in LINEAR if (value := getattr(config, name)) is not None} or None,
        "d_ff": config.d_ff,
        "dropout": config.dropout,
        "tie_embeddings": config.tie_embeddings,
        "scale_embeddings": config.scale_embeddings,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_layout": "interleaved",
        "dtype": config.weights_dtype,
    }
    before = run.fact("model")
    if other := sorted(name for name in before if before[name] != arguments.get(name)):
        got = f"another in {', '.join(other)}: {[before[name] for name in other]}"
        raise ArgumentError(
            "a checkpoint of the model that is trained", got, "the version that wrote it goes on with it"
        )
    run.about["model"] = arguments
    check_memory(config.device, *numbers_in_a_step(config, vocab_size), np.dtype(config.weights_dtype).itemsize, SIZES)
    kind = functools.partial(nn.TransformerLM, recompute=config.recompute)  # no fact of the model: it may change
    if run.checkpoint:
        model: nn.TransformerLM = run.checkpoint.empty_model(kind, config.device)
        return model
    return kind(**arguments, device=config.device)


LINEAR = ("feature_map", "feature_dim", "decay")  # flags that are options of linear attention
SIZES = "--batch-size, --block-size, --n-embd, --n-layer"


def numbers_in_a_step(config: Config, vocab_size: int) -> tuple[int, int]:
    """The counts of weights, and of activations that a micro-batch holds for the backward pass.

    In a block a token holds the inputs of attention and of the feed-forward layer, q, k, v, the output of attention,
    the inner gate and up, and two numbers of each head's softmax. Mixed precision holds the inputs of all products in
    half the bytes, the matrices too, and the sigmoid of the gate in full. --recompute block holds the inputs of the
    blocks, and one block as a whole.
    """
    width, inner = config.n_embd, config.d_ff or swiglu_width(config.n_embd)
    keys = width * (config.n_kv_head or config.n_head) // config.n_head
    matrices = config.n_layer * width * (2 * width + 2 * keys + 3 * inner)
    weights = matrices + vocab_size * width * (1 if config.tie_embeddings else 2)
    wide = {"half": inner, "ffn": 0}.get(config.recompute, 2 * inner)
    block, copies = 4 * width + 2 * keys + wide + 2 * config.n_head, 0
    if config.dtype != config.weights_dtype:
        block, copies = 2 * width + inner + (7 * width + 2 * keys + 3 * inner) // 2 + 2 * config.n_head, matrices // 2
    blocks = config.n_layer * width + block if config.recompute == "block" else config.n_layer * block
    return weights, config.batch_size * config.block_size * (blocks + 3 * width) + copies


# ---- evaluation and samples ------------------------------------------------------------------------------------------


def evaluate(
    config: TextFlags, model: nn.TransformerLM, corpus: Corpus, run: Run
) -> tuple[float, dict[str, float]] | None:
    """The mean loss over the validation tokens, which all weigh the same; None where a signal cuts it short."""
    model.eval()
    total, count = 0.0, 0
    windows = nn.sliding_windows(
        corpus.validation, config.block_size, config.block_size, config.batch_size, config.eval_iters
    )
    with mg.no_grad(), mg.autocast(config.dtype):
        for inputs, targets in itertools.islice(windows, mg.distributed.rank(), None, mg.distributed.size()):
            if run.stop.received:
                return None
            total += model.loss(inputs, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
    model.train()
    total, count = mg.distributed.all_reduce(np.array([total, count]))  # each process has every size-th batch
    return float(total / count), {}


def prompt_ids(config: TextFlags, corpus: Corpus) -> Ids:
    """The tokens that samples begin with: those of --prompt, else a new line, else the text's first token."""
    if config.prompt:
        return encode_prompt(corpus.tokenizer, config.prompt)
    try:
        ids = corpus.tokenizer.encode("\n")
    except ArgumentError:  # the characters of this text have no new line
        ids = corpus.training[:0]
    return ids if len(ids) else corpus.training[:1]


def sample(config: TextFlags, model: nn.TransformerLM, corpus: Corpus, prompt: Ids, run: Run) -> str:
    """What the model writes after the prompt, from random numbers of its own; a signal ends it."""
    generator = np.random.default_rng(run.step)
    stopped = lambda token: run.stop.received is not None
    return corpus.tokenizer.decode(
        nn.generate(model, prompt, config.sample_tokens, config.temperature, generator=generator, callback=stopped)
    )


# ---- the program -----------------------------------------------------------------------------------------------------


def train(config: Config, run: Run) -> int:
    """Everything in order; returns the exit status."""
    corpus = read_data(config, run)
    mg.random.seed(config.seed)
    model = build_model(config, corpus.tokenizer.vocab_size, run)
    export = export_of(config, run, corpus)
    status = learn(config, run, model, corpus)
    if export:
        print(export.write(model))
    return status


def export_of(config: TextFlags, run: Run, corpus: Corpus) -> HfExport | None:
    """The folder that --export-hf names, looked at before the training."""
    if not config.export_hf or mg.distributed.rank():
        return None
    ours = run.checkpoint is not None and run.checkpoint.meta["config"].get("export_hf") == config.export_hf
    return HfExport(Path(config.export_hf), corpus.tokenizer, config.overwrite or ours)


def learn(config: TextFlags, run: Run, model: nn.TransformerLM, corpus: Corpus, saved: Any = None) -> int:
    """Train the model on the corpus, or only evaluate it; ``saved`` is the part of it that checkpoints hold."""
    prompt = prompt_ids(config, corpus)
    run.about["prompt"] = [int(token) for token in prompt]
    task = training_loop.Task(
        model=model,
        batches=RandomBlocks(
            corpus.training, config.batch_size, config.block_size, config.seed, config.overfit_single_batch
        ),
        loss=functools.partial(model.loss, label_smoothing=config.label_smoothing),
        count=lambda inputs, targets: targets.size,
        evaluate=lambda: evaluate(config, model, corpus, run),
        sample=lambda step: sample(config, model, corpus, prompt, run),
        saved=saved,
    )
    print(about(config, corpus))
    optimizer, scaler = training_loop.prepare(config, run, task)
    if config.eval_only:
        loss, _ = evaluate(config, model, corpus, run) or (math.nan, {})
        check_loss(loss)
        print(f"validation loss {loss:.4f}, perplexity {perplexity(loss):.3f}")
        return 0
    return training_loop.train(config, run, task, optimizer, scaler)


def about(config: TextFlags, corpus: Corpus) -> str:
    """The data in a line, and what of it an iteration reads."""
    kind = corpus.tokenizer.as_json()["kind"]
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    return (
        f"{len(corpus.training):,} tokens to train on, {len(corpus.validation):,} to validate on ({kind}, vocabulary "
        f"{corpus.tokenizer.vocab_size:,}), {tokens:,} tokens an iteration"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: train(*open_run(Config, argv, PROGRAM, __doc__)))


if __name__ == "__main__":
    raise SystemExit(main())
