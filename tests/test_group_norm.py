"""group_norm's own: memory formats, views of larger tensors, gradients of some inputs alone, a large mean, refusals."""

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels

LAST = torch.channels_last
LAYOUTS = {
    "channels of a larger tensor": lambda x: torch.cat([x, x, x], 1)[:, 8:16],
    "channels of a larger tensor, channels last": lambda x: torch.cat([x, x, x], 1).to(memory_format=LAST)[:, 8:16],
    "rows and columns exchanged": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1).flatten(3)[..., ::2],
    "one image, expanded": lambda x: x[:1].expand_as(x),
    "columns outermost": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
}


def both(x: torch.Tensor, groups: int, *parameters: torch.Tensor | None, dy: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel's output, which like its gradients is what torch gives for a contiguous copy."""
    dy = torch.randn(x.shape, device=x.device) if dy is None else dy
    results = []
    for impl, given in (("triton", x.detach()), ("torch", x.detach().contiguous())):
        y = ridgeline.group_norm(given.requires_grad_(), groups, *parameters, impl=impl)
        wanted = [t for t in (given, *parameters) if t is not None and t.requires_grad]
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)
    return results[0][0]


@pytest.fixture
def parameters(device: str) -> list[torch.Tensor]:
    return [torch.randn(8, device=device, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, parameters: list[torch.Tensor], device: str) -> None:
    both(LAYOUTS[layout](torch.randn(3, 8, 6, 5, device=device)), 4, *parameters)


def test_the_format_is_kept(parameters: list[torch.Tensor], device: str) -> None:
    x = torch.randn(3, 8, 6, 5, device=device)
    deep = torch.randn(2, 8, 3, 4, 5, device=device).to(memory_format=torch.channels_last_3d)
    assert both(x, 2, *parameters).is_contiguous()
    assert both(x.to(memory_format=LAST), 2, *parameters).is_contiguous(memory_format=LAST)
    assert both(deep, 2, *parameters).is_contiguous(memory_format=torch.channels_last_3d)
    assert both(x, 2, *parameters, dy=torch.randn_like(x).to(memory_format=LAST)).is_contiguous()


def test_some_gradients(parameters: list[torch.Tensor], device: str) -> None:
    """Of x, weight and bias those that are wanted, with either parameter missing."""
    x, (w, b) = torch.randn(3, 8, 7, device=device), parameters
    for given in ((None, None), (w, None), (None, b), (w.detach(), b), (w, b.detach())):
        both(x, 2, *given)
    alone, together = (ridgeline.group_norm(t, 2, w, b, impl="triton").sum() for t in (x, x.clone().requires_grad_()))
    for one, other in zip(torch.autograd.grad(alone, [w, b]), torch.autograd.grad(together, [w, b]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 8, 3), (0, 8), (2, 8), (1, 8, 1, 1)])
def test_empty_and_odd_sizes(shape: tuple[int, ...], parameters: list[torch.Tensor], device: str) -> None:
    y = both(torch.randn(shape, device=device), 2, *parameters)
    assert y.shape == shape


def test_no_space(parameters: list[torch.Tensor], device: str) -> None:
    """Images without a pixel add nothing to the gradients of weight and bias (torch's come out as NaN)."""
    y = ridgeline.group_norm(torch.randn(2, 8, 0, device=device), 2, *parameters, impl="triton")
    assert y.shape == (2, 8, 0)
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), parameters))


@pytest.mark.parametrize("size", [50, 20000])
def test_large_mean(size: int, device: str) -> None:
    """The variance does not cancel out: in registers and in chunks the error is that of torch's two passes."""
    x = torch.randn(2, 4, size, device=device) * 0.01 + 1000
    exact = torch.group_norm(x.double(), 2)
    mine, theirs = ((ridgeline.group_norm(x, 2, impl=impl) - exact).norm() for impl in ("triton", "torch"))
    assert mine <= 2 * theirs


def test_refusals(parameters: list[torch.Tensor], device: str) -> None:
    x, (w, b) = torch.randn(2, 8, 4, device=device), parameters
    for args, sentence in (
        ((x, 3), "num_groups must divide the 8 channels of x, and is 3"),
        ((x, 0), "num_groups must divide"),
        ((x[0, 0], 2), r"x must be a floating-point tensor \(images, channels, ...\)"),
        ((x.long(), 2), "x must be a floating-point tensor"),
        ((x, 2, w[:4]), r"weight must be floating point of shape \(8,\)"),
        ((x, 2, w, b.to("meta")), "bias must be .* on meta"),
        ((x, 2, [1.0] * 8), "weight must be .*, and is list"),
    ):
        with pytest.raises(RidgelineError, match=sentence):
            ridgeline.group_norm(*args)
