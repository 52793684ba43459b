"""Train a LLaMA-style language model on text.

    python examples/train_lm.py                                   the small recipe on the embedded plays, CPU
    python examples/train_lm.py --data book.txt --out-dir runs/b  your own text; the same command again goes on
    python examples/train_lm.py --help                            every flag

Read it from top to bottom: the configuration, the data, the model, the optimizer, the loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lm_text
import numpy as np
from lm_text import Corpus, RandomBlocks
from training_console import parameter_table, run_program
from training_flags import FlagErrors, RunFlags, flag, fraction, free_flag, not_negative, path, positive, text, whole
from training_run import Run, open_run, perplexity
from training_step import backward, non_finite

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError

PROGRAM = "train_lm.py"


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Config(RunFlags):
    """The flags of this program; the defaults are the small CPU recipe."""

    data: tuple[str, ...] | None = free_flag(
        None, path, "UTF-8 text files, or one .npy or .bin file of token ids (default: ten plays)", many=True
    )
    tokenizer: str = flag("byte", text, "byte, char, bpe (learned from the text) or a tokenizer.json")
    vocab_size: int | None = flag(None, whole(1), "tokens for bpe to learn (1024), or of a token file")

    block_size: int = flag(64, whole(1), "tokens the model sees at once")
    n_layer: int = flag(4, whole(1), "Transformer blocks")
    n_head: int = flag(4, whole(1), "attention heads")
    n_kv_head: int | None = flag(None, whole(1), "heads of keys and values (default: as many as --n-head)")
    n_embd: int = flag(128, whole(1), "width of the model")
    d_ff: int | None = flag(None, whole(1), "width inside the feed-forward layers (default: 8/3 of --n-embd)")
    dropout: float = flag(0.0, fraction, "share of activations dropped")
    tie_embeddings: bool = flag(False, None, "one matrix for the embeddings and the output")

    batch_size: int = flag(12, whole(1), "blocks in a micro-batch")
    gradient_accumulation_steps: int = flag(1, whole(1), "micro-batches in an update")
    learning_rate: float = flag(1e-3, positive, "highest learning rate, reached after the warm-up")
    min_lr: float = flag(1e-4, not_negative, "learning rate at the end of the decay, and from there on")
    warmup_iters: int = flag(100, whole(0), "updates of rising learning rate")
    lr_decay_iters: int | None = flag(None, whole(1), "update at which the decay ends (default: the first --max-iters)")
    beta1: float = flag(0.9, fraction, "AdamW's memory of the gradient")
    beta2: float = flag(0.99, fraction, "AdamW's memory of the squared gradient")
    weight_decay: float = flag(0.1, not_negative, "AdamW's decay of the matrices")
    grad_clip: float = flag(1.0, not_negative, "largest gradient norm; 0 is off")

    eval_iters: int = free_flag(40, whole(0), "batches in an evaluation; 0: the whole validation text")
    overfit_single_batch: bool = flag(False, None, "train on one batch again and again: a test of the model")
    sample_tokens: int = free_flag(300, whole(0), "tokens in a sample")
    prompt: str | None = free_flag(None, text, "beginning of the samples (default: a new line)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr_decay_iters = self.lr_decay_iters or self.max_iters or None  # kept when the run is continued
        if self.data is not None:
            self.data = tuple(str(Path(file).resolve()) for file in self.data)

    def check(self) -> list[str]:
        """What is wrong with the flags together."""
        problems = super().check()
        if self.n_embd % (2 * self.n_head):
            problems.append(f"--n-embd: expected an even width for each of {self.n_head} heads, got {self.n_embd}")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            problems.append(f"--n-kv-head: expected a divisor of --n-head {self.n_head}, got {self.n_kv_head}")
        if self.min_lr > self.learning_rate:
            problems.append(f"--min-lr: expected at most --learning-rate {self.learning_rate}, got {self.min_lr}")
        return problems


# ---- data ------------------------------------------------------------------------------------------------------------


def read_data(config: Config, run: Run) -> Corpus:
    """The corpus of the run; a continued run must find the one that it began with."""
    before = run.checkpoint.meta["corpus"] if run.checkpoint else {}
    files = [Path(file) for file in config.data or [lm_text.SHAKESPEARE]]
    corpus = lm_text.read_corpus(files, config.tokenizer, config.vocab_size, before.get("tokenizer"))
    lm_text.check_length(corpus, config.block_size)
    if before and before["fingerprint"] != corpus.fingerprint:
        raise FlagErrors([f"--data: {', '.join(map(str, files))} is not the text that the run began with"])
    run.about["corpus"] = {"tokenizer": corpus.tokenizer.as_json(), "fingerprint": corpus.fingerprint}
    return corpus


# ---- model and optimizer ---------------------------------------------------------------------------------------------


def build_model(config: Config, vocab_size: int, run: Run) -> nn.TransformerLM:
    """The model, with the arguments that make it again in the checkpoints."""
    arguments = {
        "vocab_size": vocab_size,
        "context_length": config.block_size,
        "d_model": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "num_kv_heads": config.n_kv_head,
        "d_ff": config.d_ff,
        "dropout": config.dropout,
        "tie_embeddings": config.tie_embeddings,
        "dtype": config.dtype,
    }
    run.about["model"] = arguments
    return nn.TransformerLM(**arguments, device=config.device)


def build_optimizer(config: Config, model: nn.TransformerLM) -> optim.AdamW:
    """AdamW, which decays the matrices alone."""
    groups = optim.decay_groups(model.named_parameters(), config.weight_decay)
    return optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def learning_rate(config: Config, update: int) -> float:
    """The rate of an update, the first being number 1."""
    total = config.lr_decay_iters or config.max_iters
    return optim.cosine_schedule(update, config.learning_rate, config.min_lr, config.warmup_iters, total)


# ---- one update, one evaluation, one sample --------------------------------------------------------------------------


def update(config: Config, model: nn.TransformerLM, optimizer: optim.AdamW, batches: RandomBlocks, run: Run) -> None:
    """One step of the optimizer on the gradient of all micro-batches together."""
    run.begin_update()
    micro_batches = [batches.draw() for _ in range(config.gradient_accumulation_steps)]
    counts = [targets.size for _, targets in micro_batches]
    loss = backward(model.loss, micro_batches, counts)
    norm = optim.clip_grad_norm(model.parameters(), config.grad_clip or math.inf)
    good = np.isfinite(loss) & np.isfinite(norm)
    if config.device == "cpu" and not good:  # a GPU leaves the step out, and is asked at the next line of the log
        what = "gradient norm" if np.isfinite(loss) else "loss"
        raise non_finite(what, model, lambda: [model(inputs) for inputs, _ in micro_batches])
    rate = learning_rate(config, run.step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step(where=good)
    optimizer.zero_grad()
    run.end_update(loss=loss, lr=rate, grad_norm=norm, tokens=sum(counts), good=good)


def evaluate(config: Config, model: nn.TransformerLM, corpus: Corpus, run: Run) -> float | None:
    """The mean loss over the validation tokens, each weighing the same; None where a signal cuts it short."""
    model.eval()
    total, count = 0.0, 0
    with mg.no_grad():
        for inputs, targets in lm_text.evaluation_batches(
            corpus.validation, config.batch_size, config.block_size, config.eval_iters
        ):
            if run.stop.received:
                return None
            total += model.loss(inputs, targets, reduction="sum").item()
            count += int((targets >= 0).sum())
    model.train()
    return total / count


def prompt_ids(config: Config, corpus: Corpus) -> lm_text.Ids:
    """The tokens that samples begin with: those of --prompt, else a new line, else the text's first token."""
    if config.prompt:
        return corpus.tokenizer.encode(config.prompt)
    try:
        ids = corpus.tokenizer.encode("\n")
    except ArgumentError:  # the characters of this text have no new line
        ids = corpus.training[:0]
    return ids if len(ids) else corpus.training[:1]


def sample(config: Config, model: nn.TransformerLM, corpus: Corpus, prompt: lm_text.Ids, seed: int) -> str:
    """What the model writes after the prompt, from random numbers of its own."""
    generator = np.random.default_rng(seed)
    return corpus.tokenizer.decode(nn.generate(model, prompt, config.sample_tokens, 0.8, generator=generator))


# ---- the loop --------------------------------------------------------------------------------------------------------


def train(config: Config, run: Run) -> int:
    """Everything in order; returns the exit status."""
    corpus = read_data(config, run)
    prompt = prompt_ids(config, corpus)
    mg.random.seed(config.seed)
    model = build_model(config, corpus.tokenizer.vocab_size, run)
    optimizer = build_optimizer(config, model)
    batches = RandomBlocks(
        corpus.training, config.batch_size, config.block_size, config.seed, config.overfit_single_batch
    )
    run.attach(model=model, optimizer=optimizer, batches=batches)
    print(introduction(config, model, corpus, run))
    if config.eval_only:
        loss = evaluate(config, model, corpus, run)
        print(f"validation loss {loss:.4f}, perplexity {perplexity(loss):.3f}")
        return 0

    watch = mg.detect_anomaly() if config.detect_anomaly else np.errstate(all="ignore")  # update() looks itself
    with run.writing(), watch:
        while True:
            if run.evaluation_due:
                run.evaluated(evaluate(config, model, corpus, run))
            run.report()
            if run.checkpoint_due:
                run.save()
            if run.sample_due:
                run.print(f"---- sample at step {run.step}\n{sample(config, model, corpus, prompt, run.step)}\n----")
            if run.finished:
                return run.conclude()
            update(config, model, optimizer, batches, run)


def introduction(config: Config, model: nn.TransformerLM, corpus: Corpus, run: Run) -> str:
    """What is about to happen: the data, the parameters, where the run stands."""
    kind = corpus.tokenizer.as_json()["kind"]
    tokens = config.batch_size * config.block_size * config.gradient_accumulation_steps
    return "\n".join(
        [
            f"{len(corpus.training):,} tokens to train on, {len(corpus.validation):,} to validate on ({kind}, "
            f"vocabulary {corpus.tokenizer.vocab_size:,})",
            parameter_table(model.named_parameters()),
            f"{tokens:,} tokens an iteration, {config.dtype} on {config.device}, {run.origin}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: train(*open_run(Config, argv, PROGRAM, __doc__.partition("\n")[0])))


if __name__ == "__main__":
    raise SystemExit(main())
