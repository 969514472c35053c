"""The report of ``python -m tgl.doctor``, here and with a fake GPU."""

import pytest
import torch
from torch.distributed import _symmetric_memory

from tests.processes import run_script
from tgl import backends, doctor
from tgl.cutlass_kernels.archs import chips, serving
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.runtime import device
from tgl.integrations import torch as drop_in
from tgl.meta.expert_parallel import ENGINES, NEED_OF_PEERS
from tgl.meta.formats import FORMATS
from tgl.testing.signatures import OPS

CAPABILITIES = {name: (int(name[3:-1]), int(name[-1])) for name in ("sm_75", *chips())}


@pytest.fixture
def gpu(monkeypatch):
    """Lets torch believe in one device of an architecture."""

    def pretend(arch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: CAPABILITIES[arch])

    backends.target.cuda_arch.cache_clear()
    yield pretend
    backends.target.cuda_arch.cache_clear()
    backends.registry.forget_candidates()


def served(where):
    """``(op, dtype or format)`` to what the report says of it."""
    lines = doctor.report(ops=True).split(f"\n{where}: ")[1].split("\n\n")[0].splitlines()
    cells = (line.strip().partition("  ") for line in lines[1:] if ": " in line)
    told = ((op, *text.strip().partition(": ")[::2]) for op, _, text in cells)
    return {(op, of): answer for op, kinds, answer in told for of in kinds.split(", ")}


def test_on_a_cpu():
    found = served("cpu")
    assert {of for _, of in found} == {"bfloat16", "float32", "int32", "FP8 by rows", "not asked", *FORMATS}
    assert found["grouped_gemm", "bfloat16"] == "loop of mm"
    assert not any("no implementation" in text for text in found.values())


def between_ranks():
    """``(engine, what it would find)`` of the report."""
    lines = doctor.report().split("\n  between ranks:\n")[1].split("\n\n")[0].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines)


def test_engines_between_ranks_on_a_cpu(monkeypatch):
    found = between_ranks()
    assert list(found) == [*ENGINES, "all_to_all_vdev_2d, which is no engine"]
    assert found["all_to_all"].startswith("all_to_all_single of ")
    assert "gloo" in found["all_to_all"]
    if not torch.cuda.is_available():
        assert found["symmetric_memory"] == f"{NEED_OF_PEERS}, and there is none"
    for there in (False, True):
        monkeypatch.setattr(_symmetric_memory, "is_nvshmem_available", lambda there=there: there)
        said = between_ranks()["all_to_all_vdev_2d, which is no engine"]
        assert said == f"torch finds {'' if there else 'no '}NVSHMEM"


def test_devices_that_reach_each_other(gpu, monkeypatch):
    gpu("sm_90")
    assert between_ranks()["symmetric_memory"] == "one device, for a group of one rank"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    assert between_ranks()["symmetric_memory"] == "3 devices write to each other's memory"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) not in ((0, 2), (2, 1)))
    assert (
        between_ranks()["symmetric_memory"]
        == f"{NEED_OF_PEERS}; torch has no access from cuda:0 to cuda:2, cuda:2 to cuda:1"
    )


def test_every_op_is_in_the_report():
    """Asked in every variant of its sample calls, or with a word on what it needs."""
    found = served("cpu")
    assert {op for op, _ in found} == set(backends.ops())
    for op, variant in found:
        if "::" not in op or op.startswith("aten::"):
            assert variant == "not asked" if OPS[op].needs else variant in OPS[op].variants


def test_an_op_that_was_forgotten(monkeypatch):
    for name in ("new_op", "others::op"):
        monkeypatch.setitem(backends.registry.described, name, lambda x: None)
    found = served("cpu")
    assert found["new_op", "not asked"] == "it needs an entry in tgl/testing/signatures.py"
    assert found["others::op", "not asked"] == "it needs arguments that its library knows"


def test_atens_grouped_products_are_reported():
    assert "ATen's grouped products are ATen's own: tgl.integrations.torch is not enabled" in doctor.report()
    with drop_in.enabled("cpu"):
        assert "ATen's grouped products are served on cpu, by tgl.integrations.torch" in doctor.report()
        assert served("cpu")["aten::_grouped_mm", "bfloat16"] == "tgl::grouped_gemm"


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_on_a_gpu(gpu, arch):
    pytest.importorskip("cutlass")
    gpu(arch)
    found = served("cuda:0")
    ours = found["grouped_gemm", "bfloat16"], found["grouped_gemm_scaled", "mxfp8"]
    assert (
        ours
        == {
            "sm_75": (
                "loop of mm, reads the device on the host",
                "decoded, loop of mm, an emulation, reads the device on the host",
            ),
            **dict.fromkeys(chips(), ("tgl kernel", "decoded, dense GEMM, an emulation")),
            **dict.fromkeys(chips(OPERANDS["mxfp8"].archs), ("tgl kernel", "tgl kernel")),
        }[arch]
    )
    assert (f"tgl has kernels for {', '.join(chips())}, not for {arch}" in doctor.report()) == (serving(arch) is None)


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    assert "kernels cannot be compiled: this needs the package nvidia-cutlass-dsl" in doctor.report()


def test_as_a_command(tmp_path):
    """The command works without the packages of the extra ``testing``."""
    script = tmp_path / "script.py"
    for options, rows in (([], False), (["--ops"], True)):
        script.write_text(
            f"import runpy, sys; sys.modules['cute_emulator'] = None; sys.argv += {options}\n"
            "runpy.run_module('tgl.doctor', run_name='__main__')"
        )
        status, printed = run_script(script, {}, timeout=120)
        assert status == 0, printed
        assert printed.startswith("ready: ")
        assert ("  grouped_gemm  " in printed) == rows


def summary():
    """The first three lines of the report, by their titles."""
    return dict(line.split(": ", 1) for line in doctor.report().splitlines()[:3])


def test_three_lines_come_first(gpu, monkeypatch):
    """The lines say what is ready, what is missing and what to do; ops are listed with ``ops=True`` alone."""
    cpu = "cpu (every op, for tests and small models)"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(summary()) == ["ready", "missing", "to do"]
    assert summary()["missing"] == "a build of torch for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert summary()["missing"] == "a GPU that torch finds"
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    for arch, ready in (("sm_90", f"cuda:0 (sm_90, kernels), {cpu}"), ("sm_75", cpu)):
        backends.target.cuda_arch.cache_clear()
        gpu(arch)
        assert summary()["ready"] == ready
        assert summary()["missing"] == (
            "nothing" if ready != cpu else "kernels for cuda:0 (sm_75), which runs ops of ATen"
        )
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    assert summary() == {
        "ready": cpu,
        "missing": "the kernel compiler: tgl needs the package nvidia-cutlass-dsl",
        "to do": "pip install 'torch-grouped-linear[cu13]'",
    }
    assert "grouped_gemm" not in doctor.report()
