"""Every pair of choices a GEMM kernel is made with: it compiles, is exact, and the machine code is what it should be.

Choices are the tiling (with its architecture), the dtypes, the major of B and the parts of the epilogue. For any two of
them and any two values there is a kernel here; each is compiled, run on the emulator and disassembled.
"""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.cutlass_kernels import sass
from tests.cutlass_kernels.gemm_cases import Case, kernel, run
from tgl.cutlass_kernels.config import SMEM_BYTES, VARLEN_K, VARLEN_M, GemmConfig

pytestmark = pytest.mark.slow

REGISTER_FILE = 65536
TILINGS = [("sm_90", GemmConfig(*t)) for t in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128))]
TILINGS += [("sm_90", GemmConfig(*t)) for t in ((128, 192), (128, 256), (256, 64), (256, 128))]
TILINGS += [("sm_90", GemmConfig(*t, cluster_n=2)) for t in ((128, 128), (128, 256), (256, 128))]
TILINGS += [("sm_90", GemmConfig(*t, pingpong=True)) for t in ((64, 128), (64, 256), (128, 64), (128, 128))]
TILINGS += [("sm_90", GemmConfig(128, 128, pingpong=True, cluster_n=2))]
TILINGS += [("sm_100", GemmConfig(128, n)) for n in (64, 128, 256)]
TILINGS += [("sm_100", GemmConfig(256, n, two_cta=True)) for n in (64, 128, 256)]
DTYPES = (torch.bfloat16, torch.float16)
YES_NO = (True, False)

CHOICES = {
    VARLEN_M: {
        "tiling": TILINGS,
        "dtype": DTYPES,
        "wide_out": YES_NO,
        "b_row_major": YES_NO,
        "bias": (None, "same", "float32"),
        "bias_scale": (None, "same", "float32"),
        "zero_tail": YES_NO,
    },
    VARLEN_K: {"tiling": TILINGS, "dtype": DTYPES, "wide_out": YES_NO, "accumulate": YES_NO},
}


def allowed(choice: dict) -> bool:
    return not (choice.get("bias_scale") and not choice["bias"])


def pairwise(choices: dict) -> list[dict]:
    """Few combinations that hold every pair of values that can occur together."""
    names = list(choices)
    every = [c for values in itertools.product(*choices.values()) if allowed(c := dict(zip(names, values)))]
    pairs = [frozenset(itertools.combinations([(n, str(c[n])) for n in names], 2)) for c in every]
    missing = frozenset().union(*pairs)
    cover = []
    while missing:
        best = max(range(len(every)), key=lambda i: len(pairs[i] & missing))
        cover.append(every[best])
        missing -= pairs[best]
    return cover


def case(choice: dict) -> tuple[str, Case]:
    arch, config = choice["tiling"]
    dtype = choice["dtype"]
    named = {None: None, "same": dtype, "float32": torch.float32}
    return arch, Case(
        config,
        (3, 0, 130, 65),
        tail=5,
        depth=72,
        columns=72,
        dtype=dtype,
        out=torch.float32 if choice["wide_out"] else dtype,
        b_row_major=choice.get("b_row_major", True),
        bias=named[choice.get("bias")],
        bias_scale=named[choice.get("bias_scale")],
        zero_tail=choice.get("zero_tail", True),
        accumulate=choice.get("accumulate", False),
    )


MATRIX = [(kind, choice) for kind, choices in CHOICES.items() for choice in pairwise(choices)]


def label(kind: str, choice: dict) -> str:
    arch, config = choice["tiling"]
    rest = [f"{n}={str(v).removeprefix('torch.')}" for n, v in choice.items() if n != "tiling"]
    tile = f"{config.tile_m}x{config.tile_n}" + "x2" * (config.ctas == 2) + "pp" * config.pingpong
    return " ".join([arch, tile, kind, *rest])


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("\nregisters  shared  spills    MMA   instructions  kernel")
    for row in rows:
        print("{:9d} {:7d} {:7d} {:>14} {:6d}  {}".format(*row))


def test_the_cover_holds_every_pair():
    for kind, choices in CHOICES.items():
        chosen = [c for k, c in MATRIX if k == kind]
        for one, two in itertools.combinations(choices, 2):
            wanted = {(str(x), str(y)) for x in choices[one] for y in choices[two]}
            if {one, two} == {"bias", "bias_scale"}:
                wanted = {(x, y) for x, y in wanted if x != "None" or y == "None"}
            assert {(str(c[one]), str(c[two])) for c in chosen} == wanted


@pytest.mark.skipif(sass.nvdisasm() is None, reason="needs the package nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("kind", "choice"), MATRIX, ids=[label(*m) for m in MATRIX])
def test_compiles_and_is_exact(kind, choice, table):
    arch, tried = case(choice)
    record = run(arch, kind, tried, seeds=(0,))
    artifacts = kernel(arch, kind, tried).artifacts
    report = sass.inspect(artifacts.CUBIN)
    mma = "HGMMA" if arch == "sm_90" else "UTCHMMA"
    table.append(
        (
            report.registers,
            record.shared_bytes,
            report.spills,
            f"{report.count(mma)} {mma}",
            sum(report.opcodes.values()),
            label(kind, choice),
        )
    )
    assert report.spills == 0
    assert report.frame == 0
    assert report.registers * record.block[0] <= REGISTER_FILE
    assert record.shared_bytes <= SMEM_BYTES[arch]
    assert report.count(mma) > 0
    assert report.count("HMMA") == 0
    assert report.count("UTMALDG") >= 2
    # An adding store exactly where sums are formed in memory, that is in float32.
    adds = tried.accumulate and tried.out == torch.float32
    assert (report.count("UTMAREDG") > 0) == adds
    assert (report.count("UTMASTG") > 0) == (not adds)
    element = "bf16" if tried.dtype == torch.bfloat16 else "f16"
    if arch == "sm_90":
        assert f"wgmma.mma_async.sync.aligned.m64n{tried.config.tile_n}k16.f32.{element}.{element}" in artifacts.PTX
        # One wait in the mainloop and one behind it: more would mean that every MMA is waited for.
        assert report.count("WARPGROUP.DEPBAR") == 2
    else:
        assert f"tcgen05.mma.cta_group::{2 if tried.config.two_cta else 1}.kind::f16" in artifacts.PTX
