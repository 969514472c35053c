"""Conversion of expert parameters to and from other codebases' names and shapes, as views where the layout allows.

G experts, H hidden and I intermediate width; N out and K in features of one layer. State dicts of one layer:

| layout | weight | bias |
|---|---|---|
| packed (``GroupedLinear``) | ``weight [G, N, K]`` | ``bias [G, N]`` |
| discrete (TransformerEngine) | ``weight0 [N, K]``, ``weight1``, ... | ``bias0 [N]``, ``bias1``, ... |

and of an expert MLP:

| layout | first | second | biases |
|---|---|---|---|
| ``GroupedMLP`` | ``fc1.weight [G, 2 I, H]`` | ``fc2.weight [G, H, I]`` | ``fc1.bias [G, 2 I]``, ``fc2.bias [G, H]`` |
| transformers | ``gate_up_proj [G, 2 I, H]`` | ``down_proj [G, H, I]`` | ``gate_up_proj_bias``, ``down_proj_bias`` |
| transformers, transposed | ``gate_up_proj [G, H, 2 I]`` | ``down_proj [G, I, H]`` | those of transformers |

Without a gate the first matrix is ``up_proj [G, I, H]``. Whether gate and linear rows of ``gate_up_proj`` alternate is
not part of the layout but of ``GroupedMLP(interleaved=...)``; ``interleave`` and ``deinterleave`` change it.

Low-rank updates of one layer, rank r:

| layout | first | second |
|---|---|---|
| ``GroupedLoRALinear`` | ``lora_A [G, r, K]`` | ``lora_B [G, N, r]`` |
| PEFT | ``lora_A.weight [G r, K]``, expert slowest | ``lora_B.weight [N, r G]``, expert fastest |

Frozen matrices in MXFP4, ``[G, N, K]`` of one layer:

| layout | elements | scales |
|---|---|---|
| ``group_quantize`` | ``data [G, N, K / 2]`` | ``scale [G, N, K / 32]`` |
| gpt-oss | ``_blocks [G, N, K / 32, 16]`` | ``_scales [G, N, K / 32]`` |

To run a module on the memory of another module's parameters, load the result of these functions with ``assign=True``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._slots import apart, slots_of

_DISCRETE = re.compile(r"(weight|bias)(\d+)")
_EXTRA_STATE = re.compile(r"_extra_state\d*")

# --- tensors ----------------------------------------------------------------------------------------------------------


def unpack(packed: Tensor) -> tuple[Tensor, ...]:
    """Split ``[G, ...]`` into G tensors ``[...]``: views."""
    return packed.unbind()


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Stack G tensors ``[...]`` of one shape and dtype to ``[G, ...]``.

    A view if they are contiguous and lie in one storage, in order and evenly spaced, like the results of ``unpack``
    and ``allocate_wgrad(...).unbind()``; else a copy. Not differentiable either way.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("`parts` must hold at least one tensor, but is empty")
    values = [t.detach() for t in parts]
    plain = all(type(t) is Tensor for t in values)
    packed = slots_of(values) if plain else None
    return packed if packed is not None else torch.stack(values)


def interleave(rows: Tensor) -> Tensor:
    """Reorder ``[G, 2 I, ...]`` from gate rows first to alternating gate and linear rows: a copy."""
    gate, linear = rows.chunk(2, dim=1)
    return torch.stack([gate, linear], dim=2).flatten(1, 2)


def deinterleave(rows: Tensor) -> Tensor:
    """Invert ``interleave``: a copy."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


# --- low-rank updates -------------------------------------------------------------------------------------------------


def lora_to_peft(lora_a: Tensor, lora_b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert ``lora_A [G, r, K]`` and ``lora_B [G, N, r]`` to PEFT's ``[G r, K]`` (view) and ``[N, r G]`` (copy).

    Raises:
        ValueError: the shapes are not those of one layer.
    """
    if lora_a.dim() != 3:
        raise ValueError(f"`lora_a` must be [G, r, K], but got {tuple(lora_a.shape)}")
    groups, rank, _ = lora_a.shape
    if lora_b.dim() != 3 or (lora_b.shape[0], lora_b.shape[2]) != (groups, rank):
        raise ValueError(f"`lora_b` must be [G, N, r] with G = {groups} and r = {rank}, but got {tuple(lora_b.shape)}")
    return lora_a.flatten(0, 1), lora_b.permute(1, 2, 0).flatten(1)


def lora_from_peft(lora_a: Tensor, lora_b: Tensor, num_gemms: int) -> tuple[Tensor, Tensor]:
    """Invert ``lora_to_peft`` for G = ``num_gemms``: views, the second of which has the group fastest.

    Raises:
        ValueError: the shapes are not those of one layer of that many groups.
    """
    if lora_a.dim() != 2 or num_gemms < 1 or lora_a.shape[0] % num_gemms:
        raise ValueError(f"`lora_a` must be [G r, K] with G = {num_gemms}, but got {tuple(lora_a.shape)}")
    rank = lora_a.shape[0] // num_gemms
    if lora_b.dim() != 2 or lora_b.shape[1] != lora_a.shape[0]:
        raise ValueError(
            f"`lora_b` must be [N, r G] with G = {num_gemms} and r = {rank}, but got {tuple(lora_b.shape)}"
        )
    return lora_a.unflatten(0, (num_gemms, rank)), lora_b.unflatten(1, (rank, num_gemms)).permute(2, 0, 1)


def mxfp4_from_gpt_oss(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``data`` and ``scale`` of MXFP4 matrices from the tensors of a gpt-oss checkpoint: views.

    Args:
        blocks: ``[G, N, K / 32, 16]`` uint8, such as ``gate_up_proj_blocks``.
        scales: ``[G, N, K / 32]`` uint8, such as ``gate_up_proj_scales``.

    Returns:
        ``data [G, N, K / 2]`` and ``scale [G, N, K / 32]``, rowwise components of ``group_quantize(format="mxfp4")``.

    Raises:
        ValueError: other shapes.
    """
    if blocks.dim() != 4 or blocks.shape[3] != 16:
        raise ValueError(f"`blocks` must be [G, N, K / 32, 16], but got shape {tuple(blocks.shape)}")
    if scales.shape != blocks.shape[:3]:
        must = f"[G, N, K / 32] = {tuple(blocks.shape[:3])} like `blocks`"
        raise ValueError(f"`scales` must be {must}, but got shape {tuple(scales.shape)}")
    return blocks.flatten(2), scales


def mxfp4_to_gpt_oss(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Invert ``mxfp4_from_gpt_oss``: views."""
    return data.unflatten(2, (-1, 16)), scale


# --- state dicts ------------------------------------------------------------------------------------------------------


def is_extra_state(key: str, prefix: str = "") -> bool:
    """Return whether ``key`` is TransformerEngine's record of a layer's FP8 scales, which layers here do not have."""
    return key.startswith(prefix) and _EXTRA_STATE.fullmatch(key[len(prefix) :]) is not None


def from_discrete(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state dict with the entries of its discrete layers packed (see ``pack`` for when it copies).

    Args:
        state: ``...weight0, ...weight1, ...`` and ``...bias0, ...`` become ``...weight`` and ``...bias``; other entries
            are kept, except ``..._extra_state`` of a discrete layer.

    Raises:
        ValueError: the numbers of a name are not ``0, 1, ..., G - 1``.
    """
    found: dict[str, dict[int, Tensor]] = {}
    rest = {}
    for key, value in state.items():
        owner, dot, name = key.rpartition(".")
        match = _DISCRETE.fullmatch(name)
        if match is None:
            rest[key] = value
        else:
            found.setdefault(f"{owner}{dot}{match[1]}", {})[int(match[2])] = value
    for key, numbered in found.items():
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError(f"`state` must have {key}0 to {key}{max(numbered)}, but has only {sorted(numbered)}")
    prefixes = {key.removesuffix("weight") for key in found if key.endswith("weight")}
    kept = {k: v for k, v in rest.items() if not any(is_extra_state(k, prefix) for prefix in prefixes)}
    return kept | {key: pack([numbered[i] for i in range(len(numbered))]) for key, numbered in found.items()}


def to_discrete(state: Mapping[str, Any], names: Sequence[str] = ("weight", "bias")) -> dict[str, Any]:
    """Invert ``from_discrete`` for the state dict of one ``GroupedLinear``.

    New entries share the memory of the packed ones. Each has its own storage object, so that code which saves state
    dicts treats them as separate tensors; those that require grad are views.

    Args:
        state: ``weight [G, N, K]`` and optionally ``bias [G, N]``; other entries are kept.
        names: full keys of the entries to split, for the state dict of a larger module.
    """
    discrete: dict[str, Any] = {}
    for key, value in state.items():
        if key in names:
            discrete |= {f"{key}{i}": part for i, part in enumerate(apart(unpack(value)))}
        else:
            discrete[key] = value
    return discrete


_TO_TRANSFORMERS = {
    "fc1.weight": "{up}",
    "fc1.bias": "{up}_bias",
    "fc2.weight": "down_proj",
    "fc2.bias": "down_proj_bias",
}


def from_transformers(state: Mapping[str, Any], *, transposed: bool = False) -> dict[str, Any]:
    """Convert the state dict of a transformers experts module to that of a ``GroupedMLP``: views.

    Args:
        state: ``gate_up_proj`` or ``up_proj``, ``down_proj`` and optionally their biases; see the tables above.
        transposed: whether the matrices are ``[G, in, out]`` (the module's ``is_transposed``). The views are then
            column-major, which the ops read without a copy.

    Raises:
        ValueError: an entry of another name.
    """
    names = {
        theirs.format(up=up): ours for ours, theirs in _TO_TRANSFORMERS.items() for up in ("gate_up_proj", "up_proj")
    }
    _refuse_unknown(state, names)
    return {names[key]: _turned(names[key], value, transposed) for key, value in state.items()}


def to_transformers(state: Mapping[str, Any], *, gated: bool = True, transposed: bool = False) -> dict[str, Any]:
    """Invert ``from_transformers``: views.

    Args:
        state: ``fc1.weight``, ``fc2.weight`` and optionally their biases, packed.
        gated: name the first matrix ``gate_up_proj``, else ``up_proj``.
        transposed: as above.

    Raises:
        ValueError: an entry of another name.
    """
    _refuse_unknown(state, _TO_TRANSFORMERS)
    up = "gate_up_proj" if gated else "up_proj"
    return {_TO_TRANSFORMERS[key].format(up=up): _turned(key, value, transposed) for key, value in state.items()}


def _refuse_unknown(state: Mapping[str, Any], names: Mapping[str, str]) -> None:
    unknown = sorted(set(state) - set(names))
    if unknown:
        raise ValueError(f"`state` must hold only {', '.join(names)}, but has {', '.join(unknown)}")


def _turned(key: str, value: Tensor, transposed: bool) -> Tensor:
    return value.transpose(1, 2) if transposed and key.endswith("weight") else value
