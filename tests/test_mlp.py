"""mlp beyond its cases: all gradients, biases, strides, what is left to two products, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.boundary import INTERPRETED, observe
from ridgeline.lab.measurement.law import Law
from ridgeline.op import get
from ridgeline.ops.matmul import _mlp

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else "torch"


def inputs(M: int, K: int, H: int, N: int, device: str) -> list[torch.Tensor]:
    dice = torch.Generator(device).manual_seed(M)
    return [torch.randn(s, device=device, generator=dice) for s in ((M, K), (H, K), (N, H), (H,), (N,))]


def everything(impl: str, given: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    x, w1, w2, b1, b2 = leaves = [t.detach().requires_grad_() for t in given]
    y = ridgeline.mlp(x, w1, w2, b1=b1, b2=b2, impl=impl, **options)
    dice = torch.Generator(y.device).manual_seed(1)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, device=y.device, generator=dice).to(y.dtype))]


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(40, 24, 70, 33), (1, 1, 1, 1), (33, 64, 128, 16), (5, 200, 3, 130)])
def test_against_pytorch(activation: str, sizes: tuple[int, ...], device: str) -> None:
    given = inputs(*sizes, device)
    found, expected = (everything(i, given, activation=activation) for i in (IMPL, "torch"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max()))


def test_biases_pass_the_law_in_half_precision(device: str) -> None:
    """The law's own cases have no gradients of keyword arguments; rows of x take their part of b1."""
    x, w1, w2, b1, b2 = (t.half() for t in inputs(50, 40, 100, 24, device))
    leaves = [t.requires_grad_() for t in (x, w1, w2)]
    for activation in ("relu", "gelu"):
        law = Law(get("mlp"), leaves, {"b1": b1, "b2": b2, "activation": activation})
        verdict = law.judge(*law.run(get("mlp").implementations[IMPL]))
        assert verdict.ok, verdict.reason()


def test_strides_and_leading_dimensions(device: str) -> None:
    x, w1, w2, b1, b2 = inputs(24, 10, 18, 14, device)
    three = torch.cat([x, x], 1).view(4, 6, 20)[..., ::2]
    weights = w1.mT.contiguous().mT, torch.cat([w2, w2], 1)[:, 18:]
    y = ridgeline.mlp(three, *weights, b1=torch.stack([b1, b1], 1)[:, 0], b2=b2, impl=IMPL)
    assert y.shape == (4, 6, 14)
    torch.testing.assert_close(y, ridgeline.mlp(three, *weights, b1=b1, b2=b2, impl="torch"), rtol=1e-4, atol=1e-3)


def test_one_launch_forward(device: str) -> None:
    """Forward is one kernel, without hidden values in memory."""
    if IMPL != "triton":
        pytest.skip("needs the kernels")
    seen: list[Any] = []
    with observe(lambda launch: seen.append(launch.kernel)):
        everything(IMPL, inputs(20, 16, 64, 16, device))
    assert seen[0] is _mlp._fwd
    assert seen.count(_mlp._fwd) == 1


def test_choice() -> None:
    """Wide layers and float32 are two products; any number of hidden columns is taken."""
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    chosen = get("mlp").implementations["triton"]
    many = x.new_empty(4096, 256)
    assert chosen.left("fwd", many, x.new_empty(4096, 256), x.new_empty(256, 4096)) is None
    assert "columns" in str(chosen.left("fwd", x.new_empty(64, 257), x.new_empty(64, 257), x.new_empty(256, 64)))
    assert "columns" in str(chosen.left("fwd", x, x.new_empty(64, 256), x.new_empty(257, 64)))
    assert "float32" in str(chosen.left("fwd", x.float(), x.new_empty(64, 256).float(), x.new_empty(64, 64).float()))


def test_few_rows_with_large_weights_are_two_products() -> None:
    """A program for 16 rows reads both weights, one step after the other."""
    chosen = get("mlp").implementations["triton"]
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    for rows, columns, left in ((256, 256, True), (256, 128, False), (2048, 256, False), (1024, 256, True)):
        w = x.new_empty(columns, columns)
        reason = chosen.left("fwd", x.new_empty(rows, columns), w, w, None, None, "gelu")
        assert ("few programs" in str(reason)) == left, (rows, columns)


def test_empty_sizes(device: str) -> None:
    for sizes in ((0, 8, 16, 4), (3, 8, 16, 0)):
        given = inputs(*sizes, device)
        impl = IMPL if sizes[3] else "torch"
        assert everything(impl, given)[0].shape == (sizes[0], sizes[3])
