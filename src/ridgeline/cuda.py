"""CUDA C++ through NVRTC: compiled when first needed, started by the driver, with clusters, large shared memory and tensor maps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
    options = [f"-arch={arch}", "-std=c++20", "-lineinfo", "--ptxas-options=-v", f"-I{_include()}", f"-I{TILES}"]
    options += [f"-D{name}={value}" for name, value in macros]
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    try:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaError(f"{path.name} does not compile for {arch}:\n{log[:3000]}")
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled(cubin, _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size: Any, get: Any, program: Any) -> bytes:
    _, count = size(program)
    buffer = b" " * count
    get(program, buffer)
    return buffer.rstrip(b"\0") if get.__name__ != "nvrtcGetCUBIN" else buffer


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a union of 64 bytes of which a cluster's size takes three words."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", _Dim),
        ("block", _Dim),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'error %d' % code).decode()}")


class CudaKernel:
    """A kernel of a .cu file: `CudaKernel(path, "gelu_fwd", "PPq")`.

    arguments: one code per argument, as in `struct`: P a pointer (a tensor, or None), i int, q long long, f float,
        T a tensor map (128 bytes).
    Started with macros and the options `block` (threads), `cluster` (blocks along x) and `shared` (bytes of dynamic
    shared memory) as constants of `boundary.launch`.
    """

    def __init__(self, path: Path, name: str, arguments: str):
        self.path, self.name, self.arguments = path, name, arguments
        self._functions: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"{self.path.name}:{self.name}"

    def compile(self, arch: str, constants: dict[str, Any]) -> Compiled:
        return compile_source(self.path, arch, tuple((k, v) for k, v in constants.items() if k not in LAUNCH_OPTIONS))

    @cached_property
    def _layout(self) -> struct.Struct:
        return struct.Struct("@" + self.arguments.replace("T", "128s"))

    def _pack(self, args: Sequence[Any]) -> bytes:
        values = [(0 if a is None else a.data_ptr()) if code == "P" else a for code, a in zip(self.arguments, args, strict=True)]
        return self._layout.pack(*values)

    def start(self, grid: tuple[int, ...], stream: int, args: Sequence[Any], constants: dict[str, Any], index: int) -> None:
        key = (index, *constants.items())
        loaded = self._functions.get(key)
        if loaded is None:
            loaded = self._functions[key] = self._load(constants, index)
        function, block, shared, attributes, count = loaded
        packed = self._pack(args)
        size = ctypes.c_size_t(len(packed))
        buffer = ctypes.c_char_p(packed)
        extra = (ctypes.c_void_p * 5)(1, ctypes.cast(buffer, ctypes.c_void_p), 2, ctypes.addressof(size), 0)
        config = _Config(_Dim(*grid, *(1,) * (3 - len(grid))), _Dim(block, 1, 1), shared, stream, attributes, count)
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, None, extra)
        if code:
            _check(code, f"{self} with grid {grid}, block {block}, {shared} bytes of shared memory")

    def _load(self, constants: dict[str, Any], index: int) -> Any:
        driver = _driver()
        compiled = self.compile(devices._gpu(index).arch, constants)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream(index)
        _check(driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin), f"loading {self}")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), f"finding {self}")
        block, cluster, shared = (int(constants.get(o, d)) for o, d in zip(LAUNCH_OPTIONS, (256, 1, 0), strict=True))
        if shared > 48 << 10:
            _check(driver.cuFuncSetAttribute(function, 8, shared), f"{self} with {shared} bytes of shared memory")
        if cluster > 8:
            _check(driver.cuFuncSetAttribute(function, 14, 1), f"{self} with a cluster of {cluster}")
        attributes = (_Attribute * 1)(_Attribute(4, 0, (ctypes.c_uint * 16)(cluster, 1, 1)))
        return function, block, shared, attributes, int(cluster > 1)
