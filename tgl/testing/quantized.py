"""Signatures of the ops on quantised operands, whose components are made by quantising small integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..meta import quantized
from ..meta.formats import E4M3, E5M2, FORMATS
from ..meta.quantized import OUT_NAMES, Options
from ..meta.table import OnePerName
from .samples import SampleInput, Signature, named_rows

DIMENSIONS = {"K": 40, "N": 24, "L": 3, "S": 6}
_GARBAGE = 0x5B
_NEVER = {name: "nothing" for name in ("offs", "scale", "row_scale", "rng", "slots", "rows")}
_INPUTS = (
    "x[{x}], offs[G]:{offs}, scale[G]:derived?, row_scale[T]?, rng[2]:derived?{noop}, slots[G]:derived{slots}, "
    "rows[T]:derived{rows}"
)
_OUTPUTS = (
    "data[{lead},K], scale[{scale},K], amax[{amax}], columnwise_data[{columnwise},K], columnwise_scale[P,K], "
    "columnwise_amax[{amax}], dbias[{dbias}]"
)
_BUFFERS = ", " + ", ".join(f"{name}[]:derived!" for name in OUT_NAMES)
_PLAIN: dict[str, Any] = {
    "differentiable": False,
    "dtypes": (torch.float32, torch.bfloat16, torch.float16),
    "dimensions": DIMENSIONS,
}


def _options(sample: SampleInput) -> Options:
    return Options(**sample.options).resolved("group_quantize")


def _quantize_arguments(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Make the optional arguments: scales, seeds, slots, rows, a flag that allows writing, and buffers full of garbage.

    Slots run from the last to the first, and out of range: most of many groups have none.
    """
    x, offs = made["x"], made["offs"]
    assert x is not None
    derived: dict[str, Tensor] = {}
    groups = x.shape[0] if offs is None else offs.shape[0]
    if _at_slots(sample.signature):
        groups = len(sample.routing.sizes)
        last = sample.signature.dimensions["S"] - 1
        derived["slots"] = last - torch.arange(groups, dtype=torch.int32, device=x.device)
    if _indexed(sample.signature):
        derived["rows"] = named_rows(sample, made, tail)["rows"]
    if "scale" in sample.given:
        derived["scale"] = torch.arange(1, groups + 1, dtype=torch.float32, device=x.device) / 4
    if "rng" in sample.given:
        derived["rng"] = torch.tensor([7, 11], dtype=torch.int64, device=x.device)
    if "noop" in sample.given:
        derived["noop"] = torch.zeros(1, dtype=torch.float32, device=x.device)
    if "data" in made:
        tables = {name: derived.get(name) for name in ("slots", "rows")}
        specs = quantized.group_quantize(x, offs, **tables, options=_options(sample)).specs()
        for name, spec in zip(OUT_NAMES, specs):
            derived[name] = spec.empty()
            _fill_bytes(derived[name], _GARBAGE)
    return derived


def _fill_bytes(t: Tensor, byte: int) -> None:
    """Fill every byte of ``t``, whatever its layout."""
    t.copy_(torch.full((t.element_size(),), byte, dtype=torch.uint8, device=t.device).view(t.dtype))


def _components(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Make one direction of the components of integers, with a bad tail if there is one."""
    options, routing = dict(sample.options), sample.routing
    columnwise, block_2d = options.get("columnwise", False), options.get("block_2d", False)
    grouped = made["offs"] is not None
    sizes = sample.signature.dimensions
    shape = (routing.rows, sizes["K"]) if grouped else (len(routing.sizes), sizes["N"], sizes["K"])
    x = sample._integers("x", shape).to(torch.float32).to(sample.device)
    parts = torch.ops.tgl.group_quantize(
        x,
        made["offs"],
        format=options["format"],
        rowwise=not columnwise,
        columnwise=columnwise,
        scale_layout=options.get("scale_layout", "compact"),
        block_2d=block_2d,
    )
    data, scale, amax = (t.clone() for t in (parts[3:6] if columnwise else parts[:3]))
    for t in (data, scale):
        if grouped and t.shape[:1] == (routing.rows,) and t.dim() == 2:
            _fill_bytes(t[routing.routed :], 0xFF if tail != tail else _GARBAGE)
    derived = {"data": data, "scale": scale}
    if FORMATS[options["format"]].decodes_with_amax:
        derived["amax"] = amax
    return derived


def _quantize(
    format: str, options: Mapping[str, Sequence[Any]], *given: str, grouped: bool = True, out: bool = False
) -> Signature:
    """Return a signature of ``group_quantize`` for rows in groups or matrices; ``given`` are its optional arguments.

    ``"slots"`` among them, of matrices, and ``"rows"``, of rows in groups, are always given.
    """
    f, blocked = FORMATS[format], "blocked" in options.get("scale_layout", ())
    at_slots, indexed = "slots" in given, "rows" in given
    in_groups, matrices = "S,K" if indexed else "T,K", "S,N,K" if at_slots else "G,N,K"
    inputs = _INPUTS.format(
        x=in_groups if grouped else matrices,
        offs="ends" if grouped else "derived?",
        noop=", noop[]:derived?" if out else "",
        slots="" if at_slots else "?",
        rows="" if indexed else "?",
    )
    outputs = _OUTPUTS.format(
        lead="T" if grouped else "M",
        scale="T" if grouped and not blocked and f.block else "S",
        amax="G" if f.has_amax else "E",
        columnwise="T" if grouped and not f.transposed_columnwise else "C",
        dbias="G,K" if True in options.get("dbias", ()) and options["dbias"] == (True,) else "E",
    )
    return Signature(
        inputs + (_BUFFERS + " ->" if out else f" -> {outputs}"),
        requires={name: other for name, other in _NEVER.items() if name not in given},
        wide=("row_scale",) if "row_scale" in given else (),
        options={"format": (format,), **options},
        derive=_quantize_arguments,
        **({**_PLAIN, "dtypes": (torch.bfloat16,)} if at_slots or indexed else _PLAIN),
    )


def _at_slots(signature: Signature) -> bool:
    return signature.text.startswith("x[S,N,")


def _indexed(signature: Signature) -> bool:
    return signature.text.startswith("x[S,K]")


def _amax(format: str) -> str:
    return "amax[G]:derived" if FORMATS[format].decodes_with_amax else "amax[G]:derived?"


def _never_amax(format: str) -> dict[str, str]:
    return {} if FORMATS[format].decodes_with_amax else {"amax": "nothing"}


def _dequantize(format: str, options: Mapping[str, Sequence[Any]], *, grouped: bool = True) -> Signature:
    """Return a signature of ``group_dequantize`` for rows in groups or matrices."""
    offs = "offs[G]:ends" if grouped else "offs[G]:derived?"
    return Signature(
        f"data[]:derived, scale[]:derived, {offs}, {_amax(format)} -> y[{'T' if grouped else 'M'},K]",
        requires={"offs": "nothing"} | _never_amax(format),
        options={"format": (format,), **options},
        derive=_components,
        **{**_PLAIN, "dtypes": (torch.float32,)},
    )


def _requantize(format: str, options: Mapping[str, Sequence[Any]]) -> Signature:
    """Return a signature of ``group_requantize`` for rows in groups."""
    f = FORMATS[format]
    data, amax = "C" if f.transposed_columnwise else "T", "G" if f.has_amax else "E"
    return Signature(
        f"data[]:derived, scale[]:derived, offs[G]:ends, {_amax(format)} -> "
        f"columnwise_data[{data},K], columnwise_scale[P,K], columnwise_amax[{amax}]",
        requires=_never_amax(format),
        options={"format": (format,), **options},
        derive=_components,
        **{**_PLAIN, "dtypes": (torch.float32,)},
    )


def _scale_so_far(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    return {"scale": torch.arange(1, len(sample.routing.sizes) + 1, dtype=torch.float32, device=sample.device)}


_BOTH_LAYOUTS = {"scale_layout": ("compact", "blocked")}
_E5M2 = {"dtype": (torch.float8_e5m2,)}
_FP8_PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))


@dataclass(frozen=True)
class FormatSamples:
    """Sample inputs of one format.

    Attributes:
        operands: dtypes of the two operands of a GEMM, the usual pair first.
        quantize, out, dequantize, requantize: signatures of ``group_quantize``, of it with ``out``, of
            ``group_dequantize`` and of ``group_requantize``.
        amax: of a group whose elements are multiplied by 1, where values depend on it (``Format.decodes_with_amax``).
    """

    operands: tuple[tuple[torch.dtype, torch.dtype], ...]
    quantize: tuple[Signature, ...]
    out: tuple[Signature, ...]
    dequantize: tuple[Signature, ...]
    requantize: tuple[Signature, ...]
    amax: float = 0.0


SAMPLES: OnePerName[FormatSamples] = OnePerName(
    FORMATS,
    "SAMPLES in tgl/testing/quantized.py",
    {
        "mxfp8": FormatSamples(
            operands=_FP8_PAIRS,
            quantize=(
                _quantize("mxfp8", {"scaling": ("rceil", "floor", "even")}, "row_scale"),
                _quantize("mxfp8", {"rowwise": (True, False), "dbias": (True,), **_BOTH_LAYOUTS}),
                _quantize("mxfp8", {**_E5M2, **_BOTH_LAYOUTS}, grouped=False),
                _quantize("mxfp8", _BOTH_LAYOUTS, "slots", grouped=False),
                _quantize("mxfp8", {"rowwise": (True, False), **_BOTH_LAYOUTS}, "row_scale", "rows"),
            ),
            out=(
                _quantize("mxfp8", {"dbias": (True, False), **_BOTH_LAYOUTS}, "row_scale", out=True),
                _quantize("mxfp8", {}, "slots", grouped=False, out=True),
                _quantize("mxfp8", {"dbias": (True,)}, "rows", out=True),
            ),
            dequantize=(_dequantize("mxfp8", {"columnwise": (False, True), **_BOTH_LAYOUTS}),),
            requantize=(_requantize("mxfp8", _BOTH_LAYOUTS),),
        ),
        "nvfp4": FormatSamples(
            operands=((torch.uint8, torch.uint8),),
            quantize=(
                _quantize("nvfp4", {"rht": (True, False), **_BOTH_LAYOUTS}, "row_scale"),
                _quantize("nvfp4", {"dbias": (True,)}, "rng"),
                _quantize("nvfp4", {"block_2d": (True, False)}, "rng", grouped=False),
                _quantize("nvfp4", {"block_2d": (True, False)}, "rng", "slots", grouped=False),
                _quantize("nvfp4", {"rht": (True, False)}, "rng", "rows"),
            ),
            out=(
                _quantize("nvfp4", {"rht": (True,), **_BOTH_LAYOUTS}, "rng", out=True),
                _quantize("nvfp4", {}, "slots", grouped=False, out=True),
                _quantize("nvfp4", {}, "rows", out=True),
            ),
            dequantize=(
                _dequantize("nvfp4", _BOTH_LAYOUTS),
                _dequantize("nvfp4", {"columnwise": (False, True), "block_2d": (False, True)}, grouped=False),
            ),
            requantize=(_requantize("nvfp4", {"rht": (False, True)}),),
            amax=448.0 * 6.0,
        ),
        "mxfp4": FormatSamples(
            operands=((torch.uint8, torch.uint8),),
            quantize=(
                _quantize("mxfp4", {"scaling": ("rceil", "floor", "even")}, "row_scale"),
                _quantize("mxfp4", {"rowwise": (True, False), "dbias": (True,), **_BOTH_LAYOUTS}),
                _quantize("mxfp4", _BOTH_LAYOUTS, grouped=False),
                _quantize("mxfp4", {}, "slots", grouped=False),
                _quantize("mxfp4", {"rowwise": (True, False)}, "row_scale", "rows"),
            ),
            out=(
                _quantize("mxfp4", {"dbias": (True,), **_BOTH_LAYOUTS}, out=True),
                _quantize("mxfp4", {}, "slots", grouped=False, out=True),
                _quantize("mxfp4", {}, "rows", out=True),
            ),
            dequantize=(
                _dequantize("mxfp4", _BOTH_LAYOUTS),
                _dequantize("mxfp4", {"columnwise": (False, True), **_BOTH_LAYOUTS}, grouped=False),
            ),
            requantize=(_requantize("mxfp4", _BOTH_LAYOUTS),),
        ),
        "fp8_tensor": FormatSamples(
            operands=_FP8_PAIRS,
            quantize=(
                _quantize("fp8_tensor", {"columnwise": (True, False)}, "scale", "row_scale"),
                _quantize("fp8_tensor", _E5M2, grouped=False),
                _quantize("fp8_tensor", {}, "scale", "slots", grouped=False),
                _quantize("fp8_tensor", {}, "scale", "rows"),
            ),
            out=(
                _quantize("fp8_tensor", {}, "scale", out=True),
                _quantize("fp8_tensor", {}, "slots", grouped=False, out=True),
                _quantize("fp8_tensor", {}, "rows", out=True),
            ),
            dequantize=(
                _dequantize("fp8_tensor", {}),
                _dequantize("fp8_tensor", {"columnwise": (False, True)}, grouped=False),
            ),
            requantize=(_requantize("fp8_tensor", {}),),
        ),
        "fp8_block": FormatSamples(
            operands=_FP8_PAIRS,
            quantize=(
                _quantize("fp8_block", {"power_of_two": (True, False)}, "row_scale"),
                _quantize("fp8_block", {"block_2d": (True, False)}, grouped=False),
                _quantize("fp8_block", {"block_2d": (True, False)}, "slots", grouped=False),
                _quantize("fp8_block", {"power_of_two": (True, False)}, "rows"),
            ),
            out=(
                _quantize("fp8_block", {}, out=True),
                _quantize("fp8_block", {}, "slots", grouped=False, out=True),
                _quantize("fp8_block", {}, "rows", out=True),
            ),
            dequantize=(
                _dequantize("fp8_block", {}),
                _dequantize("fp8_block", {"columnwise": (False, True), "block_2d": (False, True)}, grouped=False),
            ),
            requantize=(_requantize("fp8_block", {}),),
        ),
    },
)


def _of_every_format(op: str) -> tuple[Signature, ...]:
    return tuple(signature for name in FORMATS for signature in getattr(SAMPLES[name], op))


QUANTIZED_SIGNATURES: dict[str, tuple[Signature, ...]] = {
    "group_quantize": _of_every_format("quantize"),
    "group_quantize.out": _of_every_format("out"),
    "group_dequantize": _of_every_format("dequantize"),
    "group_requantize": _of_every_format("requantize"),
    "fp8_scale_from_history": (
        Signature(
            "history[L,G], scale[]:derived -> new[F]",
            options={"algorithm": ("max", "most_recent")},
            derive=_scale_so_far,
            **{**_PLAIN, "dtypes": (torch.float32,)},
        ),
    ),
    "fp8_update_history_": (Signature("amax[G], history[L,G]! ->", **{**_PLAIN, "dtypes": (torch.float32,)}),),
}
