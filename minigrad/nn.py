"""The layers, under a name that no other distribution has: ``import minigrad.nn as nn``."""

from typing import TYPE_CHECKING

from minigrad.aliases import package_of_ours

if TYPE_CHECKING:
    from nn import *
else:
    package_of_ours("nn")
