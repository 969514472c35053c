"""``GroupedLinear``: G linear layers on G groups of rows, as one module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import offload
from ..ops._engine import in_dynamo
from ..ops._library import autocast_enabled, autocast_operand
from ..ops.grouped_gemm import grouped_gemm
from ..recipes import Recipe, brief
from ..tensor import GroupedTensor
from ._arguments import check_flags, dtype_of_parameters, one_of
from ._buffers import check_buffer, check_disjoint
from ._delay_wgrad import DelayedGradients
from ._errors import fail, not_a_microbatch, not_a_tensor
from ._external_quantization import PLAIN, values_of
from ._gemms import Gemms
from ._inputs import MSplits, check_input_dtype, needs_grad, offsets_on, result_dtype
from ._linear_function import Call, LinearFunction, TransformedFunction, fprop, linear_function
from ._main_grad import MainGrad, wants_stand_in
from ._parameter_gradients import ParameterGradients
from ._persistent_tensors import persistent_tensors
from ._scaled_gemms import ScaledGemms, gemms_for
from ._transforms import check_reverse_mode, inside_of, is_differentiated, outside

Parts = tuple[list[nn.Parameter], list[nn.Parameter]]  # weights and biases


class GroupedLinear(DelayedGradients):
    """Apply G independent linear layers, each to its own group of rows: ``y[t] = weight[g] x[t] + bias[g]``.

    Args:
        num_gemms, num_experts: G, the number of groups (experts on this rank), by either name.
        in_features: K.
        out_features: N.
        bias: whether to add a bias.
        params_dtype, dtype: dtype of the parameters, by either name; default ``torch.get_default_dtype()``.
        device: device of the parameters; ``"meta"`` defers initialisation to ``reset_parameters``.
        init_method: called with the weight ``[G, N, K]`` to fill it in place; default: the initialisation of
            ``nn.Linear`` for every expert.
        state_dict_format: ``"packed"`` saves ``weight [G, N, K]`` and ``bias [G, N]``; ``"discrete"`` saves
            TransformerEngine's ``weight0, weight1, ...`` and ``bias0, ...``; ``"components"`` saves a quantised weight
            as plain tensors ``weight.rowwise_data``, ``weight.rowwise_scale``, ..., for file formats without tensor
            subclasses. Default: the form of the parameters. Every form can be loaded, whatever the value, which is an
            attribute too.
        single_grouped_weight: True: parameters ``weight [G, N, K]`` and ``bias [G, N]``. False: ``weight0 [N, K],
            weight1, ...`` and ``bias0 [N], ...`` with TransformerEngine's names, contiguous in one tensor; their
            gradients are views of one allocation, each on a multiple of 256 bytes.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` in the epilogue of the GEMM;
            ``weight.grad`` stays None. ``main_grad`` is read in the backward. It is ``[G, N, K]``, or ``[N, K]`` for
            each of the discrete weights (evenly spaced in one allocation, or it costs a copy), of the accumulation
            dtype (float32 or float64) or the parameter's dtype. A true ``weight.overwrite_main_grad`` (on the first
            weight, if discrete) replaces its content instead of adding. If a framework has set
            ``weight.grad_added_to_main_grad``, it is set to True, and ``weight.grad`` to zeros.
        delay_wgrad_compute: compute the gradients of weight and bias in ``backward_dw``.
        save_original_input: save the input for the backward instead of its quantised components.
        recipe: how the operands are quantised: a recipe of ``tgl.recipes``, or the name of one, such as ``"mxfp8"``;
            None for no quantisation.

    Attributes:
        weight: parameter ``[G, N, K]``, with ``single_grouped_weight``.
        bias: parameter ``[G, N]``, with ``single_grouped_weight``; None without a bias.
    """

    weight: Tensor
    bias: Tensor | None
    buffers_taken = frozenset(("output", "grad_input"))  # names as in ``Sequential``

    def __init__(
        self,
        num_gemms: int | None = None,
        in_features: int | None = None,
        out_features: int | None = None,
        bias: bool = True,
        *,
        num_experts: int | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str | None = None,
        single_grouped_weight: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | str | None = None,
    ) -> None:
        check_flags(
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        super().__init__(
            one_of(num_gemms=num_gemms, num_experts=num_experts),
            one_of(in_features=in_features),
            one_of(out_features=out_features),
            bias,
            dtype_of_parameters(params_dtype, dtype),
            device,
            init_method,
            single_grouped_weight,
            state_dict_format,
        )
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input = save_original_input
        self.gemms: Gemms = gemms_for(recipe, self.num_gemms, self.in_features, self.out_features, device=device)
        self._dense = recipe is None
        self.beyond_gemm = self._beyond_gemm()
        self.plain = not self.beyond_gemm  # whether a call without buffers is just ``grouped_gemm``
        self._start_delaying()

    def _beyond_gemm(self) -> tuple[str, ...]:
        """Return the reasons why a call without buffers is more than a ``grouped_gemm``."""
        options = {
            "has a recipe": not self._dense,
            "has a weight for each expert": not self.single_grouped_weight,
            "has `fuse_wgrad_accumulation`": self.fuse_wgrad_accumulation,
            "has `delay_wgrad_compute`": self.delay_wgrad_compute,
        }
        return tuple([words for words, given in options.items() if given])

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.beyond_gemm = self._beyond_gemm()  # pickles of earlier versions have none

    def reset_parameters(self) -> None:
        gemms: Gemms | None = getattr(self, "gemms", None)  # not set yet when the base class initialises
        weight = self._parameters.get("weight")
        if isinstance(weight, GroupedTensor):
            values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            try:
                self.weight = nn.Parameter(values)
                super().reset_parameters()
            finally:
                self.weight = weight
        else:
            super().reset_parameters()
        if gemms is not None:
            gemms.reset_state()
        if isinstance(weight, GroupedTensor):
            assert isinstance(gemms, ScaledGemms)
            with torch.no_grad():
                gemms.quantize_into(weight, values)

    def quantize_weight(self) -> None:
        """Replace the weight by a ``GroupedTensor`` parameter in the recipe's format, the only copy from then on.

        The new parameter has the attributes of the old one. An optimizer made before this call still holds the old
        parameter. ``reset_parameters`` draws new values and quantises them. ``weight.unbind()`` returns the experts'
        weights as views, ``weight.quantize_(values)`` writes new values, and gradients are dense.

        Raises:
            ValueError: there is no recipe, or every group has a weight parameter of its own.
        """
        if not isinstance(self.gemms, ScaledGemms):
            raise ValueError("`recipe` must be given for quantize_weight, but is None")
        if not self.single_grouped_weight:
            raise ValueError("`single_grouped_weight` must be True for quantize_weight, but is False")
        weight = self.weight
        with persistent_tensors():
            self.weight = nn.Parameter(self.gemms.quantized(weight.detach()), weight.requires_grad)
        vars(self.weight).update(vars(weight))  # ``main_grad`` and other attributes that frameworks set

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return bool(self._names["bias"])

    def forward(
        self,
        inp: Tensor,
        m_splits: MSplits,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        bias_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            inp: ``[..., K]``; the leading dimensions flatten to T rows, grouped by expert. With a recipe it may be a
                ``GroupedTensor`` quantised with the group ends that ``m_splits`` add up to. The ends are on the
                device, and only ``debug_checks()`` compares them. Outside it, an input quantised for other groups
                gives wrong rows, because blocks and scales are applied to rows that they were not computed from.
            m_splits: ``[G]``, any integer dtype, on the device of ``inp``: rows of each group. Their sum may be less
                than T: the rows past it are not read and come out as zeros. A list, or a tensor on another device, is
                copied to that device; the copy blocks, and cannot be captured in a CUDA graph. A compiled graph holds
                the numbers of a list as constants, so each new list recompiles; a tensor does not.
            is_first_microbatch: for recipes: True quantises the weight and caches the result, False uses the cached
                weight, None quantises and caches nothing. A bool tensor on the device allows one graph for both
                values; the first call quantises whatever its value. With ``fuse_wgrad_accumulation`` True also
                replaces the content of ``main_grad``; False, None and a tensor add to it.
            out: contiguous buffer for the result, of its shape and dtype, requiring no grad. Rows past the sum of
                ``m_splits`` keep their bytes.
            dgrad_out: contiguous buffer for the gradient of ``inp``, of its shape and dtype, requiring no grad. It is
                passed upstream as it is: rows past the sum of ``m_splits`` keep their bytes. Not written if ``inp``
                requires no grad.
            bias_scale: ``[T]``, factor of the bias of every row; None for 1.

        Returns:
            ``[..., N]`` in the dtype of ``inp`` (of autocast, where active); the memory of ``out`` if given. (Backends
            that leave graphs functional, such as ``aot_eager``, return a copy.)

        Raises:
            ValueError, TypeError: arguments that do not fit, before anything is written.
            tgl.GraphCaptureError: ``m_splits`` is not on the device of ``inp`` while a CUDA graph is captured.
        """
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        offs = offsets_on(m_splits, self.num_gemms, inp.device)
        return self.forward_offsets(
            inp, offs, bias_scale, is_first_microbatch=is_first_microbatch, out=out, dgrad_out=dgrad_out
        )

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
        """``forward`` for cumulative ends ``offs``, int32 ``[G]``; ``bias_scale [T]`` scales the bias of each row."""
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        if bias_scale is not None and not isinstance(bias_scale, Tensor):
            not_a_tensor("`bias_scale`", bias_scale, "a tensor or None")
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, (bool, Tensor)):
            not_a_microbatch(is_first_microbatch)
        if self.plain and out is None and dgrad_out is None and not offload.in_graph():
            rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
            weight = self.weight
            if rows.dtype != weight.dtype:
                check_input_dtype(rows.dtype, weight.dtype, rows.device)
            if type(weight) not in PLAIN:
                weight = values_of(weight)
            y = grouped_gemm(rows, weight.transpose(1, 2), offs, self.bias, bias_scale)
        else:
            y = self._by_function(inp, offs, bias_scale, is_first_microbatch, out, dgrad_out)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def _by_function(
        self,
        inp: Tensor,
        offs: Tensor,
        bias_scale: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        out: Tensor | None,
        dgrad_out: Tensor | None,
    ) -> Tensor:
        """Run ``LinearFunction``, the autograd function that supports all options; returns ``[T, N]``."""
        if torch._C._are_functorch_transforms_active():
            if torch.compiler.is_compiling():  # Dynamo would drop the backward
                fail(
                    "a layer of this kind cannot be compiled with a transform of torch.func around it: call it eagerly"
                )
            return self._by_transformed_function(inp, offs, bias_scale, is_first_microbatch, out, dgrad_out)
        parts = self._parts_of_call()
        rows, out_dtype = self._matrix(inp), result_dtype(inp)
        if out is not None or dgrad_out is not None:
            out, dgrad_out = self._checked_buffers(inp, out, dgrad_out, out_dtype)
        call = self._call(
            parts,
            rows,
            out_dtype,
            is_first_microbatch=is_first_microbatch,
            needs_dgrad=rows.requires_grad and torch.is_grad_enabled(),
            needs_wgrad=needs_grad(parts[0]),
            out=out,
            dgrad_out=dgrad_out,
        )
        rows, offs = self._input(rows, offs, out_dtype)
        tensors = (rows, bias_scale, *parts[0], *parts[1], *call.gradients.edge)
        if not needs_grad(tensors):
            return fprop(call, offs, rows, bias_scale)[0]
        if in_dynamo():
            return LinearFunction.apply(call, offs, *tensors)
        return linear_function(call, offs, *tensors)[0]

    def _by_transformed_function(
        self,
        inp: Tensor,
        offs: Tensor,
        bias_scale: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        out: Tensor | None,
        dgrad_out: Tensor | None,
    ) -> Tensor:
        """Run ``_by_function`` on the tensors inside the wrappers of ``torch.func``."""
        out_dtype = result_dtype(inp)
        if out is not None or dgrad_out is not None:
            self._checked_buffers(inp, out, dgrad_out, out_dtype)  # raises
        check_reverse_mode()
        parts = weights, biases = self._parts_of_call()
        if any(is_differentiated(w) for w in weights):
            for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
                if getattr(self, name):
                    fail(
                        f"`{name}` must be False where torch.func differentiates by the weight, as the transform "
                        "returns the gradient; give functional_call to a layer without",
                        RuntimeError,
                    )
        needs_wgrad = any(is_differentiated(w) or w.requires_grad for w in weights)
        rows, scale = self._matrix(inp), inside_of(bias_scale)
        first = inside_of(is_first_microbatch)
        with outside():
            inner = inside_of(rows)
            call = self._call(
                parts, inner, out_dtype, is_first_microbatch=first, needs_dgrad=True, needs_wgrad=needs_wgrad
            )
            inner, ends = self._input(inner, inside_of(offs), out_dtype)
            made = fprop(call, ends, inner, scale, wgrad=needs_wgrad)
        if self._dense and autocast_enabled(rows.device.type):
            rows = autocast_operand(out_dtype, rows)
        return TransformedFunction.apply((call, made), ends, rows, bias_scale, *weights, *biases)

    def _parts_of_call(self) -> Parts:
        """Return the weights and the biases; read once per call, because a parametrization computes them on access."""
        return self.group_parameters("weight"), self.group_parameters("bias")

    def _matrix(self, inp: Tensor) -> Tensor:
        """Return ``inp`` as a matrix ``[T, K]``."""
        rows = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        if rows.shape[1] != self.in_features:
            self._check_input(rows.shape[1], None, rows.device)  # raises
        return rows

    def _input(self, rows: Tensor, offs: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``rows`` and ``offs`` as the layer's GEMMs take them."""
        if not self._dense:
            return rows, self.gemms.checked_offs(rows, offs)  # type: ignore[attr-defined]
        if rows.dtype != out_dtype and autocast_enabled(rows.device.type):
            rows = autocast_operand(out_dtype, rows)
        return rows, offs

    def _call(
        self,
        parts: Parts,
        rows: Tensor,
        out_dtype: torch.dtype,
        *,
        is_first_microbatch: bool | Tensor | None,
        needs_dgrad: bool,
        needs_wgrad: bool,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        again: bool = False,
    ) -> Call:
        """Return the ``Call`` of one forward, checked before any work. Only dtype and device of ``rows`` are used.

        ``again``: save the input unquantised and prepare it again in the backward, as ``save_original_input`` does.
        """
        (weight, table), bias = self.placed("weight", parts[0]), self.packed("bias", parts[1])
        gemms = self.gemms
        if isinstance(gemms, ScaledGemms):
            gemms.check_dtypes("`inp`", rows.dtype, weight.dtype)
        else:
            if rows.dtype != weight.dtype:
                check_input_dtype(rows.dtype, weight.dtype, rows.device)
            if autocast_enabled(rows.device.type):
                if table is not None and autocast_operand(out_dtype, weight[:0]).dtype != weight.dtype:
                    weight, table = weight.index_select(0, table), None  # overlapping slots must not be cast
                weight = autocast_operand(out_dtype, weight)
                bias = autocast_operand(out_dtype, bias) if bias is not None else None
        main_grad = self._check_gradients(needs_wgrad)
        operands = gemms.weight(weight, table, dgrad=needs_dgrad, is_first_microbatch=is_first_microbatch)
        weights, biases = parts
        fuses = needs_wgrad and self.fuse_wgrad_accumulation
        gradients = ParameterGradients(
            num_weights=len(weights),
            num_biases=len(biases),
            weight_shape=weights[0].shape,
            weight_dtype=weights[0].dtype,
            bias_dtype=biases[0].dtype if biases else None,
            discrete=not self.single_grouped_weight,
            main_grad=main_grad,
            overwrite_main_grad=fuses and (is_first_microbatch is True or self.overwrites_main_grad()),
            stands_in=self._stand_ins() if fuses else (),
            stash=self._delayed if needs_wgrad and self.delay_wgrad_compute else None,
            parameters=() if in_dynamo() else (*weights, *biases),
            edge=self._edge_of_call(parts) if fuses or (needs_wgrad and self.delay_wgrad_compute) else (),
        )
        again = self.save_original_input or again
        return Call(gemms, operands, bias, out_dtype, gradients, out, dgrad_out, again)

    def _check_input(
        self,
        width: int | None,
        dtype: torch.dtype | None,
        device: torch.device,
        name: str = "`inp`",
        *,
        weight: torch.dtype | None = None,
    ) -> None:
        """Check that the layer supports rows of this width and dtype (None: not known yet) on ``device``.

        ``weight`` is the weight's dtype if the caller has it; a parametrized weight is not computed for this check.

        Raises:
            ValueError, TypeError: it does not; the error names the rows ``name``.
        """
        if width is not None and width != self.in_features:
            fail(f"{name} must be [..., K] with K = in_features = {self.in_features}, but got K = {width}")
        if weight is None and self._registered("weight"):
            weight = self.group_parameters("weight")[0].dtype
        if isinstance(self.gemms, ScaledGemms):
            self.gemms.check_dtypes(name, dtype, weight)
        elif dtype is not None and weight is not None and dtype != weight:
            check_input_dtype(dtype, weight, device, name)

    def _check_call(self, is_first_microbatch: bool | Tensor | None = None) -> None:
        """Check everything about a call except its rows, before any work.

        Raises:
            ValueError, TypeError, RuntimeError: as ``forward`` would.
        """
        if self.plain or torch._C._are_functorch_transforms_active() or not self._registered("weight"):
            return
        weights = self.group_parameters("weight")
        self._check_gradients(needs_grad(weights))
        if isinstance(self.gemms, ScaledGemms):
            self.gemms.check_weight(weights[0], is_first_microbatch)

    def _check_gradients(self, needs_wgrad: bool) -> MainGrad | Callable[[], MainGrad] | None:
        """Check that weight gradients can go where the options send them; returns ``_main_grad_for_call``."""
        if not needs_wgrad or not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            return None
        self._check_registered()
        main_grad = self._main_grad_for_call() if self.fuse_wgrad_accumulation else None
        if self.delay_wgrad_compute:
            self._check_delay()
        return main_grad

    def _check_registered(self) -> None:
        """Check that gradients which bypass autograd belong to registered parameters."""
        # A bias may be parametrized too, and its gradient is delayed together with the weight's.
        names = ("weight", "bias") if self.delay_wgrad_compute else ("weight",)
        computed = [full for name in names for full in self._names[name] if full not in self._parameters]
        if computed:
            option = "delay_wgrad_compute" if self.delay_wgrad_compute else "fuse_wgrad_accumulation"
            fail(
                f"`{option}` must be False for a layer whose `{computed[0]}` is computed from other parameters "
                "(torch.nn.utils.parametrize): their gradients need the one that autograd would not see"
            )

    def _main_grad_for_call(self) -> MainGrad | Callable[[], MainGrad] | None:
        """Check ``main_grad`` as far as it exists and return it or a function that reads it in the backward.

        Eager code uses the ``main_grad`` of the time of the backward; a compiled graph has it as an input.

        Raises:
            ValueError, TypeError: there is none, or it does not fit.
        """
        weights = self.group_parameters("weight")
        if not in_dynamo():
            self.checked_main_grad(weights, create=False, required=not self.delay_wgrad_compute)
            return None if self.delay_wgrad_compute else functools.partial(self.checked_main_grad, weights)
        if self.delay_wgrad_compute:
            return None
        if self._has_tensor_hooks(id(self)):
            fail(
                "`weight.register_hook` must not have been called for fuse_wgrad_accumulation in a compiled graph, "
                "where the gradient goes to main_grad and no hook can see it"
            )
        self.mark_main_grad()
        return self.checked_main_grad(weights)

    def _stand_ins(self) -> tuple[bool, ...]:
        return tuple([wants_stand_in(w) for w in self.group_parameters("weight")])

    def _checked_buffers(
        self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Check both buffers and return them as matrices."""
        if out is not None:
            check_buffer("out", out, (*inp.shape[:-1], self.out_features), out_dtype, inp.device)
        if dgrad_out is not None:
            check_buffer("dgrad_out", dgrad_out, inp.shape, inp.dtype, inp.device)
            if self._dense and out_dtype != inp.dtype:
                fail(f"`dgrad_out` must be None where autocast casts the input, but got a {dgrad_out.dtype} buffer")
        check_disjoint({"out": out, "dgrad_out": dgrad_out}, {"inp": inp})
        if inp.dim() != 2:
            out = out.view(-1, self.out_features) if out is not None else None
            dgrad_out = dgrad_out.view(-1, self.in_features) if dgrad_out is not None else None
        return out, dgrad_out

    def extra_repr(self) -> str:
        weights = self.group_parameters("weight")
        dtype = f", dtype={weights[0].dtype}" if weights else ""
        recipe = f", recipe={brief(self.gemms.recipe)}" if isinstance(self.gemms, ScaledGemms) else ""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}{dtype}{recipe}"
        )
