"""compute-sanitizer over a small problem in every tiling, over the other kernels, and over a compiled training step.

    python -m tests.gpu.sanitize [--tool racecheck] [--seconds 200] [--cases training]

Each runs in a process of its own, one per core at a time. Operands are made and results compared on the host, so that
the sanitizer has no kernels to watch but ours, and these were compiled before. A training step runs as its graph does,
with every kernel in it, and without the caching allocator, behind whose blocks an access out of bounds would hide.
Exits with the number of those that were not found clean.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import glob
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import cute_emulator
import tgl
from tests import chips, demo_training, router_cases
from tests.cutlass_kernels.matrix import TILINGS
from tests.demo_training import Size
from tests.kernel_cases import ends, gradient, integers, product, row_sums
from tests.memory import same_bytes
from tests.ranks_on_one_device import world
from tgl import backends
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.gemm.sm90.tilings import SYMMETRIC_COSTS
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.formats import FORMATS

SIZES = (130, 0, 3, 65)
MANY = (3000, 0, 3, 1330)  # rows enough for a ring, and for a group in several tiles of a reduction
TAIL, DEPTH, COLUMNS = 5, 136, 264
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
TRAINING = "training"


def gemms(tiling: GemmConfig) -> None:
    """The three GEMMs in one tiling."""
    tilings.choose = lambda *_: tiling  # type: ignore[assignment]
    launcher.forget()
    rows = sum(SIZES) + TAIL
    a, b, dy = integers(rows, DEPTH), integers(len(SIZES), DEPTH, COLUMNS), integers(rows, COLUMNS)
    offs, y, dw = ends(SIZES).to(DEVICE), product(a, b, SIZES).to(BF16), gradient(a, dy, SIZES)
    ours = [
        torch.zeros_like(y).to(DEVICE),
        torch.zeros(dw.shape, dtype=BF16).to(DEVICE),
        torch.ones(dw.shape).to(DEVICE),
    ]
    left, right = a.to(DEVICE), dy.to(DEVICE)
    tgl.grouped_gemm(left, b.to(DEVICE), offs, out=ours[0])
    tgl.grouped_gemm_wgrad(left, right, offs, out=ours[1])
    tgl.grouped_gemm_wgrad_accumulate_(left, right, offs, ours[2])
    for got, wanted in zip(ours, (y, dw.to(BF16), dw.float() + 1)):
        assert torch.equal(got.cpu(), wanted)


def gathers() -> None:
    """The three GEMMs on rows by an index, half of the tokens unread."""
    rows, tokens = sum(SIZES) + TAIL, 50
    a, b, dy = integers(tokens, DEPTH), integers(len(SIZES), DEPTH, COLUMNS), integers(rows, COLUMNS)
    grad = integers(tokens, COLUMNS)
    index = torch.randint(0, tokens // 2, (rows,), dtype=torch.int32)
    index[sum(SIZES) :] = -1
    given = {
        name: t.to(DEVICE) for name, t in {"a": a, "dy": dy, "grad": grad, "index": index, "offs": ends(SIZES)}.items()
    }
    on, offs = given["index"], given["offs"]
    y = tgl.grouped_gemm(given["a"], b.to(DEVICE), offs, rows=on)
    dw = tgl.grouped_gemm_wgrad(given["a"], given["dy"], offs, a_rows=on)
    in_order = a[index.clamp(min=0).long()]
    other = tgl.grouped_gemm_wgrad(in_order.to(DEVICE), given["grad"], offs, b_rows=on)
    assert torch.equal(y.cpu()[: sum(SIZES)], product(in_order, b, SIZES)[: sum(SIZES)].to(BF16))
    assert torch.equal(dw.cpu(), gradient(in_order, dy, SIZES).to(BF16))
    assert torch.equal(other.cpu(), gradient(in_order, grad[index.clamp(min=0).long()], SIZES).to(BF16))


def reductions() -> None:
    """Offsets, sums of rows of few columns and of many, and choices grouped by expert."""
    sizes = torch.tensor(MANY)
    offs = tgl.splits_to_offsets(sizes.to(DEVICE))
    assert torch.equal(offs.cpu(), sizes.cumsum(0).int())
    for columns in (136, 768):
        dy = integers(sum(MANY) + TAIL, columns)
        assert torch.equal(tgl.grouped_dbias(dy.to(DEVICE), offs).cpu().double(), row_sums(dy, MANY))
    for tokens in (100, 1500):  # one launch and two
        index = torch.randint(-1, 130, (tokens, 4))
        as_on_the_host("route", index, 128)


def index_of_rows(tokens: int) -> torch.Tensor:
    """A token for every row, of the first half of them; none for rows of the tail."""
    made = torch.randint(0, tokens // 2, (sum(SIZES) + TAIL,), dtype=torch.int32)
    made[sum(SIZES) :] = -1
    return made


def on_the_host(op: Callable, *args: Any, **options: Any) -> Any:
    """Return the results of a CPU, while one is emulated as a device too."""
    with backends.emulated_device("none"):
        return op(*args, **options)


def as_on_the_host(op: str, *args: Any, **options: Any) -> None:
    """The op on the device gives what it gives on a CPU: codes to the byte, numbers but for the sign of a zero."""
    given = (a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args)
    table = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    run = getattr(torch.ops.tgl, op)
    for ours, theirs in zip(run(*given, **table), on_the_host(run, *args, **options), strict=True):
        same = torch.equal if theirs.dtype in (BF16, torch.float32) else same_bytes
        assert same(ours.cpu(), theirs)


def gathered_activation() -> None:
    """A product on rows by an index, with its activation."""
    x, w, probs = integers(50, DEPTH), integers(len(SIZES), DEPTH, 272), integers(sum(SIZES) + TAIL)
    index = index_of_rows(len(x))
    as_on_the_host("grouped_gemm_activation", x, w, ends(SIZES), None, probs, index, kind="reglu")


def gathered_gradient() -> None:
    """A product back through the activation, on rows by an index and in order."""
    rows = sum(SIZES) + TAIL
    w, h, probs = integers(len(SIZES), DEPTH, 136), integers(rows, 272), integers(rows)
    for tokens, index in ((50, index_of_rows(50)), (rows, None)):
        as_on_the_host(
            "grouped_gemm_dactivation", integers(tokens, DEPTH), w, h, ends(SIZES), probs, index, kind="reglu"
        )


def gathered_quantisation() -> None:
    """Rows by an index, quantised in both directions."""
    x = torch.randn(50, 256).to(BF16)
    for name in FORMATS:
        as_on_the_host("group_quantize", x, ends(SIZES), rows=index_of_rows(len(x)), format=name)


def router() -> None:
    """Experts, weights, sums and gradients, of groups with a bias too."""
    for name in ("qwen3", "deepseek-v3, sums"):
        case = router_cases.CASES[name]
        logits, bias = router_cases.operands(case, 300, torch.float32)
        grad, *sums = router_cases.cotangents(case, 300, torch.float32)
        place = functools.partial(torch.Tensor.to, device=DEVICE)
        made = torch.ops.tgl.topk_router(
            place(logits), case.top_k, bias if bias is None else place(bias), **case.options
        )
        wanted = on_the_host(torch.ops.tgl.topk_router, logits, case.top_k, bias, **case.options)
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-30)
        options = router_cases.weighing(case)
        back = torch.ops.tgl.topk_router_backward(place(grad), place(logits), made[1], *map(place, sums), **options)
        theirs = on_the_host(torch.ops.tgl.topk_router_backward, grad, logits, wanted[1], *sums, **options)
        torch.testing.assert_close(back.cpu(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def combining_backward() -> None:
    """Gradients of rows and weights, of choices some of which are no expert's."""
    routing = tgl.route(torch.randint(-1, 5, (300, 4)), 5)
    rows = len(routing.token)
    given = integers(300, DEPTH), integers(rows, DEPTH), routing.token, routing.position, 4
    as_on_the_host("combine_backward", *given, integers(300, 4))


def few_choices() -> None:
    """The small-M block, whose launches overlap, each after the launch that wrote its operands."""
    index = torch.tensor([[1, 3], [0, 3], [3, 2]])
    routing = tgl.route(index, 5)
    x, w1, w2 = integers(3, 64).sign(), integers(5, 64, 64).sign(), integers(5, 32, 72)
    x[:, 8:] = 0  # activations of 8 bits, and sums that are exact in any order
    given = x, w1, w2, routing.source, routing.position, routing.token, routing.offs, integers(3, 2)
    as_on_the_host("moe", *given, top_k=2, kind="reglu")


def packed_few_rows() -> None:
    """Rows times packed FP4, decoded on the way to the tensor cores."""
    x, offs = integers(40, 128), ends((3, 0, 30, 1))
    for name in ("mxfp4", "nvfp4"):
        w = tgl.group_quantize(integers(4, 264, 128), None, format=name)
        amax = (w.amax.to(DEVICE),) if name == "nvfp4" else ()
        op = functools.partial(torch.ops.tgl.grouped_gemm_packed, format=name)
        ours = op(x.to(DEVICE), w.data.to(DEVICE), w.scale.to(DEVICE), offs.to(DEVICE), *amax)
        wanted = on_the_host(op, x, w.data, w.scale, offs, *(a.cpu() for a in amax))
        torch.testing.assert_close(ours.cpu(), wanted, rtol=2.0**-7, atol=2.0**-7 * wanted.abs().max().item())


def symmetric_products() -> None:
    """Matrices times their transposes, in every tiling of a triangle."""
    x, c = integers(3, 264, 136), integers(3, 264, 264)
    c = c.tril() + c.tril(-1).mT
    wanted = (x.double() @ x.double().mT - 2 * c.double()).to(BF16)
    for tiling in SYMMETRIC_COSTS:
        tilings.choose_symmetric = lambda *_, tiling=tiling: tiling  # type: ignore[misc]
        launcher.forget()
        assert torch.equal(tgl.batched_syrk(x.to(DEVICE), c.to(DEVICE), beta=-2.0).cpu(), wanted)


def scales_of_tokens() -> None:
    """Rowwise scales of tokens, laid out as those of their rows."""
    scale, rows = torch.randint(1, 255, (50, 8), dtype=torch.uint8), index_of_rows(50)
    options = {"shape": (len(rows), 256), "layout": "blocked", "format": "mxfp8"}
    op = torch.ops.tgl.scale_to_layout
    ours = op(scale.to(DEVICE), ends(SIZES).to(DEVICE), rows.to(DEVICE), **options)
    assert same_bytes(ours.cpu(), on_the_host(op, scale, ends(SIZES), rows, **options))


def exchange() -> None:
    """The ops of expert parallelism over the memory of a group, of one rank: tokens, bytes, and back."""
    rows, choices = 60, 2
    place = functools.partial(torch.Tensor.to, device=DEVICE)
    with world(1, [(rows, DEPTH, torch.float32), (rows, choices, torch.float32)], DEVICE.type) as made:
        machine = cute_emulator.active()
        if machine is not None:
            machine.register(made.room)
        group = {"group_name": made.names[0], "engine": "symmetric_memory"}
        index, weights, x = torch.rand(rows, 8).topk(choices).indices, integers(rows, choices), integers(rows, DEPTH)
        sizes = {"group_size": 1, "pair_rows": rows, "expert_rows": rows * choices}
        position, token, chosen, _ = torch.ops.tgl.ep_route(place(index), 8, **sizes, **group)
        assert torch.equal(chosen.cpu(), index.int())
        codes = torch.randint(256, (rows, 144), dtype=torch.uint8)
        for sent, beside in ((x, weights), (codes, None)):
            on_device = None if beside is None else place(beside)
            arrived, arrived_weights = torch.ops.tgl.ep_dispatch(place(sent), on_device, token, position, 1, **group)
            assert torch.equal(arrived.cpu(), sent)
            assert beside is None or torch.equal(arrived_weights.cpu(), beside)
        back, _ = torch.ops.tgl.ep_combine(place(x), None, token, position, 1, **group)
        assert torch.equal(back.cpu(), x)


def training(recipe: str) -> None:
    """Forward and backward of the demo's model, compiled."""
    size = Size(dim=256, layers=2, experts=32, context=256, windows=2, steps=1)
    model = demo_training.make_model(recipe, size).cuda()
    windows = demo_training.batches(size)[0].cuda()
    demo_training.backward(demo_training.compiled(model), windows, BF16)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


BODIES = (
    reductions,
    gathers,
    gathered_activation,
    gathered_gradient,
    gathered_quantisation,
    router,
    combining_backward,
    few_choices,
    packed_few_rows,
    symmetric_products,
    scales_of_tokens,
    exchange,
)


def cases() -> dict[str, Callable[[], None]]:
    arch = chips.arch()
    assert arch is not None, "needs a device that the kernels are built for"
    found: dict[str, Callable[[], None]] = {body.__name__.replace("_", " "): body for body in BODIES}
    for recipe in chips.RECIPES[arch]:
        found[f"{TRAINING} {recipe}"] = functools.partial(training, recipe)
    for kind, tiling in TILINGS:
        if kind == arch:
            name = f"{tiling.tile_m}x{tiling.tile_n}" + "x2" * (tiling.ctas == 2) + "pp" * tiling.pingpong
            found[name] = functools.partial(gemms, tiling)
    return found


def one(name: str) -> None:
    cases()[name]()


def sanitizer() -> str:
    """Path of compute-sanitizer."""
    path = shutil.which("compute-sanitizer")
    for place in () if path else sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")):
        path = place
    if path is None:
        raise SystemExit("needs compute-sanitizer, of the CUDA toolkit")
    return path


def watched(path: str, tool: str, name: str, seconds: float) -> str:
    """Return the sanitizer's report about a case."""
    start = time.monotonic()
    command = [path, "--tool", tool, sys.executable, "-m", __spec__.name, "--only", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name.startswith(TRAINING) else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return f"not finished in {seconds:.0f} s"
    lines = done.stdout.splitlines()
    said = [line.strip("= ") for line in lines if "SUMMARY" in line] or [(done.stdout + done.stderr)[-300:]]
    if done.returncode == 0 and all(" 0 " in line for line in said):
        return f"clean, {time.monotonic() - start:.0f} s"
    details = [line for line in lines if line.startswith("========= ") and "SUMMARY" not in line]
    return "\n    ".join([*said, *details[:12]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="racecheck", choices=["racecheck", "memcheck", "synccheck", "initcheck"])
    parser.add_argument("--seconds", type=float, default=180, help="for the sanitizer, each case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--cases", default="", help="only those whose names begin so")
    parser.add_argument("--only", help="run this case, without the sanitizer")
    args = parser.parse_args()
    if args.only:
        one(args.only)
        return
    path, names = sanitizer(), [name for name in cases() if name.startswith(args.cases)]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(one, names))  # compiles, into the cache on disk
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as threads:
        found = {threads.submit(watched, path, args.tool, name, args.seconds): name for name in names}
        for future in concurrent.futures.as_completed(found):
            bad += not future.result().startswith("clean")
            print(f"{args.tool} {found[future]:>12}: {future.result()}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
