"""Compile, cache and launch kernels, and state what they require of the layouts of operands.

``launcher``, ``reach`` and ``requirements`` are for every module of ``launchers``, and for launchers of other
packages; ``cache`` and ``device`` for ``tgl.warmup`` and ``tgl.doctor`` too. Only ``compiling`` and ``elements`` import
the kernel compiler, so ``build`` of a launcher imports them when it is called. Kernels use
``elements`` too.
"""
