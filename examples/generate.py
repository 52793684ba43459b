"""Continue a prompt with a model that train_lm.py or finetune.py has trained, or one of Hugging Face's transformers.

    python examples/generate.py --prompt "MACBETH." --num-samples 3
    python examples/generate.py --checkpoint runs/b/step_00000500 --temperature 0
    python examples/generate.py --checkpoint models/smollm --prompt "Once upon a time"
    python examples/generate.py --adapter runs/code/adapter --prompt "def "

A checkpoint is all it needs: the model's sizes and the tokenizer are in its meta.json. So is a folder of transformers
with config.json, safetensors and tokenizer.json.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text.models import Language, ModelFlags, open_asked
from text.tokenizers import Ids
from training.console import run_program
from training.flags import FlagErrors, complete, flag, integer, not_negative, number, parse, text

import nn
from minigrad.errors import printable

PROGRAM = "generate.py"
share = number("a number above 0 and at most 1", lambda p: 0 < p <= 1)


@dataclass(kw_only=True)
class Config(ModelFlags):
    """The flags of this program."""

    prompt: str | None = flag(None, text, "text to continue (default: what the run's own samples begin with)")
    max_new_tokens: int = flag(300, integer(0), "tokens in each sample")
    temperature: float = flag(0.8, not_negative, "how bold to choose: 0 takes the likeliest token each time")
    top_k: int = flag(0, integer(0), "sample among this many likeliest tokens; 0 is off")
    top_p: float = flag(1.0, share, "sample among the likeliest tokens that make up this probability; 1 is off")
    seed: int = flag(1337, integer(0), "seed of the random numbers that choose")
    num_samples: int = flag(1, integer(1), "how many samples to print")


def prompt_of(config: Config, language: Language) -> Ids:
    """The ids that each sample begins with."""
    if config.prompt:
        return language.encoded(config.prompt)
    if language.prompt is None:
        raise FlagErrors([f"--prompt: expected a text, got none, and {language.path} has no samples of its own"])
    return language.prompt


def generate(config: Config) -> int:
    """Print the samples."""
    language = open_asked(config)
    prompt = prompt_of(config, language)
    generator = np.random.default_rng(config.seed)
    first = len(language.start) if config.prompt else 0  # special tokens aren't shown
    for i in range(config.num_samples):
        tokens = nn.generate(
            language.model,
            prompt,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k or None,
            top_p=config.top_p,
            eos=language.stops or None,
            generator=generator,
        )
        last = len(tokens) - (len(tokens) > len(prompt) and int(tokens[-1]) in language.stops)
        sample = language.tokenizer.decode(tokens[first:last])
        print(("\n" + "-" * 40 + "\n" if i else "") + printable(sample), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: generate(complete(Config, *parse(Config, argv, PROGRAM, __doc__))))


if __name__ == "__main__":
    raise SystemExit(main())
