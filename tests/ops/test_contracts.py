"""Every op keeps every contract, on every sample: opcheck and the checks of ``tgl.testing``."""

import pytest
import torch

import tgl.testing

NAMES = sorted(tgl.testing.SIGNATURES)


def overload(name):
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.tgl, packet), suffix or "default")


def test_every_op_has_a_signature():
    defined = {n.removeprefix("tgl::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")}
    without_groups = {"after", "allocate_wgrad", "offload", "reload", "wgrad_stash_"}  # opcheck is in their own tests
    assert defined - without_groups == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_contracts(name):
    assert tgl.testing.check_op(overload(name), tgl.testing.sample_inputs(name)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contracts_over_the_whole_product(name):
    samples = tgl.testing.sample_inputs(name, full=True)
    assert tgl.testing.check_op(overload(name), samples, opcheck="none") > 50


def test_allocate_wgrad_under_opcheck():
    """Its output is uninitialised, so only the utils that do not read values apply."""
    torch.library.opcheck(
        torch.ops.tgl.allocate_wgrad.default,
        (3, [5, 7], torch.bfloat16, torch.device("cpu"), 256),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
