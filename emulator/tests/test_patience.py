"""Launches that wait for writes of somebody outside: a thread here, other processes in ``tests/distributed``."""

import threading
import time

import pytest
import torch

from cute_emulator import DeadlockError, emulate

from .ptx import module

# Wait for a word of the first tensor; then write it, and how many nanoseconds have passed, to the second one.
AWAIT = """
  mov.u64 %rd2, %globaltimer;
AGAIN:
  ld.acquire.sys.global.b32 %r3, [%rd0];
  setp.eq.s32 %p1, %r3, 0;
  @%p1 bra AGAIN;
  mov.u64 %rd3, %globaltimer;
  sub.s64 %rd3, %rd3, %rd2;
  cvt.u64.u32 %rd4, %r3;
  st.global.b64 [%rd1], %rd4;
  st.global.b64 [%rd1+8], %rd3;
"""


def test_writes_of_other_processes_are_seen():
    word, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def write() -> None:
        time.sleep(0.1)
        word.fill_(7)

    with emulate("sm_90a") as machine:
        machine.patience = 30.0
        writer = threading.Thread(target=write)
        start = time.monotonic_ns()
        writer.start()
        record = machine.launch_ptx(module(AWAIT, 2), [word, seen])
        took = time.monotonic_ns() - start
        writer.join()
    assert seen[0] == 7
    assert 0 < seen[1] <= took
    assert record.steps < 1000  # a turn for each nap


def test_no_other_process_writes():
    word, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    said = "made progress for 0.1 s, and no other process has written what is waited for"
    with emulate("sm_90a") as machine, pytest.raises(DeadlockError, match=said):
        machine.patience = 0.1
        machine.launch_ptx(module(AWAIT, 2), [word, seen])
    assert not seen.any()


def test_a_cluster_that_is_not_resident_may_be_waited_for():
    """The first block waits for the last one, which starts while it waits."""
    word, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    last = """
  mov.u32 %r4, %ctaid.x;
  setp.eq.s32 %p2, %r4, 0;
  @%p2 bra FIRST;
  st.release.sys.global.b32 [%rd0], 5;
  ret;
FIRST:
"""
    with emulate("sm_90a", resident_clusters=1) as machine:
        machine.patience = 30.0
        machine.launch_ptx(module(last + AWAIT, 2), [word, seen], grid=(2, 1, 1))
    assert seen[0] == 5


@pytest.mark.parametrize("patience", [0, -1.0])
def test_a_launch_without_progress_ends(patience):
    with emulate("sm_90a") as machine, pytest.raises(ValueError, match="patience must be positive or None"):
        machine.patience = patience
        machine.launch_ptx(module(""), [])
