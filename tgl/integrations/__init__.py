"""Bridges to other libraries; each is imported by name, and importing ``tgl`` imports none of them.

Users import ``torch``, ``transformers``, ``transformers_parallel`` and ``peft``. They may use every package of ``tgl``
but kernels, and nothing in ``tgl`` imports them.
"""
