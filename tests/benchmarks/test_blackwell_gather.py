"""Rows by an index in the kernel take fewer instructions than a copy and the kernel of rows in order."""

import json

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


def test_counts(load, tmp_path):
    file = tmp_path / "counts.json"
    load("blackwell_gather").main(["--quick", "--json", str(file)])
    rows = [row for row in json.loads(file.read_text()) if row["measure"] == "instructions"]
    assert {row["op"] for row in rows} == {"grouped_gemm", "grouped_gemm_wgrad"}
    for row in rows:
        assert row["in order"] < row["gathering"] < row["copying"]
