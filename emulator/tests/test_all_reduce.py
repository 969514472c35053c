"""All-reduce kernels of the DSL on several ranks: by addresses, and by multicast with the DSL's own functions."""

import pytest
import torch

from cute_emulator import emulate, sweep

from . import kernels_ranks


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kernel", ["one_shot", "two_shot"])
def test_all_reduce(kernel, count):
    with emulate("sm_90a") as machine:
        call, out, expected = getattr(kernels_ranks, kernel)("sm_90a", count)
        runs = sweep(call, [out], seeds=range(10))
    assert torch.equal(out, expected)
    assert [len(records) for records in runs] == [count] * 10
    assert not any(record.warnings for record in machine.launches)
