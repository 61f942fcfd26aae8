"""binary_cross_entropy beyond its cases: far logits, layouts, broadcast weights, gradients, repeatable sums."""

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else None
ours = ridgeline.binary_cross_entropy
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels of a larger tensor": lambda x: torch.cat([x, x], 1)[:, 2 : 2 + x.shape[1]],
    "outermost last": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "one row, expanded": lambda x: x[:1].expand_as(x),
}


def exact(x: torch.Tensor, t: torch.Tensor, **options) -> torch.Tensor:
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    return F.binary_cross_entropy_with_logits(x.double(), t.double(), **wide)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, reduction: str, device: str) -> None:
    """Logits and targets of different strides, both with gradients, beside weights that rows or columns share."""
    x, t = LAYOUTS[layout](torch.randn(5, 6, 24, device=device)), torch.rand(5, 6, 24, device=device)
    x, t = x.detach().requires_grad_(), t.requires_grad_()
    options = {"weight": torch.rand(6, 1, device=device), "pos_weight": torch.rand(24, device=device) + 1}
    options |= {"reduction": reduction}
    for left, right in ((x, t), (t, x.detach().sigmoid().requires_grad_())):
        y, wanted = ours(left, right, **options, impl=IMPL), exact(left, right, **options)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-6)
        dy = torch.randn(y.shape, device=device)
        found = torch.autograd.grad(y, (left, right), dy)
        exacts = torch.autograd.grad(wanted, (left, right), dy.double())
        # The target's gradient is a difference of terms up to about 4, whose half ulp is 2.4e-7.
        torch.testing.assert_close(found, exacts, rtol=2e-6, atol=3e-7)


def test_far_logits_neither_overflow_nor_cancel(device: str) -> None:
    """The loss of a confident, right answer keeps its digits: torch's own subtraction leaves none of them."""
    x = torch.tensor([-80.0, -30.0, -1.0, 0.0, 1.0, 30.0, 80.0, 1e4, -1e4], device=device).repeat(2)
    t = (torch.arange(18, device=device) < 9).float()
    y = ours(x, t, reduction="none", impl=IMPL)
    wanted = -F.logsigmoid(torch.where(t > 0, x, -x).double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-37)


def test_what_is_not_finite(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([inf, -inf, nan, inf, -inf, nan], device=device)
    t = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.5, 1.0], device=device)
    y = ours(x, t, reduction="none", impl=IMPL)
    torch.testing.assert_close(y, torch.tensor([inf, inf, nan, inf, inf, nan], device=device), equal_nan=True)
    assert ours(x[:0], t[:0], impl=IMPL).isnan()
    assert ours(x[:0], t[:0], reduction="sum", impl=IMPL) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64])
def test_targets(dtype: torch.dtype, device: str) -> None:
    x, t = torch.randn(33, 7, device=device), torch.randint(0, 2, (33, 7), device=device).to(dtype)
    torch.testing.assert_close(ours(x, t, impl=IMPL).double(), exact(x, t), rtol=1e-6, atol=0)


def test_sums_are_repeatable_and_exact(device: str) -> None:
    """More tiles than programs: the mean is within an ulp of the exact one, and reruns are bitwise equal."""
    shape = (700, 1024) if device == "cpu" else (9000, 8192)
    x, t = torch.randn(shape, device=device), torch.rand(shape, device=device)
    y = ours(x, t, impl=IMPL)
    assert torch.equal(y, ours(x, t, impl=IMPL))
    torch.testing.assert_close(y.double(), exact(x, t), rtol=1.2e-7, atol=0)


def test_some_gradients(device: str) -> None:
    x, t = torch.randn(9, 5, device=device), torch.rand(9, 5, device=device)
    both = [v.clone().requires_grad_() for v in (x, t)]
    dx, dt = torch.autograd.grad(ours(*both, impl=IMPL), both)
    for n, wanted in enumerate((dx, dt)):
        given = [v.clone().requires_grad_(k == n) for k, v in enumerate((x, t))]
        assert torch.equal(torch.autograd.grad(ours(*given, impl=IMPL), given[n])[0], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """At most half an ulp and what the float32 arithmetic leaves."""
    x, t = torch.randn(300, 1000, device="cuda", dtype=dtype) * 8, torch.rand(300, 1000, device="cuda", dtype=dtype)
    options = {"pos_weight": torch.rand(1000, device="cuda") + 1, "weight": torch.rand(300, 1, device="cuda")}
    x.requires_grad_()
    y, wanted = ours(x, t, **options, reduction="none"), exact(x, t, **options, reduction="none")
    torch.testing.assert_close(y.double(), wanted, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-6)
    found, right = (torch.autograd.grad(v.sum(), x)[0] for v in (y, wanted))
    torch.testing.assert_close(found, right, rtol=torch.finfo(dtype).eps * 1.01, atol=1e-6)
    with torch.autocast("cuda", dtype):
        assert ours(x, t).dtype == torch.float32


def test_refusals(device: str) -> None:
    x, t = torch.randn(3, 4, device=device), torch.rand(3, 4, device=device)
    for name, given, sentence in (
        ("weight", torch.rand(5, device=device), "must broadcast"),
        ("pos_weight", torch.rand(2, 3, 4, device=device), "must broadcast"),
        ("weight", torch.rand(4, device=device, requires_grad=True), "takes no gradient"),
        ("reduction", "average", "reduction must be"),
    ):
        if IMPL or "gradient" not in sentence:
            with pytest.raises(RidgelineError, match=sentence):
                ours(x.requires_grad_(), t, **{name: given}, impl=IMPL)
