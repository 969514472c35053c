"""Settings of every test: one thread, and a fixed seed."""

import pytest
import torch
from hypothesis import settings

from tests import compiler_settings

compiler_settings.leave_guards_untimed()
settings.register_profile("tgl", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("tgl")


def pytest_addoption(parser):
    parser.addoption(
        "--kernels",
        choices=("own", "warp", "warp-tma"),
        default="own",
        help="of GEMMs on a Hopper in tests/gpu: its own, or instead of them mma.sync kernels, also with TMA loads",
    )


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Isolate a test that compiles: no graphs from earlier tests, and none left behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
