"""What tests of blocks see of them: the ops that they call, and whether results have equal bits."""

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
