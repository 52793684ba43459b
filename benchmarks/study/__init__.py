"""What kinds of attention learn: the models, the tasks, and their training; attention_study.py runs them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the trainers' text
