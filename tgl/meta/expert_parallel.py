"""Output specs of the ops of expert parallelism: every function checks its arguments and returns the result's specs.

Letters: W ranks, S tokens of this rank, k top-k slots per token, E experts over all ranks, L = E / W per rank, P rows
for each pair of ranks, c largest number of rows that a token is sent as, H columns. Every rank sends and receives
``W P`` rows, P for each rank; no size depends on a routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, permutation
from .specs import Dim, TensorSpec, ceil_div

_INT32_MAX = 2**31 - 1

ALL_TO_ALL, SYMMETRIC_MEMORY = "all_to_all", "symmetric_memory"
ENGINES = (ALL_TO_ALL, SYMMETRIC_MEMORY)
"""Engines that exchange rows between ranks: collectives of static sizes, or kernels that write to peer memory."""

NEED_OF_PEERS = "it needs CUDA devices that write to each other's memory, as those of one NVLink domain do"
"""The requirement of symmetric memory, for messages."""

PIECE = 16
"""Bytes; rows of bytes are a multiple of this."""


def _at_least(op: str, argument: str, value: Dim, least: Dim, why: str) -> None:
    if (enough := value >= least) is not True:
        checks.require(enough, op, argument, lambda: f"at least {least}, {why}", value)


def check_engine(op: str, engine: str) -> None:
    """Check that ``engine`` is one of ``ENGINES``."""
    checks.require(engine in ENGINES, op, "engine", f"one of {', '.join(map(repr, ENGINES))}", repr(engine))


def nvshmem() -> str:
    """Report whether torch has NVSHMEM, for exchanges with counts on the device (``all_to_all_vdev_2d``)."""
    if not torch.distributed.is_available():
        return "torch is built without torch.distributed"
    from torch.distributed import _symmetric_memory

    return "torch finds NVSHMEM" if _symmetric_memory.is_nvshmem_available() else "torch finds no NVSHMEM"


def copies(top_k: Dim, group_size: int, invariant: bool) -> Dim:
    """Return c: a token is sent once per rank, or once per top-k slot if ``invariant``."""
    return top_k if invariant else group_size


def fewest_expert_rows(num_experts: Dim, group_size: int) -> Dim:
    """Return the rows for a step that did not fit: one for each expert of a rank and one for each rank."""
    return num_experts // group_size + group_size


def fewest_pair_rows(num_experts: Dim, group_size: int, top_k: Dim) -> Dim:
    """Return the fewest rows per pair of ranks with which all pairs have a slot for each expert of a rank."""
    choices = group_size * top_k
    return ceil_div(num_experts // group_size, choices)


def ep_route(
    top_k_index: Tensor,
    num_experts: Dim,
    *,
    group_size: int,
    pair_rows: Dim,
    expert_rows: Dim,
    invariant: bool = False,
) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
    """``[S, k]`` experts -> int32 ``position [S c]``, ``token [W P]``, ``index [W P, k]``, ``needed [2]``."""
    op = "ep_route"
    checks.ndim(op, "top_k_index", top_k_index, 2, "[S, k]")
    dtype, device = top_k_index.dtype, top_k_index.device
    checks.require(dtype in checks.INTEGERS, op, "top_k_index", "an integer tensor", dtype, TypeError)
    tokens, top_k = top_k_index.shape
    if top_k < 1:
        checks.require(False, op, "top_k_index", "[S, k] with k of at least 1", top_k_index.shape)
    _at_least(op, "group_size", group_size, 1, "as a group has a rank")
    _at_least(op, "num_experts", num_experts, 1, "as ranks share them")
    if (whole := num_experts % group_size == 0) is not True:
        checks.require(whole, op, "num_experts", lambda: f"a multiple of the {group_size} ranks", num_experts)
    fewest = fewest_pair_rows(num_experts, group_size, top_k)
    _at_least(op, "pair_rows", pair_rows, fewest, "for one slot with each expert of a rank")
    fewest = fewest_expert_rows(num_experts, group_size)
    _at_least(op, "expert_rows", expert_rows, fewest, "a row for every expert of a rank and one for every rank")
    rows, sent = group_size * pair_rows, copies(top_k, group_size, invariant)
    for argument, count in (("pair_rows", rows * top_k), ("expert_rows", expert_rows), ("top_k_index", tokens * sent)):
        if (count > _INT32_MAX) is True:  # not asked of symbols: the real call has none
            checks.require(False, op, argument, "for fewer than 2^31 places, which int32 counts", count)
    shapes = (tokens * sent,), (rows,), (rows, top_k), (2,)
    position, token, index, needed = (TensorSpec(shape, torch.int32, device) for shape in shapes)
    return position, token, index, needed


def _places(op: str, name: str, t: Tensor, token: Tensor, position: Tensor, top_k: Dim) -> Dim:
    """Check the permutation of tensor ``name``; returns S."""
    checks.ndim(op, name, t, 2, "[S, H]" if op == "ep_dispatch" else "[W P, H]")
    if op == "ep_dispatch" and t.dtype == torch.uint8:
        whole = t.shape[1] % PIECE == 0
        if whole is not True:
            checks.require(whole, op, name, lambda: f"of rows of a multiple of {PIECE} bytes", t.shape)
    else:
        checks.floating(op, name, t)
    permutation.check_pairs(op, token, position, top_k, name, t.device)
    tokens = position.shape[0] // top_k
    if (whole := tokens * top_k == position.shape[0]) is not True:
        checks.require(whole, op, "position", lambda: f"[S c] with c = {top_k}", position.shape)
    return tokens


def _moved(op: str, name: str, tensors: tuple[Tensor, Tensor | None], count: Dim, to: Dim) -> tuple[TensorSpec, ...]:
    """Return the specs of both tensors, the first named ``name``, with ``to`` instead of ``count`` rows."""
    made = []
    for argument, t in zip((name, "weights"), tensors):
        if t is None:
            made.append(TensorSpec((0,), tensors[0].dtype, tensors[0].device))
            continue
        checks.ndim(op, argument, t, 2, "of a row for each")
        if argument == "weights":
            checks.floating(op, argument, t)
        checks.same_device(op, argument, t, name, tensors[0].device)
        checks.size(op, argument, t, 0, count, lambda: f"of {count} rows like its places")
        made.append(TensorSpec((to, t.shape[1]), t.dtype, t.device))
    return tuple(made)


def ep_dispatch(
    x: Tensor, weights: Tensor | None, token: Tensor, position: Tensor, top_k: Dim
) -> tuple[TensorSpec, ...]:
    """``[S, H]`` and ``[S, n]`` -> ``[W P, H]`` and ``[W P, n]`` from all ranks, ``[0]`` without weights.

    ``x`` may be bytes, for quantised tokens; these have no derivative.
    """
    op = "ep_dispatch"
    tokens = _places(op, "x", x, token, position, top_k)
    return _moved(op, "x", (x, weights), tokens, token.shape[0])


def ep_combine(
    y: Tensor,
    weights: Tensor | None,
    token: Tensor,
    position: Tensor,
    top_k: Dim,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[TensorSpec, ...]:
    """``[W P, H]`` and ``[W P, n]`` -> ``[S, H]`` and ``[S, n]`` from all ranks, ``[0]`` without weights.

    Sums of ``y`` are rounded to ``out_dtype``; exchanged rows have the dtype of ``y``.
    """
    op = "ep_combine"
    tokens = _places(op, "y", y, token, position, top_k)
    out, out_weights = _moved(op, "y", (y, weights), token.shape[0], tokens)
    return out._replace(dtype=checks.out_dtype(op, "out_dtype", y.dtype, out_dtype)), out_weights


def as_words(t: Tensor) -> Tensor:
    """Return rows of bytes viewed as float32, which engines only copy; other rows unchanged."""
    if t.dtype != torch.uint8:
        return t
    whole = t.is_contiguous() and t.storage_offset() % torch.float32.itemsize == 0
    return (t if whole else t.clone(memory_format=torch.contiguous_format)).view(torch.float32)
