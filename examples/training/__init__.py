"""What the trainers share: flags, the loop, checkpoints, the conduct of a run."""
