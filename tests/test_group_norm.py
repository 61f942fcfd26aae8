"""Tests of group_norm alone: memory formats, views, gradients of some inputs only, a large mean, refusals."""

from itertools import product

import pytest
import torch

import ridgeline
import ridgeline.nn
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


def both(
    x: torch.Tensor, groups: int, *parameters: torch.Tensor | None, dy: torch.Tensor | None = None
) -> torch.Tensor:
    """The output keeps the memory format; output and gradient equal torch's for a contiguous copy."""
    dy = torch.randn(x.shape, device=x.device) if dy is None else dy
    results = []
    for impl, given in (("triton", x.detach()), ("torch", x.detach().contiguous())):
        y = ridgeline.group_norm(given.requires_grad_(), groups, *parameters, impl=impl)
        wanted = [t for t in (given, *parameters) if t is not None and t.requires_grad]
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    of_images, of_parameters = zip(*((found[:2], found[2:]) for found in results), strict=True)
    torch.testing.assert_close(*of_images, atol=2e-5, rtol=2e-5)
    sums = x.numel() / x.shape[1]  # number of elements in each sum, over images and pixels
    torch.testing.assert_close(*of_parameters, atol=2e-5 * max(1, sums / 64) ** 0.5, rtol=2e-5)
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
    """Computes only the requested gradients of x, weight and bias, also if either parameter is missing."""
    x, (w, b) = torch.randn(3, 8, 7, device=device), parameters
    for given in ((None, None), (w, None), (None, b), (w.detach(), b), (w, b.detach())):
        both(x, 2, *given)
    alone, together = (ridgeline.group_norm(t, 2, w, b, impl="triton").sum() for t in (x, x.clone().requires_grad_()))
    for one, other in zip(torch.autograd.grad(alone, [w, b]), torch.autograd.grad(together, [w, b]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", *LAYOUTS])
@pytest.mark.parametrize("size", [(6, 5), (150, 40)], ids=["registers", "chunks"])
def test_silu(layout: str, size: tuple[int, int], parameters: list[torch.Tensor], device: str) -> None:
    """SiLU in the same pass, and its gradients, also if weight or bias is missing; far from 0 it neither overflows nor
    cancels."""
    x = torch.randn(2, 8, *size, device=device)
    x[0, 0, 0] = 40 * x[0, 0, 0]
    x = x.contiguous(memory_format=LAST) if layout == "channels last" else LAYOUTS.get(layout, torch.clone)(x)
    dy = torch.randn(x.shape, device=device)
    w, b = parameters
    for given in ((w, b), (w, None), (None, b)) if layout == "contiguous" else ((w, b),):
        found = []
        for dtype, impl in ((torch.float32, "triton"), (torch.float64, None)):
            leaf = x.detach().to(dtype).requires_grad_()
            numbers = [None if t is None else t.to(dtype) for t in given]
            rest = (4, *numbers)
            if impl is None:
                y = torch.nn.functional.silu(ridgeline.group_norm(leaf.contiguous(), *rest, impl="torch"))
            else:
                y = ridgeline.group_norm(leaf, *rest, activation="silu", impl=impl)
            wanted = [leaf, *[t for t in numbers if t is not None]]
            found.append([y, *torch.autograd.grad(y, wanted, dy.to(dtype))])
        (y, dx, *sums), (y64, dx64, *sums64) = found
        torch.testing.assert_close([y.double(), dx.double()], [y64, dx64], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close([s.double() for s in sums], sums64, atol=1e-3, rtol=1e-4)


def test_the_module_with_silu(device: str) -> None:
    """State dicts are torch's."""
    ours, theirs = ridgeline.nn.GroupNorm(2, 6, activation="silu").to(device), torch.nn.GroupNorm(2, 6).to(device)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 6, 4, device=device)
    torch.testing.assert_close(ours(x), torch.nn.functional.silu(theirs(x)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8, 3), (0, 8), (2, 8), (1, 8, 1, 1)])
def test_empty_and_odd_sizes(shape: tuple[int, ...], parameters: list[torch.Tensor], device: str) -> None:
    y = both(torch.randn(shape, device=device), 2, *parameters)
    assert y.shape == shape


def test_no_space(parameters: list[torch.Tensor], device: str) -> None:
    """Images without pixels add nothing to the gradients of weight and bias, which are NaN in torch."""
    y = ridgeline.group_norm(torch.randn(2, 8, 0, device=device), 2, *parameters, impl="triton")
    assert y.shape == (2, 8, 0)
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), parameters))


@pytest.mark.parametrize("size", [50, 20000])
def test_large_mean(size: int, device: str) -> None:
    """A large mean does not cancel and is not rounded: in registers and in chunks the error is below torch's."""
    x = torch.randn(2, 4, size, device=device) * 0.01 + 1000
    exact = torch.group_norm(x.double(), 2)
    mine, theirs = ((ridgeline.group_norm(x, 2, impl=impl) - exact).norm() for impl in ("triton", "torch"))
    assert mine <= theirs


def test_more_images_than_multiprocessors(parameters: list[torch.Tensor], device: str) -> None:
    """Programs of backward that take several images sum the gradients of weight and bias (the interpreter has one)."""
    images = 5 if device == "cpu" else 300
    both(torch.randn(images, 8, 33, device=device), 4, *parameters)
    both(torch.randn(images, 8, 2100, device=device), 2, *parameters)


CLUSTERS = {  # images, channels, height, width; groups
    "one block, backward alone": ((2, 8, 48, 64), 2, False),
    "warps without work": ((2, 8, 70, 64), 2, False),
    "parts of channels": ((3, 2, 128, 160), 2, False),
    "places that warps do not share evenly": ((2, 24, 28, 30), 1, False),
    "wide groups": ((1, 48, 80, 40), 2, False),
    "more images than multiprocessors": ((150, 8, 65, 64), 2, False),
    "groups of whole packs, channels last": ((2, 64, 48, 50), 4, True),
    "groups that packs share, channels last": ((2, 160, 45, 41), 16, True),
    "narrow groups, channels last": ((2, 32, 90, 90), 8, True),
    "wide groups, channels last": ((1, 128, 30, 20), 2, True),
    "more images than multiprocessors, channels last": ((150, 32, 65, 33), 4, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CLUSTERS)
def test_clusters(case: str, dtype: torch.dtype) -> None:
    """With parameters of another dtype, one or none of them, on views with strides: at most twice torch's error."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90")
    torch.manual_seed(0)
    shape, groups, last = CLUSTERS[case]
    wide = torch.randn(shape[0], shape[1] + (16 if last else 0), *shape[2:], device="cuda", dtype=dtype)
    x = (wide.to(memory_format=LAST)[:, 8 : 8 + shape[1]] if last else wide).requires_grad_()
    w, b = (torch.randn(shape[1], device="cuda") for _ in range(2))
    dy = torch.randn_like(x)
    own = "cuda_cluster" if x[0].numel() > 16384 * groups else None
    silu = torch.nn.functional.silu
    for given, options in product(((w, b), (w.to(dtype), None), (None, None)), ({}, {"activation": "silu"})):
        results = []
        for impl in (own, "torch", "oracle"):
            oracle = impl == "oracle"
            inputs = [
                None if t is None else t.detach().to(torch.float64 if oracle else t.dtype).requires_grad_()
                for t in (x, *given)
            ]
            if oracle:
                y = torch.group_norm(inputs[0], groups, *inputs[1:])
                y = silu(y) if options else y
            else:
                y = ridgeline.group_norm(inputs[0], groups, *inputs[1:], **options, impl=impl)
            wanted = [t for t in inputs if t is not None]
            results.append((y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))))
        for ours, theirs, exact in zip(*results, strict=True):
            allowed = (
                2 * (theirs - exact).norm() + torch.finfo(ours.dtype).eps * exact.norm()
            )  # few groups, so their scale is a matter of luck
            assert (ours - exact).norm() <= allowed, (given, tuple(ours.shape))
        assert torch.equal(results[0][0], ridgeline.group_norm(x, groups, *given, **options, impl=own))
    y = ridgeline.group_norm(x, groups, impl=own)
    one = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=dtype).expand_as(y), retain_graph=True)[0]
    other = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert torch.equal(one, other)


@pytest.mark.gpu
def test_clusters_with_a_large_mean_and_under_autocast() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90")
    x = torch.randn(4, 64, 32, 64, device="cuda") * 0.01 + 1000
    for given in (x, x.to(memory_format=LAST)):
        exact = torch.group_norm(given.double(), 4)
        mine, theirs = (
            (ridgeline.group_norm(given, 4, impl=impl) - exact).norm() for impl in ("cuda_cluster", "torch")
        )
        assert mine <= theirs
    x = torch.randn_like(x).bfloat16()
    for given in (x, x.to(memory_format=LAST)):
        given.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = ridgeline.group_norm(given, 4, impl="cuda_cluster")
        assert y.dtype == torch.float32
        exact = torch.group_norm(given.double(), 4)
        dy = torch.randn_like(y)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
        ours, theirs = torch.autograd.grad(y, given, dy)[0], torch.autograd.grad(exact, given, dy.double())[0]
        assert (ours - theirs).norm() <= 2**-8 * theirs.norm()


def test_refusals(parameters: list[torch.Tensor], device: str) -> None:
    x, (w, b) = torch.randn(2, 8, 4, device=device), parameters
    for args, sentence in (
        ((x, 3), "num_groups must divide the 8 channels of x, but is 3"),
        ((x, 0), "num_groups must divide"),
        ((x[0, 0], 2), r"x must be a floating-point tensor \(images, channels, ...\)"),
        ((x.long(), 2), "x must be a floating-point tensor"),
        ((x, 2, w[:4]), r"weight must be floating point of shape \(8,\)"),
        ((x, 2, w, b.to("meta")), "bias must be .* on meta"),
        ((x, 2, [1.0] * 8), "weight must be .*, but is list"),
    ):
        with pytest.raises(RidgelineError, match=sentence):
            ridgeline.group_norm(*args)
