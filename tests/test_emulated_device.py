"""Kernels for an architecture can serve CPU tensors, for an emulator that takes their launches."""

import torch

import tgl
from tgl import backends


def test_kernels_of_the_emulated_arch_serve_cpu_tensors():
    calls = []
    kernel = backends.Implementation(
        "grouped_dbias",
        "a kernel",
        "cuda",
        lambda dy, offs, *, out: (calls.append("kernel"), out.zero_()),
        archs=frozenset({"sm_1"}),
        priority=10,
        emulable=True,
    )
    backends.add(kernel)
    dy, offs = torch.ones(4, 2), torch.tensor([4], dtype=torch.int32)
    try:
        with backends.emulated_device("sm_1"):
            assert "runs a kernel" in str(tgl.explain(tgl.grouped_dbias, dy, offs))
            assert tgl.grouped_dbias(dy, offs).eq(0).all()
        with backends.emulated_device("sm_2"):
            explanation = str(tgl.explain(tgl.grouped_dbias, dy, offs))
            assert "a kernel: built for sm_1, this device is sm_2" in explanation
            assert tgl.grouped_dbias(dy, offs).eq(4).all()
        assert tgl.grouped_dbias(dy, offs).eq(4).all()
    finally:
        backends.remove(kernel)
    assert calls == ["kernel"]
