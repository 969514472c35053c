"""The harness of the benchmarks: gates, shapes, routings, tables, means and options."""

import json

import pytest
import torch


@pytest.fixture(scope="module")
def gates(load):
    return load("harness.gates")


@pytest.fixture
def dense(load, monkeypatch):
    module = load("harness.dense")
    monkeypatch.setattr(module, "quack", lambda: None)  # importing it changes the compiler for tests that follow
    return module


@pytest.fixture(scope="module")
def shapes(load):
    return load("harness.shapes")


@pytest.fixture(scope="module")
def report(load):
    return load("harness.report")


@pytest.fixture(scope="module")
def command(load):
    return load("harness.command")


SIZES = [40, 0, 56]


@pytest.fixture(params=["fprop", "dgrad", "wgrad", "accumulate", "dbias"])
def problem(request, dense, shapes):
    torch.manual_seed(0)
    return dense.OPS[request.param](shapes.Shape(3, 96, 64, 48), SIZES, "cpu")


def judged(gates, problem, call):
    return gates.wrong(problem, call, problem.oracle, problem.per_group_mm)


def test_a_right_result_passes(gates, problem):
    assert judged(gates, problem, problem.tgl) is None
    assert problem.sizes == SIZES
    assert problem.offs.tolist() == [40, 40, 96]


def test_every_rival_computes_the_same(gates, problem):
    """Every rival whose result can be read computes the same numbers."""
    wanted = problem.oracle()
    for name, call in problem.rivals().items():
        problem.theirs.zero_()
        made = call()
        if name in ("torch", "loop"):
            got = problem.theirs if made is None else made
            assert gates.relative_error(got, wanted) < 2**-7, name
    assert {"loop", "copy" if problem.flops == 0 else "dense"} <= set(problem.rivals())


def test_faults_are_named(gates, problem):
    noise = iter(range(100))

    def partly():
        kept = problem.out[:1].clone()
        problem.tgl()
        problem.out[:1] = kept

    def other_bits():
        problem.tgl()
        problem.out[0, 0] += next(noise)

    def far():
        problem.tgl()
        problem.out.mul_(1.5)

    def writes_empty_groups():
        problem.tgl()
        problem.out[torch.tensor([size == 0 for size in problem.sizes])] = 1e-9

    if problem.fill != problem.fill:
        assert judged(gates, problem, partly) == "poison is left in the output"
    assert judged(gates, problem, other_bits) == "not the same bits again"
    name, error, *_ = judged(gates, problem, far).split()
    assert (name, float(error.rstrip(","))) == ("error", pytest.approx(0.5, abs=0.01))
    if problem.per_group:
        assert judged(gates, problem, writes_empty_groups) == "an empty group's gradient is not zero"


def test_a_graph_that_ignores_new_offsets_does_not_pass(gates, problem):
    problem.tgl()
    first = problem.out.clone()
    assert judged(gates, problem, lambda: problem.out.copy_(first)).startswith("error ")


def test_bytes_and_flops(dense, shapes):
    made = {op: kind(shapes.Shape(3, 96, 64, 48), SIZES, "cpu") for op, kind in dense.OPS.items()}
    gemm = 2 * (96 * 64 + 96 * 48 + 3 * 64 * 48)
    assert {op: p.flops for op, p in made.items()} == dict.fromkeys(dense.OPS, 2.0 * 96 * 64 * 48) | {"dbias": 0.0}
    assert made["fprop"].bytes == made["dgrad"].bytes == made["wgrad"].bytes == gemm
    assert made["accumulate"].bytes == gemm + 6 * 3 * 64 * 48
    assert made["dbias"].bytes == 2 * 96 * 48 + 4 * 3 * 48
    assert made["fprop"].rate(1.0).split()[1] == "TF/s"
    assert made["dbias"].rate(1.0).split()[1] == "TB/s"


@pytest.mark.parametrize("groups", [1, 3, 16, 128])
def test_routings(shapes, groups):
    for routing in shapes.ROUTINGS:
        sizes = shapes.split(routing, groups, 5000)
        assert (len(sizes), sum(sizes)) == (groups, 5000)
        assert min(sizes) >= 0
        assert sizes == shapes.split(routing, groups, 5000)


def test_rows_of_each_kind_of_routing(shapes):
    assert shapes.split("balanced", 4, 1000) == [250] * 4
    assert sorted(shapes.split("all on one", 4, 1000)) == [0, 0, 0, 1000]
    assert sorted(shapes.split("half on one", 5, 1000)) == [125, 125, 125, 125, 500]
    assert shapes.split("quarter empty", 8, 1000).count(0) == 2
    large, *_, small = sorted(shapes.split("zipf", 16, 100_000), reverse=True)
    assert 15.9 < large / small < 16.1
    assert shapes.growing(4, 1000, 1).tolist() == [100, 300, 600, 1000]
    assert shapes.growing(3, 30, 0).tolist() == [0, 10, 30]
    assert shapes.growing(1, 30, 0).tolist() == [30]


def test_shapes_of_models(shapes):
    """Two linear layers of every expert, whose results the pages quote."""
    assert shapes.SHAPES["mixtral-fc1"] == (8, 16384, 4096, 14336)
    assert shapes.SHAPES["mixtral-fc2"] == (8, 16384, 14336, 4096)
    assert len(shapes.SHAPES) == 2 * len(shapes.MODELS) + 2
    assert set(shapes.QUICK) < set(shapes.SHAPES)
    assert set(shapes.QUICK_ROUTINGS) < set(shapes.ROUTINGS)


def test_summaries_and_means(report):
    assert report.summary([float(n) for n in range(1, 10)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    times = report.summaries({"tgl": [2.0, 2.0], "other": [3.0, 3.0]})
    assert report.quotient(times, "other", "tgl") == 1.5
    assert report.quotient(times, "absent", "tgl") is report.quotient({}, "other", "tgl") is None
    mean = report.mean_of([("a", 4.0), ("b", None), ("c", 1.0)])
    assert mean == (pytest.approx(2.0), 1.0, "c", 2)
    assert str(mean) == " 2.000  (1.000, c, of 2)"
    assert report.mean_of([("a", None)]) is None


def test_table(report):
    table = report.Table({"name": "<6", "ms": ">8.3f", "ratio": ">7.2f"})
    assert table.header() == "name         ms   ratio"
    assert table.line(["one", 1.25, None]) == "one       1.250       -"
    with pytest.raises(ValueError):
        table.line(["one", 1.25])


def test_a_case_without_memory_is_reported_and_the_others_go_on(command, monkeypatch, capsys):
    monkeypatch.setattr(command.gc, "collect", lambda: 0)

    def run(shape, op):
        if shape == "huge":
            raise torch.OutOfMemoryError
        return {"times": {"tgl": op}}

    every = command.cases(shape=["huge", "small"], op=["one", "two"])
    results = command.run_all(every, run, lambda result: f"line of {result['op']}")
    assert capsys.readouterr().out.splitlines() == [
        "huge one: out of memory",
        "huge two: out of memory",
        "line of one",
        "line of two",
    ]
    assert results[0] == {"shape": "huge", "op": "one", "times": {}, "wrong": "out of memory"}
    assert results[3] == {"shape": "small", "op": "two", "times": {"tgl": "two"}}


def test_results_are_written(report, tmp_path):
    path = tmp_path / "results.json"
    report.save(path, report.with_machine("a GPU", [{"ms": 1.5}]))
    assert json.loads(path.read_text()) == {"device": "a GPU", "torch": torch.__version__, "results": [{"ms": 1.5}]}
    report.save(None, [])


def test_options(command, capsys):
    made = command.gpu_parser("doc", quick="less")
    command.choice(made, "--ops", {"a": 1, "b": 2})
    args = made.parse_args(["--quick", "--clean-l2", "--samples", "2"])
    assert (args.quick, args.clean_l2, args.samples, args.ops, args.out) == (True, True, 2, ["a", "b"], None)
    assert made.parse_args([]).samples == 50
    with pytest.raises(SystemExit):
        made.parse_args(["--samples", "1"])
    assert "percentiles need 2 samples, got 1" in capsys.readouterr().err
