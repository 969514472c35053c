"""DeepGEMM's grouped products, on operands in its layout.

Groups are padded to multiples of 128 rows, scales are column-major as its TMA loads want them, and weight gradients
read one K-major block per group. All of this is made beforehand and in no arm's time; the padding is in its time. Its
kernels are compiled when they are first called, by nvcc.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.compared import Agreeing, Prepared

UNIT = 128  # rows of a group are a multiple of it
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
Wanted = Callable[[], Tensor]
Scaled = tuple[Tensor, Tensor]


def installed() -> bool:
    return importlib.util.find_spec("deep_gemm") is not None


def arms(call: Agreeing) -> dict[str, Agreeing]:
    """Return the arm of DeepGEMM, where it is installed."""
    return {"deepgemm": call} if installed() else {}


class Padded:
    """Rows in groups that are padded.

    Attributes:
        sizes: padded rows of each group; ``counts`` the same as int32 ``[G]``.
        places: int64 ``[R]``, where each row lies.
        index: int32 ``[padded rows]``, the group of each place, -1 for one without a row.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self.sizes = [-(-size // UNIT) * UNIT for size in sizes]
        index = torch.full((sum(self.sizes),), -1, dtype=torch.int32)
        start = 0
        for g, (size, room) in enumerate(zip(sizes, self.sizes)):
            index[start : start + size] = g
            start += room
        self.places, self.index = index.ge(0).nonzero().view(-1).to(device), index.to(device)
        self.counts = torch.tensor(self.sizes, dtype=torch.int32, device=device)

    def spread(self, rows: Tensor) -> Tensor:
        """Return the rows at their places, zeros in between."""
        out = rows.new_zeros(len(self.index), *rows.shape[1:])
        return out.index_copy_(0, self.places, rows)


def forward(sizes: Sequence[int], a: Tensor, b: Tensor, wanted: Wanted) -> Agreeing:
    """The product of rows ``[R, K]`` and ``[G, N, K]`` in bfloat16."""

    def prepare() -> Prepared:
        import deep_gemm

        padded, matrices = Padded(sizes, a.device), b.contiguous()
        rows, out = padded.spread(a), a.new_empty(sum(padded.sizes), b.shape[1])

        def call() -> None:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, matrices, out, padded.index)

        return call, lambda: out[padded.places]

    return Agreeing(prepare, wanted)


def scaled_forward(sizes: Sequence[int], a: Scaled, b: Scaled, wanted: Wanted) -> Agreeing:
    """The product of FP8 rows and matrices in blocks, into bfloat16.

    Args:
        a: codes ``[R, K]`` and scales ``[R, K / 128]``.
        b: codes ``[G, N, K]`` and scales ``[G, N / 128, K / 128]``.
    """

    def prepare() -> Prepared:
        import deep_gemm

        padded = Padded(sizes, a[0].device)
        codes = padded.spread(a[0].view(torch.uint8)).view(FP8)
        rows = codes, deep_gemm.get_mn_major_tma_aligned_tensor(padded.spread(a[1].contiguous()))
        matrices = b[0], b[1].contiguous()
        out = torch.empty(len(codes), b[0].shape[1], dtype=BF16, device=codes.device)

        def call() -> None:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, matrices, out, padded.index)

        return call, lambda: out[padded.places]

    return Agreeing(prepare, wanted)


def accumulate(sizes: Sequence[int], a: Tensor, b: Tensor, wanted: Wanted) -> Agreeing:
    """The gradient ``[G, M, N]`` of rows ``[R, M]`` and ``[R, N]`` in bfloat16, added to float32."""

    def prepare() -> Prepared:
        import deep_gemm

        padded = Padded(sizes, a.device)
        rows = padded.spread(a), padded.spread(b)
        out = torch.zeros(len(sizes), a.shape[1], b.shape[1], device=a.device)

        def call() -> None:
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(*rows, out, padded.sizes, padded.counts, out)

        return call, lambda: out

    return Agreeing(prepare, wanted)


def scaled_accumulate(
    sizes: Sequence[int], starts: tuple[Sequence[int], Sequence[int]], a: Scaled, b: Scaled, wanted: Wanted
) -> Agreeing:
    """The gradient of FP8 columns in blocks of 128 rows, added to float32.

    Args:
        starts: of every group, its first column in the codes and its first block in the scales.
        a, b: codes ``[features, columns]`` and scales ``[blocks, features]``.
    """

    def prepare() -> Prepared:
        import deep_gemm

        padded = Padded(sizes, a[0].device)

        def operand(codes: Tensor, scales: Tensor) -> Scaled:
            columns, parts, factors = codes.view(torch.uint8), [], []
            for size, room, column, block in zip(sizes, padded.sizes, *starts):
                parts.append(columns.new_zeros(len(columns), room))
                parts[-1][:, :size] = columns[:, column : column + size]
                factors.append(scales[block : block + room // UNIT])
            flat = torch.cat([part.flatten() for part in parts]).view(FP8)
            return flat, deep_gemm.get_mn_major_tma_aligned_tensor(torch.cat(factors).t())

        operands = operand(*a), operand(*b)
        out = torch.zeros(len(sizes), len(a[0]), len(b[0]), device=a[0].device)

        def call() -> None:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, out, padded.sizes, padded.counts, out)

        return call, lambda: out

    return Agreeing(prepare, wanted)
