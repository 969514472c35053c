"""``python -m tgl.doctor`` and ``tgl.doctor.report``: forwards to ``tgl.cli.doctor``."""

import sys

from .cli.doctor import main, report

__all__ = ["report"]

if __name__ == "__main__":
    main(sys.argv[1:])
