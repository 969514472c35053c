"""Fixtures of the kernel tests that apply without an import."""

import pytest


@pytest.fixture
def asked(monkeypatch):
    """The keys of kernels that were requested since the list was cleared; they do nothing."""
    from tgl.cutlass_kernels.runtime import launcher

    found = []
    monkeypatch.setattr(launcher, "compiled", lambda op, key, *_: found.append((op, key)) or (lambda *args: None))
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    return found


@pytest.fixture
def overlapping_groups(monkeypatch):
    """Report no races: bad offsets make groups overlap, whose rows several CTAs then write in any order."""
    from cute_emulator import runtime

    prepare = runtime.Emulation.__init__

    def without_races(emulation, *args, **kwargs):
        prepare(emulation, *args, **kwargs)
        emulation.detect_races = False

    monkeypatch.setattr(runtime.Emulation, "__init__", without_races)
