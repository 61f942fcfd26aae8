"""Weights of few bits beyond the cases of their ops: the files' layouts by their formulas, exactness, modules."""

import pytest
import torch

import ridgeline
from ridgeline import formats, nn
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def layer(N: int = 16, K: int = 64, group: int = 32, least: int = 0, most: int = 16) -> tuple[torch.Tensor, ...]:
    """Returns numbers (N, K), scales and zeros of a random layer."""
    numbers = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scale = torch.rand(N, K // group) + 0.5
    return numbers, scale, torch.randint(least, most, scale.shape, dtype=torch.uint8)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_by_its_formula(version: int) -> None:
    numbers, scale, zero = layer(least=2 - version, most=18 - version)
    qweight, qzeros, scales, g_idx = formats.pack_gptq(formats.pairs(numbers), scale, zero, version=version)
    assert qweight.dtype == qzeros.dtype == g_idx.dtype == torch.int32
    for k in range(64):
        for n in range(16):
            assert int(qweight[k // 8, n]) >> (4 * (k % 8)) & 15 == numbers[n, k]
            stored = int(qzeros[k // 32, n // 8]) >> (4 * (n % 8)) & 15
            assert stored + (version == 1) == zero[n, k // 32]
    assert torch.equal(scales, scale.T)
    q, s, z, order = formats.unpack_gptq(qweight, qzeros, scales, g_idx, version=version)
    for got, given in ((formats.nibbles(q), numbers), (s, scale), (z, zero)):
        assert torch.equal(got, given)
    assert order is None


def test_gptq_keeps_a_shuffled_order() -> None:
    numbers, scale, zero = layer(least=1)
    g_idx = (torch.arange(64) // 32)[torch.randperm(64)].int()
    packed = formats.pack_gptq(formats.pairs(numbers), scale, zero, g_idx)
    again = formats.unpack_gptq(*packed)
    assert torch.equal(again[3], g_idx)
    assert all(torch.equal(a, b) for a, b in zip(formats.pack_gptq(*again), packed, strict=True))
    x = torch.randn(3, 64)
    weight = (numbers.float() - zero[:, g_idx.long()].float()) * scale[:, g_idx.long()]
    y = ridgeline.int4_linear(x, *again[:3], g_idx=again[3])
    torch.testing.assert_close(y, x @ weight.T)


def test_awq_by_its_formula() -> None:
    numbers, scale, zero = layer()
    qweight, qzeros, scales = formats.pack_awq(formats.pairs(numbers), scale, zero)
    for n in range(16):
        place = 4 * AWQ.index(n % 8)
        for k in range(64):
            assert int(qweight[k, n // 8]) >> place & 15 == numbers[n, k]
        for g in range(2):
            assert int(qzeros[g, n // 8]) >> place & 15 == zero[n, g]
    q, s, z = formats.unpack_awq(qweight, qzeros, scales)
    for got, given in ((formats.nibbles(q), numbers), (s, scale), (z, zero)):
        assert torch.equal(got, given)


def test_formats_refuse() -> None:
    numbers, scale, zero = layer()
    q = formats.pairs(numbers)
    with pytest.raises(RidgelineError, match="zeros must be from 1 to 16"):
        formats.pack_gptq(q, scale, zero * 0)
    with pytest.raises(RidgelineError, match="the groups must divide K"):
        formats.unpack_gptq(torch.zeros(8, 16).int(), torch.zeros(3, 2).int(), torch.ones(3, 16))
    with pytest.raises(RidgelineError, match="version"):
        formats.unpack_gptq(torch.zeros(8, 16).int(), torch.zeros(2, 2).int(), torch.ones(2, 16), version=3)
    with pytest.raises(RidgelineError, match="N must be a multiple of 8"):
        formats.pack_awq(q[:5], scale[:5], zero[:5])


@pytest.mark.parametrize("symmetric", [False, True])
def test_quantize_int4_is_within_half_a_step(symmetric: bool) -> None:
    w = torch.randn(8, 256) + 0.3
    q, scale, zero = ridgeline.quantize_int4(w, group=64, symmetric=symmetric)
    assert (zero is None) == symmetric
    assert (q.shape, scale.shape) == ((8, 128), (8, 4))
    away = torch.full((8, 4), 8.0) if zero is None else zero.float()
    near = (formats.nibbles(q).float().unflatten(1, (4, 64)) - away[..., None]) * scale[..., None]
    slack = 1e-5 if symmetric else 0.5  # the zero is rounded too, which may clip the ends by half a step
    assert ((near - w.unflatten(1, (4, 64))).abs() <= (0.5 + slack) * scale[..., None]).all()


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_int4_linear_module_loads_files(layout: str, shuffled: bool) -> None:
    numbers, scale, zero = layer(least=1, most=16)
    q, bias, g_idx = formats.pairs(numbers), torch.randn(16), torch.arange(64) // 32
    if shuffled and layout == "awq":
        return
    if shuffled:
        g_idx = g_idx[torch.randperm(64)]
    if layout == "awq":
        stored = dict(zip(("qweight", "qzeros", "scales"), formats.pack_awq(q, scale, zero), strict=True))
    else:
        packed = formats.pack_gptq(q, scale, zero, g_idx, version=1 if layout == "gptq" else 2)
        stored = dict(zip(("qweight", "qzeros", "scales", "g_idx"), packed, strict=True))
    module = nn.Int4Linear(64, 16, group=32, layout=layout)
    module.load_state_dict(stored | {"bias": bias})
    x = torch.randn(5, 64)
    weight = (numbers.float() - zero[:, g_idx].float()) * scale[:, g_idx]
    torch.testing.assert_close(module(x), x @ weight.T + bias)
    saved = module.state_dict()
    assert saved.keys() == stored.keys() | {"bias"}
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


def test_modules_of_a_linear_layer() -> None:
    linear, x = torch.nn.Linear(64, 16), torch.randn(5, 64)
    with torch.no_grad():
        eight, four = nn.Int8Linear.of(linear), nn.Int4Linear.of(linear, group=32)
        exact = linear(x)
        assert (eight(x) - exact).norm() < 0.01 * exact.norm()
        assert (four(x) - exact).norm() < 0.2 * exact.norm()
    again = nn.Int8Linear(64, 16)
    again.load_state_dict(eight.state_dict())
    assert torch.equal(again(x), eight(x))


@pytest.mark.skipif(not INTERPRETED, reason="runs a kernel in Triton's interpreter")
def test_dequantised_copy() -> None:
    ridgeline.int4_linear  # noqa: B018 - registers the op
    numbers, scale, zero = layer(N=10, K=576, group=192, most=17)
    w = torch.ops.ridgeline.few_bits_weight(formats.pairs(numbers), scale, zero, torch.float32)
    spread = (numbers.float().unflatten(1, (3, 192)) - zero[..., None].float()) * scale[..., None]
    assert torch.equal(w, spread.flatten(1))
    codes = torch.randint(-128, 128, (10, 33), dtype=torch.int8)
    w = torch.ops.ridgeline.few_bits_weight(codes, scale[:, :1], None, torch.float32)
    assert torch.equal(w, codes * scale[:, :1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 200, 512), (16, 4096, 4096), (33, 256, 1024), (150, 384, 2048)])
def test_kernels_in_half_precision(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Every code and zero is exact, so only the sums' rounding remains."""
    M, N, K = shape
    x = torch.randn(M, K, device="cuda", dtype=dtype)
    q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale, zero = torch.rand(N, K // 128, device="cuda"), torch.randint(0, 17, (N, K // 128), device="cuda").byte()
    q8 = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    for z in (None, zero):
        exact = ridgeline.int4_linear(x.double(), q, scale.double(), z, impl="naive")
        y = ridgeline.int4_linear(x, q, scale, z, impl="triton")
        assert (y - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
    exact = ridgeline.int8_linear(x.double(), q8, scale[:, 0].double() / 99, impl="naive")
    y = ridgeline.int8_linear(x, q8, scale[:, 0] / 99, impl="triton")
    assert (y - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
