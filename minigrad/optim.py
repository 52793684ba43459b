"""The optimizers, under a name that no other distribution has: ``import minigrad.optim as optim``."""

from typing import TYPE_CHECKING

from minigrad.aliases import package_of_ours

if TYPE_CHECKING:
    from optim import *
else:
    package_of_ours("optim")
