"""Dense grouped ops beside what torch and quack offer for them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tgl
from harness import deep_gemm
from harness.gates import relative_error
from harness.shapes import Shape
from tests.kernel_cases import ends, gradient, product, row_sums, spans

DTYPE = torch.bfloat16
FIXED = {"dynamic_scheduler": False, "tuned": False}  # quack's scheduler
Arms = dict[str, Callable[[], object]]


def quack() -> Callable[..., Any] | None:
    """Its GEMM, where it is installed."""
    with contextlib.suppress(Exception):  # it may also fail to import beside another version of the DSL
        from quack.gemm_interface import gemm

        return gemm
    return None


class Problem(abc.ABC):
    """Operands of one op and its arms. Weights are ``[G, columns, depth]``.

    Attributes:
        out, theirs: what tgl and what others write.
        fill, per_group: as ``harness.gates.Problem`` has them.
    """

    fill = float("nan")
    per_group = True
    out: Tensor

    def __init__(self, shape: Shape, sizes: Sequence[int], device: str = "cuda"):
        self.shape, self.sizes = shape, sizes
        self.x = torch.randn(shape.rows, shape.depth, device=device, dtype=DTYPE)
        self.dy = torch.randn(shape.rows, shape.columns, device=device, dtype=DTYPE)
        self.w = torch.randn(shape.groups, shape.columns, shape.depth, device=device, dtype=DTYPE) / 16
        self.offs = ends(sizes, device)
        self.prepare()
        self.theirs = torch.zeros_like(self.out)

    @abc.abstractmethod
    def prepare(self) -> None:
        """Choose the operands and make ``out``."""

    @abc.abstractmethod
    def tgl(self) -> None:
        """The op, into ``out``."""

    @abc.abstractmethod
    def loop(self) -> None:
        """torch's kernels, group by group, into ``theirs``."""

    @abc.abstractmethod
    def rivals(self) -> Arms:
        """The arms of others."""

    @abc.abstractmethod
    def oracle(self) -> Tensor:
        """The result in float32, from operands widened to it."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Return the bytes that must be moved at least once."""

    @property
    def flops(self) -> float:
        return 2.0 * self.shape.rows * self.shape.depth * self.shape.columns

    def rate(self, milliseconds: float) -> str:
        return f"{self.flops / milliseconds / 1e9:5.0f} TF/s"

    def route(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.offs.copy_(ends(sizes))

    def per_group_mm(self, wanted: Tensor) -> tuple[str, float]:
        """The error of torch's kernels."""
        self.theirs.zero_()
        self.loop()
        return "torch.mm", relative_error(self.theirs, wanted)


class _Gemm(Problem):
    a: Tensor
    b: Tensor

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.out.nbytes

    def quack(self, a: Tensor, side: str) -> Arms:
        """The arm of quack, whose offsets begin with 0."""
        gemm = quack()
        if gemm is None:
            return {}

        def run() -> None:
            starts = {f"cu_seqlens_{side}": torch.nn.functional.pad(self.offs, (1, 0))}
            gemm(a, self.b, out=self.theirs, **starts, **FIXED)

        return {"quack": run}


class Forward(_Gemm):
    """``grouped_gemm`` of rows and transposed weights."""

    per_group = False

    def prepare(self) -> None:
        self.a, self.b = self.x, self.w.transpose(1, 2)
        self.out = self.a.new_empty(self.shape.rows, self.b.shape[2])

    def tgl(self) -> None:
        tgl.grouped_gemm(self.a, self.b, self.offs, out=self.out)

    def loop(self) -> None:
        for g, rows in spans(self.sizes):
            torch.mm(self.a[rows], self.b[g], out=self.theirs[rows])

    def oracle(self) -> Tensor:
        return product(self.a, self.b, self.sizes, dtype=torch.float32)

    def rivals(self) -> Arms:
        return {
            "torch": lambda: torch._grouped_mm(self.a, self.b, offs=self.offs),
            "loop": self.loop,
            "dense": lambda: torch.mm(self.a, self.b[0]),
            **self.quack(self.a, "m"),
            **deep_gemm.arms(deep_gemm.forward(self.sizes, self.a, self.b.transpose(1, 2), self.oracle)),
        }


class InputGradient(Forward):
    """``grouped_gemm`` of gradients and weights."""

    def prepare(self) -> None:
        self.a, self.b = self.dy, self.w
        self.out = self.a.new_empty(self.shape.rows, self.b.shape[2])


class WeightGradient(_Gemm):
    """``grouped_gemm_wgrad``."""

    dtype = DTYPE

    def prepare(self) -> None:
        self.a, self.b = self.dy, self.x
        self.out = torch.zeros(self.w.shape, device=self.w.device, dtype=self.dtype)

    def tgl(self) -> None:
        tgl.grouped_gemm_wgrad(self.a, self.b, self.offs, out=self.out)

    def loop(self) -> None:
        for g, rows in spans(self.sizes):
            torch.mm(self.a[rows].t(), self.b[rows], out=self.theirs[g])

    def oracle(self) -> Tensor:
        return gradient(self.a, self.b, self.sizes, dtype=torch.float32)

    def rivals(self) -> Arms:
        return {
            "torch": lambda: torch._grouped_mm(self.a.t(), self.b, offs=self.offs),
            "loop": self.loop,
            "dense": lambda: torch.mm(self.a.t(), self.b),
            **self.quack(self.a.t(), "k"),
        }


class Accumulation(WeightGradient):
    """``grouped_gemm_wgrad_accumulate_``."""

    dtype = torch.float32
    fill = 0.0

    @property
    def bytes(self) -> int:
        return super().bytes + self.out.nbytes

    def tgl(self) -> None:
        tgl.grouped_gemm_wgrad_accumulate_(self.a, self.b, self.offs, self.out)

    def loop(self) -> None:
        for g, rows in spans(self.sizes):
            if rows.stop > rows.start:
                self.theirs[g].add_(torch.mm(self.a[rows].t(), self.b[rows]))

    def rivals(self) -> Arms:
        return {
            "torch": lambda: self.theirs.add_(torch._grouped_mm(self.a.t(), self.b, offs=self.offs)),
            "loop": self.loop,
            "dense": lambda: torch.mm(self.a.t(), self.b),
            **deep_gemm.arms(deep_gemm.accumulate(self.sizes, self.a, self.b, self.oracle)),
        }


class BiasGradient(Problem):
    """``grouped_dbias``; ``copy`` moves as many bytes."""

    flops = 0.0

    def prepare(self) -> None:
        self.out = torch.empty(self.shape.groups, self.shape.columns, device=self.dy.device)

    @property
    def bytes(self) -> int:
        return self.dy.nbytes + self.out.nbytes

    def rate(self, milliseconds: float) -> str:
        return f"{self.bytes / milliseconds / 1e9:6.2f} TB/s"

    def tgl(self) -> None:
        self.out = tgl.grouped_dbias(self.dy, self.offs)

    def loop(self) -> None:
        for g, rows in spans(self.sizes):
            torch.sum(self.dy[rows], 0, dtype=torch.float32, out=self.theirs[g])

    def oracle(self) -> Tensor:
        return row_sums(self.dy, self.sizes, dtype=torch.float32)

    def rivals(self) -> Arms:
        source = torch.empty(self.bytes // 2, dtype=torch.uint8, device=self.dy.device).random_()
        target = torch.empty_like(source)
        return {"loop": self.loop, "copy": lambda: target.copy_(source)}


OPS: dict[str, type[Problem]] = {
    "fprop": Forward,
    "dgrad": InputGradient,
    "wgrad": WeightGradient,
    "accumulate": Accumulation,
    "dbias": BiasGradient,
}
