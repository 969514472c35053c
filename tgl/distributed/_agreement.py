"""Agreement of a group's ranks on the arguments of a layer, and on the dtypes of its calls.

Exchanges transfer bits, and arriving bits are read in this rank's dtypes and sizes. Ranks that differ would compute
finite numbers from each other's bits, so every difference is an error on all ranks before anything is exchanged.
"""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..meta import symmetric_memory

_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_rounds: Counter[str] = Counter()  # agreements of this process, by name; copies of a layer share a name


def check_agreement(group: dist.ProcessGroup, **arguments: object) -> str:
    """Compare ``arguments`` between the ranks of ``group``, all of which have to call this.

    Returns:
        A name for what was agreed on, equal on all ranks and used by nothing else; see ``difference_in``.

    Raises:
        ValueError: on all ranks, if an argument differs.
    """
    described = {name: value if isinstance(value, _PLAIN) else repr(value) for name, value in arguments.items()}
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (uuid.uuid4().hex, described), group=group)
    difference = _difference([arguments for _, arguments in every])
    if difference is not None:
        raise ValueError(difference)
    name: str = every[0][0]
    return name


def difference_in(group_name: str, name: str, layer: str, **values: object) -> str | None:
    """Compare ``values`` between the ranks, each of which calls this where it meets new values.

    The values are exchanged through the group's store, so that neither a device nor a collective is involved, and a
    trace may call this.

    Returns:
        On all ranks the message of an error if a value differs, else None.

    Raises:
        RuntimeError: another rank has met no new values within the time-out of the group.
    """
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    store = distributed_c10d._get_process_group_store(group)
    _rounds[name] += 1
    keys = [f"tgl/{name}/{_rounds[name]}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], pickle.dumps(values).hex())
    limit, every = timedelta(seconds=time_out(group)), []
    for rank, key in enumerate(keys):
        try:
            store.wait([key], limit)
        except RuntimeError as error:  # each kind of store raises an error of its own
            said = ", ".join(f"{argument} {value}" for argument, value in values.items())
            raise RuntimeError(
                f"{layer}: rank {rank} of `group` must make the first call with {said} together with this rank, but "
                f"did not within {limit.total_seconds():g} s, the time-out of the group"
            ) from error
        every.append(pickle.loads(bytes.fromhex(store.get(key).decode())))
    difference = _difference(every)
    return None if difference is None else f"{layer}: {difference}"


def time_out(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return the seconds that ranks of ``group`` wait for each other, which no public attribute of a group holds.

    A group need have no backend for ``device``: then the first that it has.
    """
    known = group._device_types
    same = [of for of in known if device is not None and of.type == device.type]
    options = getattr(group._get_backend((same or known)[0]), "options", None)
    timeout = getattr(options, "_timeout", None)
    return symmetric_memory.WAIT if timeout is None else timeout.total_seconds()


def _difference(every: list[Mapping[str, object]]) -> str | None:
    for argument in dict.fromkeys(name for given in every for name in given):
        values = [given.get(argument) for given in every]
        if any(other != values[0] for other in values):
            return f"`{argument}` must be equal on all ranks of `group`, but got {values}"
    return None
