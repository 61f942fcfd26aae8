"""Weights of few bits beyond the cases of their ops: the files' layouts by their formulas, exactness, modules."""

import pytest
import torch

import ridgeline
from ridgeline import device, few_bits, formats, nn
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.op import RidgelineError
from ridgeline.ops.matmul import _few_bits

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


def test_zeros_that_gptq_cannot_store_are_refused_at_once() -> None:
    linear = torch.nn.Linear(32, 8, bias=False)
    with torch.no_grad():
        linear.weight.abs_()
        with pytest.raises(RidgelineError, match="use 'gptq_v2'"):
            nn.Int4Linear.of(linear, group=32, layout="gptq")
        assert nn.Int4Linear.of(linear, group=32, layout="gptq_v2").state_dict()["qzeros"].numel() == 1


def test_fp8_layers_are_for_inference() -> None:
    linear, x = torch.nn.Linear(64, 16), torch.randn(2, 5, 64)
    made = nn.Fp8InferenceLinear.of(linear)
    rows, scale = ridgeline.quantize_fp8(x, block="row")
    with torch.no_grad():
        wanted = (rows.double() * scale) @ (made.weight.double() * made.scale[:, None]).T + linear.bias.double()
        torch.testing.assert_close(made(x).double(), wanted, rtol=1e-5, atol=1e-5)
        assert (made(x) - linear(x)).norm() < 0.1 * linear(x).norm()
        assert made(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert made(x).dtype == torch.bfloat16
    again = nn.Fp8InferenceLinear(64, 16)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x), made(x))
    with pytest.raises(RidgelineError, match="Fp8InferenceLinear: it has no gradients"):
        made(x.requires_grad_())


def test_what_takes_a_layers_place() -> None:
    for sizes, kind, said in (
        ((64, 20), "int8", "its sizes 20 x 64 are no multiples of 8"),
        ((40, 16), "int4", "no group of 128, 64, 32 divides its 40 columns"),
    ):
        assert few_bits.refusal(torch.nn.Linear(*sizes), kind) == said
    assert few_bits.refusal(nn.Linear(64, 16), "int8") == "it is no plain nn.Linear"
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 20), torch.nn.Linear(64, 16)).eval()
    assert few_bits.quantize(model, "int4", lambda name: name != "2") == ["0"]
    assert (model[0].group, model[0].training) == (128, False)
    with pytest.raises(RidgelineError, match="quantize must be None or one of 'int8', 'int4', 'fp8', got 4"):
        few_bits.check_kind("here", 4)


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
@pytest.mark.parametrize(
    "shape", [(1, 200, 512), (8, 16384, 4224), (16, 4096, 4096), (33, 256, 1024), (150, 384, 2048)]
)
def test_kernels_in_half_precision(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Every code and zero is exact, so only the sums' rounding remains."""
    M, N, K = shape
    x = torch.randn(M, K, device="cuda", dtype=dtype)
    q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scale, zero = torch.rand(N, K // 128, device="cuda"), torch.randint(0, 17, (N, K // 128), device="cuda").byte()
    q8 = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    for z in (None, zero):
        exact = ridgeline.int4_linear(x.double(), q, scale.double(), z, impl="naive")
        for impl in (None, "triton", "cuda_mma")[: 3 if M <= 16 else 2]:
            y = ridgeline.int4_linear(x, q, scale, z, impl=impl)
            # a dequantised copy of the weight, for many rows, is rounded too
            assert (y - exact).norm() <= (2 if M > 64 else 1) * torch.finfo(dtype).eps * exact.norm(), impl
    exact = ridgeline.int8_linear(x.double(), q8, scale[:, 0].double() / 99, impl="naive")
    y = ridgeline.int8_linear(x, q8, scale[:, 0] / 99, impl="triton")
    assert (y - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


def test_mxfp4_rounds_to_the_nearest() -> None:
    """Every number becomes the nearest that its block's scale allows; what was made so comes back bit for bit."""
    w = torch.randn(16, 128) / 20
    w[0, :32], w[1, 5] = 0, float("inf")
    q, scale = formats.pack_mxfp4(w)
    again = formats.unpack_mxfp4(q, scale)
    sizes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    powers = torch.exp2(scale[2:].double() - 127)[..., None]
    wanted = (w[2:].double().unflatten(1, (4, 32)) / powers).abs()
    assert ((wanted.amax(-1) >= 4) & (wanted.amax(-1) < 8)).all()
    nearest = (wanted[..., None] - sizes).abs().amin(-1)
    made, given = (t[2:].double().unflatten(1, (4, 32)) / powers for t in (again, w))
    assert torch.equal((made - given).abs(), nearest)
    assert not again[0, :32].any()
    assert again[1, :32].isnan().all()
    assert torch.equal(formats.unpack_mxfp4(*formats.pack_mxfp4(again[2:])), again[2:])


def test_mxfp4_by_its_formula() -> None:
    """All codes and the extreme scales, against sign, exponent and mantissa taken apart."""
    q = torch.arange(256, dtype=torch.uint8).repeat(2)[None, :]
    scale = torch.arange(32, dtype=torch.uint8)[None, :] * 8
    scale[0, 31] = 255
    got = formats.unpack_mxfp4(q, scale)[0]
    for k in range(1024):
        code, power = int(q[0, k // 2]) >> 4 * (k % 2) & 15, int(scale[0, k // 32])
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if not exponent else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        value = (-1) ** (code >> 3) * size * 2.0 ** (power - 127)
        assert got[k].isnan() if power == 255 else got[k] == value
    with pytest.raises(RidgelineError, match="multiple of 32"):
        formats.pack_mxfp4(torch.ones(2, 40))


def _emulated(text: str, word: int) -> dict[str, int]:
    """Returns the registers after assembly of moves, shifts, ands and lop3 of (a & b) | c."""
    registers = {"$4": word}
    for line in text.replace("{", "").replace("}", "").split(";"):
        op, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        a = [registers[n] if n in registers else int(n, 0) for n in names[1:]] if op not in ("", ".reg") else []
        if op == "mov.b32":
            registers[names[0]] = a[0]
        elif op == "shl.b32":
            registers[names[0]] = a[0] << a[1] & 0xFFFFFFFF
        elif op == "shr.u32":
            registers[names[0]] = a[0] >> a[1]
        elif op == "and.b32":
            registers[names[0]] = a[0] & a[1]
        elif op == "lop3.b32":
            assert a[3] == 0xEA
            registers[names[0]] = a[0] & a[1] | a[2]
        else:
            assert op in ("", ".reg") or op.startswith("fma.rn.")
    return registers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp4_assembly(dtype: torch.dtype) -> None:
    """The instructions for two words, emulated for every code in every place, give the code's value."""
    from ridgeline.tiles import float4

    text = {torch.bfloat16: float4.QUARTERS_BF16, torch.float16: float4.QUARTERS_F16}[dtype].value

    def number(bits: int) -> float:
        return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(dtype).double().item()

    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for code in range(16):
        other = (7 * code + 3) % 16
        word = sum((code if place % 2 else other) << 4 * place for place in range(8))
        registers = _emulated(text, word)
        for place in range(4):
            for half in (0, 16):
                got = number(registers[f"${place}"] >> half & 0xFFFF) * number(registers["power"] & 0xFFFF)
                wanted = code if place % 2 else other
                assert got == (-1) ** (wanted >> 3) * sizes[wanted & 7]


def test_w4a8_quantises_its_input() -> None:
    numbers, scale, zero = layer(K=128)
    x, q = torch.randn(2, 3, 128), formats.pairs(numbers)
    codes, by = ridgeline.quantize_fp8(x, block="row")
    y = ridgeline.w4a8_linear(x, q, scale, zero)
    assert (y.shape, y.dtype) == ((2, 3, 16), torch.float32)
    given = ridgeline.w4a8_linear(codes, q, scale, zero, x_scale=by, out_dtype=torch.float32)
    assert torch.equal(y, given)
    near = ridgeline.int4_linear(x, q, scale, zero)
    assert (y - near).norm() < 0.04 * near.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 16, 33, 150])
def test_more_kernels_in_half_precision(rows: int, group: int) -> None:
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    q = torch.randint(0, 256, (264, 512), dtype=torch.uint8, device="cuda")
    scale = torch.rand(264, 1024 // group, device="cuda")
    eps = torch.finfo(torch.bfloat16).eps
    exact = ridgeline.int4_linear(x.double(), q, scale.double(), impl="naive")
    assert (ridgeline.int4_linear(x, q, scale, impl="triton") - exact).norm() <= eps * exact.norm()
    codes, by = ridgeline.quantize_fp8(x, block="row")
    exact = ridgeline.w4a8_linear(codes, q, scale.double(), x_scale=by.double(), out_dtype=torch.float64, impl="torch")
    y = ridgeline.w4a8_linear(codes, q, scale, x_scale=by, impl="triton")
    assert (y - exact).norm() <= 2 * eps * exact.norm()
    for dtype in (torch.bfloat16, torch.float16):
        powers = torch.randint(110, 130, (264, 32), device="cuda").byte()
        exact = ridgeline.mxfp4_linear(x.double(), q, powers, impl="naive")
        y = ridgeline.mxfp4_linear(x.to(dtype), q, powers, impl="triton")
        assert (y - exact).norm() <= eps * exact.norm()


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "int8", "mxfp4"])
def test_the_kernel_that_dequantises(kind: str, device: str) -> None:
    """Rows and columns past a tile, against the formula in plain PyTorch."""
    N, K = 5, 1088
    scale, zero = torch.rand(N, K // 32), None
    q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    if kind == "int4 with zeros":
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    elif kind == "int8":
        q, scale = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N)
    elif kind == "mxfp4":
        scale = torch.randint(110, 130, scale.shape).byte()
    wanted = _few_bits.dequantised(q, scale, zero, torch.float32)
    given = [None if t is None else t.to(device) for t in (q, scale, zero)]
    found = torch.ops.ridgeline.few_bits_weight(*given, torch.float32)
    torch.testing.assert_close(found.cpu(), wanted)


def test_what_serves_on_a_gpu() -> None:
    """int4's CUDA kernel takes few rows in half precision; more rows, float32 and small groups are left to others."""
    q, served = torch.empty(264, 2112, dtype=torch.uint8), []
    for rows, dtype, groups in (
        (1, torch.bfloat16, 33),
        (8, torch.float16, 33),
        (9, torch.float16, 33),
        (8, torch.float32, 33),
        (8, torch.float16, 66),
        (65, torch.bfloat16, 33),
    ):
        x, scale, launched = torch.empty(rows, 4224, dtype=dtype), torch.empty(264, groups), list[Launch]()
        with device.pretend("sm_90"), observe(launched.append):
            assert ridgeline.int4_linear(x, q, scale).shape == (rows, 264)
        served.append("int4_mma" in str(launched))
    assert served == [True, True, False, False, False, False]
