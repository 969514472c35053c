"""Source lines of a kernel's operations, looked up once per instruction of Python.

The DSL finds it for every operation that it traces, and emulated kernels are always compiled with their lines: that was
a quarter of the time that compiling takes. What is found depends on the instruction alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_known: dict[int, tuple[CodeType, dict[int, Any]]] = {}  # by the address of a code, which lives on here


def remembering(find: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return ``find``, which gives the source line of a frame, and is called once per place."""

    def found(frame: FrameType) -> Any:
        code = frame.f_code
        _, places = _known.setdefault(id(code), (code, {}))
        place = places.get(frame.f_lasti)
        if place is None:
            place = places[frame.f_lasti] = find(frame)
        return place

    return found


def by_code(find: Callable[[FrameType | None], FrameType | None]) -> Callable[[FrameType | None], FrameType | None]:
    """Return ``find``, which returns the first frame that is not the DSL's, and decides once per code object."""
    from cutlass._mlir_helpers import op

    known: dict[int, tuple[CodeType, bool]] = {}

    def found(start: FrameType | None) -> FrameType | None:
        if op._INCLUDE_LIB_FRAME or not op._ENABLE_FRAME_FILTERING:
            return find(start)
        frame = start
        while frame is not None:
            code = frame.f_code
            answer = known.get(id(code))
            if answer is None:
                answer = known[id(code)] = code, op._is_framework_stack_frame(frame)
            if not answer[1]:
                return frame
            frame = frame.f_back
        return start

    return found


@functools.cache
def replaced() -> dict[str, Callable[..., Any]]:
    """Functions of the module ``cutlass._mlir_helpers.op`` that this version of the DSL has, as they remember."""
    from cutlass._mlir_helpers import op

    memories: dict[str, Callable[..., Any]] = {"_find_user_frame": by_code, "_fast_frameinfo": remembering}
    return {name: memory(vars(op)[name]) for name, memory in memories.items() if name in vars(op)}
