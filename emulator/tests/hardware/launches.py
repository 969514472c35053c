"""Launches captured in the emulator, replayed on a device from a file, and compared bit for bit.

A capture holds the cubin, the launch geometry, the kernel's parameter bytes, every tensor before the launch with its
address, and every tensor after it. Replaying uploads the tensors and translates the addresses inside the parameters,
those inside tensor maps included.
"""

import pickle
from unittest import mock

import numpy as np

from .driver import Device


def capture(case):
    """Compile and run a third-party case in the emulator and return a picklable capture of its last launch."""
    import torch

    from cute_emulator import emulate, runtime

    case = dict(case)
    build = case.pop("build")
    case.pop("kind")
    taken = {}
    original = runtime.Launch

    def launch(program, extent, params, spans, chip, rules):
        taken.update(
            grid=extent.grid,
            block=extent.block,
            cluster=extent.cluster,
            shared=extent.smem,
            params=params,
            layout=list(program.params),
            before=[(a, bytes(_view(a, n))) for a, n in spans if n],
        )
        return original(program, extent, params, spans, chip, rules)

    texts: list[str] = []
    with emulate(case["arch"]) as session:
        call, out, want = build(**case)
        out.zero_()
        session.edit_ptx = lambda t: texts.append(t) or t
        with mock.patch.object(runtime, "Launch", launch):
            call()
    assert torch.equal(out, want)
    taken["after"] = [(a, bytes(_view(a, len(b)))) for a, b in taken["before"]]
    library = runtime._dsl[0].library
    cubin = next(library.cubins[key] for key, text in library.ptx.items() if text == texts[-1])
    return taken | {"cubin": cubin, "kernel": session.launches[-1].kernel, "written": out.data_ptr()}


def _view(address, size):
    import ctypes

    return (ctypes.c_uint8 * size).from_address(address)


def replay(device, taken):
    """[(bytes, mismatching bytes)] of every tensor, the output's first."""
    function = device.load(taken["cubin"], taken["kernel"])
    moved = [(a, len(b), device.upload(b)) for a, b in taken["before"]]
    params = bytearray(taken["params"])
    maps = {offset for offset, size in taken["layout"] if size == 128}
    for i in range(0, len(params) - 7, 8):
        value = int.from_bytes(params[i : i + 8], "little")
        for address, size, p in moved:
            # the base of a ragged store map is a tensor's address shifted back by 2**30 rows
            shifted = i in maps and value != address and (address - value) % (1 << 30) == 0
            if address <= value < address + size or shifted:
                params[i : i + 8] = ((p + value - address) % (1 << 64)).to_bytes(8, "little")
                break
    pieces = [bytes(params[offset : offset + size]) for offset, size in taken["layout"]]
    device.launch(function, taken["grid"], taken["block"], pieces, taken["shared"], taken["cluster"])
    out = []
    for (address, size, p), (_, after) in zip(moved, taken["after"], strict=True):
        got = np.frombuffer(device.download(p, size), np.uint8)
        bad = int((got != np.frombuffer(after, np.uint8)).sum())
        out.append((address != taken["written"], size, bad))
    return [(size, bad) for _, size, bad in sorted(out)]


def save(path, captures):
    """Write captures by case name."""
    with open(path, "wb") as f:
        pickle.dump(captures, f)


def replay_file(path):
    """{case: replay(...)} of a file of captures (only of files you wrote: the format is pickle)."""
    with open(path, "rb") as f:
        captures = pickle.load(f)
    device = Device()
    return {name: replay(device, c) for name, c in captures.items()}
