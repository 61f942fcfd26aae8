"""Tensor maps through `launch`, for Triton, Gluon and CUDA C++.

They are found by box, dtype and swizzle, packed as the compiled kernel's parameters are, started by the driver and
replayed. Without a GPU an emulated driver records its calls.
"""

import ctypes
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

import ridgeline
from ridgeline import boundary, cuda
from ridgeline.boundary import launch
from ridgeline.cuda import Arranged, CudaKernel, Starter, TensorMap
from ridgeline.lab.analysis import inspect
from ridgeline.op import RidgelineError
from ridgeline.replay import Plans

_load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
TRANSPOSE = CudaKernel(Path(__file__).with_name("tensor_map.cu"), "transpose", "PMii")


@triton.jit
def _boxes(marks, source, out, mark, R: tl.constexpr, C: tl.constexpr):
    tl.store(marks, mark)
    place = [tl.program_id(0), tl.program_id(1) * R, tl.program_id(2) * C]
    out.store(place, source.load(place))


@gluon.jit
def _tiles(marks, source, out, mark):
    """A kernel that knows its tiles only from the descriptors."""
    gl.store(marks, mark)
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    row, column = gl.program_id(0) * source.block_type.shape[0], gl.program_id(1) * source.block_type.shape[1]
    mbarrier.expect(ready, source.block_type.nbytes)
    _load(source, [row, column], ready, tile)
    mbarrier.wait(ready, 0)
    _store(out, [row, column], tile)
    tma.store_wait(0)


class Copy(NamedTuple):
    """What `_bundled` copies: maps between other arguments."""

    marks: Any
    source: Any
    size: int
    out: Any


@gluon.jit
def _bundled(copy, mark):
    _tiles(copy.marks, copy.source, copy.out, mark + copy.size)


class Lines(NamedTuple):
    """A tensor with its strides, as kernels take what belongs together."""

    data: Any
    stride: int
    step: int


class Rules(NamedTuple):
    first: int
    scale: float | None
    shift: float | None


@triton.jit
def _line(x, row, wide: tl.constexpr):
    return x.data + row * x.stride + tl.arange(0, wide) * x.step


@triton.jit
def _scaled(out, x, rules, rows, tile: tl.constexpr):
    for row in range(rules.first, rows):
        moved = Lines(x.data + 1, x.stride, x.step)
        values = tl.load(_line(moved, row, tile[0]))
        if rules.scale is not None:
            values *= rules.scale
        if rules.shift is not None:
            values += rules.shift
        tl.store(_line(out, row, tile[0]), values)


def boxes(marks: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mark: int, R: int = 16, C: int = 32) -> None:
    maps = [TensorMap(t, (1, "R", "C")) for t in (x, y)]
    launch(_boxes, (x.shape[0], -(-x.shape[1] // R), -(-x.shape[2] // C)), marks, *maps, mark, R=R, C=C)


def tiles(marks: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mark: int, R: int = 16, C: int = 32) -> None:
    maps = [TensorMap(t, (R, C), min(128, C * x.element_size())) for t in (x, y)]
    launch(_tiles, (-(-x.shape[0] // R), -(-x.shape[1] // C)), marks, *maps, mark, num_warps=4)


# --- without a GPU


class Driver:
    """Records every map as its arguments, and every start as the bytes of its parameters."""

    def __init__(self) -> None:
        self.version, self.encoded, self.parameters, self.context = 13020, 0, b"", True
        self.cuLaunchKernelEx = self.start

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuTensorMapEncodeTiled(
        self, at: Any, element: int, dims: int, pointer: Any, shape: Any, steps: Any, box: Any, *rest: Any
    ) -> int:
        if not self.context:
            return 201
        self.encoded += 1
        said = (
            struct.pack("<Q2B2s2B", pointer.value, element, dims, b"\xff\xff", rest[2], 0)
            + bytes(box)
            + bytes(shape)
            + bytes(steps)
        )
        ctypes.memmove(at.value, (said + b"\xff" * 128)[:128], 128)
        return 0

    def start(self, config: Any, function: Any, _: Any, extra: Any) -> int:
        words = (ctypes.c_void_p * 5).from_address(extra.value)
        self.parameters = ctypes.string_at(words[1], ctypes.c_size_t.from_address(words[3]).value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(cuda, "driver_library", lambda: fake)
    for cached in (cuda._driver_version, cuda.encoded):
        cached.cache_clear()
    yield fake
    for cached in (cuda._driver_version, cuda.encoded):
        cached.cache_clear()


def declared(ptx: str) -> list[tuple[int, int]]:
    """Returns the offset and size of every parameter of the one kernel in a PTX, as the driver would."""
    found, end = [], 0
    for align, kind, count in re.findall(
        r"\.param (?:\.align (\d+) )?\.[a-z](\d+)(?: [^\[,\n)]*(?:\[(\d+)\])?)", ptx.split(".entry")[1]
    ):
        size = int(kind) // 8 * int(count or 1)
        offset = -(-end // int(align or size)) * int(align or size)
        found.append((offset, size))
        end = offset + size
    return found


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Returns the kernel for an H100, as `launch` would find it there."""
    with inspect._triton_for("sm_90"):
        made = kernel.warmup(*boundary._made(kernel, args, constants), grid=(1,), **constants)
    facts = SimpleNamespace(run=None, function=1, metadata=made.metadata, src=made.src, packed_metadata=None)
    return SimpleNamespace(warmup=lambda *_, **__: facts, __name__=kernel.__name__), declared(made.asm["ptx"])


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", [_boxes, _tiles], ids=["triton", "gluon"])
def test_parameters_lie_where_the_compiled_kernel_has_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, kernel: Any
) -> None:
    dtype, dims, wide = (torch.float32, 3, 32) if kernel is _boxes else (torch.bfloat16, 2, 128)
    x, y = (torch.zeros((3, 40, 256)[-dims:], dtype=dtype) for _ in range(2))
    maps = [TensorMap(t, (1, 16, wide)[-dims:], 128) for t in (x, y)]
    constants = {"R": 16, "C": wide} if kernel is _boxes else {}
    marks = torch.zeros(1, dtype=torch.int32)
    found, real = compiled(kernel, (marks, *maps, 7), constants)
    monkeypatch.setattr(boundary, "parameters", lambda function: real)
    start, slow = boundary._triton_start(found, (), constants, 4, 0)
    assert isinstance(start, Arranged)
    assert slow is None
    start(1, 2, 3, 0, [marks.data_ptr(), *maps, 7])
    packed, offsets = driver.parameters, [offset for offset, _ in real]
    assert len(packed) == sum(real[-1])
    assert struct.unpack_from("Q", packed, offsets[0]) == (marks.data_ptr(),)
    for n, t in enumerate((x, y)):
        first = 1 + n * (1 + 2 * dims)
        pointer, element, rank, swizzle = struct.unpack_from("<Q2B2xB", packed, offsets[first])
        box = struct.unpack_from(f"<{dims}I", packed, offsets[first] + 14)[::-1]
        assert (pointer, element, rank) == (t.data_ptr(), {torch.float32: 7, torch.bfloat16: 9}[dtype], dims)
        if kernel is _tiles:  # a row of 256 bytes is two boxes of the swizzle's width
            assert (box, swizzle) == ((16, 64), 3)
        sizes = [struct.unpack_from("i", packed, offset)[0] for offset in offsets[first + 1 : first + 1 + dims]]
        steps = [
            struct.unpack_from("q", packed, offset)[0] for offset in offsets[first + 1 + dims : first + 1 + 2 * dims]
        ]
        assert (tuple(sizes), tuple(steps)) == (t.shape, t.stride())
    assert struct.unpack_from("i", packed, offsets[-3]) == (7,)
    assert packed[offsets[-2] :] == bytes(16)  # scratch memory
    start(1, 2, 3, 0, [marks.data_ptr(), *maps, 8])
    assert driver.encoded == 2  # equal tensors give equal maps


@pytest.mark.compiles
def test_maps_in_a_bundle_lie_where_the_compiled_kernel_has_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is loaded without Triton's launcher, which Triton 3.6 cannot make for it."""
    x, y, marks = *(torch.zeros(40, 256, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(1, dtype=torch.int32)
    maps = [TensorMap(t, (16, 64), 128) for t in (x, y)]
    args = Copy(marks, maps[0], 3, maps[1]), 7
    with inspect._triton_for("sm_90"):
        made = _bundled.warmup(*boundary._made(_bundled, args, {}), grid=(1,))
    real = declared(made.asm["ptx"])
    monkeypatch.setattr(boundary, "parameters", lambda function: real)
    loads = []

    def load_binary(*given: Any) -> tuple[int, int, int, int, int]:
        loads.append(given)
        return 5, 6, 32, 0, 1024

    utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda index: {"max_shared_mem": 232448})
    active = SimpleNamespace(utils=utils)
    monkeypatch.setattr(boundary.triton.runtime, "driver", SimpleNamespace(active=active))
    kernel = SimpleNamespace(warmup=lambda *_, **__: made, __name__="_bundled", params=_bundled.params)
    values: list[Any] = []
    boundary._read(args, values, [])
    start, slow = boundary._triton_start(kernel, args, {}, len(values), 0)
    assert isinstance(start, Arranged)
    assert (slow, loads) == (None, [(made.name, made.kernel, made.metadata.shared, 0)])
    start(1, 2, 3, 0, values)
    packed, offsets = driver.parameters, [offset for offset, _ in real]
    assert struct.unpack_from("Q", packed, offsets[0]) == (marks.data_ptr(),)
    for first, t in ((1, x), (7, y)):  # a map has two sizes and two steps; the number is between them
        assert struct.unpack_from("<Q2B2xB", packed, offsets[first]) == (t.data_ptr(), 9, 2, 3)
    assert [struct.unpack_from("i", packed, offsets[n]) for n in (6, 12)] == [(3,), (7,)]
    assert packed[offsets[-2] :] == bytes(16)  # scratch memory


@pytest.mark.compiles
@pytest.mark.parametrize("scale", [2.0, None])
def test_fields_of_named_tuples_are_parameters(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, scale: float | None
) -> None:
    """A 1 and a None are compiled into the kernel; all other fields lie where it has them."""
    x, out = torch.zeros(3, 48), torch.zeros(3, 32)
    args = Lines(out, 32, 1), Lines(x, 48, 1), Rules(2, scale, None), 7
    found, real = compiled(_scaled, args, {"tile": (32,)})
    monkeypatch.setattr(boundary, "parameters", lambda function: real)
    values: list[Any] = []
    boundary._read(args, values, [])
    start, slow = boundary._triton_start(found, (), {}, len(values), 0)
    assert isinstance(start, Arranged)
    assert slow is None
    start(1, 1, 1, 0, values)
    codes = "QiQiii" if scale is None else "QiQiifi"
    passed = [struct.unpack_from(c, driver.parameters, o)[0] for c, (o, _) in zip(codes, real, strict=False)]
    assert passed == [out.data_ptr(), 32, x.data_ptr(), 48, 2, *([] if scale is None else [scale]), 7]
    assert len(real) == len(codes) + 2


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [2.0, None])
def test_named_tuples_through_launch(scale: float | None, device: str) -> None:
    x, out = torch.randn(3, 48, device=device), torch.zeros(3, 32, device=device)
    launch(_scaled, (1,), Lines(out, 32, 1), Lines(x, 48, 1), Rules(1, scale, None), 3, tile=(32,))
    assert torch.equal(out[1:], x[1:, 1:33] * (scale or 1))
    assert not out[0].any()


@pytest.mark.compiles
def test_a_kernel_with_maps_is_never_started_slowly(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [TensorMap(torch.zeros(40, 256, dtype=torch.float16), (16, 64), 128)] * 2
    found, real = compiled(_tiles, (torch.zeros(1, dtype=torch.int32), *maps, 7), {})
    monkeypatch.setattr(boundary, "parameters", lambda function: real[:-1])
    with pytest.raises(RidgelineError, match=r"_tiles takes tensor maps, and `launch` cannot start it.*P M2 M2 i"):
        boundary._triton_start(found, (), {}, 4, 0)
    facts = found.warmup()
    facts.metadata = facts.metadata._replace(tensordesc_meta=[])
    with pytest.raises(RidgelineError, match="without their copy engine"):
        boundary._triton_start(found, (), {}, 4, 0)


def test_what_a_kernel_is_found_by() -> None:
    def key(*args: Any) -> list[Any]:
        found: list[Any] = []
        boundary._read(args, [], found)
        return found

    x = torch.zeros(64, 64)
    kinds = [
        (x, (16, 32)),
        (x, (32, 16)),
        (x.half(), (16, 32)),
        (x, (16, 32), 64),
        (x, ("R", 32)),
        (x[None], (1, 16, 32)),
    ]
    keys = [key(TensorMap(*kind)) for kind in kinds]
    assert all(a not in keys[:n] for n, a in enumerate(keys))
    assert key(TensorMap(x, (16, 32))) == key(TensorMap(torch.ones(3, 8), (16, 32)))
    bundles = [(x, 1, 48), (x, 48, 1), (x, 48, 47), (x, 48, None), (x.half(), 48, 1), (x[:, 1:], 48, 1)]
    keys = [key(Lines(*bundle)) for bundle in bundles]
    assert all(a not in keys[:n] for n, a in enumerate(keys))
    assert key(Lines(x, 48, 1)) == key(Lines(torch.ones(2), 16, 1))
    with pytest.raises(TypeError, match="TensorMaps"):
        key(object())


def test_dimensions_of_one_element_have_any_stride(driver: Driver) -> None:
    x = torch.zeros(64, dtype=torch.float16).as_strided((1, 4, 1, 16), (7, 16, 3, 1))
    view = TensorMap(x, (1, 1, 1, 16)).view({})
    assert (view.shape, view.stride) == ((1, 4, 1, 16), (8, 16, 8, 1))
    assert struct.unpack_from("<3Q", view.encode(x.data_ptr()), 14 + 4 * 4 + 8 * 4) == (16, 32, 16)


@pytest.mark.parametrize("tokens", [1, 50])
def test_ragged_maps_end_where_a_sequence_does(tokens: int) -> None:
    """Emulates how the copy engine computes addresses from coordinates, and the size of the fourth dimension."""
    x = torch.zeros(tokens, 3, 16, dtype=torch.float16).transpose(0, 1)[None]
    tensor_map = TensorMap(x, (1, 1, 1, 8, 16), 32, ragged=True)
    view, far = tensor_map.view({}), TensorMap.FAR
    for begin, length in ((0, tokens), (0, 0), (tokens // 2, tokens // 4), (tokens // 3, tokens - tokens // 3)):
        for row in range(length + 9):
            at = far, begin + length, 2, far - length + row, 0
            offset = sum(n * step for n, step in zip(at, view.stride, strict=True)) * 2 % (1 << 64)
            if row < length:
                assert offset == x[0, 2, begin + row].data_ptr() - x.data_ptr()
                assert all(n < size for n, size in zip(at, view.shape, strict=True))
            else:
                assert at[3] >= view.shape[3]
    with pytest.raises(RidgelineError, match="ragged"):
        TensorMap(x[0], (1, 8, 16), ragged=True).view({})


@pytest.mark.parametrize("version", [13010, 13020])
@pytest.mark.parametrize("rows", [1024, 1025])
def test_small_tensors_with_an_older_driver(driver: Driver, version: int, rows: int) -> None:
    driver.version = version
    made = TensorMap(torch.zeros(rows, 64, dtype=torch.float16), (64, 64)).view({}).encode(1 << 20)
    assert made[10:12] == (b"\xdf\xff" if (version, rows) == (13010, 1024) else b"\xff\xff")


def test_a_thread_without_a_context_gets_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda, "ensure_context", lambda index: setattr(driver, "context", index == 3))
    driver.context = False
    TensorMap(torch.zeros(64, 64), (8, 8)).view({}).encode(1 << 20)
    assert driver.encoded == 1


def test_plans_make_maps_of_new_tensors(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.replay._empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    start = Arranged(
        Starter(1, "128si128s", 32, 0, 0), [(1, lambda m: m.view({"R": 8})), (2, None), (0, lambda m: m.view({}))]
    )
    runs = []

    def launcher(x: torch.Tensor, n: int) -> torch.Tensor:
        runs.append(1)
        y = torch.empty_like(x)
        values = [TensorMap(x[2:], (4, 16)), TensorMap(y, ("R", 16)), n]
        watching = boundary.recorder()
        if watching is not None:
            watching.started(start, (1, 1, 1), values, values)
        start(1, 1, 1, 0, values)
        return y

    replayed = Plans(launcher, 1).front(2)
    kept = []
    for _ in range(5):
        x = torch.zeros(64, 64)
        kept.append((x, y := replayed(x, 5)))
        first, number, second = struct.unpack("128si128s", driver.parameters)
        assert struct.unpack_from("<Q", first) == (y.data_ptr(),)
        assert struct.unpack_from("<2I", first, 14) == (16, 8)
        assert number == 5
        assert struct.unpack_from("<Q", second) == (x[2:].data_ptr(),)
        assert struct.unpack_from("<2I2Q", second, 14) == (16, 4, 64, 62)
    assert len(runs) == 2
    before = driver.encoded
    replayed(kept[0][0], 5)
    assert driver.encoded <= before + 1  # the argument's was kept


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_triton_kernels_take_them(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs the copy engine")
    x = torch.randn(3, 40, 112, device=device).to(dtype)[..., :104]
    y, marks = torch.zeros(3, 40, 104, device=device, dtype=dtype), torch.zeros(1, dtype=torch.int32, device=device)
    boxes(marks, x, y, 7)
    assert torch.equal(y, x)
    assert marks.item() == 7


# --- on a GPU


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns what `launch` found to start kernels of Triton with, each anew."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs the copy engine")
    made: list[Any] = []
    real = boundary._triton_start

    def watched(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(boundary, "_started", {})
    monkeypatch.setattr(boundary, "_triton_start", watched)
    return made


KINDS = [
    (torch.bfloat16, 16, 32),
    (torch.bfloat16, 64, 128),
    (torch.float32, 16, 32),
    (torch.float16, 16, 32),
    (torch.float16, 64, 16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [tiles, boxes])
def test_each_kind_has_a_kernel(starts: list[Any], copy: Callable[..., None]) -> None:
    """Runs twice with other tensors: what a kind of call found the first time serves it the second."""
    for mark in (1, 2):
        for dtype, R, C in KINDS:
            x = torch.randn((3, 200, 264)[-2 if copy is tiles else 0 :], device="cuda").to(dtype)
            y, marks = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
            copy(marks, x, y, 2 * mark, R, C)
            assert torch.equal(y, x), (dtype, R, C)
            assert marks.item() == 2 * mark
    assert len(starts) == len(KINDS)
    assert all(isinstance(start, Arranged) and slow is None for start, slow in starts)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["triton", "gluon", "cuda"])
def test_replays(starts: list[Any], kind: str) -> None:
    runs = []

    def launcher(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(1)
        marks = torch.empty(1, dtype=torch.int32, device=x.device)
        y = torch.empty((x.shape[1], x.shape[0]) if kind == "cuda" else x.shape, device=x.device)
        if kind == "triton":
            boxes(marks, x[None], y[None], 3)
        elif kind == "gluon":
            tiles(marks, x, y, 3)
        else:
            launch(TRANSPOSE, (2, 3), y, TensorMap(x, ("ROWS", "COLUMNS")), 48, 64, ROWS=16, COLUMNS=32, block=128)
        return y, marks

    replayed = Plans(launcher, 1).front(1)
    kept = []
    for _ in range(8):
        x = torch.randn(48, 64, device="cuda")
        y, _ = replayed(x)
        kept.append((x, y))
    for x, y in kept:
        assert torch.equal(y, x.t() if kind == "cuda" else x)
    assert len(runs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_attention_is_started_by_the_driver_and_replayed(starts: list[Any], D: int) -> None:
    from ridgeline.ops.attention.common import kernels

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its kernels are Hopper's")
    plans: Plans = kernels._forward.__globals__["learn"].__self__
    plans.found.clear()
    plans.seen.clear()
    for n in range(5):
        q, k, v = (torch.randn(2, 192, 3, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        o = ridgeline.attention(q, k, v, causal=True, impl="gluon")
        wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        assert (o - wanted).abs().max() < 0.05, n
        assert len(plans.found) == (n > 0)
    assert [(type(start), slow) for start, slow in starts] == [(Arranged, None)]
