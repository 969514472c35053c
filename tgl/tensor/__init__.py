"""``GroupedTensor``: the components of a quantised (or dense) operand as one tensor, with one class per format.

Users, ``tgl.nn`` and ``tgl.integrations`` import the names in ``__all__``. The package builds on ops and imports no
modules of ``tgl.nn``.
"""

from .formats import (
    DenseGroupedTensor,
    FP8BlockGroupedTensor,
    FP8TensorGroupedTensor,
    MXFP4GroupedTensor,
    MXFP8GroupedTensor,
    NVFP4GroupedTensor,
)
from .grouped_tensor import GroupedTensor
from .quantize import quantize
from .saving import save_for_backward, saved_tensors

__all__ = [
    "DenseGroupedTensor",
    "FP8BlockGroupedTensor",
    "FP8TensorGroupedTensor",
    "GroupedTensor",
    "MXFP4GroupedTensor",
    "MXFP8GroupedTensor",
    "NVFP4GroupedTensor",
    "quantize",
    "save_for_backward",
    "saved_tensors",
]
