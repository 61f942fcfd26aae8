"""Training in 8 bits, and weight gradients that products add to a float32 buffer."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from ridgeline import device, nn
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError
from ridgeline.ops.matmul import _fp8_linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What shares a scale in x and dy and in the weight, dy's format.
RECIPES = {"tensor": ("tensor", "tensor", E5M2), "row": ("row", "row", E4M3), "block": ((1, 128), (128, 128), E4M3)}
STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # the largest relative rounding of a normal number
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}  # half the distance of the smallest numbers
IMPL = "triton" if INTERPRETED else None


def problem(M: int, N: int, K: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, ...]:
    make = {"device": device, "dtype": dtype}
    x, weight, bias = torch.randn(M, K, **make), torch.randn(N, K, **make) / K**0.5, torch.randn(N, **make)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.randn(M, N, **make)


def rounded(t: torch.Tensor, block: Any, dtype: torch.dtype) -> torch.Tensor:
    """What 8 bits keep of a matrix, in float64."""
    q, scale = ridgeline.quantize_fp8(t, block=block, dtype=dtype, impl="naive")
    return ridgeline.dequantize(q, scale.double(), impl="naive")


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, recipe: str) -> list[Any]:
    """y, dx, dW and db of the same 8-bit numbers, with float64 sums."""
    rows, square, gradient = RECIPES[recipe]
    by_rows = [rounded(t.detach(), b, d) for t, b, d in ((x, rows, E4M3), (weight, square, E4M3), (dy, rows, gradient))]
    turned = [
        rounded(t.detach().mT, b, d) for t, b, d in ((x, rows, E4M3), (weight, square, E4M3), (dy, rows, gradient))
    ]
    y = by_rows[0] @ by_rows[1].mT + bias.double()
    return [y.detach(), by_rows[2] @ turned[1].mT, turned[2] @ turned[0].mT, dy.double().sum(0)]


def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, **options: Any) -> list[Any]:
    y = ridgeline.fp8_linear(x, weight, bias, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]


SIZES = [(150, 140, 260), (33, 17, 129), (1, 1, 1), (128, 256, 16)]


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_only_sums_differ_from_float64(recipe: str, sizes: tuple[int, int, int], device: str) -> None:
    given = problem(*sizes, device=device)
    for found, wanted in zip(step(*given, recipe=recipe, impl=IMPL), exact(*given, recipe), strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [*SIZES, (1024, 512, 768)], ids=str)
@pytest.mark.parametrize("impl", [None, "triton"])
def test_only_sums_differ_in_bfloat16(recipe: str, sizes: tuple[int, int, int], impl: str | None) -> None:
    """The matrix units add e4m3 numbers in about 14 bits, and results are rounded to bfloat16."""
    given = problem(*sizes, torch.bfloat16, "cuda")
    for found, wanted in zip(step(*given, recipe=recipe, impl=impl), exact(*given, recipe), strict=True):
        assert (found - wanted).norm() <= 2.0**-8 * wanted.norm()
    x, weight, bias, dy = given
    total = torch.ones_like(weight, dtype=torch.float32)
    ridgeline.fp8_linear(x, weight, bias, recipe=recipe, main_grad=total, impl=impl).backward(dy)
    assert (total - 1 - exact(*given, recipe)[2]).norm() <= 2.0**-8 * exact(*given, recipe)[2].norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_of_8_bits_is_bounded(recipe: str) -> None:
    """Each number is off by at most a rounding, so each sum by at most the sum of the products' own errors."""
    x, weight, bias, dy = given = problem(96, 80, 200)
    y, dx, dw, _ = step(*given, recipe=recipe)
    products = (y - bias, x, weight.mT, E4M3), (dx, dy, weight, RECIPES[recipe][2]), (dw, dy.mT, x, RECIPES[recipe][2])
    for found, a, b, kind in products:
        wanted = a.double() @ b.double()
        bound = [t.abs().double() * STEP[k] + t.abs().max() * LEAST[k] for t, k in ((a, kind), (b, E4M3))]
        most = bound[0] @ b.abs().double() + a.abs().double() @ bound[1] + bound[0] @ bound[1]
        assert ((found - wanted).abs() <= most + 1e-4).all()
        assert (found - wanted).norm() <= (0.07 if kind is E5M2 else 0.045) * wanted.norm()


def test_dtypes_of_master_weights() -> None:
    """The result has x's dtype, a gradient its tensor's; autocast casts x alone."""
    x, weight, bias, _ = problem(8, 16, 32)
    half = x.detach().bfloat16().requires_grad_()
    y = ridgeline.fp8_linear(half, weight, bias)
    y.sum().backward()
    assert (y.dtype, half.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ridgeline.fp8_linear(half.detach().float(), weight, bias), y)


@pytest.mark.kernels
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("impl", [None, "torch", "triton"])
def test_linear_adds_to_a_buffer(activation: str | None, impl: str | None, device: str) -> None:
    if impl == "triton" and device == "cpu" and not INTERPRETED:
        pytest.skip("Triton's kernels run on a GPU or in its interpreter")
    x, weight, bias, dy = problem(33, 24, 40, torch.float16, device)
    total = torch.full_like(weight, 3.0, dtype=torch.float32)
    for _ in range(2):  # micro-batches
        y = ridgeline.linear(x, weight, bias, activation=activation, main_grad=total, impl=impl)
        y.backward(dy)
    assert weight.grad is None
    grads = x.grad / 2, bias.grad / 2
    own = ridgeline.linear(x, weight, bias, activation=activation)
    wanted = torch.autograd.grad(own, (x, bias, weight), dy)
    for g, w in zip((*grads, (total - 3) / 2), wanted, strict=True):
        torch.testing.assert_close(g.float(), w.float(), rtol=3e-3, atol=3e-3)


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_linear_adds_to_a_buffer(recipe: str, device: str) -> None:
    x, weight, bias, dy = given = problem(140, 24, 136, device=device)
    total = torch.ones_like(weight)
    for _ in range(2):
        ridgeline.fp8_linear(x, weight, bias, recipe=recipe, main_grad=total, impl=IMPL).backward(dy)
    wanted = exact(*given, recipe)[2]
    assert weight.grad is None
    assert (total - 1 - 2 * wanted).norm() <= 1e-6 * wanted.norm() + 1e-4


def given_codes(weight: torch.Tensor, recipe: str, how: str | None = None) -> tuple[torch.Tensor, ...]:
    return ridgeline.quantize_fp8(weight.detach(), block=RECIPES[recipe][1], impl=how)


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", ["tensor", "block"])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[1], SIZES[3]], ids=str)
def test_given_codes_are_those_of_the_weight(recipe: str, sizes: tuple[int, int, int], device: str) -> None:
    """All bits are equal, and the weight's own values are not read."""
    x, weight, bias, dy = given = problem(*sizes, device=device)
    codes = given_codes(weight, recipe)
    blank = torch.full_like(weight, torch.nan).requires_grad_()
    found = step(x, blank, bias, dy, recipe=recipe, quantized=codes, impl=IMPL)
    assert all(torch.equal(a, b) for a, b in zip(found, step(*given, recipe=recipe, impl=IMPL), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensor", "block"])
@pytest.mark.parametrize("sizes", [*SIZES, (1024, 512, 768)], ids=str)
@pytest.mark.parametrize("impl", [None, "triton"])
def test_given_codes_in_bfloat16(recipe: str, sizes: tuple[int, int, int], impl: str | None) -> None:
    x, weight, bias, dy = given = problem(*sizes, torch.bfloat16, "cuda")
    codes = given_codes(weight, recipe)
    found = step(x, torch.zeros_like(weight).requires_grad_(), bias, dy, recipe=recipe, quantized=codes, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(found, step(*given, recipe=recipe, impl=impl), strict=True))


@pytest.mark.kernels
def test_compiled_with_given_codes(device: str) -> None:
    x, weight, bias, dy = problem(33, 24, 40, device=device)
    codes = given_codes(weight, "tensor")
    torch._dynamo.reset()
    compiled = torch.compile(ridgeline.fp8_linear, backend="aot_eager", fullgraph=True)
    found, wanted = [], []
    for function, some in ((compiled, found), (ridgeline.fp8_linear, wanted)):
        y = function(x, weight, bias, quantized=codes, impl=IMPL)
        some += [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_two_uses_of_a_weight_share_its_buffer() -> None:
    x, weight, _, _ = problem(8, 16, 16)
    for function in (ridgeline.linear, ridgeline.fp8_linear):
        total = torch.zeros_like(weight)
        function(function(x, weight, main_grad=total), weight, main_grad=total).sum().backward()
        own = function(function(x, weight), weight).sum()
        torch.testing.assert_close(total, *torch.autograd.grad(own, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "impl"), [("linear", "torch"), ("linear", "triton"), *[("fp8_linear", i) for i in ("naive", "triton")]]
)
def test_compiled_with_a_buffer(name: str, impl: str, device: str) -> None:
    """One graph, whose backward adds to the buffer."""
    function, (x, weight, bias, dy) = partial(getattr(ridgeline, name), impl=impl), problem(33, 24, 40, device=device)
    totals = [torch.zeros_like(weight) for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, b, t: function(x, w, b, main_grad=t), backend="aot_eager", fullgraph=True)
    if (name, impl) == ("fp8_linear", "naive") and _fp8_linear.LOSES:
        with pytest.raises(Exception, match="loses what plain PyTorch's backward adds to main_grad"):
            compiled(x, weight, bias, totals[1])
        return
    for call, total in zip((function, compiled), totals, strict=True):
        for _ in range(2):
            y = call(x, weight, bias, main_grad=total) if call is function else call(x, weight, bias, total)
            y.backward(dy)
    torch.testing.assert_close(totals[1], totals[0])
    assert totals[0].norm() > 0
    assert weight.grad is None


def test_modules() -> None:
    plain = torch.nn.Linear(48, 32)
    for recipe in RECIPES:
        made = nn.Fp8Linear(48, 32, recipe=recipe)
        made.load_state_dict(plain.state_dict())
        x = torch.randn(4, 48)
        assert torch.equal(made(x), ridgeline.fp8_linear(x, plain.weight, plain.bias, recipe=recipe))
        assert repr(made) == f"Fp8Linear(in_features=48, out_features=32, bias=True, recipe={recipe!r})"
    shared = nn.Fp8Linear.of(plain, fuse_main_grad=True)
    assert shared.weight is plain.weight
    assert shared.bias is plain.bias
    with pytest.raises(RidgelineError, match=r"weight\.main_grad"):
        shared(x)
    shared.weight.main_grad = torch.zeros_like(shared.weight)
    shared(x).sum().backward()
    assert shared.weight.grad is None
    assert shared.weight.main_grad.norm() > 0
    with pytest.raises(RidgelineError, match="recipe must be 'tensor', 'row' or 'block', got 'mx'"):
        nn.Fp8Linear(4, 4, recipe="mx")


class Layer(torch.nn.Module):
    """A gated feed-forward layer with its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_in_8_bits_learns_as_in_float32(recipe: str) -> None:
    """Bytes of text that depend on the two before: the last losses are within 1% of float32's."""
    torch.manual_seed(0)
    width, classes = 48, 32
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(2 * classes, width, mode="sum"),
        Layer(width),
        Layer(width),
        torch.nn.Linear(width, classes),
    )
    other = copy.deepcopy(model)
    for layer in list(other)[1:3]:
        for name in ("gate", "up", "down"):
            setattr(layer, name, nn.Fp8Linear.of(getattr(layer, name), recipe=recipe))
    table, last = torch.randint(0, classes, (classes, classes)), []
    for net in (model, other):
        dice = torch.Generator().manual_seed(1)
        optimizer, losses = torch.optim.AdamW(net.parameters(), 3e-3), []
        for _ in range(100):
            pair = torch.randint(0, classes, (192, 2), generator=dice)
            noise = torch.rand(192, generator=dice) < 0.2
            target = torch.where(
                noise, torch.randint(0, classes, (192,), generator=dice), table[pair[:, 0], pair[:, 1]]
            )
            loss = F.cross_entropy(net(pair + torch.tensor([0, classes])), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        last.append(sum(losses[-20:]) / 20)
    assert last[0] < 0.8 * losses[0]
    assert abs(last[1] / last[0] - 1) < 0.01


def test_gpus_without_8_bit_units() -> None:
    x, weight = torch.empty(32, 64, device="meta"), torch.empty(16, 64, device="meta")
    with device.pretend("sm_80"), pytest.raises(RidgelineError, match="no matrix units for 8-bit floats; sm_89"):
        ridgeline.fp8_linear(x, weight)
