"""Observations of a block for tests: the ops that it calls, their allocations, and whether bits are equal."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Ops(TorchDispatchMode):
    """Names of tgl's ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tgl":
            self.names.append(function._schema.name.removeprefix("tgl::"))
        return function(*args, **(kwargs or {}))


class Sizes(TorchDispatchMode):
    """The largest number of elements that an op of torch or of tgl returns in memory of its own."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if not function.is_view:
            for t in results if isinstance(results, (tuple, list)) else (results,):
                self.largest = max(self.largest, t.numel() if isinstance(t, torch.Tensor) else 0)
        return results
