"""``python -m tgl.doctor``: report whether tgl is ready here, installed packages and devices, and with ``--ops`` the
implementation of every op on each device.

The report is meant for people and for bug reports. It computes nothing, compiles nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import __version__, backends
from ..cutlass_kernels.archs import chips, serving
from ..cutlass_kernels.runtime import cache, device
from ..meta.expert_parallel import ALL_TO_ALL, NEED_OF_PEERS, SYMMETRIC_MEMORY, nvshmem
from ..testing.signatures import OPS, elsewhere, options_of, sample_call

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "peft")

Calls = dict[str, dict[str, tuple[tuple, dict[str, Any]]]]
"""Arguments and options of calls, by op and variant."""

UNKNOWN = "an entry in tgl/testing/signatures.py", "arguments that its library knows"


def main(argv: Sequence[str]) -> None:
    """Run the command ``python -m tgl.doctor``."""
    parser = argparse.ArgumentParser(prog="python -m tgl.doctor", description="Report whether tgl is ready here.")
    parser.add_argument("--ops", action="store_true", help="list the implementation of every op on each device")
    print(report(ops=parser.parse_args(argv).ops))


def report(*, ops: bool = False) -> str:
    """Return the text that ``python -m tgl.doctor`` prints.

    Three lines come first: what tgl is ready on, what is missing, and what to do about it.

    Args:
        ops: whether to list the implementation of every op on each device, as with ``--ops``.
    """
    calls = _sample_calls() if ops else {}
    served = (line for where in _devices() for line in ("", *_served(where, calls)))
    return "\n".join((*_summary(), "", *_installed(), *_between_ranks(), *served))


def _summary() -> Iterator[str]:
    gpus = [where for where in _devices() if where.type == "cuda"]
    archs = {where: backends.device_arch(where) for where in gpus}
    reason = device.packages_reason()
    ready = [f"{where} ({archs[where]}, kernels)" for where in gpus if reason is None and serving(archs[where])]
    yield f"ready: {', '.join((*ready, 'cpu (every op, for tests and small models)'))}"
    missing, remedy = _missing(archs, reason)
    yield f"missing: {missing}"
    yield f"to do: {remedy}"


def _missing(archs: dict[torch.device, str], reason: str | None) -> tuple[str, str]:
    """Return what keeps kernels from running on this machine's GPUs, and what to do about it."""
    nothing = "nothing"
    if torch.version.cuda is None:
        return "a build of torch for CUDA", "install one (https://pytorch.org/get-started), if this machine has a GPU"
    if not archs:
        return "a GPU that torch finds", "nothing on a machine without one; else check that nvidia-smi lists it"
    if reason is not None:
        return f"the kernel compiler: tgl {reason}", "pip install 'torch-grouped-linear[cu13]'"
    without = [f"{where} ({arch})" for where, arch in archs.items() if serving(arch) is None]
    if without:
        return f"kernels for {', '.join(without)}, which runs ops of ATen", f"use a GPU of {', '.join(chips())}"
    return nothing, nothing


def _installed() -> Iterator[str]:
    yield f"tgl {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"  {package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"  {package}: not installed"
    cuda = torch.version.cuda
    yield f"  {_drop_in()}"
    yield f"  torch is built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"
    reason = device.packages_reason()
    if reason is not None:
        yield f"  kernels cannot be compiled: this {reason}"
        return
    try:
        directory = cache.directory()
    except OSError as error:
        yield f"  kernels can be compiled; none are kept: {error}"
        return
    kept = list(directory.glob("*.o"))
    size = sum(path.stat().st_size for path in kept) / 2**20
    yield f"  kernels can be compiled; {len(kept)} ({size:.0f} MiB) are kept in {directory}"


def _between_ranks() -> Iterator[str]:
    """Yield what each engine of expert parallelism can use on this host.

    A process group may support less; see ``tgl.explain``.
    """
    distributed = torch.distributed
    if not distributed.is_available():
        yield "  between ranks: nothing, torch is built without torch.distributed"
        return
    names = [name for name in ("nccl", "gloo", "mpi", "ucc") if getattr(distributed, f"is_{name}_available")()]
    yield "  between ranks:"
    yield f"    {ALL_TO_ALL}: all_to_all_single of {', '.join(names) or 'no backend'}"
    yield f"    {SYMMETRIC_MEMORY}: {_reach()}"
    yield f"    all_to_all_vdev_2d, which is no engine: {nvshmem()}"


def _reach() -> str:
    """Return which devices of this host can write to each other's memory, according to torch."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"{NEED_OF_PEERS}, and there is none"
    pairs = ((i, j) for i in range(count) for j in range(count) if i != j)
    apart = [f"cuda:{i} to cuda:{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if apart:
        return f"{NEED_OF_PEERS}; torch has no access from {', '.join(apart)}"
    return "one device, for a group of one rank" if count == 1 else f"{count} devices write to each other's memory"


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield torch.device("cuda", index)


def _served(where: torch.device, asked: Calls) -> Iterator[str]:
    arch = backends.device_arch(where)
    if where.type == "cuda":
        yield f"{where}: {torch.cuda.get_device_name(where)} ({arch})"
        if serving(arch) is None:
            yield f"  tgl has kernels for {', '.join(chips())}, not for {arch}"
    else:
        yield f"{where}: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    with FakeTensorMode():
        for op, calls in asked.items():
            answers: dict[str, list[str]] = {}
            for variant, arguments in calls.items():
                args, kwargs = elsewhere(arguments, where)
                answers.setdefault(_answer(backends.explain(op, *args, **kwargs)), []).append(variant)
            for answer, variants in answers.items():
                yield f"  {op:<40} {', '.join(variants)}: {answer}"
            if not answers:
                needs = OPS[op].needs if op in OPS else UNKNOWN["::" in op]
                yield f"  {op:<40} not asked: it needs {needs}"


def _sample_calls() -> Calls:
    """Return sample arguments for every op and variant, in the order a layer calls them; ops without a sample last."""
    known = [op for op, entry in OPS.items() if op in backends.ops() and not entry.needs]
    others = [op for op in backends.ops() if op not in known]
    calls = {op: {variant: sample_call(op, **options_of(variant)) for variant in OPS[op].variants} for op in known}
    return {**calls, **{op: {} for op in others}}


def _answer(found: backends.Explanation) -> str:
    if found.chosen is None:
        return "no implementation: " + "; ".join(f"{i.name}: {reason}" for i, reason in found.refused)
    about = ", an emulation" * found.emulates + ", reads the device on the host" * found.syncs
    return f"{found.chosen.name}{about}"


def _drop_in() -> str:
    drop_in = sys.modules.get("tgl.integrations.torch")
    types = drop_in.served() if drop_in is not None else ()
    if not types:
        return "ATen's grouped products are ATen's own: tgl.integrations.torch is not enabled in this process"
    return f"ATen's grouped products are served on {', '.join(types)}, by tgl.integrations.torch"
