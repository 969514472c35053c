"""``tgl::group_quantize``: quantise grouped rows (or a stack of matrices) in one or both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, quantized
from ..meta.components import Components
from ..meta.quantized import OUT_NAMES, Options
from ..meta.remembered import remembered
from ._library import register
from ._rows import given
from ._signature import OpSignature

NAME = "group_quantize"
_ARGS = "Tensor x, Tensor? offs, Tensor? scale=None, Tensor? row_scale=None, Tensor? rng=None"
_TABLES = "Tensor? slots=None, Tensor? rows=None"
_OPTIONS = (
    "str format, bool rowwise=True, bool columnwise=True, ScalarType? dtype=None, "
    'str scaling="rceil", str scale_layout="compact", bool? power_of_two=None, float eps=0., bool block_2d=False, '
    "bool rht=False, bool dbias=False"
)
_RESULTS = ", ".join(f"Tensor {name}" for name in Components._fields)
_BUFFERS = ", ".join(f"Tensor({alias}!) {name}" for alias, name in zip("abcdefg", OUT_NAMES))
_OUT_SCHEMA = f"{NAME}.out({_ARGS}, Tensor? noop=None, {_TABLES}, *, {_OPTIONS}, {_BUFFERS}) -> ()"
_OUT_DEFAULTS = OpSignature.of(_OUT_SCHEMA).defaults


def _split(**keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {"options": Options(**keywords).resolved(NAME)}
    return options, options


def _remembered(check: Callable[..., Any], kinds: dict[str, str], moves: Callable[..., Any] | None = None) -> Any:
    return remembered(check, kinds, moves, _split, frozenset({"eps"}), NAME)


_ROWS = {"x": "rows", "row_scale": "vector"}
_checked = _remembered(quantized.group_quantize, _ROWS)
_checked_out = _remembered(quantized.group_quantize_out, {**_ROWS, "out": "tokens"}, quantized.group_quantize_out_moves)
_INDEXED = {"x": "tokens", "row_scale": "tokens", "rows": "tokens"}
_checked_indexed = _remembered(quantized.group_quantize, _INDEXED)
_checked_indexed_out = _remembered(quantized.group_quantize_out, {**_INDEXED, "out": "tokens"})
_checked_matrices = _remembered(quantized.group_quantize, {})
_checked_matrices_out = _remembered(quantized.group_quantize_out, {})

# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    **keywords: Any,
) -> Components:
    if slots is not None or rows is not None:
        check = _checked_matrices if rows is None else _checked_indexed
        specs, options, kept = check(x, offs, scale, row_scale, rng, slots, rows, **keywords)
        options = options | _tables(x, offs, slots, rows)
    else:
        check = _checked if offs is not None else _checked_matrices
        specs, options, kept = check(x, offs, scale, row_scale, rng, **keywords)
        if debug.active and offs is not None:
            debug.check_offs(NAME, offs, x.shape[0])
    return backends.produce(NAME, x.device, specs, [x, offs, scale, row_scale, rng, None], options, kept)


def _tables(x: Tensor, offs: Tensor | None, slots: Tensor | None, rows: Tensor | None) -> dict[str, Tensor]:
    """Return the tables of a call, after checking their values inside ``debug_checks()``."""
    debug.check_slots(NAME, slots, "x", x, written=False)
    if debug.active and rows is not None and offs is not None:
        debug.check_offs(NAME, offs, rows.shape[0])
        debug.check_rows(NAME, "rows", rows, offs, x)
    return given(slots=slots, rows=rows)


def _kernel_out(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    **keywords: Any,
) -> None:
    out = Components(*(keywords.pop(name) for name in OUT_NAMES))
    check = _checked_matrices_out if offs is None else _checked_out if rows is None else _checked_indexed_out
    _, options, _ = check(x, offs, scale, row_scale, rng, noop, slots, rows, *out, **keywords)
    operands = {"x": x, "offs": offs, "scale": scale, "row_scale": row_scale, "rng": rng, "noop": noop}
    operands |= {"slots": slots, "rows": rows}
    for name, buffer in zip(OUT_NAMES, out):
        if buffer.numel():
            memory.writable(NAME, name, buffer, **operands)
        operands[name] = buffer
    if debug.active and offs is not None and rows is None:
        debug.check_offs(NAME, offs, x.shape[0])
    tables = {} if slots is None and rows is None else _tables(x, offs, slots, rows)
    backends.run(NAME, x.device, x, offs, scale, row_scale, rng, noop, out=out, **options, **tables)


# --- registration -----------------------------------------------------------------------------------------------------


def _fake(*operands: Any, **keywords: Any) -> Components:
    return quantized.group_quantize(*operands, options=Options(**keywords).resolved(NAME)).empty()


def _fake_out(*operands: Any, **keywords: Any) -> None:
    out = [keywords.pop(name) for name in OUT_NAMES]
    dropped = _OUT_DEFAULTS[len(operands) :]  # the dispatcher drops trailing defaults
    quantized.group_quantize_out(*operands, *dropped, *out, options=Options(**keywords).resolved(NAME))


_ADVICE = "tgl.quantize makes a GroupedTensor through which gradients pass; or use torch.no_grad()"
_op = register(
    f"{NAME}({_ARGS}, {_TABLES}, *, {_OPTIONS}) -> ({_RESULTS})",
    _kernel,
    _fake,
    no_derivative=_ADVICE,
)
_op_out = register(
    _OUT_SCHEMA,
    _kernel_out,
    _fake_out,
    no_derivative=_ADVICE,
)


def _call(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    *positional: Tensor | None,
    noop: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    out: Components | None = None,
    **keywords: Any,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    if out is None and OUT_NAMES[0] in keywords:  # a call of the overload names every buffer
        out = Components(*(keywords.pop(name) for name in OUT_NAMES))
    options = Options(**keywords).resolved(NAME)
    by_name = {"noop": noop, "slots": slots, "rows": rows}
    if out is None and len(positional) < 3 and any(t is not None for t in positional[: 1 + (offs is not None)]):
        positional = (None, *positional)  # the overload without ``out`` has no `noop`
    by_name |= zip(by_name, positional)
    noop, slots, rows = by_name.values()
    if out is None:
        out = quantized.group_quantize(x, offs, scale, row_scale, rng, slots, rows, options=options).meta()
    else:
        quantized.group_quantize_out(x, offs, scale, row_scale, rng, noop, slots, rows, *out, options=options)
    tables = given(slots=slots, rows=rows)
    return x.device, (x, offs, scale, row_scale, rng, noop), {"options": options, "out": out, **tables}


backends.describe_op(NAME, _call)


def group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    format: str,
    rowwise: bool = True,
    columnwise: bool = True,
    dtype: torch.dtype | None = None,
    scaling: str = "rceil",
    scale_layout: str = "compact",
    power_of_two: bool | None = None,
    eps: float | None = None,
    block_2d: bool = False,
    rht: bool = False,
    dbias: bool = False,
    out: Components | None = None,
) -> Components:
    """Quantise grouped rows, or a stack of matrices, along the columns (rowwise), the rows (columnwise) or both.

    Arithmetic is float32 in the order written, rounded to nearest even, subnormals kept. Elements are rounded to
    nearest, ties to even, with saturation; the sign of zero is kept, and NaN of either sign becomes one NaN.

    - ``"mxfp8"`` (OCP Microscaling Formats 1.0): one E8M0 byte e per block of 32, elements of ``x * 2^(127 - e)``. With
      ``d = amax * float32(1 / max)``, ``scaling="rceil"`` takes the smallest ``2^(e - 127) >= d`` as NVIDIA hardware
      does, ``"floor"`` the exponent of amax less that of the largest element, ``"even"`` that of amax rounded to the
      element's mantissa. A block with Inf or NaN has e = 0xFF and elements 0x7F, where TransformerEngine has
      0xFE for Inf (``cvt.rp.ue8m0x2`` with ``.satfinite``). ``columnwise_data`` is in x's order.
    - ``"nvfp4"`` (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025): E2M1 elements, one E4M3 byte per block
      of 16 and one float32 amax per group, of its finite elements. With ``S = min(2688 / amax, FLT_MAX)``, 1 for amax
      0, a block's byte is ``e4m3(amax_block * (S * float32(1 / 6)))`` and its elements are
      ``e2m1(x * min(1 / (byte * (1 / S)), FLT_MAX))``. A block with Inf or NaN has byte 0x7F and elements 0x7.
      ``block_2d`` (matrices): a square of 16 shares a scale. ``rng``: elements are rounded stochastically, depending
      only on position, seed and offset, with the random bits of the backend. ``rht``: columnwise data is made from a
      random Hadamard transform of every 16 tokens of a group, the last ones zero-filled and all 16 results kept (signs,
      butterfly at distance 1, 2, 4, 8, times 1/4, rounded to bfloat16), and ``columnwise_amax`` is the transform's.
    - ``"mxfp4"`` (OCP Microscaling Formats 1.0, and gpt-oss): E2M1 elements, two per byte, and E8M0 bytes per block of
      32, made as those of ``"mxfp8"`` with 6 for the largest element. A block with Inf or NaN has byte 0xFF and
      elements 0x7. ``columnwise_data`` is transposed.
    - ``"fp8_tensor"``: one ``scale = max / amax`` per group, elements of ``x * scale``, and ``scale_inv = 1 / scale``
      stored. A given ``scale`` (delayed scaling) is used instead, and larger values saturate. amax 0 has scale 1.
    - ``"fp8_block"`` (DeepSeek-V3 technical report, 2024): one such scale for every block of 128 along the contraction,
      or of 128 x 128 (``block_2d``, matrices); powers of two by default.

    Inf and NaN make only their own block (fp8_tensor: group) NaN when decoded. Blocks along the rows are counted from
    the first row of each group; the last one of a group may be partial, and so may the last one along the columns.
    Groups may be of any size and number. Rows past ``offs[-1]`` are never read, and are zero in the result, like the
    padding of scales and of transposed data.

    Shapes of the components of rows ``[T, K]``: ``Tp(u) = u * max(ceil(T / u) + G - 1, 0)`` tokens are allocated where
    groups start on multiples of u, group g with first row s at ``(s // u + g) * u``.

    | format     | data         | scale                | columnwise_data     | columnwise_scale      |
    |------------|--------------|----------------------|---------------------|-----------------------|
    | mxfp8      | `[T, K]`     | `[T, ceil(K / 32)]`  | `[T, K]`            | `[Tp(128) / 32, K]`   |
    | nvfp4      | `[T, K / 2]` | `[T, ceil(K / 16)]`  | `[K, Tp(64) / 2]`   | `[K, Tp(64) / 16]`    |
    | fp8_tensor | `[T, K]`     | `[G]`                | `[K, Tp(32)]`       | `[G]`                 |
    | fp8_block  | `[T, K]`     | `[T, ceil(K / 128)]` | `[K, Tp(32)]`       | `[Tp(128) / 128, K]`  |

    ``amax`` and ``columnwise_amax`` are ``[G]`` for nvfp4 and fp8_tensor. Each of the matrices ``[G, N, K]`` is
    quantised on its own: the shapes are those of N rows without padding, with a leading G. ``scale_layout="blocked"``
    (mxfp8, nvfp4) arranges one-byte scales for tensor cores, as a vector (matrices: one each) of tiles of 128 rows x 4
    scales, 512 bytes each; rowwise scales of row t are in row p, its position among ``Tp(128)``, columnwise ones of
    column k in row k. Rowwise fp8_block scales of rows are column-major, strides ``(1, T)``, like the scales of 1 x 128
    blocks of ``torch._scaled_mm``; all other components are contiguous. A component that the format or the call does
    not have is an empty tensor of shape ``[0]``.

    With ``rows``, row ``rows[t]`` of ``x`` is read instead of ``x[t]``: tokens are gathered while they are read, with
    the bytes of ``x[rows]`` but without its ``[T, K]`` in memory. An amax covers the rows that are read.

    Not differentiable; ``tgl.quantize`` makes a GroupedTensor with the straight-through estimator.

    Args:
        x: ``[T, K]``, or ``[S, K]`` with ``rows``, or ``[G, N, K]`` without ``offs``, or ``[S, N, K]`` with ``slots``;
            float32, bfloat16 or float16, rows or columns contiguous (or expanded). nvfp4 needs an even K (and N,
            columnwise).
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        scale: float32 ``[G]``; fp8_tensor only.
        row_scale: ``[T]``, dtype of ``x`` or float32: rows are multiplied by it, and rounded to the dtype of ``x``,
            first.
        rng: int64 ``[2]``, seed and offset of stochastic rounding; nvfp4 only. Equal seed and offset: equal bytes on
            one backend. Kernels of compute capability 10.0 and 10.3 use other random bits than all others and the CPU.
        noop: float32 or bool, ``[]`` or ``[1]``, only with ``out``: if not zero, nothing is written. Not read on the
            host.
        slots: int32 ``[G]``, see ``grouped_gemm``: the matrix of group ``g`` is ``x[slots[g]]``, and components are in
            the order of the groups. Not with ``offs``.
        rows: int32 ``[T]``, see ``grouped_gemm``: the row of ``x`` for every row of the groups, such as
            ``tgl.Routing.token``. Only with ``offs``.
        format: name of the format.
        rowwise, columnwise: directions to quantise; at least one.
        dtype: element dtype of the FP8 formats, ``torch.float8_e4m3fn`` (the default) or ``torch.float8_e5m2``.
        scaling: how mxfp8 rounds a scale.
        scale_layout: ``"compact"`` or ``"blocked"``.
        power_of_two: round the scales of the FP8 formats down to powers of two; default only for fp8_block.
        eps: lower bound of the amax in the FP8 formats.
        block_2d: square blocks of matrices; nvfp4 and fp8_block.
        rht: transform columnwise nvfp4 data.
        dbias: also return float32 sums of the quantised values over the rows of each group.
        out: components to write into, including tails and padding (they belong to the quantised operand). Shapes and
            strides must be those of a call without ``out``. They are 16-byte aligned and share no memory with each
            other or an argument.

    Returns:
        ``Components``; ``out`` itself if given.

    Raises:
        TypeError, ValueError: arguments that do not fit, or mean nothing for the format.
        RuntimeError: an argument requires grad.
    """
    options: dict[str, Any] = {
        "format": format,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "dtype": dtype,
        "scaling": scaling,
        "scale_layout": scale_layout,
        "power_of_two": power_of_two,
        "block_2d": block_2d,
        "rht": rht,
        "dbias": dbias,
    }
    if eps is not None:  # a float default would make Dynamo compile twice under dynamic=True
        options["eps"] = eps
    if out is None:
        if noop is not None:
            raise ValueError(f"tgl::{NAME}: `noop` must be None without `out`, but got a tensor")
        return Components(*_op(x, offs, scale, row_scale, rng, slots, rows, **options))
    if not (isinstance(out, tuple) and len(out) == len(OUT_NAMES)):
        raise TypeError(f"tgl::{NAME}: `out` must be Components or None, but got a {type(out).__name__}")
    _op_out(x, offs, scale, row_scale, rng, noop, slots, rows, **options, **dict(zip(OUT_NAMES, out)))
    return out
