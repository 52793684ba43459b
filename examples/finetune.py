"""Train a language model on, on other text: all of its weights, or LoRA, adapters or a prefix beside them.

    python examples/finetune.py --init-from runs/plays --data code.py --method lora --out-dir runs/code
    python examples/finetune.py --init-from models/smollm --data book.txt --method prefix --block-size 256
    python examples/generate.py --checkpoint runs/code --prompt "def "      or: --adapter runs/code/adapter
    python examples/finetune.py --help                                      every flag

--init-from is a run of train_lm.py, or a folder of Hugging Face's transformers. Checkpoints hold what is learned, and
the same command goes on where a run was stopped. OUT/adapter is the adapter alone: LoRA and prefixes as PEFT has them.

Read it from top to bottom: the configuration, the base and what is trained beside it; the rest is train_lm.py's.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback

import numpy as np
from text import corpus as texts
from text.corpus import Corpus
from text.models import METHODS, Language, Learned, adapted, context_problems, fingerprint, open_language
from text.tokenizers import encode_prompt
from train_lm import TextFlags, check_corpus, exports_of, learn, prompt_ids
from training.console import run_program
from training.flags import (
    FlagErrors,
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
)
from training.run import Run, open_run

import minigrad as mg
import nn

PROGRAM = "finetune.py"
MOST = 256  # tokens of a block where --block-size doesn't say

# The flags of each method, the option of nn.lora, nn.adapters or nn.prefixes that each is, and its default.
OPTIONS: dict[str, dict[str, tuple[str, Any]]] = {
    "full": {},
    "lora": {
        "rank": ("rank", 8),
        "alpha": ("alpha", None),
        "targets": ("targets", None),
        "lora_dropout": ("dropout", 0.0),
        "rank_stabilized": ("rank_stabilized", False),
    },
    "adapters": {"adapter_size": ("size", 16), "targets": ("targets", None)},
    "prefix": {"prefix_length": ("length", 16), "targets": ("targets", None), "prefix_text": ("", None)},
}


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Config(TextFlags):
    """The flags of this program."""

    init_from: str | None = flag(
        None, kept_path, "run or step folder of train_lm.py, or folder of transformers, with the model to begin with"
    )
    data: tuple[str, ...] | None = changeable_flag(
        None,
        kept_path,
        "UTF-8 text files, or one .npy or .bin file of token ids, of the model's own tokenizer",
        many=True,
    )
    block_size: int = flag(0, integer(0), f"tokens the model sees at once; 0: its context, {MOST} at most")
    method: str = flag("lora", one_of(*OPTIONS), "what is trained: all weights, or so much beside them")
    targets: tuple[str, ...] | None = flag(
        None, text, "patterns of names of layers, such as q_proj or 'ffn.*' (default: those of the method)", many=True
    )
    rank: int | None = flag(None, integer(1), "of LoRA (default: 8)")
    alpha: float | None = flag(None, positive, "of LoRA, whose change is multiplied by alpha/rank (default: 2 rank)")
    rank_stabilized: bool = flag(False, None, "alpha/√rank instead, of LoRA")
    lora_dropout: float | None = flag(None, fraction, "share of LoRA's inputs dropped (default: 0)")
    adapter_size: int | None = flag(None, integer(1), "units of each adapter (default: 16)")
    prefix_length: int | None = flag(None, integer(1), "keys and values of a prefix (default: 16)")
    prefix_text: str | None = flag(None, text, "text whose keys and values a prefix begins with (default: random ones)")

    ewc: float | None = flag(
        None, not_negative, "λ of elastic weight consolidation: how many predictions of the old task it stands for"
    )
    fisher_labels: str = flag("model", one_of("model", "data"), "of --ewc, whose Fisher is of drawn labels or of given")
    l2_to_base: float | None = flag(None, not_negative, "λ of a term λ/2 (θ - θ*)², θ* being the weights of the base")
    replay: float = flag(
        0.0, number("a share from 0 to 1", lambda x: 0 <= x <= 1), "share of the training rows that are old examples"
    )
    replay_data: tuple[str, ...] | None = flag(
        None, kept_path, "old examples, as --data, for --replay and --ewc (default: what the base writes)", many=True
    )
    replay_size: int = flag(256, integer(1), "old examples that are kept, of all in --replay-data a fair sample")

    def check(self) -> list[str]:
        """What is wrong with the flags together."""
        problems = super().check()
        if holds := [spelling(name) for name in ("ewc", "l2_to_base") if getattr(self, name) is not None]:
            if len(holds) > 1:
                problems.append("--l2-to-base: expected none beside --ewc, which it is with a Fisher of 1")
            if self.method != "full":
                problems.append(f"{holds[0]}: expected --method full with it, got {self.method}, which keeps the base")
        if self.replay_data and not self.replay and self.ewc is None:
            problems.append("--replay-data: expected --replay or --ewc with it, got neither")
        names = {name for options in OPTIONS.values() for name in options}
        for name in sorted(name for name in names - OPTIONS[self.method].keys() if getattr(self, name)):
            fitting = " or ".join(method for method, options in OPTIONS.items() if name in options)
            problems.append(f"{spelling(name)}: expected --method {fitting} with it, got {self.method}")
        if self.method == "prefix" and self.prefix_text and self.prefix_length:
            problems.append("--prefix-length: expected none beside --prefix-text, whose tokens are counted")
        for name, theirs in (("export_hf", "transformers"), ("export_gguf", "llama.cpp")):
            if getattr(self, name) and self.method in ("adapters", "prefix"):
                got = f"{self.method}, which {theirs} hasn't; OUT/adapter is saved alone"
                problems.append(f"{spelling(name)}: expected --method full or lora, got {got}")
        files = [Path(file) for file in self.data or []]
        return problems + (texts.reading_problems(files, "byte", None) if files else [])

    def check_new(self) -> list[str]:
        """What a run needs that isn't continued."""
        missing = [name for name in ("init_from", "data") if not getattr(self, name)]
        problems = [f"{spelling(name)}: expected one, got none" for name in missing]
        if self.init_from and not Path(self.init_from).is_dir():
            problems.append(f"--init-from: expected a run's folder or one of transformers, got {self.init_from}")
        old = [Path(file) for file in self.replay_data or []]
        found = texts.reading_problems(old, "byte", None) if old else []
        return problems + [problem.replace("--data", "--replay-data") for problem in found]


def adapting(config: Config) -> dict[str, Any]:
    """The method and its options, as a checkpoint keeps them."""
    given = {ours: (getattr(config, name), default) for name, (ours, default) in OPTIONS[config.method].items() if ours}
    options = {ours: default if value is None else value for ours, (value, default) in given.items()}
    if config.method == "lora":
        options["alpha"] = options["alpha"] or 2.0 * options["rank"]
    options = {
        name: list(value) if name == "targets" else value for name, value in options.items() if value is not None
    }
    return {"method": config.method, **options}


# ---- the base, and what is trained -----------------------------------------------------------------------------------


def open_base(config: Config, run: Run) -> Language:
    """The model to begin with; a continued run must find the one that it began with."""
    assert config.init_from
    base = open_language(config.init_from, config.device)
    if base.is_adapted:
        hint = "export a LoRA merged by --export-hf, and begin with that"
        raise FlagErrors([f"--init-from: expected a model without adapters, got {base.path} with some; {hint}"])
    mark = fingerprint(base.model)
    if (before := run.fact("base")) and before.get("fingerprint") != mark:
        raise FlagErrors([f"--init-from: {config.init_from} is not the model that the run began with"])
    run.about["base"] = {"path": str(base.path.resolve()), "fingerprint": mark}
    config.block_size = config.block_size or min(base.model.context_length, MOST)
    raise_any(context_problems(config.block_size, base.model.context_length))
    base.model.to(dtype=config.weights_dtype)
    return base


def read_data(config: Config, run: Run, base: Language) -> Corpus:
    """The corpus of the run, in tokens of the base."""
    files = [Path(file) for file in config.data or []]
    corpus = texts.read_corpus(files, stored=base.tokenizer.as_json())
    check_corpus(corpus, config, run, files)
    return corpus


def prepared(config: Config, run: Run, base: Language) -> Any:
    """The base adapted by the method, and the part of it that checkpoints hold; None: all of it."""
    if config.method not in METHODS:
        run.about["model"] = {**base.arguments, "dtype": config.weights_dtype}
        return None
    facts, start = adapting(config), {}
    if config.prefix_text:
        start["tokens"] = encode_prompt(base.tokenizer, config.prefix_text)
        facts["length"] = len(start["tokens"])
    run.about["adapting"] = facts
    adapted(base.model, facts, **start)
    return Learned(base.model)


# ---- what is not to be forgotten -------------------------------------------------------------------------------------


def old_examples(config: Config, run: Run, base: Language, corpus: Corpus) -> nn.Reservoir:
    """Old examples: blocks of --replay-data, each with the same chance, or what the base writes itself.

    None where no flag asks for them, or the checkpoint of a continued run has them. Of what is written the last part is
    taken, so that examples begin anywhere in a text, as blocks do.
    """
    kept = nn.Reservoir(config.replay_size, generator=config.seed)
    if run.checkpoint or config.eval_only or not (config.replay or config.ewc is not None):
        return kept
    length = config.block_size
    if config.replay_data:
        tokens = texts.read_tokens([Path(file) for file in config.replay_data], base.tokenizer)
        for start in range(0, len(tokens) - length, length):
            block = tokens[start : start + length + 1].astype(np.int64)[None]
            kept.add(block[:, :-1], block[:, 1:])
        if not kept.seen:
            raise FlagErrors([f"--replay-data: expected more than {length} tokens, a block, got {len(tokens)}"])
        return kept
    prompt, rng = [*base.start, *prompt_ids(config, corpus)], np.random.default_rng(config.seed)
    for first in range(0, config.replay_size, config.batch_size):
        prompts = [prompt] * min(config.batch_size, config.replay_size - first)
        rows = nn.generate(base.model, prompts, 2 * length, generator=rng)[:, -length - 1 :]
        kept.add(rows[:, :-1], rows[:, 1:])
    return kept


def term_of(config: Config, model: Any, old: nn.Reservoir) -> nn.EWC | None:
    """The term that holds the weights near the base's; that of a continued run is in its checkpoint."""
    if config.ewc is None:
        return None if config.l2_to_base is None else nn.EWC(model, config.l2_to_base)
    draw = np.random.default_rng(config.seed)
    importance = nn.fisher(model, [old.examples], config.fisher_labels, generator=draw) if old.seen else None
    return nn.EWC(model, config.ewc, importance)


# ---- the program -----------------------------------------------------------------------------------------------------


def finetune(config: Config, run: Run) -> int:
    """Everything in order; returns the exit status."""
    base = open_base(config, run)
    corpus = read_data(config, run, base)
    old = old_examples(config, run, base, corpus)
    term = term_of(config, base.model, old)
    mg.random.seed(config.seed)
    saved = prepared(config, run, base)
    exports = exports_of(config, run, corpus)
    model = base.model.train()
    replayed = functools.partial(nn.Replay, reservoir=old, share=config.replay) if config.replay else None
    status = learn(config, run, model, corpus, saved, term, replayed)
    if saved is not None and not config.eval_only and mg.distributed.rank() == 0:
        assert run.folder
        nn.save_adapter(model, run.folder / "adapter", base_model=run.about["base"]["path"])
        print(f"saved {run.folder / 'adapter'}, for --adapter of generate.py and evaluate.py")
    if exports and saved is not None:
        nn.merge_adapters(model)
    for export in exports:
        print(export.write(model))
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(PROGRAM, lambda: finetune(*open_run(Config, argv, PROGRAM, __doc__)))


if __name__ == "__main__":
    raise SystemExit(main())
