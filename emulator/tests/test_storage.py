"""Files that are kept on disk and run lie in a private directory, and damaged ones are made again."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cute_emulator import cache, hostlib, storage


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The directory of a process that starts with an empty one."""
    directory = tmp_path / "kept"
    monkeypatch.setenv("CUTE_EMULATOR_CACHE", str(directory))
    cache.directory.cache_clear()
    yield directory
    cache.directory.cache_clear()


def test_the_directory_is_made_for_this_user_alone(kept):
    assert cache.directory() == kept
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    library = Path(hostlib.build())
    assert library.parent == kept
    assert not library.stat().st_mode & storage.OTHERS_WRITE


def test_the_default_is_among_the_caches_of_the_user(tmp_path, monkeypatch, kept):
    monkeypatch.delenv("CUTE_EMULATOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "cute_emulator"


@pytest.mark.parametrize("theirs", ["owner", "mode"])
def test_a_directory_that_others_can_write_to_is_not_used(kept, theirs, monkeypatch):
    kept.mkdir()
    if theirs == "mode":
        kept.chmod(0o777)
    else:
        kept.chmod(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    message = "others can write to" if theirs == "mode" else "belongs to the user"
    with pytest.warns(UserWarning, match=f"nothing is kept for later processes: .*{message}"):
        library = Path(hostlib.build())
    assert list(kept.iterdir()) == []
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


def test_a_library_without_a_directory_is_gone_with_its_process(kept):
    kept.mkdir()
    kept.chmod(0o777)
    code = "import warnings; warnings.simplefilter('ignore'); from cute_emulator import hostlib; print(hostlib.build())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).parent.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "without its checksum"])
def test_a_library_that_is_not_whole_is_built_again(kept, damage):
    library = Path(hostlib.build())
    whole = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        library.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    else:
        storage.checksum_of(library).unlink()
    before = library.stat().st_ino
    assert Path(hostlib.build()) == library
    assert library.stat().st_ino != before
    assert library.read_bytes()[:4] == whole[:4]
    assert storage.intact(library)
    assert Path(hostlib.build()).stat().st_ino == library.stat().st_ino


def test_a_full_disk_costs_only_what_would_be_kept(kept, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    cache.directory()
    monkeypatch.setattr(storage, "replace", full)
    storage.write(kept / "ptx" / "some", b"data")
    assert storage.read(kept / "ptx" / "some") is None
