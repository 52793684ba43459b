"""Measure how well a language model predicts a text: loss, perplexity, bits per byte.

    python examples/evaluate.py                                     the newest run, on its own validation text
    python examples/evaluate.py --checkpoint runs/b --data book.txt --stride 16
    python examples/evaluate.py --checkpoint models/smollm --data book.txt --block-size 512     one of transformers

The text is read in windows as long as the model's context, ``--stride`` tokens apart. Each token after the first is
scored once, in the first window that reaches it; so a smaller stride gives it more context, and costs more windows.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text.corpus import SHAKESPEARE, read_corpus, read_tokens
from text.models import Language, ModelFlags, open_asked
from text.tokenizers import Ids, Tokenizer
from tqdm import tqdm
from training.checkpoint import understood
from training.console import run_program
from training.flags import FlagErrors, complete, flag, integer, parse, path, raise_any
from training.run import check_loss

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, printable

PROGRAM = "evaluate.py"


@dataclass(kw_only=True)
class Config(ModelFlags):
    """The flags of this program."""

    data: tuple[str, ...] | None = flag(
        None, path, "texts, or one .npy or .bin file of token ids (default: the run's validation text)", many=True
    )
    stride: int | None = flag(None, integer(1), "tokens between windows (default: the model's context, no overlap)")
    batch_size: int = flag(16, integer(1), "windows in a batch")


@dataclass(frozen=True)
class Score:
    """The loss of a text, summed over the tokens that were scored, and what to divide it by."""

    nats: float
    tokens: int
    bytes: int | None  # of the scored tokens; None where the tokenizer doesn't tell

    def __str__(self) -> str:
        """Loss in nats a token, perplexity exp(loss), and bits per byte.

        >>> print(Score(nats=2 * math.log(16), tokens=2, bytes=4))
        loss 2.7726 nats a token, perplexity 16.000, 2.0000 bits per byte
        """
        loss = self.nats / self.tokens
        per_byte = f"{self.nats / math.log(2) / self.bytes:.4f}" if self.bytes else "unknown"
        return f"loss {loss:.4f} nats a token, perplexity {math.exp(min(loss, 700)):.3f}, {per_byte} bits per byte"


def score(model: nn.TransformerLM, tokenizer: Tokenizer, tokens: Ids, stride: int, batch_size: int) -> Score:
    """Score every token but the first, each once, in windows of the model's context that are ``stride`` apart."""
    lengths = tokenizer.byte_lengths()
    total = 0.0
    with mg.no_grad(), tqdm(total=len(tokens) - 1, unit="token", disable=None, leave=False) as bar:
        for inputs, targets in nn.sliding_windows(tokens, model.context_length, stride, batch_size):
            total += model.loss(inputs, targets, reduction="sum").item()
            bar.update(int((targets >= 0).sum()))
    return Score(total, len(tokens) - 1, None if lengths is None else int(lengths[tokens[1:]].sum()))


def tokens_to_score(config: Config, language: Language) -> tuple[Ids, str]:
    """The token ids, and what they are in words."""
    checkpoint = language.checkpoint
    if config.data:
        tokens = read_tokens([Path(file) for file in config.data], language.tokenizer)
        what = ", ".join(config.data)
        if language.start and len(tokens):
            tokens = np.array([*language.start, *tokens])
    elif checkpoint is None:
        raise FlagErrors([f"--data: expected a text, got none, and {language.path} has no validation text of its own"])
    else:
        about = checkpoint.fact("corpus")
        with understood(checkpoint.path):
            files = [Path(file) for file in checkpoint.fact("config")["data"] or [SHAKESPEARE]]
        corpus = read_corpus(files, stored=about["tokenizer"])
        if corpus.fingerprint != about.get("fingerprint"):
            got = f"{', '.join(map(str, files))}, which changed since"
            raise ArgumentError("the text that the run began with", got, "name a text by --data")
        tokens, what = corpus.validation, "the run's validation text"
    if len(tokens) < 2:
        raise ArgumentError("a text of at least 2 tokens, one to begin with and one to score", str(len(tokens)))
    return tokens, what


def evaluate(config: Config) -> int:
    """Print the scores of a model on a text."""
    language = open_asked(config)
    window = language.model.context_length
    stride = config.stride or window
    if stride > window:
        raise_any([f"--stride: expected at most the model's context, {window} tokens, got {stride}"])
    tokens, what = tokens_to_score(config, language)
    result = score(language.model, language.tokenizer, tokens, stride, config.batch_size)
    check_loss(result.nats)
    what = printable(f"{language.path} on {what}")
    print(f"{what}: {result.tokens:,} tokens scored in windows of {window}, {stride} apart")
    print(result)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: evaluate(complete(Config, *parse(Config, argv, PROGRAM, __doc__))))


if __name__ == "__main__":
    raise SystemExit(main())
