"""The lines of a kernel's source are found once, and are what the DSL finds."""

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import linecache

from cutlass._mlir_helpers import op

from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.ops import gemm
from tgl.testing.emulator import emulate, places

KEY = gemm.GemmKey(VARLEN_M, "sm_100", False, "bfloat16", 2, EpilogueSpec("bfloat16"), GemmConfig(tile_n=64))
FINDERS = ("_is_framework_module", "_fast_frameinfo")


def ptx():
    return gemm.build(KEY).artifacts.PTX


def test_a_second_kernel_reads_no_source(monkeypatch):
    def never(*_):
        raise AssertionError("found again")

    with emulate("sm_100a"):
        first = ptx()
        monkeypatch.setattr(linecache, "getline", never)
        assert ptx() == first


def test_lines_are_those_that_the_dsl_finds(monkeypatch):
    own = {name: vars(op)[name] for name in FINDERS}
    with emulate("sm_100a"):
        remembered = ptx()
        assert remembered.count("\t.loc\t") > 500
        with monkeypatch.context() as patch:
            for name, function in own.items():
                assert vars(op)[name] is not function
                patch.setattr(op, name, function)
            assert ptx() == remembered
    assert set(places.replaced()) == set(FINDERS)


def test_the_dsl_is_left_as_it_was():
    own = {name: vars(op)[name] for name in FINDERS}
    with emulate("sm_100a"):
        pass
    assert {name: vars(op)[name] for name in FINDERS} == own
