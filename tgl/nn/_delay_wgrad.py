"""``delay_wgrad_compute``: weight and bias gradients that are formed in ``backward_dw``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.specs import accumulator
from ._errors import fail
from ._gemms import Accumulator, Gemms, Operand
from ._gradient_edge import GradientEdge
from ._hooks import ModuleHooks, apply_tensor_hooks, call_accumulated_hooks, have_tensor_hooks, postpone_hooks
from ._main_grad import mark, stand_for_main_grad
from ._parameter_gradients import SLOT_ALIGNMENT
from ._parameters import GroupedParameters, decided_when_traced
from ._pending_wgrads import Delayed, Pending, add_to, overwrites
from ._persistent_tensors import persistent_tensors
from ._wrappers import takes_gradients_early


class DelayedGradients(GroupedParameters):
    """Parameters whose gradients can be delayed; see ``GroupedLinear`` for the arguments."""

    gemms: Gemms
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    _delayed: Delayed
    _edge: GradientEdge = GradientEdge()  # the parameters' gradient edge, for compiled graphs

    def _start_delaying(self) -> None:
        self._delayed = Delayed()
        self.wgrad_accumulation_and_reduce_hooks = ModuleHooks()
        self._mark_for_megatron()

    def _pack(self, before: Mapping[str, int] | None = None) -> None:
        super()._pack(before)  # parameters may have been replaced
        self._mark_for_megatron()

    def _mark_for_megatron(self) -> None:
        """Mark parameters so that Megatron-Core's DistributedDataParallel waits for ``backward_dw``.

        It then passes its hooks to ``register_wgrad_accumulation_and_reduce_hooks``.
        """
        if getattr(self, "delay_wgrad_compute", False):  # not set yet when the base class makes the parameters
            for parameter in self._own:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def reserve_delayed_wgrad(self, max_rows: int, microbatches: int = 1, *, dtype: torch.dtype | None = None) -> None:
        """Reserve buffers for the copies that ``delay_wgrad_compute`` makes in a compiled graph, and then in eager too.

        Call it before the layer is compiled, and again after it has been moved or cast. Reads the device.

        Args:
            max_rows: largest number of rows T of any microbatch.
            microbatches: largest number of backwards before ``backward_dw``; one more is an error.
            dtype: dtype of the layer's input (under autocast, the autocast dtype); default that of the weight.

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
        like = Pending(x, dy, offs, dbias, self.fuse_wgrad_accumulation)
        self._delayed.reserve(microbatches, like, weight.device, blocked=self.gemms.blocked_scales)

    def delayed_bytes_copied_host(self) -> int:
        """Return the bytes that ``delay_wgrad_compute`` has copied so far; 0 for references. Reads the device."""
        return self._delayed.bytes_copied_host()

    def need_backward_dw(self) -> bool:
        """Return whether ``backward_dw`` must be called after every backward: the value of ``delay_wgrad_compute``."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call ``hook()`` at the end of every ``backward_dw`` that has formed gradients.

        Megatron-Core's DistributedDataParallel, with ``delay_wgrad_compute=True`` in its config, registers one for
        every parameter of the layer, which accumulates and reduces the parameter's gradient.
        """
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    @persistent_tensors()
    def backward_dw(self) -> None:
        """Form the weight and bias gradients of all microbatches that ``delay_wgrad_compute`` has delayed.

        They are added to ``main_grad`` (with ``fuse_wgrad_accumulation``) or to ``grad``; with ``overwrite_main_grad``,
        or if one of the microbatches was a first one (``is_first_microbatch``), their sum replaces the content of
        ``main_grad``, if anything is pending. Call it after any number of backwards (up to ``microbatches``, if
        reserved). A second call adds nothing, and on a layer without ``delay_wgrad_compute`` it does nothing. Without
        it, weight and bias get no gradient from those microbatches, and their tensors stay alive.

        The parameters' hooks are called as in a backward: first those of ``register_hook``, with the sum of the pending
        gradients; then those of ``register_post_accumulate_grad_hook``; last those of
        ``register_wgrad_accumulation_and_reduce_hooks``.

        Raises:
            RuntimeError: a tensor that was kept by reference has been modified in place; or an error occurred after
                some of the pending microbatches were added to ``main_grad``; the pending ones are then dropped.
        """
        entries = self._delayed.pending()
        if not entries:
            return
        in_use = self._delayed.in_use()
        weights, biases = self.group_parameters("weight"), self.group_parameters("bias")
        main_grad = self.checked_main_grad(weights) if self.fuse_wgrad_accumulation else None
        # Without tensor hooks the gradient is accumulated in main_grad directly; hooks need the sum by itself.
        target = main_grad if main_grad is not None and not have_tensor_hooks(weights) else None
        wanted = tuple([w.requires_grad for w in weights])
        if main_grad is not None:
            main_grad.clear_where(in_use if self.overwrites_main_grad() else overwrites(entries))
        total = dbias = None
        with self._delayed.dropped_if_cut_short() as added:
            for x, dy, offs, more, _ in entries:
                if target is not None:
                    target.add(self.gemms, x, dy, offs, wanted, overwrite=False)
                    added.append(target)
                elif total is None:
                    total = self._weight_gradient(x, dy, offs)
                else:
                    self.gemms.wgrad_into(x, dy, offs, Accumulator(total), overwrite=False)
                if more is not None:
                    dbias = more if dbias is None else dbias + more
        # The pending dbias may be a reserved buffer, which the next microbatch overwrites.
        dbias = dbias.to(biases[0].dtype, copy=True) if dbias is not None else None
        self._delayed.clear()

        dweights = apply_tensor_hooks(weights, self._parts(total))
        dbiases = apply_tensor_hooks(biases, self._parts(dbias))
        if main_grad is None:
            changed = add_to(weights, dweights)
        else:
            main_grad.add_gradients(dweights, wanted, overwrite=False)
            mark(weights)
            stand_for_main_grad(weights)
            changed = [weight for weight in weights if weight.requires_grad]
        changed += add_to(biases, dbiases)
        call_accumulated_hooks(changed)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def _parts(self, packed: Tensor | None) -> Sequence[Tensor]:
        """Split a packed gradient into one per parameter; ``()`` for None."""
        if packed is None:
            return ()
        return (packed,) if self.single_grouped_weight else packed.unbind()

    def _weight_gradient(self, x: Operand, dy: Operand, offs: Tensor) -> Tensor:
        """Return one microbatch's weight gradient, in the accumulation dtype for ``main_grad``, else the weight's."""
        dtype = self.group_parameters("weight")[0].dtype
        if self.fuse_wgrad_accumulation:
            return self.gemms.wgrad(x, dy, offs, out_dtype=accumulator(dtype))
        return self.gemms.wgrad(
            x, dy, offs, out_dtype=dtype, alignment=None if self.single_grouped_weight else SLOT_ALIGNMENT
        )

    def _check_delay(self) -> None:
        """Check that gradients can be delayed until ``backward_dw``.

        Raises:
            RuntimeError: a wrapper takes gradients at the end of the backward.
            ValueError: no buffers are reserved for a compiled graph.
        """
        # With fused accumulation the weight gradient goes to main_grad, which the caller reduces.
        names = ("bias",) if self.fuse_wgrad_accumulation else ("weight", "bias")
        if any(p.requires_grad for name in names for p in self.group_parameters(name)):
            taker = self._takes_gradients_early(id(self))
            if taker:
                fail(
                    f"`delay_wgrad_compute` must be False under {taker}, which takes gradients when the backward ends, "
                    "before backward_dw has formed them; Megatron-Core's DistributedDataParallel can wait "
                    "(delay_wgrad_compute=True in its config), and so can any wrapper that ignores these parameters",
                    RuntimeError,
                )
        if torch.compiler.is_compiling():
            self._postpone_hooks(id(self))
            if not self._delayed.copies:
                fail(
                    "delay_wgrad_compute needs reserve_delayed_wgrad(max_rows) before the layer is compiled: a graph's "
                    "tensors are reused when it has ended, so they are copied into buffers of the layer"
                )

    def _edge_of_call(self, parts: tuple[list[nn.Parameter], list[nn.Parameter]]) -> tuple[Tensor, ...]:
        """Return in a graph the gradient edge of the parameters whose gradients bypass autograd; else ``()``."""
        if not torch.compiler.is_compiling():
            return ()
        # Must run before the trace reads `_edge`. The comparison below makes the trace guard on the parameters.
        self._make_edge(id(self))
        weights, biases = parts
        unseen = [p for p in (*weights, *(biases if self.delay_wgrad_compute else ())) if p.requires_grad]
        edge = self._edge
        if len(unseen) != len(edge.parameters) or not all(p is q for p, q in zip(unseen, edge.parameters)):
            fail(
                "fuse_wgrad_accumulation and delay_wgrad_compute must be False in a compiled graph whose weights are "
                "not the layer's own parameters",
                RuntimeError,
            )
        return (edge.tensor,)  # type: ignore[return-value]

    @decided_when_traced
    def _make_edge(self, this: int) -> None:
        names = ("weight", "bias") if self.delay_wgrad_compute else ("weight",)
        unseen = [p for name in names for p in self.group_parameters(name) if p.requires_grad]
        if not self._edge.leads_to(unseen):
            self._edge = GradientEdge(unseen)

    @decided_when_traced
    def _postpone_hooks(self, this: int) -> None:
        postpone_hooks(self._all_parameters())

    @decided_when_traced
    def _takes_gradients_early(self, this: int) -> str:
        parameters = [p for p in self._all_parameters() if p.requires_grad]
        return takes_gradients_early(self, parameters, self._own)

    def _all_parameters(self) -> tuple[nn.Parameter, ...]:
        return (*self.group_parameters("weight"), *self.group_parameters("bias"))

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        if self._delayed.in_use():
            raise RuntimeError("a layer with delayed gradients cannot be moved or cast; call backward_dw first")
        self._delayed = Delayed()  # reserved buffers have the old device and dtype
        self._edge = GradientEdge()  # a cast gives a parameter a new node, even if it is cast back
        return super()._apply(fn, recurse)
