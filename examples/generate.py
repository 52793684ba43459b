"""Continue a prompt with a model that train_lm.py has trained.

    python examples/generate.py --prompt "MACBETH." --num-samples 3
    python examples/generate.py --checkpoint runs/b/step_00000500 --temperature 0

A checkpoint is all it needs: the model's sizes and the tokenizer are in its meta.json.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text.tokenizers import Tokenizer, encode_prompt, tokenizer_from_json
from training.checkpoint import Checkpoint, open_newest, understood
from training.console import run_program
from training.flags import Flags, complete, flag, integer, not_negative, number, parse, path, text

import nn
from minigrad.errors import FileFormatError, printable

PROGRAM = "generate.py"
share = number("a number above 0 and at most 1", lambda p: 0 < p <= 1)


@dataclass(kw_only=True)
class Config(Flags):
    """The flags of this program."""

    checkpoint: str | None = flag(None, path, "run folder or step folder (default: the newest run in runs/)")
    prompt: str | None = flag(None, text, "text to continue (default: what the run's own samples begin with)")
    max_new_tokens: int = flag(300, integer(0), "tokens in each sample")
    temperature: float = flag(0.8, not_negative, "how bold to choose: 0 takes the likeliest token each time")
    top_k: int = flag(0, integer(0), "sample among this many likeliest tokens; 0 is off")
    top_p: float = flag(1.0, share, "sample among the likeliest tokens that make up this probability; 1 is off")
    seed: int = flag(1337, integer(0), "seed of the random numbers that choose")
    num_samples: int = flag(1, integer(1), "how many samples to print")


def load_model(checkpoint: Checkpoint, device: str) -> tuple[nn.TransformerLM, Tokenizer]:
    """The language model of a checkpoint, ready to generate, and its tokenizer."""
    model = checkpoint.empty_model(nn.TransformerLM, device)
    with understood(checkpoint.path):
        model.load_state_dict(checkpoint.load("model"))
        tokenizer = tokenizer_from_json(checkpoint.fact("corpus")["tokenizer"])
    if tokenizer.vocab_size != model.vocab_size:
        got = f"{tokenizer.vocab_size} and {model.vocab_size}"
        raise FileFormatError("a tokenizer and a model of as many tokens", got, str(checkpoint.path))
    return model.eval(), tokenizer


def generate(config: Config) -> int:
    """Print the samples."""
    checkpoint = open_newest(config.checkpoint, "train_lm.py")
    model, tokenizer = load_model(checkpoint, config.device)
    prompt = encode_prompt(tokenizer, config.prompt) if config.prompt else np.array(checkpoint.fact("prompt"))
    generator = np.random.default_rng(config.seed)
    for i in range(config.num_samples):
        tokens = nn.generate(
            model,
            prompt,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k or None,
            top_p=config.top_p,
            generator=generator,
        )
        print(("\n" + "-" * 40 + "\n" if i else "") + printable(tokenizer.decode(tokens)), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: generate(complete(Config, *parse(Config, argv, PROGRAM, __doc__))))


if __name__ == "__main__":
    raise SystemExit(main())
