"""A stand-in for a GPU, for benchmark scripts that run on a CPU.

It captures no graphs: a replay calls once more. Its clock adds a millisecond per reading, so that every arm takes as
long.
"""

import json

from torch.overrides import TorchFunctionMode


class Replay:
    """A call instead of its graph: writes where the first one did."""

    def __init__(self, call, runs=3):
        self.call, self.result = call, call()

    def __call__(self):
        again = self.call()
        pairs = zip(self.result, again) if isinstance(again, list | tuple) else [(self.result, again)]
        for held, made in pairs:
            if held is not None and held is not made:
                held.copy_(made)


class Clock:
    def __init__(self, l2, host=False):
        self.taken = 0

    def take(self, call):
        call()
        self.taken += 1
        return self.taken

    def settle(self):
        pass

    def read(self, mark):
        return 1.0


class OnCpu(TorchFunctionMode):
    """Calls of torch that name the GPU get the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = ["cpu" if isinstance(a, str) and a == "cuda" else a for a in args]
        kwargs = {name: "cpu" if str(a) == "cuda" else a for name, a in (kwargs or {}).items()}
        return function(*args, **kwargs)


def ran(script, tmp_path, capsys, *options):
    """Return the printed words of a script and its results."""
    path = tmp_path / "results.json"
    script.main(["--samples", "2", "--out", str(path), *options])
    return [line.split() for line in capsys.readouterr().out.splitlines()], json.loads(path.read_text())
