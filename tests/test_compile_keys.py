"""Keys of compiled graphs on disk hold the package's sources as they were imported, beside a user's tag."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tgl
from tests.compiler_settings import GRAPHS
from tgl.utils import source_fingerprint

CONFIG = torch.compiler.config
PACKAGE = Path(tgl.__file__).parent
BACKWARD = "ops/grouped_gemm.py"


@pytest.fixture
def copy(tmp_path):
    """Copies of the package below a folder of their own, by name."""

    def make(name):
        shutil.copytree(
            PACKAGE, tmp_path / name / "tgl"
        )  # with bytecode, which times of sources that are kept keep valid
        return tmp_path / name

    return make


def run(root, code, **environment):
    """The words that ``code`` prints where the package is that of ``root``."""
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1]


def append(root, source, text="\n# changed\n"):
    with open(root / "tgl" / source, "a") as file:
        file.write(text)


@pytest.fixture
def tag():
    before = CONFIG.cache_key_tag
    yield CONFIG.cache_key_tag
    CONFIG.cache_key_tag = before


def test_a_users_tag_is_part_of_it(tag):
    assert tag == f"[tgl {source_fingerprint.of()}]"
    CONFIG.cache_key_tag = "mine"
    assert CONFIG.cache_key_tag == f"mine{tag}"
    CONFIG.cache_key_tag = CONFIG.cache_key_tag  # once, however often it is put back
    assert CONFIG.cache_key_tag == f"mine{tag}"
    with CONFIG.patch(cache_key_tag="other"):
        assert CONFIG.cache_key_tag == f"other{tag}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CONFIG, "cache_key_tag", "third")
        assert CONFIG.cache_key_tag == f"third{tag}"
    assert CONFIG.cache_key_tag == f"mine{tag}"


def test_two_copies_in_one_process_are_both_part_of_it(tag, copy, monkeypatch):
    other = copy("other")
    append(other, BACKWARD)
    changed = imported(other)
    kind = type(CONFIG)
    spec = importlib.util.find_spec("tgl.utils.compile_cache_key")
    second = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(second)
        monkeypatch.setattr(second, "source_fingerprint", changed)
        CONFIG.cache_key_tag = "mine"
        assert CONFIG.cache_key_tag == f"mine{tag}[tgl {changed.of()}]"
        CONFIG.cache_key_tag = CONFIG.cache_key_tag
        assert CONFIG.cache_key_tag == f"mine{tag}[tgl {changed.of()}]"
    finally:
        ModuleType.__setattr__(CONFIG, "__class__", kind)


SAY = """
import threading, torch
torch.compiler.config.cache_key_tag = "mine"
import tgl
print(torch.compiler.config.cache_key_tag)
thread = threading.Thread(target=lambda: print(torch.compiler.config.cache_key_tag))
thread.start()
thread.join()
"""


def test_a_tag_that_is_set_before_the_import_is_kept_and_every_thread_has_the_fingerprint():
    own = f"[tgl {source_fingerprint.of()}]"
    first, of_thread = run(PACKAGE.parent, SAY, TORCH_COMPILE_CACHE_KEY_TAG="default")
    assert first == f"mine{own}"
    assert of_thread in (f"mine{own}", f"default{own}")  # settings belong to a thread from PyTorch 2.13 on


def imported(root):
    """The fingerprint module of a copy, as it is when the copy is imported."""
    spec = importlib.util.spec_from_file_location(
        f"fingerprint_of_{root.name}", root / "tgl" / "utils" / "source_fingerprint.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_copies_have_one_fingerprint_and_others_have_others(copy):
    one, other = copy("one"), copy("other")
    shutil.rmtree(other / "tgl" / "meta" / "__pycache__", ignore_errors=True)
    for path in (other / "tgl" / "nn").iterdir():
        os.utime(path)
    assert imported(one).of() == imported(other).of() == source_fingerprint.of()
    append(other, BACKWARD)
    assert imported(other).of() != source_fingerprint.of()
    assert imported(other).of("meta") == source_fingerprint.of("meta")
    (one / "tgl" / "nn" / "more.py").write_text("")
    assert imported(one).of() != source_fingerprint.of()


@pytest.mark.parametrize("keys_before", [False, True])
@pytest.mark.parametrize("change", ["edited", "removed"])
def test_sources_that_change_after_the_import_have_no_fingerprint(copy, keys_before, change):
    """Neither the imported sources, of which more may be imported, nor those on disk have a fingerprint."""
    root = copy("one")
    module = imported(root)
    if keys_before:
        assert module.of() == source_fingerprint.of()
    if change == "edited":
        append(root, BACKWARD)
    else:
        (root / "tgl" / BACKWARD).unlink()
    with pytest.raises(OSError, match=rf"tgl/{BACKWARD} (has changed since|was removed after) it was imported"):
        module.of()
    assert module.of("meta") == source_fingerprint.of("meta")


def test_a_process_whose_sources_have_changed_shares_no_compiled_graphs(tag, monkeypatch):
    def changed(*folders):
        raise source_fingerprint.SourcesChangedError("tgl/ops/moe.py has changed since it was imported")

    monkeypatch.setattr(source_fingerprint, "of", changed)
    own = CONFIG.cache_key_tag
    assert own == CONFIG.cache_key_tag != tag
    assert own.startswith("[tgl ")


GRADIENT = """
import torch, tgl
from torch._dynamo.utils import counters
torch.set_num_threads(1)
offs = torch.tensor([2, 4], dtype=torch.int32)

@torch.compile(fullgraph=True)
def loss(x, w):
    return tgl.grouped_gemm(x, w, offs).sum()

x = torch.ones(4, 8, requires_grad=True)
loss(x, torch.ones(2, 8, 4)).backward()
print(x.grad.unique().tolist())
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""
FORMULA = "formula=Formula(_save, _backward)"
TWICE = "formula=Formula(_save, lambda *args: [None if t is None else 2 * t for t in _backward(*args)])"


@pytest.mark.slow
def test_another_version_does_not_find_compiled_graphs_of_this_one(copy, tmp_path):
    one, same, other = copy("one"), copy("same"), copy("other")
    caches = {**GRAPHS, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert run(one, GRADIENT, **caches) == ["[4.0]", "0 0"]
    assert run(same, GRADIENT, **caches) == ["[4.0]", "1 2"]
    path = other / "tgl" / BACKWARD
    source = path.read_text()
    assert FORMULA in source
    path.write_text(source.replace(FORMULA, TWICE))
    assert run(other, GRADIENT, **caches) == ["[8.0]", "0 0"]
    assert run(one, GRADIENT, **caches) == ["[4.0]", "1 2"]
