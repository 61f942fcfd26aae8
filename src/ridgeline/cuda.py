"""CUDA C++ through NVRTC: compiled when first needed, started by the driver, with clusters, large shared memory and tensor maps."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ridgeline import device as devices

CTYPE = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
TILES = Path(__file__).with_name("tiles")
LAUNCH_OPTIONS = ("block", "cluster", "shared")


class CudaError(RuntimeError):
    """What NVRTC or the CUDA driver said."""


@dataclass(frozen=True)
class Compiled:
    """One CUDA C++ kernel compiled for one architecture: its machine code and the compiler's words about it."""

    cubin: bytes
    ptx: str
    log: str


@cache
def unavailable() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"cuda-bindings and nvidia-cuda-nvrtc are needed to compile CUDA C++ ({error})"
    return None


@cache
def _include() -> str:
    """The CUDA headers, which Triton's wheel brings along."""
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/include")


@cache
def compile_source(path: Path, arch: str, macros: tuple[tuple[str, Any], ...]) -> Compiled:
    """Compiles a .cu file for an architecture such as "sm_90" with the given macros. Raises CudaError with the compiler's log."""
    from cuda.bindings import nvrtc

    arch = {"sm_90": "sm_90a", "sm_100": "sm_100a"}.get(arch, arch)
    options = [f"-arch={arch}", "-std=c++20", "-default-device", "-lineinfo", "--ptxas-options=-v", f"-I{_include()}", f"-I{TILES}"]
    options += [f"-D{name}={value}" for name, value in macros]
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    try:
        log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaError(f"{path.name} does not compile for {arch}:\n{log[:3000]}")
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled(cubin, _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size: Any, get: Any, program: Any) -> bytes:
    _, count = size(program)
    buffer = b" " * count
    get(program, buffer)
    return buffer


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'error %d' % code).decode()}")


def parameters(function: int) -> list[tuple[int, int]]:
    """The offset and size in bytes of every parameter of a loaded kernel, as the driver knows them."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    at = ctypes.c_void_p(function)
    while not _driver().cuFuncGetParamInfo(at, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append((offset.value, size.value))
    return found


class Starter:
    """Starts a loaded kernel with one call of the driver.

    layout: the parameters as a `struct` format. The memory that the driver reads (CUlaunchConfig, the packed parameters and
    what points to them) is made once and filled at each start, under a lock.
    """

    CONFIG = struct.Struct("@7I4xQQI4x")  # grid, block, dynamic shared memory, stream, attributes, their count
    GRID = struct.Struct("@3I")

    def __init__(self, function: int, layout: struct.Struct, threads: int, shared: int, cluster: int = 1, what: str = "a kernel"):
        self.what = f"{what} with {threads} threads and {shared} bytes of shared memory"
        self.facts = threads, 1, 1, shared
        # CUlaunchAttribute: an id (4: the cluster's size), padding, and a union of 64 bytes.
        self.attribute = ctypes.create_string_buffer(struct.pack("@I4x3I52x", 4, cluster, 1, 1), 72)
        self.attributes = (ctypes.addressof(self.attribute), 1) if cluster > 1 else (0, 0)
        self.config = ctypes.create_string_buffer(self.CONFIG.size)
        self.packed = ctypes.create_string_buffer(max(layout.size, 1))
        self.size = ctypes.c_size_t(layout.size)
        self.extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.packed), 2, ctypes.addressof(self.size), 0)
        self.addresses = ctypes.addressof(self.config), function, 0, ctypes.addressof(self.extra)
        self.lock, self.stream = threading.Lock(), -1
        self.launch, self.pack, self.pack_grid = _driver().cuLaunchKernelEx, layout.pack_into, self.GRID.pack_into

    def __call__(self, x: int, y: int, z: int, stream: int, values: Sequence[Any]) -> None:
        with self.lock:
            if stream != self.stream:
                self.CONFIG.pack_into(self.config, 0, x, y, z, *self.facts, stream, *self.attributes)
                self.stream = stream
            else:
                self.pack_grid(self.config, 0, x, y, z)
            self.pack(self.packed, 0, *values)
            code = self.launch(*self.addresses)
        if code:
            _check(code, f"{self.what}, grid {x, y, z}")


class CudaKernel:
    """A kernel of a .cu file: `CudaKernel(path, "gelu_fwd", "PPq")`.

    arguments: one code per argument, as in `struct`: P a pointer (a tensor, or None), i int, q long long, f float,
        T a tensor map (128 bytes).
    Started with macros and the options `block` (threads), `cluster` (blocks along x) and `shared` (bytes of dynamic
    shared memory) as constants of `boundary.launch`.
    """

    def __init__(self, path: Path, name: str, arguments: str):
        self.path, self.name, self.arguments = path, name, arguments

    def __repr__(self) -> str:
        return f"{self.path.name}:{self.name}"

    def compile(self, arch: str, constants: dict[str, Any]) -> Compiled:
        return compile_source(self.path, arch, tuple((k, v) for k, v in constants.items() if k not in LAUNCH_OPTIONS))

    def load(self, constants: dict[str, Any], index: int) -> Starter:
        """Compiles the kernel for a GPU and loads it there."""
        driver = _driver()
        compiled = self.compile(devices.gpu(index).arch, constants)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin), f"loading {self}")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), f"finding {self}")
        block, cluster, shared = (int(constants.get(o, d)) for o, d in zip(LAUNCH_OPTIONS, (256, 1, 0), strict=True))
        if shared > 48 << 10:
            _check(driver.cuFuncSetAttribute(function, 8, shared), f"{self} with {shared} bytes of shared memory")
        if cluster > 8:
            _check(driver.cuFuncSetAttribute(function, 14, 1), f"{self} with a cluster of {cluster}")
        layout = struct.Struct("@" + self.arguments.replace("T", "128s"))
        return Starter(function.value or 0, layout, block, shared, cluster, str(self))
