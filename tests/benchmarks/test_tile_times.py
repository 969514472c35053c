"""The script that sets the emulator's model of time beside a device, on one tiling, without a device."""

import json

import pytest


def test_a_tiling_beside_what_was_measured(load, tmp_path, capsys):
    pytest.importorskip("cutlass")
    measured, out = tmp_path / "measured.json", tmp_path / "out.json"
    measured.write_text(json.dumps([{"op": "varlen_m", "tile": "64x64", "depth": 64, "measured": 20000.0}]))
    script = load("tile_times")
    script.main(["--quick", "--depths", "64", "--tiles", "64x64", "--measured", str(measured), "--out", str(out)])
    (row,) = json.loads(out.read_text())
    assert row["products"] == script.TILES * 64 * 64 * 64 / 2048
    assert row["products"] < row["model"] < 30 * row["products"]
    assert row["measured"] == 20000.0
    assert f"{row['model'] / 20000:5.2f}" in capsys.readouterr().out


def test_ranks(load):
    assert load("tile_times").ranks([3.0, 1.0, 2.0]) == [2, 0, 1]
