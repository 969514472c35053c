"""Detection of wrappers that reduce gradients at the end of the backward, too early for ``delay_wgrad_compute``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def takes_gradients_early(module: nn.Module, parameters: Sequence[nn.Parameter], own: Sequence[nn.Parameter]) -> str:
    """Return the wrapper that would reduce the gradients of ``parameters`` before ``backward_dw``; "" for none.

    ``own`` are the parameters that the module registered: ``fully_shard`` replaces all but ignored ones. Valid only
    inside the forward, while a ``DistributedDataParallel`` is marked active.
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
