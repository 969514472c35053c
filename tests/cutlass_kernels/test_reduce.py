"""Reductions, exactly, on the emulator: every dtype, ragged routings, poisoned tails, offsets that make no sense."""

import pytest
import torch

import cute_emulator
import tgl
from tests import oracle
from tests.kernel_cases import integers
from tgl import backends
from tgl.cutlass_kernels.launchers import reduce as calls
from tgl.cutlass_kernels.runtime import device, launcher

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

ARCHS = ["sm_90a", "sm_100a"]
LONG = 300  # rows that are cut into many spans
RING_ROWS = calls.RING_ROWS
MULTIPROCESSORS = 132  # more than blocks that the emulator keeps busy, as many tiles as on a GPU
CPU = torch.device("cpu")


@pytest.fixture(params=ARCHS, autouse=True)
def machine(request, monkeypatch):
    monkeypatch.setattr(calls, "RING_ROWS", 1)
    monkeypatch.setattr(device, "multiprocessors", lambda _: MULTIPROCESSORS)
    with cute_emulator.emulate(request.param) as machine, backends.emulated_device(request.param.removesuffix("a")):
        yield machine


def cut_of(dy):
    return calls.cut_of("sm_90", dy, None)


def dbias(dy, offs):
    """The op's result in the middle of a buffer whose other rows must survive; the same bits under two schedules."""
    groups, columns = len(offs), dy.shape[1]
    buffer = torch.empty(groups + 2, columns)
    canary = torch.full((columns,), 7.0)

    def run():
        buffer.fill_(7.0)
        backends.run("grouped_dbias", CPU, dy, offs, out=buffer[1:-1])

    run()
    first = buffer[1:-1].clone()
    cute_emulator.active().seed = 1
    run()
    assert torch.equal(buffer[0], canary)
    assert torch.equal(buffer[-1], canary)
    assert torch.equal(buffer[1:-1], first)
    return first


def expected(dy, offs):
    return oracle.rounded(
        torch.stack([torch.nan_to_num(dy[s:e].double()).sum(0) for _, s, e in oracle.groups(offs)]).long().numpy(),
        torch.float32,
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.bfloat16, 136), (torch.bfloat16, 264), (torch.float16, 33), (torch.float32, 136)],
)
def test_ragged_groups(dtype, columns):
    sizes = [0, 1, 127, 128, 0, 129, 40, 0]
    offs = torch.tensor(sizes).cumsum(0).int()
    dy = integers(sum(sizes) + 9, columns, dtype=dtype)
    dy[sum(sizes) :] = float("nan")
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


LONG_GROUPS = {
    "long and short": (256, [3, LONG, 0, 2 * LONG, 5]),
    "long and short, registers": (72, [3, LONG, 0, 2 * LONG, 5]),
    "one": (72, [4 * LONG]),
    "end where spans end": (256, [0, 10, 10, 0, 20, 600, 0]),
    "many in one span": (256, [i % 5 for i in range(100)]),
}


@pytest.mark.parametrize(("columns", "sizes"), LONG_GROUPS.values(), ids=LONG_GROUPS)
def test_groups_of_several_spans(columns, sizes):
    offs = torch.tensor(sizes).cumsum(0).int()
    dy = integers(sum(sizes) + 1, columns, dtype=torch.bfloat16)
    dy[sum(sizes) :] = float("nan")
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


@pytest.mark.parametrize(
    ("columns", "sizes"),
    [(72, [3, 200, 0, 1, 5, 0, 400, 0]), (72, [9, 591]), (264, [300, 4, 296]), (1032, [3, 70, 0, 33])],
    ids=["ragged", "long", "two", "wide"],
)
def test_many_tiles(monkeypatch, columns, sizes):
    """Groups of few tiles and of so many that they share its columns, with few lanes across and with many."""
    monkeypatch.setattr(calls, "ROWS", 32)
    offs = torch.tensor(sizes).cumsum(0).int()
    dy = integers(sum(sizes) + 1, columns, dtype=torch.bfloat16)
    assert cut_of(dy).tiles(*dy.shape, MULTIPROCESSORS) == sum(sizes) // 32 + 1
    dy[sum(sizes) :] = float("nan")
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


def test_few_rows_and_many_groups():
    """Most spans have no rows, and a warp looks after several groups."""
    sizes = [0] * 50 + [1, 0, 2] + [0] * 50 + [1]
    offs = torch.tensor(sizes).cumsum(0).int()
    dy = integers(9, 264, dtype=torch.bfloat16)
    dy[sum(sizes) :] = float("nan")
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


@pytest.mark.parametrize("layout", ["column-major", "expanded", "sliced", "a slice of long rows", "misaligned"])
def test_any_layout(layout):
    offs = torch.tensor([70, 70, 95]).int()
    dy = {
        "column-major": lambda: integers(24, 95, dtype=torch.bfloat16).t(),
        "expanded": lambda: integers(1, 24, dtype=torch.bfloat16).expand(95, 24),
        "sliced": lambda: integers(95, 50, dtype=torch.float16)[:, :24],
        "a slice of long rows": lambda: integers(95, 400, dtype=torch.float16)[:, 64:320],
        "misaligned": lambda: integers(95 * 24 + 1, dtype=torch.float16)[1:].view(95, 24),
    }[layout]()
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


@pytest.mark.parametrize(
    ("dtypes", "columns"), [(("bfloat16", "float32"), 264), (("float32", "bfloat16"), 33)], ids=["wide", "narrow"]
)
def test_row_scales(dtypes, columns):
    sizes = [0, 1, 127, 0, LONG, 0]
    offs = torch.tensor(sizes).cumsum(0).int()
    dy = integers(sum(sizes) + 9, columns, dtype=torch.bfloat16)
    bias = integers(len(sizes), columns, dtype=getattr(torch, dtypes[0]))
    scale = integers(len(dy), dtype=getattr(torch, dtypes[1]))
    for t in (dy, scale):
        t[sum(sizes) :] = float("nan")
    dbias, dscales = torch.full((len(sizes), columns), 7.0), torch.full((len(dy),), 7.0)
    backends.run("grouped_dbias_dscales", CPU, dy, bias, scale, offs, dbias=dbias, dscales=dscales)
    weighted = torch.nan_to_num(dy.double()) * torch.nan_to_num(scale.double())[:, None]
    assert torch.equal(dbias, expected(weighted, offs))
    of_row = torch.repeat_interleave(bias.double(), torch.tensor(sizes), dim=0)
    assert torch.equal(dscales[: sum(sizes)].double(), (dy[: sum(sizes)].double() * of_row).sum(1))
    assert dscales[sum(sizes) :].eq(0).all()


def test_no_rows_and_many_groups():
    offs = torch.zeros(70, dtype=torch.int32)
    dy = torch.full((4, 8), float("nan"), dtype=torch.bfloat16)
    assert dbias(dy, offs).eq(0).all()


@pytest.mark.parametrize("columns", [16, 256], ids=["registers", "ring"])
def test_bad_offsets_stay_within_bounds(machine, columns):
    """With any offsets the kernel ends and stays in bounds, and a valid routing is summed after it."""
    machine.detect_races = False  # several CTAs write a group's sums where groups overlap
    dy = integers(640, columns, dtype=torch.bfloat16)
    low, high = -(1 << 31), (1 << 31) - 1
    for ends in ([-5, 10, 3, 1 << 30, low], [high, low, high, 7], [-1, -2, -3, -4], [600, 500, 400, 640], [low, high]):
        buffer = torch.full((len(ends) + 2, columns), 7.0)
        backends.run("grouped_dbias", CPU, dy, torch.tensor(ends).int(), out=buffer[1:-1])
        assert buffer[[0, -1]].eq(7).all()
    machine.detect_races = True
    offs = torch.tensor([10, 600]).int()
    assert torch.equal(dbias(dy, offs), expected(dy, offs))


@pytest.mark.parametrize("dtype", list(calls.INTEGERS), ids=str)
def test_offsets(dtype):
    for seed, groups in enumerate((1, 32, 257, 600) if dtype == torch.int32 else (40,)):
        sizes = torch.randint(0, 100, (2 * groups,)).to(dtype)[::2]
        buffer = torch.full((groups + 2,), -7, dtype=torch.int32)
        cute_emulator.active().seed = seed
        backends.run("splits_to_offsets", CPU, sizes, out=buffer[1:-1])
        assert torch.equal(buffer[1:-1], sizes.long().cumsum(0).int())
        assert buffer[0] == buffer[-1] == -7


@pytest.mark.parametrize(("rows", "launches"), [(calls.ROWS, 1), (calls.ROWS + 1, 2)])
def test_launches(machine, rows, launches):
    """The second is for groups of several tiles."""
    dy = integers(rows, 24, dtype=torch.bfloat16)
    backends.run("grouped_dbias", CPU, dy, torch.tensor([rows]).int(), out=torch.empty(1, 24))
    assert len(machine.launches) == launches
    backends.run("splits_to_offsets", CPU, torch.ones(40, dtype=torch.int64), out=torch.empty(40, dtype=torch.int32))
    assert len(machine.launches) == launches + 1


@pytest.mark.parametrize("columns", [24, 33, 264])
def test_warmup_launches_on_tensors_of_its_own(machine, columns):
    dy, offs, probs = integers(3, columns, dtype=torch.bfloat16), torch.tensor([3]).int(), torch.ones(3)
    ops = {
        "grouped_dbias": (dy, offs),
        "grouped_dbias_dscales": (dy, dy[:1], probs, offs),
        "splits_to_offsets": (torch.ones(40, dtype=torch.int64),),
    }
    for launches, (op, args) in enumerate(ops.items(), 1):
        assert tgl.warmup(op, *args).chosen.name == "tgl kernel"
        assert len(machine.launches) == launches


@pytest.mark.parametrize(
    ("dy", "cut"),
    [
        (torch.empty(1, 768, dtype=torch.bfloat16), (8, 32, 6)),
        (torch.empty(1, 7168, dtype=torch.bfloat16), (8, 32, 4)),
        (torch.empty(1, 128), (4, 32, 6)),
        (torch.empty(1, 264, dtype=torch.bfloat16)[:, :256], (8, 32, 6)),
        (torch.empty(1, 248, dtype=torch.bfloat16), (8, 8, 0)),
        (torch.empty(1, 768 + 4, dtype=torch.bfloat16), (4, 16, 0)),
        (torch.empty(1, 768 + 8, dtype=torch.bfloat16)[:, 4:-4], (4, 16, 0)),
        (torch.empty(768, 1, dtype=torch.bfloat16).t(), (1, 16, 0)),
    ],
)
def test_only_whole_vectors_go_through_the_ring(dy, cut):
    assert cut_of(dy) == cut
    bias = torch.empty(1, dy.shape[1], dtype=torch.bfloat16)
    assert not calls.cut_of("sm_90", dy, bias).slots  # where scales have a gradient


@pytest.mark.parametrize("rows", [256, RING_ROWS - 1, RING_ROWS])
def test_few_rows_go_through_registers(monkeypatch, rows):
    monkeypatch.setattr(calls, "RING_ROWS", RING_ROWS)
    dy = torch.empty(rows, 768, dtype=torch.bfloat16)
    assert cut_of(dy) == ((8, 32, 6) if rows == RING_ROWS else (8, 8, 0))
    assert (cut_of(dy).tiles(*dy.shape, MULTIPROCESSORS) == 1) == (rows == 256)  # one launch


def test_a_plan_is_of_one_architecture(monkeypatch):
    made = []
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "compiled", lambda op, key, where, build: made.append((op, key.arch)) or print)
    dy, offs = integers(3, 24, dtype=torch.bfloat16), torch.tensor([3]).int()
    for arch in ("sm_90", "sm_100", "sm_90"):
        with backends.emulated_device(arch):
            backends.prepare("grouped_dbias", CPU, dy, offs, out=torch.empty(1, 24))
            backends.prepare("splits_to_offsets", CPU, torch.ones(3, dtype=torch.int64), out=offs.new_empty(3))
    assert sorted(made) == [(op, a) for op in ("grouped_dbias", "splits_to_offsets") for a in ("sm_100", "sm_90")]


def test_missing_packages_are_the_first_reason(monkeypatch):
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    dy, offs = torch.zeros(4, 8), torch.tensor([4]).int()
    for op, args in (
        ("grouped_dbias", (dy, offs)),
        ("grouped_dbias_dscales", (dy, torch.zeros(1, 8), torch.zeros(4), offs)),
        ("splits_to_offsets", (torch.ones(3, dtype=torch.int64),)),
    ):
        refused = {i.name: why for i, why in tgl.explain(op, *args).refused}
        assert refused["tgl kernel"] == "needs the package nvidia-cutlass-dsl"


def test_unsupported_calls():
    double, offs = torch.zeros(4, 8, dtype=torch.float64), torch.tensor([4]).int()
    refused = {i.name: why for i, why in tgl.explain("grouped_dbias", double, offs).refused}
    assert "float64" in refused["tgl kernel"]
    assert tgl.explain("grouped_dbias", double.half(), offs).chosen.name == "tgl kernel"
