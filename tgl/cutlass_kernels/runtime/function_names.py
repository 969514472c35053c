"""Names of kernels in a profiler and in a cubin."""

from typing import Any


def named(kernel: type) -> type:
    """Name the device functions of a kernel's class after it, such as ``tgl_Sm90GemmKernel_0``, and return the class.

    Kernels that are compiled by themselves are named then; the class of one that another kernel launches is decorated.
    The compiler's own names contain "cutlass", by which ptxas chooses other optimisations for sm_100a: it has spilled
    registers for that alone (https://github.com/NVIDIA/cutlass/issues/3389).
    """
    for attribute in dir(kernel):
        function: Any = getattr(kernel, attribute, None)  # a plain function launches kernels with names of their own
        if getattr(function, "_decorator_kind", None) == "kernel":
            own = "" if attribute == "kernel" else f"_{attribute}"
            function.set_name_prefix(f"tgl_{kernel.__name__}{own}", remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel
