"""Settings of every compile test: fresh code, one thread, no state left over from the test before."""

import logging
from collections.abc import Iterator

import pytest
import torch

from tests import compiler_settings

compiler_settings.leave_guards_untimed()
logging.getLogger("torch.__trace").disabled = True  # pytest would print its thousands of records with every failure


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test compiles from nothing, with one thread and a fixed seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
