"""The forms of rms_norm and add_rms_norm in language models: a weight with an offset (Gemma), two roundings (Llama)."""

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import device as devices
from ridgeline import nn as ours
from ridgeline.op import RidgelineError, get

pytestmark = pytest.mark.kernels

NAMES = ("rms_norm", "add_rms_norm")
FORMS = [(1.0, "once"), (-1.0, "once"), (0.0, "llama"), (1.0, "llama")]
HALF = torch.float16
Tensors = tuple[torch.Tensor, ...]


def inputs(name: str, dtype: torch.dtype, device: str, columns: int = 130, rows: int = 9) -> list[torch.Tensor]:
    """x, the residual if there is one, and a weight as Gemma stores it, around 0."""
    sizes = [(rows, columns)] * (1 + name.startswith("add"))
    made = [torch.randn(size, device=device) for size in sizes] + [0.2 * torch.randn(columns, device=device)]
    return [t.to(dtype).requires_grad_() for t in made]


def formula(tensors: list[torch.Tensor], offset: float) -> torch.Tensor:
    """y in float64, without a rounding."""
    *rows, weight = [t.double() for t in tensors]
    v = sum(rows)
    return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + weight)


def hugging_face(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Llama's norm as transformers writes it."""
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * hidden.to(x.dtype)


def results(name: str, tensors: list[torch.Tensor], dy: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """y and all gradients."""
    y = getattr(ridgeline, name)(*tensors, **options)
    y = y[0] if isinstance(y, tuple) else y
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


def exact(tensors: list[torch.Tensor], dy: torch.Tensor, offset: float) -> list[torch.Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    y = formula(leaves, offset)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def agrees(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether each tensor is within a unit in the last place, on average over its elements (16 units in float32)."""
    each = [
        (a.double() - b).norm() <= (16 if a.dtype == torch.float32 else 1) * torch.finfo(a.dtype).eps * b.norm()
        for a, b in zip(found, wanted, strict=True)
    ]
    return bool(all(each))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("impl", ["naive", "torch", "triton"])
@pytest.mark.parametrize(("offset", "rounding"), FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_forms(name: str, offset: float, rounding: str, impl: str, dtype: torch.dtype, device: str) -> None:
    """y and all gradients are those of the formula in float64; without the offset they would not be."""
    tensors = inputs(name, dtype, device)
    if impl == "triton" or name == "rms_norm":
        dy = torch.randn_like(tensors[0])
        found = results(name, tensors, dy, offset=offset, rounding=rounding, impl=impl)
        assert [t.dtype for t in found] == [dtype] * len(found)
        assert agrees(found, exact(tensors, dy, offset))
        if offset:
            ignored = results(name, tensors, dy, rounding=rounding, impl=impl)
            assert not any(agrees([a], [b]) for a, b in zip(ignored[:2], exact(tensors, dy, offset)[:2], strict=True))


@pytest.mark.parametrize("columns", [40000, 8200])
@pytest.mark.parametrize("name", NAMES)
def test_forms_of_wide_rows(name: str, columns: int, device: str) -> None:
    """Rows that are read twice, and rows whose weight is loaded late."""
    tensors = inputs(name, HALF, device, columns, rows=2)
    dy = torch.randn_like(tensors[0])
    found = results(name, tensors, dy, offset=1.0, rounding="llama", impl="triton")
    assert agrees(found, exact(tensors, dy, 1.0))
    assert not agrees(found, exact(tensors, dy, 0.0))


@pytest.mark.parametrize("parameters", [HALF, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["naive", "torch", "triton"])
def test_two_roundings_are_hugging_faces(impl: str, parameters: torch.dtype, device: str) -> None:
    """Every bit and the dtype, except next to a tie, where another order of the row's sum may decide."""
    x, weight = torch.randn(64, 264, device=device).to(HALF), torch.randn(264, device=device).to(parameters)
    wanted = hugging_face(x, weight)
    found, once = (ridgeline.rms_norm(x, weight, rounding=r, impl=impl) for r in ("llama", "once"))
    x_hat = formula([x, torch.ones_like(weight)], 0.0)
    sure = (x_hat * (1 - 1e-6)).to(HALF) == (x_hat * (1 + 1e-6)).to(HALF)
    assert sure.double().mean() > 0.99
    assert found.dtype == wanted.dtype == torch.promote_types(HALF, parameters)
    assert torch.equal(found[sure], wanted[sure])
    assert (once != wanted).double().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_float32_both_roundings_are_one(dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(5, 48, device=device, dtype=dtype), torch.randn(48, device=device, dtype=dtype)
    assert torch.equal(ridgeline.rms_norm(x, weight, rounding="llama"), ridgeline.rms_norm(x, weight))


@pytest.mark.parametrize("name", NAMES)
def test_a_wider_weight_widens_the_result(name: str, device: str) -> None:
    """Then gradients arrive in float32; x's stays in x's dtype, weight's in weight's, and the sum is x's dtype."""
    *rows, weight = inputs(name, HALF, device)
    tensors = [*rows, weight.detach().float().requires_grad_()]
    dy = torch.randn(rows[0].shape, device=device)
    found = results(name, tensors, dy, rounding="llama", impl="triton")
    assert [t.dtype for t in found] == [torch.float32, *[HALF] * len(rows), torch.float32]
    for a, b in zip(found, exact(tensors, dy, 0.0), strict=True):
        assert (a.double() - b).norm() <= torch.finfo(HALF).eps * b.norm()
    if name == "add_rms_norm":
        assert ridgeline.add_rms_norm(*tensors, rounding="llama")[1].dtype == HALF


@pytest.mark.parametrize("offset", [1.0, -1.0])
@pytest.mark.parametrize("rounding", ["once", "llama"])
def test_memory_efficient(offset: float, rounding: str, device: str) -> None:
    """Backward divides the result by offset + weight; it may be zero only where there is no weight."""
    x, weight = inputs("rms_norm", torch.float32, device, 129)
    dy = torch.randn_like(x)
    options = {"offset": offset, "rounding": rounding, "impl": "triton", "memory_efficient": True}
    assert agrees(results("rms_norm", [x, weight], dy, **options), exact([x, weight], dy, offset))
    zero = torch.zeros(129, device=device, requires_grad=True)
    assert agrees(results("rms_norm", [x, zero], dy, **options), exact([x, zero], dy, offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_efficient_refuses_sums_of_zero(dtype: torch.dtype) -> None:
    x, weight = torch.ones(4, 6, requires_grad=True), torch.full((6,), -1.0, dtype=dtype)
    with pytest.raises(RidgelineError, match="divides by offset [+] weight in backward, but offset [+] weight has a"):
        ridgeline.rms_norm(x, weight, offset=1.0, memory_efficient=True)


def test_memory_efficient_saves_nothing_wider_than_x(device: str) -> None:
    x, weight = torch.ones(4, 6, dtype=HALF, device=device), torch.ones(6, device=device)
    with pytest.raises(RidgelineError, match="makes it torch.float32 where x is torch.float16; give a weight in"):
        ridgeline.rms_norm(x, weight, rounding="llama", memory_efficient=True)


@pytest.mark.parametrize(("offset", "rounding"), FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str, offset: float, rounding: str, device: str) -> None:
    tensors = inputs(name, HALF, device)
    dy = torch.randn_like(tensors[0])

    def call(*tensors: torch.Tensor) -> Any:
        return getattr(ridgeline, name)(*tensors, offset=offset, rounding=rounding, impl="triton")

    made = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    y = made[0] if isinstance(made, tuple) else made
    found = [y.detach(), *torch.autograd.grad(y, tensors, dy)]
    eager = results(name, tensors, dy, offset=offset, rounding=rounding, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: str) -> None:
    """Shapes and dtypes that the registered op promises, also of a result as wide as the weight."""
    rows, weight = torch.randn(9, 130, device=device, dtype=HALF), torch.randn(130, device=device)
    residual = rows if name == "add_rms_norm" else None
    args = rows, None if residual is None else residual.clone(), weight, None, 1e-6, 1.0, "llama", 1, None
    get(name)  # registers it
    torch.library.opcheck(getattr(torch.ops.ridgeline, f"{name}_fwd").default, args)


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
def test_two_roundings_under_autocast(parameters: torch.dtype) -> None:
    """As Hugging Face's formula, whose result autocast leaves in the promoted dtype."""
    x = torch.randn(64, 264, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(264, device="cuda", dtype=parameters)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, wanted = ridgeline.rms_norm(x, weight, rounding="llama"), hugging_face(x, weight)
    assert found.dtype == wanted.dtype
    assert (found != wanted).double().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16384, 16385])
@pytest.mark.parametrize(("offset", "rounding"), FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_forms_by_clusters(name: str, offset: float, rounding: str, columns: int) -> None:
    tensors = inputs(name, HALF, "cuda", columns)
    dy = torch.randn_like(tensors[0])
    found = results(name, tensors, dy, offset=offset, rounding=rounding, impl="cuda_cluster")
    assert agrees(found, exact(tensors, dy, offset))


def test_clusters_write_no_wider_result() -> None:
    with devices.pretend("sm_90"):
        x = torch.empty(8, 16384, dtype=torch.bfloat16, device="meta")
        narrow, wide = (torch.empty(16384, dtype=d, device="meta") for d in (torch.bfloat16, torch.float32))
        for rounding, weight in (("llama", narrow), ("once", wide)):
            ridgeline.rms_norm(x, weight, offset=1.0, rounding=rounding, impl="cuda_cluster")
        with pytest.raises(RidgelineError, match="in x's dtype, but rounding='llama' makes it as wide as the weight"):
            ridgeline.rms_norm(x, wide, rounding="llama", impl="cuda_cluster")
        assert ridgeline.rms_norm(x, wide, rounding="llama").dtype == torch.float32


def test_modules(device: str) -> None:
    """A fresh module multiplies by one, its weight loads as stored, and several dimensions are one row."""
    x = torch.randn(5, 6, 8, device=device)
    gemma = ours.RMSNorm((6, 8), 1e-6, offset=1.0).to(device)
    assert not gemma.weight.any()
    torch.testing.assert_close(gemma(x), torch.nn.RMSNorm((6, 8), 1e-6).to(device)(x))
    stored = 0.1 * torch.randn(6, 8, device=device)
    gemma.load_state_dict({"weight": stored})
    plain = torch.nn.functional.rms_norm(x, (6, 8), 1 + stored, 1e-6)
    torch.testing.assert_close(gemma(x), plain)
    assert repr(gemma) == "RMSNorm((6, 8), eps=1e-06, elementwise_affine=True, offset=1.0)"

    llama = ours.RMSNorm(48, 1e-6, rounding="llama", dtype=HALF).to(device)
    assert bool((llama.weight == 1).all())
    flat = x.flatten(-2).to(HALF)
    torch.testing.assert_close(llama(flat), hugging_face(flat, llama.weight), rtol=2**-10, atol=0)
    assert repr(llama) == "RMSNorm((48,), eps=1e-06, elementwise_affine=True, rounding='llama')"

    both = ours.AddRMSNorm(48, 1e-6, offset=2.0, rounding="llama").to(device)
    y, total = both(flat.float(), flat.float())
    torch.testing.assert_close(total, 2 * flat.float())
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (48,), None, 1e-6))
    for wrong, said in (
        ({"offset": "one"}, "RMSNorm: offset must be a number, but is 'one'"),
        ({"rounding": "gemma"}, "rms_norm: rounding must be 'once' or 'llama', but is 'gemma'"),
        ({"offset": 1.0, "elementwise_affine": False}, "rms_norm: offset=1.0 is added to the weight, but weight is"),
    ):
        with pytest.raises(RidgelineError, match=said):
            ours.RMSNorm(48, **wrong).to(device)(flat)
