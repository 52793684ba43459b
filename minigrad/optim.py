"""The optimizers, under a name that no other distribution has: ``import minigrad.optim as optim``."""

from typing import TYPE_CHECKING

from minigrad.bundled_packages import bundled_package

if TYPE_CHECKING:
    from optim import *
else:
    bundled_package("optim")
