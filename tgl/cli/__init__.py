"""The commands ``python -m tgl.doctor`` and ``python -m tgl.warmup``, whose modules forward to this package."""
