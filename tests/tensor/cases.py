"""Formats and ways to compare that the tests of GroupedTensor share."""

import torch

import tgl
from tests.memory import same_bytes
from tgl.meta.formats import FORMATS
from tgl.tensor import GroupedTensor

CASES = {
    "dense": {},
    "mxfp8": {},
    "mxfp8-blocked": {"scale_layout": "blocked"},
    "mxfp8-e5m2-floor": {"dtype": torch.float8_e5m2, "scaling": "floor"},
    "fp8_tensor": {},
    "fp8_block": {},
    "nvfp4": {},
    "nvfp4-blocked": {"scale_layout": "blocked"},
    "mxfp4": {},
    "mxfp4-blocked-even": {"scale_layout": "blocked", "scaling": "even"},
}
assert {"dense", *FORMATS} == {case.partition("-")[0] for case in CASES}
ROWS = list(CASES)
QUANTIZED = [name for name in CASES if name != "dense"]
MATRICES = [*CASES, "fp8_block-2d", "nvfp4-2d"]
CASES |= {"fp8_block-2d": {"block_2d": True}, "nvfp4-2d": {"block_2d": True}}


def arguments(case: str, **more) -> dict:
    """``format`` and options of a case."""
    return {"format": case.partition("-")[0], **CASES[case], **more}


def rows(case: str, sizes=(3, 0, 40, 1), tail: int = 4, k: int = 96, dtype=torch.bfloat16, **more):
    """Rows in groups with NaN in the tail, and what they become."""
    x = torch.randn(sum(sizes) + tail, k).to(dtype)
    x[sum(sizes) :] = float("nan")
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x, offs, tgl.quantize(x, offs, **arguments(case, **more))


def assert_same_bytes(actual, expected) -> None:
    """The same shapes, dtypes and bytes; of GroupedTensors, of everything that they are made of."""
    if isinstance(expected, GroupedTensor):
        assert isinstance(actual, GroupedTensor)
        assert actual.same_structure(expected), (actual, expected)
        assert actual.dtype == expected.dtype
        for name, part in expected.parts().items():
            assert_same_bytes(getattr(actual, name), part)
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert same_bytes(actual, expected)


def shares_memory(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether two plain tensors have one storage."""
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
