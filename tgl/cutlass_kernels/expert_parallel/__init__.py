"""Kernels of the expert-parallel exchange, which write to the memory of the other ranks of a group.

Only ``launchers.exchange_kernels`` launches them, as steps of the ops in ``launchers.expert_parallel``. The memory
layout is that of ``tgl.meta.symmetric_memory``.
"""
