"""linear's main_grad: the weight's gradient is added to a float32 buffer."""

import pytest
import torch

import ridgeline
from ridgeline.ops.matmul.matmul import sum_of_rows

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("impl", [None, "torch", "triton"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear(impl: str | None, activation: str | None, dtype: torch.dtype, device: str) -> None:
    x, w, b = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((2, 9, 12), (10, 12), (10,)))
    residual, dy = torch.randn(2, 9, 10, device=device).to(dtype), torch.randn(2, 9, 10, device=device).to(dtype)
    buffer = torch.randn(10, 12, device=device)
    before = buffer.clone()
    options = {"activation": activation, "residual": residual, "impl": impl}
    plain = ridgeline.linear(x, w, b, **options)
    dx, dw, db = torch.autograd.grad(plain, (x, w, b), dy)
    for _ in range(2):
        y = ridgeline.linear(x, w, b, main_grad=buffer, **options)
        y.backward(dy)
    assert w.grad is None
    rough = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(y, plain, **rough)
    torch.testing.assert_close(buffer, before + 2 * dw.float(), **rough)
    torch.testing.assert_close((x.grad, b.grad), (2 * dx, 2 * db), **rough)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_added_without_a_gradient(frozen: bool, device: str) -> None:
    x, w = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device, requires_grad=True)
    buffer = torch.zeros(4, 8, device=device)
    if frozen:
        ridgeline.linear(x, w.requires_grad_(False), main_grad=buffer).sum().backward()
    with torch.no_grad():
        ridgeline.linear(x, w, main_grad=buffer)
    assert not buffer.any()


def test_compile(device: str) -> None:
    torch._dynamo.reset()
    x, w = torch.randn(5, 8, device=device), torch.randn(4, 8, device=device, requires_grad=True)
    buffer = torch.zeros(4, 8, device=device)
    work = torch.compile(lambda: ridgeline.linear(x, w, main_grad=buffer), backend="aot_eager", fullgraph=True)
    work().sum().backward()
    torch.testing.assert_close(buffer, x.sum(0).expand(4, 8))
    assert w.grad is None


@pytest.mark.gpu
def test_in_bfloat16() -> None:
    x, w = torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(128, 256, device="cuda").bfloat16()
    dy, found = torch.randn(512, 128, device="cuda").bfloat16(), []
    for impl in (None, "triton"):
        buffer = torch.ones(128, 256, device="cuda")
        ridgeline.linear(x, w.requires_grad_(), main_grad=buffer, impl=impl).backward(dy)
        found.append(buffer)
        torch.testing.assert_close(buffer.double(), 1 + dy.double().mT @ x.double(), rtol=1e-4, atol=1e-2)
    assert w.grad is None


@pytest.mark.parametrize("rows", [0, 1, 2, 70])
def test_a_bias_gradient_is_a_tensor_of_its_own(rows: int, device: str) -> None:
    """Gradients are added to in place, so none may share memory with dy, as a sum of one row might."""
    dy = torch.randn(rows, 5, device=device)
    found = sum_of_rows(dy)
    torch.testing.assert_close(found, dy.sum(0))
    assert not rows or found.untyped_storage().data_ptr() != dy.untyped_storage().data_ptr()
