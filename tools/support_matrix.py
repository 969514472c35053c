"""Write the matrix of docs/support.md: every op's implementation in every format on every chip, and its tests.

    python -m tools.support_matrix [--check]

The implementation of a call is the one that ``tgl.explain`` reports in compile-only mode for the chip. A kernel is
verified in the emulator if the test that ``EMULATED`` names is parametrised with the chip, and on hardware if
``HARDWARE`` lists it; for emulated formats ``FORMATS_EMULATED`` and ``FORMATS_ON_HARDWARE`` do.
``--check`` writes nothing, and fails where the page is not what the command writes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tgl import backends
from tgl.cutlass_kernels.archs import arch_of, chips
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing.signatures import OPS, ROW_WISE, options_of, sample_call

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BEGIN, END = "<!-- written by python -m tools.support_matrix -->\n", "<!-- end -->"
DENSE = "bfloat16"
BY_ROWS = "fp8, a scale for each row"
# Ops of a training step by which the first table tells a format.
STEP = {"grouped_gemm", "grouped_gemm_wgrad", "group_quantize", "grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"}
KERNEL, COMPOSED, EMULATION, STEPS = "kernel", "composed", "emulated", "steps"
UNTRIED = {KERNEL: "compiled", EMULATION: f"{EMULATION}, untried"}
"""Words for implementations that no test has run."""

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
"""The test of GEMMs on formats that the tensor cores lack, from dense operands to the product."""

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


def formats(op: str) -> tuple[str, ...]:
    """Return the formats that an op has a row for."""
    variants = OPS[op].variants
    return variants if variants[0] in FORMATS else (BY_ROWS,) if variants == (ROW_WISE,) else (DENSE,)


def rows() -> Iterator[tuple[str, str]]:
    """Format and op of every row."""
    for form in (DENSE, *FORMATS, BY_ROWS):
        yield from ((form, op) for op in (*EMULATED, *BLOCKS) if form in formats(op))


@functools.cache
def call(op: str, form: str) -> tuple[tuple, dict[str, Any]]:
    """Arguments and options of a row."""
    return sample_call(op, **options_of(form))


def parameters(test: Test) -> list[dict[str, str]]:
    """Return the parameters of a test: the string values of every mark, by name."""
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
    """Return whether a test runs the op in the emulator, compiled for the chip; tests of 10.0 count for 10.3."""
    wanted = {"op": (op,), "format": (form,), "chip": (chip, arch_of(chip).name), "arch": (chip, arch_of(chip).name)}

    def fits(values: dict[str, str]) -> bool:
        return all(value in wanted.get(name, (value,)) for name, value in values.items())

    tried = [values for values in parameters(test) if {"chip", "arch"} & values.keys()]
    return arch_of(chip).name in test.chips or any(map(fits, tried))


def served(found: backends.Explanation) -> str:
    """Return the implementation of a call as one word."""
    assert found.chosen is not None
    if found.chosen.name == "tgl kernel":
        return KERNEL
    if found.chosen.emulates:
        return EMULATION
    parts = {served(part) for part in found.parts}
    made = COMPOSED if parts and parts <= {KERNEL, COMPOSED, EMULATION} else STEPS
    return f"{made}, {EMULATION}" if found.emulates else made


def verified(word: str, op: str, form: str, chip: str) -> str:
    """Return the implementation of a call, in bold if it ran on hardware, with a note if it ran nowhere."""
    on_hardware = {KERNEL: op in HARDWARE.get(chip, {}), EMULATION: form in FORMATS_ON_HARDWARE.get(chip, {})}
    if on_hardware[word]:
        return f"**{word}**"
    test = {KERNEL: EMULATED[op], EMULATION: FORMATS_EMULATED}[word]
    return word if emulated(test, op, form, chip) else UNTRIED[word]


def cells(chip: str) -> dict[tuple[str, str], str]:
    """Return by format and op the implementation on a chip, and how it was verified."""
    calls = {(form, op): call(op, form) for form, op in rows()}
    with backends.compile_only(chip):
        found = {row: served(backends.explain(row[1], *args, **options)) for row, (args, options) in calls.items()}
    return {at: verified(word, at[1], at[0], chip) if word in UNTRIED else word for at, word in found.items()}


def tables() -> str:
    """Return the tables of a training step in each format on each chip, and of all ops."""
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
