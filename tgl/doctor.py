"""``python -m tgl.doctor`` and ``tgl.doctor.report``: forwards to ``tgl.cli.doctor``."""

from .cli.doctor import report

if __name__ == "__main__":
    print(report())
