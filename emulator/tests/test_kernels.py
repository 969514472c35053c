"""Small kernels of every mechanism, compiled by the CuTe DSL, against torch: exact, under several schedules."""

import re

import pytest
import torch
from cutlass import cute
from cutlass._mlir import execution_engine
from cutlass.cute.runtime import from_dlpack

from cute_emulator import EmulatorError, MemoryAccessError, active, emulate, sweep

from . import kernels, kernels_maps, kernels_scheduler

ARCHES = ("sm_90a", "sm_100a")


def integers(*shape, seed=0):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def views(*tensors):
    return [from_dlpack(t, assumed_align=16) for t in tensors]


def run(arch, kernel, tensors, output, seeds=range(3)):
    """Compile and run under several schedules; returns the record of the last launch."""
    args = [*views(*tensors), kernels.STREAM]
    with emulate(arch) as machine:
        f = cute.compile(kernel, *args)
        sweep(lambda: f(*args), [output], seeds=seeds, timings=("adversarial", "in_order"))
    return machine.launches[-1]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("swizzle", [None, (1, 4, 3), (2, 4, 3), (3, 4, 3)])
def test_tma_load_and_store(arch, swizzle):
    columns = 32 if swizzle is None else 4 << swizzle[0]
    src, dst = integers(80, 96), torch.empty(80, 96)
    record = run(arch, kernels.Double(columns=columns, swizzle=swizzle), (src, dst), dst)
    assert torch.equal(dst, 2 * src)
    tiles = 3 * (96 // columns)
    assert record.arch == arch
    assert record.tma_bytes == {"load": tiles * 32 * columns * 4, "store": tiles * 32 * columns * 4, "reduce": 0}
    assert record.grid == (3, 96 // columns, 1)
    assert record.block == (128, 1, 1)
    assert record.barriers > 0


@pytest.mark.parametrize("arch", ARCHES)
def test_tma_reduce_add(arch):
    src, dst = integers(64, 32), torch.ones(64, 32)
    args = [*views(src, dst), kernels.STREAM]
    with emulate(arch, seed=1) as machine:
        cute.compile(kernels.Double(reduce=True), *args)(*args)
    assert torch.equal(dst, 2 * src + 1)
    assert machine.launches[0].tma_bytes["reduce"] == 64 * 32 * 4


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("cluster", [2, 4])
def test_cluster_multicast(arch, cluster):
    src, dst = integers(64, 32), torch.empty(cluster, 64, 32)
    record = run(arch, kernels.Multicast(cluster=cluster), (src, dst), dst)
    assert torch.equal(dst, src + torch.arange(cluster).view(-1, 1, 1))
    assert record.cluster == (cluster, 1, 1)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("tiles", [1, 2, 9])
def test_mbarrier_pipeline(arch, tiles):
    src, dst = integers(16 * tiles, 32), torch.empty(32)
    run(arch, kernels.ColumnSums(), (src, dst), dst)
    assert torch.equal(dst, src.sum(0))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "place, deleted",
    [
        ("global", "fence.proxy.tensormap::generic.release"),
        ("global", "fence.proxy.tensormap::generic.acquire"),
        ("shared", "fence.proxy.tensormap::generic.acquire"),
    ],
)
def test_tensor_map_edited_by_the_kernel(arch, place, deleted):
    nominal, actual, dst = integers(16, 32), integers(16, 32, seed=1), torch.empty(16, 32)
    room = torch.zeros(32, dtype=torch.int64)
    room = room[-room.data_ptr() % 128 // 8 :][:16]
    args = [*views(nominal, actual, dst), from_dlpack(room, assumed_align=128), kernels.STREAM]
    with emulate(arch) as machine:
        f = cute.compile(kernels_maps.Remapped(place), *args)
        sweep(lambda: f(*args), [dst], timings=("adversarial", "in_order"))
        assert torch.equal(dst, actual)
        machine.edit_ptx = lambda text: re.sub(rf"\n\s*{deleted}[^\n]*", "", text)
        with pytest.raises(MemoryAccessError, match=rf"a copy uses the tensor map at .* without {deleted}"):
            f(*args)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tiles", [4, 7])
def test_a_scheduler_that_laps_its_consumers(arch, stages, tiles):
    src, dst = integers(tiles, 32 * kernels_scheduler.CONSUMERS), torch.empty(tiles, 32 * kernels_scheduler.CONSUMERS)
    run(arch, kernels_scheduler.Scheduled(stages), (src, dst), dst)
    assert torch.equal(dst, src)
    args = [*views(src, dst), kernels.STREAM]
    with emulate(arch):
        f = cute.compile(kernels_scheduler.Scheduled(stages, acquire=False), *args)
    for seed in range(4):
        for timing in ("adversarial", "in_order"):
            with emulate(arch, seed=seed, timing=timing), pytest.raises(EmulatorError, match=r"race: warp|, missed: "):
                f(*args)


def gemm(arch, kernel, m, n, k):
    a, b = integers(m, k).bfloat16(), integers(n, k, seed=1).bfloat16()
    c = torch.empty(m, n)
    record = run(arch, kernel, (a, b, c), c)
    assert torch.equal(c, a.float() @ b.float().T)
    return record


def test_wgmma():
    record = gemm("sm_90a", kernels.HopperGemm(), 128, 128, 320)
    assert record.mma_flops == 2 * 128 * 128 * 320
    assert record.instructions["wgmma.commit_group.sync.aligned"] == 4 * 4 * 5


@pytest.mark.parametrize(
    "pair, cluster", [(False, (1, 1)), (False, (2, 2)), (True, (2, 1)), (True, (4, 1))], ids=lambda v: str(v)
)
def test_tcgen05(pair, cluster):
    m = 512 if pair else 256
    record = gemm("sm_100a", kernels.BlackwellGemm(pair=pair, cluster=cluster), m, 128, 320)
    assert record.mma_flops == 2 * m * 128 * 320
    assert record.tensor_memory_columns == 64


def test_blocks_nest_and_repeat_for_both_architectures():
    src, dst = integers(32, 32), torch.empty(32, 32)
    args = [*views(src, dst), kernels.STREAM]
    with emulate("sm_90a") as hopper:
        f90 = cute.compile(kernels.Double(), *args)
        with emulate("sm_100a", detect_races=False) as blackwell:
            f100 = cute.compile(kernels.Double(), *args)
            f100(*args)
            assert active() is blackwell
        f90(*args)
        with pytest.raises(EmulatorError, match="compiled for sm_100a; the emulated machine is sm_90"):
            f100(*args)
    assert active() is None
    with emulate("sm_100a") as again:
        f100(*args)
    assert [len(m.launches) for m in (hopper, blackwell, again)] == [2, 1, 1]
    assert torch.equal(dst, 2 * src)


def test_a_jit_function_called_without_compiling_it():
    src, dst = integers(64, 32), torch.empty(96, 32)
    with emulate("sm_90a") as machine:
        kernels.Double()(*views(src, dst[:64]), kernels.STREAM)
        assert torch.equal(dst[:64], 2 * src)
        with pytest.raises(EmulatorError, match="outside every tensor"):
            kernels.Overrun()(*views(dst[:32]), kernels.STREAM)
    assert len(machine.launches) == 2


def test_call_outside_a_block_fails():
    src, dst = integers(32, 32), torch.zeros(32, 32)
    args = [*views(src, dst), kernels.STREAM]
    with emulate("sm_100a"):
        f = cute.compile(kernels.Double(), *args)
        f(*args)
    dst.zero_()
    with pytest.raises(Exception):  # noqa: B017 - the DSL's own error class: the launch returns an error code
        f(*args)
    assert dst.count_nonzero() == 0


def test_tvm_ffi():
    src, dst = integers(64, 64), torch.empty(64, 64)
    with emulate("sm_100a") as machine:
        f = cute.compile(kernels.Double(), *views(src, dst), kernels.STREAM, options="--enable-tvm-ffi")
        f(src, dst, 0)
    assert torch.equal(dst, 2 * src)
    assert len(machine.launches) == 1


def test_tvm_ffi_compiles_its_host_code_once(monkeypatch):
    src, dst = integers(64, 64), torch.empty(64, 64)

    def jit(*_, **__):
        raise AssertionError("compiled for an engine that is dropped")

    monkeypatch.setattr(execution_engine, "ExecutionEngine", jit)
    with emulate("sm_100a"):
        f = cute.compile(kernels.Double(), *views(src, dst), kernels.STREAM, options="--enable-tvm-ffi")
        f(src, dst, 0)
    assert torch.equal(dst, 2 * src)


def test_tvm_ffi_with_tensors_of_the_dsl():
    src, dst = integers(64, 64), torch.empty(64, 64)
    with emulate("sm_100a") as machine:
        args = [from_dlpack(t, assumed_align=16, enable_tvm_ffi=True) for t in (src, dst)]
        f = cute.compile(kernels.Double(), *args, kernels.STREAM, options="--enable-tvm-ffi")
        f(*args, 0)
        assert torch.equal(dst, 2 * src)
        dst.zero_()
        f(src, dst, 0)
        assert torch.equal(dst, 2 * src)
    assert len(machine.launches) == 2


def test_object_file_reloaded(tmp_path):
    src, dst = integers(64, 64), torch.empty(64, 64)
    path = str(tmp_path / "double.o")
    with emulate("sm_100a"):
        f = cute.compile(kernels.Double(), *views(src, dst), kernels.STREAM, options="--enable-tvm-ffi")
        f.export_to_c(path, function_name="double")
    with emulate("sm_100a") as machine:
        loaded = cute.runtime.load_module(path, enable_tvm_ffi=True)
        machine.call(loaded.double, src, dst, 0)
        assert torch.equal(dst, 2 * src)
        machine.edit_ptx = lambda text: text.replace("mbarrier.init", "mbarrier.unheard_of")
        with pytest.raises(EmulatorError, match="unheard_of"):
            machine.call(loaded.double, src, dst, 0)


def test_tvm_ffi_raises_the_error_of_the_launch():
    src, dst = integers(64, 64), torch.empty(64, 64)
    with emulate("sm_100a") as machine:
        f = cute.compile(kernels.Double(), *views(src, dst), kernels.STREAM, options="--enable-tvm-ffi")
        machine.edit_ptx = lambda text: text.replace("mbarrier.init", "mbarrier.unheard_of")
        with pytest.raises(
            EmulatorError, match=r"unheard_of.*PTX line \d+ \(.*kernels.py:\d+\)|PTX line \d+.*unheard_of"
        ):
            f(src, dst, 0)


@pytest.mark.parametrize("bad", [{"arch": "sm_70"}, {"timing": "late"}, {"resident_clusters": 0}])
def test_bad_arguments(bad):
    options = {"arch": "sm_100a", **bad}
    src, dst = integers(32, 32), torch.empty(32, 32)
    args = [*views(src, dst), kernels.STREAM]
    with pytest.raises(ValueError, match=next(iter(bad))), emulate(options.pop("arch"), **options):
        cute.compile(kernels.Double(), *args)(*args)


def test_sweep_finds_a_dependence_on_the_schedule():
    counter = iter(range(100))
    out = torch.empty(4)
    with emulate("sm_100a"), pytest.raises(EmulatorError, match="output 0 depends on the schedule"):
        sweep(lambda: out.fill_(next(counter)), [out])


def test_sweep_poisons_outputs():
    seen = []
    out, codes = torch.zeros(4), torch.zeros(4, dtype=torch.int8)
    with emulate("sm_100a"):
        sweep(lambda: seen.append((out.isnan().all().item(), (codes == -1).all().item())), [out, codes], seeds=[0])
    assert seen == [(True, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.uint32, torch.bool])
@pytest.mark.parametrize("shape, strides", [((), ()), ((0,), (1,)), ((3,), (2,)), ((2, 3), (1, 2))])
def test_sweep_takes_outputs_of_any_shape(dtype, shape, strides):
    """Scalars, empty tensors, and tensors whose last dimension is not dense."""
    out = torch.empty_strided(shape, strides, dtype=dtype)
    poisoned = []

    def call():
        poisoned.append(
            bool((out != out).all() if dtype.is_floating_point else (out != 1).all() or dtype is torch.bool)
        )
        out.fill_(1)

    with emulate("sm_100a"):
        sweep(call, [out], seeds=range(2))
        assert all(poisoned)
        later = iter(range(2))
        if out.numel():
            with pytest.raises(EmulatorError, match="output 0 depends on the schedule"):
                sweep(lambda: out.fill_(next(later)), [out], seeds=range(2))


def test_sweep_needs_a_block():
    with pytest.raises(EmulatorError, match="open emulate"):
        sweep(lambda: None, [])
