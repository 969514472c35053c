"""Weight gradients whose groups start anywhere, of operands whose pitch and address alone would suit a tensor map.

Where the tokens of a column lie side by side, a group begins in the middle of 16 bytes.
"""

import itertools

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import column_major, ends, exact, gradient, integers, poisoned, stored
from tgl.testing import emulate

SIZES = (1, 66, 0, 3, 130, 7)  # groups start at rows 0, 1, 67, 67, 70 and 200
ROWS = 216  # 16 bytes in any dtype, and a tail
LAYOUTS = list(itertools.product((True, False), repeat=2))


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def arch(request):
    return request.param


@pytest.mark.parametrize("rows_of_a, rows_of_b", LAYOUTS)
def test_wgrad(arch, rows_of_a, rows_of_b):
    a, b = (poisoned(integers(ROWS, n), SIZES) for n in (72, 40))
    wanted = gradient(a, b, SIZES).bfloat16()
    operands = stored(a, rows_of_a), stored(b, rows_of_b), ends(SIZES)
    assert torch.equal(tgl.grouped_gemm_wgrad(*operands), wanted)
    with emulate(arch):
        assert tgl.explain("grouped_gemm_wgrad", *operands).chosen.device == "cuda"
        assert torch.equal(tgl.grouped_gemm_wgrad(*operands), wanted)
        total = torch.ones(wanted.shape)
        tgl.grouped_gemm_wgrad_accumulate_(*operands, total)
        assert torch.equal(total, 1 + wanted.float())


SCALED = [("sm_90a", "fp8_tensor"), ("sm_90a", "fp8_block"), ("sm_100a", "fp8_tensor"), ("sm_100a", "mxfp8")]


@pytest.mark.parametrize("arch_of_format, format", SCALED)
def test_scaled(arch_of_format, format):
    """Quantised operands have one layout; another one is refused by name, on every device."""
    options = {"format": format} | ({"scale_layout": "blocked"} if format == "mxfp8" else {})
    q, p = (
        tgl.group_quantize(poisoned(exact(ROWS, n), SIZES), ends(SIZES), rowwise=False, **options) for n in (64, 32)
    )
    a, a_scale, b, b_scale = q.columnwise_data, q.columnwise_scale, p.columnwise_data, p.columnwise_scale
    offs = ends(SIZES)
    wanted = tgl.grouped_gemm_scaled_wgrad(a, a_scale, b, b_scale, offs, **options)
    with emulate(arch_of_format):
        assert tgl.explain("grouped_gemm_scaled_wgrad", a, a_scale, b, b_scale, offs, **options).chosen.device == "cuda"
        assert torch.equal(tgl.grouped_gemm_scaled_wgrad(a, a_scale, b, b_scale, offs, **options), wanted)
        for name, operands in (("a", (column_major(a), b)), ("b", (a, column_major(b)))):
            with pytest.raises(ValueError, match=f"`{name}` must be contiguous"):
                tgl.grouped_gemm_scaled_wgrad(operands[0], a_scale, operands[1], b_scale, offs, **options)
