"""What the benchmarks share: the work, the processes that do it, how it is measured, and how it is shown."""
