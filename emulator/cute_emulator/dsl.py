"""Hooks into the CuTe DSL: where it links, what it keeps, and what a call of a compiled function does."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from . import places
from .arguments import adopt
from .errors import EmulatorError
from .hostlib import HostLibrary


class _NoEngine:
    """Stands for an engine that the DSL drops."""

    def lookup(self, name: str) -> None:
        return None


class Dsl:
    """The hooks into the CuTe DSL, installed while at least one ``emulate`` block is open."""

    def __init__(self) -> None:
        self.library = HostLibrary()
        atexit.register(self.library.close)
        self.stack: list[Any] = []
        self.undo: list[Callable[[], None]] = []

    @property
    def active(self) -> Any:
        return self.stack[-1]

    def _set(self, obj: Any, name: str, value: Any) -> None:
        own = name in vars(obj)
        old = vars(obj).get(name)
        setattr(obj, name, value)
        self.undo.append((lambda: setattr(obj, name, old)) if own else (lambda: delattr(obj, name)))

    def push(self, e: Any) -> None:
        if not self.stack:
            self._install()
        self.stack.append(e)
        self._select()

    def pop(self) -> None:
        self.stack.pop()
        if self.stack:
            self._select()
            return
        self.library.launcher = None
        while self.undo:
            self.undo.pop()()

    def _select(self) -> None:
        e = self.active
        lib = self.library
        lib.launcher, lib.failed, lib.attribute = e._launch, e._failed, e._attribute
        for envar in self._envars():
            envar._arch = e.target

    @staticmethod
    def _envars() -> list[Any]:
        from cutlass.base_dsl.dsl import DSLSingletonMeta

        return [dsl.envar for dsl in DSLSingletonMeta._instances.values() if hasattr(dsl, "envar")]

    def _install(self) -> None:
        try:
            import cutlass.cute.runtime as cute_runtime
            from cutlass._mlir_helpers import op as operations
            from cutlass.base_dsl import env_manager
            from cutlass.base_dsl.jit_executor import JitExecutor
            from cutlass.cutlass_dsl import CuTeDSL
            from cutlass.cutlass_dsl import cuda_jit_executor as executor
        except ImportError as e:
            raise EmulatorError(f"the kernel emulator needs nvidia-cutlass-dsl: {e}") from e
        CuTeDSL._get_dsl()
        library = self.library
        for envar in self._envars():
            self._set(envar, "_arch", envar._arch)
            for name in ("keep_ptx", "keep_cubin", "no_cache", "lineinfo"):
                self._set(envar, name, True)
            self._set(envar, "dump_dir", library.dump_dir)
            self._set(envar, "shared_libs", library.path)
        self._set(env_manager, "get_prefix_dsl_libs", lambda prefix: library.path)
        for name, function in places.replaced().items():
            self._set(operations, name, function)
        compiled, module = executor.CudaDialectJitCompiledFunction, executor.CudaDialectJitModule
        self._set(compiled, "num_devices", 1)
        self._set(module, "unload", lambda m: setattr(m, "_unloaded", True))
        self._after(compiled, "__init__", lambda *_: library.collect())
        self._after(cute_runtime._Tensor, "__init__", adopt)
        self._before(cute_runtime._Tensor, "load_dltensor", adopt)
        self._around(compiled, "__call__", False)
        self._around(JitExecutor, "__call__", False)
        self._around(compiled, "run_compiled_program", False)
        self._around(JitExecutor, "run_compiled_program", False)
        try:
            from cutlass.cutlass_dsl import tvm_ffi_provider as tvm
        except ImportError:
            return  # TVM-FFI is not installed: then nothing can be compiled for it either
        self._around(tvm.TVMFFIJitCompiledFunction, "__call__", True)
        self._around(tvm.TVMFFIJitCompiledFunctionWithKwargs, "__call__", True)
        self._compile_host_code_once(tvm._aot_support)

    def _compile_host_code_once(self, support: Any) -> None:
        """Compile the host code of a function for TVM-FFI once, without optimisation: it only launches kernels.

        The DSL compiles it for an engine first, drops the engine, and compiles it again for an object that it loads.
        """
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.cutlass_dsl import CuTeDSL

        jit, export = Compiler.jit, support.export_module_to_bytes

        def engine(compiler: Any, *args: Any, **kwargs: Any) -> Any:
            dropped = CuTeDSL._get_dsl().compile_options.enable_tvm_ffi
            return _NoEngine() if dropped else jit(compiler, *args, **kwargs)

        def exported(*args: Any, **kwargs: Any) -> bytes:
            return export(*args, **{**kwargs, "opt_level": 0})

        self._set(Compiler, "jit", engine)
        self._set(support, "export_module_to_bytes", exported)

    def _after(self, cls: Any, name: str, action: Callable[..., None]) -> None:
        original = getattr(cls, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            action(this)
            return result

        self._set(cls, name, method)

    def _before(self, cls: Any, name: str, action: Callable[..., None]) -> None:
        original = getattr(cls, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            action(this)
            return original(this, *args, **kwargs)

        self._set(cls, name, method)

    def _around(self, cls: Any, name: str, convert: bool) -> None:
        """Calls of compiled functions: note their tensors, and raise the launch's error instead of an error code."""
        original = getattr(cls, name)

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self.active._guarded(original, (this, *args), kwargs, convert)

        self._set(cls, name, method)
