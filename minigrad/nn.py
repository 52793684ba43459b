"""The layers, under a name that no other distribution has: ``import minigrad.nn as nn``."""

from typing import TYPE_CHECKING

from minigrad.bundled_packages import bundled_package

if TYPE_CHECKING:
    from nn import *
else:
    bundled_package("nn")
