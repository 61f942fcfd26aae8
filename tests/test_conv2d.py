"""conv2d beyond its cases: windows and strides against PyTorch, layouts, split sums, choices and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, observe
from ridgeline.lab.measurement.law import Law
from ridgeline.op import RidgelineError, get
from ridgeline.ops.matmul import _conv, _conv_boxes
from ridgeline.select import why_not

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else "torch"
LAST = torch.channels_last


def everything(impl: str, leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Returns y and the gradients of x, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = ridgeline.conv2d(*leaves, impl=impl, **options)
    dice = torch.Generator(y.device).manual_seed(2)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, device=y.device, generator=dice).to(y.dtype))]


def inputs(x: tuple[int, ...], K: int, window: tuple[int, int], device: str) -> list[torch.Tensor]:
    dice = torch.Generator(device).manual_seed(K)
    return [torch.randn(s, device=device, generator=dice) for s in (x, (K, x[1], *window), (K,))]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for name, one, other in zip(("y", "dx", "dw", "db"), found, expected, strict=True):
        assert one.shape == other.shape, name
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max()), msg=name)


@pytest.mark.parametrize("seed", range(12))
def test_any_window(seed: int, device: str) -> None:
    """Strides, paddings and dilations that share factors or not, with windows that are not square."""
    dice = random.Random(seed)
    stride, dilation, padding = ([dice.randint(low, high) for _ in "hw"] for low, high in ((1, 6), (1, 4), (0, 3)))
    window = dice.randint(1, 4), dice.randint(1, 4)
    size = [max(1, d * (t - 1) + dice.randint(1, 9) - p) for d, t, p in zip(dilation, window, padding, strict=True)]
    size = [n + 4 for n in size]
    given = inputs((dice.randint(1, 3), dice.randint(1, 20), *size), dice.randint(1, 20), window, device)
    options: dict[str, Any] = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    close(everything(IMPL, given, **options), everything("torch", given, **options))


@pytest.mark.parametrize("stride", range(1, 7))
@pytest.mark.parametrize("dilation", range(1, 5))
def test_every_tap_is_used_once_backward(stride: int, dilation: int) -> None:
    """The taps of the classes, as `_class` finds them, are all pairs of a pixel and a tap that forward has."""
    for taps in (1, 2, 3, 5):
        for padding in range(4):
            axis = _conv.Window((stride,) * 2, (padding,) * 2, (dilation,) * 2).axes(
                torch.empty(1, 1, taps, taps), True
            )[0]
            H, P = 40, (40 + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            wanted = {
                (p * stride + r * dilation - padding, r, p)
                for p in range(P)
                for r in range(taps)
                if 0 <= p * stride + r * dilation - padding < H
            }
            found = set()
            for which in range(stride):
                at = which + padding
                first = (at // axis.common) * axis.inverse % axis.apart
                count = max(0, -(-(taps - first) // axis.apart)) if at % axis.common == 0 else 0
                for u in range(-(-(H - which) // stride)):
                    for i in range(count):
                        p = u + (at - first * dilation) // stride - i * (dilation // axis.common)
                        if 0 <= p < P:
                            found.add((which + u * stride, first + i * axis.apart, p))
            assert found == wanted


LAYOUTS = {
    "channels last": lambda t: t.to(memory_format=LAST),
    "some channels of more": lambda t: torch.cat([t, t, t], 1).to(memory_format=LAST)[:, t.shape[1] : 2 * t.shape[1]],
    "rows and columns exchanged": lambda t: t.mT.contiguous().mT,
    "one image, expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    x, w, b = inputs((2, 6, 8, 7), 9, (3, 3), device)
    given = [LAYOUTS[layout](x), LAYOUTS[layout](w), b]
    found = everything(IMPL, given, padding=1, activation="silu")
    close(found, everything("torch", [t.contiguous() for t in given], padding=1, activation="silu"))
    if IMPL == "triton":
        assert all(t.is_contiguous(memory_format=LAST) for t in found[:3])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_gradients_in_any_format(activation: str, form: Any, device: str) -> None:
    """An incoming gradient in NCHW gives the bits of one in channels_last."""
    given = [t.requires_grad_() for t in inputs((2, 6, 5, 7), 9, (3, 3), device)]
    y = ridgeline.conv2d(*given, activation=activation, impl=IMPL)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy.contiguous(memory_format=form), retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(y, given, dy.contiguous(memory_format=LAST)), strict=True):
        assert torch.equal(one, other)


def test_split_sums(device: str) -> None:
    """Many pixels are split into parts, whose ends fall inside images; the law holds and reruns are bitwise equal."""
    x, w, b = (t.half() if IMPL == "triton" else t for t in inputs((3, 17, 60, 57), 20, (3, 3), device))
    leaves = [x.to(memory_format=LAST).requires_grad_(), w.requires_grad_(), b.requires_grad_()]
    parts = []
    with observe(lambda launch: parts.append(launch.grid[1]) if launch.kernel is _conv._weight else None):
        law = Law(get("conv2d"), leaves, {"padding": 1, "stride": 2})
        first, second = (law.run(get("conv2d").implementations[IMPL]) for _ in range(2))
    assert law.judge(*first).ok, law.judge(*first).reason()
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    if IMPL == "triton" and not INTERPRETED:
        assert max(parts) > 1


def test_parts_add_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU, which has one multiprocessor and so would have one part."""
    if IMPL != "triton":
        pytest.skip("needs the kernels")
    card = devices.Device("a card", "cuda", "sm_90", 90, 132, 232_448, 60 << 20)
    given = inputs((3, 5, 23, 29), 9, (3, 3), device)
    expected = everything("torch", given, padding=1)
    parts = []
    monkeypatch.setattr(_conv.device, "of", lambda _: card)
    with observe(lambda launch: parts.append(launch.grid[1]) if launch.kernel is _conv._weight else None):
        close(everything(IMPL, given, padding=1), expected)
    assert parts
    assert parts[0] > 3


def test_relu_keeps_nan_and_saves_no_second_result(device: str) -> None:
    x, w, b = inputs((1, 4, 5, 5), 6, (1, 1), device)
    x[0, 0, 0, 0] = float("nan")
    y = ridgeline.conv2d(x, w, b, activation="relu", impl=IMPL)
    assert y[0, :, 0, 0].isnan().all()
    assert not y[0, :, 1:].isnan().any()


def test_some_gradients(device: str) -> None:
    given = inputs((2, 6, 5, 7), 9, (3, 3), device)
    whole = everything(IMPL, given, activation="relu")[1:]
    for n in range(3):
        leaves = [t.detach().requires_grad_(m == n) for m, t in enumerate(given)]
        y = ridgeline.conv2d(*leaves, activation="relu", impl=IMPL)
        dice = torch.Generator(y.device).manual_seed(2)
        (grad,) = torch.autograd.grad(y, leaves[n], torch.randn(y.shape, device=y.device, generator=dice))
        assert torch.equal(grad, whole[n])


def test_choice() -> None:
    """Kernels are chosen where an epilogue saves a pass; PyTorch has groups, few channels and float32."""
    half = torch.empty(2, 64, 8, 8, dtype=torch.bfloat16, device="meta")
    w, b = half.new_empty(64, 64, 3, 3), half.new_empty(64)
    chosen = get("conv2d").implementations["triton_fused"]
    assert chosen.left("fwd", half, w, b, activation="relu") is None
    assert "without" in str(chosen.left("fwd", half, w, None, activation="relu"))
    assert "without" in str(chosen.left("fwd", half, w, b, activation=None))
    assert "float32" in str(chosen.left("fwd", half.float(), w.float(), b.float(), activation="relu"))
    assert "group" in str(chosen.left("fwd", half, w[:, :32], b, groups=2, activation="relu"))
    assert "few channels" in str(chosen.left("fwd", half[:, :3], w[:, :3], b, activation="relu"))
    for window, channels, left in ((3, 256, False), (3, 264, True), (1, 2304, False), (1, 2312, True), (5, 96, True)):
        x, w = half.new_empty(2, channels, 8, 8), half.new_empty(64, channels, window, window)
        assert ("long sums" in str(chosen.left("fwd", x, w, b, activation="relu"))) == left, (window, channels)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_which_kernel_serves(arch: str) -> None:
    """Boxes have 1 x 1 windows on Hopper, gathers all else. Gradients start no kernel of ours but the activation's."""
    x = torch.empty(32, 64, 56, 56, dtype=torch.bfloat16, device="meta", requires_grad=True)
    bias = x.new_empty(64)
    for window in (1, 3):
        weight = x.new_empty(64, 64, window, window).to(memory_format=LAST)
        images, seen = x.to(memory_format=LAST), []
        with devices.pretend(arch), observe(lambda launch, seen=seen: seen.append(launch.kernel)):
            y = ridgeline.conv2d(images, weight, bias, padding=window // 2, activation="relu")
            forward, seen[:] = seen[:], []
            y.backward(torch.empty_like(y))
        assert forward == [(_conv_boxes if window == 1 and arch == "sm_90" else _conv)._conv]
        assert [kernel.fn.__name__ for kernel in seen] == ["_unbend"]


def test_gradients_that_serve(device: str) -> None:
    """Forward is a kernel's; dx and dw are PyTorch's, for any layout and for one of them alone."""
    served = get("conv2d").implementations["triton_fused"]
    x, w, b = (t.half() for t in inputs((2, 40, 7, 9), 33, (3, 3), device))
    for form in (torch.contiguous_format, LAST):
        leaves = [t.requires_grad_() for t in (x.contiguous(memory_format=form), w, b)]
        for options in ({"padding": 1, "activation": "relu"}, {"stride": 2, "dilation": (2, 1), "activation": "silu"}):
            law = Law(get("conv2d"), leaves, options)
            found = law.run(served if IMPL == "triton" else get("conv2d").implementations["torch"])
            assert law.judge(*found).ok, law.judge(*found).reason()
            y = ridgeline.conv2d(x, leaves[1], b, impl=None if IMPL == "torch" else "triton_fused", **options)  # type: ignore[arg-type]
            (dw,) = torch.autograd.grad(y, leaves[1:2], torch.ones_like(y))
            assert dw.shape == w.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float32_gradients_do_not_follow_cudnns_switch(dtype: torch.dtype, device: str) -> None:
    """Kernels make them; those of half precision are PyTorch's."""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    leaves = [t.to(dtype).requires_grad_() for t in inputs((1, 16, 7, 9), 32, (3, 3), device)]
    y = ridgeline.conv2d(*leaves, padding=1, activation="relu", impl="triton_fused")
    with Watch():
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert (torch.ops.aten.convolution_backward in seen) == (dtype == torch.float16)


def test_groups_are_pytorchs(device: str) -> None:
    x, w, b = inputs((2, 6, 5, 7), 9, (3, 3), device)
    y = ridgeline.conv2d(x, w[:, :2], b, groups=3, padding=1)
    torch.testing.assert_close(y, F.conv2d(x, w[:, :2], b, padding=1, groups=3))
    with pytest.raises(RidgelineError, match="group"):
        ridgeline.conv2d(x, w[:, :2], b, groups=3, impl="triton")


def test_no_images_and_no_gradient_without_pixels(device: str) -> None:
    found = everything(IMPL, inputs((0, 6, 5, 7), 9, (3, 3), device))
    assert found[0].shape == (0, 9, 3, 5)
    assert not found[2].any()
    assert not found[3].any()


def half(x: tuple[int, ...], K: int, window: tuple[int, int], device: str) -> list[torch.Tensor]:
    """Channels_last inputs in float16, which the copy engine takes."""
    x, weight, bias = (t.half() for t in inputs(x, K, window, device))  # type: ignore[assignment]
    return [x.to(memory_format=LAST), (weight / 4).to(memory_format=LAST), bias]  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [(1, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 7, 5), (40, 3, 2), (1, 4, 130)])
def test_boxes(window: tuple[int, int], size: tuple[int, ...], device: str) -> None:
    """Boxes reach past the edges of images, and past the last image."""
    if IMPL != "triton" or (device == "cuda" and torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("needs the kernels, and the copy engine")
    leaves = [t.requires_grad_() for t in half((size[0], 72, *size[1:]), 24, window, device)]
    for options in ({"padding": (2, 1), "activation": "relu"}, {"padding": 2, "dilation": (2, 1)}):
        law = Law(get("conv2d"), leaves, options)
        first, second = (law.run(get("conv2d").implementations["triton_boxes"]) for _ in range(2))
        assert law.judge(*first).ok, law.judge(*first).reason()
        for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]


def test_the_box_wastes_the_least() -> None:
    """Sides of images with a factor 4 or 8 need no pixel more, and 14 x 14 none if there are 32 images."""
    for sizes, wanted in (
        ((32, 56, 56), 1.0),
        ((32, 28, 28), 1.0),
        ((32, 14, 14), 1.0),
        ((8, 64, 64), 1.0),
        ((32, 7, 7), 8 / 7),
        ((1, 7, 7), 64 / 49),
    ):
        box = _conv_boxes.box_of(128 if sizes[0] > 1 else 64, *sizes)
        assert box.images * box.rows * box.columns in (64, 128)
        covered = 1
        for n, side in zip(sizes, box, strict=True):
            covered *= -(-n // side) * side
        assert covered / (sizes[0] * sizes[1] * sizes[2]) == pytest.approx(wanted)


def test_which_calls_boxes_take() -> None:
    boxes = get("conv2d").implementations["triton_boxes"]
    x, w, _ = half((2, 16, 6, 8), 8, (3, 3), "cpu")
    with devices.pretend("sm_90"):
        assert why_not(boxes, x, w) is None
        for said, args, options in (
            ("stride", (x, w), {"stride": 2}),
            ("group", (x, w[:, :8]), {"groups": 2}),
            ("channels_last", (x.contiguous(), w), {}),
            ("channels_last", (x, w.contiguous()), {}),
            ("16 bytes", (x[:, :12], w[:, :12]), {}),
            ("16 bytes", (x, w[:5]), {}),
            ("empty", (x[:0], w), {}),
            ("bfloat16", (x.float(), w.float()), {}),
        ):
            assert said in str(why_not(boxes, *args, **options)), said
    with devices.pretend("sm_89"):
        assert "sm_90" in str(why_not(boxes, x, w))
