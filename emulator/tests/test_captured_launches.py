"""Launches of the emulator that are captured with all that a device needs to replay them."""

import pickle

from .hardware import launches
from .third_party import quack_gemm


def test_a_capture_holds_the_launch():
    taken = pickle.loads(pickle.dumps(launches.capture(quack_gemm.CASES["sm90_dense"])))
    assert taken["cubin"][:4] == b"\x7fELF"
    assert len(taken["grid"]) == len(taken["block"]) == len(taken["cluster"]) == 3
    assert taken["shared"] > 0
    assert len(taken["params"]) == max(offset + size for offset, size in taken["layout"])
    after = dict(taken["after"])
    assert taken["written"] in after
    changed = {address for address, before in taken["before"] if after[address] != before}
    assert changed == {taken["written"]}
