"""Check for recipes with ``emulate=False`` that a device has kernels for the recipe's format."""

from __future__ import annotations

import functools

import torch

from .. import backends
from ..meta.formats import FORMATS
from ..ops.group_quantize import group_quantize
from ._parameters import decided_when_traced

_SIZE = 256  # side of a problem that every kernel of a format supports


def refuse_emulation(format: str, scale_layout: str, device: torch.device) -> None:
    """Raise ``NoImplementationError`` if GEMMs on ``format`` are emulated on ``device``, with every kernel's reason."""
    report = _emulating(format, scale_layout, device, backends.device_arch(device))
    if report:
        raise backends.NoImplementationError(f"a recipe with emulate=False needs a kernel of {format}:\n{report}")


@decided_when_traced
def _emulating(format: str, scale_layout: str, device: torch.device, arch: str) -> str:
    """Return the report on a GEMM that is emulated, or ""; a trace treats it as a constant."""
    return _report(format, scale_layout, device, arch)


@functools.cache
def _report(format: str, scale_layout: str, device: torch.device, arch: str) -> str:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and only needed here

    options = {"format": format, "scale_layout": scale_layout}
    with FakeTensorMode():
        offs = torch.empty(1, dtype=torch.int32, device=device)
        x = torch.empty(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        a = group_quantize(x, offs, **options)  # type: ignore[arg-type]
        b = group_quantize(x[None], None, **options, block_2d=FORMATS[format].square_scales)  # type: ignore[arg-type]
        amaxes = (a.amax, b.amax) if FORMATS[format].decodes_with_amax else ()
        found = backends.explain("grouped_gemm_scaled", a.data, a.scale, b.data, b.scale, offs, *amaxes, **options)
    return str(found) if found.emulates else ""
