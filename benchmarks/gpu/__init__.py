"""What ``gpu_check.py`` compares and measures on a GPU; what pytest can assert is in ``tests/gpu/``."""
