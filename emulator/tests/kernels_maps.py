"""A CuTe DSL kernel that edits its tensor map, in global memory or by way of shared memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

MODES = {"global": TensorMapUpdateMode.GMEM, "shared": TensorMapUpdateMode.SMEM}
ROWS, COLUMNS = 16, 32


class Remapped:
    """dst = the matrix ``actual``, loaded through the map of ``nominal``, which warp 0 edits and warp 1 uses."""

    def __init__(self, place):
        self.manager = TensorMapManager(MODES[place], 128)
        self.in_shared = place == "shared"

    @cute.jit
    def __call__(
        self, nominal: cute.Tensor, actual: cute.Tensor, dst: cute.Tensor, room: cute.Tensor, stream: cuda.CUstream
    ):
        layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        op = cpasync.CopyBulkTensorTileG2SOp()
        load, src = cpasync.make_tiled_tma_atom(op, nominal, layout, (ROWS, COLUMNS))
        self.kernel(load, src, actual, dst, room).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, src: cute.Tensor, actual: cute.Tensor, dst: cute.Tensor, room: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        staged = smem.allocate_array(cutlass.Int64, 16, byte_alignment=128)
        tile = smem.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)), 128)
        whole = cute.group_modes(cute.local_tile(src, (ROWS, COLUMNS), (0, 0)), 0, 2)
        s_in, g_in = cpasync.tma_partition(load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), whole)
        place = self.manager.get_tensormap_ptr(room.iterator)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.in_shared):
            self.manager.init_tensormap_from_atom(load, staged, 0)
        else:
            self.manager.init_tensormap_from_atom(load, place, 0)
        self.manager.fence_tensormap_initialization()
        self.manager.update_tensormap((actual,), (load,), (place,), 0, (staged,))
        cute.arch.sync_threads()
        if warp == 1:
            self.manager.fence_tensormap_update(place)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * COLUMNS * 4)
            used = self.manager.get_tensormap_ptr(place, cute.AddressSpace.generic)
            cute.copy(load, g_in, s_in, tma_bar_ptr=full, tma_desc_ptr=used)
        cute.arch.mbarrier_wait(full, 0)
        for i in cutlass.range(tid, ROWS * COLUMNS, 64):
            dst[i // COLUMNS, i % COLUMNS] = tile[i // COLUMNS, i % COLUMNS]
