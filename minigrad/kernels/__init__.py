"""Fused operations: one stem each, with the definition and the NumPy pair."""
