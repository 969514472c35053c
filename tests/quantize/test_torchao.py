"""torchao's CPU functions give the same bytes wherever they define the same thing; where not, the set is exact."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torchao.prototype.moe_training.kernels.mxfp8 import quant as torchao_blocked
from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked, pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import to_blocked

import tgl
from tgl.backends.cpu.quantize import fp4
from tgl.meta import placement
from tgl.testing import GroupSizes

ELEMENTS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALINGS = ("floor", "rceil", "even")


def one_group(rows):
    return torch.tensor([rows], dtype=torch.int32)


def mxfp8(x, scaling, element):
    c = tgl.group_quantize(
        x, one_group(x.shape[0]), format="mxfp8", scaling=scaling, dtype=element, scale_layout="compact"
    )
    return c.scale, c.data.view(torch.uint8), c.columnwise_scale, c.columnwise_data.view(torch.uint8)


def torchao_mxfp8(x, scaling, element):
    scale, data = to_mx(x.contiguous(), element, 32, ScaleCalculationMode[scaling.upper()])
    return scale.view(torch.uint8), data.view(torch.uint8)


def differing(x, scaling, element):
    """Return the blocks of rows ``[R, 32 B]`` with another scale or other data in torchao, and our scales."""
    scale, data, *_ = mxfp8(x, scaling, element)
    other_scale, other_data = torchao_mxfp8(x, scaling, element)
    return (scale != other_scale) | (data != other_data).unflatten(1, (-1, 32)).any(-1), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_mxfp8_random(scaling, element, dtype):
    """Every byte, over many magnitudes, rowwise and columnwise. None of these amaxes is close enough to a power of
    two times the largest element for torchao's log2 to miss; see below for those that are."""
    x = (torch.randn(256, 512) * torch.exp2(torch.randint(-40, 40, (256, 512)).sort(1).values)).to(dtype)
    scale, data, columnwise_scale, columnwise_data = mxfp8(x, scaling, element)
    other_scale, other_data = torchao_mxfp8(x, scaling, element)
    assert torch.equal(scale, other_scale)
    assert torch.equal(data, other_data)
    other_scale, other_data = torchao_mxfp8(x.t(), scaling, element)
    assert torch.equal(columnwise_scale[:8], other_scale.t())
    assert torch.equal(columnwise_data, other_data.t())


EDGES = {
    "zero": [0.0],
    "negative zero": [-0.0],
    "largest": [3.4028234663852886e38],
    "448": [448.0, -448.0],
    "480": [480.0],
    "underflow": [448.0, -(2.0**-30), 2.0**-30],
    "smallest subnormal": [2.0**-149],
    "minus smallest subnormal": [-(2.0**-149)],
    "smallest normal": [2.0**-126],
    "scale 2^-127": [2.0**-119, 2.0**-125],
    "Inf": [math.inf, 1.0],
    "minus Inf": [1.0, -math.inf],
    "NaN": [math.nan, 1.0],
}
# torchao multiplies by 2^126 (rceil: by 1) where the scale is 2^-127, keeps Inf as the largest number, and (but for
# rceil) keeps the finite elements beside a NaN. A lone subnormal is too small for the multiplier to show.
DIFFERENT = {"smallest normal", "scale 2^-127", "Inf", "minus Inf", "NaN"}


@pytest.mark.parametrize(
    "scaling, different", [("floor", DIFFERENT), ("rceil", DIFFERENT - {"NaN"}), ("even", DIFFERENT)]
)
def test_mxfp8_edges(scaling, different):
    x = torch.zeros(len(EDGES), 32)
    for row, values in zip(x, EDGES.values()):
        row[: len(values)] = torch.tensor(values)
    found, _ = differing(x, scaling, torch.float8_e4m3fn)
    assert {name for name, differs in zip(EDGES, found[:, 0].tolist()) if differs} == (
        DIFFERENT - {"NaN"} if scaling == "rceil" else DIFFERENT
    )


def test_mxfp8_rceil_beside_powers_of_two():
    """Next to 448 * 2^k torchao misses the scale of some amaxes, those whose log2 is whole when rounded to float32.
    Ours is the smallest power of two not below amax * float32(1 / 448), in exact arithmetic, for all of them."""
    middle = torch.exp2(torch.arange(-100.0, 110)) * 448
    ulps = torch.arange(-64, 65, dtype=torch.int32)
    amax = (middle.view(torch.int32)[:, None] + ulps).view(torch.float32)
    x = torch.zeros(*amax.shape, 32)
    x[..., 0] = amax
    found, scale = differing(x.flatten(0, 1), "rceil", torch.float8_e4m3fn)
    found, scale = found.view(amax.shape), scale.view(amax.shape)
    exponent = (amax.double() / 448).log2()
    whole = exponent.round()
    spacing = torch.from_numpy(np.spacing(whole.abs().float().clamp_min(0.5).numpy()))
    assert found[:, ulps.abs() <= 8].float().mean() > 0.3
    assert not (found & ((exponent - whole).abs() > spacing)).any()
    product = amax * torch.tensor(0x3B124925, dtype=torch.int32).view(torch.float32)
    for d, byte in zip(product.flatten().tolist(), scale.flatten().tolist()):
        assert Fraction(2) ** (byte - 128) < Fraction(d) <= Fraction(2) ** (byte - 127)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def test_fp4_elements():
    """The same codes for every float32 near a tie and a sample of all that are not NaN; packed and unpacked."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).view(torch.int32)
    near = (ties[:, None] + torch.arange(-1000, 1001)).flatten().view(torch.float32)
    sample = torch.randint(0, 0x7F800001, (1 << 18,), dtype=torch.int32).view(torch.float32)
    values = torch.cat([near, sample, torch.tensor([0.0, math.inf])])
    values = torch.cat([values, -values])
    codes = fp4.nearest(values)
    assert torch.equal(codes, f32_to_f4_unpacked(values))
    packed = fp4.pack(codes)
    assert torch.equal(packed, pack_uint4(codes))
    assert torch.equal(fp4.values(packed), f4_unpacked_to_f32(unpack_uint4(packed)))


@pytest.mark.parametrize("exponent", [-20, 0, 7])
def test_nvfp4_bytes(exponent):
    """torchao's format for inference takes amax / 6 / per_tensor_scale and keeps scales at or above 2^-6. With an amax
    of 2688 * 2^k both formats scale the tensor by a power of two, so for bfloat16 that bound is the only difference."""
    squares = torch.randint(-14, 7, (32, 16)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = torch.randn(512, 256) * torch.exp2(squares)
    x = x.clamp_(-2600, 2600).bfloat16()
    x[100, 77] = -2688.0
    x *= 2.0**exponent
    c = tgl.group_quantize(x, one_group(512), format="nvfp4")
    per_tensor = torch.tensor(2.0**exponent)
    for values, data, scale in ((x, c.data, c.scale), (x.t().contiguous(), c.columnwise_data, c.columnwise_scale)):
        other_scale, other_data = nvfp4_quantize(values, per_tensor_scale=per_tensor)
        other_scale = other_scale.view(torch.uint8)
        bounded = scale < 0x08
        assert 100 < bounded.sum() < 5000
        assert torch.equal(torch.where(bounded, 0x08, scale), other_scale)
        differs = (data != other_data).unflatten(1, (-1, 8)).any(-1)
        assert not (differs & ~bounded).any()


def test_hadamard_transform():
    """The product with torchao's matrix, in float64: exact, since the values of a run span less than 2^12."""
    x = (torch.randint(-255, 256, (64, 16, 8)) * torch.exp2(torch.randint(-60, 60, (64, 1, 1)))).bfloat16()
    signs = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    matrix = get_rht_matrix(signs, torch.device("cpu"), torch.float32, 16).double()
    expected = torch.einsum("rik,ij->rjk", x.double(), matrix).bfloat16()
    assert torch.equal(fp4.hadamard(x), expected)


# --- scale layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 4), (130, 5), (1, 1), (300, 64)])
def test_blocked_matrix(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(placement.to_blocked(scales), to_blocked(scales).flatten())


@pytest.mark.parametrize("sizes", [(5, 0, 130, 66), (128, 256), (0, 0, 1), (77,)])
def test_torch_layout_of_rows(sizes):
    """Each group blocked, one after the other; torchao needs whole tiles of columns and lets no tail in."""
    routing = GroupSizes("", sizes, sum(sizes))
    scales = torch.randint(0, 256, (routing.rows, 8), dtype=torch.uint8)
    expected, _ = torchao_blocked.torch_to_blocked_2d_M_groups(scales, routing.ends())
    result = tgl.to_torch_scale_layout(scales, routing.ends(), shape=(routing.rows, 256), format="mxfp8")
    assert torch.equal(result, expected)


@pytest.mark.parametrize("sizes", [(32, 0, 160, 64), (128, 256), (0, 0, 32)])
def test_torch_layout_of_columns(sizes):
    """Groups along the contraction, of whole blocks, which is all that torchao takes."""
    routing, k = GroupSizes("", sizes, sum(sizes)), 70
    scales = torch.randint(1, 256, (k, routing.rows // 32), dtype=torch.uint8)
    expected, _ = torchao_blocked.torch_to_blocked_2d_K_groups(scales, routing.ends() // 32)
    x = torch.zeros(routing.rows, k)
    compact = tgl.group_quantize(x, routing.ends(), format="mxfp8", rowwise=False).columnwise_scale
    for g, segment in enumerate(routing.segments()):
        first, blocks = 4 * (segment.start // 128 + g), slice(segment.start // 32, segment.stop // 32)
        compact[first : first + blocks.stop - blocks.start] = scales[:, blocks].t()
    result = tgl.to_torch_scale_layout(compact, routing.ends(), shape=x.shape, format="mxfp8", columnwise=True)
    assert torch.equal(result, expected)


def test_torch_layout_of_weights():
    scales = torch.randint(0, 256, (3, 130, 6), dtype=torch.uint8)
    result = tgl.to_torch_scale_layout(scales, None, shape=(3, 130, 192), format="mxfp8")
    assert torch.equal(result, torchao_blocked.torch_to_blocked_per_group_3d(scales))
