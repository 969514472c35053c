"""The few CUDA driver calls that are needed, through ctypes: no toolkit and no Python package."""

import ctypes
import ctypes.util

_FUNCTION_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FUNCTION_NONPORTABLE_CLUSTER = 14
_ATTRIBUTE_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Device:
    """The first CUDA device. Raises OSError without a driver and RuntimeError without a device."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self.capability = major.value, minor.value

    def _call(self, name, *args):
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def load(self, image: bytes, name: str):
        """A kernel of a PTX text or cubin."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image + b"\0"))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def upload(self, data: bytes) -> int:
        """A new device buffer with these bytes."""
        p = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(max(len(data), 1)))
        self._call("cuMemcpyHtoD_v2", p, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        return p.value

    def download(self, p: int, n: int) -> bytes:
        out = ctypes.create_string_buffer(n)
        self._call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(p), ctypes.c_size_t(n))
        return out.raw

    def launch(self, function, grid, block, params, shared=0, cluster=(1, 1, 1)):
        """Launch and wait; ``params``: the bytes of each kernel parameter."""
        self._call("cuFuncSetAttribute", function, _FUNCTION_SHARED, shared)
        keep = [ctypes.create_string_buffer(p, len(p)) for p in params]
        # tensor maps are read from the parameter's own address: 64-byte aligned copies
        aligned = []
        for p in params:
            raw = ctypes.create_string_buffer(len(p) + 64)
            start = -ctypes.addressof(raw) % 64
            ctypes.memmove(ctypes.addressof(raw) + start, p, len(p))
            keep.append(raw)
            aligned.append(ctypes.addressof(raw) + start)
        pointers = (ctypes.c_void_p * len(aligned))(*aligned)
        attribute = _Attribute(id=_ATTRIBUTE_CLUSTER)
        attribute.value[0], attribute.value[1], attribute.value[2] = cluster
        config = _Config(shared=shared, stream=None, attributes=ctypes.pointer(attribute), count=1)
        config.grid[:], config.block[:] = grid, block
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self._call("cuCtxSynchronize")
