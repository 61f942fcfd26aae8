"""sum_to beyond its cases: every set of summed dimensions, strides, dtypes, repeatable sums, what gradients are."""

from itertools import product

import pytest
import torch

import ridgeline
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.op import RidgelineError
from ridgeline.ops.reduction._sums import add_up

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else None
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1)[..., 0],
    "first outermost last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "one image, expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_set_of_dimensions(layout: str, device: str) -> None:
    x = LAYOUTS[layout](torch.rand(3, 4, 5, 3, device=device))
    for summed in product((False, True), repeat=4):
        shape = tuple(1 if s else n for s, n in zip(summed, x.shape, strict=True))
        y = ridgeline.sum_to(x, shape, impl=IMPL)
        assert y.shape == shape
        torch.testing.assert_close(y.double(), x.double().sum_to_size(shape), rtol=1e-6, atol=1e-6)
    for lead in range(1, 5):
        y = ridgeline.sum_to(x, list(x.shape[lead:]), impl=IMPL)
        torch.testing.assert_close(y, x.sum_to_size(x.shape[lead:]))


def test_it_is_one_pass(device: str) -> None:
    """Alternating dimensions, of which kernels once made a contiguous copy, are read once: at most the sum and its
    parts' sum are started."""
    if IMPL is None:
        pytest.skip("needs kernels")
    x = torch.rand(3, 4, 3, 4, 3, 4, 3, device=device)
    seen: list[Launch] = []
    with observe(seen.append):
        y = ridgeline.sum_to(x, (3, 1, 3, 1, 3, 1, 3), impl=IMPL)
    assert len(seen) <= 2
    torch.testing.assert_close(y, x.sum((1, 3, 5), keepdim=True))


def test_the_gradient_of_broadcasting(device: str) -> None:
    """Summing the gradient of a broadcast is what autograd does; and the gradient of the sum is a broadcast."""
    bias, x = torch.rand(4, 1, 3, device=device, requires_grad=True), torch.rand(2, 4, 5, 3, device=device)
    dy = torch.rand_like(x)
    (wanted,) = torch.autograd.grad(x * bias, bias, dy)
    torch.testing.assert_close(ridgeline.sum_to(dy * x, bias.shape, impl=IMPL), wanted)
    x.requires_grad_()
    y = ridgeline.sum_to(x, bias.shape, impl=IMPL)
    g = torch.rand(y.shape, device=device)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g.expand(x.shape))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float16])
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    x = torch.randint(0, 2, (7, 6, 20), device=device).to(dtype)
    y, wanted = ridgeline.sum_to(x, (6, 1), impl=IMPL), x.sum_to_size((6, 1))
    assert y.dtype == wanted.dtype
    assert torch.equal(y, wanted)


def test_nothing_to_sum(device: str) -> None:
    """A view, as torch's; and sums of nothing are 0."""
    x = torch.rand(1, 3, 1, device=device)
    for shape in ((1, 3, 1), (3, 1)):
        y = ridgeline.sum_to(x, shape, impl=IMPL)
        assert y.shape == shape
        assert y.data_ptr() == x.data_ptr()
    assert torch.equal(ridgeline.sum_to(x[:0], (3, 1), impl=IMPL), torch.zeros(3, 1, device=device))
    assert ridgeline.sum_to(x[:, :0], (1, 0, 1), impl=IMPL).shape == (1, 0, 1)


def test_sums_are_repeatable(device: str) -> None:
    x = torch.rand(4, 300, 8, 65, device=device)
    assert torch.equal(*[ridgeline.sum_to(x, (4, 1, 8, 1), impl=IMPL) for _ in range(2)])


def test_refusals(device: str) -> None:
    x = torch.rand(2, 3, device=device)
    for shape in ((2,), (3, 2), (1, 2, 3), (2, 0)):
        with pytest.raises(RidgelineError, match=r"must broadcast to x's shape \(2, 3\)"):
            ridgeline.sum_to(x, shape)
    for shape in (3, "ab", (1.0, 3), (-1, 3)):
        with pytest.raises(RidgelineError, match="must be sizes"):
            ridgeline.sum_to(x, shape)


@pytest.mark.parametrize("shape", [(3, 5), (64, 70), (65, 1), (300, 70), (1057, 17), (70, 8193)])
def test_parts_add_up(shape: tuple[int, int], device: str) -> None:
    """Many parts of few sums are read many at a time; ends of rows and columns fall inside tiles."""
    if IMPL != "triton":
        pytest.skip("needs the kernels")
    parts = torch.randint(-9, 10, shape, device=device).double()
    y = torch.empty(shape[1], device=device)
    add_up(y, parts)
    assert torch.equal(y, parts.sum(0).float())
