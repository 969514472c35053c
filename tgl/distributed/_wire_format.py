"""The format of rows between ranks: tokens and gradients may be quantised, partial sums may be float32.

It also determines what a layer saves: the arrived rows, or the local tokens, which are sent again in the backward.

A quantised row is its codes followed by its scales, each padded to whole pieces of 16 bytes: one message to a rank
contains both, at the place of a row of any format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..meta.expert_parallel import PIECE
from ..meta.formats import FORMATS
from ..nn._gemms import Gemms, Operand, Operands
from ..nn._token_permutation import LocalPermutation, Rows
from ..ops import group_dequantize, group_quantize, group_requantize, grouped_dbias, to_blocked_scale
from ..ops.after import after
from ..recipes import QuantizeSpec, Recipe

DENSE, QUANTIZED = "dense", "quantized"
WIRES = {
    DENSE: "tokens and the gradients of outputs in the dtype of `x`",
    QUANTIZED: "both as the codes and scales that the recipe's GEMMs read",
}
"""Formats of rows that are sent to the experts, by name."""
SUMS = (None, torch.float32)
"""Dtypes of the partial sums that are sent back; None is that of `x`."""


def check_wire(wire: str, wire_dtype: torch.dtype | None, recipe: Recipe | None) -> None:
    """Check that the arguments of a layer fit together.

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
    """Return whether a row's codes do not depend on other rows."""
    return FORMATS[spec.format].row_alone and not (spec.delayed or spec.stochastic)


class Codec(NamedTuple):
    """The encoding of rows as bytes.

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
        """Return the bytes of codes and of scales, without padding."""
        if self.spec is None:
            return self.columns * self.dtype.itemsize, 0
        form = FORMATS[self.spec.format]
        return self.columns, -(-self.columns // form.block) * form.scale_dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(map(_padded, self.parts))

    def pack(self, x: Tensor) -> Tensor:
        """Encode ``[n, H]`` as uint8 ``[n, width]``."""
        if self.spec is None:
            return _pad(x.contiguous().view(torch.uint8))
        end = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        options = {**self.spec.options(False), "scale_layout": "compact"}
        made = group_quantize(x, end, rowwise=True, columnwise=False, **options)
        return torch.cat([_pad(t.contiguous().view(torch.uint8)) for t in (made.data, made.scale)], 1)

    def values(self, rows: Tensor) -> Tensor:
        """Decode bytes that were not quantised to ``[n, H]``."""
        return rows[:, : self.parts[0]].view(self.dtype)

    def components(self, rows: Tensor, places: LocalPermutation, offs: Tensor) -> Operand:
        """Return rowwise codes ``[T, H]`` and scales of the experts' rows, as ``group_quantize`` would return them."""
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
        """Return columnwise components made from those of ``components``, which rounds a second time."""
        assert self.spec is not None
        data, scale = made
        return group_requantize(data, scale, offs, **self.spec.options())[:2]

    def decoded(self, made: Operand, offs: Tensor) -> Tensor:
        """Decode the result of ``components`` to ``[T, H]``."""
        assert self.spec is not None
        data, scale = made
        layout = self.spec.scale_layout
        return group_dequantize(data, scale, offs, format=self.spec.format, scale_layout=layout, out_dtype=self.dtype)


class WireFormat(NamedTuple):
    """The format of a layer's rows between ranks, before their dtype is known.

    Attributes:
        inputs, grads: how tokens and gradients of outputs are quantised; None for rows as they are.
        sums: dtype of partial sums; None for that of tokens.
        again: whether tokens are sent again in the backward instead of saving rows.
    """

    inputs: QuantizeSpec | None = None
    grads: QuantizeSpec | None = None
    sums: torch.dtype | None = None
    again: bool = False

    @classmethod
    def of(cls, wire: str, wire_dtype: torch.dtype | None, recipe: Recipe | None, again: bool = False) -> WireFormat:
        """Return the form for arguments that ``check_wire`` accepts."""
        if wire == QUANTIZED and recipe is not None:
            return cls(recipe.operands.input, recipe.operands.grad, wire_dtype, again)
        return cls(sums=wire_dtype, again=again)

    @property
    def as_always(self) -> bool:
        """Whether rows are sent unquantised, both ways, and once."""
        return self == WireFormat()

    def codecs(self, columns: int, dtype: torch.dtype) -> tuple[Codec, Codec]:
        """Return the codecs of tokens and of gradients of outputs."""
        return Codec(self.inputs, columns, dtype), Codec(self.grads, columns, dtype)

    def bytes_to(self, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row on the way to experts; in both codecs elements have one byte, or in neither."""
        return columns * dtype.itemsize if self.as_always else max(c.width for c in self.codecs(columns, dtype))

    def bytes_back(self, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of a partial sum."""
        return columns * (self.sums or dtype).itemsize


class Wire(NamedTuple):
    """The permutation of tokens to the experts of other ranks and back, a ``TokenPermutation`` of ``tgl.nn``.

    Attributes:
        local: the places of arrived rows among those of experts.
        home: places of this rank's tokens, as ``ep_route`` makes them.
        arrived: uint8 ``[W P, width]``; None in a backward.
        inputs, grads: codecs of tokens and gradients of outputs.
        sums: dtype in which partial sums are sent; None for their own.
        again: whether tokens are saved instead of the arrived rows.
        group_name, engine: keywords of the ops.
    """

    local: LocalPermutation
    home: LocalPermutation
    arrived: Tensor | None
    inputs: Codec
    grads: Codec
    sums: torch.dtype | None
    again: bool
    group_name: str
    engine: str

    def kept(self, x: Tensor) -> Tensor:
        """Return the tensor to save: the arrived rows, or the tokens."""
        if self.again:
            return x
        assert self.arrived is not None
        return self.arrived

    def rows(self, kept: Tensor) -> Tensor:
        """Return uint8 ``[W P, width]`` from the result of ``kept``; in a backward all ranks send tokens again."""
        if not self.again:
            return kept
        return self._dispatched(self.inputs.pack(kept)) if self.arrived is None else self.arrived

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """Return the codes as they arrived; columnwise ones are made from them."""
        rows = self.rows(x)
        if self.inputs.spec is None:
            return self.local.input(self.inputs.values(rows), gemms, offs, fprop=fprop, wgrad=wgrad, state=state)
        made = self.inputs.components(rows, self.local, offs)
        columnwise = self.inputs.columnwise(made, offs) if wgrad else ()
        return Operands(fprop=made if fprop else (), wgrad=columnwise)

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """Send the gradients; all ranks send, whatever they read."""
        rows = self.dispatched(grad)
        if self.grads.spec is not None:
            return Rows(rows)
        return self.local.answers(self.grads.values(rows), gemms, read=read)

    def dispatched(self, grad: Tensor) -> Tensor:
        """Return uint8 ``[W P, width]``: the gradients as bytes, which all ranks send."""
        return self._dispatched(self.grads.pack(grad))

    def _dispatched(self, packed: Tensor) -> Tensor:
        rows: Tensor = torch.ops.tgl.ep_dispatch(packed, None, *self.home, **self.group)[0]
        return rows

    def grad(
        self, rows: Rows, gemms: Gemms, offs: Tensor, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        """Return the codes as they arrived, and columnwise codes and sums of their values."""
        if self.grads.spec is None:
            return self.local.grad(rows, gemms, offs, dgrad=dgrad, wgrad=wgrad, dbias=dbias)
        made = self.grads.components(rows.t, self.local, offs)
        columnwise = self.grads.columnwise(made, offs) if wgrad else ()
        sums = grouped_dbias(self.grads.decoded(made, offs), offs) if dbias else None
        return Operands(dgrad=made if dgrad else (), wgrad=columnwise), sums

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """Return the values of arrived rows."""
        if self.grads.spec is None:
            return self.local.dense(rows, offs)
        return self.grads.decoded(self.grads.components(rows.t, self.local, offs), offs)

    def combined(self, rows: Tensor) -> Tensor:
        """Return the sums of this rank's rows, summed over ranks at home, where float32 partial sums are rounded."""
        return self.summed(self.local.combined(rows, self.sums), rows.dtype)

    def summed(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums ``[S, columns]`` in ``dtype`` of all ranks' ``sums [W P, columns]``."""
        y: Tensor = torch.ops.tgl.ep_combine(sums, None, *self.home, **self.group, out_dtype=dtype)[0]
        return y

    @property
    def group(self) -> dict[str, str]:
        """Keywords that the ops get."""
        return {"group_name": self.group_name, "engine": self.engine}

    def after(self, dependency: Tensor) -> Wire:
        """Return the permutation with a dependency, before which rows are neither sent nor gathered."""
        home = self.home.after(dependency) if self.again else self.home
        return self._replace(local=self.local.after(dependency), home=home)

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """Return ``t`` with a dependency that keeps the exchanges of all ranks in one order."""
        return after(t, dependency)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the places."""
        return *self.local.tensors, *self.home.tensors

    def bare(self) -> Wire:
        """Return the permutation without tensors."""
        return self._replace(local=self.local.bare(), home=self.home.bare(), arrived=None)

    def with_tensors(self, *tensors: Tensor) -> Wire:
        """Invert ``bare``, without the arrived rows."""
        return self._replace(local=self.local.with_tensors(*tensors[:2]), home=self.home.with_tensors(*tensors[2:]))


def _padded(count: int) -> int:
    return -(-count // PIECE) * PIECE


def _pad(t: Tensor) -> Tensor:
    more = _padded(t.shape[1]) - t.shape[1]
    return functional.pad(t, (0, more)) if more else t
