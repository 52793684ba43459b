"""A trained language model as a folder that Hugging Face's transformers loads: weights, settings and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from training.flags import raise_any

import nn
from minigrad.files import write_whole
from nn.pretrained import prepared
from text.tokenizers import Tokenizer

MODEL = ("meta.json", "config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = (".safetensors", ".bin", ".gguf")


class HfExport:
    """An export to a folder, which is made at once: a folder that can't be written is refused before the training.

    So is one that holds a model, unless ``overwrite``, and a checkpoint in any case.

    ``write(model)`` fills the folder: config.json and model.safetensors, and for tokenizers that transformers can have,
    tokenizer.json and tokenizer_config.json.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, overwrite: bool = False) -> None:
        held = sorted(path.name for path in folder.glob("*") if path.name in MODEL or path.suffix in WEIGHTS)
        if "meta.json" in held:
            raise_any([f"--export-hf: expected a folder of its own, got {folder}, which holds a checkpoint"])
        if held and not overwrite:
            got = f"{folder}, which holds {held[0]}; take another folder, or --overwrite with --resume"
            raise_any([f"--export-hf: expected a folder without a model, got {got}"])
        self.folder = prepared(folder)
        self.tokenizer = tokenizer.hf_json()

    def write(self, model: nn.TransformerLM) -> str:
        """Write the files; a line for people that says so."""
        nn.save_pretrained(model, self.folder)
        if self.tokenizer is None:
            for name in ("tokenizer.json", "tokenizer_config.json"):  # those of a model that was there before
                (self.folder / name).unlink(missing_ok=True)
            return f"exported to {self.folder}, without a tokenizer: the ids of a token file have none"
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.context_length,
            "clean_up_tokenization_spaces": False,
        }
        write_whole(self.folder / "tokenizer.json", self.tokenizer.encode())
        write_whole(self.folder / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
        return f"exported to {self.folder}, for AutoModelForCausalLM and AutoTokenizer"
