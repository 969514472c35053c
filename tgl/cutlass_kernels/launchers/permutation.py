"""Dispatch of tokens to rows of experts, combine, and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.memory import address
from .. import overlap
from ..permute.tiling import LANES, MOST, PermuteTiling, cut_of
from ..runtime import device
from ..runtime.launcher import Call, Launcher, warm
from ..runtime.names import name
from ..runtime.reach import Reach
from ..runtime.requirements import ALIGNMENT, MAX_ROWS, Need

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = Need("rows", pitch=1, address=1)


class PermutationKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    cut: PermuteTiling
    element: str
    token: str | None
    position: str
    weights: str | None
    tail: bool = True  # whether rows without a token become zeros
    out: str | None = None  # dtype of sums that are not rounded to that of rows


class DispatchCall(NamedTuple):
    """Arguments of ``dispatch``."""

    x: Tensor
    token: Tensor
    position: Tensor
    weights: Tensor | None
    top_k: int
    out: Tensor
    zero_tail: bool = True


class CombineCall(NamedTuple):
    """Arguments of ``combine``."""

    y: Tensor
    position: Tensor
    weights: Tensor | None
    top_k: int
    out: Tensor


class CombineBackwardCall(NamedTuple):
    """Arguments of ``combine_backward``."""

    grad: Tensor
    y: Tensor
    token: Tensor
    position: Tensor
    weights: Tensor
    top_k: int
    dy: Tensor
    dweights: Tensor


class PermutationLauncher(Launcher[Call]):
    """Launcher of a permutation.

    Attributes:
        matrices: the fields with rows of H columns; the first two are tokens and rows, or rows and tokens.
        least: fewest lanes per row.
        most: most top-k slots that are processed at a time.
    """

    matrices: tuple[str, ...]
    least: int = 1
    most: int = MOST
    note = "one launch, one pass over the rows"

    def reject_reason(self, c: Any) -> backends.Reason:
        """Return why the kernel does not take the dtypes or the number of rows, or None."""
        reason = device.packages_reason()
        if reason is not None:
            return reason
        first = getattr(c, self.matrices[0])
        if first.dtype not in DTYPES:
            return f"takes float32, bfloat16 and float16, got {first.dtype}"
        rows = max(c.position.shape[0], *[getattr(c, field).shape[0] for field in self.matrices])
        return f"takes up to {MAX_ROWS} rows, got {rows}" if rows > MAX_ROWS else None

    def plan_key(self, c: Any) -> tuple | None:
        """Return the plan key, which does not depend on the numbers of tokens and rows."""
        addresses = 0
        facts: list[Any] = []
        for field in self.matrices:
            t = getattr(c, field)
            addresses |= t.data_ptr()
            facts += t.dtype, t.stride()
            if 0 in facts[-1]:
                return None
        if not c.position.shape[0] or not warm(t.shape[0], addresses):
            return None
        token = getattr(c, "token", None)
        weights = c.weights if c.weights is None else c.weights.dtype
        facts.append(getattr(c, "zero_tail", None))
        return t.shape[1], c.top_k, token is None or token.dtype, c.position.dtype, weights, *facts

    def key(self, c: Any, arch: str) -> PermutationKey:
        """Return the key of the kernel; the width of accesses follows from where the rows lie."""
        matrices = [getattr(c, field) for field in self.matrices]
        first = matrices[0]
        cut = cut_of(first.shape[1], vector_of(*matrices), c.top_k, self.least, self.most)
        token, tail = name(getattr(c, "token", None)), getattr(c, "zero_tail", True)
        names = name(first), token, name(c.position), name(c.weights)
        return PermutationKey(arch, not first.is_cuda, cut, *names, tail, self.sums(c))

    def sums(self, c: Any) -> str | None:
        """Return the dtype of results, if it differs from that of rows."""
        return None


class DispatchLauncher(PermutationLauncher[DispatchCall]):
    """``out[position[s, j]] = weights[s, j] x[s]``."""

    op = "dispatch"
    call = DispatchCall
    matrices = ("x", "out")
    reach = Reach({"x": ROWS, "out": ROWS}, outputs=("out",), keeps=lambda c: not c.zero_tail)

    def batch_invariant(self, c: DispatchCall) -> bool:
        """Return True: rows are copies, or products of one number each."""
        return True

    def is_empty(self, c: DispatchCall) -> bool:
        """Return whether there are no rows, or no tokens for them."""
        return c.out.numel() == 0 or c.x.shape[0] == 0

    def zero_outputs(self, c: DispatchCall) -> None:
        """Zero the rows, none of which has a token."""
        if c.zero_tail:
            c.out.zero_()

    def build(self, key: PermutationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..permute.kernel import DispatchKernel as Kernel

        return build(key, Kernel(key.cut, key.tail), "rows", "token", "position", "weights", "rows", "overlap")

    def arguments(self, c: DispatchCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.x, c.token, c.position, c.weights, c.out, int(overlap.overlaps(c.position.shape[0]))


class CombineLauncher(PermutationLauncher[CombineCall]):
    """``out[s] = sum over j of weights[s, j] y[position[s, j]]``."""

    op = "combine"
    call = CombineCall
    matrices = ("y", "out")
    most = 10  # all in one batch: two batches of five slots take 1.17 to 1.4 times as long on an H200
    reach = Reach({"y": ROWS, "out": ROWS}, outputs=("out",))

    def sums(self, c: CombineCall) -> str | None:
        """Return the dtype of results: partial sums may be wider than rows, and results narrower."""
        return None if c.out.dtype == c.y.dtype else name(c.out)

    def batch_invariant(self, c: CombineCall) -> bool:
        """Return True: the top-k slots of a token are summed in order, wherever their rows are."""
        return True

    def is_empty(self, c: CombineCall) -> bool:
        """Return whether there are no tokens, or no rows for them."""
        return c.out.numel() == 0 or c.y.shape[0] == 0

    def zero_outputs(self, c: CombineCall) -> None:
        """Write zeros, the sums over no rows."""
        c.out.zero_()

    def build(self, key: PermutationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..permute.kernel import CombineKernel as Kernel

        return build(key, Kernel(key.cut), "rows", "position", "weights", "sums", "overlap")

    def arguments(self, c: CombineCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.y, c.position, c.weights, c.out, int(overlap.overlaps(c.position.shape[0]))


class CombineBackwardLauncher(PermutationLauncher[CombineBackwardCall]):
    """``dy[position[s, j]] = weights[s, j] grad[s]`` and ``dweights[s, j] = grad[s] . y[position[s, j]]``."""

    op = "combine_backward"
    call = CombineBackwardCall
    matrices = ("grad", "y", "dy")
    least = LANES  # a warp sums over all columns of a token
    most = 10  # all in one batch: a second batch would read the gradient again
    reach = Reach({"grad": ROWS, "y": ROWS, "dy": ROWS}, outputs=("dy",))

    def is_empty(self, c: CombineBackwardCall) -> bool:
        """Return whether there are no tokens, rows or columns."""
        return c.grad.numel() == 0 or c.y.numel() == 0

    def zero_outputs(self, c: CombineBackwardCall) -> None:
        """Zero the rows, none of which has a token, and the products with no rows."""
        c.dy.zero_()
        c.dweights.zero_()

    def build(self, key: PermutationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..permute.kernel import CombineBackwardKernel as Kernel

        return build(key, Kernel(key.cut), "rows", "rows", "token", "position", "weights", "rows", "dweights")

    def arguments(self, c: CombineBackwardCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.grad, c.y, c.token, c.position, c.weights, c.dy, c.dweights


def vector_of(*matrices: Tensor) -> int:
    """Return the elements of an access, up to 16 bytes, that divide rows, pitch and addresses of all matrices.

    Elements are those of the first matrix, whose rows are read; wider ones take several accesses of 16 bytes.
    """
    first = matrices[0]
    vector, columns = ALIGNMENT // first.element_size(), first.shape[1]
    for t in matrices:
        size = t.element_size()
        most, low = ALIGNMENT // size, t.stride(0) | address(t) // size
        while columns % vector or low % min(vector, most):
            vector //= 2
    return vector


def build(key: PermutationKey, kernel: Callable, *arguments: str) -> Callable:
    """Compile a permutation kernel with these arguments."""
    import cutlass

    from ..runtime.compiling import compiled, matrix, strided
    from ..runtime.elements import TYPES

    def rows(element: str) -> Any:
        width = min(key.cut.vector * TYPES[element].width // 8, ALIGNMENT)
        return matrix(element, pitch=width, columns=key.cut.vector, align=width)

    def stand_in(argument: str) -> Any:
        if argument == "rows":
            return rows(key.element)
        if argument == "sums":
            return rows(key.out or key.element)
        if argument == "overlap":
            return cutlass.Int32(1)
        if argument == "dweights":
            return matrix("float32", pitch=4, align=4)
        return strided(getattr(key, argument), dims=2 if argument == "weights" else 1)

    return compiled(key.arch, kernel, *map(stand_in, arguments))


DISPATCH = DispatchLauncher()
COMBINE = CombineLauncher()
COMBINE_BACKWARD = CombineBackwardLauncher()
LAUNCHERS = (DISPATCH, COMBINE, COMBINE_BACKWARD)
