"""Kernels stored ahead of a job by ``python -m tgl.warmup``: those that its steps launch."""

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
import tgl.warmup as command
from tgl import backends, recipes
from tgl.backends.cpu.quantize._rows import int32
from tgl.cli.step_kernels import BlockStep, named_step, recorded, store
from tgl.cutlass_kernels.runtime import cache, launcher
from tgl.integrations import torch as drop_in

SIZES = {"experts": 4, "hidden": 64, "ffn": 128, "tokens": 50, "top_k": 2}
TEXT = ",".join(f"{name}={value}" for name, value in SIZES.items())


@pytest.fixture
def stored(monkeypatch):
    """The keys of what would be compiled and kept."""
    keys = set()
    monkeypatch.setattr(cache, "store", lambda key, build: keys.add(key))
    return keys


def real_step(block):
    """The step of ``block`` on CPU tensors."""
    recipe = getattr(recipes, block.recipe)() if block.recipe else None
    dtype = getattr(torch, block.dtype)
    layer = tgl.MoE(
        block.experts,
        block.hidden,
        block.ffn,
        activation=block.activation,
        bias=block.bias,
        params_dtype=dtype,
        recipe=recipe,
    )
    x = torch.randn(block.tokens, block.hidden, dtype=dtype, requires_grad=block.backward)
    weights = torch.rand(block.tokens, block.top_k, requires_grad=block.backward)
    chosen = torch.rand(block.tokens, block.experts).topk(block.top_k).indices
    with contextlib.nullcontext() if block.backward else torch.no_grad():
        y = layer(x, chosen, weights)
    if block.backward:
        y.backward(torch.randn_like(y))
    return y, x.grad, weights.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        ("sm_90", {}),
        ("sm_90", {"backward": False, "dtype": "float16"}),
        ("sm_90", {"activation": "srelu", "bias": True}),
        ("sm_90", {"recipe": "Float8CurrentScaling"}),
        ("sm_90", {"recipe": "Float8BlockScaling"}),
        ("sm_90", {"tokens": 3000}),
        ("sm_86", {}),
        ("sm_103", {"recipe": "MXFP8BlockScaling"}),
        ("sm_100", {"recipe": "NVFP4BlockScaling"}),
    ],
    ids=str,
)
def test_what_is_stored_is_what_a_step_asks_for(chip, options, stored, monkeypatch):
    """The step itself, on CPU tensors and with kernels that do nothing, tells what it would compile."""
    block = BlockStep(**{**SIZES, **options})
    assert store(recorded(block), chip) == []
    asked = set()

    def nothing(op, key, where, build):
        asked.add((op, key._replace(emulated=False)))
        return lambda *args: None

    monkeypatch.setattr(launcher, "compiled", nothing)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with backends.emulated_device(chip):
        real_step(block)
    assert stored == asked
    assert asked


def test_a_step_in_a_format_that_a_chip_lacks(stored):
    """An emulated GEMM has kernels too: those of the dense GEMM."""
    store(recorded(BlockStep(**SIZES, recipe="MXFP8BlockScaling")), "sm_90")
    assert {op for op, _ in stored} >= {"grouped_gemm", "grouped_gemm_wgrad", "group_quantize"}


def linear_step():
    """A step of a model, as a user writes it for the command."""
    with torch.device("meta"):
        layer = tgl.GroupedLinear(2, 64, 48, bias=False, params_dtype=torch.bfloat16)
        x = torch.empty(20, 64, dtype=torch.bfloat16)
        layer(x, m_splits=torch.empty(2, dtype=torch.int32)).sum().backward()


def test_a_step_of_a_model(stored):
    store(recorded(named_step(f"{__name__}:linear_step")), "sm_90")
    assert {"splits_to_offsets", "grouped_gemm", "grouped_gemm_wgrad"} == {op for op, _ in stored}


def product_step(device, dtype=torch.bfloat16):
    """ATen's products of a layer, forward and backward, in code that knows nothing of tgl."""
    x = torch.ones(20, 64, dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones(2, 48, 64, dtype=dtype, device=device, requires_grad=True)
    offs = torch.tensor([5, 16], dtype=torch.int32, device=device)
    y = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offs)
    y.sum().backward()
    return y, x.grad, weight.grad


def drop_in_step():
    """A step as a user writes it who has switched the drop-in on."""
    drop_in.enable()
    product_step("meta")


@pytest.fixture
def disabled():
    """Disable drop-in kernels before and after a test."""
    drop_in.disable()
    yield
    drop_in.disable()


def test_products_of_aten_that_are_served(stored, disabled, monkeypatch):
    """The stored kernels are those that the same step looks up where kernels do nothing."""
    calls = recorded(drop_in_step)
    drop_in.disable()
    assert store(calls, "sm_90") == []
    assert {"grouped_gemm", "grouped_gemm_wgrad"} == {op for op, _ in stored}
    asked = set()

    def nothing(op, key, where, build):
        asked.add((op, key._replace(emulated=False)))
        return lambda *args: None

    monkeypatch.setattr(launcher, "compiled", nothing)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with backends.emulated_device("sm_90"), drop_in.enabled("cpu"):
        product_step("cpu")
    assert stored == asked


def test_products_of_aten_that_are_atens(stored, disabled):
    """Nothing is recorded unless they are served, and unsupported calls are reported."""
    assert recorded(lambda: torch.nn.functional.grouped_mm(*columns_twice())) == []
    with drop_in.enabled():
        calls = recorded(lambda: torch.nn.functional.grouped_mm(*columns_twice()))
        calls += recorded(lambda: product_step("meta", torch.float32))
    served, *loops = store(calls, "sm_90")
    assert served == "aten::_grouped_mm is served by ATen's own kernel on sm_90: nothing to compile"
    assert loops == ["aten::_grouped_mm reads the device on the host on sm_90: nothing to compile"] * 3
    assert not stored


def columns_twice():
    """Operands of three dimensions that lie as no op of ours takes them."""
    return [torch.ones(3, 8, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2)]


def packed_step(device="meta"):
    """A frozen layer that quantises a weight of its own, which MXFP4 does by steps of torch."""
    layer = tgl.GroupedPackedLinear(2, 64, 48, bias=False, device="cpu").to(device)
    x = torch.ones(20, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    layer(x, torch.tensor([5, 11], dtype=torch.int32, device=device)).sum().backward()


def test_a_packed_layer(stored):
    int32.cache_clear()
    assert store(recorded(packed_step), "sm_90") == []
    assert {"splits_to_offsets", "grouped_gemm_packed"} <= {op for op, _ in stored}
    packed_step("cpu")  # nothing that is kept is a fake tensor


def test_a_step_without_an_op_of_ours(stored, disabled, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["warmup", "--chip", "sm_90", f"{__name__}:silent_step"])
    monkeypatch.delitem(sys.modules, "tgl.warmup")  # the command again
    runpy.run_module("tgl.warmup", run_name="__main__")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("  no op that tgl serves was called; ATen's products are served after `tgl.integrations")


def silent_step():
    torch.nn.functional.grouped_mm(*columns_twice())


def test_calls_into_buffers(stored):
    def step():
        a, b = (torch.empty(20, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
        offs = torch.empty(2, dtype=torch.int32, device="meta")
        tgl.grouped_gemm_wgrad_accumulate_(a, b, offs, torch.empty(2, 64, 64, device="meta"))

    store(recorded(step), "sm_90")
    assert [op for op, _ in stored] == ["grouped_gemm_wgrad_accumulate_"]


def test_a_call_alone(stored):
    """``warmup`` in compile-only mode; ``explain`` there names what the GPU would run."""
    given = torch.zeros(20, 64).bfloat16(), torch.zeros(2, 64, 48).bfloat16(), torch.tensor([5, 16], dtype=torch.int32)
    with backends.compile_only("sm_90"):
        assert tgl.warmup("grouped_gemm", *given).chosen is tgl.explain("grouped_gemm", *given).chosen
        assert tgl.explain("grouped_gemm", *given).chosen.name == "tgl kernel"
    assert [op for op, _ in stored] == ["grouped_gemm"]
    assert tgl.explain("grouped_gemm", *given).chosen.device == "cpu"


def test_a_call_that_no_kernel_takes_is_reported(stored):
    def step():
        a, b = torch.empty(20, 64, device="meta"), torch.empty(2, 64, 64, device="meta")
        tgl.grouped_gemm(a, b, torch.empty(2, dtype=torch.int32, device="meta"))

    (sentence,) = store(recorded(step), "sm_86")
    assert sentence == "tgl::grouped_gemm reads the device on the host on sm_86: nothing to compile"
    assert not stored


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experts=4", "`hidden` is missing"),
        (f"{TEXT},rank=3", "`rank` must be one of experts, hidden"),
        (TEXT.replace("tokens=", "tokens=-"), "`tokens` must be an integer from 1 to 2^31 - 1, but got '-"),
        ("experts=" + "9" * 20, f"`experts` must be an integer from 1 to 2^31 - 1, but got '{'9' * 20}'"),
        ("experts=\u0664", "`experts` must be an integer from 1 to 2^31 - 1, but got '\u0664'"),
        (TEXT.replace("top_k=", "top_k=77"), "`top_k` must be at most the "),
        (f"{TEXT},{TEXT}", "fields must be given once each, but got "),
        ("nosuch.module:step", "`nosuch.module` must be a module that can be imported"),
        ("tgl.recipes:nosuch", "`nosuch` must be a function of the module tgl.recipes"),
        (":step", "`` must be a module that can be imported"),
        (f"{TEXT},recipe=FP7", "NVFP4BlockScaling, but got 'FP7'"),
        (f"{TEXT},activation=relu2", "`activation` must be one of swiglu,"),
        (f"{TEXT},bias=1", "`bias` must be true or false, but got '1'"),
        ("step", "a step is `field=value,...` or `module:function`, but got 'step'"),
    ],
)
def test_a_step_that_is_none(text, message):
    with pytest.raises(ValueError) as raised:
        named_step(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(("chip", "text", "named"), [("sm_75", TEXT, "sm_75"), ("sm_90", "nosuch:step", "`nosuch`")])
def test_a_usage_error(chip, text, named):
    done = subprocess.run([sys.executable, "-m", "tgl.warmup", "--chip", chip, text], capture_output=True, text=True)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_module_of_the_command_leaves_the_function():
    assert command is tgl.warmup is backends.warmup


FIRST_STEP = """
import sys
from unittest import mock
from tests.cutlass_kernels import test_stored_kernels as this
from tgl.cutlass_kernels.runtime import cache, compiling, launcher
from tgl.testing import emulate

def never():
    raise AssertionError("compiled in the first step")

def loaded(op, key, where, build):
    assert callable(cache.fetch((op, key._replace(emulated=False)), never))
    return lambda *args: None  # an emulator runs what was compiled in its own process alone

cache.set_directory(sys.argv[1])
settings = compiling.settings()  # not those of the emulator
with (
    emulate("sm_90a"),
    mock.patch.object(launcher, "compiled", loaded),
    mock.patch.object(compiling, "settings", lambda: settings),
):
    this.real_step(this.BlockStep(**this.SIZES))
    with this.drop_in.enabled("cpu"):
        this.product_step("cpu")
    print(len(launcher.compiled_kernels))
"""


@pytest.mark.slow
def test_a_first_step_compiles_nothing(tmp_path, disabled):
    """A step in another process, on CPU tensors, loads every kernel that it launches from disk."""
    root = Path(__file__).parents[2]

    def run(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    named = f"{__name__}:drop_in_step"
    warm = ("-m", "tgl.warmup", "--chip", "sm_90", "--directory", tmp_path, TEXT, named)
    block, both = kernels(BlockStep(**SIZES)), kernels(BlockStep(**SIZES), drop_in_step)
    assert run(*warm).startswith(f"{TEXT}: compiled {block}\n{named}: compiled {both - block}\n")
    assert run(*warm).startswith(f"{TEXT}: compiled 0\n{named}: compiled 0\n")
    assert run("-c", FIRST_STEP, tmp_path) == f"{both}\n"


def kernels(*steps):
    """Return the number of kernels that ``steps`` need."""
    with pytest.MonkeyPatch.context() as patch:
        keys = set()
        patch.setattr(cache, "store", lambda key, build: keys.add(key))
        for step in steps:
            store(recorded(step), "sm_90")
    return len(keys)
