"""The registry of implementations: it decides which one serves an op on a device, and can report why.

An op of ``torch.ops.tgl`` checks its arguments, allocates its outputs and then tries the implementations registered for
the device, in order of priority. An implementation that cannot serve a call returns the reason as text, and
``tgl.explain`` prints it; there are no silent fallbacks, and no environment variable is read.

Every other room imports the names of this one from here. ``cpu``, ``portable`` and ``composite`` hold implementations,
which only ``tgl`` imports, to register them.
"""

from .explanation import Explanation, GraphCaptureError, NoImplementationError, qualified
from .implementation import HINT, ROW_INDICES, Implementation, Reason
from .layer_path import LayerPath
from .op_recorder import Composition
from .registry import (
    NOT_LOOKED_UP,
    add,
    compile_only,
    describe_op,
    device_types,
    emulated_device,
    first,
    in_order,
    on_change,
    on_device,
    ops,
    produce,
    register_implementation,
    remove,
    run,
)
from .reports import explain, prepare, reason_against, report, warmup
from .target import capturing, cpu_target, device_arch

__all__ = [
    "HINT",
    "NOT_LOOKED_UP",
    "ROW_INDICES",
    "Composition",
    "Explanation",
    "GraphCaptureError",
    "Implementation",
    "LayerPath",
    "NoImplementationError",
    "Reason",
    "add",
    "capturing",
    "compile_only",
    "cpu_target",
    "describe_op",
    "device_arch",
    "device_types",
    "emulated_device",
    "explain",
    "first",
    "in_order",
    "on_change",
    "on_device",
    "ops",
    "prepare",
    "produce",
    "qualified",
    "reason_against",
    "register_implementation",
    "remove",
    "report",
    "run",
    "warmup",
]
