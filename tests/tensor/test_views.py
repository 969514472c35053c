"""Groups as views: the bytes of a group quantised on its own, in the memory of the whole."""

import pytest
import torch

import tgl
from tests.tensor.cases import MATRICES, ROWS, arguments, assert_same_bytes, rows, shares_memory
from tgl.meta.formats import FORMATS

SIZES = (3, 0, 40, 1, 128, 129, 16)


@pytest.mark.parametrize("case", ROWS)
def test_rows(case):
    _, offs, t = rows(case, SIZES)
    parts = t.split_host()
    assert [p.shape for p in parts] == [(n, 96) for n in SIZES]
    for g, (part, size) in enumerate(zip(parts, SIZES)):
        start = int(offs[g]) - size
        assert part.offs is None
        for name, component in part.parts().items():
            assert shares_memory(component, getattr(t, name)), name
        for columnwise in (False, True) if case != "dense" else (False,):
            expected = t.dequantize(torch.float32, columnwise=columnwise)[start : start + size]
            assert torch.equal(part.dequantize(torch.float32, columnwise=columnwise), expected), (g, columnwise)


@pytest.mark.parametrize("case", [c for c in ROWS if c != "dense"])
def test_rows_have_the_bytes_of_a_group_alone(case):
    x, offs, t = rows(case, SIZES)
    for g, (part, size) in enumerate(zip(t.split(SIZES), SIZES)):
        alone = tgl.quantize(x[int(offs[g]) - size : int(offs[g])], None, **arguments(case, columnwise=size % 2 == 0))
        components = part.components()
        for name, actual, expected in zip(components._fields, components, alone.components()):
            if not expected.numel():
                continue
            if actual.shape != expected.shape:  # E2M1 in whole blocks
                assert FORMATS[t.format].per_byte == 2
                assert name == "columnwise_data"
                assert not actual[..., expected.shape[-1] :].any()
                actual = actual[..., : expected.shape[-1]]
            assert_same_bytes(actual, expected)


def test_rows_after_a_hadamard_transform():
    _, offs, t = rows("nvfp4", SIZES, rht=True)
    whole = t.dequantize(torch.float32, columnwise=True)
    for part, end, size in zip(t.split_host(), offs.tolist(), SIZES):
        assert torch.equal(part.dequantize(torch.float32, columnwise=True), whole[end - size : end])


@pytest.mark.parametrize("case", MATRICES)
def test_a_stack(case):
    w = torch.randn(3, 32, 64)
    t = tgl.quantize(w, None, **arguments(case))
    for parts in (t.split(), t.unbind(), list(t), [t[0], t[-2], t.select(0, 2)]):
        assert len(parts) == 3
        for g, part in enumerate(parts):
            assert_same_bytes(part, tgl.quantize(w[g], None, **arguments(case)))
            assert all(shares_memory(c, getattr(t, name)) for name, c in part.parts().items())
    assert_same_bytes(torch.stack(t.split()), t)
    new = torch.randn(32, 64)
    t.split()[1].quantize_(new)
    assert_same_bytes(t, tgl.quantize(torch.stack([w[0], new, w[2]]), None, **arguments(case)))


@pytest.mark.parametrize("case", MATRICES)
def test_a_list(case):
    matrices = [torch.randn(n, k) for n, k in ((32, 64), (6, 130))]
    t = tgl.quantize(matrices, None, **arguments(case))
    new = torch.randn(6, 130)
    t.split()[1].quantize_(new)
    assert_same_bytes(t, tgl.quantize([matrices[0], new], None, **arguments(case)))


def test_views_carry_no_gradient():
    x = torch.randn(2, 4, 32, requires_grad=True)
    assert not any(part.requires_grad for part in tgl.quantize(x, None, "mxfp8").split())


def test_rows_are_read_only():
    _, _, t = rows("fp8_tensor")
    with pytest.raises(ValueError, match=r"`self` must be made of contiguous components .* columnwise_data with str"):
        t.split_host()[2].quantize_(torch.zeros(40, 96))


@pytest.mark.parametrize("copy", [torch.clone, torch.empty_like, lambda t: t.to(torch.bfloat16)])
def test_a_copy_of_rows_can_be_written(copy):
    x, offs = torch.randn(48, 300), torch.tensor([3, 48], dtype=torch.int32)
    part = copy(tgl.quantize(x, offs, "fp8_block").split_host()[1])
    new = torch.randn(45, 300)
    part.quantize_(new)
    wanted = tgl.quantize(new, None, "fp8_block")
    for columnwise in (False, True):
        assert torch.equal(part.dequantize(columnwise=columnwise), wanted.dequantize(part.dtype, columnwise=columnwise))


@pytest.mark.parametrize("options", [{"format": "nvfp4"}, {"format": "mxfp8", "scale_layout": "blocked"}])
def test_rows_in_whole_blocks_are_no_stack(options):
    """A stack would turn rows past a group's last one into rows of a matrix."""
    t = tgl.quantize(torch.randn(5, 64), torch.tensor([2, 4], dtype=torch.int32), **options)
    with pytest.raises(NotImplementedError, match="stack"):
        torch.stack(t.split_host())


def test_sizes_that_do_not_fit():
    _, _, t = rows("mxfp8")
    with pytest.raises(ValueError, match=r"split: `sizes` must be given for rows in groups.*split_host"):
        t.split()
    for sizes in ((3, 0, 40), (3, 0, 40, 6), (3, 0, 40, -1)):
        with pytest.raises(ValueError, match="`sizes` must be 4 sizes that add up to 48 at most, but got"):
            t.split(sizes)
    with pytest.raises(ValueError, match="`sizes` must be None for matrices"):
        tgl.quantize(torch.ones(2, 4, 32), None, "mxfp8").split([2])
    with pytest.raises(ValueError, match="`self` must be a stack or a list of matrices"):
        tgl.quantize(torch.ones(4, 32), None, "mxfp8").split()
