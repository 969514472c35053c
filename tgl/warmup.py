"""``python -m tgl.warmup``: forwards to ``tgl.cli.warmup``. As an import it is the function ``tgl.warmup``."""

import sys

import tgl

if __name__ == "__main__":
    from tgl.cli.warmup import main

    main(sys.argv[1:])
else:
    sys.modules[__name__] = tgl.warmup  # type: ignore[assignment]  # `import tgl.warmup` leaves the function what it is
