"""Arguments of sample calls that follow from others: tables of rows, scores, quantised components, lists.

Each function is a ``Signature.derive``: it gets the sample, the other arguments and the value of the tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from ..meta.formats import E4M3
from .samples import SampleInput
from .scaled_samples import row_scaled_operands

Made = Mapping[str, Tensor | None]


def equal_scores(sample: SampleInput, made: Made, tail: float) -> dict[str, Tensor]:
    """Return logits ``[T, E]`` that are all equal, and of a backward the top-k slots and gradient of their weights.

    Exponentials of other logits differ in their last bits from device to device.
    """
    rows, experts = sample.routing.rows, sample.signature.dimensions["E"]
    top_k_index = torch.tensor([[1, 3]], dtype=torch.int32, device="cpu").repeat(rows, 1)
    found = {
        "grad_weights": sample._integers("grad_weights", (rows, 2)).float(),
        "logits": torch.zeros(rows, experts, dtype=sample.dtype, device="cpu"),
        "top_k_index": top_k_index,
    }
    return {name: found[name].to(sample.device) for name in made}


def converted_scale(sample: SampleInput, made: Made, tail: float) -> dict[str, Any]:
    """Return rowwise scales of rows in the layout that a conversion reads, and the shape of the rows.

    ``scale_to_layout`` reads compact scales, ``scale_from_layout`` those of the given layout.
    """
    shape = sample.routing.rows, sample.signature.dimensions["K"]
    x = sample._integers("x", shape).float().to(sample.device)
    back = not sample.signature.text.startswith("scale[T")
    layout = sample.options["layout"] if back else "compact"
    parts = torch.ops.tgl.group_quantize(x, made["offs"], format=sample.options["format"], scale_layout=layout)
    return {"scale": parts[1], "shape": shape}


def aten_operands(sample: SampleInput, made: Made, tail: float) -> dict[str, Tensor]:
    """Return the operands of ``aten::_scaled_grouped_mm``: rows, and matrices ``[G, K, N]`` that are K-major."""
    own = row_scaled_operands(sample, made, tail)
    return {
        "self": own["a"],
        "mat2": own["b"].float().to(E4M3).transpose(1, 2),
        "scale_a": own["a_scale"],
        "scale_b": own["b_scale"],
    }


def aten_lists(sample: SampleInput, made: Made, tail: float) -> dict[str, Any]:
    """Return the operands of ``aten::_scaled_grouped_mm_v2``, whose scales and their kinds are lists."""
    derived: dict[str, Any] = aten_operands(sample, made, tail)
    for name in "ab":
        derived[f"scale_{name}"] = [derived[f"scale_{name}"]]
        derived[f"recipe_{name}"], derived[f"swizzle_{name}"] = [ScalingType.RowWise.value], [0]
    return derived


def stash(sample: SampleInput, made: Made, tail: float) -> dict[str, Any]:
    """Return a tensor to stash, the state of an empty stash and its buffers of two places."""
    source = sample._integers("source", (sample.routing.rows, sample.signature.dimensions["K"])).to(sample.dtype)
    source = source.to(sample.device)
    state = torch.zeros(2, dtype=torch.int64, device=sample.device)
    return {"sources": [source], "state": state, "buffers": [source.new_zeros(2, *source.shape)]}
