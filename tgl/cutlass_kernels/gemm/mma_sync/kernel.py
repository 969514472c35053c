"""Grouped GEMM with mma.sync, for sm_80 and later: persistent, accumulators in registers.

All warps have the same role. They copy both operands of a k tile to shared memory by ``cp.async``, some k tiles before
they multiply it, or, if the tiling says so, one lane issues TMA loads (see ``mapped``); every warp multiplies its part
of the tile by ``ldmatrix`` and ``mma.sync``, applies the epilogue and stores it. They synchronise once per k tile. Only
the tiling depends on the architecture, by its shared memory; ``archs`` says which MMAs there are for quantised operands
(see ``scaled_kernel``).
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, memory

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...runtime.elements import TYPES
from ...scheduler.problem import Problem, Share, VarlenK, VarlenM
from ..activation_call import ActivationKernelCall
from ..copies import LANES_OF_LINE
from ..gather_call import Gathered, check
from ..gemm_call import GemmKernelCall
from ..operand_formats import OperandFormat
from .activation_epilogue import store_activated
from .load import GemmOperands, parts_of
from .mapped import make_map, open_stages
from .mma import RingAddresses, multiply_halves, multiply_tiles
from .store import GlobalOutput, store_tile
from .tilings import WARPS, gathering_reason, stage_bytes

ALIGNED = 1024


class MmaSyncGemmKernel(GemmKernelCall):
    """A kernel of one kind, tiling, epilogue and element type; layouts come with the tensors it is compiled on.

    Attributes:
        copies: whether threads copy anything to the stages by cp.async.
        decoded: layout of B after decoding; None where B needs no decoding.
        factors_at: offset of block scales of float32 in a stage, 0 without; see ``factors``.
        form: format of quantised operands; None for 16 bits.
        gathered: the operand whose rows are gathered by an index, ``"a"`` or ``"b"``, or None.
        halves: 2 if the columns of a tile are the gate's and, after them, those of the linear half.
        hidden: makes the operands of a dactivation epilogue from the additional arguments of its kernel.
        line_step: number of 128-byte lines that all threads copy at a time.
        mapped: names of the operands that are loaded by TMA, of ``"a"`` and ``"b"``; see the module.
        multiply: issues the MMAs of all rows of a warp, 16 columns and a step of the depth.
        pair: element type for ``ldmatrix``: 16-bit elements, or as many bits of others.
        promotes: whether the sums of a stage are added in float32 registers.
        scales_at: offset of block scales that MMAs take themselves in a stage, 0 without; see ``scales``.
        store: applies the epilogue and stores a warp's part of a tile.
    """

    decoded: Any = None
    factors_at = scales_at = 0
    form: OperandFormat | None = None
    hidden: Any = None
    multiply: Any = staticmethod(multiply_halves)
    promotes = False
    store = staticmethod(store_tile)

    def __init__(
        self,
        kind: str,
        config: GemmConfig,
        spec: EpilogueSpec,
        element: type[cutlass.Numeric],
        gathered: str | None = None,
    ):
        check(kind, gathered, gathering_reason(config))
        self.kind, self.config, self.spec, self.element, self.gathered = kind, config, spec, element, gathered
        self.pair = element if element.width == 16 else cutlass.Uint16
        self.mapped = "".join(name for name in "ab" if config.tma and name != gathered)
        self.copies = len(self.mapped) < 2
        self.halves = 2 if spec.gated and not spec.activation.interleaved else 1  # type: ignore[union-attr]
        self.out_element = TYPES[spec.out]
        self.warps = WARPS[config.tile_m, config.tile_n]
        self.threads = 32 * self.warps[0] * self.warps[1]
        self.line_step = self.threads // LANES_OF_LINE
        self.warp_tile = config.tile_m // self.warps[0], config.tile_n // self.warps[1]
        self.stage_bytes = stage_bytes(config)
        tiles = config.tile_m, config.tile_n, config.band
        self.policy: Any = VarlenM(*tiles, spec.tail) if kind == VARLEN_M else VarlenK(*tiles, config.longest_first)

    @cute.jit
    def start(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        scales: tuple[cute.Tensor, cute.Tensor] | None,
        offs: cute.Tensor,
        out: cute.Tensor | None,
        args: EpilogueArgs,
        clusters: Int32,
        stream,
        second: cute.Tensor | None = None,
        extra: Any = None,
        slots: cute.Tensor | None = None,
        begin: cute.Tensor | None = None,
        index: cute.Tensor | None = None,
    ):
        """Launch.

        Args:
            scales: block scales of A and B, or None.
            out: None where the epilogue does not keep it.
            second: the activation's output, or None.
            extra: further operands of the dactivation epilogue, see ``hidden``.
            slots: index of each group's matrix, or None.
            begin: row offset of the first group, or None.
            index: rows of the ``gathered`` operand; None if nothing is gathered.
        """
        problem = self.policy.problem(a, b, offs, out, slots)._replace(begin=begin)
        source: Any = None
        if cutlass.const_expr(self.gathered is not None):
            source = Gathered(a if cutlass.const_expr(self.gathered == "a") else b, index)
            problem = problem._replace(rows=Int32(source.index.shape[0]))
        a, b, out = self.policy.plain(a, b, out)
        hidden: Any = None
        if cutlass.const_expr(self.hidden is not None):
            hidden = self.hidden(*extra)
        output = GlobalOutput(out, second, hidden)
        operands = GemmOperands(a, b, source, None, scales)
        parts = parts_of(self, operands)
        operands = operands._replace(
            maps=tuple(make_map(self, i, (a, b)[i], parts[i]) if "ab"[i] in self.mapped else None for i in range(2))
        )
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), clusters), 1)
        self.kernel(operands, output, args, problem).launch(
            grid=(running, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, operands: GemmOperands, output: GlobalOutput, args: EpilogueArgs, problem: Problem):
        """Set up shared memory, then work on tiles."""
        config = self.config
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = memory.SmemAllocator()
        problem = self.policy.arrange(problem, allocator, warp, self.threads // 32, first, step)
        full: Any = None
        if cutlass.const_expr(self.mapped):
            full = allocator.allocate_array(Int64, num_elems=config.stages).toint()
            open_stages(self, full, warp, operands.maps)
        size = config.stages * self.stage_bytes // 8
        stages = allocator.allocate_array(Int64, num_elems=size, byte_alignment=ALIGNED).toint()
        phase = Int32(0) if cutlass.const_expr(self.mapped) else None
        ring = RingAddresses(stages, stages, full, full, phase)
        if cutlass.const_expr(operands.source is not None):
            lines = config.tile_m if self.policy.kind == VARLEN_M else config.tile_k
            operands = operands._replace(found=cute.make_rmem_tensor(lines // self.line_step, Int32))
        multiply_tiles(self, operands, ring, output, args, Share(problem, Int32(0), first, step))


class MmaSyncGemmActivationKernel(ActivationKernelCall, MmaSyncGemmKernel):
    """A kernel with an activation as a second output."""

    store = staticmethod(store_activated)
