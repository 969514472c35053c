"""The GEMMs of a layer on operands quantised by a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..meta.components import Components, sized_components
from ..meta.formats import FORMATS
from ..meta.placement import TILE_ROWS, ceil_div
from ..meta.quantized import Options
from ..ops import (
    fp8_scale_from_history,
    fp8_update_history_,
    group_quantize,
    grouped_activation_quantize,
    grouped_dbias,
    grouped_gemm_scaled,
    grouped_gemm_scaled_activation_quantize,
    grouped_gemm_scaled_wgrad,
    grouped_gemm_scaled_wgrad_accumulate_,
    to_blocked_scale,
)
from ..ops._library import CASTS
from ..ops.after import after
from ..ops.same_offs import same_offs
from ..recipes import DelayedScaling, QuantizeSpec, Recipe, named
from ..tensor import GroupedTensor, quantize
from ..tensor._structure import FIELDS
from ._emulation import refuse_emulation
from ._errors import fail
from ._gemms import Accumulator, DenseGemms, Destination, Gemms, Operand, Operands
from ._parameters import decided_when_traced, inside_operator
from ._persistent_tensors import persistent_tensors

WITH_AMAX = frozenset(name for name, form in FORMATS.items() if form.decodes_with_amax)
KEPT = tuple(f"kept_{name}" for name in Components._fields)


def _copies_codes(spec: QuantizeSpec) -> bool:
    """Return whether scales of tokens can be dispatched to rows in one step: one kernel, or a copy of columns."""
    form = FORMATS[spec.format]
    return form.row_alone and (form.scale_by_columns or spec.scale_layout == "blocked")


class _Bytes(NamedTuple):
    """Pickled form of a tensor of one-byte floats."""

    bytes: Tensor
    dtype: torch.dtype


class ScaledGemms(nn.Module):
    """``Gemms`` on quantised operands, with the state that a recipe needs as buffers.

    Operands are ``(data, scale)``, or ``(data, scale, amax)`` for NVFP4. A layer's input or weight may be a
    ``GroupedTensor`` that is already quantised.

    The state dict contains the seed and offset of stochastic rounding (``rng_state``) and, for ``DelayedScaling``, the
    histories and scales; a state dict without them loads, and leaves them unchanged. The quantised weight cached by
    ``is_first_microbatch`` is not saved and is stale after a load; its memory is kept, for captured graphs.

    Args:
        recipe: how operands are quantised.
        num_gemms, in_features, out_features: sizes of the layer.
        device: device of the buffers.
    """

    fuses_activation = gathers = True
    copies_codes = False  # default for pickles without it
    rng_state: Tensor
    input_scale: Tensor
    kept_data: Tensor | None
    kept_is_old = False  # default for pickles without it

    def __init__(
        self,
        recipe: Recipe,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        recipe.check_features(in_features=in_features, out_features=out_features)
        self.recipe = recipe
        self.specs = recipe.operands
        # Copies for a trace, which must not read the recipe: its floats would become symbols of the graph.
        self.format, self.title = recipe.format, repr(recipe)
        self.fused_with_gemm = FORMATS[self.format].fused_with_gemm
        self.names: dict[str, Any] = {"format": self.format, "scale_layout": self.specs.input.scale_layout}
        self.copies_codes = _copies_codes(self.specs.input)
        self.delayed = isinstance(recipe, DelayedScaling)
        self.num_gemms = num_gemms
        if isinstance(recipe, DelayedScaling):
            for name in self.specs._fields:
                shape = (recipe.amax_history_len, num_gemms)
                self.register_buffer(f"{name}_history", torch.zeros(shape, dtype=torch.float32, device=device))
                self.register_buffer(f"{name}_scale", torch.ones(num_gemms, dtype=torch.float32, device=device))
        if self.specs.grad.stochastic:
            self.register_buffer("rng_state", torch.zeros(2, dtype=torch.int64, device=device))
        for name in KEPT:
            self.register_buffer(name, None, persistent=False)
        self.kept_is_old = False
        self.reset_state()

    def reset_state(self) -> None:
        """Reset histories and cached weights, and take a new seed from the state of torch's default generator.

        The generator does not advance, so that a recipe does not change later random numbers.
        """
        for name, buffer in self.named_buffers():
            if name == "rng_state" and buffer.device.type != "meta":
                generator = torch.Generator("cpu").set_state(torch.get_rng_state())
                seed = torch.randint(2**62, (1,), generator=generator, dtype=torch.int64, device="cpu")
                buffer.copy_(torch.cat([seed, seed.new_zeros(1)]))
            elif name in KEPT:
                setattr(self, name, None)
            elif buffer.device.type != "meta":
                buffer.fill_(1.0 if name.endswith("_scale") else 0.0)

    # --- operands -----------------------------------------------------------------------------------------------------

    def input(
        self,
        x: Tensor,
        offs: Tensor,
        rows: Tensor | None = None,
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        if isinstance(x, GroupedTensor):
            self._check_quantized("inp", x, self.specs.input, rowwise=fprop, columnwise=wgrad)
            # Dynamo does not support a symbolic size in an autograd.Function; in a graph only the GEMMs check this.
            if not torch.compiler.is_compiling() and (x.offs is None or x.num_groups != self.num_gemms):
                have = "matrices" if x.offs is None else f"{x.num_groups} groups"
                fail(f"`inp` must be quantised as rows in {self.num_gemms} groups, but it was as {have}")
            return _forward_operands(x.components(), self.format, fprop, wgrad=wgrad)
        scale = state[0] if state else self._scale("input")
        made = self.specs.input.quantize(x, offs, rowwise=fprop, columnwise=wgrad, scale=scale, rows=rows)
        if fprop:
            self._remember("input", made)
        return _forward_operands(made, self.format, fprop, wgrad=wgrad)

    def input_of_tokens(
        self, x: Tensor, offs: Tensor, token: Tensor, dispatched: Callable[[Tensor], Tensor]
    ) -> Operands:
        """Return ``input`` of ``x[token]`` for fprop, if ``copies_codes``, quantising every token ``x [S, K]`` once.

        Args:
            x: at least one token.
            offs: int32 ``[G]``.
            token: int32 ``[T]``, negative in the tail, which the GEMMs do not read.
            dispatched: function that gathers the rows ``[T, columns]`` of ``[S, columns]``.
        """
        everything = x.new_full((1,), x.shape[0], dtype=torch.int32)
        options = {**self.specs.input.options(False), "scale_layout": "compact"}  # a token's scales are adjacent
        made = group_quantize(x, everything, columnwise=False, **options)
        codes = dispatched(made.data.view(x.dtype)).view(made.data.dtype)
        if self.specs.input.scale_layout == "blocked":
            shape = token.shape[0], x.shape[1]
            scale = to_blocked_scale(made.scale, offs, token, shape=shape, format=self.format)
        else:
            scale = made.scale.t().index_select(1, token.clamp(min=0)).t()
        return Operands(fprop=(codes, scale))

    def activated_input(
        self,
        h: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        options = self._activated_options(wgrad)
        scale = state[0] if state else self._scale("input")
        made = grouped_activation_quantize(
            h, offs, probs, scale, rowwise=fprop, columnwise=wgrad, **options, **activation
        )
        if fprop:
            self._remember("input", made)
        return _forward_operands(made, self.format, fprop, wgrad=wgrad)

    def state_of_input(self) -> Operand:
        # An op whose result the forward reads too: a partitioner would move a clone, or a value that no forward reads,
        # into the backward, where the buffer has changed.
        return (after(self.input_scale, self.input_scale),) if self.delayed else ()

    def activated_product(
        self,
        x: Operand,
        w: Operand,
        offs: Tensor,
        bias: Tensor | None,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        out_dtype: torch.dtype,
        wgrad: bool,
    ) -> tuple[Tensor, Operands]:
        """Return ``h``, the previous layer's ``fprop``, and its ``activated_input``, in one op."""
        h, made = grouped_gemm_scaled_activation_quantize(
            **_pair(x, w),
            offs=offs,
            bias=bias,
            probs=probs,
            columnwise=wgrad,
            out_dtype=out_dtype,
            **self._activated_options(wgrad),
            **activation,
        )
        return h, _forward_operands(made, self.format, True, wgrad=wgrad)

    def _activated_options(self, wgrad: bool) -> dict[str, Any]:
        return {k: v for k, v in self.specs.input.options(wgrad).items() if k != "block_2d"}

    def checked_offs(self, x: Tensor, offs: Tensor) -> Tensor:
        """Return ``offs``, compared with the ends of an input that is already quantised, see ``same_offs``."""
        known = isinstance(x, GroupedTensor) and x.offs is not None and x.num_groups == self.num_gemms
        return same_offs(offs, x.offs) if known else offs  # type: ignore[attr-defined]

    def check_dtypes(self, name: str, dtype: torch.dtype | None, weight: torch.dtype | None) -> None:
        """Check that input ``name`` and weight can be quantised from these dtypes (None: not known yet)."""
        for what, given in ((name, dtype), ("the layer's weight", weight)):
            if given is not None and given not in CASTS:
                fail(f"{what} must be float32, bfloat16 or float16 for {self.title}, but got {given}", TypeError)

    def check_weight(self, w: Tensor, is_first_microbatch: bool | Tensor | None, *, dgrad: bool = False) -> None:
        """Check that ``weight`` can be called with these arguments.

        Raises:
            ValueError, TypeError, RuntimeError: it cannot.
        """
        if not self.recipe.emulate:
            refuse_emulation(self.format, self.names["scale_layout"], w.device)
        first = is_first_microbatch
        if isinstance(w, GroupedTensor):
            self._check_quantized("weight", w, self.specs.weight, rowwise=True, columnwise=dgrad)
            return
        if first is None:
            return
        if isinstance(first, Tensor) and self.delayed:
            fail("`is_first_microbatch` must be True, False or None for DelayedScaling, but got a tensor", TypeError)
        missing = self.kept_data is None or self.kept_is_old
        if first is False and missing:
            fail(
                "`is_first_microbatch` must be True in the first call, in the first after load_state_dict, and after "
                "one that failed while it quantised the weight, but got False",
                RuntimeError,
            )
        if missing and torch.compiler.is_compiling() and self._inside_operator(id(self)):
            fail(
                "`is_first_microbatch` must be None inside of torch.utils.checkpoint in a compiled graph until a call "
                "with True has been made outside of it, the first time and after every load_state_dict, but got "
                f"{'a tensor' if isinstance(first, Tensor) else first}: there the graph cannot keep the weight",
                RuntimeError,
            )

    def weight(
        self, w: Tensor, slots: Tensor | None = None, *, dgrad: bool, is_first_microbatch: bool | Tensor | None
    ) -> Operands:
        """Prepare the weight; a bool tensor ``[]`` as ``is_first_microbatch`` allows one graph for both values."""
        form = self.format
        self.check_weight(w, is_first_microbatch, dgrad=dgrad)
        if isinstance(w, GroupedTensor):
            return _forward_operands(w.components(), form, True, dgrad=dgrad)
        spec = self.specs.weight
        if is_first_microbatch is None:
            made = spec.quantize(w, None, columnwise=dgrad, scale=self._scale("weight"), slots=slots)
            self._remember("weight", made)
            return _forward_operands(made, form, True, dgrad=dgrad)
        first, kept = is_first_microbatch, self._kept()
        if kept is None:
            with persistent_tensors():
                kept = spec.quantize(w, None, scale=self._scale("weight"), slots=slots)
            self._keep(kept)
            self.kept_is_old = False
            self._remember("weight", kept)
            return _forward_operands(kept, form, True, dgrad=dgrad)
        if (dgrad or first is not False) and self._kept_in_inference_mode(id(self)):
            # Made by a graph in inference mode, and so neither writable nor readable by a backward.
            kept = Components(*[part.clone() for part in kept])
            self._keep(kept)
        if first is not False:
            noop = first.logical_not() if isinstance(first, Tensor) and not self.kept_is_old else None
            try:
                spec.quantize(w, None, scale=self._scale("weight"), noop=noop, slots=slots, out=kept)
            except BaseException:
                self._forget_kept()  # it holds the old weight or half of the new: later microbatches must not read it
                raise
            if self.kept_is_old:  # tested first, because inside checkpoint a graph may not set attributes
                self.kept_is_old = False
            self._remember("weight", kept)
        return _forward_operands(kept, form, True, dgrad=dgrad)

    @property
    def blocked_scales(self) -> bool:
        """Whether the second component of an operand is a blocked scale."""
        return self.names["scale_layout"] == "blocked"

    def wgrad_operands_like(
        self, rows: int, groups: int, in_features: int, out_features: int, dtype: torch.dtype
    ) -> tuple[Operand, Operand]:
        """Return meta tensors like the wgrad operands of an input and an output gradient of ``rows`` rows."""
        found = []
        for spec, features in ((self.specs.input, in_features), (self.specs.grad, out_features)):
            options = {k: v for k, v in spec.options().items() if v is not None}
            resolved = Options(**options, rowwise=False).resolved("group_quantize")
            made = sized_components(resolved, (rows, features), groups, torch.device("meta"), grouped=True)
            data, scale, *rest = _directions(made.empty(), self.format, False, True)[1]
            if self.blocked_scales:
                scale = scale.view(ceil_div(features, TILE_ROWS), -1)
            found.append((data, scale, *rest))
        return found[0], found[1]

    def quantize_into(self, weight: GroupedTensor, values: Tensor) -> None:
        """Write ``values`` into a weight that ``quantized`` has made."""
        weight.quantize_(values, scale=self._scale("weight"))

    def quantized(self, w: Tensor) -> GroupedTensor:
        """Return the weight in the recipe's format, with components of both directions."""
        return quantize(w, None, **self.specs.weight.options(), scale=self._scale("weight"))

    def _kept(self) -> Components | None:
        """Return the cached quantised weight, or None; later ones are written into the same memory."""
        return None if self.kept_data is None else Components(*[getattr(self, name) for name in KEPT])

    @decided_when_traced
    def _kept_in_inference_mode(self, this: int) -> bool:
        """Return whether the cached weight is an inference tensor; a trace guards on its dispatch keys."""
        return self.kept_data is not None and self.kept_data.is_inference()

    @decided_when_traced
    def _inside_operator(self, this: int) -> bool:
        return inside_operator()

    def _keep(self, kept: Components) -> None:
        for name, part in zip(KEPT, kept):
            setattr(self, name, part)

    def _forget_kept(self) -> None:
        for name in KEPT:
            setattr(self, name, None)

    def grad(
        self, dy: Tensor, offs: Tensor, rows: Tensor | None = None, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        if not dgrad and not wgrad:
            return Operands(), grouped_dbias(dy, offs) if dbias else None
        rng = None
        if self.specs.grad.stochastic:
            # Out of place, then copied: Inductor miscompiles a clone between two updates of one buffer.
            rng = self.rng_state + torch.arange(2, device=dy.device)  # same seed, next offset
            self.rng_state.copy_(rng)
        made = self.specs.grad.quantize(
            dy, offs, rowwise=dgrad, columnwise=wgrad, scale=self._scale("grad"), rng=rng, rows=rows, dbias=dbias
        )
        self._remember("grad", made)
        of_dgrad, of_wgrad = _directions(made, self.format, dgrad, wgrad)
        return Operands(dgrad=of_dgrad, wgrad=of_wgrad), made.dbias if dbias else None

    # --- state --------------------------------------------------------------------------------------------------------

    def _scale(self, operand: str) -> Tensor | None:
        """Return the operand's scale for delayed scaling, else None."""
        return getattr(self, f"{operand}_scale") if self.delayed else None

    def _remember(self, operand: str, made: Components) -> None:
        """Add the amaxes of a call to the operand's history and update its scale, in training mode."""
        recipe = self.recipe
        if not isinstance(recipe, DelayedScaling) or not self.training:
            return
        amax = made.amax if made.amax.shape[0] else made.columnwise_amax
        spec: QuantizeSpec = getattr(self.specs, operand)
        assert spec.dtype is not None
        history, scale = getattr(self, f"{operand}_history"), getattr(self, f"{operand}_scale")
        fp8_update_history_(amax, history)
        scale.copy_(
            fp8_scale_from_history(
                history, scale, algorithm=recipe.amax_compute_algo, dtype=spec.dtype, margin=recipe.margin
            )
        )

    def _check_quantized(
        self, argument: str, t: GroupedTensor, spec: QuantizeSpec, *, rowwise: bool, columnwise: bool
    ) -> None:
        """Check that the recipe's GEMMs can read the quantised ``t``."""
        made_with = dict(zip(FIELDS, t.static))
        wanted: dict[str, Any] = {"format": spec.format, "scale_layout": spec.scale_layout}
        wanted |= {"rowwise": True} if rowwise else {}
        wanted |= {"columnwise": True, "rht": spec.rht} if columnwise else {}
        wanted |= {"block_2d": spec.block_2d} if FORMATS[spec.format].square_scales else {}
        for name, value in wanted.items():
            if made_with[name] != value:
                fail(
                    f"`{argument}` must be quantised with {name}={value!r} for {self.title}, but it was with "
                    f"{name}={made_with[name]!r}"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaledGemms:
        """Move buffers with the module, but keep their dtypes in ``module.bfloat16()`` and the like."""

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # Pickle does not support tensors of one-byte floats, unlike torch.save.
        state = dict(self.__dict__)
        kept = {name: t for name in KEPT if isinstance(t := self._buffers[name], Tensor) and t.dtype.itemsize == 1}
        state["_buffers"] = self._buffers | {name: _Bytes(t.view(torch.uint8), t.dtype) for name, t in kept.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {k: t.bytes.view(t.dtype) if isinstance(t, _Bytes) else t for k, t in state["_buffers"].items()}
        super().__setstate__(state | {"_buffers": buffers})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.kept_is_old = True  # loading the layer loads this submodule too
        own = {prefix + name: t for name, t in self.named_buffers() if name not in self._non_persistent_buffers_set}
        super()._load_from_state_dict({**own, **state_dict}, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return repr(self.recipe)

    # --- GEMMs --------------------------------------------------------------------------------------------------------

    def fprop(
        self,
        x: Operand,
        w: Operand,
        offs: Tensor,
        bias: Tensor | None,
        bias_scale: Tensor | None,
        to: Destination,
    ) -> Tensor:
        operands = {**_pair(x, w), "offs": offs, "bias": bias, "bias_scale": bias_scale}
        return grouped_gemm_scaled(**operands, **self.names, **to)

    def dgrad(self, dy: Operand, w: Operand, offs: Tensor, to: Destination) -> Tensor:
        operands = {**_pair(dy, w), "offs": offs, "b_direction": "columnwise"}
        return grouped_gemm_scaled(**operands, **self.names, **to)

    def wgrad(
        self, x: Operand, dy: Operand, offs: Tensor, *, out_dtype: torch.dtype, alignment: int | None = None
    ) -> Tensor:
        return grouped_gemm_scaled_wgrad(
            **_pair(dy, x), offs=offs, **self.names, out_dtype=out_dtype, alignment=alignment
        )

    def wgrad_into(self, x: Operand, dy: Operand, offs: Tensor, to: Accumulator, *, overwrite: bool) -> None:
        main_grad, slots, edge = to
        operands = {**_pair(dy, x), "offs": offs, "main_grad": main_grad, "slots": slots}
        if edge is None:
            grouped_gemm_scaled_wgrad_accumulate_(**operands, **self.names, overwrite=overwrite)
        else:
            accumulate = torch.ops.tgl.grouped_gemm_scaled_wgrad_accumulate_.requested
            accumulate(**operands, **self.names, overwrite=overwrite, edge=edge)


def fuse_product(first: Gemms, second: Gemms) -> bool:
    """Return whether to use ``second.activated_product`` instead of ``first.fprop`` and ``second.activated_input``."""
    return (
        isinstance(first, ScaledGemms)
        and isinstance(second, ScaledGemms)
        and first.names == second.names
        and second.fused_with_gemm
    )


_NAMES = ("a", "a_scale", "a_amax"), ("b", "b_scale", "b_amax")


def _pair(a: Operand, b: Operand) -> dict[str, Any]:
    """Return the operands of a scaled GEMM as its keyword arguments."""
    return {**dict(zip(_NAMES[0], a)), **dict(zip(_NAMES[1], b))}


def _directions(made: Components, form: str, rowwise: bool, columnwise: bool) -> tuple[Operand, Operand]:
    """Return the rowwise and the columnwise operand of GEMMs, ``()`` for one that is not requested."""
    parts = 3 if form in WITH_AMAX else 2
    rows = (made.data, made.scale, made.amax)[:parts] if rowwise else ()
    return rows, (made.columnwise_data, made.columnwise_scale, made.columnwise_amax)[:parts] if columnwise else ()


def _forward_operands(
    made: Components, form: str, fprop: bool, *, dgrad: bool = False, wgrad: bool = False
) -> Operands:
    rows, columns = _directions(made, form, fprop, dgrad or wgrad)
    return Operands(fprop=rows, dgrad=columns if dgrad else (), wgrad=columns if wgrad else ())


def gemms_for(
    recipe: Recipe | str | None,
    num_gemms: int,
    in_features: int,
    out_features: int,
    *,
    device: torch.device | str | None = None,
) -> Gemms:
    """Return the GEMMs of a layer with ``recipe``; None for dense GEMMs."""
    recipe = named(recipe)
    if recipe is None:
        return DenseGemms()
    return ScaledGemms(recipe, num_gemms, in_features, out_features, device=device)
