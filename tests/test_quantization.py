"""8-bit codes, exactly: ties, tiny and non-finite numbers, odd layouts; and matrix products of them that must be
exact.
"""

import pytest
import torch

from attention_calls import DTYPES
from ridgeline import dequantize, fp8_matmul, int8_matmul, quantize_fp8, quantize_int8
from ridgeline.op import RidgelineError, registry

pytestmark = pytest.mark.kernels

E4M3 = torch.float8_e4m3fn
BLOCKS = ((1, 128), (128, 128), "row", "tensor")
INT8 = [{"granularity": g, "symmetric": s} for g in ("tensor", "row") for s in (True, False)]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dtype in (E4M3, torch.float8_e5m2) else t


def same(ours: tuple, theirs: tuple) -> None:
    """The same codes and scales, infinite ones included."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))


def both(op: str, x: torch.Tensor, **options: object) -> tuple:
    found = registry()[op].function(x, **options, impl="triton")
    same(found, registry()[op].reference(x, **options))
    return found


def test_every_number_of_e4m3_comes_back(device: str) -> None:
    """All 254 finite codes convert there and back as in torch; midpoints round to the even code."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3)
    finite = codes.float()[codes.float().isfinite()]
    ordered = finite.unique()
    middles = (ordered[1:] + ordered[:-1]) / 2
    for values in (finite, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)):
        x = torch.cat([values, values.new_tensor([448.0])])  # a scale of 1
        q, scale = both("quantize_fp8", x, block="tensor")
        assert scale == 1
        assert torch.equal(bits(q[:-1]), bits(values.to(E4M3)))
    back = dequantize(codes, torch.ones(1, device=device), impl="triton")
    torch.testing.assert_close(back, codes.float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(70, 129), (3, 5, 40), (0, 7), (1, 1)], ids=str)
def test_parts_of_a_tensor_share_its_scale(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """By the whole's largest size, a part's codes are its part of the whole's; larger numbers saturate."""
    x = torch.randn(shape, device=device)
    whole, scale = quantize_fp8(x, block="tensor", dtype=dtype)
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    for n, rows in enumerate(x.split(20)):
        q, s = both("quantize_fp8", rows, block="tensor", dtype=dtype, largest=largest)
        same((q, s), (whole[20 * n : 20 * n + 20], scale))
    q, s = both("quantize_fp8", 8 * x.sign(), block="tensor", dtype=dtype, largest=x.new_full((), 2.0))
    assert torch.equal(q.float(), torch.finfo(dtype).max * x.sign())
    same(
        both("quantize_fp8", x, block="tensor", dtype=dtype, largest=x.new_zeros(()))[1:], (x.new_full((), 2.0**-126),)
    )


def test_ties_of_int8_go_to_even(device: str) -> None:
    x = torch.cat([torch.arange(-127, 127, device=device) + 0.5, torch.tensor([127.0], device=device)])
    q, scale = both("quantize_int8", x)
    assert scale == 1
    assert torch.equal(q[:-1].float(), x[:-1].round())


SPECIAL = {
    "zeros": [0.0, -0.0, 0.0],
    "tiny": [1e-45, -3e-42, 1e-38],
    "infinite": [1.0, float("inf"), -2.0],
    "NaN": [1.0, float("nan"), -2.0],
    "tiny in float16": [6e-8, -1.2e-7, 3e-5],
    "huge": [3e38, -3.4e38, 1.0],
    "huge in float16": [65504.0, -6e4, 1.0],
    "one sign": [5.0, 6.0, 7.0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name: str, dtype: torch.dtype, device: str) -> None:
    """Codes and scales equal the reference's; a group with infinity or NaN comes back as NaN and affects no other."""
    x = torch.randn(4, 300, device=device).to(dtype)
    x[1] = torch.tensor(SPECIAL[name], device=device).repeat(100)
    made = [both("quantize_int8", x, **options) for options in INT8] + [
        both("quantize_fp8", x, block=block) for block in BLOCKS
    ]
    for found in made:
        back = dequantize(found, impl="triton")
        torch.testing.assert_close(back, registry()["dequantize"].reference(*found), equal_nan=True, rtol=0, atol=0)
        if not x[1].isfinite().all():
            assert back[1].isnan().all()
        if found[1].dim() and found[1].shape[0] == 4:
            assert back[[0, 2, 3]].isfinite().all()
        if name == "zeros" and found[1].dim() and found[1].shape[0] == 4:
            assert not back[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_how_far_off_codes_are(dtype: torch.dtype, device: str) -> None:
    """The error is at most half a step of int8; for e4m3 a 16th of the number, or half the smallest step."""
    x = torch.randn(130, 300, device=device).to(dtype)
    for options in INT8:
        found = quantize_int8(x, **options, impl="triton")
        assert ((dequantize(found, impl="triton") - x.float()).abs() <= found[1] * 0.50001).all()
    for block in BLOCKS:
        q, scale = quantize_fp8(x, block=block, impl="triton")
        off = (dequantize(q, scale, impl="triton") - x.float()).abs()
        assert (off <= torch.maximum(x.float().abs() / 16, scale.max() * 2.0**-10) * 1.00001).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "every second", "offset", "expanded"])
def test_layouts_of_every_group(layout: str, dtype: torch.dtype, device: str) -> None:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x = {
        "transposed": lambda: numbers(140, 130).mT,
        "every second": lambda: numbers(130, 280)[:, ::2],
        "offset": lambda: numbers(130 * 140 + 1)[1:].view(130, 140),
        "expanded": lambda: numbers(130, 1).expand(130, 140),
    }[layout]()
    for options in INT8:
        same(
            (dequantize(both("quantize_int8", x, **options), impl="triton"),),
            (dequantize(quantize_int8(x, **options), impl="naive"),),
        )
    for block in BLOCKS:
        q, scale = both("quantize_fp8", x, block=block)
        turned = q.mT.contiguous().mT, scale.mT.contiguous().mT if scale.dim() else scale  # neither is contiguous
        same((dequantize(turned, impl="triton"),), (dequantize((q, scale), impl="naive"),))


def test_sums_of_int8_are_exact(device: str) -> None:
    """The largest possible sums: 65536 products of -128 and 127, and of 255 with a zero point at the other end."""
    one = torch.ones(1, device=device)
    a = torch.full((2, 65536), -128, dtype=torch.int8, device=device)
    for code, zero in ((-128, 0), (127, 127), (-128, 127)):
        b = torch.full((3, 65536), code, dtype=torch.int8, device=device).mT
        zeros = torch.full((1,), zero, dtype=torch.int32, device=device)
        y = int8_matmul(a, b, one, one, zero_a=zeros, out_dtype=torch.float32, impl="triton")
        assert torch.equal(y, torch.full_like(y, float((-128 - zero) * code * 65536)))


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_layer_in_int8(granularity: str, device: str) -> None:
    """The product takes the results of the quantisers: asymmetric activations, a symmetric weight."""
    x, weight, bias = (torch.rand(*shape, device=device) for shape in ((40, 96), (24, 96), (24,)))
    qx, sx, zx = quantize_int8(x, granularity=granularity, symmetric=False)
    qw, sw = quantize_int8(weight - 0.5, granularity=granularity)
    y = int8_matmul(
        qx, qw.mT, sx, sw.mT if sw.dim() else sw, zero_a=zx, bias=bias, out_dtype=torch.float32, impl="triton"
    )
    expected = dequantize((qx, sx, zx)) @ dequantize((qw, sw)).mT + bias
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("left", "right"), [((1, 128), (128, 128)), ((1, 128), (1, 128)), ("row", "row"), ("tensor", "tensor")]
)
def test_a_layer_in_fp8(left: object, right: object, device: str) -> None:
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((40, 300), (150, 300), (150,)))
    x[:, :128] *= 100
    (qx, sx), (qw, sw) = quantize_fp8(x, block=left), quantize_fp8(weight, block=right)
    y = fp8_matmul(qx, qw.mT, sx, sw.mT if sw.dim() else sw, bias=bias, out_dtype=torch.float32, impl="triton")
    expected = dequantize(qx, sx).double() @ dequantize(qw, sw).double().mT + bias
    assert (y - expected).norm() <= 2e-3 * expected.norm()  # a GPU's units hold 14 bits of a sum of 128
    if device == "cpu":
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shapes", [((0, 8), (8, 5)), ((4, 0), (0, 5)), ((4, 8), (8, 0))])
def test_products_of_nothing(shapes: tuple, device: str) -> None:
    one, (left, right) = torch.ones(1, device=device), shapes
    a, b = torch.zeros(left, dtype=torch.int8, device=device), torch.zeros(right, dtype=torch.int8, device=device)
    for y in (int8_matmul(a, b, one, one, impl="triton"), fp8_matmul(a.to(E4M3), b.to(E4M3), one, one, impl="triton")):
        assert y.shape == (left[0], right[1])
        assert not y.any()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1, 1)])
def test_empty_tensors(shape: tuple, device: str) -> None:
    x = torch.ones(shape, device=device)
    for options in INT8:
        both("quantize_int8", x, **options)
    for block in BLOCKS:
        if block != (128, 128) or x.dim() == 2:
            q, scale = both("quantize_fp8", x, block=block)
            assert dequantize(q, scale, impl="triton").shape == shape


def test_grids_of_long_rows() -> None:
    """A row of 2^32 numbers: a grid has at most 65535 programs along its second dimension, and indices need 64 bits."""
    from ridgeline.boundary import observe
    from ridgeline.device import pretend

    seen: list = []
    x = torch.empty(1 << 32, dtype=torch.bfloat16, device="meta")
    with pretend("sm_90"), observe(seen.append):
        for block in ((1, 128), "row", "tensor"):
            dequantize(quantize_fp8(x, block=block, impl="triton"), impl="triton")
        dequantize(quantize_int8(x, impl="triton"), impl="triton")
    assert len(seen) >= 8
    for launch in seen:
        assert launch.grid[0] < 1 << 31
        assert all(n <= 65535 for n in launch.grid[1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("op", ["quantize_int8", "quantize_fp8"])
def test_more_than_two_to_the_31(op: str) -> None:
    """The last 128 rows, which hold the extremes of all, give the same codes, scales and numbers alone."""
    x = torch.randn(66048, 33000, device="cuda", dtype=torch.bfloat16)
    x[-1, :2] = torch.tensor([100.0, -100.0])
    for options in INT8 if op == "quantize_int8" else [{"block": block} for block in BLOCKS]:
        found = registry()[op].function(x, **options, impl="triton")
        expected = registry()[op].reference(x[-128:], **options)
        same(tuple(t[-e.shape[0] :] if e.dim() else t for t, e in zip(found, expected, strict=True)), expected)
        back = dequantize(found, impl="triton")[-128:]
        torch.testing.assert_close(back, registry()["dequantize"].reference(*expected), rtol=0, atol=0)
        del found, back


def test_no_gradients_flow(device: str) -> None:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in (*quantize_int8(x), *quantize_fp8(x), dequantize(quantize_int8(x))))


@pytest.mark.parametrize("impl", [None, "triton"])
def test_e4m3_before_sm_89(impl: str | None, device: str) -> None:
    """An A100's matrix units lack 8-bit floats: one sentence says so, and the formula is not used automatically."""
    from ridgeline.device import pretend

    a, one = torch.ones(4, 16, device="meta").to(E4M3), torch.ones(1, device="meta")
    if device == "cpu":
        with (
            pretend("sm_80"),
            pytest.raises(RidgelineError, match="sm_80.* has no matrix units for 8-bit floats; sm_89 and later have"),
        ):
            fp8_matmul(a, a.mT, one, one, impl=impl)
