"""Render the tables of README and docs from the result files, and draw the plots.

    python benchmarks/render.py [--check]

A page names a result file and a table between two comments; see ``harness/pages.py``. With ``--check`` nothing is
written, and pages that differ from what would be written are an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from harness import pages


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    check = arguments(argv).check
    texts = {page: (page.read_text(), pages.render(page)) for page in pages.pages()}
    outdated = [page for page, (before, after) in texts.items() if before != after]
    if check and outdated:
        raise SystemExit(f"run `python benchmarks/render.py`: {', '.join(map(str, outdated))}")
    for page in outdated:
        page.write_text(texts[page][1])
    if not check:
        from harness import plots  # needs matplotlib, which tables do not

        plots.draw(plots.PLOTS)


if __name__ == "__main__":
    main()
