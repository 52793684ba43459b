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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text import corpus as texts
from text.corpus import Corpus, RandomBlocks
from text.gguf_export import GgufExport
from text.hf_export import HfExport
from text.models import Language, context_problems, fingerprint, open_language
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
    positive,
    raise_any,
    spelling,
    text,
    transient_flag,
)
from training.memory import check_memory
from training.run import Run, check_loss, open_run, perplexity

import minigrad as mg
import nn
from minigrad.errors import ArgumentError
from nn.compressing.gguf import TYPES as GGUF_TYPES
from nn.feedforward import swiglu_width
from nn.transformer import RECOMPUTED

PROGRAM = "train_lm.py"
Loss = Callable[..., mg.Tensor]


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TextFlags(TrainingFlags):
    """What a language model reads at once, and how it is watched while it learns."""

    block_size: int = flag(64, integer(1), "tokens the model sees at once, its context")
    teacher: str | None = flag(
        None, kept_path, "run or folder of transformers whose model this one learns from as well"
    )
    teacher_share: float = flag(0.5, fraction, "share of the loss that is the distance from --teacher")
    teacher_temperature: float = flag(2.0, positive, "what the logits of both are divided by for that distance")

    eval_iters: int = changeable_flag(40, integer(0, 10**6), "batches in an evaluation; 0: the whole validation text")
    overfit_single_batch: bool = flag(False, None, "train on one batch again and again: a test of the model")
    sample_tokens: int = changeable_flag(300, integer(0, 10**6), "tokens in a sample")
    prompt: str | None = changeable_flag(None, text, "beginning of the samples (default: a new line)")
    export_hf: str | None = transient_flag(
        None, kept_path, "folder to write the final model to, for Hugging Face's transformers"
    )
    export_gguf: str | None = transient_flag(None, kept_path, "GGUF file to write the final model to, for llama.cpp")
    gguf_weights: str = transient_flag("float16", one_of(*GGUF_TYPES), "numbers of the matrices in it")
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
        if self.teacher and self.label_smoothing:
            problems.append(f"--label-smoothing: expected 0 with --teacher, got {self.label_smoothing:g}")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            problems.append(f"--n-kv-head: expected a divisor of --n-head {self.n_head}, got {self.n_kv_head}")
        return problems

    def check_new(self) -> list[str]:
        """Whether the tokenizer can be read; a continued run has it in its checkpoint."""
        missing = self.tokenizer and self.tokenizer not in MADE and not Path(self.tokenizer).is_file()
        return [f"--tokenizer: expected {TOKENIZER.expected}, got {self.tokenizer}: no such file"] if missing else []


# ---- data ------------------------------------------------------------------------------------------------------------


def read_data(config: Config, run: Run, teacher: Language | None) -> Corpus:
    """The corpus of the run, in the tokens of a teacher; a continued run must find the one that it began with."""
    before = run.fact("corpus")
    stored = before.get("tokenizer", {}) if run.checkpoint else None
    if teacher and stored is None and config.tokenizer is None:
        stored = teacher.tokenizer.as_json()
    corpus = texts.read_corpus(config.files, config.tokenizer, config.vocab_size, stored)
    if teacher and teacher.tokenizer.as_json() != corpus.tokenizer.as_json():
        got = f"another than that of {config.teacher}; leave --tokenizer out to have the teacher's"
        raise FlagErrors([f"--tokenizer: expected that of --teacher, got {got}"])
    check_corpus(corpus, config, run, config.files)
    return corpus


def check_corpus(corpus: Corpus, config: TextFlags, run: Run, files: Sequence[Path]) -> None:
    """Refuse a corpus that is too short, or another than the run began with; else it is a fact of the run."""
    texts.check_length(corpus, config.block_size)
    before = run.fact("corpus")
    if before and before.get("fingerprint") != corpus.fingerprint:
        raise FlagErrors([f"--data: {', '.join(map(str, files))} is not the text that the run began with"])
    run.about["corpus"] = {"tokenizer": corpus.tokenizer.as_json(), "fingerprint": corpus.fingerprint}


def open_teacher(config: Config, run: Run) -> Language | None:
    """The model of --teacher; a continued run must find the one that it began with."""
    if config.teacher is None:
        return None
    teacher = open_language(config.teacher, config.device)
    raise_any(context_problems(config.block_size, teacher.model.context_length))
    mark = fingerprint(teacher.model)
    if (before := run.fact("teacher")) and before.get("fingerprint") != mark:
        raise FlagErrors([f"--teacher: {config.teacher} is not the model that the run began with"])
    run.about["teacher"] = {"path": str(teacher.path.resolve()), "fingerprint": mark}
    return teacher


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
    teacher = open_teacher(config, run)
    corpus = read_data(config, run, teacher)
    mg.random.seed(config.seed)
    model = build_model(config, corpus.tokenizer.vocab_size, run)
    exports = exports_of(config, run, corpus)
    status = learn(config, run, model, corpus, loss=loss_of(config, model, teacher))
    for export in exports:
        print(export.write(model))
    return status


def exports_of(config: TextFlags, run: Run, corpus: Corpus) -> list[HfExport | GgufExport]:
    """What --export-hf and --export-gguf name, looked at before the training."""
    if mg.distributed.rank():
        return []
    found: list[HfExport | GgufExport] = []
    before = {} if run.checkpoint is None else run.checkpoint.meta["config"]
    if config.export_hf:
        ours = config.overwrite or before.get("export_hf") == config.export_hf
        found.append(HfExport(Path(config.export_hf), corpus.tokenizer, ours))
    if config.export_gguf:
        ours = config.overwrite or before.get("export_gguf") == config.export_gguf
        found.append(GgufExport(Path(config.export_gguf), config.gguf_weights, corpus.tokenizer, ours))
    return found


def loss_of(config: Config, model: nn.TransformerLM, teacher: Language | None) -> Loss | None:
    """With a teacher, cross-entropy and the distance from what it thinks of the next token; else what is usual."""
    if teacher is None:
        return None
    options: dict[str, Any] = {"temperature": config.teacher_temperature, "mix": config.teacher_share}
    return functools.partial(nn.distillation_loss, model, teacher.model, **options)


def learn(
    config: TextFlags,
    run: Run,
    model: nn.TransformerLM,
    corpus: Corpus,
    saved: Any = None,
    term: nn.EWC | None = None,
    replayed: Callable[[Any], Any] | None = None,
    loss: Loss | None = None,
) -> int:
    """Train the model on the corpus, or only evaluate it; ``saved`` is the part of it that checkpoints hold.

    ``loss`` is of inputs and targets, by default cross-entropy; ``term`` is added to it, and what ``replayed`` makes of
    the batches is what is trained on.
    """
    plain = loss or functools.partial(model.loss, label_smoothing=config.label_smoothing)
    prompt = prompt_ids(config, corpus)
    run.about["prompt"] = [int(token) for token in prompt]
    batches = RandomBlocks(
        corpus.training, config.batch_size, config.block_size, config.seed, config.overfit_single_batch
    )
    task = training_loop.Task(
        model=model,
        batches=replayed(batches) if replayed else batches,
        loss=plain if term is None else lambda inputs, targets: plain(inputs, targets) + term(),
        count=lambda inputs, targets: targets.size,
        evaluate=lambda: evaluate(config, model, corpus, run),
        sample=lambda step: sample(config, model, corpus, prompt, run),
        saved=saved,
        parts={} if term is None else {"ewc": term},
    )
    print(about(config, corpus))
    optimizer, scaler = training_loop.prepare(config, run, task)
    if config.eval_only:
        found, _ = evaluate(config, model, corpus, run) or (math.nan, {})
        check_loss(found)
        print(f"validation loss {found:.4f}, perplexity {perplexity(found):.3f}")
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
