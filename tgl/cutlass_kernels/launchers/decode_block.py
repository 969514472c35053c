"""An expert block for few top-k slots: three launches that overlap, instead of the composition's four that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import overlap
from ..activation.activation_spec import spec_of
from ..archs import arch_of, chips, having
from ..config import LINE, VARLEN_M, GemmConfig
from ..epilogue import EpilogueSpec
from ..runtime.launcher import Call, Launcher, busy_groups, rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand, number
from ..runtime.requirements import MATRIX, ROW_MAJOR, ROWS, unit_dimension
from .gemm import BIAS, OFFS, gemm_reason
from .gemm_activation import halved, halves_reason
from .gemm_launcher import PersistentGemmLauncher
from .permutation import COMBINE, CombineCall

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

OP = "moe"
TIGHT = 32  # a tile of B along K may end at a multiple of so many columns
DECODE_BYTES = 200 << 20
"""Upper bound on the bytes of the experts that top-k slots may select.

Narrow tiles win where few of them must keep memory busy, and overlapping launches where launches are a large part. On
an H100 a block of 75 MB takes 43 us instead of 50 without overlap, one of 199 MB 87 instead of 95, and one of 283 MB
116 instead of 117; on an H200 39 and 44, 73 and 80, and 93 and 91, or 87 where only the two GEMMs do not overlap.
"""


class DecodeGemmKey(NamedTuple):
    """Key of a compiled kernel of one of the two GEMMs."""

    kernel: str
    arch: str
    emulated: bool
    element: str
    b_unit: int
    spec: EpilogueSpec
    config: GemmConfig


class FirstDecodeGemmCall(NamedTuple):
    """``h = a[rows] @ b[g] + bias[g]``, None if not requested, and ``y``, its activation times ``weights[source]``."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    weights: Tensor | None
    source: Tensor
    rows: Tensor
    params: Params
    h: Tensor | None
    y: Tensor


class SecondDecodeGemmCall(NamedTuple):
    """``out = a @ b[g] + bias[g] * weights[source]``; ``settled``: weights ready, see ``gemm.sm90.decode_kernels``."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    weights: Tensor | None
    source: Tensor
    out: Tensor
    settled: int


SOURCE = Operand("source", "T", "int32")


class DecodeGemmLauncher(PersistentGemmLauncher[Call]):
    """Launcher of a GEMM of the block, whose kernel takes some of its arguments together."""

    op = OP

    def is_empty(self, c: Call) -> bool:
        """Return whether there are no results, or no operands to compute them from."""
        return self.outputs(c)[-1].numel() == 0 or c.a.numel() == 0

    def kernel(self, key: DecodeGemmKey) -> Any:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        options = {"gathered": "a"} if key.kernel == FirstDecodeGemmLauncher.kernel_name else {}
        return self.kernel_class(key)(VARLEN_M, key.config, key.spec, TYPES[key.element], **options)


class FirstDecodeGemmLauncher(DecodeGemmLauncher[FirstDecodeGemmCall]):
    """Launcher of the first GEMM, with the activation."""

    kernel_name = "FewActivatedGroupedGemm"
    archs = having("FewActivatedGroupedGemm")
    call = FirstDecodeGemmCall
    operands = (
        Operand("a", "UK", "element", ROWS),
        Operand("b", "GKN", "element", MATRIX, unit="b_unit"),
        OFFS,
        Operand("rows", "T", "int32"),
        Operand("h", "TN", "spec.out", ROW_MAJOR, when="spec.keeps", output=True),
        Operand("y", "TI", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        Operand("weights", "T", "spec.probs"),
        SOURCE,
    )

    def reject_reason(self, c: FirstDecodeGemmCall) -> backends.Reason:
        """Return why the kernel does not take the call, as in ``GemmActivationLauncher``, or None."""
        reason = gemm_reason(c.a, c.y, c.rows)
        return halves_reason(c.b, c.y, c.params) if reason is None and c.y.numel() else reason

    def plan_key(self, c: FirstDecodeGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as a class."""
        a, b, _, bias, weights, _, _, params, h, y = c
        rows, shape = y.shape[0], b.shape
        written = y.data_ptr() if h is None else h.data_ptr() | y.data_ptr()
        if not warm(min(rows, a.shape[0]), a.data_ptr() | b.data_ptr() | written):
            return None
        layouts = a.stride(), b.stride(), h is None or h.stride(), y.stride(), shape
        dtypes = (a.dtype, y.dtype, bias is None or bias.dtype, weights is None or weights.dtype)
        return OP, layouts, dtypes, params, rows_class(rows, shape[0])

    def key(self, c: FirstDecodeGemmCall, arch: str) -> DecodeGemmKey:
        """Return the key; halves of a tile are whole lines if B is contiguous along columns, or interleaved."""
        gated, unit = c.params.gated, unit_dimension(c.b.stride())
        step = TIGHT if unit == 1 and not (gated and c.params.interleaved) else 2 * LINE if gated else LINE
        activation, probs, kept = spec_of(c.params), name(c.weights), c.h is not None
        spec = EpilogueSpec(name(c.y), name(c.bias), keeps=kept, activation=activation, probs=probs)
        return few_key("FewActivatedGroupedGemm", arch, c, c.y.shape[0], unit, spec, step)

    def stand_ins(self, key: DecodeGemmKey) -> tuple:
        """Return what the compiler gets instead of ``arguments``."""
        a, b, offs, rows, h, y, *found = super().stand_ins(key)
        return a, b, (offs, rows), (h, y), factors(*found)

    def arguments(self, c: FirstDecodeGemmCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.a, c.b, (c.offs, c.rows), (c.h, c.y), factors(c.bias, c.weights, c.source)

    def warmup_sizes(self, c: FirstDecodeGemmCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return halved(c.params)


class SecondDecodeGemmLauncher(DecodeGemmLauncher[SecondDecodeGemmCall]):
    """Launcher of the second GEMM."""

    kernel_name = "FewGroupedGemm"
    archs = having("FewGroupedGemm")
    call = SecondDecodeGemmCall
    operands = (
        Operand("a", "TK", "element", ROWS),
        Operand("b", "GKN", "element", MATRIX, unit="b_unit"),
        OFFS,
        Operand("settled", stand_in=number("Int32")),
        Operand("out", "TN", "spec.out", ROW_MAJOR, output=True),
        BIAS,
        Operand("weights", "T", "spec.bias_scale"),
        SOURCE,
    )

    def reject_reason(self, c: SecondDecodeGemmCall) -> backends.Reason:
        """Return why the kernel does not take the call, as in ``GemmLauncher``, or None."""
        return gemm_reason(c.a, c.out)

    def plan_key(self, c: SecondDecodeGemmCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as a class."""
        a, b, _, bias, weights, _, out, _ = c
        rows, shape = out.shape[0], b.shape
        if not warm(rows, a.data_ptr() | b.data_ptr() | out.data_ptr()):
            return None
        dtypes = (a.dtype, out.dtype, bias is None or bias.dtype, weights is None or weights.dtype)
        return OP, a.stride(), b.stride(), out.stride(), shape, dtypes, rows_class(rows, shape[0])

    def key(self, c: SecondDecodeGemmCall, arch: str) -> DecodeGemmKey:
        """Return the key; a tile is whole lines where columns are contiguous."""
        unit = unit_dimension(c.b.stride())
        spec = EpilogueSpec(name(c.out), name(c.bias), name(c.weights))
        return few_key("FewGroupedGemm", arch, c, c.out.shape[0], unit, spec, TIGHT if unit == 1 else LINE)

    def stand_ins(self, key: DecodeGemmKey) -> tuple:
        """Return what the compiler gets instead of ``arguments``."""
        a, b, offs, settled, out, *found = super().stand_ins(key)
        return a, b, (offs, settled), out, factors(*found)

    def arguments(self, c: SecondDecodeGemmCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.a, c.b, (c.offs, c.settled), c.out, factors(c.bias, c.weights, c.source)

    def warmup_call(self, c: SecondDecodeGemmCall) -> SecondDecodeGemmCall:
        """Return the warm-up call: its weights are written by the launch before it."""
        return super().warmup_call(c)._replace(settled=0)


def few_key(kernel: str, arch: str, c: Any, rows: int, unit: int, spec: EpilogueSpec, step: int) -> DecodeGemmKey:
    """Return the key of a decode GEMM; its tiling follows from N and the class of rows."""
    groups, _, columns = c.b.shape
    config = arch_of(arch).tilings.choose_few(columns, busy_groups(rows, groups), step)
    return DecodeGemmKey(kernel, arch, not c.a.is_cuda, name(c.a), unit, spec, config)


def factors(bias: Any, weights: Any, source: Any) -> tuple | None:
    """Return bias, weights, and which of the weights each row has, if any; None if there is neither bias nor weight."""
    if bias is None and weights is None:
        return None
    return bias, weights, None if weights is None else source


FIRST, SECOND = FirstDecodeGemmLauncher(), SecondDecodeGemmLauncher()


class Step(NamedTuple):
    """A launch of the block."""

    launcher: Launcher
    call: Any


def steps(operands: Sequence, *, params: Params, top_k: int, y: Tensor, h: Tensor | None) -> tuple[Step, ...]:
    """Return the launches of a call, in order.

    Nothing may come between the two GEMMs: the first one waits for everything that the second one reads except A.
    """
    x, w1, w2, source, position, token, offs, weights, bias1, bias2 = operands
    rows, flat = token.shape[0], None if weights is None else weights.reshape(-1)
    scale = None if bias2 is None else flat
    act, answers = x.new_empty(rows, w2.shape[1]), x.new_empty(rows, w2.shape[2])
    return (
        Step(FIRST, FirstDecodeGemmCall(x, w1, offs, bias1, flat, source, token, params, h, act)),
        Step(SECOND, SecondDecodeGemmCall(act, w2, offs, bias2, scale, source, answers, settled=1)),
        Step(COMBINE, CombineCall(answers, position, None, top_k, y)),
    )


def reject_reason(*args: Any, **kwargs: Any) -> backends.Reason:
    """Return why the launches do not serve the call, or None."""
    return refused(steps(args, **kwargs), args)


def too_many(args: Sequence) -> backends.Reason:
    """Return why a call has too many top-k slots or too large experts, or None."""
    w1, w2, choices = args[1], args[2], max(args[4].shape[0], args[5].shape[0])
    if not overlap.overlaps(choices):
        return f"takes up to {overlap.FEW_CHOICES} top-k slots and rows, got {choices}"
    groups = w1.shape[0]
    hit = (w1.nbytes + w2.nbytes) // (groups or 1) * min(choices, groups)
    return (
        f"takes experts of up to {DECODE_BYTES} bytes, {choices} top-k slots may select {hit}"
        if hit > DECODE_BYTES
        else None
    )


def refused(made: Sequence[Step], args: Sequence) -> backends.Reason:
    """Return why the kernels do not take a call with few top-k slots, or None."""
    for field, t in (("source", args[3]), ("token", args[5])):
        if t.dtype != torch.int32:
            return f"takes `{field}` of int32, got {t.dtype}"
    for launcher, call in made:
        reason = "has nothing to launch for no rows or columns" if launcher.is_empty(call) else launcher.reason(call)
        if reason is not None:
            return reason
    return None


def run(*args: Any, **kwargs: Any) -> None:
    """Launch the kernels of the block."""
    for launcher, call in steps(args, **kwargs):
        launcher.run(call)


def prepare(*args: Any, **kwargs: Any) -> None:
    """Compile and load the kernels."""
    for launcher, call in steps(args, **kwargs):
        launcher.prepare(call)


def attempt(args: Sequence, kwargs: dict) -> backends.Reason:
    """Run the call if the launches serve it, else return the reason why not, before anything is written.

    Every launch is looked up once, both for the checks and for the kernel.
    """
    made = steps(args, **kwargs)
    plans = [plan for step in made if (plan := step.launcher.warm_plan(step.call)) is not None]
    if len(plans) == len(made):
        for plan, (launcher, call) in zip(plans, made):
            launcher.start(plan, call)
        return None
    reason = refused(made, args)
    if reason is None:
        for launcher, call in made:
            launcher.serve(call, {})
    return reason


IMPLEMENTATION = backends.Implementation(
    op=OP,
    name="tgl kernels, overlapping",
    device="cuda",
    run=run,
    supports=reject_reason,
    declines=too_many,
    attempt=attempt,
    archs=frozenset(chips(FIRST.archs & SECOND.archs)),
    priority=10,
    note="three launches, each of which begins while the previous one ends",
    emulable=True,
    prepare=prepare,
    batch_invariant=lambda *args, **kwargs: True,
)
