"""``python -m tgl.doctor``: what is installed, which devices there are, and what serves the ops on each.

The report is for reading and for bug reports. It computes nothing, compiles nothing and changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from . import __version__, backends
from .cutlass_kernels.archs import chips, serving
from .cutlass_kernels.runtime import cache, device
from .meta.formats import FORMATS
from .ops import group_quantize

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "peft")
Call = tuple[str, str, tuple, dict[str, Any]]


def report() -> str:
    """The lines of ``python -m tgl.doctor``."""
    return "\n".join((*_installed(), *(line for where in _devices() for line in ("", *_served(where)))))


def _installed() -> Iterator[str]:
    yield f"tgl {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"  {package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"  {package}: not installed"
    cuda = torch.version.cuda
    yield f"  torch is built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"
    reason = device.packages_reason()
    if reason is not None:
        yield f"  kernels cannot be compiled: this {reason}"
        return
    kept = list(cache.directory().glob("*.o"))
    size = sum(path.stat().st_size for path in kept) / 2**20
    yield f"  kernels can be compiled; {len(kept)} ({size:.0f} MiB) are kept in {cache.directory()}"


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield torch.device("cuda", index)


def _served(where: torch.device) -> Iterator[str]:
    arch = backends.device_arch(where)
    if where.type == "cuda":
        yield f"{where}: {torch.cuda.get_device_name(where)} ({arch})"
        if serving(arch) is None:
            yield f"  tgl has kernels for {', '.join(chips())}, not for {arch}"
    else:
        yield f"{where}: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    with FakeTensorMode():
        for op, of, args, kwargs in calls(where):
            found = backends.explain(op, *args, **kwargs)
            reasons = "; ".join(f"{i.name}: {reason}" for i, reason in found.refused)
            chosen = f"no implementation: {reasons}" if found.chosen is None else found.chosen.name
            about = ", an emulation" * found.emulates + ", reads the device on the host" * found.syncs
            yield f"  {op:<40} {of:<10}  {chosen}{about}"


def calls(where: torch.device) -> Iterator[Call]:
    """A call of each op that a layer runs, forward and backward, in bfloat16 and in every format."""
    offs = torch.zeros(2, dtype=torch.int32, device=where)
    places = torch.zeros(256, dtype=torch.int32, device=where)

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=where)

    rows, matrices, wide = made(256, 256), made(2, 256, 256), made(256, 512)
    for op, args in {
        "route": (places.view(128, 2), 2),
        "dispatch": (rows, places, places, 1),
        "grouped_gemm": (rows, matrices, offs),
        "grouped_gemm_activation": (rows, made(2, 256, 512), offs),
        "combine": (rows, places, places, 1),
        "grouped_gemm_dactivation": (rows, matrices, wide, offs),
        "grouped_gemm_wgrad": (rows, rows, offs),
        "grouped_gemm_wgrad_accumulate_": (rows, rows, offs, matrices),
        "grouped_dbias": (rows, offs),
    }.items():
        yield op, "bfloat16", args, {}
    for name, f in FORMATS.items():
        options = {"format": name, "scale_layout": "blocked" if "blocked" in f.layouts else "compact"}
        a, b = (group_quantize(t, o, **options) for t, o in ((rows, offs), (matrices, None)))  # type: ignore[arg-type]
        if f.square_scales:
            b = group_quantize(matrices, None, **options, block_2d=True)  # type: ignore[arg-type]
        amaxes = ((a.amax, b.amax), (a.columnwise_amax, a.columnwise_amax)) if f.decodes_with_amax else ((), ())
        columns = (a.columnwise_data, a.columnwise_scale)
        yield "group_quantize", name, (rows, offs), options
        yield "grouped_gemm_scaled", name, (a.data, a.scale, b.data, b.scale, offs, *amaxes[0]), options
        yield "grouped_gemm_scaled_wgrad", name, (*columns, *columns, offs, *amaxes[1]), options


if __name__ == "__main__":
    print(report())
