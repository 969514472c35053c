"""``ldmatrix`` of 16 x 16 bytes against what the compiler says that its own copy gives, which permutes besides."""

import cutlass
import torch
from cutlass import Uint8, cute, memory
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import from_dlpack

from cute_emulator import emulate


@cute.kernel
def transpose(x: cute.Tensor, y: cute.Tensor):
    lane = cute.arch.lane_idx()
    held = memory.SmemAllocator().allocate_array(Uint8, num_elems=256, byte_alignment=128)
    for i in cutlass.range_constexpr(8):
        cute.make_tensor(held + (lane * 8 + i), 1)[0] = x[lane * 8 + i]
    cute.arch.sync_warp()
    row = lane % 2 + lane // 2 % 2 * 8 + lane // 4 % 4 * 2  # of which a lane has the address
    place = cute.make_ptr(Uint8, (held + row * 16).toint(), cute.AddressSpace.smem, assumed_align=16)
    found = cute.make_rmem_tensor((8, 1), Uint8)
    atom = cute.make_copy_atom(warp.LdMatrix16x8x8bOp(True, 2), Uint8)
    cute.copy(atom, cute.make_tensor(place, cute.make_layout((8, 1))), found)
    for i in cutlass.range_constexpr(8):
        y[lane * 8 + i] = found[i]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    transpose(x, y).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_a_lane_gets_what_the_compiler_says():
    """``layout_dst_tv`` is ``((4, 8), (1, 2, 2, 2)) : ((32, 1), (1, 16, 8, 128))``, of rows of 16."""
    x, y = torch.arange(256).to(torch.uint8), torch.zeros(256, dtype=torch.uint8)
    with emulate("sm_120f"):
        cute.compile(launch, from_dlpack(x), from_dlpack(y))(from_dlpack(x), from_dlpack(y))
    lanes, values = torch.arange(32)[:, None], torch.arange(8)[None]
    wanted = 32 * (lanes % 4) + lanes // 4 + 16 * (values % 2) + 8 * (values // 2 % 2) + 128 * (values // 4)
    assert torch.equal(y.view(32, 8).long(), wanted)
