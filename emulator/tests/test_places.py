"""The lines of a kernel's source are found once, and are what the DSL finds."""

import linecache

import cutlass.cute as cute
import torch
from cutlass._mlir_helpers import op
from cutlass.cute.runtime import from_dlpack

from cute_emulator import emulate, places

from . import kernels

FINDERS = ("_find_user_frame", "_fast_frameinfo")


def ptx():
    x, y = (from_dlpack(torch.zeros(64, 32), assumed_align=16) for _ in range(2))
    return cute.compile(kernels.Double(), x, y, kernels.STREAM).artifacts.PTX


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
        assert remembered.count("\t.loc\t") > 30
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
