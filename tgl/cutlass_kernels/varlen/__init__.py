"""Groups of rows of any length inside one tensor."""

from .groups import clamp, group_range
from .ragged import RAGGED_MODES, ragged_coord, ragged_tensor

__all__ = ["RAGGED_MODES", "clamp", "group_range", "ragged_coord", "ragged_tensor"]
