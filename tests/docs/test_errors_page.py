"""Examples in docs/errors.md are entries of the golden list; ``python tests/docs/test_errors_page.py`` copies them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
LIST = ROOT / "tests" / "engine" / "errors.txt"


def copied() -> str:
    """The page with the kind and the hint of each example as the list has them."""

    def row(found: re.Match[str]) -> str:
        entry = re.search(rf"^{re.escape(found[1])}\n    (\w+)\n(?:    .*\n)*?    Hint: (.*)\n", LIST.read_text(), re.M)
        assert entry, f"{found[1]} is not an entry of {LIST.name}"
        return f"| `{found[1]}` | {entry[1]} | {entry[2]} |"

    return re.sub(r"^\| `(.*?)` \| .* \|$", row, PAGE.read_text(), flags=re.MULTILINE)


def test_the_examples_are_those_of_the_list() -> None:
    assert PAGE.read_text() == copied(), "python tests/docs/test_errors_page.py copies them"


if __name__ == "__main__":
    PAGE.write_text(copied())
