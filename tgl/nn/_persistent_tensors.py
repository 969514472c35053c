"""Mode for tensors that a layer keeps beyond a call, so that training can use them whatever mode the call ran in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def persistent_tensors() -> Iterator[None]:
    """Disable grad and inference mode, whose tensors cannot be written or saved for a backward later."""
    # A graph runs in the mode of its call, not of its trace.
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        with torch.no_grad():
            yield
