"""Every op keeps every contract, on every sample: opcheck and the checks of ``tgl.testing``."""

import pytest
import torch

import tgl.testing

NAMES = sorted(tgl.testing.SIGNATURES)
ON_THEIR_OWN = {  # and where they are under test
    "after",  # tests/test_offload.py
    "allocate_wgrad",  # below
    "combine",  # test_permutation.py
    "combine_backward",
    "dispatch",
    "ep_combine",  # distributed/test_expert_parallel_ops.py
    "ep_dispatch",
    "ep_route",
    "grouped_activation_quantize",  # test_activation_quantize.py: the bytes of two ops that are here
    "grouped_gemm_scaled_activation_quantize",  # test_gemm_activation_quantize.py, likewise
    "offload",  # tests/test_offload.py
    "reload",
    "same_offs",  # test_debug.py
    "scale_from_layout",  # quantize/test_scale_layout.py
    "scale_to_layout",
    "topk_router",  # test_topk_router.py
    "topk_router_backward",
    "wgrad_stash_",  # test_wgrad_stash.py
    "wgrad_stash_.requested",  # nn/test_compiled_gradients.py: these run in compiled backwards alone
    "grouped_gemm_wgrad_accumulate_.requested",
    "grouped_gemm_scaled_wgrad_accumulate_.requested",
}
FEWEST = len(tgl.testing.ROUTINGS)
NONZERO_WHEN_EMPTY = ("group_quantize",)  # a group without rows has scale 1


def overload(name):
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.tgl, packet), suffix or "default")


def test_every_op_has_a_signature():
    defined = {n.removeprefix("tgl::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")}
    assert defined - ON_THEIR_OWN == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_contracts(name):
    empty_groups_zero = name not in NONZERO_WHEN_EMPTY
    samples = tgl.testing.sample_inputs(name)
    assert tgl.testing.check_op(overload(name), samples, empty_groups_zero=empty_groups_zero) > FEWEST


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contracts_over_the_whole_product(name):
    empty_groups_zero = name not in NONZERO_WHEN_EMPTY
    samples = tgl.testing.sample_inputs(name, full=True)
    assert tgl.testing.check_op(overload(name), samples, empty_groups_zero=empty_groups_zero, opcheck="none") > FEWEST


def test_allocate_wgrad_under_opcheck():
    """Its output is uninitialised, so only the utils that do not read values apply."""
    torch.library.opcheck(
        torch.ops.tgl.allocate_wgrad.default,
        (3, [5, 7], torch.bfloat16, torch.device("cpu"), 256),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
