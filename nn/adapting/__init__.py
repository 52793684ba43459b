"""Ways to adapt a trained model to other data, a file each, without a branch for them in the layers."""

from .lora import (
    delete_adapter,
    disable_adapters,
    lora,
    merge_adapters,
    set_adapter,
    unmerge_adapters,
)
from .peft import load_adapter, save_adapter

__all__ = [
    "delete_adapter",
    "disable_adapters",
    "load_adapter",
    "lora",
    "merge_adapters",
    "save_adapter",
    "set_adapter",
    "unmerge_adapters",
]
