"""Bulk copies of neighbouring bytes: one instruction of one thread each, on chips with ``Arch.bulk_copies``."""

from typing import Any

from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load(sink: Any, source: Any, full: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``size`` bytes from global to shared memory, which count on the barrier; multiples of 16, as the addresses."""
    pointers = [pointer.to_llvm_ptr(loc=loc, ip=ip) for pointer in (sink, source, full)]
    nvvm.cp_async_bulk_shared_cluster_global(*pointers, Int32(size).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def store(sink: Any, source: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """The way back, in the group of bulk copies that the thread commits next."""
    pointers = [pointer.to_llvm_ptr(loc=loc, ip=ip) for pointer in (sink, source)]
    nvvm.cp_async_bulk_global_shared_cta(*pointers, Int32(size).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
