"""Kernels of the expert-parallel exchange: they write to the memory of the other ranks of a group.

``launchers.exchange_kernels`` alone launches them, as steps of the ops in ``launchers.expert_parallel``. The
layout of the memory is that of ``tgl.meta.symmetric_memory``.
"""
