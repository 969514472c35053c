"""A directory of compiled kernels that cannot be used costs a warning and the compile time, nothing else."""

import fcntl
import importlib.metadata
import os
import pwd
import re
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import platformdirs

import tgl.warmup  # noqa: F401 (the command)
from tgl import doctor
from tgl.cutlass_kernels.runtime import cache, compiling, eviction
from tgl.testing import emulate
from tgl.utils import source_fingerprint

KERNEL = f"{1:032x}.o"
KEPT = "tgl: compiled kernels cannot be kept: "


class Compiled:
    """Stands for a kernel: it can be written to a file, which then does not load."""

    def export_to_c(self, path, name):
        Path(path).write_bytes(b"code of " + name.encode())


@pytest.fixture
def directory(tmp_path):
    cache.set_directory(tmp_path / "kernels")
    yield tmp_path / "kernels"
    cache.set_directory(None)


@pytest.fixture
def emulator():
    """Bind files that a test loads to the emulator, not to a CUDA runtime without a driver."""
    with emulate("sm_100a"):
        yield


def fetch(key="key"):
    """Return how many times the kernel was built for one fetch."""
    built = []
    compiled = Compiled()

    def build():
        built.append(key)
        return compiled

    assert cache.fetch(key, build) is compiled
    return len(built)


def store(key="key"):
    """The file of a kernel that is kept."""
    cache.store(key, Compiled)
    (path,) = (path for path in cache.directory().glob("*.o") if path == cache._path(key))
    return path


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME and without an entry, as in a container that runs under any number."""

    def missing(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", missing)


def test_no_home_directory(homeless, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=KEPT + "could not determine the home directory"):
        assert fetch() == 1
    assert "kernels can be compiled; none are kept: could not determine the home directory" in doctor.report()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: f"~/.cache/{name}")  # an older version
    with pytest.warns(UserWarning, match=KEPT + "there is no home directory; set HOME or XDG_CACHE_HOME"):
        assert fetch() == 1
    assert not list(tmp_path.iterdir())


def test_the_command_that_stores_kernels_needs_a_directory(homeless, monkeypatch, capsys):
    block = "experts=2,hidden=64,ffn=64,tokens=8,top_k=1"
    monkeypatch.setattr(sys, "argv", ["warmup", "--chip", "sm_90", block])
    monkeypatch.delitem(sys.modules, "tgl.warmup")  # the command again
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("tgl.warmup", run_name="__main__")
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"kernels cannot be kept \(could not .*\); name a directory with --directory$", last)


def test_a_builder_that_stopped_is_not_waited_for_for_ever(directory, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_NOTICE", 0.1)
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.4)
    path = store("other").with_name(cache._path("key").name)
    with open(path.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.perf_counter()
        with pytest.warns() as warned:
            assert fetch() == 1
        with pytest.warns(), pytest.raises(TimeoutError, match="another process has held"):
            cache.store("key", Compiled)
    assert time.perf_counter() - start > 0.8
    waiting, gave_up = (str(each.message) for each in warned)
    assert waiting == f"tgl: waiting for the process that holds {path.with_suffix('.lock')}, 0.4 s in all"
    lock = path.with_suffix(".lock")
    assert gave_up == f"{KEPT}another process has held {lock} for 0.4 s; if it has stopped, end it"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch() == 1  # and it is kept now
    assert path.exists()


def test_a_file_system_without_locks(directory, monkeypatch, caplog):
    class Lockless:
        lock_file = "lock"

        def __init__(self, path, **options): ...

        def acquire(self, timeout):
            raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(cache, "FileLock", Lockless)
    caplog.set_level("INFO", "tgl")
    with pytest.warns(UserWarning, match="does not appear to support flock"):
        assert fetch() == 1
    (record,) = caplog.records
    assert record.name.startswith("tgl.")
    assert record.getMessage().startswith("compiled kernels cannot be kept: ")


def test_an_error_of_the_compiler_is_its_own(directory):
    attempts = []

    def build():
        attempts.append(1)
        raise OSError("ptxas was ended by signal 9")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OSError, match="ptxas was ended by signal 9"):
            cache.fetch("key", build)
    assert attempts == [1]
    with pytest.raises(OSError, match="ptxas"):
        cache.store("key", build)


def test_a_full_disk_compiles_once(directory, monkeypatch):
    def full(compiled, path, name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Compiled, "export_to_c", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert fetch() == 1
    assert [path for path in directory.rglob("*") if path.suffix in (".o", ".sha256")] == []


@pytest.mark.parametrize("when", ["before", "while the kernel is compiled"])
def test_sources_that_changed_since_they_were_imported_keep_nothing(directory, monkeypatch, when):
    """The sources that such a kernel was compiled from are not known."""

    def changed(*folders):
        assert folders == cache.SOURCES
        raise source_fingerprint.SourcesChangedError("tgl/meta/formats.py has changed since it was imported")

    class Late(Compiled):
        def __init__(self):
            monkeypatch.setattr(source_fingerprint, "of", changed)

    if when == "before":
        Late()
    with pytest.warns(UserWarning, match=KEPT + "tgl/meta/formats.py has changed since it was imported"):
        assert isinstance(cache.fetch("key", Late), Late)
    assert not list(directory.rglob("*.o"))


# --- options of the compiler, and its version -------------------------------------------------------------------------


def test_settings_of_the_compiler_count(directory, monkeypatch):
    usual = compiling.settings()
    assert {"lineinfo=False", "enable_assertions=False", "compiler_opt=''"} < {*usual.split()}
    assert "arch=" not in usual
    environment = {**os.environ, "CUTE_DSL_LINEINFO": "1", "CUTE_DSL_ENABLE_ASSERTIONS": "1"}
    code = "from tgl.cutlass_kernels.runtime import compiling; print(compiling.settings())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    expected = usual.replace("lineinfo=False", "lineinfo=True").replace("assertions=False", "assertions=True")
    assert done.stdout.strip() == expected
    path = store()
    monkeypatch.setattr(compiling, "settings", lambda: expected)
    assert fetch() == 1  # the other's is not taken
    assert cache._path("key") != path


def test_the_compilers_packages_count(monkeypatch):
    usual = compiling.settings()
    assert re.match(r"_cutlass_ir\.cu1[23]\.", usual)
    monkeypatch.setattr(compiling._cutlass_ir, "__file__", "/somewhere/_cutlass_ir.cu14.so")
    assert compiling.settings().startswith("_cutlass_ir.cu14.so ")
    installed, version = cache._installed.__wrapped__, importlib.metadata.version
    before = installed()
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13", "torch"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, p=package: "9" if name == p else version(name))
        assert installed() != before


# --- whose the files are ----------------------------------------------------------------------------------------------


def test_directories_and_files_are_the_users_alone(tmp_path):
    before = os.umask(0)
    try:
        cache.set_directory(tmp_path / "caches" / "tgl")
        path = store()
    finally:
        os.umask(before)
        cache.set_directory(None)
    modes = {each: each.stat().st_mode & 0o777 for each in (path, path.with_suffix(".sha256"), *path.parents[:3])}
    assert modes == {path: 0o600, path.with_suffix(".sha256"): 0o600, **dict.fromkeys(path.parents[:3], 0o700)}
    assert all(not file.stat().st_mode & 0o077 for file in path.parent.iterdir())


@pytest.mark.parametrize("place", ["file", "directory", "base"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_files_that_others_can_write_are_not_loaded(directory, place, mode):
    path = store()
    which = {"file": path, "directory": path.parent, "base": path.parent.parent}[place]
    which.chmod(mode)
    with pytest.warns(UserWarning, match=f"users other than its owner can write {which}; `chmod go-w` it"):
        assert fetch() == 1
    assert path.exists()


@pytest.mark.parametrize("place", ["file", "directory", "base"])
@pytest.mark.parametrize("owner", [4242, 0], ids=["another user", "root"])
def test_files_of_another_user_are_not_loaded(directory, emulator, monkeypatch, place, owner):
    path = store()
    which = {"file": path, "directory": path.parent, "base": path.parent.parent}[place]
    of = Path.stat

    def stat(self, **options):
        fields = list(of(self, **options))
        fields[4] = owner if self == which else fields[4]
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)
    message = rf"{which} belongs to user 4242, neither to user \d+ nor to root" if owner else "set the compiled kernel"
    with pytest.warns(UserWarning, match=message):  # what is root's is looked at, and is no code
        assert fetch() == 1


def test_a_default_directory_that_an_earlier_version_left_open_is_closed(emulator, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tgl").mkdir()
    (tmp_path / "tgl").chmod(0o775)
    store()
    with pytest.warns(UserWarning, match="set the compiled kernel"):  # it is looked at, and is no code
        assert fetch() == 1
    assert (tmp_path / "tgl").stat().st_mode & 0o777 == 0o755


# --- what goes --------------------------------------------------------------------------------------------------------


def other_version(base, number, age, size=100):
    """The directory of another version, used ``age`` seconds ago."""
    path = base / f"{number:024x}"
    path.mkdir(parents=True)
    (path / KERNEL).write_bytes(bytes(size))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_old_versions_and_what_was_set_aside_go_by_age(directory):
    now = store().parent
    old, recent = other_version(directory, 1, 31 * eviction.DAY), other_version(directory, 2, 29 * eviction.DAY)
    foreign = [directory / "something else", directory / f"{3:024x}", directory / f"{4:024x}"]
    for path in foreign:
        path.mkdir()
    (foreign[1] / "photo.jpg").write_text("")
    (directory / "notes.txt").write_text("")
    old_corrupt, corrupt, left, lock = (now / name for name in ("a.1.corrupt", "b.2.corrupt", "tmpabc", "c.lock"))
    for file in (old_corrupt, corrupt, lock):
        file.write_text("")
    left.mkdir()
    (left / "kernel.o").write_text("")
    for path in (old_corrupt, left, lock, *foreign, *now.glob("*.o"), now):
        os.utime(path, (time.time() - 365 * eviction.DAY,) * 2)
    kept = sorted(now.glob("*.o"))
    eviction.evict(now)
    assert (old.exists(), recent.exists()) == (False, True)
    assert (old_corrupt.exists(), corrupt.exists(), left.exists()) == (False, True, False)
    assert sorted(directory.iterdir()) == sorted([now, recent, *foreign, directory / "notes.txt"])
    assert lock.exists()
    assert sorted(now.glob("*.o")) == kept


def test_old_versions_go_by_size_the_least_recently_used_first(directory, monkeypatch):
    now = store().parent
    monkeypatch.setattr(eviction, "MAX_BYTES", 250)
    hours = (1, 2, 30, 40, 50)
    versions = [other_version(directory, i, hour * 3600) for i, hour in enumerate(hours)]
    eviction.evict(now)
    assert [path.exists() for path in versions] == [True, True, False, False, False]
    for path in versions[:2]:  # too large alone, and in use
        (path / KERNEL).write_bytes(bytes(1000))
        os.utime(path, (time.time() - 3600,) * 2)
    eviction.evict(now)
    assert [path.exists() for path in versions[:2]] == [True, True]
    assert now.exists()


def test_the_first_kernel_that_is_stored_removes_what_is_old(directory):
    old = other_version(directory, 1, 31 * eviction.DAY)
    store()
    assert not old.exists()


def test_a_directory_that_another_process_removes_at_the_same_time(directory, monkeypatch):
    now = store().parent
    old = other_version(directory, 1, 31 * eviction.DAY)
    rename = Path.rename

    def late(self, target):
        rename(self, directory / f"{1:024x}.1.removed")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    eviction.evict(now)
    monkeypatch.undo()
    assert not old.exists()
    os.utime(directory / f"{1:024x}.1.removed", (0, 0))  # of a process that ended in between
    eviction.evict(now)
    assert list(directory.iterdir()) == [now]
