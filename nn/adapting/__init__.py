"""Ways to adapt a trained model to other data, a file each, without a branch for them in the layers."""

from .adapted import delete_adapter, disable_adapters, set_adapter
from .adapters import adapters
from .ewc import EWC, fisher
from .files import load_adapter, save_adapter
from .lora import lora, merge_adapters, unmerge_adapters
from .prefixes import prefixes
from .replay import Replay, Reservoir

__all__ = [
    "EWC",
    "Replay",
    "Reservoir",
    "adapters",
    "delete_adapter",
    "disable_adapters",
    "fisher",
    "load_adapter",
    "lora",
    "merge_adapters",
    "prefixes",
    "save_adapter",
    "set_adapter",
    "unmerge_adapters",
]
