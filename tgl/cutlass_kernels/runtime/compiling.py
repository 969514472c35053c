"""Compile a kernel for tensors of known dtype and layout and any size; needs no GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutlass import cute
from cutlass._mlir._mlir_libs import _cutlass_ir
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import CuTeDSL

from ..archs import arch_of
from .elements import TYPES
from .function_names import named
from .requirements import ALIGNMENT

_log = logging.getLogger(__name__)

# Settings that do not affect a kernel on disk: each kernel is compiled for an explicit architecture, and the libraries
# are those with which the compiler's own process runs its output.
_OF_A_PROCESS = ("arch", "shared_libs")


def settings() -> str:
    """Return the compiler's settings in this process, from its environment variables, and its toolkit.

    They are read in every call, since an emulator changes some of them while it runs.
    """
    environment: Any = CuTeDSL._get_dsl().envar
    names = sorted(entry.key_name for entry in environment._ENV_VAR_SPEC if entry.affects_compile)
    values = [f"{name}={getattr(environment, name)!r}" for name in names if name not in _OF_A_PROCESS]
    return " ".join([Path(_cutlass_ir.__file__).name, *values])  # its name contains the CUDA version


def matrix(
    name: str, dims: int = 2, *, unit: int = -1, pitch: int = ALIGNMENT, columns: int = 1, align: int = ALIGNMENT
) -> Any:
    """Return a stand-in for a tensor that is contiguous along one dimension, by default as a tensor map needs it.

    Args:
        name: the dtype, as ``torch`` names it.
        dims: how many dimensions it has.
        unit: the contiguous one.
        pitch: bytes that divide all other strides.
        columns: a divisor of the last dimension's size, in elements.
        align: bytes that divide the address.
    """
    element = TYPES[name]
    step = max(pitch * 8 // element.width, 1)
    strides = tuple(1 if i == unit % dims else cute.sym_int64(divisibility=step) for i in range(dims))
    sizes = (*_sizes(dims - 1), cute.sym_int32(divisibility=columns))
    return make_fake_tensor(element, sizes, strides, assumed_align=align)


def vector(name: str, align: int = 4) -> Any:
    """Return a stand-in for a contiguous vector, aligned to ``align`` bytes."""
    return make_fake_tensor(TYPES[name], _sizes(1), (1,), assumed_align=align)


def contiguous(name: str, dims: int = 2) -> Any:
    """Return a stand-in for a tensor without gaps, row-major."""
    order = tuple(range(dims))[::-1]
    return make_fake_compact_tensor(TYPES[name], _sizes(dims), stride_order=order)


def strided(name: str | None, dims: int = 1) -> Any:
    """Return a stand-in for a tensor that is read element by element, in any layout; None for None."""
    if name is None:
        return None
    return make_fake_tensor(TYPES[name], _sizes(dims), tuple(cute.sym_int64() for _ in range(dims)))


def source_of(spec: Any, element: str | None = None) -> Any:
    """Return a stand-in for the source of a quantisation kernel of this spec: rows, or with a table of slots matrices.

    Args:
        element: its dtype, if it is not that of the values.
    """
    dims, element = 3 if spec.slots else 2, element or spec.source
    return strided(element, dims) if spec.elementwise else matrix(element, dims)


def scales_of(spec: Any) -> Any:
    """Return a stand-in for the scales of codes that are decoded by this ``DequantizeSpec``."""
    if not spec.decoding.block:
        return vector("float32")
    if spec.decoding.scale == "float32":
        return strided("float32", 2) if spec.grouped and not spec.columnwise else matrix("float32", pitch=4)
    if spec.blocked:
        return vector("uint8", ALIGNMENT)
    return matrix("uint8", pitch=spec.vector if spec.columnwise and not spec.run else 1)


def order_of(spec: Any) -> Any:
    """Return a stand-in for the table of slots or rows; None without one."""
    return strided("int32" if spec.slots or spec.rows else None)


def compiled(arch: str, kernel: Callable, *arguments: Any, chip: str | None = None) -> Callable:
    """Compile ``kernel`` for ``arch`` and for arguments like ``arguments``, without the stream, which comes last.

    Args:
        chip: the only chip to compile for, if the kernel has instructions of one.
    """
    entry, stream = arch_of(arch), make_fake_stream(use_tvm_ffi_env_stream=True)
    target = entry.target if chip is None else entry.own_target(chip)
    named(type(kernel))
    begin = time.perf_counter()
    function: Callable = cute.compile[cute.GPUArch(target), cute.EnableTVMFFI(True)](kernel, *arguments, stream)
    _log.info("compiled %s for %s in %.1f s", type(kernel).__name__, target, time.perf_counter() - begin)
    return function


def _sizes(dims: int) -> tuple:
    return tuple(cute.sym_int32() for _ in range(dims))
