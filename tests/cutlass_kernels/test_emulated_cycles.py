"""Grouped GEMMs under the emulator's model of time."""

import pytest
import torch

pytest.importorskip("cutlass")

import tgl
from cute_emulator.clocked import costs_of
from tests.kernel_cases import ends, integers, product
from tgl.testing import emulate


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_a_gemm(arch):
    """The cycles of a GEMM are accounted for, and its tensor cores are busy for its products."""
    sizes, depth, columns = (128, 256), 256, 128
    a, b = integers(sum(sizes), depth), integers(len(sizes), depth, columns)
    with emulate(arch, timing="clocked", detect_races=False) as machine:
        assert torch.equal(tgl.grouped_gemm(a, b, ends(sizes)), product(a, b, sizes).bfloat16())
    record = machine.launches[-1]
    found, costs = record.cycles, costs_of(arch)
    assert sum(busy["tensor"] for busy in found.busy.values()) == record.mma_flops / costs.tensor["f16"]
    assert found.total > max(busy["tensor"] for busy in found.busy.values()) + costs.load
    for usage in found.warps.values():
        assert usage.issued + sum(usage.waits.values()) <= usage.end <= found.total


@pytest.mark.slow
def test_rows_gathered_by_cp_async():
    """The layer's first GEMM gathers its rows by ``cp.async`` on Hopper, which takes time, and gives the same bits."""
    torch.manual_seed(0)
    layer = tgl.MoE(4, 64, 128).bfloat16()
    x, experts, weights = torch.randn(64, 64).bfloat16(), torch.randint(4, (64, 2)), torch.rand(64, 2)
    with torch.no_grad(), emulate("sm_90", timing="clocked", detect_races=False, resident_clusters=200) as machine:
        out = layer(x, experts, weights)
    with torch.no_grad(), emulate("sm_90", timing="in_order", detect_races=False):
        assert torch.equal(out, layer(x, experts, weights))
    gathering = [record for record in machine.launches if record.copied_bytes]
    assert gathering
    for record in gathering:
        assert record.cycles.total > costs_of("sm_90").copy


def test_a_longer_contraction_takes_at_least_its_products():
    def run(depth):
        a, b = integers(128, depth), integers(1, depth, 128)
        with emulate("sm_90", timing="clocked", detect_races=False) as machine:
            tgl.grouped_gemm(a, b, ends((128,)))
        return machine.launches[-1]

    short, long = run(256), run(512)
    products = (long.mma_flops - short.mma_flops) / costs_of("sm_90").tensor["f16"]
    assert products <= long.cycles.total - short.cycles.total <= 2 * products
