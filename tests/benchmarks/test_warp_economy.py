"""MMAs of warps: no more of them than the tiles have, and barriers that all warps meet at alone."""

import json

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

SCALED = {"mxfp8": (8, 32), "nvfp4": (4, 16), "fp8_tensor": (8, 0)}  # bits of an element, and elements of a scale


@pytest.mark.slow
def test_counts(load, monkeypatch, tmp_path):
    script, file = load("warp_economy"), tmp_path / "counts.json"

    def missing(*_):
        raise ImportError("no quack here")

    monkeypatch.setattr(script, "run_theirs", missing)
    script.main(["--quick", "--json", str(file)])
    rows = json.loads(file.read_text())
    found, lanes = ({(row["op"], row["measure"]): row[who] for row in rows} for who in ("tgl", "lanes"))
    tile_m, tile_n = script.TILE
    most = tile_m * tile_n // (16 * 8) * script.DEPTH // 16
    assert found["forward", "MMAs"] == most
    assert lanes["forward", "loaded"] < found["forward", "loaded"] < 1.01 * 2 * script.DEPTH * (tile_m + tile_n)
    for op in script.OPS:
        assert lanes[op, "mbarrier operations"] == 0 < found[op, "mbarrier operations"]
        assert lanes[op, "instructions"] < 5 * lanes[op, "MMAs"]
        assert found[op, "instructions"] < 0.85 * lanes[op, "instructions"]


@pytest.mark.slow
def test_counts_of_quantised_operands(load, monkeypatch, tmp_path):
    """All MMAs of whole tiles, and operands and scales once per tile."""
    script, file = load("warp_economy_scaled"), tmp_path / "counts.json"

    def missing(*_):
        raise ImportError("no quack here")

    monkeypatch.setattr(script, "run_theirs", missing)
    monkeypatch.setitem(script.BUSY, "ragged", (128, 256))
    script.main(["--quick", "--json", str(file)])
    found = {(row["format"], row["op"], row["measure"]): row["tgl"] for row in json.loads(file.read_text())}
    tile_m, tile_n = script.TILE
    for format, op in script.CASES:
        # A weight gradient's contraction is a group: 192 tokens in the mean.
        depth, (bits, per_scale) = script.DEPTH if op == "forward" else 192, SCALED[format]
        assert found[format, op, "MMAs"] == tile_m * tile_n // (16 * 8) * depth // (64 if bits == 4 else 32)
        operands = (tile_m + tile_n) * depth * (bits / 8 + (1 / per_scale if per_scale else 0))
        assert operands <= found[format, op, "loaded"] <= 1.02 * operands
        assert found[format, op, "stored"] == 2 * tile_m * tile_n
        assert found[format, op, "mbarrier operations"] == 0  # lanes load
