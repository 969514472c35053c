"""MMAs of warps: no more of them than the tiles have, and barriers that all warps meet at alone."""

import json

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


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
