"""Ops on more than 2^31 elements, in every implementation that supports the call: all elements land in the right
place.

The data make results exact in any order. Pieces are compared, or everything if that is cheap.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import get
from ridgeline.select import why_not

pytestmark = pytest.mark.gpu
FAR, WHERE = 1 << 31, "cuda"
WIDE = 2048  # matrices with many rows


def rungs(name: str, *args: Any, gigabytes: int, but: tuple[str, ...] = ()) -> Iterator[str | None]:
    """Returns the implementation that serves the call and each kernel that supports it; first checks for enough
    memory."""
    if WHERE == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] >> 30
        if free < gigabytes:
            pytest.skip(f"needs {gigabytes} GB more of the GPU's memory, and {free} are free")
    kernels = [i for i in get(name).implementations.values() if i.is_kernel and i.name not in but]
    yield from (None, *(i.name for i in kernels if why_not(i, *args) is None))


def room(gigabytes: int) -> None:
    """Skips the test unless the GPU has that much memory free for the arguments."""
    next(rungs("copy", torch.empty(1, device=WHERE), gigabytes=gigabytes))


def marks(n: int) -> list[tuple[int, int]]:
    """Returns 31 places and their values."""
    return list(zip((0, n // 2, FAR - 1, FAR, n - 1), (1, 2, 4, 8, 16), strict=True))


def marked(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros, except for `marks`."""
    x = torch.zeros(n, dtype=dtype, device=WHERE)
    for at, value in marks(n):
        x[at] = value
    return x


def pieces(n: int, size: int = 64) -> list[slice]:
    return [slice(0, size), slice(n // 2, n // 2 + size), slice(n - size, n)]


def same(found: torch.Tensor, expected: torch.Tensor, impl: str | None) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{impl}: {m}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_reduce_sum(dtype: torch.dtype) -> None:
    room(9)
    x = marked(FAR + 4099, dtype)
    for impl in rungs("reduce_sum", x, gigabytes=1):
        assert ridgeline.reduce_sum(x, impl=impl).item() == 31, impl


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_sum_along(dim: int) -> None:
    room(5)
    x = marked(FAR + 8 * WIDE, torch.bfloat16).view(-1, WIDE)
    expected = torch.zeros(x.shape[1 - dim], dtype=x.dtype, device=WHERE)
    for at, value in marks(x.numel()):
        expected[divmod(at, WIDE)[1 - dim]] += value
    for impl in rungs("reduce_sum", x, dim, gigabytes=1):
        same(ridgeline.reduce_sum(x, dim, impl=impl), expected, impl)


def test_dot() -> None:
    """Without atomic_half, whose 2^31 atomics take 41 s."""
    room(9)
    a, b = marked(FAR + 4099, torch.float16), torch.ones(FAR + 4099, dtype=torch.float16, device=WHERE)
    for impl in rungs("dot", a, b, gigabytes=1, but=("atomic_half",)):
        assert ridgeline.dot(a, b, impl=impl).item() == 31, impl


@pytest.mark.parametrize("shape", ["long", "odd", "many"])
def test_transpose(shape: str) -> None:
    sides = {
        "long": (FAR // 32768 + 24, 32768),
        "odd": (FAR // 32768 + 1, 32769),
        "many": ((FAR >> 20) + 1, 1024, 1024),
    }[shape]
    room(5)
    x = torch.randn(sides, device=WHERE, dtype=torch.bfloat16)
    for impl in rungs("transpose", x, gigabytes=5):
        y = ridgeline.transpose(x, impl=impl)
        for r in pieces(x.shape[-2]):
            for c in pieces(x.shape[-1]):
                same(y[..., c, r][-70:], x[..., r, c].mT[-70:], impl)
        del y


@pytest.mark.parametrize("many", [False, True])
def test_index_add_to(many: bool) -> None:
    """Rows of x beyond 2^31 elements, with few indices and with more than are searched directly."""
    room(10)
    rows = FAR // 256 + 9
    x = (torch.arange(rows, device=WHERE) % 7).half()[:, None].expand(rows, 256).contiguous()
    index = torch.tensor([rows - 1, 0, rows // 2, rows - 1], device=WHERE)
    index = rows - 1 - torch.arange(2000, device=WHERE) % 500 if many else index
    source = torch.arange(256, device=WHERE).half().expand(len(index), 256).contiguous()
    expected = [torch.index_add(x[p], 0, index[(index >= p.start) & (index < p.stop)] - p.start,
                                source[(index >= p.start) & (index < p.stop)]) for p in pieces(rows)]  # fmt: skip
    for impl in rungs("index_add", x, 0, index, source, gigabytes=5):
        y = ridgeline.index_add(x, 0, index, source, impl=impl)
        for p, wanted in zip(pieces(rows), expected, strict=True):
            same(y[p], wanted, impl)
        del y


def test_index_add_from() -> None:
    """Rows of a source beyond 2^31 elements."""
    room(5)
    source = marked(FAR + 8 * 256, torch.float16).view(-1, 256)
    x = torch.ones(1000, 256, device=WHERE, dtype=torch.float16)
    index = torch.arange(len(source), device=WHERE) % 1000
    expected = x.clone()
    for at, value in marks(source.numel()):
        expected[at // 256 % 1000, at % 256] += value
    for impl in rungs("index_add", x, 0, index, source, gigabytes=1):
        same(ridgeline.index_add(x, 0, index, source, impl=impl), expected, impl)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_upsample_nearest2d(form: torch.memory_format) -> None:
    room(13)
    images = (FAR >> 20) + 2
    x = (
        torch.randn(images, 16, 128, 128, device=WHERE, dtype=torch.float16)
        .contiguous(memory_format=form)
        .requires_grad_()
    )
    dy = torch.randn(images, 16, 256, 256, device=WHERE, dtype=torch.float16).contiguous(memory_format=form)
    for impl in rungs("upsample_nearest2d", x, 2, gigabytes=6):
        y = ridgeline.upsample_nearest2d(x, 2, impl=impl)
        (dx,) = torch.autograd.grad(y, x, dy)
        for p in pieces(images, 2):
            same(y[p], torch.nn.functional.interpolate(x[p], scale_factor=2, mode="nearest"), impl)
            exact = dy[p].double().unflatten(3, (128, 2)).unflatten(2, (128, 2)).sum((3, 5))
            torch.testing.assert_close(
                dx[p], exact.half(), rtol=2e-3, atol=1e-3, msg=lambda m, impl=impl: f"{impl}: {m}"
            )
        del y, dx


def test_copy() -> None:
    room(5)
    x = torch.randn(FAR + 4099, device=WHERE, dtype=torch.bfloat16)
    for impl in rungs("copy", x, gigabytes=8):
        assert torch.equal(ridgeline.copy(x, impl=impl), x), impl


def test_concat_kv() -> None:
    room(18)
    shape = (FAR >> 23) + 1, 8192, 8, 128
    caches = [torch.zeros(shape, device=WHERE, dtype=torch.bfloat16) for _ in range(2)]
    new = [torch.randn(shape, device=WHERE, dtype=torch.bfloat16)[:, 2:] for _ in range(2)]
    positions = torch.arange(shape[0], device=WHERE) % 3
    for impl in rungs("concat_kv", *caches, *new, positions, gigabytes=1):
        for cache in caches:
            cache.zero_()
        ridgeline.concat_kv(*caches, *new, positions, impl=impl)
        for p in pieces(shape[0], 1):
            expected = [torch.zeros_like(cache[p]) for cache in caches]
            get("concat_kv").reference(*expected, *(t[p] for t in new), positions[p])
            for cache, wanted in zip(caches, expected, strict=True):
                same(cache[p], wanted, impl)


@pytest.mark.parametrize("masked", [False, True])
def test_repeat_kv(masked: bool) -> None:
    room(6)
    batch = (FAR >> 26) + 1
    x = torch.randint(-8, 9, (batch, 8, 8192, 128), device=WHERE, dtype=torch.int8).bfloat16().requires_grad_()
    dy = torch.randint(-8, 9, (batch, 64, 8192, 128), device=WHERE, dtype=torch.int8).bfloat16()
    lengths = torch.arange(batch, device=WHERE) * 250 if masked else None
    for impl in rungs("repeat_kv", x, 8, lengths, gigabytes=6):
        y = ridgeline.repeat_kv(x, 8, lengths=lengths, impl=impl)
        (dx,) = torch.autograd.grad(y, x, dy)
        for p in pieces(batch, 1):
            one = x[p].detach().requires_grad_()
            wanted = get("repeat_kv").reference(one, 8, lengths=None if lengths is None else lengths[p])
            same(y[p], wanted, impl)
            same(dx[p], torch.autograd.grad(wanted, one, dy[p])[0], impl)
        del y, dx


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_histogram(dtype: torch.dtype) -> None:
    room(9)
    each = FAR // 256 + 3
    x = torch.arange(256, device=WHERE).to(dtype).repeat(each)
    for impl in rungs("histogram", x, 256, (0, 256), gigabytes=1):
        same(ridgeline.histogram(x, 256, (0, 256), impl=impl), torch.full((256,), each, device=WHERE), impl)


def test_cumsum() -> None:
    room(3)
    n, step = FAR + 4112, FAR // 2047 + 1
    x = torch.zeros(n, dtype=torch.int8, device=WHERE)
    x[::step] = 1
    for impl in rungs("cumsum", x, 0, torch.int32, gigabytes=9):
        y = ridgeline.cumsum(x, 0, torch.int32, impl=impl)
        for p in [*pieces(n), slice(FAR - 64, FAR + 64)]:
            same(y[p], (torch.arange(p.start, p.stop, device=WHERE) // step + 1).int(), impl)
        same(y[::step], torch.arange(1, (n - 1) // step + 2, device=WHERE, dtype=torch.int32), impl)
        del y


@pytest.mark.parametrize("dim", [0, 1])
def test_cumsum_along(dim: int) -> None:
    room(3)
    x = torch.ones(FAR // WIDE + 8, WIDE, dtype=torch.int8, device=WHERE)
    for impl in rungs("cumsum", x, dim, torch.int32, gigabytes=9):
        y = ridgeline.cumsum(x, dim, torch.int32, impl=impl)
        for p in pieces(len(x)):
            at = torch.arange(WIDE, device=WHERE)[None] if dim else torch.arange(p.start, p.stop, device=WHERE)[:, None]
            same(y[p], (at + 1).int().expand(64, WIDE), impl)
        del y


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_radix_sort(dtype: torch.dtype) -> None:
    """Returns keys that repeat every 256 places, so that the sorted order is known, and their indices."""
    room(5)
    each = FAR // 256 + 3
    keys = (torch.arange(256, device=WHERE) * (1 if dtype == torch.uint8 else 100)).to(dtype).repeat(each)
    for impl in rungs("radix_sort", keys, None, gigabytes=40):
        made, order = ridgeline.radix_sort(keys, impl=impl)
        for p in [*pieces(len(keys)), slice(FAR - 64, FAR + 64), slice(255 * each - 64, 255 * each + 64)]:
            at = torch.arange(p.start, p.stop, device=WHERE)
            same(made[p], keys[at // each], impl)
            same(order[p], at // each + 256 * (at % each), impl)
        del made, order
