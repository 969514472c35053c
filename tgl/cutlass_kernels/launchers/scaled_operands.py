"""Copies of quantised operands whose scale layout or shape a GEMM does not take.

Tensor cores read one-byte scales blocked; compact ones are rearranged on the device, which moves bytes and computes
nothing. Weight gradients with block scales have an even number of columns: an odd one gets a column of zeros.

``c`` is a call of one of the ops of ``gemm_scaled``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ... import backends
from ...meta import scale_layout as layouts
from ...meta.formats import FORMATS
from ...meta.scaled import most_tokens
from ...meta.slots import gather, room, scatter
from ...meta.specs import Dim
from ..gemm import operand_formats
from ..runtime.reach import Reach


def reason(c: Any) -> backends.Reason:
    """Return why a kernel does not take the scale layout or the number of columns, or None."""
    if kernel_layout(c) != c.scale_layout:
        return f'needs scale_layout="{kernel_layout(c)}", got "{c.scale_layout}"'
    if odd(c):
        return f"takes an even number of columns in {c.format}, got {c.out.shape[2]}"
    return None


def run_with_copies(c: Any, reach: Reach, run: Callable[[Any], object]) -> None:
    """Call ``run`` with a call whose operands are copies where the kernel does not take those of ``c``."""
    if not odd(c):
        reach.copied(_blocked(c), run)
        return
    if c.slots is not None:
        values = gather(c.out, c.slots) if reach.keeps(c) else room(c.out, c.slots)
        run_with_copies(c._replace(out=values, slots=None), reach, run)
        scatter(c.out, c.slots, values)
        return
    wide = c.out.new_zeros(*c.out.shape[:-1], c.out.shape[-1] + 1)
    narrow = wide[..., :-1]
    if reach.keeps(c):
        narrow.copy_(c.out)
    evened = _blocked(c)._replace(b=_with_zero_appended(c.b, 0), b_scale=_with_zero_appended(c.b_scale, 1), out=wide)
    reach.copied(evened, run)
    c.out.copy_(narrow)


def made(c: Any) -> Any:
    """Return the call of the kernel that ``run_with_copies`` runs, as far as scale layout and shape go.

    The launch that rearranges scales is prepared.
    """
    layout = kernel_layout(c)
    if layout != c.scale_layout:
        _lay_out(c, backends.prepare)
    if odd(c):
        out = c.out if c.slots is None else room(c.out, c.slots)
        c = c._replace(out=out.new_empty(*out.shape[:-1], out.shape[-1] + 1), slots=None)
    return c._replace(scale_layout=layout)


def copies(c: Any) -> dict[str, int]:
    """Return the bytes that ``run_with_copies`` copies for these reasons, by name."""
    found: dict[str, int] = {}
    if kernel_layout(c) != c.scale_layout:
        found |= {side.scale: _bytes(side.scales.other.meta()) for side in _sides(c)}
    if odd(c):
        found |= {name: _bytes(getattr(c, name)) for name in ("b", "b_scale")}
        found["out"] = c.offs.shape[0] * c.out.shape[1] * c.out.shape[2] * c.out.element_size()
    return found


def kernel_layout(c: Any) -> str:
    """Return the layout of the scales that the kernel gets."""
    return "blocked" if "blocked" in FORMATS[c.format].layouts else c.scale_layout


def odd(c: Any) -> bool:
    """Return whether it is a weight gradient with block scales and an odd number of columns."""
    return operand_formats.OPERANDS[c.format].block > 0 and c.out.dim() == 3 and c.out.shape[2] % 2 == 1


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _with_zero_appended(t: Tensor, dim: int) -> Tensor:
    """Return ``t`` with one zero appended along ``dim``."""
    wide = t.new_zeros([size + (i == dim) for i, size in enumerate(t.shape)])
    wide.narrow(dim, 0, t.shape[dim]).copy_(t)
    return wide


class _CompactScales(NamedTuple):
    """Compact scales: the field that has them, ends of their groups, and the arguments of a layout."""

    scale: str
    ends: Tensor | None
    scales: layouts.Scales


def _sides(c: Any) -> list[_CompactScales]:
    form, groups = FORMATS[c.format], c.offs.shape[0]

    def side(scale: str, ends: Tensor | None, shape: tuple[Dim, ...], columnwise: bool) -> _CompactScales:
        named: dict[str, Any] = {"layout": "blocked", "format": c.format, "columnwise": columnwise, "block_2d": False}
        return _CompactScales(
            scale,
            ends,
            layouts.scales("grouped_gemm_scaled", getattr(c, scale), ends, shape, **named, given="compact"),
        )

    if c.out.dim() == 3:
        a, b = ((most_tokens(data, groups, c.format), width) for data, width in zip((c.a, c.b), c.out.shape[1:]))
        return [side("a_scale", c.offs, a, True), side("b_scale", c.offs, b, True)]
    depth, columns = c.a.shape[1] * form.per_byte, c.out.shape[1]
    turned = c.b_direction == "columnwise"
    weights = (groups, depth, columns) if turned else (groups, columns, depth)
    return [side("a_scale", c.offs, (c.a.shape[0], depth), False), side("b_scale", None, weights, turned)]


def _blocked(c: Any) -> Any:
    """Return the call with scales in the layout of the kernel."""
    if kernel_layout(c) == c.scale_layout:
        return c
    return c._replace(**_lay_out(c, backends.run), scale_layout=kernel_layout(c))


def _lay_out(c: Any, act: Callable[..., object]) -> dict[str, Tensor]:
    """Return buffers for scales in the kernel's layout, by field, after ``act``, which fills or prepares them."""
    laid = {side.scale: side.scales.other.empty() for side in _sides(c)}
    for side in _sides(c):
        compact = getattr(c, side.scale)
        act("scale_to_layout", compact.device, compact, side.ends, scales=side.scales, out=laid[side.scale])
    return laid
