"""GEMM mainloops, one folder per architecture, each with a module ``kernel``.

``archs`` finds a kernel by name in the module ``registry`` of a folder. Launchers import ``operand_formats`` and
modules named ``tilings``, which are plain Python, and never a mainloop. The modules in this folder hold what the
architectures share.
"""
