"""A router's backward: the gradient of the logits from those of the weights and of the sums, in one pass over both.

Tokens have the same lanes, and lanes the same experts, as in the forward (see ``choose``). Scores are recomputed from
the logits alone. The gradient of a weight goes to the chosen experts: lane j works on slot j, and the lane of the
expert gets the result by a shuffle. The gradients through a softmax and through the sums go to all experts; where there
are none, only the logits of the chosen experts are read.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...meta.router import EPSILON
from . import scores
from .router_spec import LANES, THREADS, RouterSpec
from .topk_kernel import At, has_expert, logit_of, weighed


class TopKRouterBackwardKernel:
    """The kernel for the gradient of logits."""

    def __init__(self, spec: RouterSpec):
        self.spec = spec
        self.curved = spec.score in scores.CURVES
        self.spread = not self.curved and not spec.renormalize  # whether a weight's gradient goes to all logits

    @cute.jit
    def __call__(
        self,
        grad: cute.Tensor,
        logits: cute.Tensor,
        index: cute.Tensor,
        sums: Any,
        out: cute.Tensor,
        stream,
    ):
        """Launch the kernel.

        Args:
            grad: float32 ``[S, k]``, any strides.
            logits: ``[S, E]``, float32, bfloat16 or float16; S > 0, up to 2^30.
            index: int32 ``[S, k]``, any strides. A slot whose expert is out of range is dropped.
            sums: None, or the gradients of the sums, float32 ``[E]`` and ``[1]``, and bytes ``[S]`` that are 0 of
                tokens that do not count, or None for all; any strides.
            out: ``[S, E]``, like the logits.
            stream: CUDA stream.
        """
        self.differentiate(grad, logits, index, sums, out).launch(
            grid=(cute.ceil_div(logits.shape[0], self.spec.tokens), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def differentiate(
        self,
        grad: cute.Tensor,
        logits: cute.Tensor,
        index: cute.Tensor,
        sums: Any,
        out: cute.Tensor,
    ):
        """Differentiate one token per set of lanes; those without one work on the last one."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, count = thread % spec.width, Int32(logits.shape[0])
        token = block * spec.tokens + thread // spec.width
        present = token < count
        token = cutlass.min(token, count - 1)
        chosen, g = cute.make_rmem_tensor(spec.slots, Int32), cute.make_rmem_tensor(spec.slots, Float32)
        for slot in cutlass.range_constexpr(spec.slots):
            j = cutlass.min(slot * spec.width + lane, Int32(spec.top_k - 1))
            chosen[slot] = index[token, j]
            g[slot] = grad[token, j] * Float32(spec.scale)
        d = cute.make_rmem_tensor(spec.items, Float32)
        d.fill(0.0)
        top, total = Float32(0), Float32(1)
        if cutlass.const_expr(self.spread or spec.sums):
            x = cute.make_rmem_tensor(spec.items, Float32)
            x.store(scores.load(spec, logits, token, lane).load().to(Float32))
            shares, top, total = scores.powers(spec, x)
            inverse = Float32(1) / total
            for i in cutlass.range_constexpr(spec.items):
                shares[i] = shares[i] * inverse
        local, whole = self.local(At(logits, token, lane), chosen, g, top, total)
        if cutlass.const_expr(self.spread):
            for i in cutlass.range_constexpr(spec.items):
                d[i] = d[i] - shares[i] * whole
        if cutlass.const_expr(spec.sums):
            grad_prob_sum, grad_z_sum, mask = sums
            by_sums = d
            if cutlass.const_expr(spec.masked):
                by_sums = cute.make_rmem_tensor(spec.items, Float32)
                by_sums.fill(0.0)
            twice = Float32(2) * grad_z_sum[0] * (top + cute.math.log(total))
            for i in cutlass.range_constexpr(spec.items):
                by_sums[i] = by_sums[i] + twice * shares[i]
            self.add_shares(x, shares, grad_prob_sum, lane, by_sums)
            if cutlass.const_expr(spec.masked):
                for i in cutlass.range_constexpr(spec.items):
                    d[i] = d[i] + cutlass.select_(mask[token] != 0, by_sums[i], Float32(0))
        self.scatter(chosen, local, thread % LANES - lane, lane, d)
        held = cute.make_rmem_tensor(spec.items, logits.element_type)
        held.store(d.load().to(logits.element_type))
        if present:
            scores.store(spec, out, token, lane, held)

    @cute.jit
    def local(
        self, at: Any, chosen: cute.Tensor, g: cute.Tensor, top: Float32, total: Float32
    ) -> tuple[cute.Tensor, Float32]:
        """Return the direct gradient of each of a lane's slots, and its sum over the token's."""
        spec = self.spec
        lane = at.lane
        w = weighed(spec, at, chosen, top, total)
        local = cute.make_rmem_tensor(spec.slots, Float32)
        dot = Float32(0)
        for slot in cutlass.range_constexpr(spec.slots):
            # A lane without a slot has w = 0, and its gradient, which is another's, may be anything.
            own = has_expert(spec, lane, chosen, slot)
            local[slot] = cutlass.select_(own, g[slot] * w[slot], Float32(0))
            dot = dot + local[slot]
        dot = scores.whole_sum(dot, spec.width)
        if cutlass.const_expr(not self.curved):
            if cutlass.const_expr(spec.renormalize):
                for slot in cutlass.range_constexpr(spec.slots):
                    local[slot] = w[slot] * (g[slot] - dot)
            return local, dot
        curve = scores.CURVES[spec.score]
        s, summed = cute.make_rmem_tensor(spec.slots, Float32), Float32(0)
        for slot in cutlass.range_constexpr(spec.slots):
            s[slot] = curve.value(logit_of(spec, at, chosen, slot))
            own = has_expert(spec, lane, chosen, slot)
            summed = summed + cutlass.select_(own, s[slot], Float32(0))
        divisor = Float32(1)
        if cutlass.const_expr(spec.renormalize):
            divisor = scores.whole_sum(summed, spec.width) + Float32(EPSILON)
        for slot in cutlass.range_constexpr(spec.slots):
            back = g[slot]
            if cutlass.const_expr(spec.renormalize):
                back = (back - dot) / divisor
            local[slot] = back * curve.slope(logit_of(spec, at, chosen, slot), s[slot])
        return local, dot

    @cute.jit
    def add_shares(self, x: cute.Tensor, shares: cute.Tensor, grad_prob_sum: cute.Tensor, lane: Int32, d: cute.Tensor):
        """Add the gradient through ``grad_prob_sum``."""
        spec = self.spec
        given, dot = cute.make_rmem_tensor(spec.items, Float32), Float32(0)
        total = Float32(1)
        if cutlass.const_expr(self.curved):
            shares, total = scores.curved(spec, x, lane)
        for i in cutlass.range_constexpr(spec.items):
            expert = scores.expert_of(lane, i, spec.width)
            given[i] = grad_prob_sum[cutlass.min(expert, Int32(spec.experts - 1))]
            dot = dot + given[i] * shares[i]
        dot = scores.whole_sum(dot, spec.width) / total
        for i in cutlass.range_constexpr(spec.items):
            factor = shares[i]
            if cutlass.const_expr(self.curved):
                factor = scores.CURVES[spec.score].slope(x[i], shares[i]) / total
            d[i] = d[i] + factor * (given[i] - dot)

    @cute.jit
    def scatter(self, chosen: cute.Tensor, local: cute.Tensor, base: Int32, lane: Int32, d: cute.Tensor):
        """Add to an expert the value in the lane of its slot; ``base`` is the first of the token's lanes."""
        spec = self.spec
        for slot in cutlass.range_constexpr(spec.slots):
            for other in cutlass.range(cutlass.min(spec.width, spec.top_k - slot * spec.width), unroll=1):
                expert = cute.arch.shuffle_sync(chosen[slot], base + other)
                value = cute.arch.shuffle_sync(local[slot], base + other)
                for i in cutlass.range_constexpr(spec.items):
                    found = scores.expert_of(lane, i, spec.width) == expert
                    d[i] = cutlass.select_(found, d[i] + value, d[i])
