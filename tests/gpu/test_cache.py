"""Compiled kernels on disk, with a real CUDA runtime under them."""

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROCESS = """
    import faulthandler, sys, time
    faulthandler.dump_traceback_later(300, exit=True)
    def say(what):
        print(f"{time.perf_counter() - start:7.2f} s  {what}", flush=True)
    start = time.perf_counter()
    import torch, tgl
    from tgl.cutlass_kernels.register import LAUNCHERS
    from tgl.cutlass_kernels.runtime import cache

    cache.set_directory(sys.argv[1])
    if sys.argv[2] == "warm":
        for launcher in LAUNCHERS:
            launcher.build = None  # a kernel that is not on disk would need it
    say("imported")
    torch.manual_seed(0)
    offs = torch.tensor([0, 130, 131, 400], dtype=torch.int32, device="cuda")
    def integers(*shape):
        return torch.randint(-1, 2, shape, device="cuda", dtype=torch.bfloat16)
    a, b, dy = integers(409, 72), integers(4, 72, 136), integers(409, 136)
    a[400:] = float("nan")
    dy[400:] = float("nan")
    torch.cuda.synchronize()
    say("made operands")
    calls_made = {"grouped_gemm": (a, b, offs), "grouped_gemm_wgrad": (a, dy, offs), "grouped_dbias": (dy, offs)}
    for op, args in calls_made.items():
        assert tgl.explain(op, *args).chosen.name == "tgl kernel", tgl.explain(op, *args)
    results = []
    for op, args in calls_made.items():
        results.append(getattr(tgl, op)(*args))
        say(f"launched {op}")
        torch.cuda.synchronize()
        say(f"finished {op}")
    y, dw, db = results
    begin = 0
    for g, end in enumerate(offs.tolist()):
        rows = slice(begin, end)
        assert torch.equal(y[rows].double(), (a[rows].double() @ b[g].double()).bfloat16().double())
        assert torch.equal(dw[g].double(), (a[rows].double().t() @ dy[rows].double()).bfloat16().double())
        assert torch.equal(db[g].double(), dy[rows].double().sum(0))
        begin = end
    assert y[400:].eq(0).all()
    say("all exact")
"""


def run(directory, mode):
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(directory), mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    print(mode, done.stdout, sep="\n")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_process_finds_its_kernels_on_disk(tmp_path):
    run(tmp_path, "cold")
    assert len(list(tmp_path.rglob("*.o"))) == 3
    run(tmp_path, "warm")


def test_kernels_run_on_the_current_stream():
    import tgl

    a = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    b = torch.zeros(1, 64, 64, dtype=torch.bfloat16, device="cuda")
    offs = torch.tensor([64], dtype=torch.int32, device="cuda")
    tgl.warmup("grouped_gemm", a, b, offs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        b.fill_(1)
        y = tgl.grouped_gemm(a, b, offs)
    stream.synchronize()
    assert y.eq(64).all()
