"""CUDA C++ kernels: compiled by NVRTC when first needed, and started by the driver; clusters, tensor maps."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from ridgeline import device as devices
from ridgeline.op import RidgelineError

CTYPE = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
TILES = Path(__file__).with_name("tiles")
LAUNCH_OPTIONS = ("block", "cluster", "shared", "launch_pdl", "cooperative")


class CudaError(RuntimeError):
    """An error of NVRTC or of the CUDA driver."""


@dataclass(frozen=True)
class Compiled:
    """One CUDA C++ kernel compiled for one architecture: its machine code, its PTX and the compiler's log."""

    cubin: bytes
    ptx: str
    log: str


@cache
def unavailable() -> str | None:
    """Returns why CUDA C++ cannot be compiled here, or None if it can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"compiling CUDA C++ needs the packages cuda-bindings and nvidia-cuda-nvrtc ({error})"
    return None


@cache
def _include() -> str:
    """Returns the folder of the CUDA headers that come with Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/include")


@cache
def _headers(folder: Path) -> bytes:
    """The headers of tiles/ and, behind them, those of another folder."""
    own = sorted(folder.glob("*.cuh")) if folder != TILES else []
    return b"".join([path.read_bytes() for path in [*sorted(TILES.glob("*.cuh")), *own]])


@cache
def compile_source(path: Path, arch: str, macros: tuple[tuple[str, Any], ...]) -> Compiled:
    """Returns a .cu file compiled for an architecture such as "sm_90" with the given macros.

    Results are cached in Triton's cache folder, under a hash of the source, headers, options and NVRTC's version.
    Raises CudaError, with the compiler's log, if the file does not compile.
    """
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    arch = {"sm_90": "sm_90a", "sm_100": "sm_100a"}.get(arch, arch)
    options = [
        f"-arch={arch}",
        "-std=c++20",
        "-default-device",
        "-lineinfo",
        "--ptxas-options=-v",
        f"-I{_include()}",
        f"-I{TILES}",
    ]
    if any(path.parent.glob("*.cuh")) and path.parent != TILES:
        options.append(f"-I{path.parent}")
    options += [f"-D{name}={value}" for name, value in macros]
    source, file = path.read_bytes(), f"{path.stem}.pickle"
    made_of = source, _headers(path.parent), repr((path.name, options, nvrtc.nvrtcVersion())).encode()
    kept = get_cache_manager(hashlib.sha256(b"\0".join(made_of)).hexdigest())
    if found := kept.get_file(file):
        return pickle.loads(Path(found).read_bytes())
    _, program = nvrtc.nvrtcCreateProgram(source, path.name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    try:
        log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaError(f"{path.name} does not compile for {arch}:\n{log[:3000]}")
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        compiled = Compiled(cubin, _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode(), log)
        kept.put(pickle.dumps(compiled), file)
        return compiled
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size: Any, get: Any, program: Any) -> bytes:
    _, count = size(program)
    buffer = b" " * count
    get(program, buffer)
    return buffer


@cache
def driver_library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver_library().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'error %d' % code).decode()}")


def parameters(function: int) -> list[tuple[int, int]]:
    """Returns the offset and size in bytes of every parameter of a loaded kernel, from the driver."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    at = ctypes.c_void_p(function)
    driver = driver_library()
    while not driver.cuFuncGetParamInfo(at, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append((offset.value, size.value))
    return found


def ensure_context(index: int) -> None:
    """Makes the GPU's context current in a thread without a context, such as one of autograd's."""
    driver, current = driver_library(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(current)), "reading the CUDA context")
    if not current.value:
        device = ctypes.c_int()
        _check(driver.cuDeviceGet(ctypes.byref(device), index), f"finding GPU {index}")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(current), device), f"the context of GPU {index}")
        _check(driver.cuCtxSetCurrent(current), f"the context of GPU {index}")


class Starter:
    """Starts a loaded kernel with one driver call.

    layout: the parameters as a `struct` format.
    One buffer holds the packed parameters and, right after them, CUlaunchConfig, which begins with the grid: one call
    of `pack` writes everything that changes between starts. A lock keeps two threads from writing it at once.
    """

    CONFIG = struct.Struct("@7I4xQQI4x")  # grid, block, dynamic shared memory, stream, attributes, their count
    INVALID_CONTEXT = 201

    def __init__(
        self,
        function: int,
        layout: str,
        threads: int,
        shared: int,
        index: int,
        cluster: int = 1,
        pdl: bool = False,
        cooperative: bool = False,
        what: str = "a kernel",
    ):
        self.what = f"{what} with {threads} threads and {shared} bytes of shared memory"
        self.facts, self.index, self.function, self.layout = (threads, 1, 1, shared), index, function, layout
        # CUlaunchAttribute: an id (2: cooperative; 4: cluster size; 6: programmatic dependent launch), padding, and
        # a union of 64 bytes.
        wanted = [struct.pack("@I4x3I52x", 4, cluster, 1, 1)] * (cluster > 1)
        wanted += [struct.pack("@I4xI60x", code, 1) for code, asked in ((6, pdl), (2, cooperative)) if asked]
        self.attribute = ctypes.create_string_buffer(b"".join(wanted))
        self.attributes = ctypes.addressof(self.attribute), len(wanted)
        self.begin = struct.calcsize("@" + layout + "0P")  # of the config
        self.memory, self.arguments, self._kept = self.room()
        self.lock, self.stream, self.launch = threading.Lock(), -1, driver_library().cuLaunchKernelEx
        self.pack = struct.Struct("@" + layout + "0P3I").pack_into

    def __call__(self, x: int, y: int, z: int, stream: int, values: Sequence[Any]) -> None:
        with self.lock:
            if stream != self.stream:
                self.CONFIG.pack_into(self.memory, self.begin, x, y, z, *self.facts, stream, *self.attributes)
                self.stream = stream
            self.pack(self.memory, 0, *values, x, y, z)
            code = self.launch(*self.arguments)
            if code == self.INVALID_CONTEXT:
                ensure_context(self.index)
                code = self.launch(*self.arguments)
        if code:
            _check(code, f"{self.what}, grid {x, y, z}")

    def room(self) -> tuple[Any, tuple[Any, ...], Any]:
        """Returns a buffer for parameters and config, the driver call's arguments, and what these point to."""
        memory = ctypes.create_string_buffer(self.begin + self.CONFIG.size)
        size, base = ctypes.c_size_t(struct.calcsize("@" + self.layout)), ctypes.addressof(memory)
        extra = (ctypes.c_void_p * 5)(1, base, 2, ctypes.addressof(size), 0)
        pointers = base + self.begin, self.function, 0, ctypes.addressof(extra)
        return memory, tuple(map(ctypes.c_void_p, pointers)), (size, extra)

    def bound(self, grid: tuple[int, int, int], values: Sequence[Any]) -> Bound:
        """Returns the start of this grid and these parameters; those that are `MOVING` are given at each start."""
        return Bound(self, grid, values)


def cleared(pointer: int, size: int, index: int, stream: int) -> None:
    """Fills memory of a GPU with zeros; torch's own way takes the host several times as long."""
    clear = _clear()
    code = clear(pointer, 0, size, stream)
    if code == Starter.INVALID_CONTEXT:
        ensure_context(index)
        code = clear(pointer, 0, size, stream)
    if code:
        _check(code, f"filling {size} bytes with zeros")


@cache
def _clear() -> Any:
    clear = driver_library().cuMemsetD8Async
    clear.argtypes = ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    return clear


MOVING = object()


class Bound:
    """Starts a kernel as `Starter` does, with parameters of which most stay: they are packed once.

    fill: what stands between the parameters that are given at each start: MOVING for each of these, and the bytes
    between two that are not neighbours. A start takes a list of that form."""

    def __init__(self, starter: Starter, grid: tuple[int, int, int], values: Sequence[Any]):
        self.starter, self.grid, self.lock, self.stream = starter, grid, threading.Lock(), -1
        self.memory, self.arguments, self._kept = starter.room()
        self.launch, self.fill = starter.launch, []
        codes, places = _split(starter.layout)
        zeros = [b"" if code[-1] == "s" else 0 for code in codes]
        starter.pack(self.memory, 0, *[z if v is MOVING else v for v, z in zip(values, zeros, strict=True)], *grid)
        layout, self.at, end = "=", 0, None
        for value, code, place in zip(values, codes, places, strict=True):
            if value is not MOVING:
                continue
            if end is None:
                self.at = end = place
            if place > end:
                layout += f"{place - end}s"
                self.fill.append(self.memory[end:place])
            layout += code.replace("P", "Q")
            self.fill.append(MOVING)
            end = place + struct.calcsize("=" + code.replace("P", "Q"))
        self.pack = struct.Struct(layout).pack_into

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        with self.lock:
            if stream != self.stream:
                s = self.starter
                s.CONFIG.pack_into(self.memory, s.begin, *self.grid, *s.facts, stream, *s.attributes)
                self.stream = stream
            self.pack(self.memory, self.at, *values)
            code = self.launch(*self.arguments)
            if code == Starter.INVALID_CONTEXT:
                ensure_context(self.starter.index)
                code = self.launch(*self.arguments)
        if code:
            _check(code, f"{self.starter.what}, grid {self.grid}")


def _split(layout: str) -> tuple[list[str], list[int]]:
    """Returns the codes of a native `struct` layout that hold a value each, and their offsets."""
    codes, places, before = [], [], ""
    for count, code in re.findall(r"(\d*)([a-zA-Z?])", layout):
        before += count + code
        if code != "x":
            codes.append(count + code)
            places.append(struct.calcsize("@" + before) - struct.calcsize("=" + (count + code).replace("P", "Q")))
    return codes, places


_ELEMENT = {
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
    torch.float64: 8,
    torch.int16: 1,
    torch.int32: 3,
    torch.int64: 5,
}
_ELEMENT |= dict.fromkeys((torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2), 0)
SWIZZLES = 0, 32, 64, 128  # the driver's code for each is its index


class TensorMap:
    """Describes a tensor to the copy engine (TMA) of Hopper and later, which moves boxes of one shape.

    It is an argument of `launch`, for a parameter of code M of a `CudaKernel` or for a tensor descriptor of a Triton or
    Gluon kernel. The tensor has 2 to 5 dimensions, and the last is contiguous.
    box: the shape of a box (Triton's block). A string stands for the constant of that name that the kernel starts with.
    swizzle: the span in bytes (0, 32, 64, 128) within which the rows of a box in shared memory are permuted against
        bank conflicts. For Gluon it is that of the NVMMASharedLayout; Triton chooses its own.
    ragged: for a tensor (1, n, rows, size) whose rows are sequences, one after the other. The map has five dimensions,
    and
        a box ends at the end of its sequence: elements beyond are read as 0 and not written. Row r of the sequence of
        `length` rows that starts at row `begin`, at index h of n, has the coordinates
        (FAR, begin + length, h, FAR - length + r, 0). FAR steps of the first dimension are -FAR rows, since addresses
        wrap around after 2**64 bytes; the fourth dimension ends at FAR.
    The constructor is cheap and reads no pointer; errors are raised when the kernel starts.
    """

    FAR = 1 << 30
    __slots__ = ("box", "ragged", "swizzle", "tensor")

    def __init__(self, tensor: torch.Tensor, box: Sequence[int | str], swizzle: int = 0, ragged: bool = False):
        self.tensor, self.box, self.swizzle, self.ragged = tensor, tuple(box), swizzle, ragged

    def view(self, constants: dict[str, Any]) -> View:
        """Returns the view of this map in a kernel with these constants."""
        return self.view_as(tuple([constants[n] if isinstance(n, str) else n for n in self.box]), self.swizzle)

    def view_as(self, box: tuple[int, ...], swizzle: int, sizes: bool = False) -> View:
        """Returns the view for a box and swizzle of the compiler, which splits blocks whose rows exceed the swizzle."""
        t = self.tensor
        if t.data_ptr() % 16:
            raise RidgelineError(
                f"a tensor map takes a tensor that begins at a multiple of 16 bytes, and this begins "
                f"{t.data_ptr() % 16} bytes after one"
            )
        shape, stride = t.shape, t.stride()
        if self.ragged:
            if t.dim() != 4 or shape[0] != 1 or shape[2] > self.FAR or t.element_size() not in (1, 2, 4):
                raise RidgelineError(
                    f"a ragged tensor map takes a tensor (1, n, rows, size), rows at most 2**30; given: {tuple(shape)}"
                )
            most = (1 << 31) - (1 << 16)
            row = stride[2] if shape[2] > 1 else 16 // t.element_size()  # the stride of a single row means nothing
            shape = torch.Size((most, most, shape[1], self.FAR, shape[3]))
            stride = (1 << 34) - row, row, stride[1], row, stride[3]
        return _view(t.dtype, shape, stride, box, swizzle, sizes)


class View:
    """A tensor map without its tensor's address. With `sizes`, shape and strides follow it, for kernels of Triton."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        sizes: bool,
    ):
        dims, size = len(shape), dtype.itemsize
        if not 2 <= dims <= 5 or len(box) != dims or dtype not in _ELEMENT or swizzle not in SWIZZLES:
            kinds = ", ".join(str(d).removeprefix("torch.") for d in _ELEMENT)
            given = f"{dims} of {dtype}, a box of {len(box)}, swizzle {swizzle}"
            raise RidgelineError(
                f"a tensor map takes 2 to 5 dimensions of {kinds}, a box of as many dimensions, "
                f"and swizzle 0, 32, 64 or 128; given: {given}"
            )
        if not all([0 < n < 1 << 31 for n in shape]):
            raise RidgelineError(f"a tensor map takes sizes from 1 to 2^31 - 1; given: {tuple(shape)}")
        # The stride of a dimension of size 1 means nothing.
        *outer, last = [16 // size if n == 1 else s for n, s in zip(shape, stride, strict=True)]
        if (shape[-1] > 1 and last != 1) or any([s * size % 16 for s in outer]):
            raise RidgelineError(
                "a tensor map takes a tensor whose last dimension is contiguous and whose rows start at multiples of "
                f"16 bytes; this has the shape {tuple(shape)} and strides {tuple(stride)} of {size} bytes"
            )
        self.shape, self.stride, self.box = tuple(shape), (*outer, 1), box
        self.what = f"a tensor map of {self.shape} {dtype}, strides {self.stride}, box {box}, swizzle {swizzle}"
        bounds, steps = (
            (ctypes.c_uint64 * dims)(*shape[::-1]),
            (ctypes.c_uint64 * dims)(*[s * size for s in outer[::-1]]),
        )
        sides, ones = (ctypes.c_uint32 * dims)(*box[::-1]), (ctypes.c_uint32 * dims)(*[1] * dims)
        # Not interleaved, 128-byte L2 fetches, zeros beyond the edges.
        self.before = _ELEMENT[dtype], dims
        self.after = bounds, steps, sides, ones, 0, SWIZZLES.index(swizzle), 2, 0
        self.bytes = sum([(n - 1) * s for n, s in zip(shape, self.stride, strict=True)]) * size
        self.sizes = struct.pack(f"@{dims}i{dims}q", *shape, *self.stride) if sizes else b""

    def encode(self, pointer: int) -> bytes:
        """Returns the kernel's parameter for a tensor at this address: the map's 128 bytes, and the sizes."""
        memory = ctypes.create_string_buffer(128 + 64)  # the driver needs 64-byte alignment
        at = -(-ctypes.addressof(memory) // 64) * 64
        facts = ctypes.c_void_p(at), *self.before, ctypes.c_void_p(pointer), *self.after
        code = driver_library().cuTensorMapEncodeTiled(*facts)
        if code == Starter.INVALID_CONTEXT:
            ensure_context(torch.cuda.current_device())
            code = driver_library().cuTensorMapEncodeTiled(*facts)
        _check(
            code, f"{self.what} (a box's sides are at most 256, and with a swizzle its rows at most that many bytes)"
        )
        made = bytearray(ctypes.string_at(at, 128))
        if self.bytes + 1 < 128 << 10 and _driver_version() <= 13010:
            made[10] &= 0xDF  # these drivers encode small tensors wrongly; CUTLASS and Triton do the same
        return bytes(made) + self.sizes


_view = lru_cache(1 << 12)(View)


@lru_cache(1 << 13)
def encoded(pointer: int, view: View) -> bytes:
    """Returns `view.encode(pointer)`, cached: the allocator reuses addresses, so most are found."""
    return view.encode(pointer)


@cache
def _driver_version() -> int:
    version = ctypes.c_int()
    _check(driver_library().cuDriverGetVersion(ctypes.byref(version)), "reading the driver's version")
    return version.value


class Arranged:
    """Starts a kernel whose parameters are a selection of `launch`'s values.

    takes: for each parameter, the number of its value and, for a tensor map, the function that makes its view."""

    def __init__(self, starter: Starter, takes: Sequence[tuple[int, Callable[[TensorMap], View] | None]]):
        self.starter, self.takes = starter, tuple(takes)

    def __call__(self, x: int, y: int, z: int, stream: int, values: Sequence[Any]) -> None:
        given = [
            values[n] if view is None else encoded(values[n].tensor.data_ptr(), view(values[n]))
            for n, view in self.takes
        ]
        self.starter(x, y, z, stream, given)


def parameter_layout(arguments: Sequence[str], real: Sequence[tuple[int, int]]) -> str | None:
    """Returns a `struct` format of a kernel's parameters, or None if it does not match the driver's offsets and sizes.

    arguments: codes of `struct`. M is a tensor map; M4 is one followed by four sizes and four strides, a parameter
    each.
    real: the driver's (offset, size) of each parameter."""
    layout, left = "", list(real)
    for code in arguments:
        many = 1
        if code[0] == "M":
            dims = int(code[1:] or 0)
            many, code = 1 + 2 * dims, f"{struct.calcsize(f'@128s{dims}i{dims}q')}s"
        mine, left = left[:many], left[many:]
        if len(mine) < many:
            return None
        layout += f"{max(0, mine[0][0] - struct.calcsize('@' + layout))}x{code}"
        if struct.calcsize("@" + layout) != sum(mine[-1]):
            return None
    return None if left else layout


class CudaKernel:
    """A kernel of a .cu file: `CudaKernel(path, "gelu_fwd", "PPq")`.

    arguments: a code for each argument, as in `struct`: P is a pointer (a tensor or None), i an int, q a long long,
        f a float; M is a `TensorMap`.
    The constants of `boundary.launch` are its macros and these options: `block` (threads), `cluster` (blocks along x),
    `shared` (bytes of dynamic shared memory), `launch_pdl` (see `boundary.early`) and `cooperative` (all blocks are
    resident at once, so that they may wait for each other).
    """

    def __init__(self, path: Path, name: str, arguments: str):
        self.path, self.name, self.arguments = path, name, arguments

    def __repr__(self) -> str:
        return f"{self.path.name}:{self.name}"

    def compile(self, arch: str, constants: dict[str, Any]) -> Compiled:
        macros = [(k, int(v) if isinstance(v, bool) else v) for k, v in constants.items() if k not in LAUNCH_OPTIONS]
        return compile_source(self.path, arch, tuple(macros))

    def load(self, constants: dict[str, Any], index: int) -> Starter:
        """Compiles the kernel for a GPU and loads it there."""
        driver = driver_library()
        compiled = self.compile(devices.gpu(index).arch, constants)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        ensure_context(index)
        _check(driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin), f"loading {self}")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), f"finding {self}")
        real = parameters(function.value or 0)  # the offset of a tensor map depends on the architecture
        layout = parameter_layout(self.arguments, real)
        if layout is None:
            raise CudaError(
                f"{self} takes parameters of (offset, bytes) {real}, but is declared with {self.arguments!r}"
            )
        block, cluster, shared, pdl, cooperative = (
            int(constants.get(o, d)) for o, d in zip(LAUNCH_OPTIONS, (256, 1, 0, 0, 0), strict=True)
        )
        if pdl and devices.gpu(index).capability < 90:
            raise CudaError(
                f"{self} uses programmatic dependent launch (launch_pdl), which needs sm_90 or later; "
                f"this GPU is {devices.gpu(index).name}"
            )
        static = ctypes.c_int()
        _check(driver.cuFuncGetAttribute(ctypes.byref(static), 1, function), f"reading {self}'s static shared memory")
        if shared + static.value > 48 << 10:
            _check(driver.cuFuncSetAttribute(function, 8, shared), f"{self} with {shared} bytes of shared memory")
        if cluster > 8:
            _check(driver.cuFuncSetAttribute(function, 14, 1), f"{self} with a cluster of {cluster}")
        return Starter(
            function.value or 0, layout, block, shared, index, cluster, bool(pdl), bool(cooperative), str(self)
        )

    def start(self, constants: dict[str, Any], values: Sequence[Any], index: int) -> Starter | Arranged:
        """Returns the object that starts the kernel with values of these kinds on a GPU."""
        maps = [type(v) is TensorMap for v in values]
        if maps != [code == "M" for code in self.arguments]:
            given = ", ".join([type(v).__name__ for v in values])
            raise TypeError(
                f"{self} is declared with {self.arguments!r}: each M takes a TensorMap, and no other code does; "
                f"given: {given}"
            )
        starter = self.load(constants, index)
        takes = [(n, (lambda seen: seen.view(constants)) if seen else None) for n, seen in enumerate(maps)]
        return Arranged(starter, takes) if any(maps) else starter


EMPTY = CudaKernel(TILES / "empty.cu", "empty", "")


@cache
def resident_clusters(where: devices.Device, size: int) -> int:
    """Returns how many clusters of `size` blocks run at once, with a multiprocessor for each block.

    A cluster lies within one partition (GPC) of the GPU, whose number of multiprocessors need not be a multiple of its
    size: an H100 runs 32 clusters of 4, not 33."""
    if size == 1 or devices.pretended() is not None:
        return where.multiprocessors // size
    start = EMPTY.load({"block": 512, "cluster": size, "shared": 160 << 10}, torch.cuda.current_device())
    start.CONFIG.pack_into(start.memory, start.begin, size, 1, 1, *start.facts, 0, *start.attributes)
    config, function, *_ = start.arguments
    count = ctypes.c_int()
    _check(driver_library().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, config), f"clusters of {size}")
    return count.value
