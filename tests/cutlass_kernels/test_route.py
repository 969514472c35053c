"""Routings by the kernels, on the emulator: exact, of every dtype, with choices of no expert, in one launch and two."""

import pytest
import torch

import cute_emulator
import tgl
from tests.cutlass_kernels import sass
from tests.routing_oracle import expected
from tgl import backends
from tgl.cutlass_kernels.launchers import route as calls
from tgl.cutlass_kernels.runtime import device, launcher

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

ARCHS = ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)]  # one source, no instruction of one alone
SLOW = [pytest.param(experts, marks=pytest.mark.slow) for experts in (8, 256, 1000)]
NAMES = ("source", "position", "token", "offs")
CPU = torch.device("cpu")
CANARY = -7


@pytest.fixture(params=ARCHS, autouse=True)
def machine(request):
    with cute_emulator.emulate(request.param) as machine, backends.emulated_device(request.param.removesuffix("a")):
        yield machine


@pytest.fixture
def several(monkeypatch):
    """Blocks of 512 pairs, as many as four; more pairs are several turns of a block."""
    monkeypatch.setattr(calls, "TILE", 0)
    monkeypatch.setattr(calls, "CHUNK", 512)


def check(index, experts, seeds=(0,), num_rows=None):
    """The op's results in the middle of buffers that must survive, the same under every schedule."""
    wanted, pairs = expected(index, experts, num_rows), index.numel()
    rows = pairs if num_rows is None else num_rows
    for seed in seeds:
        cute_emulator.active().seed = seed
        room = [torch.full((size + 2,), CANARY, dtype=torch.int32) for size in (rows, pairs, rows, experts)]
        backends.run("route", CPU, index, experts, **{name: t[1:-1] for name, t in zip(NAMES, room)})
        for name, t in zip(NAMES, room):
            assert torch.equal(t[1:-1], getattr(wanted, name)), name
            assert t[0] == t[-1] == CANARY, name


def choices(tokens, top_k, experts, beyond=0, dtype=torch.int64):
    return torch.randint(-beyond, experts + beyond, (tokens, top_k)).to(dtype)


@pytest.mark.parametrize("experts", [1, 7, 128, 1024, *SLOW])
def test_one_launch(machine, experts):
    for tokens, top_k, beyond in ((1, 8, 0), (50, 3, 2), (150, 16, 1)):
        check(choices(tokens, top_k, experts, beyond), experts)
    assert [record.grid for record in machine.launches] == [(1, 1, 1)] * 3


@pytest.mark.cover(1)
@pytest.mark.parametrize("num_rows", [None, 0, 5, 80, 300])
@pytest.mark.parametrize("experts", [1, 7, 128, 1024])
def test_few_choices(machine, experts, num_rows):
    """Up to 64, by a kernel for few of them."""
    for tokens, top_k, beyond in ((1, 1, 0), (7, 9, 2), (8, 8, 0)):
        check(choices(tokens, top_k, experts, beyond), experts, (0, 1), num_rows)
    check(torch.full((4, 5), experts - 1), experts, num_rows=num_rows)
    check(torch.full((4, 5), experts), experts, num_rows=num_rows)
    assert all("RouteFew" in record.kernel for record in machine.launches)


@pytest.mark.parametrize("dtype", list(calls.INTEGERS), ids=str)
def test_few_choices_of_any_dtype_and_layout(dtype):
    limits = torch.iinfo(dtype)
    index = choices(16, 4, 100, dtype=dtype)
    index[::7, 0], index[1::7, 1] = limits.min, limits.max
    if dtype == torch.int64:
        index[::5, 1], index[::5, 2] = (1 << 32) + 3, -(1 << 40) + 3
    for laid in (
        index,
        index.view(4, 16).t(),
        index[::2, 1:],
        index[:, :1].expand(16, 4),
        index.flatten()[1:-3].view(-1, 4),
    ):
        check(laid, 100)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("experts", [1, 7, 128, 1024, *SLOW])
def test_two_launches(machine, experts):
    check(choices(1100, 2, experts, beyond=1, dtype=torch.int32), experts)
    assert [record.grid for record in machine.launches] == [(4, 1, 1)] * 2
    # The second one begins while the first one runs, and ranks choices before it waits for it.
    assert [record.overlaps for record in machine.launches] == [False, "sm_80" not in machine.chip.name]
    assert machine.launches[1].early is not None or not machine.launches[1].overlaps


@pytest.mark.usefixtures("several")
def test_devices_of_any_size_give_the_same_bits(machine, monkeypatch):
    """A block for each multiprocessor, up to those that the choices fill, and the exact routing by each."""
    index = choices(1100, 2, 7, beyond=1)
    for count in (1, 2, 3, 132):
        monkeypatch.setattr(device, "multiprocessors", lambda _, count=count: count)
        check(index, 7)
    assert [record.grid[0] for record in machine.launches] == [1, 1, 2, 2, 3, 3, 5, 5]


@pytest.mark.parametrize("num_rows", [0, 1000, 3000])
def test_other_numbers_of_rows(several, num_rows):
    """Fewer than choices of experts, in the middle of a group, and more than all choices."""
    check(choices(800, 2, 7, beyond=1), 7, num_rows=num_rows)


@pytest.mark.parametrize("num_rows", [17, 90])
def test_other_numbers_of_rows_in_one_launch(num_rows):
    check(choices(20, 3, 5, beyond=1), 5, num_rows=num_rows)


@pytest.mark.usefixtures("several")
def test_several_turns_of_a_block():
    check(choices(8500, 2, 7, beyond=1), 7)


@pytest.mark.usefixtures("several")
def test_more_choices_than_a_round_of_all_warps():
    check(choices(3, 700, 20, beyond=1), 20)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("kind", ["all of one", "all of the last", "none", "in order", "backwards", "few of many"])
def test_uneven(kind):
    index = {
        "all of one": torch.zeros(1500),
        "all of the last": torch.full((1500,), 39),
        "none": torch.tensor([-1, 40]).repeat(750),
        "in order": torch.arange(1500) // 38,
        "backwards": 39 - torch.arange(1500) // 38,
        "few of many": torch.tensor([40, 40, 40, 3, 40]).repeat(300),
    }[kind]
    check(index.int().view(500, 3), 40, seeds=(0, 1))


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("dtype", list(calls.INTEGERS), ids=str)
def test_dtypes_and_their_limits(dtype):
    limits = torch.iinfo(dtype)
    index = choices(300, 2, 100, dtype=dtype)
    index[::7, 0], index[1::7, 1] = limits.min, limits.max
    check(index, 100)
    if dtype == torch.int64:  # whose lower half alone would be an expert
        index[::5, 1] = (1 << 32) + 3
        index[::5, 0] = -(1 << 40) + 3
        check(index, 100)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("layout", ["column-major", "sliced", "expanded", "misaligned"])
def test_any_layout(layout):
    index = choices(400, 4, 9, beyond=1)
    index = {
        "column-major": lambda: index.view(4, 400).t(),
        "sliced": lambda: index[::2, 1:],
        "expanded": lambda: index[:, :1].expand(400, 4),
        "misaligned": lambda: index.int().flatten()[1:-3].view(-1, 4),
    }[layout]()
    check(index, 9)


def test_nothing_to_launch(machine):
    check(choices(0, 2, 5), 5)
    check(choices(3, 2, 5), 0)
    assert not machine.launches


def test_as_the_op(machine):
    index = choices(9, 2, 4, beyond=1)
    assert tgl.explain("route", index, 4).chosen.name == "tgl kernel"
    for ours, wanted in zip(torch.ops.tgl.route(index, 4), expected(index, 4), strict=True):
        assert torch.equal(ours, wanted)
    assert len(machine.launches) == 1


def test_one_kernel_serves_any_number_of_tokens_and_experts_of_as_many_bits(monkeypatch):
    compile, made = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    monkeypatch.setattr(launcher, "compiled", lambda *args: made.append(args[1]) or compile(*args))
    for tokens, experts in ((33, 8), (40, 15), (600, 9)):
        torch.ops.tgl.route(choices(tokens, 2, experts), experts)
    assert len(made) == 1
    for tokens, experts in ((3, 8), (32, 600)):
        torch.ops.tgl.route(choices(tokens, 2, experts), experts)
    assert len(made) == 2


@pytest.mark.parametrize("tokens", [3, 3000])
def test_warmup_launches_on_tensors_of_its_own(machine, tokens):
    index = choices(tokens, 2, 4)
    assert tgl.warmup("route", index, 4).chosen.name == "tgl kernel"
    launches = len(machine.launches)
    torch.ops.tgl.route(index, 4)
    assert launches == len(machine.launches) - launches == (1 if tokens == 3 else 2)


def test_unsupported_calls(monkeypatch):
    refused = {i.name: why for i, why in tgl.explain("route", choices(3, 2, 4), 1025).refused}
    assert refused["tgl kernel"] == "takes up to 1024 experts, got 1025"
    many = torch.zeros(1, 1, dtype=torch.int32).expand((1 << 29) + 1, 2)
    assert "takes up to 1073741824 top-k slots" in calls.ROUTE.reject_reason(
        calls.RouteCall(many, 4, *[many.view(-1)] * 4)
    )
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    refused = {i.name: why for i, why in tgl.explain("route", choices(3, 2, 4), 4).refused}
    assert refused["tgl kernel"] == "needs the package nvidia-cutlass-dsl"


@pytest.mark.slow
@pytest.mark.parametrize("experts", [128, 1024])
@pytest.mark.parametrize("alone", [True, False], ids=["one launch", "two launches"])
def test_machine_code(machine, alone, experts):
    """Nothing in local memory, and registers for blocks of 512 threads."""
    arch = backends.device_arch(CPU)
    kernel = calls.build(calls.RouteKey(arch, True, "int64", experts.bit_length(), alone))
    report = sass.inspect(kernel.artifacts.CUBIN)
    assert report.spills == report.frame == 0
    assert report.registers <= 128
