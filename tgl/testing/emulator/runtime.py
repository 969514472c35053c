"""``emulate``: the context in which compiled CuTe DSL functions run on the emulator."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import cache
from .engine import TIMINGS
from .errors import EmulatorError
from .hostlib import HostLibrary
from .launch import NUM_SMS, Launch

_CPU, _CUDA = 1, 2  # DLPack device types


@dataclass
class LaunchRecord:
    """What one emulated launch did.

    ``tma_bytes`` counts global-memory bytes by direction (load, store, reduce); ``bank_conflicts`` the shared-memory passes
    beyond those that conflict-free accesses would take; ``steps`` scheduler turns. ``unsupported`` lists instructions the
    translation refused and the launch did not reach, with their PTX line.
    """

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    instructions: Counter[str] = field(default_factory=Counter)
    tma_bytes: dict[str, int] = field(default_factory=dict)
    mma_count: int = 0
    mma_flops: int = 0
    barriers: int = 0
    bank_conflicts: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, int] = field(default_factory=dict)
    tensor_memory_columns: int = 0
    steps: int = 0
    seconds: float = 0.0
    translate_seconds: float = 0.0

    @property
    def warp_instructions(self) -> int:
        """Instructions executed, each counted once per warp."""
        return sum(self.instructions.values())


class Emulation:
    """The machine of an ``emulate`` block. Options may be changed between launches; ``launches`` grows with each one."""

    def __init__(
        self, arch: str, seed: int, timing: str, resident_clusters: int, detect_races: bool, strict_loads: bool
    ):
        if arch not in NUM_SMS:
            raise ValueError(f"arch must be one of {sorted(NUM_SMS)}, got {arch!r}")
        if resident_clusters < 1:
            raise ValueError(f"resident_clusters must be positive, got {resident_clusters}")
        if timing not in TIMINGS:
            raise ValueError(f"timing must be one of {TIMINGS}, got {timing!r}")
        self.arch, self.seed, self.timing = arch, seed, timing
        self.resident_clusters, self.detect_races = resident_clusters, detect_races
        self.strict_loads = strict_loads
        self.launches: list[LaunchRecord] = []
        self.error: BaseException | None = None
        self.edit_ptx: Callable[[str], str] | None = None
        self.depth = 0
        self._registered: list[tuple[int, int, Any]] = []
        self._call: list[tuple[int, int]] = []

    def register(self, tensor: Any) -> None:
        """Let kernels access a tensor that they reach only through a pointer in memory, not through an argument."""
        start, size = tensor_span(tensor)
        self._registered.append((start, size, tensor))

    def check(self) -> None:
        """Raise the error of the last launch, if it has not been raised yet."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    # ---- called by the host library ----
    def _failed(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def _attribute(self, number: int) -> int:
        """cudaDeviceGetAttribute for those attributes that host code asks for."""
        major = 10 if self.arch == "sm_100a" else 9
        return {75: major, 76: 0, 16: NUM_SMS[self.arch], 97: 232448, 81: 233472, 10: 32}.get(number, 0)

    def _spans(self, program: cache.Program, params: bytes) -> list[tuple[int, int]]:
        """Host memory the launch may touch: the tensors of the call, registered ones, and what its pointers point into."""
        spans = self._call + [(a, n) for a, n, _ in self._registered]
        unknown = []
        for offset, size in program.params:
            # the only pointer of a tensor map is its first word, and its second half is not initialised
            for i in range(offset, offset + (8 if size == 128 else size) - 7, 8):
                v = int.from_bytes(params[i : i + 8], "little")
                if 1 << 20 < v < 1 << 48 and not any(a <= v < a + n for a, n in spans):
                    unknown.append(v)
        mapped = _mapped() if unknown else []
        unknown = [v for v in unknown if any(a <= v < b for a, b in mapped)]  # the others are numbers, not pointers
        if unknown:
            storages = _torch_storages()
            spans += {(a, n) for v in unknown for a, n in storages if a <= v < a + n}
        return spans

    def _launch(self, text: str, name: str, dims: Sequence[int], smem: int, args: Any) -> None:
        if self.edit_ptx is not None:
            text = self.edit_ptx(text)
        t0 = time.perf_counter()
        program = cache.get_program(text, name)
        grid, block, cluster = tuple(dims[:3]), tuple(dims[3:6]), tuple(dims[6:9])
        record = LaunchRecord(name, program.target, grid, block, cluster, smem)  # type: ignore[arg-type]
        record.translate_seconds = time.perf_counter() - t0
        record.unsupported = dict(program.unsupported)
        self.launches.append(record)
        if program.target != self.arch:
            raise EmulatorError(f"kernel {name} was compiled for {program.target}; the emulated machine is {self.arch}")
        params = bytearray(program.param_size)
        for i, (offset, size) in enumerate(program.params):
            params[offset : offset + size] = ctypes.string_at(args[i], size)
        t0 = time.perf_counter()
        launch = None
        try:
            with single_threaded_blas(), _no_gc():
                launch = Launch(
                    program, grid, block, cluster, smem, bytes(params), self._spans(program, bytes(params)), seed=self.seed,
                    timing=self.timing, resident_clusters=self.resident_clusters, detect_races=self.detect_races, strict_loads=self.strict_loads,
                )  # fmt: skip
                launch.run()
        except EmulatorError as e:
            text = re.sub(r"\{line (\d+)\}", lambda m: program.location(int(m.group(1))), str(e))
            raise type(e)(f"{text}\nin kernel {name}, seed {self.seed}, timing {self.timing}") from e.__cause__
        finally:
            record.seconds = time.perf_counter() - t0
            if launch is not None:
                _fill(record, launch)


def _fill(record: LaunchRecord, launch: Launch) -> None:
    stat = launch.stat
    record.instructions = launch.opcodes
    record.tma_bytes = {
        "load": stat["tma_load_bytes"] + stat["bulk_load_bytes"],
        "store": stat["tma_store_bytes"] + stat["bulk_store_bytes"],
        "reduce": stat["tma_reduce_bytes"],
    }
    record.mma_count, record.mma_flops = stat["mma"], stat["mma_flops"]
    record.barriers = stat["barriers"] + stat["cluster_barriers"]
    record.bank_conflicts = stat["bank_conflicts"]
    record.tensor_memory_columns = stat["tmem_columns"]
    record.steps = stat["steps"]
    for text, n in launch.warnings.items():
        text = re.sub(r"\{line (\d+)\}", lambda m: launch.program.location(int(m.group(1))), text)
        record.warnings[text] = record.warnings.get(text, 0) + n


# ---------------------------------------------------------------------------------------------------------------------
def tensor_span(t: Any) -> tuple[int, int]:
    """(address, bytes) from the first to behind the last element of a torch tensor."""
    if t.numel() == 0:
        return t.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.element_size()


def _mapped() -> list[tuple[int, int]]:
    """Address ranges mapped for writing in this process."""
    out = []
    with open("/proc/self/maps") as f:
        for line in f:
            span, mode = line.split(None, 2)[:2]
            if "w" in mode:
                low, high = span.split("-")
                out.append((int(low, 16), int(high, 16)))
    return out


def _torch_storages() -> list[tuple[int, int]]:
    import torch

    out = set()
    for o in gc.get_objects():
        if type(o) in (torch.Tensor, torch.nn.Parameter) and o.device.type == "cpu" and o.layout == torch.strided:
            s = o.untyped_storage()
            if s.nbytes():
                out.add((s.data_ptr(), s.nbytes()))
    return sorted(out)


def _capsule_tensor(capsule: Any) -> int | None:
    """Address of the DLTensor in a DLPack capsule, None if the capsule was consumed."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    try:
        name = api.PyCapsule_GetName(capsule)
    except (ValueError, TypeError):
        return None
    if name not in (b"dltensor", b"dltensor_versioned"):
        return None
    # DLManagedTensorVersioned has version, manager, deleter and flags in front
    return api.PyCapsule_GetPointer(capsule, name) + (0 if name == b"dltensor" else 32)


def pretend_cuda(capsule: Any) -> tuple[int, int] | None:
    """Rewrite the device of a DLPack capsule from CPU to CUDA; the tensor's (address, bytes), None if it was consumed."""
    p = _capsule_tensor(capsule)
    if p is None:
        return None
    # struct DLTensor { void *data; {int32 type, id} device; int32 ndim; {u8 code, u8 bits, u16 lanes}; i64 *shape, *strides; u64 offset; }
    device = ctypes.c_int32.from_address(p + 8)
    if device.value == _CPU:
        device.value = _CUDA
    ndim = ctypes.c_int32.from_address(p + 16).value
    bits = ctypes.c_uint8.from_address(p + 21).value * ctypes.c_uint16.from_address(p + 22).value
    shape = ctypes.c_void_p.from_address(p + 24).value
    strides = ctypes.c_void_p.from_address(p + 32).value
    data = (ctypes.c_void_p.from_address(p).value or 0) + ctypes.c_uint64.from_address(p + 40).value
    sizes = [ctypes.c_int64.from_address(shape + 8 * i).value for i in range(ndim)] if shape else []
    if any(n == 0 for n in sizes):
        return data, 0
    if strides:
        last = sum((n - 1) * ctypes.c_int64.from_address(strides + 8 * i).value for i, n in enumerate(sizes))
    else:
        last = -1
        for n in sizes:
            last = (last + 1) * n - 1 if last >= 0 else n - 1
    return data, -(-(last + 1) * bits // 8)


class _CudaView:
    """A CPU tensor offered through DLPack as if it were CUDA memory."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.detach().__dlpack__()
        pretend_cuda(capsule)
        return capsule


def _walk(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments of a call, with containers and dataclasses opened."""
    for v in values:
        if isinstance(v, (list, tuple)):
            yield from _walk(v)
        elif isinstance(v, dict):
            yield from _walk(v.values())
        elif dataclasses.is_dataclass(v) and not isinstance(v, type):
            yield from _walk(vars(v).values())
        else:
            yield v


@contextlib.contextmanager
def single_threaded_blas() -> Iterator[None]:
    """numpy's BLAS with one thread: many small products, and often a busy machine, where its threads only spin."""
    functions = _blas_functions()
    before = [get() for get, _ in functions]
    for _, put in functions:
        put(1)
    try:
        yield
    finally:
        for (_, put), n in zip(functions, before, strict=True):
            put(n)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """A launch makes millions of short-lived objects, none in cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _blas_functions() -> list[tuple[Any, Any]]:
    if _blas_cache:
        return _blas_cache[0]
    out = []
    try:
        with open("/proc/self/maps") as f:
            paths = {line.split()[-1] for line in f if "openblas" in line}
    except OSError:
        paths = set()
    for path in sorted(paths):
        lib = ctypes.CDLL(path)
        for prefix, suffix in (
            ("scipy_openblas", "64_"),
            ("scipy_openblas", ""),
            ("openblas", "64_"),
            ("openblas", ""),
        ):
            get = getattr(lib, f"{prefix}_get_num_threads{suffix}", None)
            put = getattr(lib, f"{prefix}_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                out.append((get, put))
                break
    _blas_cache.append(out)
    return out


_blas_cache: list[list[tuple[Any, Any]]] = []


# ---------------------------------------------------------------------------------------------------------------------
class _Dsl:
    """The hooks into the CuTe DSL: installed while at least one ``emulate`` block is open, removed with the last one."""

    def __init__(self) -> None:
        self.library = HostLibrary()
        atexit.register(self.library.close)
        self.stack: list[Emulation] = []
        self.tensor_type: Any = None
        self.undo: list[Callable[[], None]] = []

    @property
    def active(self) -> Emulation:
        return self.stack[-1]

    def _set(self, obj: Any, name: str, value: Any) -> None:
        own = name in vars(obj)
        old = vars(obj).get(name)
        setattr(obj, name, value)
        self.undo.append((lambda: setattr(obj, name, old)) if own else (lambda: delattr(obj, name)))

    def push(self, e: Emulation) -> None:
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
            envar._arch = e.arch

    @staticmethod
    def _envars() -> list[Any]:
        from cutlass.base_dsl.dsl import DSLSingletonMeta

        return [dsl.envar for dsl in DSLSingletonMeta._instances.values() if hasattr(dsl, "envar")]

    def _install(self) -> None:
        try:
            import cutlass.cute.runtime as cute_runtime
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
        compiled, module = executor.CudaDialectJitCompiledFunction, executor.CudaDialectJitModule
        self._set(compiled, "num_devices", 1)
        self._set(module, "unload", lambda m: setattr(m, "_unloaded", True))
        self._after(compiled, "__init__", lambda *_: library.collect())
        self._after(cute_runtime._Tensor, "__init__", _adopt)
        self._before(cute_runtime._Tensor, "load_dltensor", _adopt)
        self.tensor_type = cute_runtime._Tensor
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
            e = self.active
            outer = e.depth == 0
            if outer:
                e.error = None
            e._call += _call_spans((args, kwargs))
            if convert:
                args, kwargs = _as_cuda(args), {k: _as_cuda(v) for k, v in kwargs.items()}
            e.depth += 1
            try:
                return original(this, *args, **kwargs)
            except Exception:
                e.check()
                raise
            finally:
                e.depth -= 1
                if outer:
                    e._call = []
                    e.check()

        self._set(cls, name, method)


def _adopt(tensor: Any) -> None:
    """A DSL tensor made from a CPU tensor: let it pass for CUDA memory (unless it was used outside), note where it lies."""
    if not hasattr(tensor, "_emulator_span") and tensor._dltensor_wrapper is None:
        span = pretend_cuda(tensor._dlpack_data)
        if span is not None:
            tensor._emulator_span = span


def _loaded_span(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of a DSL tensor whose capsule was consumed before it came here."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.data_ptr, -(-(last + 1) * tensor.element_type.width // 8)


def _call_spans(arguments: Any) -> list[tuple[int, int]]:
    import torch

    spans = []
    tensor_type = _dsl[0].tensor_type
    for v in _walk(arguments):
        if type(v) is tensor_type:
            _adopt(v)
            spans.append(v._emulator_span if hasattr(v, "_emulator_span") else _loaded_span(v))
        elif isinstance(v, torch.Tensor) and v.device.type == "cpu":
            spans.append(tensor_span(v))
    return spans


def _as_cuda(value: Any) -> Any:
    """An argument of a TVM-FFI function with every CPU tensor in it replaced by the same memory as a CUDA tensor."""
    import torch
    import tvm_ffi

    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return tvm_ffi.from_dlpack(_CudaView(value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(map(_as_cuda, value))
    if type(value) in (tuple, list):
        return type(value)(map(_as_cuda, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _as_cuda(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


_dsl: list[_Dsl] = []


def active() -> Emulation | None:
    """The innermost open ``emulate`` block, or None."""
    return _dsl[0].stack[-1] if _dsl and _dsl[0].stack else None


@contextlib.contextmanager
def emulate(
    arch: str,
    *,
    seed: int = 0,
    timing: str = "adversarial",
    resident_clusters: int = 4,
    detect_races: bool = True,
    strict_loads: bool = False,
) -> Iterator[Emulation]:
    """Run compiled CuTe DSL functions on the kernel emulator.

    Inside the block, functions compiled by ``cute.compile`` (with or without TVM-FFI) and called with CPU tensors execute
    their kernels' PTX on those tensors; a launch's error is raised by the call. Compile inside a block: such functions stay
    bound to the emulator and may be called in any later block for the same architecture, while functions compiled outside
    stay bound to the CUDA runtime. Blocks may be nested and entered any number of times, for different architectures.

    Args:
        arch: ``"sm_100a"`` or ``"sm_90a"``.
        seed: of everything that is random: completion of asynchronous work, order of warps, spurious time-outs.
        timing: ``"adversarial"``, or ``"in_order"`` (asynchronous work completes when it is issued).
        resident_clusters: clusters that run at a time; more start when all of them wait.
        detect_races: keep vector clocks and report unordered accesses (about twice the time).
        strict_loads: make the use of a tcgen05.ld register before tcgen05.wait::ld an error. It is undefined in PTX, but
            the assembler makes the hardware wait, and kernels rely on it: by default it is a warning.
    Yields:
        ``Emulation``, whose ``launches`` describe what ran.
    Raises:
        EmulatorError: no C compiler or no nvidia-cutlass-dsl; from calls inside: what a kernel did wrong.
        ValueError: a bad argument.
    """
    e = Emulation(arch, seed, timing, resident_clusters, detect_races, strict_loads)
    if not _dsl:
        _dsl.append(_Dsl())
    _dsl[0].push(e)
    try:
        yield e
    finally:
        _dsl[0].pop()
    e.check()


def sweep(
    call: Callable[[], Any],
    outputs: Sequence[Any],
    seeds: Iterable[int] = range(6),
    timings: Sequence[str] = ("adversarial",),
) -> list[list[LaunchRecord]]:
    """Run ``call()`` under several schedules of the active ``emulate`` block and demand identical bits.

    Args:
        call: launches kernels that overwrite ``outputs`` entirely.
        outputs: tensors; poisoned (NaN, or all bits set) before every run.
        seeds, timings: the schedules.
    Returns:
        The launch records of each run.
    Raises:
        EmulatorError: outside an ``emulate`` block, a run failed, or two schedules gave different bits.
    """
    import torch

    e = active()
    if e is None:
        raise EmulatorError("sweep() needs an open emulate(...) block")
    saved = e.seed, e.timing
    first: list[Any] | None = None
    runs = []
    try:
        for timing in timings:
            for seed in seeds:
                e.seed, e.timing = seed, timing
                for o in outputs:
                    if o.is_floating_point() and o.element_size() > 1:
                        o.fill_(float("nan"))
                    else:
                        o.view(torch.uint8).fill_(0xFF)
                start = len(e.launches)
                call()
                e.check()
                runs.append(e.launches[start:])
                got = [o.detach().contiguous().view(torch.uint8).clone() for o in outputs]
                if first is None:
                    first = got
                for i, (a, b) in enumerate(zip(first, got, strict=True)):
                    if not torch.equal(a, b):
                        raise EmulatorError(
                            f"output {i} depends on the schedule (timing {timing}, seed {seed}): there is a race"
                        )
    finally:
        e.seed, e.timing = saved
    return runs
