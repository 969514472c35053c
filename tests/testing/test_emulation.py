"""tgl's kernels in the emulator, and what is said where it is missing."""

import sys

import pytest
import torch

import tgl
import tgl.testing
from tests import interpreters

cute_emulator = pytest.importorskip("cute_emulator")
pytest.importorskip("cutlass")

WITHOUT = """
import sys
sys.modules["cute_emulator"] = None  # as where it is not installed
import tgl, tgl.testing
tgl.testing.check_op
for name in ("emulate", "sweep"):
    try:
        getattr(tgl.testing, name)
    except ImportError as error:
        print(error)
"""


def run(code):
    done = interpreters.run(code)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_op_takes_its_kernel_inside_the_block():
    x = torch.randint(-3, 4, (8, 16)).float()
    offs = torch.tensor([3, 8], dtype=torch.int32)
    expected = tgl.grouped_dbias(x, offs)
    with tgl.testing.emulate("sm_100a", seed=3) as machine:
        assert torch.equal(tgl.grouped_dbias(x, offs), expected)
    assert machine.seed == 3
    assert machine.launches
    with cute_emulator.emulate("sm_100a") as machine:
        tgl.grouped_dbias(x, offs)
    assert not machine.launches


def test_a_missing_package_is_reported_once():
    message = (
        "tgl.testing.emulate and tgl.testing.sweep need the package cute-emulator, which is not installed: "
        "`pip install ./emulator` in a checkout of tgl\n"
    )
    assert run(WITHOUT) == 2 * message


def test_the_former_place_warns_and_has_the_same_names(monkeypatch):
    monkeypatch.delitem(sys.modules, "tgl.testing.emulator", raising=False)  # another test may have imported it
    monkeypatch.delattr(tgl.testing, "emulator", raising=False)
    with pytest.warns(DeprecationWarning, match=r"emulate and sweep from tgl\.testing, all else from cute_emulator"):
        from tgl.testing import emulator
    assert emulator.emulate is tgl.testing.emulate
    assert set(emulator.__all__) <= set(cute_emulator.__all__)  # which has new ones beside them
    assert emulator.RaceError is cute_emulator.RaceError


def test_nothing_is_loaded_with_the_package():
    code = """
import sys, tgl, tgl.testing
print([m for m in sys.modules if m.split(".")[0] in ("cute_emulator", "cutlass") or m.startswith("tgl.testing.emul")])
"""
    assert run(code) == "[]\n"
