"""OpenAI's triton_kernels: products of bfloat16 rows and MXFP4 matrices, in its layouts for Hopper.

Layouts and the metadata of ragged rows are made beforehand and in no arm's time, as its own benchmarks do.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from harness.compared import Agreeing, Prepared
from harness.deep_gemm import Wanted

FEW_TOKENS = 512  # up to which its layout of scales is that of 4 warps


def installed() -> bool:
    return importlib.util.find_spec("triton_kernels") is not None


def forward(a: Tensor, codes: Tensor, scales: Tensor, counts: Tensor, tokens: int, wanted: Wanted) -> Agreeing:
    """The product of rows ``[R, K]`` of groups and ``[G, N, K]``.

    Args:
        codes: uint8 ``[G, N, K / 2]``.
        scales: uint8 ``[G, N, K / 32]``.
        counts: int32 ``[G]``, rows of each group.
        tokens: by which its layout of scales is chosen.
    """

    def prepare() -> Prepared:
        from triton_kernels.matmul import FlexCtx, PrecisionConfig, matmul
        from triton_kernels.numerics import InFlexData
        from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        matrices = wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4)
        matrices = convert_layout(matrices, layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2))
        warps = 4 if tokens <= FEW_TOKENS else 8
        form = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=warps)
        config = PrecisionConfig(
            flex_ctx=FlexCtx(rhs_data=InFlexData()),
            b_mx_scale=convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), form),
            b_microblock_size=32,
            out_dtype=torch.bfloat16,
        )
        rows = make_ragged_tensor_metadata(counts, len(a))
        out = a.new_empty(len(a), codes.shape[1])

        def call() -> None:
            matmul(a, matrices, None, a_ragged_metadata=rows, precision_config=config, c=out)

        return call, lambda: out

    return Agreeing(prepare, wanted)
