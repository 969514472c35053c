"""Kernels of the expert-parallel exchange: they write to the memory of the other ranks of a group.

``cutlass_kernels.ops.wire`` alone launches them, as steps of the ops in ``cutlass_kernels.ops.expert_parallel``. The
layout of the memory is that of ``tgl.meta.symmetric_memory``.
"""
