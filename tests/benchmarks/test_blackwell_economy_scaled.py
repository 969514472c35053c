"""What quantised operands may cost: the counts of ``benchmarks/blackwell_economy_scaled.py`` on small problems."""

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


@pytest.fixture(scope="module")
def economy(load):
    return load("blackwell_economy_scaled")


@pytest.mark.parametrize("columnwise", [True, False])
def test_quantisation_moves_what_it_must(economy, columnwise):
    counts = economy.quantised("mxfp8", columnwise, (256, 256), 256)
    assert 1 <= counts["moved"] / counts["minimum"] <= 1.05


def test_a_gemm_that_quantises_its_activation_does_not_read_it_back(economy):
    """It stores both halves of 16 bits, and codes and scales of both directions."""
    one, two = economy.activated((256, 128), 128, 256).values()
    assert 1 <= one / (4 + 2 + 2 / 32) <= 1.05
    assert two - one >= 4


@pytest.mark.parametrize(("format", "bytes_"), [("mxfp8", 1 + 1 / 32), ("nvfp4", 1 / 2 + 1 / 16)])
def test_a_tile_loads_its_operands_and_scales_once(economy, format, bytes_):
    depth = 512
    counts = economy.measure(economy.run_ours, economy.problem(format, (128, 256), depth, 256), (128, 128))
    assert counts["TMA load bytes"] == (128 + 128) * depth * bytes_
    assert counts["MMAs"] == depth // (32 if format == "mxfp8" else 64)
