"""The lecture: what is remembered of an operation, and how gradients come back through it."""
