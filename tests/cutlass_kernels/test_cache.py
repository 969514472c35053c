"""Compiled kernels on disk: found again, shared by processes, rebuilt when damaged."""

import importlib.util
import multiprocessing
import shutil
from pathlib import Path
from unittest.mock import patch

import platformdirs
import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


import tgl
from cute_emulator import active
from cute_emulator.arguments import as_cuda
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.cutlass_kernels.runtime import cache, launcher
from tgl.testing import emulate

KEY = gemm.GemmKey(VARLEN_M, "sm_100", False, "bfloat16", 2, EpilogueSpec("bfloat16"), GemmConfig(tile_n=64))


@pytest.fixture
def directory(tmp_path):
    """A cache of its own, and an emulator: what is loaded binds to it, not to a CUDA runtime without a driver."""
    cache.set_directory(tmp_path)
    with emulate("sm_100a"):
        yield tmp_path
    cache.set_directory(None)


def fetch(counter=None):
    def build():
        if counter is not None:
            counter.append(1)
        return gemm.GROUPED_GEMM.build(KEY)

    return cache.fetch(KEY, build)


def never():
    raise AssertionError("built again")


def objects(directory):
    return sorted(p for p in directory.rglob("*.o"))


def test_the_default_place_is_the_one_of_the_platform(monkeypatch):
    for variable, below in (("/somewhere/caches", "/somewhere/caches/tgl"), ("", "/home/someone/.cache/tgl")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        monkeypatch.setenv("HOME", "/home/someone")
        assert cache.directory() == Path(below) / cache.fingerprint()
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name, appauthor: f"/caches of this platform/{name}")
    assert cache.directory().parent == Path("/caches of this platform/tgl")


def test_a_kernel_is_built_once_and_loaded_afterwards(directory):
    fetch()
    assert len(objects(directory)) == 1
    assert callable(cache.fetch(KEY, never))


@pytest.mark.parametrize(
    "source, counts",
    [("meta/formats.py", True), ("cutlass_kernels/scheduler/group_sort.py", True), ("nn/moe.py", False)],
)
def test_every_source_of_a_kernel_counts(monkeypatch, tmp_path, source, counts):
    """A change in a kernel's source, or in a table that it is made from, changes the cache key."""
    shutil.copytree(Path(tgl.__file__).parent, tmp_path / "tgl", ignore=shutil.ignore_patterns("__pycache__"))
    before = cache.fingerprint()
    for change in ("", "# changed\n"):
        with open(tmp_path / "tgl" / source, "a") as file:
            file.write(change)
        spec = importlib.util.spec_from_file_location(
            "fingerprint", tmp_path / "tgl" / "utils" / "source_fingerprint.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(cache, "source_fingerprint", module)
        assert (cache.fingerprint() == before) == (not change or not counts)


def test_other_keys_and_other_sources_are_other_files(directory, monkeypatch):
    fetch()
    with pytest.raises(AssertionError, match="built again"):
        cache.fetch(KEY._replace(b_unit=1), never)
    monkeypatch.setattr(cache, "fingerprint", lambda: "another version")
    with pytest.raises(AssertionError, match="built again"):
        cache.fetch(KEY, never)


def test_kernels_of_two_ops_with_one_key_are_two_files(directory):
    """The kernels of two ops with one key, such as both directions of an activation, are two files."""
    where = torch.device("cuda", 0)
    with patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        launcher.compiled("grouped_gemm", KEY, where, lambda: gemm.GROUPED_GEMM.build(KEY))
        with pytest.raises(AssertionError, match="built again"):
            launcher.compiled("grouped_gemm_wgrad", KEY, where, never)
        assert callable(launcher.compiled("grouped_gemm", KEY, where, never))


@pytest.mark.parametrize("damage", ["truncate", "flip", "digest", "bytes that are no text"])
def test_a_damaged_file_is_set_aside_and_rebuilt(directory, damage):
    fetch()
    (path,) = objects(directory)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "digest":
        path.with_suffix(".sha256").unlink()
    else:
        path.with_suffix(".sha256").write_bytes(b"\xff" * 64)
    built = []
    with pytest.warns(UserWarning, match="set the compiled kernel"):
        fetch(built)
    assert built == [1]
    assert len(list(path.parent.glob("*.corrupt"))) == 1
    assert callable(cache.fetch(KEY, never))


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    cache.set_directory(blocker / "below")
    try:
        with pytest.warns(UserWarning, match="cannot be kept"):
            assert callable(fetch())
    finally:
        cache.set_directory(None)


def test_kernels_of_a_read_only_directory_are_used(directory, monkeypatch):
    fetch()

    def locked(path, **options):
        raise PermissionError(f"{path} cannot be written")

    monkeypatch.setattr(cache, "FileLock", locked)
    assert callable(cache.fetch(KEY, never))


def _worker(directory, start, results):
    cache.set_directory(directory)
    built = []
    start.wait()
    fetch(built)
    results.put(len(built))


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_worker, args=(tmp_path, start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    counts = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(counts) == [0, 0, 1]


def test_a_kernel_loaded_from_disk_computes(directory):
    """The object file, loaded again, launches the same kernel."""
    a = torch.randint(-1, 2, (40, 72)).bfloat16()
    b = torch.randint(-1, 2, (2, 72, 24)).bfloat16()
    offs = torch.tensor([33, 40], dtype=torch.int32)
    out = torch.zeros(40, 24, dtype=torch.bfloat16)
    fetch()
    loaded = cache.fetch(KEY, never)
    loaded(*as_cuda((a, b, offs, out)), None, None, None, None, 2)
    active().check()
    expected = torch.cat([a[:33].double() @ b[0].double(), a[33:].double() @ b[1].double()])
    assert torch.equal(out.double(), expected)
