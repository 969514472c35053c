"""Every op on a device in every layout and of every width: what the CPU makes of the same arguments."""

import pytest
import torch

from tests import layouts

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def check(calls):
    assert sum(layouts.check(call, "cuda") for call in calls)


@pytest.mark.parametrize("name", layouts.OPS)
def test_results_are_those_of_a_cpu(name):
    """Cover the pairs of width, place and format, few of which need another kernel."""
    check(layouts.cover(layouts.calls(name), 2, "format"))


@pytest.mark.slow
@pytest.mark.parametrize("name", layouts.OPS)
def test_results_of_every_call_are_those_of_a_cpu(name):
    check(layouts.calls(name))
