"""Code behind the commands ``python -m tgl.warmup`` and ``python -m tgl.doctor``."""
