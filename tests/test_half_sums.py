"""matmul(accumulate="float16"): what it means, where it is chosen, and that default calls are as they were."""

from __future__ import annotations

import pytest
import torch

import ridgeline
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, observe
from ridgeline.lab.measurement.law import Law
from ridgeline.op import get
from ridgeline.ops.matmul import _half

pytestmark = pytest.mark.kernels
KERNELS = INTERPRETED or torch.cuda.is_available()
MATMUL = get("matmul")


def pair(device: str, K: int = 300) -> list[torch.Tensor]:
    dice = torch.Generator(device).manual_seed(0)
    shapes = (70, K), (K, 50)
    return [torch.randn(s, device=device, generator=dice).half().requires_grad_() for s in shapes]


def summed(a: torch.Tensor, b: torch.Tensor, chunk: int) -> torch.Tensor:
    """a @ b in float16 sums over `chunk` columns, rounded after each 16, which are added in float32."""
    total = torch.zeros(())
    for start in range(0, a.shape[1], chunk):
        part = torch.zeros((), dtype=torch.float16)
        for at in range(start, min(start + chunk, a.shape[1]), 16):
            part = (part.float() + a[:, at : at + 16].float() @ b[at : at + 16].float()).half()
        total = total + part.float()
    return total.half()


def test_sums_over_64_columns_need_no_wider_tolerance() -> None:
    """They pass the law of float32 sums at any length; sums over all columns fail it."""
    for K in (64, 4096):
        law = Law(MATMUL, [t.detach() for t in pair("cpu", K)])
        assert law.judge([summed(*law.args, _half.CHUNK)]).worst() < 0.5
    assert not law.judge([summed(*law.args, K)]).ok


@pytest.mark.parametrize(
    "shapes", [((33, 100), (100, 20)), ((2, 9, 70), (70, 12)), ((70,), (70, 5)), ((3, 4, 65), (65,))]
)
def test_kernel(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    if not KERNELS:
        pytest.skip("needs the kernels")
    given = [torch.randn(s, device=device).half().requires_grad_() for s in shapes]
    seen = []
    with observe(lambda launch: seen.append(launch.kernel)):
        y = ridgeline.matmul(*given, accumulate="float16", impl="triton_half")
        grads = torch.autograd.grad(y, given, torch.ones_like(y))
    assert seen
    assert {*seen} == {_half._fwd}  # backward's products too
    expected = torch.matmul(*given)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=3e-2)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, given, torch.ones_like(y)), rtol=1e-2, atol=3e-2)


def test_large_values_stay_finite_over_chunks(device: str) -> None:
    """A sum of all products would pass 65504 on its way; sums of 64 do not, and the result fits."""
    a = torch.full((16, 256), 25.0, device=device).half()
    b = torch.full((256, 16), 25.0, device=device).half()
    b[128:] = -25
    assert not summed(a.cpu(), b.cpu(), _half.CHUNK).any()
    assert not summed(a.cpu(), b.cpu(), 256).isfinite().all()
    if KERNELS:
        assert not ridgeline.matmul(a, b, accumulate="float16", impl="triton_half").any()


@pytest.mark.parametrize(("card", "chosen"), [("rtx4090", True), ("rtx5090", True), ("l40s", False), ("h200", False)])
def test_choice_by_card(card: str, chosen: bool) -> None:
    a, b = (torch.empty(256, 256, dtype=torch.float16, device="meta") for _ in "ab")
    half = MATMUL.implementations["triton_half"]
    with devices.pretend(card):
        assert (half.left("fwd", a, b, "float16") is None) == chosen
        assert half.left("fwd", a, b, "ieee") is not None
        seen = []
        with observe(lambda launch: seen.append(launch.kernel)):
            ridgeline.matmul(a, b, accumulate="float16")
        assert (_half._fwd in seen) == chosen
        seen.clear()
        with observe(lambda launch: seen.append(launch.kernel)):
            ridgeline.matmul(a, b)
        assert _half._fwd not in seen


def test_other_rungs_may_sum_in_float32(device: str) -> None:
    a, b = (t.detach() for t in pair(device))
    for impl in ("torch", "naive", *(["triton"] if KERNELS else [])):
        allowed = ridgeline.matmul(a, b, accumulate="float16", impl=impl)
        assert torch.equal(allowed, ridgeline.matmul(a, b, impl=impl))
