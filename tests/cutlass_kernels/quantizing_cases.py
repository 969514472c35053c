"""One scaled GEMM whose activation leaves quantised, compiled for a given tiling and run on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import cute_emulator
import tgl
from tests.cutlass_kernels.gemm_cases import CLUSTERS
from tests.kernel_cases import ends, exact, framed, framed_like, poisoned
from tgl import backends
from tgl.cutlass_kernels.activation.activation_spec import spec_of
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm_scaled_quantize
from tgl.cutlass_kernels.quantize.quantize_spec import MXFP8Spec
from tgl.cutlass_kernels.runtime import names
from tgl.meta.components import Components
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

NAMES = {"format": "mxfp8", "scale_layout": "blocked"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SWIGLU = Params()
_compiled: dict = {}


@dataclass(frozen=True)
class Case:
    """A kernel and the sizes it is run on. ``sizes`` are the groups' rows, then ``tail`` rows that hold NaN."""

    tile_m: int
    tile_n: int
    sizes: tuple[int, ...]
    params: Params = SWIGLU
    tail: int = 9
    depth: int = 160
    columns: int = 128  # of the activation
    out: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    probs: torch.dtype | None = torch.float32
    direction: str = "rowwise"  # of the weights
    rowwise: bool = True
    columnwise: bool = True
    dtype: torch.dtype = E4M3
    b_dtype: torch.dtype = E4M3
    scaling: str = "rceil"
    offs: tuple[int, ...] | None = None  # other than the sizes say

    @property
    def config(self) -> GemmConfig:
        return GemmConfig(self.tile_m, self.tile_n, 128, two_cta=self.tile_m == 256)

    @property
    def quantizing(self) -> dict:
        """Options of ``group_quantize``."""
        directions = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return {**NAMES, **directions, "dtype": self.dtype, "scaling": self.scaling}


def key(case: Case) -> gemm_scaled_quantize.ScaledQuantizeKey:
    """Return the key of the kernel."""
    name, element = names.name, names.name(case.dtype)
    quantized = MXFP8Spec(name(case.out), element, case.rowwise, case.columnwise, case.scaling, True, True)
    spec = EpilogueSpec(
        name(case.out),
        name(case.bias),
        tail=True,
        activation=spec_of(case.params),
        probs=name(case.probs),
        quantized=quantized,
    )
    elements = name(E4M3), name(case.b_dtype)
    return gemm_scaled_quantize.ScaledQuantizeKey(
        "sm_100", True, *elements, case.direction == "rowwise", spec, case.config
    )


def kernel(case: Case):
    """The compiled kernel; compiled once per process. Only inside ``emulate``."""
    made = key(case)
    if made not in _compiled:
        _compiled[made] = gemm_scaled_quantize.GROUPED_GEMM_SCALED_ACTIVATION_QUANTIZE.build(made)
    return _compiled[made]


def run(case: Case, seeds=(0,)) -> cute_emulator.LaunchRecord:
    """Run ``case`` under every seed, between canaries.

    ``h`` must be the CPU's, and the components the CPU's of what the activation kernel makes of that ``h``.
    """
    torch.manual_seed(sum(case.sizes))
    groups, routed, right = len(case.sizes), sum(case.sizes), ends(case.sizes)
    rows, width = routed + case.tail, case.columns * (2 if case.params.gated else 1)
    x = poisoned(exact(rows, case.depth), case.sizes)
    probs = poisoned(torch.rand(rows).to(case.probs), case.sizes) if case.probs else None
    bias = torch.randint(-3, 4, (groups, width)).to(case.bias) if case.bias else None
    across = case.direction == "columnwise"
    w = exact(groups, *((case.depth, width) if across else (width, case.depth)))
    a, a_scale = tgl.group_quantize(x, right, **NAMES)[:2]
    b, b_scale = tgl.group_quantize(w, None, **NAMES, dtype=case.b_dtype)[3 if across else 0 :][:2]
    a[routed:].view(torch.uint8).fill_(0x7F)
    product = {**NAMES, "b_direction": case.direction, "out_dtype": case.out}
    wanted_h = tgl.grouped_gemm_scaled(a, a_scale, b, b_scale, right, bias=bias, **product)
    y = torch.empty(rows, case.columns, dtype=case.out)
    with emulate("sm_100a"):
        backends.run("grouped_activation", y.device, wanted_h, right, probs, params=case.params, out=y)
    wanted = tgl.group_quantize(y, right, **case.quantizing)
    frame, frames = framed(rows, width, dtype=case.out), framed_like(wanted)
    h, out = frame.inside, Components(*frames.inside)
    row = (out.data, out.scale) if case.rowwise else (None, None)
    column = (out.columnwise_data, out.columnwise_scale) if case.columnwise else (None, None)
    offs = right if case.offs is None else torch.tensor(case.offs, dtype=torch.int32)
    with emulate("sm_100a") as machine, backends.emulated_device("sm_100"):
        function, first = kernel(case), None
        for seed in seeds:
            frame.refill()
            frames.refill()
            machine.seed = seed
            function(a, a_scale, b, b_scale, offs, h, bias, probs, *row, *column, CLUSTERS)
            if case.offs is None:
                assert torch.equal(h, wanted_h), f"seed {seed}: {(h != wanted_h).nonzero()[:3].tolist()} of h"
                for name, ours, theirs in zip(wanted._fields, out, wanted):
                    differs = ours.view(torch.uint8) != theirs.view(torch.uint8)
                    assert not differs.any(), f"seed {seed}: {differs.nonzero()[:3].tolist()} of {name}"
            made = [t.contiguous().view(torch.uint8).clone() for t in (h, *frames.rooms)]
            first = first or made
            assert all(torch.equal(*pair) for pair in zip(made, first))
            assert frames.intact(), f"seed {seed}: written around a component"
            assert frame.intact(), f"seed {seed}: written around h"
        return machine.launches[-1]
