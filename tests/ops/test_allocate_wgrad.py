"""``allocate_wgrad``: one packed allocation whose every slot starts on the alignment."""

import pytest
import torch

import tgl
from tgl.testing.samples import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alignment", [8, 16, 64, 256, 4096])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 1), (128, 64), (5, 3, 7), (0, 4), (4, 0)], ids=str)
def test_alignment(dtype, alignment, shape):
    for groups in (0, 1, 2, 5):
        packed = tgl.allocate_wgrad(groups, shape, dtype, alignment=alignment)
        assert packed.shape == (groups, *shape)
        assert packed.dtype == dtype
        assert packed.storage_offset() == 0
        slots = packed.unbind()
        for slot in slots:
            assert slot.data_ptr() % alignment == 0
            assert slot.is_contiguous()
        if groups and packed.numel():
            assert packed.stride(0) * dtype.itemsize < slots[0].numel() * dtype.itemsize + alignment
            for value, slot in enumerate(slots):
                slot.fill_(value)
            assert all((slot == value).all() for value, slot in enumerate(slots))


def test_slots_keep_the_allocation_alive():
    slot = tgl.allocate_wgrad(3, (5, 7), torch.float32, alignment=4096)[1].fill_(2)
    del_me = [torch.full((4096,), 9.0) for _ in range(8)]
    assert (slot == 2).all()
    assert del_me


def test_takes_a_gradient_through_out_and_accumulate():
    offs = torch.tensor([2, 4], dtype=torch.int32)
    a, dy = torch.randn(4, 3), torch.randn(4, 5)
    packed = tgl.allocate_wgrad(2, (3, 5), torch.float32)
    assert packed.stride(0) > 15
    tgl.grouped_gemm_wgrad(a, dy, offs, out=packed)
    assert torch.equal(packed, tgl.grouped_gemm_wgrad(a, dy, offs))
    tgl.grouped_gemm_wgrad_accumulate_(a, dy, offs, packed)
    torch.testing.assert_close(packed, 2 * tgl.grouped_gemm_wgrad(a, dy, offs))


def test_default_device_and_meta():
    with torch.device("meta"):
        assert tgl.allocate_wgrad(2, (3,), torch.float32).device.type == "meta"
        assert tgl.allocate_wgrad(2, (3,), torch.float32, "cpu", 4096).device.type == "cpu"
    assert tgl.allocate_wgrad(2, (3,), torch.float32).device.type == "cpu"


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"num_groups": -1}, ValueError, "`num_groups` must be at least 0, but got -1"),
        ({"shape": ()}, ValueError, "`shape` must be the shape of one weight gradient"),
        ({"shape": (3, -1)}, ValueError, "`shape` must be free of negative sizes"),
        ({"dtype": torch.int32}, TypeError, "`dtype` must be a floating dtype, but got torch.int32"),
        ({"alignment": 24}, ValueError, "`alignment` must be a power of two, at least one element, but got 24"),
        ({"alignment": 0}, ValueError, "`alignment` must be a power of two"),
        ({"alignment": -16}, ValueError, "`alignment` must be a power of two"),
        ({"alignment": 2}, ValueError, "`alignment` must be a power of two, at least one element, but got 2"),
    ],
    ids=str,
)
def test_bad_arguments(change, error, message):
    arguments = {"num_groups": 2, "shape": (3, 4), "dtype": torch.float32, **change}
    with pytest.raises(error, match=f"tgl::allocate_wgrad: {message}"):
        tgl.allocate_wgrad(**arguments)


@pytest.mark.parametrize("alignment", [16, 256, 1024])
def test_wgrad_on_an_alignment(alignment):
    """Values of the contiguous form in the slots of ``allocate_wgrad``."""
    offs = torch.tensor([4, 4, 7], dtype=torch.int32)
    a, b = torch.randn(9, 3), torch.randn(9, 5)
    packed = tgl.grouped_gemm_wgrad(a, b, offs, alignment=alignment)
    assert torch.equal(packed, tgl.grouped_gemm_wgrad(a, b, offs))
    assert packed.stride() == tgl.allocate_wgrad(3, (3, 5), torch.float32, alignment=alignment).stride()
    assert all(slot.data_ptr() % alignment == 0 for slot in packed)
    torch.library.opcheck(torch.ops.tgl.grouped_gemm_wgrad.default, (a, b, offs), {"alignment": alignment})


def test_bad_alignment_of_wgrad():
    offs, a = torch.tensor([2], dtype=torch.int32), torch.randn(2, 3)
    with pytest.raises(ValueError, match="tgl::grouped_gemm_wgrad: `alignment` must be a power of two"):
        tgl.grouped_gemm_wgrad(a, a, offs, alignment=24)
    with pytest.raises(ValueError, match="`alignment` must be None when `out` is given, but got 16"):
        tgl.grouped_gemm_wgrad(a, a, offs, alignment=16, out=torch.empty(1, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_overwriting_main_grad(dtype, main_dtype):
    """The rounding of the plain op, NaN gone, and zeros for an empty group."""
    if dtype == torch.float32 and main_dtype == torch.bfloat16:
        main_dtype = torch.float32
    offs = torch.tensor([4, 4, 7], dtype=torch.int32)
    a, b = torch.randn(9, 3).to(dtype), torch.randn(9, 5).to(dtype)
    main_grad = tgl.allocate_wgrad(3, (3, 5), main_dtype).fill_(float("nan"))
    tgl.grouped_gemm_wgrad_accumulate_(a, b, offs, main_grad, overwrite=True)
    assert torch.equal(main_grad, tgl.grouped_gemm_wgrad(a, b, offs, out_dtype=main_dtype))
    assert not main_grad[1].any()
    torch.library.opcheck(
        torch.ops.tgl.grouped_gemm_wgrad_accumulate_.default, (a, b, offs, main_grad), {"overwrite": True}
    )
