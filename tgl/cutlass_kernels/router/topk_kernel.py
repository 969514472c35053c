"""A router's forward: scores, the best groups, the best k experts and their weights, in one pass over the logits.

A token has ``width`` lanes, a power of two that depends only on the number of experts, and a lane has 8 adjacent
experts of every ``8 width``, in registers. So a token's results do not depend on other tokens or on its position.

A round finds one expert: the best of a lane's, then of all lanes', which is then removed. Experts that are ranked by
16-bit logits are words of rank and number, whose maximum has both: 8 experts take a lane about 24 instructions a round,
and the lanes one reduction, or ``log2 width`` exchanges. Elsewhere the maximum of ranks is one reduction and the lowest
number with that rank another. Lane j keeps the j-th slot, so that weights take one evaluation, of logits that are still
in the L1 cache.

The best groups are found by their scores in shared memory: each group has an equal number of lanes that read its
experts, each lane beginning at a different offset to avoid bank conflicts. A group is kept if fewer than
``topk_groups`` are better.

Sums over tokens, for losses, are a thread's own sums over its tokens, then sums over warps and blocks in the order of
their numbers: a second kernel, which starts when the first one ends, adds up the blocks'.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from ...meta.router import EPSILON, GROUP_RULES
from .. import instructions
from . import scores
from .router_spec import LANES, THREADS, RouterSpec

WARPS = THREADS // LANES
ADDING = 8  # warps that add up the sums of blocks


class At(NamedTuple):
    """A lane's part of a token: its indices, whether the token is the lane's own, and whether it counts in sums."""

    logits: cute.Tensor
    token: Int32
    lane: Int32
    present: Any = True
    counts: Any = True


class LoadSums(NamedTuple):
    """Slots per expert in shared memory, and a lane's sums of shares and of squares of ``logsumexp``."""

    counts: cute.Tensor
    shares: cute.Tensor
    squares: cute.Tensor


class TopKRouterKernel:
    """The kernel for top-k slots and weights of tokens, and sums over tokens."""

    def __init__(self, spec: RouterSpec):
        self.spec = spec
        self.curved = spec.score in scores.CURVES
        rule = GROUP_RULES[spec.group_score]
        self.by_logits = spec.replayed or (not spec.bias and (not spec.grouped or rule.by_order))
        self.of_order = rule.by_order
        self.scored = not self.by_logits or spec.sums  # whether the scores of unselected experts are needed

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        choice: Any,
        weights: cute.Tensor,
        index: cute.Tensor,
        sums: Any,
        overlap: Int32,
        stream,
    ):
        """Launch the kernels.

        Args:
            logits: ``[S, E]``, float32, bfloat16 or float16; S > 0, up to 2^30.
            choice: the bias, float32 or the logits' dtype ``[E]``, any stride; None for none. With ``replayed`` the
                experts, int32 or int64 ``[S, k]``, any strides; one out of range is a dropped slot, whose index
                is -1 and whose weight is 0.
            weights: float32 ``[S, k]``.
            index: int32 ``[S, k]``.
            sums: None, or bytes ``[S]`` that are 0 of tokens that do not count, any stride, or None for all; a
                workspace, int32 ``[blocks, E]`` and float32 ``[blocks, E + 1]``; then the outputs: tokens of each
                expert, int32 ``[E]``, its sum of shares, float32 ``[E]``, and that of squares ``[1]``.
            overlap: whether the kernel overlaps the launch before it, where there are no sums; see ``overlap``.
            stream: CUDA stream.
        """
        blocks = cute.ceil_div(logits.shape[0], self.spec.tokens)
        mask: Any = None
        counted: Any = None
        added: Any = None
        if cutlass.const_expr(self.spec.sums):
            mask, counted, added, tokens_per_expert, prob_sum, z_sum = sums
            blocks = counted.shape[0]
        self.choose(logits, choice, weights, index, mask, counted, added).launch(
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=False if self.spec.sums else instructions.attribute(overlap),
        )
        if cutlass.const_expr(self.spec.sums):
            self.add(counted, added, tokens_per_expert, prob_sum, z_sum).launch(
                grid=(cute.ceil_div(self.spec.experts + 1, LANES), 1, 1),
                block=(ADDING * LANES, 1, 1),
                stream=stream,
                use_pdl=instructions.overlaps(),
            )

    @cute.kernel
    def choose(
        self,
        logits: cute.Tensor,
        choice: Any,
        weights: cute.Tensor,
        index: cute.Tensor,
        mask: Any,
        counted: Any,
        added: Any,
    ):
        """Process tokens in turn, with all lanes of a warp together: those without a token work on the last one."""
        spec = self.spec
        if cutlass.const_expr(not spec.sums):
            instructions.follow()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, warp = thread % spec.width, thread // LANES
        smem = SmemAllocator()
        ranked: Any = None
        sums: Any = None
        if cutlass.const_expr(spec.grouped and not spec.replayed):
            room = cute.make_layout((spec.items * LANES, WARPS))
            ranked = smem.allocate_tensor(Int32, room, byte_alignment=16)[None, warp]
        if cutlass.const_expr(spec.sums):
            counts = smem.allocate_tensor(Int32, cute.make_layout(spec.experts), byte_alignment=16)
            for expert in cutlass.range(thread, spec.experts, THREADS, unroll=1):
                counts[expert] = Int32(0)
            cute.arch.sync_threads()
            shares, squares = cute.make_rmem_tensor(spec.items, Float32), cute.make_rmem_tensor(1, Float32)
            shares.fill(0.0)
            squares.fill(0.0)
            sums = LoadSums(counts, shares, squares)
        count = Int32(logits.shape[0])
        begin = block * spec.tokens + warp * (LANES // spec.width)
        for first in cutlass.range(begin, count, blocks * spec.tokens, unroll=1):
            token = first + (thread % LANES) // spec.width
            present, token = token < count, cutlass.min(token, count - 1)
            counts_it = present
            if cutlass.const_expr(spec.masked):
                counts_it = present & (mask[token] != 0)
            self.work(At(logits, token, lane, present, counts_it), choice, weights, index, ranked, sums)
        if cutlass.const_expr(spec.sums):
            instructions.launch_dependents()
            self.finish(sums, counted, added, smem)

    @cute.jit
    def work(self, at: Any, choice: Any, weights: cute.Tensor, index: cute.Tensor, ranked: Any, sums: Any):
        """Process one token."""
        spec = self.spec
        logits, token, lane, _, counts = at
        held = scores.load(spec, logits, token, lane)
        x = cute.make_rmem_tensor(spec.items, Float32)
        x.store(held.load().to(Float32))
        top, total = Float32(0), Float32(1)
        scored: Any = None
        if cutlass.const_expr(not self.curved and (self.scored or not spec.renormalize)):
            scored, top, total = scores.powers(spec, x)
            inverse = Float32(1) / total
            for i in cutlass.range_constexpr(spec.items):
                scored[i] = scored[i] * inverse
        if cutlass.const_expr(self.curved and self.scored):
            scored, all_scores = scores.curved(spec, x, lane)
        if cutlass.const_expr(spec.sums):
            share = Float32(1)
            z = Float32(0)
            if cutlass.const_expr(self.curved):
                _, of_top, of_total = scores.powers(spec, x)
                share = Float32(1) / all_scores
                z = of_top + cute.math.log(of_total)
            else:
                z = top + cute.math.log(total)
            if counts:
                sums.squares[0] = sums.squares[0] + z * z
                for i in cutlass.range_constexpr(spec.items):
                    sums.shares[i] = sums.shares[i] + scored[i] * share

        chosen = cute.make_rmem_tensor(spec.slots, Int32)
        chosen.fill(0)
        if cutlass.const_expr(spec.replayed):
            self.replay(choice, token, lane, chosen)
        elif cutlass.const_expr(self.by_logits and scores.packed(logits.element_type)):
            self.choose_packed(held, lane, ranked, chosen)
        else:
            ranks = cute.make_rmem_tensor(spec.items, Int32)
            for i in cutlass.range_constexpr(spec.items):
                expert = scores.expert_of(lane, i, spec.width)
                value = x[i]
                if cutlass.const_expr(not self.by_logits):
                    value = scored[i]
                if cutlass.const_expr(spec.bias):
                    value = value + choice[cutlass.min(expert, Int32(spec.experts - 1))].to(Float32)
                ranks[i] = cutlass.select_(expert < spec.experts, scores.order_of(value), Int32(scores.LOWEST))
            self.choose_ranked(ranks, lane, ranked, chosen)
        self.weigh(at, weights, index, chosen, top, total)
        if cutlass.const_expr(spec.sums):
            for slot in cutlass.range_constexpr(spec.slots):
                if counts and has_expert(spec, lane, chosen, slot):
                    cute.arch.atomic_add(
                        (sums.counts.iterator + chosen[slot]).llvm_ptr, Int32(1), sem="relaxed", scope="cta"
                    )

    @cute.jit
    def replay(self, given: cute.Tensor, token: Int32, lane: Int32, chosen: cute.Tensor):
        """Load the experts of the token's slots, -1 for those out of range."""
        spec = self.spec
        for slot in cutlass.range_constexpr(spec.slots):
            expert = given[token, cutlass.min(slot * spec.width + lane, Int32(spec.top_k - 1))]
            in_range = (expert >= 0) & (expert < spec.experts)  # before an int64 is narrowed
            chosen[slot] = cutlass.select_(in_range, expert.to(Int32), Int32(-1))

    @cute.jit
    def choose_packed(self, held: cute.Tensor, lane: Int32, ranked: Any, chosen: cute.Tensor):
        """Choose experts with rank and number in one word."""
        spec = self.spec
        ranks = cute.make_rmem_tensor(spec.items, Int32)
        for i in cutlass.range_constexpr(spec.items):
            expert = scores.expert_of(lane, i, spec.width)
            word = scores.packed_order(held, i, expert)
            ranks[i] = cutlass.select_(expert < spec.experts, word, Int32(scores.LOWEST))
        if cutlass.const_expr(spec.grouped):
            self.keep_groups(ranks, lane, ranked)
        for j in cutlass.range(spec.top_k, unroll=1):
            best = ranks[0]
            for i in cutlass.range_constexpr(1, spec.items):
                best = cutlass.max(best, ranks[i])
            best = scores.whole_max(best, spec.width)
            for i in cutlass.range_constexpr(spec.items):
                ranks[i] = cutlass.select_(ranks[i] == best, Int32(scores.LOWEST), ranks[i])
            self.keep(chosen, j, lane, 0xFFFF - (best & 0xFFFF))

    @cute.jit
    def choose_ranked(self, ranks: cute.Tensor, lane: Int32, ranked: Any, chosen: cute.Tensor):
        """Choose experts by the best rank, then by the lowest number with it."""
        spec = self.spec
        if cutlass.const_expr(spec.grouped):
            self.keep_groups(ranks, lane, ranked)
        for j in cutlass.range(spec.top_k, unroll=1):
            best = ranks[0]
            for i in cutlass.range_constexpr(1, spec.items):
                best = cutlass.max(best, ranks[i])
            best = scores.whole_max(best, spec.width)
            expert = Int32(scores.HIGHEST)
            for i in cutlass.range_constexpr(spec.items - 1, -1, -1):
                found = ranks[i] == best
                expert = cutlass.select_(found, scores.expert_of(lane, i, spec.width), expert)
            expert = scores.whole_min(expert, spec.width)
            for i in cutlass.range_constexpr(spec.items):
                found = scores.expert_of(lane, i, spec.width) == expert
                ranks[i] = cutlass.select_(found, Int32(scores.LOWEST), ranks[i])
            self.keep(chosen, j, lane, expert)

    @cute.jit
    def keep(self, chosen: cute.Tensor, j: Int32, lane: Int32, expert: Int32):
        """Record the expert of slot ``j``."""
        for slot in cutlass.range_constexpr(self.spec.slots):
            own = slot * self.spec.width + lane == j
            chosen[slot] = cutlass.select_(own, expert, chosen[slot])

    @cute.jit
    def keep_groups(self, ranks: cute.Tensor, lane: Int32, ranked: cute.Tensor):
        """Leave out the experts of all but the best groups."""
        spec = self.spec
        groups, size = spec.num_groups, spec.experts // spec.num_groups
        lanes = LANES // (1 << (groups - 1).bit_length())  # per group
        steps = cute.ceil_div(size, lanes)
        for i in cutlass.range_constexpr(spec.items):
            ranked[scores.expert_of(lane, i, spec.width)] = ranks[i]
        cute.arch.sync_warp()
        group, part = lane // lanes, lane % lanes
        first, second = Int32(scores.LOWEST), Int32(scores.LOWEST)
        for step in cutlass.range(steps, unroll=1):
            member = (step + group) % steps * lanes + part
            rank = Int32(scores.LOWEST)
            if member < size and group < groups:
                rank = ranked[group * size + member]
            second = cutlass.max(second, cutlass.min(first, rank))
            first = cutlass.max(first, rank)
        cute.arch.sync_warp()
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            other = cute.arch.shuffle_sync_bfly(first, 1 << step)
            other_second = cute.arch.shuffle_sync_bfly(second, 1 << step)
            second = cutlass.max(cutlass.min(first, other), cutlass.max(second, other_second))
            first = cutlass.max(first, other)
        score = first
        if cutlass.const_expr(not self.of_order):
            score = scores.order_of(scores.value_of(first) + scores.value_of(second))
        better = Int32(0)
        for other_group in cutlass.range_constexpr(groups):
            other = cute.arch.shuffle_sync(score, other_group * lanes)
            ahead = (other > score) | ((other == score) & (other_group < group))
            better += cutlass.select_(ahead, Int32(1), Int32(0))
        kept = cute.arch.vote_ballot_sync((group < groups) & (better < spec.topk_groups))
        for i in cutlass.range_constexpr(spec.items):
            own = scores.expert_of(lane, i, spec.width) // size
            stays = (kept >> ((own * lanes) & (LANES - 1))) & 1
            ranks[i] = cutlass.select_(stays != 0, ranks[i], Int32(scores.LOWEST))

    @cute.jit
    def weigh(
        self, at: Any, weights: cute.Tensor, index: cute.Tensor, chosen: cute.Tensor, top: Float32, total: Float32
    ):
        """Write the weights and the numbers of the chosen experts."""
        spec = self.spec
        made = weighed(spec, at, chosen, top, total)
        _, token, lane, present, _ = at
        for slot in cutlass.range_constexpr(spec.slots):
            j = slot * spec.width + lane
            if present and j < spec.top_k:
                weights[token, j] = made[slot] * Float32(spec.scale)
                index[token, j] = chosen[slot]

    @cute.jit
    def finish(self, sums: Any, counted: Any, added: Any, smem: Any):
        """Write the sums of the block."""
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % LANES, thread // LANES
        of_warps = smem.allocate_tensor(Float32, cute.make_layout((spec.experts + 1, WARPS)), byte_alignment=16)
        for i in cutlass.range_constexpr(spec.items):
            value = across(sums.shares[i], spec.width)
            expert = scores.expert_of(lane % spec.width, i, spec.width)
            if lane < spec.width and expert < spec.experts:
                of_warps[expert, warp] = value
        value = across(sums.squares[0], spec.width)
        if lane == 0:
            of_warps[spec.experts, warp] = value
        cute.arch.sync_threads()
        for column in cutlass.range(thread, spec.experts + 1, THREADS, unroll=1):
            whole = Float32(0)
            for other in cutlass.range_constexpr(WARPS):
                whole += of_warps[column, other]
            added[block, column] = whole
            if column < spec.experts:
                counted[block, column] = sums.counts[column]

    @cute.kernel
    def add(self, counted: cute.Tensor, added: cute.Tensor, tokens_per_expert: Any, prob_sum: Any, z_sum: Any):
        """Add up the sums of blocks: a warp takes every ``ADDING``-th, then the warps are added in order."""
        experts = self.spec.experts
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % LANES, thread // LANES
        smem = SmemAllocator()
        numbers = smem.allocate_tensor(Int32, cute.make_layout((LANES, ADDING)), byte_alignment=16)
        totals = smem.allocate_tensor(Float32, cute.make_layout((LANES, ADDING)), byte_alignment=16)
        column = block * LANES + lane
        number, total = Int32(0), Float32(0)
        instructions.wait()
        for row in cutlass.range(warp, counted.shape[0], ADDING, unroll=4):
            if column < experts:
                number += counted[row, column]
            if column <= experts:
                total += added[row, column]
        numbers[lane, warp] = number
        totals[lane, warp] = total
        cute.arch.sync_threads()
        if warp == 0 and column <= experts:
            for other in cutlass.range_constexpr(1, ADDING):
                number += numbers[lane, other]
                total += totals[lane, other]
            if column < experts:
                tokens_per_expert[column] = number
                prob_sum[column] = total
            else:
                z_sum[0] = total


def across(value: Float32, width: int) -> Float32:
    """Return the sum over a warp's tokens of the values in lanes with the same number within their token."""
    for step in range(width.bit_length() - 1, 5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
    return value


def has_expert(spec: RouterSpec, lane: Int32, chosen: cute.Tensor, slot: int) -> Any:
    """Return whether a lane has a slot of that number, and the slot an expert, rather than being dropped."""
    own = slot * spec.width + lane < spec.top_k
    return own & (chosen[slot] >= 0) & (chosen[slot] < spec.experts)


def logit_of(spec: RouterSpec, at: Any, chosen: cute.Tensor, slot: int) -> Float32:
    """Return the logit of a slot's expert; any logit of the token for a dropped slot."""
    expert = cutlass.max(cutlass.min(chosen[slot], Int32(spec.experts - 1)), Int32(0))
    return at.logits[at.token, expert].to(Float32)


@cute.jit
def weighed(spec: cutlass.Constexpr, at: Any, chosen: cute.Tensor, top: Float32, total: Float32) -> cute.Tensor:
    """Return the weights of a lane's slots before the scale, 0 where it has none or a dropped one."""
    lane = at.lane
    made = cute.make_rmem_tensor(spec.slots, Float32)
    for slot in cutlass.range_constexpr(spec.slots):
        own = has_expert(spec, lane, chosen, slot)
        value = logit_of(spec, at, chosen, slot)
        if cutlass.const_expr(spec.score in scores.CURVES):
            made[slot] = cutlass.select_(own, scores.CURVES[spec.score].value(value), Float32(0))
        elif cutlass.const_expr(spec.renormalize):
            made[slot] = cutlass.select_(own, value, Float32(-float("inf")))
        else:
            made[slot] = cutlass.select_(own, cute.math.exp(value - top) / total, Float32(0))
    if cutlass.const_expr(spec.renormalize):
        divisor = Float32(EPSILON)
        if cutlass.const_expr(spec.score not in scores.CURVES):
            best = made[0]
            for slot in cutlass.range_constexpr(1, spec.slots):
                best = cutlass.max(best, made[slot])
            best = scores.whole_max(best, spec.width)
            for slot in cutlass.range_constexpr(spec.slots):
                own = has_expert(spec, lane, chosen, slot)
                made[slot] = cutlass.select_(own, cute.math.exp(made[slot] - best), Float32(0))
            divisor = Float32(0)
        whole = made[0]
        for slot in cutlass.range_constexpr(1, spec.slots):
            whole = whole + made[slot]
        divisor = scores.whole_sum(whole, spec.width) + divisor
        for slot in cutlass.range_constexpr(spec.slots):
            own = has_expert(spec, lane, chosen, slot)  # the divisor may be 0 if all slots are dropped
            made[slot] = cutlass.select_(own, made[slot] / divisor, Float32(0))
    return made
