"""Quantisation of tensors and of activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.components import Components
from ...meta.formats import FORMATS
from ...meta.memory import address
from ...meta.quantized import Options
from ...meta.table import OnePerName
from ..activation.activation_spec import spec_of
from ..archs import arch_of
from ..runtime import device
from ..runtime.launcher import Launcher, Plan, warm
from ..runtime.reach import Reach, put_in_order
from ..runtime.requirements import ALIGNMENT, ANY, MAX_ROWS, ROW_MAJOR
from .format_quantizer import QuantizeCall, Quantizer
from .quantize_fp8 import FP8Quantizer
from .quantize_mxfp8 import VECTOR, MXFP8Quantizer
from .quantize_nvfp4 import NVFP4Quantizer
from .reduce import GROUPED_DBIAS, DbiasCall

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

QUANTIZERS: OnePerName[Quantizer | str] = OnePerName(
    FORMATS,
    "QUANTIZERS in tgl/cutlass_kernels/launchers/quantize.py",
    {
        "mxfp8": MXFP8Quantizer(),
        "nvfp4": NVFP4Quantizer(),
        "mxfp4": "has no kernel that writes mxfp4, the format of weights that are quantised once",
        "fp8_tensor": FP8Quantizer(whole=True),
        "fp8_block": FP8Quantizer(whole=False),
    },
)
"""By format: its kernels, or the reason why there are none."""

WRITTEN = {name: quantizer for name, quantizer in QUANTIZERS.items() if isinstance(quantizer, Quantizer)}
NOT_WRITTEN = {name: reason for name, reason in QUANTIZERS.items() if isinstance(reason, str)}


class QuantizeKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    format: str
    spec: Any


class ActivationQuantizeCall(NamedTuple):
    """Arguments of ``grouped_activation_quantize``."""

    x: Tensor
    offs: Tensor
    probs: Tensor | None
    scale: Tensor | None
    params: Params
    options: Options
    out: Components

    @property
    def quantizing(self) -> QuantizeCall:
        """Return the call as a ``QuantizeCall``, with probabilities as factors of rows."""
        return QuantizeCall(self.x, self.offs, self.scale, self.probs, None, None, self.options, self.out)


class QuantizeLauncher(Launcher[QuantizeCall]):
    """Writes the components of ``x``, and with ``options.dbias`` by a second launch the sums of its rows.

    Args:
        elementwise: whether ``x``, of any width and layout, and components that depend on its width are accessed by
            single elements.
    """

    op = "group_quantize"
    call = QuantizeCall
    reach = Reach({}, indexed={"x": "rows"})
    note = "one pass over x, two for scales per group; groups read on the device"

    def __init__(self, *, elementwise: bool) -> None:
        self.elementwise = elementwise
        if elementwise:
            self.note = "one pass over x, two for scales per group, in single elements; groups read on the device"

    def reject_reason(self, c: QuantizeCall) -> backends.Reason:
        """Return why no kernel takes the format, the sizes, or components not aligned to 16 bytes, or None."""
        reason = device.packages_reason() or NOT_WRITTEN.get(c.options.format)
        if reason is not None:
            return reason
        if c.num_rows > MAX_ROWS:
            return f"takes up to {MAX_ROWS} rows, got {c.num_rows}"
        for name, t in zip(Components._fields, c.out):
            if address(t) % ALIGNMENT:
                return f"needs `{name}` aligned to {ALIGNMENT} bytes"
        return None

    def reason(self, c: QuantizeCall) -> backends.Reason:
        """Return ``reject_reason``, or why no kernel takes the widths and layouts, or None."""
        reason = self.reject_reason(c)
        if reason is not None:
            return reason
        if c.options.dbias and (c.row_scale is not None or c.noop is not None or c.rows is not None):
            return "sums rows unscaled, in order and without a condition: not with `row_scale`, `noop` or `rows`"
        return anywhere_reason(c) if self.elementwise else vectors_reason(c)

    def plan_key(self, c: QuantizeCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows in groups."""
        x, offs, scale, row_scale, rng, noop, options, out, slots, rows = c
        shape, strides, addresses = x.shape, x.stride(), x.data_ptr()
        for t in out:
            addresses |= t.data_ptr()  # 0 where nothing is written
        count = shape[0] if rows is None else rows.shape[0]
        if not warm(count, addresses) or 0 in strides or not shape[0]:
            return None
        sizes = shape if offs is None else shape[1:]
        given = (scale is None, row_scale is None or row_scale.dtype, rng is None, noop is None or noop.dtype)
        return x.dtype, sizes, strides, offs is None, given, options, slots is None or slots.shape[0], rows is None

    def batch_invariant(self, c: QuantizeCall) -> bool:
        """Return whether no rows share a scale and no random numbers are drawn, which depend on the row's position."""
        return c.rng is None and c.options.scales_rows_alone(c.scale)

    def is_empty(self, c: QuantizeCall) -> bool:
        """Return whether no kernel has anything to write, by the format."""
        return WRITTEN[c.options.format].is_empty(c)

    def zero_outputs(self, c: QuantizeCall) -> None:
        """Write the outputs of a call that needs no kernel, and the sums of rows."""
        self._sum_rows(c)
        WRITTEN[c.options.format].zero_outputs(c)

    def key(self, c: QuantizeCall, arch: str) -> QuantizeKey:
        """Return the key of the kernel, by the format."""
        spec = WRITTEN[c.options.format].spec(c, arch_of(arch), None, self.elementwise)
        return QuantizeKey(arch, not c.x.is_cuda, c.options.format, spec)

    def build(self, key: QuantizeKey) -> Callable:
        """Compile the kernel for ``key``."""
        return WRITTEN[key.format].build(key.arch, key.spec)

    def arguments(self, c: QuantizeCall) -> tuple:
        """Return the arguments of the kernel."""
        return WRITTEN[c.options.format].arguments(c)

    def start(self, plan: Plan, c: QuantizeCall) -> None:
        """Launch."""
        self._sum_rows(c)
        plan.launch(*self.arguments(c))

    def _sum_rows(self, c: QuantizeCall) -> None:
        if c.options.dbias and c.offs is not None:
            GROUPED_DBIAS.serve((c.x, c.offs), {"out": c.out.dbias})

    def prepare(self, c: QuantizeCall) -> None:
        """Compile and load the kernels of the call."""
        if c.options.dbias and c.offs is not None:
            GROUPED_DBIAS.prepare(DbiasCall(c.x, c.offs, c.out.dbias))
        super().prepare(c)

    def copies(self, c: QuantizeCall) -> dict[str, int]:
        """Return the bytes that ``run_copied`` copies, by name."""
        found = {}
        if anywhere_reason(c) is not None or (c.options.dbias and (c.row_scale is not None or c.rows is not None)):
            found["x"] = c.num_rows * c.x.shape[-1] * c.x.element_size()
        if c.options.dbias and c.noop is not None:
            found["dbias"] = c.out.dbias.numel() * c.out.dbias.element_size()
        return found

    def run_copied(self, c: QuantizeCall) -> None:
        """Run with a copy of ``x``; sums of rows are those of the rows in order, times factors."""
        if c.options.dbias and c.rows is not None:
            ordered = _room_for_rows(c)
            put_in_order(backends.run, c.x, c.rows, ordered)
            c = c._replace(x=ordered, rows=None)
        if c.options.dbias and c.row_scale is not None:
            x = (c.x.float() * c.row_scale.float()[:, None]).to(c.x.dtype).contiguous()
            c = c._replace(x=x, row_scale=None)
        elif anywhere_reason(c) is not None:
            c = c._replace(x=ANY.room(c.x).copy_(c.x))
        if c.options.dbias and c.noop is not None:
            sums = torch.empty_like(c.out.dbias)
            GROUPED_DBIAS.serve((c.x, c.offs), {"out": sums})
            c.out.dbias.copy_(torch.where(c.noop == 0, sums, c.out.dbias))
            c = c._replace(options=replace(c.options, dbias=False))
        self._serving(c).run(c)

    def prepare_copied(self, c: QuantizeCall) -> None:
        """Prepare what ``run_copied`` runs."""
        if c.options.dbias and c.rows is not None:
            ordered = _room_for_rows(c)
            put_in_order(backends.prepare, c.x, c.rows, ordered)
            c = c._replace(x=ordered, rows=None)
        if c.options.dbias and c.row_scale is not None:
            c = c._replace(x=torch.empty_like(c.x, memory_format=torch.contiguous_format), row_scale=None)
        elif anywhere_reason(c) is not None:
            c = c._replace(x=ANY.room(c.x))
        self._serving(c).prepare(c)

    def _serving(self, c: QuantizeCall) -> QuantizeLauncher:
        """Return the launcher whose kernel serves the call, except for its sums."""
        return ELEMENTWISE if vectors_reason(c) is not None else self


class ActivationQuantizeLauncher(Launcher[ActivationQuantizeCall]):
    """Writes the components of the activation of ``x`` in one launch; for ``fp8_tensor`` amax is cleared before."""

    op = "grouped_activation_quantize"
    call = ActivationQuantizeCall
    note = "one pass over x, groups read on the device"

    def reject_reason(self, c: ActivationQuantizeCall) -> backends.Reason:
        """Return why no kernel takes the format (scales per group), the widths or the layouts, or None."""
        reason = NOT_WRITTEN.get(c.options.format) or WRITTEN[c.options.format].activation_reason(c.quantizing)
        if reason is not None:
            return reason
        x, gated = c.x, spec_of(c.params).gated
        if gated and x.shape[1] // 2 % VECTOR:
            return f"needs I to be a multiple of {VECTOR}, got {x.shape[1] // 2}"
        gate = x.narrow(1, 0, x.shape[1] // 2) if gated else x
        return GROUP_QUANTIZE.reason(c.quantizing._replace(x=gate))

    def plan_key(self, c: ActivationQuantizeCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows."""
        x, _, probs, scale, params, options, out = c
        shape, strides, addresses = x.shape, x.stride(), x.data_ptr()
        for t in out:
            addresses |= t.data_ptr()  # 0 where nothing is written
        if not warm(shape[0], addresses) or 0 in strides:
            return None
        return x.dtype, shape[1], strides, probs is None or probs.dtype, scale is None, params, options

    def batch_invariant(self, c: ActivationQuantizeCall) -> bool:
        """Return whether scales depend on one row alone, as for ``group_quantize``."""
        return c.options.scales_rows_alone(c.scale)

    def is_empty(self, c: ActivationQuantizeCall) -> bool:
        """Return whether there are no columns."""
        return c.x.shape[1] == 0

    def key(self, c: ActivationQuantizeCall, arch: str) -> QuantizeKey:
        """Return the key of the kernel, by the format."""
        spec = WRITTEN[c.options.format].spec(c.quantizing, arch_of(arch), spec_of(c.params), False)
        return QuantizeKey(arch, not c.x.is_cuda, c.options.format, spec)

    def build(self, key: QuantizeKey) -> Callable:
        """Compile the kernel for ``key``."""
        return WRITTEN[key.format].build(key.arch, key.spec)

    def arguments(self, c: ActivationQuantizeCall) -> tuple:
        """Return the arguments of the kernel."""
        return WRITTEN[c.options.format].arguments(c.quantizing)


def _room_for_rows(c: QuantizeCall) -> Tensor:
    return c.x.new_empty(c.num_rows, c.x.shape[1])


def anywhere_reason(c: QuantizeCall) -> backends.Reason:
    """Return why no kernel can read ``x`` by single elements in place, or None; matrices at slots are checked apart."""
    return ANY.reason("x", c.x) if c.slots is None else None


def vectors_reason(c: QuantizeCall) -> backends.Reason:
    """Return why no kernel can access several columns of ``x`` and of the components at once, or None.

    Strides count without rows, too: scales of groups are written then, by a kernel that gets all tensors.
    """
    if c.x.shape[-1] == 0:
        return None
    if c.x.shape[-1] % VECTOR:
        return f"needs K to be a multiple of {VECTOR}, got {c.x.shape[-1]}"
    reason = ROW_MAJOR.reason("x", c.x, empty=True) or anywhere_reason(c)
    if reason is not None:
        return reason
    form = c.options.description
    if c.offs is None and c.options.columnwise and form.transposed_columnwise:
        step = ALIGNMENT * form.per_byte
        if c.x.shape[-2] % step:
            return f"needs N to be a multiple of {step} for transposed data of matrices, got {c.x.shape[-2]}"
    return None


GROUP_QUANTIZE = QuantizeLauncher(elementwise=False)
ELEMENTWISE = QuantizeLauncher(elementwise=True)
GROUPED_ACTIVATION_QUANTIZE = ActivationQuantizeLauncher()
