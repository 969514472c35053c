"""Print the README for a package index, where relative links lead nowhere.

    python tools/index_readme.py https://host/owner/tgl/blob/v0.2.0 > README.index.md

Links to files of the repository become links below the address that is given; pictures, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+)(\))")


def resolved(text: str, base: str) -> str:
    """Return Markdown whose relative links are below ``base``."""
    return LINK.sub(lambda link: f"{link[1]}{base.rstrip('/')}/{link[2]}{link[3]}", text)


def main() -> None:
    if len(sys.argv) != 2 or not re.match(r"https?://", sys.argv[1]):
        raise SystemExit("usage: index_readme.py ADDRESS, under which the files of the release are found (https://...)")
    print(resolved((ROOT / "README.md").read_text(), sys.argv[1]), end="")


if __name__ == "__main__":
    main()
