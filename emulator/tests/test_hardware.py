"""The emulator against a Hopper device, bit for bit: single instructions, and whole launches."""

import subprocess
import sys
from pathlib import Path

import pytest

from .hardware import instructions, launches, products
from .hardware.driver import Device

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
# every case whose sums are exact in any order; all inputs are small integers
CASES = {
    "cutlass_operators": [
        "sm90_bf16",
        "sm90_bf16_cluster_mn_major",
        "sm90_f16_accumulate_f16",
        "sm90_fp8",
        "sm90_int8",
    ],
    "quack_gemm": [
        "sm90_dense",
        "sm90_dense_pingpong",
        "sm90_grouped",
        "sm90_grouped_pingpong",
        "sm90_weight_gradient",
    ],
}


@pytest.fixture(scope="module")
def device():
    d = Device()
    if d.capability != (9, 0):
        pytest.skip(f"needs a device of compute capability 9.0, this is {d.capability}")
    return d


@pytest.mark.parametrize("family", ["arithmetic", "conversions", "integers"])
def test_instructions(device, family):
    forms = list(getattr(instructions, family)())
    wrong = [r for r in instructions.compare(device, forms) if r[2]]
    assert not wrong, "\n".join(map(str, wrong))


def test_two_kinds_of_mma(device, record_property):
    """Both kinds compute the product; the number of differing sums is reported and not tested."""
    found = products.compare(device)
    assert found.error <= products.ROUNDING
    record_property("sums", found.sums)
    record_property("differing between mma.sync and wgmma", found.differing)


@pytest.mark.parametrize("driver", CASES)
def test_launches(device, driver, tmp_path):
    path = tmp_path / "captures"
    command = [sys.executable, "-m", "tests.hardware", "capture", str(path), driver, *CASES[driver]]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    differing = {name: parts for name, parts in launches.replay_file(path).items() if any(bad for _, bad in parts)}
    assert not differing
