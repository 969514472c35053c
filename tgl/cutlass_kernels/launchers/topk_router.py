"""Top-k experts and weights from logits, and the gradient of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.memory import address
from ...meta.router import Router, Weighing
from .. import overlap
from ..router.router_spec import CHUNK, MOST_CHOICES, MOST_EXPERTS, MOST_GROUPS, RouterSpec
from ..runtime import device
from ..runtime.launcher import Launcher, Plan
from ..runtime.names import name
from ..runtime.requirements import ALIGNMENT, MAX_ROWS
from .reduce import FLOATS

BLOCKS = 8  # per multiprocessor, of those that compute sums


class RouterKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    spec: RouterSpec
    choice: str | None = None


class RouterCall(NamedTuple):
    """Arguments of ``topk_router``."""

    logits: Tensor
    top_k: int
    bias: Tensor | None
    mask: Tensor | None
    replay: Tensor | None
    router: Router
    weights: Tensor
    top_k_index: Tensor
    tokens_per_expert: Tensor | None
    prob_sum: Tensor | None
    z_sum: Tensor | None


def vector(logits: Tensor) -> int:
    """Return how many neighbouring logits one access takes, up to 16 bytes: they divide rows, pitch and address."""
    if logits.stride(1) != 1:
        return 1
    size = logits.element_size()
    found = min(ALIGNMENT // size, CHUNK)
    while logits.shape[1] % found or logits.stride(0) % found or address(logits) % (found * size):
        found //= 2
    return found


def unsupported_reason(logits: Tensor, top_k: int) -> backends.Reason:
    """Return why no kernel supports the logits and ``top_k``, or None."""
    reason = device.packages_reason()
    if reason is not None:
        return reason
    if logits.dtype not in FLOATS:
        return f"takes {', '.join(map(str, FLOATS))}, got {logits.dtype}"
    tokens, experts = logits.shape
    if experts > MOST_EXPERTS:
        return f"takes up to {MOST_EXPERTS} experts, got {experts}"
    if top_k > MOST_CHOICES:
        return f"takes up to {MOST_CHOICES} experts per token, got {top_k}"
    return f"takes up to {MAX_ROWS} tokens, got {tokens}" if tokens > MAX_ROWS else None


class TopKRouterLauncher(Launcher[RouterCall]):
    """Selects the top-k experts, their weights, and computes sums over tokens."""

    op = "topk_router"
    call = RouterCall
    note = "one launch; two where it forms sums over tokens"

    def reject_reason(self, c: RouterCall) -> backends.Reason:
        """Return why the kernel does not take the dtype or the sizes, or None."""
        reason = unsupported_reason(c.logits, c.top_k)
        if reason is None and c.router.grouped and c.router.num_groups > MOST_GROUPS:
            reason = f"takes up to {MOST_GROUPS} groups, got {c.router.num_groups}"
        return reason

    def batch_invariant(self, c: RouterCall) -> bool:
        """Return whether no sums over tokens are computed; otherwise a token depends on itself alone."""
        return not c.router.sums

    def plan_key(self, c: RouterCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of tokens."""
        logits, bias, masked = c.logits, c.bias, c.mask is not None
        if not 0 < logits.shape[0] <= MAX_ROWS or address(logits) % ALIGNMENT:
            return None
        of_bias, given = (None if t is None else t.dtype for t in (bias, c.replay))
        return logits.dtype, logits.shape[1], logits.stride(), c.top_k, of_bias, given, masked, c.router

    def is_empty(self, c: RouterCall) -> bool:
        """Return whether there are no tokens."""
        return c.logits.shape[0] == 0

    def zero_outputs(self, c: RouterCall) -> None:
        """Write zeros, the sums over no tokens."""
        for t in (c.tokens_per_expert, c.prob_sum, c.z_sum):
            if t is not None:
                t.zero_()

    def key(self, c: RouterCall, arch: str) -> RouterKey:
        """Return the key of the kernel: a model's sizes and options.

        A replay has the groups of its router, because the lanes of a token, and so the bits of its weights, depend on
        whether there are any.
        """
        r, choice = c.router, _choice(c)
        groups = (r.num_groups, r.topk_groups, r.group_score) if r.grouped else (1, 1, "max")
        spec = RouterSpec(
            c.logits.shape[1],
            c.top_k,
            r.score_function,
            r.renormalize,
            r.scale,
            *groups,
            bias=c.replay is None and c.bias is not None,
            sums=r.sums,
            vector=vector(c.logits),
            masked=c.mask is not None,
            replayed=c.replay is not None,
        )
        of_choice = None if choice is None else name(choice)
        return RouterKey(arch, not c.logits.is_cuda, name(c.logits), spec, of_choice)

    def build(self, key: RouterKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: RouterCall) -> tuple:
        """Return the arguments of the kernel except buffers for sums and whether the launch overlaps."""
        return c.logits, _choice(c), c.weights, c.top_k_index

    def start(self, plan: Plan, c: RouterCall) -> None:
        """Launch."""
        sums = None
        if plan.key.spec.sums:
            tokens, experts = c.logits.shape
            most = BLOCKS * device.multiprocessors(c.weights.device)
            blocks = min(most, -(-tokens // plan.key.spec.tokens))
            counted, added = c.top_k_index.new_empty(blocks, experts), c.weights.new_empty(blocks, experts + 1)
            sums = (as_bytes(c.mask), counted, added, c.tokens_per_expert, c.prob_sum, c.z_sum)
        plan.launch(*self.arguments(c), sums, int(overlap.overlaps(c.top_k_index.numel())))

    def warmup_call(self, c: RouterCall) -> RouterCall:
        """Return the warm-up call: one token of logits 0, in the layout of the call."""
        where = c.logits.device
        given: dict[str, Any] = {"logits": one_token(c.logits)}
        given |= {
            field: torch.zeros_like(t[:1] if t.dim() == 2 else t, device=where)
            for field in ("bias", "replay", "weights", "top_k_index", "tokens_per_expert", "prob_sum", "z_sum")
            if (t := getattr(c, field)) is not None
        }
        return c._replace(mask=one_flag(c.mask), **given)


def _choice(c: RouterCall) -> Tensor | None:
    """Return the tensor that selects experts besides the logits: the indices of a replay, or the bias."""
    return c.bias if c.replay is None else c.replay


class BackwardCall(NamedTuple):
    """Arguments of ``topk_router_backward``."""

    grad_weights: Tensor
    logits: Tensor
    top_k_index: Tensor
    grad_prob_sum: Tensor | None
    grad_z_sum: Tensor | None
    mask: Tensor | None
    weighing: Weighing
    out: Tensor


class TopKRouterBackwardLauncher(Launcher[BackwardCall]):
    """Computes the gradient of logits."""

    op = "topk_router_backward"
    call = BackwardCall
    note = "one launch"

    def reject_reason(self, c: BackwardCall) -> backends.Reason:
        """Return why the kernel does not take the dtype or the sizes, or None."""
        return unsupported_reason(c.logits, c.top_k_index.shape[1])

    def plan_key(self, c: BackwardCall) -> tuple | None:
        """Return the plan key, which does not depend on the number of tokens."""
        logits = c.logits
        if not 0 < logits.shape[0] <= MAX_ROWS or address(logits) % ALIGNMENT:
            return None
        sums, masked = c.grad_prob_sum is not None, c.mask is not None
        return logits.dtype, logits.shape[1], logits.stride(), c.top_k_index.shape[1], sums, masked, c.weighing

    def is_empty(self, c: BackwardCall) -> bool:
        """Return whether there are no tokens, or no top-k slots and hence no gradient of a weight."""
        return c.logits.shape[0] == 0

    def key(self, c: BackwardCall, arch: str) -> RouterKey:
        """Return the key of the kernel: a model's sizes and options."""
        spec = RouterSpec(
            c.logits.shape[1],
            c.top_k_index.shape[1],
            *c.weighing,
            sums=c.grad_prob_sum is not None,
            vector=vector(c.logits),
            masked=c.mask is not None,
        )
        return RouterKey(arch, not c.logits.is_cuda, name(c.logits), spec)

    def build(self, key: RouterKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build_backward(key)

    def arguments(self, c: BackwardCall) -> tuple:
        """Return the arguments of the kernel."""
        sums = None if c.grad_prob_sum is None else (c.grad_prob_sum, c.grad_z_sum, as_bytes(c.mask))
        return c.grad_weights, c.logits, c.top_k_index, sums, c.out

    def warmup_call(self, c: BackwardCall) -> BackwardCall:
        """Return the warm-up call: one token of logits 0, in the layout of the call."""
        where, logits = c.logits.device, one_token(c.logits)
        given: dict[str, Any] = {
            field: torch.zeros_like(t[:1] if t.dim() == 2 else t, device=where)
            for field in ("grad_weights", "top_k_index", "grad_prob_sum", "grad_z_sum")
            if (t := getattr(c, field)) is not None
        }
        return c._replace(logits=logits, mask=one_flag(c.mask), out=torch.empty_like(logits), **given)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return ``mask`` as bytes, as a kernel reads it."""
    return None if mask is None else mask.view(torch.uint8)


def one_flag(mask: Tensor | None) -> Tensor | None:
    """Return a mask for one token, or None."""
    return None if mask is None else mask.new_ones(1)


def one_token(logits: Tensor) -> Tensor:
    """Return zeros for one token, which a kernel for ``logits`` reads."""
    return logits.new_zeros(1, logits.shape[1])


def build(key: RouterKey) -> Callable:
    """Compile the forward for ``key``. Needs no GPU."""
    import cutlass

    from ..router.topk_kernel import TopKRouterKernel
    from ..runtime.compiling import compiled, contiguous, strided, vector

    spec = key.spec
    sums: tuple | None = None
    if spec.sums:
        workspace = contiguous("int32"), contiguous("float32")
        mask = strided("uint8" if spec.masked else None)
        sums = (mask, *workspace, vector("int32"), vector("float32"), vector("float32"))
    return compiled(
        key.arch,
        TopKRouterKernel(spec),
        logits_stand_in(key.element, spec),
        strided(key.choice, 2 if spec.replayed else 1),
        contiguous("float32"),
        contiguous("int32"),
        sums,
        cutlass.Int32(1),
    )


def build_backward(key: RouterKey) -> Callable:
    """Compile the backward for ``key``. Needs no GPU."""
    from ..router.topk_backward_kernel import TopKRouterBackwardKernel
    from ..runtime.compiling import compiled, strided

    spec = key.spec
    mask = strided("uint8" if spec.masked else None)
    sums = (strided("float32"), strided("float32"), mask) if spec.sums else None
    grad, index = strided("float32", 2), strided("int32", 2)
    logits, out = logits_stand_in(key.element, spec), logits_stand_in(key.element, spec)
    return compiled(key.arch, TopKRouterBackwardKernel(spec), grad, logits, index, sums, out)


def logits_stand_in(element: str, spec: RouterSpec) -> Any:
    """Return a stand-in for logits that are read by vectors, or one by one in any layout."""
    from ..runtime.compiling import matrix, strided
    from ..runtime.elements import TYPES

    if spec.vector == 1:
        return strided(element, 2)
    size = spec.vector * TYPES[element].width // 8
    return matrix(element, pitch=size, columns=spec.vector, align=size)


TOPK_ROUTER = TopKRouterLauncher()
TOPK_ROUTER_BACKWARD = TopKRouterBackwardLauncher()
LAUNCHERS: tuple[Launcher, ...] = (TOPK_ROUTER, TOPK_ROUTER_BACKWARD)
