"""Every op keeps every contract, on every sample: opcheck and the checks of ``tgl.testing``."""

import pytest
import torch

import tgl.testing
from tests.covers import covering, form, graph_form
from tgl import backends
from tgl.testing.signatures import OPS, options_of, overload, sample_call

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


def test_every_op_is_in_the_table_of_sample_calls():
    """Every op of the dispatcher and of the registry; ops without contracts are tested elsewhere."""
    defined = {n.removeprefix("tgl::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("tgl::")}
    ours = defined | {op for op in backends.ops() if "::" not in op}
    assert ours == {name for name in OPS if "::" not in name}
    assert {name for name in OPS if name in defined and not OPS[name].contracts} == ON_THEIR_OWN
    assert all(bool(entry.signatures) != bool(entry.needs) for entry in OPS.values())


def test_sample_calls_of_other_ops():
    """Each call is one that the op takes."""
    for name in ON_THEIR_OWN:
        for variant in OPS[name].variants if OPS[name].signatures else ():
            args, kwargs = sample_call(name, **options_of(variant))
            overload(name)(*args, **kwargs)


def test_sample_calls_that_do_not_exist():
    with pytest.raises(ValueError, match=r"`name` must be one of topk_router, .*, but got 'grouped_gem'"):
        sample_call("grouped_gem")
    with pytest.raises(ValueError, match="no signature of grouped_gemm has probs"):
        sample_call("grouped_gemm", given=("probs",))
    with pytest.raises(ValueError, match="no signature of grouped_activation has kind='tanh'"):
        sample_call("grouped_activation", kind="tanh")


def axes(sample):
    """Return all axes of a sample."""
    return {**form(sample), "routing": sample.routing.name, "dtype": sample.dtype, "widened": sample.widened}


def pairwise(samples):
    """Return samples that hold every pair of values.

    Calls with hundreds of groups take as long as all others: of these one of each signature and each dtype is enough.
    """
    few = [sample for sample in samples if len(sample.routing.sizes) <= 16]
    many = [sample for sample in samples if len(sample.routing.sizes) > 16]
    return covering(few, axes) + covering(many, lambda s: {"signature": s.signature.text, "dtype": s.dtype}, 1)


@pytest.mark.parametrize("name", NAMES)
def test_contracts(name):
    """All contracts on samples that hold every pair of values, opcheck on those that hold every value of graphs."""
    empty_groups_zero = name not in NONZERO_WHEN_EMPTY
    samples = list(tgl.testing.sample_inputs(name))
    pairs = pairwise(samples)
    assert tgl.testing.check_op(overload(name), pairs, empty_groups_zero=empty_groups_zero, opcheck="none") >= FEWEST
    routed = [sample for sample in samples if sample.routing.routed]
    assert tgl.testing.check_op(overload(name), covering(routed, graph_form, 1), empty_groups_zero=empty_groups_zero)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contracts_under_every_opcheck(name):
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
