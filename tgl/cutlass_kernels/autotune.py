"""Find the fastest tiling of a GEMM by timing the candidates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import backends
from . import tilings as choices
from .archs import arch_of
from .config import VARLEN_K, VARLEN_M, GemmConfig
from .launchers import gemm
from .runtime.launcher import Launcher, forget, power_of_two

TUNABLE: dict[str, Launcher] = {launcher.op: launcher for launcher in gemm.LAUNCHERS}


def device_milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the median time of ``call`` on the current CUDA stream, after two warm-up runs."""
    times = []
    for turn in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def autotune(
    op: Any,
    *args: Any,
    tilings: Iterable[GemmConfig] | None = None,
    measure: Callable[[Callable[[], object]], float] = device_milliseconds,
    **kwargs: Any,
) -> dict[GemmConfig, float]:
    """Time the tilings that can serve a call of ``op`` and use the fastest for similar calls in this process.

    Calls are similar if N, K and the rows per group to a power of two agree, whatever the number of tokens and the
    routing. No argument is written to. Compiling takes a second or two per tiling, and a graph captured before keeps
    its own.

    Args:
        op: ``grouped_gemm``, ``grouped_gemm_wgrad`` or ``grouped_gemm_wgrad_accumulate_``, as for ``tgl.explain``.
        *args, **kwargs: the arguments of the call; its routing is the one that is timed.
        tilings: the tilings to try; default all there are for the device.
        measure: returns the cost of a call, which is minimised.

    Returns:
        The measured cost by tiling, the smallest first.

    Raises:
        ValueError: the call is not served by a kernel whose tiling can be chosen, or a tiling does not exist.
        tgl.GraphCaptureError: during CUDA graph capture.
    """
    explanation = backends.explain(op, *args, **kwargs)
    name, launcher = explanation.op, TUNABLE.get(explanation.op)
    if launcher is None or explanation.chosen is None or explanation.chosen.attempt is None:
        raise ValueError(f"`op` must be served by a kernel of tgl with a tiling, but: {explanation}")
    device, operands, options = backends.registry.described[name](*args, **kwargs)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise backends.GraphCaptureError(f"tgl::{name} cannot be tuned while a CUDA graph is captured")
    out = torch.empty_like(options["out"], device=device)
    call = launcher.call(*operands, **{**options, "out": out})
    kind = VARLEN_M if name == "grouped_gemm" else VARLEN_K
    arch = arch_of(backends.device_arch(device)).name
    gathers = launcher.reach.gathers(call)
    key = (arch, kind, *_problem(kind, call), *(() if gathers is None else (gathers,)))
    before = choices.tuned.get(key)
    found: dict[GemmConfig, float] = {}
    try:
        every = choices.candidates(arch, kind, gathering=gathers is not None)
        why_not = choices.reason if gathers is None else choices.gathering_reason
        for tiling in every if tilings is None else tilings:
            reason = why_not(arch, kind, tiling)
            if reason is not None:
                raise ValueError(f"`tilings` must exist, but {tiling}: {reason}")
            choices.tuned[key] = tiling
            forget()
            found[tiling] = measure(lambda: launcher.run(call))
    finally:
        choices.tuned.pop(key, None)
        best = min(found, key=lambda tiling: found[tiling]) if found else before
        if best is not None:
            choices.tuned[key] = best
        forget()
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _problem(kind: str, call: Any) -> tuple[int, int, int]:
    """Return columns, depth and rows as ``tilings.choose`` gets them."""
    if kind == VARLEN_M:
        groups, depth, columns = call.b.shape
        return columns, depth, power_of_two(call.out.shape[0] // groups)
    groups, rows, columns = call.out.shape
    return columns, power_of_two(gemm.rows_of(call) // groups), rows
