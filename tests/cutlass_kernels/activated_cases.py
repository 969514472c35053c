"""One GEMM with an activation as second output, compiled for a given tiling and run on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import cute_emulator
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import ends, framed, integers, poisoned, product, stored
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm, gemm_activation, gemm_low_rank_activation
from tgl.cutlass_kernels.runtime import names
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

SWIGLU = Params()
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    config: GemmConfig
    sizes: tuple[int, ...]
    params: Params = SWIGLU
    tail: int = 9
    depth: int = 72
    columns: int = 72  # of y
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.bfloat16
    b_row_major: bool = False  # weights [G, 2 I, K] come as b [G, K, 2 I] with K contiguous
    bias: torch.dtype | None = None
    probs: torch.dtype | None = torch.float32
    offs: tuple[int, ...] | None = None  # other than the sizes say
    rank: int = 0  # of the second pair of operands; 0: there is none
    keeps: bool = True  # whether h is written


def kernel(arch: str, case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    name = names.name
    factors = {"activation": spec_of(case.params), "probs": name(case.probs)}
    spec = EpilogueSpec(name(case.out), name(case.bias), tail=True, keeps=case.keeps, **factors)
    key = gemm.GemmKey(VARLEN_M, arch, True, name(case.dtype), 2 if case.b_row_major else 1, spec, case.config)
    paired = case.rank > 0
    if (key, paired) not in _compiled:
        launcher = (
            gemm_low_rank_activation.GROUPED_GEMM_LOW_RANK_ACTIVATION
            if paired
            else gemm_activation.GROUPED_GEMM_ACTIVATION
        )
        _compiled[key, paired] = launcher.build(key)
    return _compiled[key, paired]


def run(arch: str, case: Case, seeds=(0, 1)) -> cute_emulator.LaunchRecord:
    """Run ``case``: ``h`` exact, ``y`` the bytes of the activation kernel on ``h``, both between canaries.

    Where ``h`` is not kept its canaries are all over it.
    """
    torch.manual_seed(case.columns)
    groups, sizes = len(case.sizes), case.sizes
    rows, width = sum(sizes) + case.tail, case.columns * (2 if case.params.gated else 1)
    a = poisoned(integers(rows, case.depth, dtype=case.dtype), sizes)
    b = integers(groups, case.depth, width, dtype=case.dtype)
    bias = integers(groups, width, dtype=case.bias) if case.bias else None
    probs = poisoned(torch.rand(rows).to(case.probs), sizes) if case.probs else None
    wanted, pair = product(a, b, sizes, bias), ()
    if case.rank:
        low = poisoned(integers(rows, case.rank, dtype=case.dtype), sizes)
        up = integers(groups, case.rank, width, dtype=case.dtype)
        wanted, pair = wanted + product(low, up, sizes), (stored(low, True), stored(up, case.b_row_major))
    wanted = wanted.to(case.out)
    wanted_y = torch.empty(rows, case.columns, dtype=case.out)
    offs = ends(sizes) if case.offs is None else torch.tensor(case.offs, dtype=torch.int32)
    a, b = stored(a, True), stored(b, case.b_row_major)
    frames = h, y = tuple(framed(rows, n, dtype=case.out) for n in (width, case.columns))
    with emulate(ARCHS[arch].target) as machine, backends.emulated_device(arch):
        backends.run("grouped_activation", a.device, wanted, offs, probs, params=case.params, out=wanted_y)
        assert len(machine.launches) == 1
        function, first = kernel(arch, case), None
        for seed in seeds:
            for frame in frames:
                frame.refill()
            machine.seed = seed
            function(a, b, *pair, offs, h.inside if case.keeps else None, y.inside, bias, probs, CLUSTERS)
            if case.offs is None:
                for name, frame, values in (("h", h, wanted), ("y", y, wanted_y))[not case.keeps :]:
                    where = (frame.inside != values).nonzero()
                    assert same_bytes(frame.inside, values), f"seed {seed}: {where[:3].tolist()} of {name}"
            first = first or [frame.inside.clone() for frame in frames]
            assert all(same_bytes(frame.inside, once) for frame, once in zip(frames, first))
            assert all(frame.intact() for frame in frames), f"seed {seed}: written around the output"
        return machine.launches[-1]
