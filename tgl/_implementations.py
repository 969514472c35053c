"""Registers what serves the ops; ``tgl`` imports it once, and nothing else imports it."""

from . import ops  # noqa: F401 (declares the ops, which must come first)
from .aten import register as aten  # noqa: F401
from .composed import register as composed  # noqa: F401
from .cpu import register as cpu  # noqa: F401
from .cutlass_kernels import register as cutlass_kernels  # noqa: F401
