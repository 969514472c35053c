"""Check an op and a kernel of your own with ``tgl.testing``.

First a new op in your own namespace, described by one line; then a kernel of yours for one of ours. Run it::

    python examples/foreign_op.py
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import tgl
from tgl.testing import Signature, check_op, sample_inputs

# --- 1. An op of your own: scale the rows of every group by a vector of the group's -----------------------------------

LIB = torch.library.Library("mylib", "DEF")
LIB.define("scale_groups(Tensor x, Tensor scale, Tensor offs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(LIB, "scale_groups", "CPU")
def scale_groups(x: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    """``out[t] = x[t] * scale[g]`` for row ``t`` of group ``g``, zeros past ``offs[-1]``."""
    rows = torch.arange(x.shape[0], dtype=offs.dtype)
    group = torch.searchsorted(offs, rows, right=True)
    padded = torch.cat([scale, scale.new_zeros(1, scale.shape[1])])  # the tail belongs to no group
    # where, not a product with zero: the tail of x may hold NaN.
    scaled = torch.where((group == scale.shape[0])[:, None], 0, x * padded[group])
    return scaled.contiguous()  # as the fake says, however x lies in memory


@torch.library.register_fake("mylib::scale_groups", lib=LIB)
def _(x: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, scale, offs = ctx.saved_tensors
    dx = torch.ops.mylib.scale_groups(dy, scale, offs)
    wide = torch.promote_types(x.dtype, torch.float32)
    return dx, tgl.grouped_dbias(dy.to(wide) * x.to(wide), offs).to(scale.dtype), None


torch.library.register_autograd("mylib::scale_groups", backward, setup_context=setup_context, lib=LIB)


def check_my_op() -> int:
    """The three lines: describe the op, make its samples, check every contract on each of them."""
    signature = Signature("x[T,N], scale[G,N], offs[G]:ends -> y[T,N]")
    return check_op(torch.ops.mylib.scale_groups.default, signature.samples())


# --- 2. A kernel of your own for one of our ops -----------------------------------------------------------------------


def supports(dy: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """None, or why not: ``tgl.explain`` prints it."""
    return None if dy.dtype == torch.float32 else f"takes float32 only, got {dy.dtype}"


def dbias_by_cumsum(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Writes into ``out``, which the op has checked and allocated: sums in float64 up to each end, and differences."""
    ends = torch.cat([offs.new_zeros(1), offs]).long().clamp(0, dy.shape[0]).cummax(0).values
    sums = torch.cat([dy.new_zeros(1, dy.shape[1], dtype=torch.float64), dy[: ends[-1]].double().cumsum(0)])
    out.copy_(sums[ends[1:]] - sums[ends[:-1]])


def check_my_kernel() -> int:
    """Register it, check our op as for our own kernels, and take it out again."""
    mine = tgl.register_implementation("grouped_dbias", "cumsum", device="cpu", supports=supports)(dbias_by_cumsum)
    try:
        print(tgl.explain(tgl.grouped_dbias, torch.ones(4, 8), torch.tensor([4], dtype=torch.int32)))
        op = torch.ops.tgl.grouped_dbias.default
        return check_op(op, sample_inputs(op, dtypes=(torch.float32,)), reference=exact_dbias)
    finally:
        tgl.backends.remove(mine)


def exact_dbias(dy: Tensor, offs: Tensor) -> Tensor:
    """Return the exact result in float64."""
    starts = [0, *offs.tolist()]
    sums = [dy[start:end].sum(0) for start, end in itertools.pairwise(starts)]
    return torch.stack(sums) if sums else dy.new_zeros(0, dy.shape[1])


if __name__ == "__main__":
    print(f"mylib::scale_groups keeps its contracts on {check_my_op()} samples")
    print(f"tgl::grouped_dbias with the kernel 'cumsum' keeps its contracts on {check_my_kernel()} samples")
