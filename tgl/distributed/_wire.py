"""What rows are between ranks: tokens and gradients as they are or quantised, partial sums as they are or in float32.

And what a layer holds of those that arrive: the rows, or the tokens at home, which travel again in the backward.

A quantised row is its codes followed by its scales, each padded to whole pieces of 16 bytes: one message to a rank
brings both, at the place that a row of any kind has there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..meta.expert_parallel import PIECE
from ..meta.formats import FORMATS
from ..nn._gemms import Gemms, Operand, Operands
from ..nn._places import Places, Rows
from ..ops import group_dequantize, group_quantize, group_requantize, grouped_dbias, to_blocked_scale
from ..ops.after import after
from ..recipes import QuantizeSpec, Recipe

DENSE, QUANTIZED = "dense", "quantized"
WIRES = {
    DENSE: "tokens and the gradients of outputs in the dtype of `x`",
    QUANTIZED: "both as the codes and scales that the recipe's GEMMs read",
}
"""What travels to the experts, by name."""
SUMS = (None, torch.float32)
"""Dtypes of the partial sums that travel back; None is that of `x`."""


def check_wire(wire: str, wire_dtype: torch.dtype | None, recipe: Recipe | None) -> None:
    """The arguments of a layer fit together.

    Raises:
        ValueError: they do not.
    """
    if wire not in WIRES:
        raise ValueError(f"`wire` must be one of {', '.join(map(repr, WIRES))}, but got {wire!r}")
    if wire_dtype not in SUMS:
        raise ValueError(f"`wire_dtype` must be one of {', '.join(map(str, SUMS))}, but got {wire_dtype}")
    if wire == QUANTIZED and (recipe is None or not all(map(_by_rows, recipe.operands))):
        raise ValueError(
            f"`wire` must be {DENSE!r} unless `recipe` scales blocks of one row, as MXFP8BlockScaling and "
            f"Float8BlockScaling do: scales of a group depend on where rows go, but got {wire!r} with recipe={recipe!r}"
        )


def _by_rows(spec: QuantizeSpec) -> bool:
    """Whether a row's codes do not depend on other rows."""
    return FORMATS[spec.format].row_alone and not (spec.delayed or spec.stochastic)


class Codec(NamedTuple):
    """How rows are bytes.

    Attributes:
        spec: how they are quantised; None for rows as they are.
        columns: H.
        dtype: of the values.
    """

    spec: QuantizeSpec | None
    columns: int
    dtype: torch.dtype

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of codes and of scales, without padding."""
        if self.spec is None:
            return self.columns * self.dtype.itemsize, 0
        form = FORMATS[self.spec.format]
        return self.columns, -(-self.columns // form.block) * form.scale_dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(map(_padded, self.parts))

    def pack(self, x: Tensor) -> Tensor:
        """``[n, H]`` -> uint8 ``[n, width]``."""
        if self.spec is None:
            return _pad(x.contiguous().view(torch.uint8))
        end = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        options = {**self.spec.options(False), "scale_layout": "compact"}
        made = group_quantize(x, end, rowwise=True, columnwise=False, **options)
        return torch.cat([_pad(t.contiguous().view(torch.uint8)) for t in (made.data, made.scale)], 1)

    def values(self, rows: Tensor) -> Tensor:
        """``[n, H]`` of bytes that were not quantised."""
        return rows[:, : self.parts[0]].view(self.dtype)

    def components(self, rows: Tensor, places: Places, offs: Tensor) -> Operand:
        """Rowwise codes ``[T, H]`` and their scales, of the experts' rows, as ``group_quantize`` would have them."""
        assert self.spec is not None
        form, words, codes = FORMATS[self.spec.format], rows.view(torch.float32), _padded(self.parts[0]) // 4
        data, scale = (places.dispatched(t).view(torch.uint8) for t in (words[:, :codes], words[:, codes:]))
        data = data[:, : self.columns].contiguous().view(self.spec.dtype or form.data_dtypes[0])
        scale = scale[:, : self.parts[1]].contiguous().view(form.scale_dtype)
        if form.scale_by_columns:
            scale = scale.t().contiguous().t()
        if self.spec.scale_layout == "blocked":
            shape = data.shape[0], self.columns
            scale = to_blocked_scale(scale, offs, shape=shape, format=form.name)
        return data, scale

    def columnwise(self, made: Operand, offs: Tensor) -> Operand:
        """Columnwise components of what ``components`` has made: rounded a second time."""
        assert self.spec is not None
        data, scale = made
        return group_requantize(data, scale, offs, **self.spec.options())[:2]

    def decoded(self, made: Operand, offs: Tensor) -> Tensor:
        """``[T, H]`` of what ``components`` has made."""
        assert self.spec is not None
        data, scale = made
        layout = self.spec.scale_layout
        return group_dequantize(data, scale, offs, format=self.spec.format, scale_layout=layout, out_dtype=self.dtype)


class Form(NamedTuple):
    """What rows of a layer are on their way, before their dtype is known.

    Attributes:
        inputs, grads: how tokens and gradients of outputs are quantised; None for rows as they are.
        sums: dtype of partial sums; None for that of tokens.
        again: whether tokens travel again in the backward, in the place of rows that are held.
    """

    inputs: QuantizeSpec | None = None
    grads: QuantizeSpec | None = None
    sums: torch.dtype | None = None
    again: bool = False

    @classmethod
    def of(cls, wire: str, wire_dtype: torch.dtype | None, recipe: Recipe | None, again: bool = False) -> Form:
        """Of arguments that ``check_wire`` has taken."""
        if wire == QUANTIZED and recipe is not None:
            return cls(recipe.operands.input, recipe.operands.grad, wire_dtype, again)
        return cls(sums=wire_dtype, again=again)

    @property
    def as_always(self) -> bool:
        """Whether rows travel as they are, both ways, and once."""
        return self == Form()

    def codecs(self, columns: int, dtype: torch.dtype) -> tuple[Codec, Codec]:
        """Of tokens, and of gradients of outputs."""
        return Codec(self.inputs, columns, dtype), Codec(self.grads, columns, dtype)

    def bytes_to(self, columns: int, dtype: torch.dtype) -> int:
        """Of a row on the way to experts, whichever it is: both have one byte for an element or neither has."""
        return columns * dtype.itemsize if self.as_always else max(c.width for c in self.codecs(columns, dtype))

    def bytes_back(self, columns: int, dtype: torch.dtype) -> int:
        """Of a partial sum."""
        return columns * (self.sums or dtype).itemsize


class Wire(NamedTuple):
    """The way of tokens to the experts of other ranks and back, a ``tgl.nn._places.Way``.

    Attributes:
        local: the rows of what has arrived among those of experts.
        home: places of this rank's tokens, as ``ep_route`` makes them.
        arrived: uint8 ``[W P, width]``; None in a backward.
        inputs, grads: how tokens and gradients of outputs travel.
        sums: dtype in which partial sums travel; None for their own.
        again: whether tokens are kept, and what has arrived is not.
        group_name, engine: of the ops.
    """

    local: Places
    home: Places
    arrived: Tensor | None
    inputs: Codec
    grads: Codec
    sums: torch.dtype | None
    again: bool
    group_name: str
    engine: str

    def kept(self, x: Tensor) -> Tensor:
        """What has arrived, or the tokens."""
        if self.again:
            return x
        assert self.arrived is not None
        return self.arrived

    def rows(self, kept: Tensor) -> Tensor:
        """uint8 ``[W P, width]``, of what ``kept`` has returned: in a backward all ranks send tokens again."""
        if not self.again:
            return kept
        return self._dispatched(self.inputs.pack(kept)) if self.arrived is None else self.arrived

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """Codes as they have arrived; columnwise ones are made of them."""
        rows = self.rows(x)
        if self.inputs.spec is None:
            return self.local.input(self.inputs.values(rows), gemms, offs, fprop=fprop, wgrad=wgrad, state=state)
        made = self.inputs.components(rows, self.local, offs)
        columnwise = self.inputs.columnwise(made, offs) if wgrad else ()
        return Operands(fprop=made if fprop else (), wgrad=columnwise)

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """All ranks send, whatever they read."""
        rows = self.dispatched(grad)
        if self.grads.spec is not None:
            return Rows(rows)
        return self.local.answers(self.grads.values(rows), gemms, read=read)

    def dispatched(self, grad: Tensor) -> Tensor:
        """uint8 ``[W P, width]``: the bytes of gradients that all ranks send."""
        return self._dispatched(self.grads.pack(grad))

    def _dispatched(self, packed: Tensor) -> Tensor:
        rows: Tensor = torch.ops.tgl.ep_dispatch(packed, None, *self.home, **self.group)[0]
        return rows

    def grad(
        self, rows: Rows, gemms: Gemms, offs: Tensor, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        """Codes as they have arrived; of their values columnwise ones and sums."""
        if self.grads.spec is None:
            return self.local.grad(rows, gemms, offs, dgrad=dgrad, wgrad=wgrad, dbias=dbias)
        made = self.grads.components(rows.t, self.local, offs)
        columnwise = self.grads.columnwise(made, offs) if wgrad else ()
        sums = grouped_dbias(self.grads.decoded(made, offs), offs) if dbias else None
        return Operands(dgrad=made if dgrad else (), wgrad=columnwise), sums

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """Their values."""
        if self.grads.spec is None:
            return self.local.dense(rows, offs)
        return self.grads.decoded(self.grads.components(rows.t, self.local, offs), offs)

    def combined(self, rows: Tensor) -> Tensor:
        """Sums of this rank's rows, then of all ranks at home, where those that travel in float32 are rounded."""
        return self.summed(self.local.combined(rows, self.sums), rows.dtype)

    def summed(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """``[S, columns]`` of ``dtype``: the sums of ``sums [W P, columns]`` of all ranks."""
        y: Tensor = torch.ops.tgl.ep_combine(sums, None, *self.home, **self.group, out_dtype=dtype)[0]
        return y

    @property
    def group(self) -> dict[str, str]:
        """Keywords of the ops."""
        return {"group_name": self.group_name, "engine": self.engine}

    def after(self, dependency: Tensor) -> Wire:
        """Rows are neither sent nor gathered before."""
        home = self.home.after(dependency) if self.again else self.home
        return self._replace(local=self.local.after(dependency), home=home)

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """The exchanges of all ranks have one order."""
        return after(t, dependency)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Places."""
        return *self.local.tensors, *self.home.tensors

    def bare(self) -> Wire:
        """Without tensors."""
        return self._replace(local=self.local.bare(), home=self.home.bare(), arrived=None)

    def with_tensors(self, *tensors: Tensor) -> Wire:
        """``bare`` undone, but for what has arrived."""
        return self._replace(local=self.local.with_tensors(*tensors[:2]), home=self.home.with_tensors(*tensors[2:]))


def _padded(count: int) -> int:
    return -(-count // PIECE) * PIECE


def _pad(t: Tensor) -> Tensor:
    more = _padded(t.shape[1]) - t.shape[1]
    return functional.pad(t, (0, more)) if more else t
