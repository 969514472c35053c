"""An op of your own with a CuTe kernel of your own, launched, cached and explained as the kernels of ``tgl`` are.

Nothing of ``tgl`` is edited: the op is described to the registry, a ``Launcher`` states what its kernel needs, and
everything else follows: look-up of warm calls, the cache on disk, ``tgl.explain``, ``tgl.warmup``, copies of operands
out of the kernel's reach, and named errors under CUDA graph capture. Run it::

    python examples/foreign_kernel.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tgl
from tgl import backends
from tgl.cutlass_kernels.runtime import device
from tgl.cutlass_kernels.runtime.launcher import Launcher, warm
from tgl.cutlass_kernels.runtime.names import name
from tgl.cutlass_kernels.runtime.reach import Reach
from tgl.cutlass_kernels.runtime.requirements import ROW_MAJOR

OP = "mykernels::scale_groups"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# --- 1. The op: schema, check and allocation, and an implementation ---------------------------------------------------

LIB = torch.library.Library("mykernels", "DEF")
LIB.define("scale_groups(Tensor x, Tensor scale, Tensor offs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def checked(x: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """The output, after the arguments were found to fit: the fake implementation, too."""
    if x.dim() != 2 or scale.shape != (offs.shape[0], x.shape[1]):
        raise ValueError(f"{OP}: `scale` must be [G, N], but got {tuple(scale.shape)}")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def scale_groups(x: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """``out[t] = x[t] * scale[g]`` for row ``t`` of group ``g``, zeros past ``offs[-1]``."""
    out = checked(x, scale, offs)
    backends.run(OP, x.device, x, scale, offs, out=out)
    return out


for key in ("CPU", "CUDA"):
    LIB.impl("scale_groups", scale_groups, key)
torch.library.register_fake(OP, checked, lib=LIB)
backends.describe_op(
    OP, lambda x, scale, offs: (x.device, (x, scale, offs), {"out": checked(x, scale, offs).to("meta")})
)


@tgl.register_implementation(OP, "steps of aten", device="cpu", priority=0)
def steps_of_aten(x: Tensor, scale: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Run the op on a CPU as steps of aten."""
    group = torch.searchsorted(offs, torch.arange(x.shape[0], dtype=offs.dtype), right=True)
    padded = torch.cat([scale, scale.new_zeros(1, scale.shape[1])])  # the tail belongs to no group
    out.copy_(torch.where((group == scale.shape[0])[:, None], 0, x * padded[group]))


# --- 2. The kernel's launcher -----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call, by the names that an implementation gets."""

    x: Tensor
    scale: Tensor
    offs: Tensor
    out: Tensor


class Key(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str


class ScaleGroups(Launcher[Call]):
    """Launcher of a kernel with one block for a row."""

    op = OP
    call = Call
    reach = Reach({"x": ROW_MAJOR, "scale": ROW_MAJOR, "out": ROW_MAJOR}, ("out",))

    def reject_reason(self, c: Call) -> str | None:
        """Return why the kernel does not take a call, wherever its tensors lie."""
        if c.x.dtype not in DTYPES or c.scale.dtype != c.x.dtype:
            return f"takes float32, bfloat16 and float16, got {c.x.dtype} and {c.scale.dtype}"
        return device.packages_reason()

    def plan_key(self, c: Call) -> tuple | None:
        """Return the plan key, which decides the kernel and the checks: not the number of rows."""
        if not warm(c.x.shape[0], c.x.data_ptr() | c.scale.data_ptr() | c.out.data_ptr()):
            return None
        return c.x.dtype, c.scale.dtype, c.x.shape[1], c.x.stride(), c.scale.stride()

    def is_empty(self, c: Call) -> bool:
        """Return whether there is nothing to launch."""
        return c.out.numel() == 0

    def key(self, c: Call, arch: str) -> Key:
        """Return the key of the kernel for the call."""
        return Key(arch, not c.x.is_cuda, name(c.x))

    def build(self, key: Key) -> Callable:
        """Compile it: for tensors of any size, without a GPU."""
        from tgl.cutlass_kernels.runtime.compiling import compiled, matrix, strided

        rows = [matrix(key.element) for _ in range(3)]
        return compiled(key.arch, kernel(), rows[0], rows[1], strided("int32"), rows[2])

    def arguments(self, c: Call) -> tuple:
        """Return the arguments of the kernel."""
        return c


def kernel() -> Any:
    """The kernel; a function, so that the compiler is imported when the first call needs it."""
    import cutlass
    from cutlass import Float32, Int32, cute

    threads = 128

    @cute.kernel
    def scale_row(x, scale, offs, out):
        row, lane = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        group = Int32(0)
        for g in cutlass.range(offs.shape[0]):
            if offs[g] <= row:
                group += 1
        for column in cutlass.range(lane, x.shape[1], threads):
            value = Float32(0)
            if group < offs.shape[0]:
                value = x[row, column].to(Float32) * scale[group, column].to(Float32)
            out[row, column] = value.to(out.element_type)

    @cute.jit
    def launch(x, scale, offs, out, stream):
        scale_row(x, scale, offs, out).launch(grid=[x.shape[0], 1, 1], block=[threads, 1, 1], stream=stream)

    return launch


LAUNCHER = ScaleGroups()
backends.add(LAUNCHER.implementation("a CuTe kernel"))
backends.add(LAUNCHER.copying("a CuTe kernel between copies"))


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    x, scale = torch.randn(10, 48, device=where), torch.randn(3, 48, device=where)
    offs = torch.tensor([4, 4, 9], dtype=torch.int32, device=where)
    print(tgl.explain(torch.ops.mykernels.scale_groups, x, scale, offs))
    print(torch.compile(torch.ops.mykernels.scale_groups, fullgraph=True)(x, scale, offs).sum(1))
