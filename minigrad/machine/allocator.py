"""Memory that a training step frees stays with the process for the next step.

NumPy takes its arrays from ``malloc``. By default glibc may map an array of 128 kB to 32 MB apart, and returns free
memory at the top of the heap to the system at once. Each step then begins on pages that the kernel must clear and map
anew: 35 000 pages and 0.34 s in a model of 6 layers and 4096 tokens. Here glibc is asked to keep them. Peak memory is
the same, but other processes don't get what is free between two steps.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LARGEST_IN_HEAP = 32 << 20  # bytes; glibc allows no more. What is larger is mapped by itself and unmapped when freed.
NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed; whether it was asked.

    Elsewhere, and where the user has set one of its variables (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``,
    ``MALLOC_TOP_PAD_``), nothing is done.

    >>> import os
    >>> os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"  # what the user has set stays
    >>> keep_freed_memory()
    False
    >>> del os.environ["MALLOC_TRIM_THRESHOLD_"]
    """
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"} & os.environ.keys()
    try:
        library = ctypes.CDLL(None)
        if chosen or not hasattr(library, "gnu_get_libc_version"):
            return False
        return bool(
            library.mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP) and library.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
        )
    except (OSError, TypeError):  # Windows has no library of the process itself
        return False
