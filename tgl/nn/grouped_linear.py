"""``GroupedLinear``: G linear layers on G groups of rows, as one module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import offload
from ..meta.specs import accumulator
from ..ops._library import autocast_operand
from ..ops.grouped_gemm import grouped_gemm
from ..ops.splits_to_offsets import splits_to_offsets
from ..recipes import Recipe
from ._buffers import check_buffer, check_disjoint
from ._delayed import Delayed, Pending, add_to
from ._errors import explain_to_dynamo, fail
from ._gemms import Gemms, Operands
from ._linear_function import SLOT_ALIGNMENT, Call, LinearFunction, fprop
from ._parameters import GroupedParameters
from ._scaled_gemms import ScaledGemms, gemms_for

MSplits = Tensor | Sequence[int]


def offsets_on(m_splits: MSplits, num_gemms: int, device: torch.device) -> Tensor:
    """int32 ``[G]`` cumulative group ends on ``device``, without a host read if ``m_splits`` is there already."""
    if isinstance(m_splits, Tensor):
        if m_splits.shape != (num_gemms,):
            fail(f"`m_splits` must be of shape [num_gemms] = ({num_gemms},), but got {tuple(m_splits.shape)}")
        if m_splits.device == device:
            return splits_to_offsets(m_splits)
    elif len(m_splits) != num_gemms:
        fail(f"`m_splits` must have num_gemms = {num_gemms} entries, but got {len(m_splits)}")
    message = (
        "m_splits as a list, or on another device than the input, costs a blocking copy and cannot be captured in a "
        "CUDA graph; pass a tensor on the input's device"
    )
    explain_to_dynamo(message)
    warnings.warn(
        message,
        DeprecationWarning,
        stacklevel=5,  # the caller of the module: forward, _call_impl and _wrapped_call_impl lie between
    )
    return splits_to_offsets(torch.as_tensor(m_splits).to(device))


def result_dtype(inp: Tensor) -> torch.dtype:
    """The dtype a layer computes in: that of its input, or of autocast where active."""
    if torch.is_autocast_enabled(inp.device.type) and inp.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return torch.get_autocast_dtype(inp.device.type)
    return inp.dtype


class GroupedLinear(GroupedParameters):
    """Apply G independent linear layers, each to its own group of rows: ``y[t] = weight[g] x[t] + bias[g]``.

    Args:
        num_gemms: G, the number of groups (experts on this rank).
        in_features: K.
        out_features: N.
        bias: whether to add a bias.
        params_dtype: dtype of the parameters; default ``torch.get_default_dtype()``.
        device: device of the parameters; ``"meta"`` defers initialisation to ``reset_parameters``.
        init_method: called with the weight ``[G, N, K]`` to fill it in place; default: every expert as ``nn.Linear``
            does.
        state_dict_format: ``"packed"`` saves ``weight [G, N, K]`` and ``bias [G, N]``; ``"discrete"`` saves
            TransformerEngine's ``weight0, weight1, ...`` and ``bias0, ...``. Default: the form of the parameters.
            Either form loads, whatever this says.
        single_grouped_weight: True: parameters ``weight [G, N, K]`` and ``bias [G, N]``. False: ``weight0 [N, K],
            weight1, ...`` and ``bias0 [N], ...`` as TransformerEngine has them, lying side by side in memory; their
            gradients are views of one allocation, each on a multiple of 256 bytes.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` inside the GEMM; ``weight.grad``
            stays None. ``main_grad`` is ``[G, N, K]``, or ``[N, K]`` for each of the discrete weights and evenly spaced
            in one allocation; float32 or the parameter's dtype. If ``weight.overwrite_main_grad`` is set and true (on
            the first of discrete weights) it is replaced instead. ``weight.grad_added_to_main_grad`` is set to True.
        delay_wgrad_compute: leave the gradients of weight and bias to ``backward_dw``.
        save_original_input: keep the input itself for the backward, and not what a recipe makes of it.
        recipe: how the operands are quantised, see ``tgl.recipes``; None for not at all.

    Attributes:
        weight: parameter ``[G, N, K]``, with ``single_grouped_weight``.
        bias: parameter ``[G, N]``, likewise, or None.
    """

    weight: Tensor
    bias: Tensor | None
    buffers_taken = frozenset(("output", "grad_input"))  # by ``Sequential``'s names

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str | None = None,
        single_grouped_weight: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            params_dtype,
            device,
            init_method,
            single_grouped_weight,
            state_dict_format,
        )
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input = save_original_input
        self.gemms: Gemms = gemms_for(
            recipe, num_gemms, in_features, out_features, device=device, save_original_input=save_original_input
        )
        self._dense = recipe is None
        # Whether a call without buffers is ``grouped_gemm`` and no more.
        self.plain = self._dense and single_grouped_weight and not (fuse_wgrad_accumulation or delay_wgrad_compute)
        self._delayed = Delayed()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        gemms: Gemms | None = getattr(self, "gemms", None)  # not there yet when the base class initialises
        if gemms is not None:
            gemms.reset_state()

    def quantize_weight(self) -> None:
        """Replace the weight by a ``GroupedTensor`` parameter in the recipe's format, the only copy from then on.

        ``weight.unbind()`` gives the experts' weights as views, ``weight.quantize_(values)`` writes new values, and
        gradients are dense.

        Raises:
            ValueError: there is no recipe, or every group has a weight parameter of its own.
        """
        if not isinstance(self.gemms, ScaledGemms):
            raise ValueError("`recipe` must be given for quantize_weight, but is None")
        if not self.single_grouped_weight:
            raise ValueError("`single_grouped_weight` must be True for quantize_weight, but is False")
        self.weight = nn.Parameter(self.gemms.quantized(self.weight.detach()), self.weight.requires_grad)

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias."""
        return bool(self._names["bias"])

    def forward(
        self,
        inp: Tensor,
        m_splits: MSplits,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            inp: ``[..., K]``; the leading dimensions flatten to T rows, grouped by expert.
            m_splits: ``[G]``, any integer dtype, on the device of ``inp``: rows of each group. Their sum may be less
                than T: the rows past it are not read and come out as zeros. A list, or a tensor elsewhere, is copied at
                the price of a synchronisation, with a ``DeprecationWarning``.
            is_first_microbatch: for recipes: True quantises the weight and keeps the result, False uses what was kept,
                None quantises and keeps nothing. A bool tensor on the device serves both values with one graph; the
                first call quantises whatever it holds.
            out: contiguous buffer for the result, of its shape and dtype, requiring no grad. Rows past the sum of
                ``m_splits`` keep what they hold.
            dgrad_out: the same for the gradient of ``inp``, which flows upstream as it is: rows past the sum hold what
                the caller left there. Not written if ``inp`` requires no grad.

        Returns:
            ``[..., N]`` in the dtype of ``inp`` (of autocast, where active); the memory of ``out`` if given. (Compilers
            that make graphs functional and do not undo it, as the ``aot_eager`` backend, return a copy.)

        Raises:
            ValueError, TypeError: arguments that do not fit, before anything is written.
        """
        offs = offsets_on(m_splits, self.num_gemms, inp.device)
        return self.forward_offsets(inp, offs, is_first_microbatch=is_first_microbatch, out=out, dgrad_out=dgrad_out)

    def forward_offsets(
        self,
        inp: Tensor,
        offs: Tensor,
        bias_scale: Tensor | None = None,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """The same for cumulative ends ``offs``, int32 ``[G]``, and a bias scaled per row by ``bias_scale [T]``."""
        if self.plain and out is None and dgrad_out is None and not offload.in_graph():
            rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
            y = grouped_gemm(rows, self.weight.transpose(1, 2), offs, self.bias, bias_scale)
        else:
            call, rows = self._call(inp, offs, is_first_microbatch=is_first_microbatch, out=out, dgrad_out=dgrad_out)
            y = self._apply_function(call, rows, None, bias_scale)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def forward_activated(
        self,
        hidden: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        recompute: bool = False,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        prepared: Operands | None = None,
    ) -> Tensor:
        """The layer on ``grouped_activation(hidden, offs, probs, **activation)``, as one function of ``hidden``.

        ``probs`` multiplies the bias as well. ``recompute`` keeps ``hidden`` alone for the backward, which forms the
        activation again. ``prepared`` is the activation ready for the GEMMs, by ``forward_quantizing``.
        """
        call, rows = self._call(
            hidden,
            offs,
            is_first_microbatch=is_first_microbatch,
            out=out,
            probs=probs,
            activation=activation,
            recompute=recompute,
        )
        return self._apply_function(call._replace(prepared=prepared), rows, probs, None)

    def forward_quantizing(
        self,
        inp: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        following: GroupedLinear,
        *,
        recompute: bool = False,
        is_first_microbatch: bool | Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> tuple[Tensor, Operands]:
        """The layer, and what ``following.forward_activated`` takes as ``prepared``, by the op that makes both.

        Both layers have a recipe that ``fuses_product``; ``recompute`` is what ``following`` will be given.
        """
        call, rows = self._call(inp, offs, is_first_microbatch=is_first_microbatch, dgrad_out=dgrad_out)
        gemms = following.gemms
        assert isinstance(gemms, ScaledGemms)
        wgrad = self._needs_wgrad() and not call.save_original_input
        following_wgrad = following._needs_wgrad() and not (following.save_original_input or recompute)
        with torch.no_grad():
            x = call.input(rows, offs, None, fprop=True, wgrad=wgrad)
            y, prepared = gemms.activated_product(
                x.fprop,
                call.weight.fprop,
                offs,
                call.bias,
                probs,
                activation,
                out_dtype=call.out_dtype,
                wgrad=following_wgrad,
            )
        y = self._apply_function(call._replace(made=(y, x.wgrad)), rows, None, None)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features), prepared

    def _needs_wgrad(self) -> bool:
        return torch.is_grad_enabled() and any(w.requires_grad for w in self.group_parameters("weight"))

    def _call(
        self,
        inp: Tensor,
        offs: Tensor,
        *,
        is_first_microbatch: bool | Tensor | None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        probs: Tensor | None = None,
        activation: dict[str, Any] | None = None,
        recompute: bool = False,
    ) -> tuple[Call, Tensor]:
        """What a call is made of, and the input as a matrix."""
        weight, bias = self.packed("weight"), self.packed("bias")
        assert weight is not None
        rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        out_dtype = result_dtype(rows)
        if self._dense and torch.is_autocast_enabled(rows.device.type):
            rows, weight = autocast_operand(out_dtype, rows), autocast_operand(out_dtype, weight)
            bias = autocast_operand(out_dtype, bias) if bias is not None else None
        if out is not None or dgrad_out is not None:
            out, dgrad_out = self._checked_buffers(inp, out, dgrad_out, rows, out_dtype)

        needs_wgrad = self._needs_wgrad()
        needs_dgrad = torch.is_grad_enabled() and (rows.requires_grad or (probs is not None and probs.requires_grad))
        main_grad = stash = None
        if needs_wgrad and self.fuse_wgrad_accumulation and not self.delay_wgrad_compute:
            main_grad = self.packed_main_grad()
            self.mark_main_grad()
        if needs_wgrad and self.delay_wgrad_compute:
            stash = self._delayed
            if torch.compiler.is_compiling() and not stash.copies:
                fail(
                    "delay_wgrad_compute needs reserve_delayed_wgrad(max_rows) before the layer is compiled: a graph's "
                    "tensors are reused when it has ended, so they are copied into buffers of the layer"
                )
        with torch.no_grad():
            operands = self.gemms.weight(weight, dgrad=needs_dgrad, is_first_microbatch=is_first_microbatch)
        call = Call(
            gemms=self.gemms,
            offs=offs,
            weight=operands,
            bias=bias,
            out_dtype=out_dtype,
            discrete=not self.single_grouped_weight,
            activation=activation,
            scaled_by_probs=activation is not None and probs is not None and self.has_bias,
            out=out,
            dgrad_out=dgrad_out,
            main_grad=main_grad,
            overwrite_main_grad=main_grad is not None and self.overwrites_main_grad(),
            stash=stash,
            save_original_input=self.save_original_input or recompute,
        )
        return call, rows

    def _apply_function(self, call: Call, rows: Tensor, probs: Tensor | None, bias_scale: Tensor | None) -> Tensor:
        weights, biases = self.group_parameters("weight"), self.group_parameters("bias")
        grad = torch.is_grad_enabled()
        if not grad or not any(t is not None and t.requires_grad for t in (rows, probs, bias_scale, *weights, *biases)):
            return fprop(call, rows, probs, bias_scale)[0]
        return LinearFunction.apply(call, len(weights), rows, probs, bias_scale, *weights, *biases)

    def _checked_buffers(
        self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None, rows: Tensor, out_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both buffers as matrices."""
        if out is not None:
            check_buffer("out", out, (*inp.shape[:-1], self.out_features), out_dtype, inp.device)
        if dgrad_out is not None:
            check_buffer("dgrad_out", dgrad_out, inp.shape, inp.dtype, inp.device)
            if rows.dtype != inp.dtype:
                fail(f"`dgrad_out` must be None where autocast casts the input, but got a {dgrad_out.dtype} buffer")
        check_disjoint({"out": out, "dgrad_out": dgrad_out}, {"inp": inp})
        if inp.dim() != 2:
            out = out.view(-1, self.out_features) if out is not None else None
            dgrad_out = dgrad_out.view(-1, self.in_features) if dgrad_out is not None else None
        return out, dgrad_out

    # --- delayed weight gradients -------------------------------------------------------------------------------------

    def reserve_delayed_wgrad(self, max_rows: int, microbatches: int = 1, *, dtype: torch.dtype | None = None) -> None:
        """Make room for the copies that ``delay_wgrad_compute`` needs in a compiled graph, and make them in eager too.

        To be called before the layer is compiled, and again after it has been moved or cast. Reads the device.

        Args:
            max_rows: most rows T of any microbatch.
            microbatches: how many backwards there may be before ``backward_dw``; one more is an error.
            dtype: of the layer's input (under autocast, the autocast dtype); default that of the weight.

        Raises:
            RuntimeError: without ``delay_wgrad_compute``, or while something is pending.
        """
        if not self.delay_wgrad_compute:
            raise RuntimeError("reserve_delayed_wgrad needs a layer with delay_wgrad_compute=True")
        if self._delayed.in_use():
            raise RuntimeError("reserve_delayed_wgrad must come before a microbatch's forward, or after backward_dw")
        weight = self.group_parameters("weight")[0]
        x, dy = self.gemms.wgrad_operands_like(
            max_rows, self.num_gemms, self.in_features, self.out_features, dtype or weight.dtype
        )
        offs = torch.empty(self.num_gemms, dtype=torch.int32, device="meta")
        dbias = None
        if any(b.requires_grad for b in self.group_parameters("bias")):
            dbias = torch.empty(self.num_gemms, self.out_features, dtype=accumulator(weight.dtype), device="meta")
        self._delayed.reserve(microbatches, Pending(x, dy, offs, dbias), weight.device)

    def delayed_bytes_copied_host(self) -> int:
        """Bytes that ``delay_wgrad_compute`` has copied so far; 0 where it keeps references. Reads the device."""
        return self._delayed.bytes_copied_host()

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Form the gradients of weight and bias that ``delay_wgrad_compute`` has put off, of all microbatches since.

        They are added to ``main_grad`` (with ``fuse_wgrad_accumulation``) or to ``grad``; with ``overwrite_main_grad``
        their sum replaces what ``main_grad`` holds, if anything is pending. It may come late, after any
        number of backwards (of ``microbatches``, if reserved). A second call adds nothing, and on a layer without
        ``delay_wgrad_compute`` it does nothing. If it never comes, weight and bias get no gradient from those
        microbatches, whose tensors stay alive until it does.

        Raises:
            RuntimeError: a tensor that was kept by reference has been modified in place.
        """
        entries = self._delayed.pending()
        if not entries:
            return
        weights, biases = self.group_parameters("weight"), self.group_parameters("bias")
        discrete = not self.single_grouped_weight
        main_grad = self.packed_main_grad() if self.fuse_wgrad_accumulation else None
        if main_grad is not None:
            self.mark_main_grad()
            if self.overwrites_main_grad():
                main_grad.masked_fill_(torch.as_tensor(self._delayed.in_use(), device=main_grad.device), 0)
        target, dbias = main_grad, None
        for x, dy, offs, more in entries:
            if target is None:
                target = self.gemms.wgrad(
                    x, dy, offs, out_dtype=weights[0].dtype, alignment=SLOT_ALIGNMENT if discrete else None
                )
            else:
                self.gemms.wgrad_into(x, dy, offs, target, overwrite=False)
            if more is not None:
                dbias = more if dbias is None else dbias + more
        assert target is not None
        if main_grad is None:
            add_to(target.unbind() if discrete else (target,), weights)
        if dbias is not None:
            dbias = dbias.to(biases[0].dtype, copy=True)  # what is pending may be a buffer that is written again
            add_to(dbias.unbind() if discrete else (dbias,), biases)
        self._delayed.clear()

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        if self._delayed.in_use():
            raise RuntimeError("a layer with delayed gradients cannot be moved or cast; call backward_dw first")
        self._delayed = Delayed()  # what is reserved is of the old device and dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
        )
