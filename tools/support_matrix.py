"""Writes the matrix of docs/support.md: what serves every op in every format on every chip, and how that was verified.

    python -m tools.support_matrix [--check]

What serves a call is what ``tgl.explain`` says of it on a device that pretends to be the chip. A kernel is verified in
the emulator if the test that ``EMULATED`` names is parametrised with the chip, and on hardware if ``HARDWARE`` says so;
where the format is emulated, ``FORMATS_EMULATED`` and ``FORMATS_ON_HARDWARE`` say it.
``--check`` writes nothing, and fails where the page is not what the command writes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tgl import backends
from tgl.cutlass_kernels.archs import arch_of, chips
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN, END = "<!-- written by python -m tools.support_matrix -->\n", "<!-- end -->"
DENSE = "bfloat16"
BY_ROWS = "fp8, a scale for each row"
INT = torch.int32
# Ops of a training step by which the first table tells a format.
STEP = {"grouped_gemm", "grouped_gemm_wgrad", "group_quantize", "grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"}
KERNEL, COMPOSED, EMULATION, STEPS = "kernel", "composed", "emulated", "steps"
UNTRIED = {KERNEL: "compiled", EMULATION: f"{EMULATION}, untried"}
"""What no test has run is called so."""

CARDS = OnePerName(
    chips(),
    "CARDS in tools/support_matrix.py",
    {
        "sm_80": "A100",
        "sm_86": "RTX 3090, A40",
        "sm_89": "RTX 4090, L40",
        "sm_90": "H100, H200",
        "sm_100": "B200",
        "sm_103": "B300",
        "sm_120": "RTX 5090, RTX PRO 6000",
        "sm_121": "DGX Spark",
    },
)


class Test(NamedTuple):
    """A test on the emulator: its module in ``tests/cutlass_kernels``, its name, and chips if no parameter has them."""

    module: str
    name: str
    chips: tuple[str, ...] = ()


_DENSE = Test("test_every_chip", "test_it_runs_as_compiled_for_the_chip")
_BYTES = Test("test_every_chip", "test_it_writes_the_bytes_of_the_cpu")
_SCALED = Test("test_gemm_scaled", "test_ops_run_one_kernel_each")

EMULATED: dict[str, Test] = {
    **dict.fromkeys(
        (
            "grouped_gemm",
            "grouped_gemm_wgrad",
            "grouped_gemm_wgrad_accumulate_",
            "grouped_gemm_low_rank",
            "grouped_gemm_activation",
            "grouped_gemm_low_rank_activation",
            "grouped_gemm_dactivation",
            "batched_syrk",
            "grouped_activation",
            "grouped_activation_backward",
            "grouped_dbias",
            "grouped_dbias_dscales",
            "route",
            "splits_to_offsets",
            "dispatch",
            "combine",
            "combine_backward",
            "topk_router",
            "topk_router_backward",
        ),
        _DENSE,
    ),
    "group_quantize": _BYTES,
    "group_dequantize": _BYTES,
    "grouped_activation_quantize": _BYTES,
    "grouped_gemm_scaled": _SCALED,
    "grouped_gemm_scaled_wgrad": _SCALED,
    "grouped_gemm_scaled_activation_quantize": Test(
        "test_gemm_quantizing", "test_one_launch_with_the_bytes_of_two", ("sm_100",)
    ),
    "grouped_gemm_packed": Test("test_gemm_packed", "test_the_op_and_its_gradient_are_served"),
    **dict.fromkeys(
        ("grouped_gemm_row_scaled", "grouped_gemm_row_scaled_wgrad"),
        Test("test_gemm_row_scaled", "test_ops_run_one_kernel_each"),
    ),
}
"""By op, in the order of the page."""

FORMATS_EMULATED = Test("test_emulated_formats", "test_products_of_sources_that_are_exact")
"""What runs the GEMMs of a format that the tensor cores lack, from dense operands to the product."""

BLOCKS = ("grouped_mlp", "grouped_mlp_backward", "moe", "moe_backward_hidden", "moe_backward_input")
"""Ops that run others of the page."""

HARDWARE: dict[str, dict[str, str]] = {
    "sm_90": {
        **dict.fromkeys(("grouped_gemm", "grouped_gemm_wgrad", "grouped_gemm_wgrad_accumulate_"), "test_sm90"),
        **dict.fromkeys(("grouped_dbias", "grouped_dbias_dscales", "splits_to_offsets"), "test_sm90"),
        "grouped_gemm_activation": "test_gemm_activation",
        "grouped_gemm_dactivation": "test_dactivation",
        **dict.fromkeys(("grouped_activation", "grouped_activation_backward"), "test_activation"),
        "route": "test_route",
        **dict.fromkeys(("dispatch", "combine", "combine_backward"), "test_permutation"),
        **dict.fromkeys(("topk_router", "topk_router_backward"), "test_topk_router"),
        **dict.fromkeys(("grouped_gemm_low_rank", "grouped_gemm_low_rank_activation"), "test_low_rank"),
        "group_quantize": "test_quantize",
        "group_dequantize": "test_dequantize",
        "grouped_activation_quantize": "test_activation",
        **dict.fromkeys(("grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"), "test_scaled"),
        "grouped_gemm_packed": "test_packed",
        "batched_syrk": "test_batched_syrk",
    }
}
"""By chip, the ops whose kernels have passed a test of ``tests/gpu`` on one, and that test's module."""

FORMATS_ON_HARDWARE = {"sm_90": dict.fromkeys(("mxfp8", "nvfp4"), "test_training")}
"""By chip, the formats whose emulation models have been trained in on one, and the module of ``tests/gpu``."""


def dense(op: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple:
    """Arguments of an op on dense operands."""

    def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    rows, matrices, offs, places = made(256, 256), made(2, 256, 256), made(2, of=INT), made(256, of=INT)
    narrow, down, routing = made(256, 128), made(2, 128, 256), (places, places, places, offs)
    return {
        "grouped_gemm": (rows, matrices, offs),
        "grouped_gemm_wgrad": (rows, rows, offs),
        "grouped_gemm_wgrad_accumulate_": (rows, rows, offs, matrices),
        "grouped_gemm_low_rank": (rows, matrices, made(256, 16), made(2, 16, 256), offs),
        "grouped_gemm_activation": (rows, matrices, offs),
        "grouped_gemm_low_rank_activation": (rows, matrices, made(256, 16), made(2, 16, 256), offs),
        "grouped_gemm_dactivation": (rows, matrices, made(256, 512), offs),
        "batched_syrk": (matrices,),
        "grouped_activation": (rows, offs),
        "grouped_activation_backward": (made(256, 128), rows, offs),
        "grouped_dbias": (rows, offs),
        "grouped_dbias_dscales": (rows, made(2, 256), made(256), offs),
        "route": (places.view(128, 2), 2),
        "splits_to_offsets": (offs,),
        "dispatch": (rows, places, places, 1),
        "combine": (rows, places, places, 1),
        "combine_backward": (rows, rows, places, places, 1, made(256, 1, of=torch.float32)),
        "topk_router": (rows, 8),
        "topk_router_backward": (made(256, 8, of=torch.float32), rows, made(256, 8, of=INT)),
        "grouped_mlp": (rows, matrices, down, offs),
        "grouped_mlp_backward": (rows, rows, matrices, down, offs, rows, narrow),
        "moe": (rows, matrices, down, *routing),
        "moe_backward_hidden": (rows, down, *routing, rows),
        "moe_backward_input": (rows, rows, matrices, *routing[1:]),
    }[op]


def options_of(op: str) -> dict[str, Any]:
    """Options of an op on dense operands that have no default; gradients are those of rows and matrices."""
    wanted = {
        "grouped_mlp_backward": [True, True, True, False, False, False],
        "moe_backward_hidden": [True, True, False, False],
        "moe_backward_input": [True, True, False],
    }
    one_choice = {"top_k": 1} if op.startswith("moe") else {}
    return one_choice | ({"output_mask": wanted[op]} if op in wanted else {})


def by_rows(op: str, device: torch.device | str = "cpu") -> tuple:
    """Arguments of an op on FP8 operands whose rows have a scale each."""
    rows, matrices = (
        torch.zeros(size, dtype=torch.float8_e4m3fn, device=device) for size in ((256, 256), (2, 256, 256))
    )
    scales, of_groups = (torch.ones(size, device=device) for size in ((256,), (2, 256)))
    offs = torch.zeros(2, dtype=INT, device=device)
    return {
        "grouped_gemm_row_scaled": (rows, scales, matrices, of_groups, offs),
        "grouped_gemm_row_scaled_wgrad": (rows, of_groups, rows, of_groups, offs),
    }[op]


def quantised(op: str, form: str, device: torch.device | str = "cpu") -> tuple[tuple, dict[str, Any]]:
    """Arguments and options of an op on quantised operands; scales lie as the tensor cores have them."""
    rows, matrices = (torch.ones(size, dtype=torch.bfloat16, device=device) for size in ((256, 256), (2, 256, 256)))
    offs = torch.zeros(2, dtype=INT, device=device)
    facts = FORMATS[form]
    options: dict[str, Any] = {
        "format": form,
        "scale_layout": "blocked" if "blocked" in facts.layouts else "compact",
    }
    square = {"block_2d": True} if facts.square_scales else {}
    a, b = tgl.group_quantize(rows, offs, **options), tgl.group_quantize(matrices, None, **options, **square)
    amax = (a.amax, b.amax) if facts.decodes_with_amax else (None, None)
    columns = (a.columnwise_data, a.columnwise_scale)
    amaxes = (a.columnwise_amax,) * 2 if facts.decodes_with_amax else (None, None)
    gemm = (a.data, a.scale, b.data, b.scale, offs, *amax)
    if op == "grouped_gemm_packed":
        scale = tgl.group_quantize(matrices, None, format=form, **square).scale
        return (rows, b.data, scale, offs, amax[1]), {"format": form}
    total = torch.zeros(2, 256, 256, device=device)
    arguments = {
        "grouped_gemm_scaled": gemm,
        "grouped_gemm_scaled_wgrad": (*columns, *columns, offs, *amaxes),
        "grouped_gemm_scaled_wgrad_accumulate_": (*columns, *columns, offs, total, *amaxes),
        "group_quantize": (rows, offs),
        "group_dequantize": (a.data, a.scale, offs, amax[0]),
        "grouped_activation_quantize": (rows, offs),
        "grouped_gemm_scaled_activation_quantize": gemm,
    }[op]
    return arguments, options


def formats(op: str) -> tuple[str, ...]:
    """Those that an op has a row for."""
    names = {a.name for a in torch._C._get_schema(f"tgl::{op}", "").arguments}
    return tuple(FORMATS) if "format" in names else (BY_ROWS,) if "a_scale" in names else (DENSE,)


def rows() -> Iterator[tuple[str, str]]:
    """Format and op of every row."""
    for form in (DENSE, *FORMATS, BY_ROWS):
        yield from ((form, op) for op in (*EMULATED, *BLOCKS) if form in formats(op))


def call(op: str, form: str, device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """Arguments and options of a row."""
    if form == DENSE:
        return dense(op, torch.bfloat16, device), options_of(op)
    return (by_rows(op, device), {}) if form == BY_ROWS else quantised(op, form, device)


@contextlib.contextmanager
def pretended(chip: str) -> Iterator[torch.device]:
    """A CUDA device that says it is the chip, for fake tensors."""
    capability = int(chip[3:-1]), int(chip[-1])
    backends._cuda_arch.cache_clear()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        FakeTensorMode(),
    ):
        yield torch.device("cuda", 0)
    backends._cuda_arch.cache_clear()
    backends._forget_candidates()


def parameters(test: Test) -> list[dict[str, str]]:
    """What a test is parametrised with: of every mark the values that are strings, by name."""
    function = getattr(importlib.import_module(f"tests.cutlass_kernels.{test.module}"), test.name)
    found = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
            for values in mark.args[1]:
                if hasattr(values, "marks"):
                    values = values.values
                elif len(names) == 1:
                    values = (values,)
                found.append({n: v for n, v in zip(names, values, strict=True) if isinstance(v, str)})
    return found


def emulated(test: Test, op: str, form: str, chip: str) -> bool:
    """Whether a test runs the op in the emulator, compiled for the chip; of 10.3 what runs for 10.0 counts."""
    wanted = {"op": (op,), "format": (form,), "chip": (chip, arch_of(chip).name), "arch": (chip, arch_of(chip).name)}

    def fits(values: dict[str, str]) -> bool:
        return all(value in wanted.get(name, (value,)) for name, value in values.items())

    tried = [values for values in parameters(test) if {"chip", "arch"} & values.keys()]
    return arch_of(chip).name in test.chips or any(map(fits, tried))


def served(found: backends.Explanation) -> str:
    """In a word."""
    assert found.chosen is not None
    if found.chosen.name == "tgl kernel":
        return KERNEL
    if found.chosen.emulates:
        return EMULATION
    parts = {served(part) for part in found.parts}
    made = COMPOSED if parts and parts <= {KERNEL, COMPOSED, EMULATION} else STEPS
    return f"{made}, {EMULATION}" if found.emulates else made


def verified(word: str, op: str, form: str, chip: str) -> str:
    """What serves a call, in bold where it ran on hardware, and said so where it ran nowhere."""
    on_hardware = {KERNEL: op in HARDWARE.get(chip, {}), EMULATION: form in FORMATS_ON_HARDWARE.get(chip, {})}
    if on_hardware[word]:
        return f"**{word}**"
    test = {KERNEL: EMULATED[op], EMULATION: FORMATS_EMULATED}[word]
    return word if emulated(test, op, form, chip) else UNTRIED[word]


def cells(chip: str) -> dict[tuple[str, str], str]:
    """By format and op what serves it on a chip, and how that was verified."""
    found = {}
    with pretended(chip) as device:
        for form, op in rows():
            args, options = call(op, form, device)
            found[form, op] = served(backends.explain(op, *args, **options))
    return {at: verified(word, at[1], at[0], chip) if word in UNTRIED else word for at, word in found.items()}


def tables() -> str:
    """What a training step in a format is on each chip, and all ops."""
    by_chip = {chip: cells(chip) for chip in chips()}
    names = {chip: f"{chip[3:-1]}.{chip[-1]}<br>{CARDS[chip]}" for chip in chips()}
    columns = (DENSE, *FORMATS)
    lines = ["| GPU | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for chip, found in by_chip.items():
        steps = ({found[form, op] for op in STEP if (form, op) in found} for form in columns)
        words = (", ".join(sorted({w for w in step if EMULATION in w} or step)) for step in steps)
        lines.append(f"| {names[chip]} | " + " | ".join(words) + " |")
    lines += ["", "| format | op | " + " | ".join(names.values()) + " |", "|---|---|" + "---|" * len(names)]
    for form, op in rows():
        lines.append(f"| {form} | `{op}` | " + " | ".join(found[form, op] for found in by_chip.values()) + " |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table that it should have."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="compare only")
    check = made.parse_args().check
    text = PAGE.read_text()
    if check and page(text) != text:
        sys.exit("docs/support.md is not what python -m tools.support_matrix writes")
    PAGE.write_text(page(text))


if __name__ == "__main__":
    main()
