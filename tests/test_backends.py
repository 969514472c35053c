"""The registry: which implementation serves a call, what ``explain`` says, and implementations of one's own."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import tgl
from tgl import backends
from tgl.cutlass_kernels.archs import chips
from tgl.cutlass_kernels.runtime import device
from tgl.meta.specs import TensorSpec
from tgl.nn._inputs import offsets_on
from tgl.testing import SIGNATURES
from tgl.testing.signatures import overload

T, K, N, G = 16, 32, 64, 4
OPERANDS = torch.zeros(T, K), torch.zeros(G, K, N), torch.zeros(G, dtype=torch.int32)
OUT = torch.empty(T, N)


@pytest.fixture
def cuda(monkeypatch):
    """Fake CUDA tensors of an sm_103 without the kernels' compiler; return a function that makes operands."""
    mode = FakeTensorMode()
    monkeypatch.setattr(device, "packages_reason", lambda: "needs a package")
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_103" if device.type == "cuda" else device.type)

    def operands(dtype=torch.bfloat16, depth=K, width=N):
        with mode:
            return (
                torch.empty(T, depth, dtype=dtype, device="cuda"),
                torch.empty(G, depth, width, dtype=dtype, device="cuda"),
                torch.empty(G, dtype=torch.int32, device="cuda"),
            )

    with mode:
        yield operands
    backends.registry.forget_candidates()  # those of the fake device


def reasons(explanation):
    return {i.name: reason for i, reason in explanation.refused}


def test_cpu():
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    explanation = tgl.explain(tgl.grouped_gemm, a, b, offs)
    assert explanation.chosen.name == "loop of mm"
    assert not explanation.syncs
    title, runs, *_ = str(explanation).splitlines()
    assert title == "tgl::grouped_gemm on cpu (cpu)"
    assert runs.startswith("  runs loop of mm (small bfloat16 groups in batches; the loop of torch.nn.functional.")


PACKET = torch.ops.tgl.grouped_gemm


@pytest.mark.parametrize(
    "op", ["grouped_gemm", "tgl::grouped_gemm", tgl.grouped_gemm, PACKET, PACKET.default, PACKET.out]
)
def test_every_spelling_of_an_op(op):
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    assert tgl.explain(op, a, b, offs).op == "grouped_gemm"


def test_every_op_can_be_explained_on_the_cpu():
    for name, signatures in SIGNATURES.items():
        for sample in list(signatures[0].samples(dtypes=(torch.float32,), routings=("ragged_tail",)))[:1]:
            op = overload(name)
            args, kwargs = sample.call(op, sample.tensors())
            assert tgl.explain(op, *args, **kwargs).chosen is not None, name


def samples_of_every_op():
    """Yield a sample of every signature that is served on a CPU: name, op, and the arguments of a call."""
    for name, signatures in SIGNATURES.items():
        op = overload(name)
        for signature in signatures:
            for sample in list(signature.samples(dtypes=(torch.float32,), routings=("ragged_tail",)))[:1]:
                yield name, op, *sample.call(op, sample.tensors())


def test_the_parts_of_a_composition_are_the_ops_that_it_runs(monkeypatch):
    def seen(act):
        def acting(op, *args, **kwargs):
            nested.append(op)
            level.append(op)
            ran.extend([op] if len(level) == 2 else [])  # below the op itself
            try:
                return act(op, *args, **kwargs)
            finally:
                level.pop()

        return acting

    compositions = {}
    for name, op, args, kwargs in samples_of_every_op():
        explanation = tgl.explain(op, *args, **kwargs)
        if explanation.chosen.parts is None:
            assert explanation.parts == ()
            continue
        ran, level, nested = [], [], []
        with monkeypatch.context() as patched:
            patched.setattr(backends, "run", seen(backends.run))
            patched.setattr(backends, "produce", seen(backends.produce))
            op(*args, **kwargs)
        assert [part.op for part in explanation.parts] == ran, name
        assert all(part.device.type == "cpu" and part.chosen is not None for part in explanation.parts)
        compositions[name] = len(nested)
    assert {
        "moe",
        "moe_backward_hidden",
        "moe_backward_input",
        "grouped_mlp",
        "grouped_gemm_activation",
        "group_requantize",
    } <= compositions.keys()
    assert compositions["moe"] > 5  # ops of its ops


def test_a_composition_syncs_where_a_part_does(cuda):
    for dtype, syncs in ((torch.float32, True), (torch.bfloat16, False)):
        a, b, offs = cuda(dtype, width=2 * N)
        second = torch.empty(G, N, K, dtype=dtype, device="cuda")
        explanation = tgl.explain(tgl.grouped_mlp, a, b, second, offs)
        assert [part.op for part in explanation.parts] == ["grouped_gemm_activation", "grouped_gemm"]
        assert [part.syncs for part in explanation.parts] == [syncs, syncs]
        assert explanation.syncs == syncs
        assert not explanation.batch_invariant


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="`offs` must be int32"):
        tgl.explain("grouped_gemm", torch.ones(T, K), torch.ones(G, K, N), torch.ones(G))
    with pytest.raises(ValueError, match=r"`op` must be one of .*grouped_gemm.*, but got 'matmul'"):
        tgl.explain("matmul")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_our_kernels_come_first(cuda, monkeypatch, arch, dtype):
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: arch)
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    explanation = tgl.explain(tgl.grouped_gemm, *cuda(dtype))
    assert explanation.chosen.name == "tgl kernel"
    assert not explanation.syncs
    assert tgl.explain(tgl.grouped_dbias, cuda(dtype)[0], cuda(dtype)[2]).chosen.name == "tgl kernel"


def test_requantising_needs_both_of_its_ops(cuda, monkeypatch):
    offs = cuda()[2]
    data, scale = torch.empty(T, K, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(len(offs), device="cuda")
    monkeypatch.setattr(device, "packages_reason", lambda: None)
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_75")
    explanation = tgl.explain("group_requantize", data, scale, offs, format="fp8_tensor")
    assert explanation.chosen is None
    built = ", ".join(sorted(chips()))
    assert f"no group_dequantize: tgl kernel: built for {built}" in reasons(explanation)["through float32"]
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_90")
    assert tgl.explain("group_requantize", data, scale, offs, format="fp8_tensor").chosen.name == "through float32"
    narrow = torch.empty(T, 7, dtype=torch.float8_e4m3fn, device="cuda")
    assert tgl.explain("group_requantize", narrow, scale, offs, format="fp8_tensor").chosen.name == "through float32"


def test_our_kernels_name_the_package_they_miss(cuda, monkeypatch):
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: "sm_90")
    monkeypatch.setattr(device, "packages_reason", lambda: "needs the package nvidia-cutlass-dsl")
    explanation = tgl.explain(tgl.grouped_gemm, *cuda(width=2 * N))
    assert explanation.chosen.name == "aten grouped_mm"
    assert reasons(explanation)["tgl kernel"] == "needs the package nvidia-cutlass-dsl"


def test_bfloat16_without_our_kernels_takes_grouped_mm(cuda):
    explanation = tgl.explain(tgl.grouped_gemm, *cuda())
    assert explanation.chosen.name == "aten grouped_mm"
    assert not explanation.syncs
    assert "loop of mm: lower priority" in str(explanation)
    a, _, offs = cuda()
    wgrad = tgl.explain(tgl.grouped_gemm_wgrad, a, torch.empty(T, N, dtype=torch.bfloat16, device="cuda"), offs)
    assert wgrad.chosen.name == "aten grouped_mm"
    assert not wgrad.syncs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_dtypes_use_the_loop_and_sync(cuda, dtype):
    explanation = tgl.explain(tgl.grouped_gemm, *cuda(dtype))
    assert explanation.chosen.name == "loop of mm"
    assert explanation.syncs
    assert "syncs with the host" in str(explanation)
    assert reasons(explanation)["aten grouped_mm"] == f"takes bfloat16 only, got {dtype} -> {dtype}"


def test_reasons_against_grouped_mm(cuda):
    a, b, offs = cuda()
    bias = torch.empty(G, N, dtype=torch.bfloat16, device="cuda")

    def why(*args, **kwargs):
        explanation = tgl.explain(tgl.grouped_gemm, *args, **kwargs)
        assert explanation.chosen.name == "loop of mm"
        return reasons(explanation)["aten grouped_mm"]

    assert why(a, b, offs, bias) == "has no bias epilogue (adding it afterwards would round twice)"
    assert "takes bfloat16 only" in why(a, b, offs, out_dtype=torch.float32)
    assert why(torch.empty(0, K, dtype=torch.bfloat16, device="cuda"), b, offs) == "does not take empty operands"
    odd = cuda(depth=31)
    assert "needs `a` with one unit stride and all others multiples of 16 bytes, got strides (31, 1)" in why(*odd)
    assert "needs `b`" in why(*cuda(width=31))
    expanded = torch.empty_strided((T, K), (1, 0), dtype=torch.bfloat16, device="cuda")
    assert "needs `a` with one unit stride" in why(expanded, b, offs)


def test_a_misaligned_operand(cuda):
    _, b, offs = cuda()
    a = torch.empty(T * K + 4, dtype=torch.bfloat16, device="cuda").as_strided((T, K), (K, 1), 4)
    assert reasons(tgl.explain(tgl.grouped_gemm, a, b, offs))["aten grouped_mm"] == "needs `a` aligned to 16 bytes"


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_older_devices_use_the_loop(cuda, monkeypatch, arch):
    monkeypatch.setattr(backends.target, "cuda_arch", lambda device: arch)
    explanation = tgl.explain(tgl.grouped_gemm, *cuda())
    assert explanation.chosen.name == "loop of mm"
    assert "this device is " + arch in reasons(explanation)["aten grouped_mm"]
    assert f"on cuda:0 ({arch})" in str(explanation)


def test_without_any_cuda_device(monkeypatch):
    """Calls on fake CUDA tensors can be explained on a machine without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends.target.cuda_arch.cache_clear()
    with FakeTensorMode():
        dy, offs = torch.empty(T, N, device="cuda"), torch.empty(G, dtype=torch.int32, device="cuda")
        explanation = tgl.explain(tgl.grouped_dbias, dy, offs)
    backends.target.cuda_arch.cache_clear()
    assert explanation.syncs
    assert str(explanation).startswith("tgl::grouped_dbias on cuda:0 (no such device here)\n  runs loop of sums")


def test_a_cuda_build_without_a_driver(cuda, monkeypatch):
    """PyPI's PyTorch for Linux is built for CUDA, so that every CUDA query without a driver raises."""

    def no_driver(*args):
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_current_stream_capturing", "current_stream", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, no_driver)
    a, b, offs = cuda(torch.float32)
    assert tgl.explain(tgl.grouped_gemm, a, b, offs).chosen.name == "loop of mm"
    assert tgl.explain(tgl.grouped_gemm_wgrad, a, a, offs).syncs
    assert tgl.explain(tgl.grouped_dbias, a, offs).syncs
    assert offsets_on([2, 0, 3, 1], G, a.device).device == a.device


def test_graph_capture(cuda, monkeypatch):
    """Under capture an implementation that reads offs on the host is refused, with a named error if none is left."""
    monkeypatch.setattr(backends.target, "capturing", lambda device: device.type == "cuda")
    assert tgl.explain(tgl.grouped_gemm, *cuda()).chosen.name == "aten grouped_mm"
    a, b, offs = cuda(torch.float32)
    explanation = tgl.explain(tgl.grouped_gemm, a, b, offs)
    assert explanation.chosen is None
    assert reasons(explanation)["loop of mm"] == "reads offs on the host, which CUDA graph capture forbids"
    assert "no implementation" in str(explanation)
    with pytest.raises(tgl.GraphCaptureError, match=r"tgl::grouped_gemm cannot be captured in a CUDA graph") as error:
        backends.run("grouped_gemm", a.device, *OPERANDS, None, None, out=OUT, zero_tail=True)
    assert "loop of mm: reads offs on the host" in str(error.value)
    assert "aten grouped_mm: takes bfloat16 only" in str(error.value)


def test_no_implementation_lists_the_reasons():
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    (builtin,) = [i for i in backends.registry.implementations["grouped_gemm", "cpu"] if i.name == "loop of mm"]
    backends.remove(builtin)
    try:
        with pytest.raises(tgl.NoImplementationError, match=r"tgl::grouped_gemm on cpu \(cpu\)\n  no implementation"):
            tgl.grouped_gemm(a, b, offs)
    finally:
        backends.add(builtin)
    assert tgl.grouped_gemm(a, b, offs).any()


def test_an_implementation_of_ones_own():
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    plain = tgl.grouped_gemm(a, b, offs)

    def supports(a, b, offs, bias, bias_scale, *, out, zero_tail):
        return None if a.dtype == torch.float32 else f"takes float32 only, got {a.dtype}"

    @tgl.register_implementation("grouped_gemm", "mine", device="cpu", supports=supports, note="for the test")
    def mine(a, b, offs, bias, bias_scale, *, out, zero_tail):
        out.fill_(123)

    try:
        explanation = tgl.explain(tgl.grouped_gemm, a, b, offs)
        assert explanation.chosen is mine
        assert "  runs mine (for the test)" in str(explanation)
        assert "  not  loop of mm: lower priority" in str(explanation)
        assert (tgl.grouped_gemm(a, b, offs) == 123).all()
        refused = tgl.explain(tgl.grouped_gemm, a.double(), b.double(), offs)
        assert refused.chosen.name == "loop of mm"
        assert reasons(refused)["mine"] == "takes float32 only, got torch.float64"
        assert torch.equal(tgl.grouped_gemm(a.double(), b.double(), offs), plain.double())
    finally:
        backends.remove(mine)
    assert tgl.explain(tgl.grouped_gemm, a, b, offs).chosen.name == "loop of mm"
    assert torch.equal(tgl.grouped_gemm(a, b, offs), plain)


def test_an_implementation_that_looks_a_call_up_itself():
    """Check and run in one method."""

    class Mine(backends.Implementation):
        def serve(self, device, args, kwargs):
            if args[0].shape[0] != 4:
                return "takes 4 rows"
            kwargs["out"].fill_(123)
            return None

    dy, offs = torch.ones(4, 2), torch.tensor([4], dtype=torch.int32)
    mine = backends.add(Mine("grouped_dbias", "mine", "cpu", None, priority=10))
    try:
        assert (tgl.grouped_dbias(dy, offs) == 123).all()
        assert (tgl.grouped_dbias(dy[:3], offs) == 3).all()
    finally:
        backends.remove(mine)


def test_an_implementation_that_makes_its_output():
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)

    def run(*args, out, zero_tail):
        out.fill_(-1)

    def produce(spec, *args, zero_tail):
        return torch.full(spec.shape, 123, dtype=spec.dtype)

    mine = backends.Implementation("grouped_gemm", "mine", "cpu", run, priority=10, produce=produce)
    backends.add(mine)
    try:
        assert (tgl.grouped_gemm(a, b, offs, out_dtype=torch.bfloat16) == 123).all()
        assert (tgl.grouped_gemm(a, b, offs, out=torch.empty(T, N)) == -1).all()
    finally:
        backends.remove(mine)


def test_memory_of_a_rejected_output_is_freed():
    """Memory of a refused output is freed before an implementation that makes its outputs itself."""
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    stores, expired = [], []

    def supports(*args, out, zero_tail):
        stores.append(StorageWeakRef(out.untyped_storage()))
        return "takes nothing"

    def produce(spec, operands, *, zero_tail):
        expired.append(stores[0].expired())
        return spec.empty()

    made = [
        backends.Implementation("grouped_gemm", "refuses", "cpu", print, supports, priority=11),
        backends.Implementation("grouped_gemm", "makes", "cpu", None, priority=10, produce=produce),
    ]
    for implementation in made:
        backends.add(implementation)
    try:
        tgl.grouped_gemm(a, b, offs)
    finally:
        for implementation in made:
            backends.remove(implementation)
    assert expired == [True]


def test_nothing_is_made_for_an_implementation_that_declines(monkeypatch):
    """An implementation declines by the positional arguments, before outputs are allocated."""
    a, b, offs = torch.ones(T, K), torch.ones(G, K, N), torch.tensor([4, 8, 8, 16], dtype=torch.int32)
    made, asked, allocate = [], [], TensorSpec.empty

    def supports(*args, out, zero_tail):
        asked.append(args)
        return "is asked"

    def declines(args):
        return "takes 4 rows" if args[0].shape[0] != 4 else None

    monkeypatch.setattr(TensorSpec, "empty", lambda spec: made.append(spec) or allocate(spec))
    choosy = backends.Implementation("grouped_gemm", "choosy", "cpu", print, supports, priority=10, declines=declines)
    backends.add(choosy)
    try:
        plain = tgl.grouped_gemm(a, b, offs)
        assert torch.equal(tgl.grouped_gemm(a, b, offs, out=torch.empty(T, N)), plain)
        assert made == asked == []
        assert (choosy, "takes 4 rows") in tgl.explain(tgl.grouped_gemm, a, b, offs).refused
        made.clear()
        tgl.grouped_gemm(a[:4], b, offs[:1].expand(G).contiguous())
        assert len(made) == len(asked) == 1
    finally:
        backends.remove(choosy)


def test_priorities_and_replacement():
    made = []

    def register(name, priority):
        def run(dy, offs, *, out):
            out.fill_(priority)

        made.append(tgl.register_implementation("grouped_dbias", name, device="cpu", priority=priority)(run))

    dy, offs = torch.ones(4, 2), torch.tensor([4], dtype=torch.int32)
    try:
        for name, priority in (("low", -5), ("high", 30), ("middle", 20)):
            register(name, priority)
        explanation = tgl.explain(tgl.grouped_dbias, dy, offs)
        assert explanation.chosen.name == "high"
        assert [i.name for i in explanation.unasked] == ["middle", "loop of sums", "low"]
        register("high", 10)
        assert tgl.explain(tgl.grouped_dbias, dy, offs).chosen.name == "middle"
        assert (tgl.grouped_dbias(dy, offs) == 20).all()
    finally:
        for implementation in made:
            backends.remove(implementation)
    assert (tgl.grouped_dbias(dy, offs) == 4).all()


def test_an_unknown_op_cannot_be_served():
    with pytest.raises(ValueError, match="`op` must be one of"):
        tgl.register_implementation("matmul", "mine", device="cpu")(lambda: None)


def test_an_implementation_for_a_new_device_type():
    """A device type that nothing served before gets the ops' kernels; here one without any memory behind it."""
    before = tgl.explain(tgl.splits_to_offsets, torch.ones(3, dtype=torch.int64)).chosen

    @tgl.register_implementation("splits_to_offsets", "mine", device="xpu")
    def mine(m_splits, *, out):
        raise AssertionError("not called")

    try:
        assert torch._C._dispatch_has_kernel_for_dispatch_key("tgl::splits_to_offsets", "XPU")
        assert tgl.explain(tgl.splits_to_offsets, torch.ones(3, dtype=torch.int64)).chosen is before
    finally:
        backends.remove(mine)


def test_ops_that_nothing_serves_without_the_host_are_kept_out_of_cuda_graphs():
    """A tag keeps them out; any other op may be captured, and raises ``GraphCaptureError`` where it would sync.

    Overloads that ask the engine of a backward have the tag for what they ask, whatever serves them.
    """
    serving = {op: found for (op, where), found in backends.registry.implementations.items() if where == "cuda"}
    always = {op for op, found in serving.items() if all(i.syncs for i in found)}
    tagged = {
        name
        for name, packet in ((op, getattr(torch.ops.tgl, op)) for op in serving if hasattr(torch.ops.tgl, op))
        for form in packet.overloads()
        if form != "requested" and torch.Tag.cudagraph_unsafe in getattr(packet, form).tags
    }
    assert tagged == always
