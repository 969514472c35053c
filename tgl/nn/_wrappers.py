"""Wrappers that take gradients when the backward ends, and what ``delay_wgrad_compute`` does about them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def takes_gradients_early(module: nn.Module, parameters: Sequence[nn.Parameter], own: Sequence[nn.Parameter]) -> str:
    """What would reduce the gradients of ``parameters`` before ``backward_dw`` has formed them; "" for nothing.

    ``own`` are the module's parameters as it made them: ``fully_shard`` computes with others, but for ignored ones.
    Valid inside of the forward alone, when a ``DistributedDataParallel`` says that it is at work.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None:
        reduced = {id(p) for p in ddp._module_parameters}
        if any(id(p) in reduced for p in parameters):
            return "torch's DistributedDataParallel"
    if getattr(module, "_is_fsdp_managed_module", False):
        known = {id(p) for p in own}
        if any(id(p) not in known for p in parameters):
            return "fully_shard"
    return ""
