"""Kernels that a chip loads, and the errors of the emulator for others."""

import pytest

import cute_emulator as emulator
from cute_emulator.chips import CHIPS, chip_of
from cute_emulator.errors import EmulatorError

EMPTY = ".version 8.8\n.target {target}\n.address_size 64\n.visible .entry k()\n{{\nret;\n}}\n"

# what NVIDIA says loads: a chip's own ("a"), its family's ("f"), and machine code of an earlier minor capability
LOADS = {
    ("sm_90", "sm_90a"): True,
    ("sm_90", "sm_90"): True,
    ("sm_90", "sm_80"): False,
    ("sm_100", "sm_100a"): True,
    ("sm_100", "sm_100f"): True,
    ("sm_100", "sm_103a"): False,
    ("sm_100", "sm_90a"): False,
    ("sm_103", "sm_100a"): False,
    ("sm_103", "sm_100f"): True,
    ("sm_103", "sm_103a"): True,
    ("sm_86", "sm_80"): True,
    ("sm_80", "sm_86"): False,
    ("sm_121", "sm_120f"): True,
    ("sm_121", "sm_120a"): False,
    ("sm_120", "sm_100f"): False,
}


@pytest.mark.parametrize(("chip", "target"), LOADS)
def test_targets_that_a_chip_loads(chip, target):
    with emulator.emulate(chip) as machine:
        if LOADS[chip, target]:
            assert machine.launch_ptx(EMPTY.format(target=target), []).arch == target
        else:
            with pytest.raises(EmulatorError, match=f"compiled for {target}; the emulated machine is {chip}"):
                machine.launch_ptx(EMPTY.format(target=target), [])


@pytest.mark.parametrize("name", CHIPS)
def test_names_of_a_chip(name):
    assert chip_of(name) is chip_of(name + "a") is chip_of(name + "f") is CHIPS[name]


@pytest.mark.parametrize("name", ["sm_42", "", "sm", "h100", "90"])
def test_an_unknown_chip(name):
    with pytest.raises(ValueError, match="arch must be one of sm_80, "), emulator.emulate(name):
        pass


def test_shared_memory_is_the_chips():
    text = EMPTY.format(target="sm_80")
    with emulator.emulate("sm_80") as machine:
        machine.launch_ptx(text, [], smem=163 * 1024)
        with pytest.raises(EmulatorError, match="exceed 166912"):
            machine.launch_ptx(text, [], smem=163 * 1024 + 1)
    with emulator.emulate("sm_86") as machine, pytest.raises(EmulatorError, match="exceed 101376"):
        machine.launch_ptx(text, [], smem=100 * 1024)
