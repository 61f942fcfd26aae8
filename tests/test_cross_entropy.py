"""cross_entropy beyond the law: who owns forward's gradient, other upstream gradients, bad targets, NaN, infinity."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from ridgeline.op import RidgelineError
from ridgeline.ops.loss import _arguments, _rows

kernels = pytest.mark.kernels
IMPL = "triton"


def make(rows: int, columns: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator(device).manual_seed(5)
    logits = torch.randn(rows, columns, device=device, generator=dice).mul(2).to(dtype).requires_grad_()
    return logits, torch.randint(columns, (rows,), device=device, generator=dice)


def grad(loss: torch.Tensor, logits: torch.Tensor, *upstream: torch.Tensor, keep: bool = False) -> torch.Tensor:
    return torch.autograd.grad(loss, logits, *upstream, retain_graph=keep)[0]


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_backward_again_and_again(reduction: str, device: str) -> None:
    """Every backward over a retained graph gives the same bits in its own memory, which the caller may overwrite."""
    logits, target = make(7, 131, device)
    loss = ridgeline.cross_entropy(logits, target, reduction=reduction, z_loss=1e-3, impl=IMPL)
    first = grad(loss.sum(), logits, keep=True)
    expected = first.clone()
    first.mul_(3)
    second = grad(loss.sum(), logits, keep=True)
    third = grad(loss.sum() / 8, logits, keep=True)
    assert torch.equal(second, expected)
    assert torch.equal(third, expected / 8)
    assert torch.equal(first, expected * 3)
    assert torch.equal(grad(loss.sum(), logits), expected)


@kernels
def test_accumulates(device: str) -> None:
    """Gradients add up in .grad over micro-batches, each of them divided."""
    logits, target = make(6, 40, device)
    other = logits.detach().clone().requires_grad_()
    for _ in range(3):
        (ridgeline.cross_entropy(logits, target, impl=IMPL) / 8).backward()
        (F.cross_entropy(other, target) / 8).backward()
    torch.testing.assert_close(logits.grad, other.grad)
    loss = ridgeline.cross_entropy(logits, target, impl=IMPL)
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * F.cross_entropy(other, target)).backward()
    torch.testing.assert_close(logits.grad, other.grad)


@kernels
def test_a_scaled_loss_in_half_precision(device: str) -> None:
    """With a scaled loss, as in float16 training, gradients survive that would be 0 in float16 without the scale."""
    logits, target = make(32, 1000, device, torch.float16)
    with torch.autocast(device, dtype=torch.float16):
        dlogits = grad(ridgeline.cross_entropy(logits, target, impl=IMPL) * 2.0**16, logits)
    wide = logits.detach().float().requires_grad_()
    expected = grad(F.cross_entropy(wide, target) * 2.0**16, wide)
    assert ((expected / 2**16).abs() < 2**-25).sum() > 100
    torch.testing.assert_close(dlogits.float(), expected, rtol=2e-3, atol=1e-6)


@kernels
@pytest.mark.parametrize("columns", [64, 37])
def test_shifted_logits(columns: int, device: str) -> None:
    """logits[:, :-1] against labels[:, 1:], with a gradient for every row: all tensors are strided."""
    logits, labels = make(12, columns, device)
    logits, labels = logits.detach().view(3, 4, columns).requires_grad_(), labels.view(3, 4)
    loss = ridgeline.cross_entropy(logits[:, :-1], labels[:, 1:], reduction="none", impl=IMPL)
    expected = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    torch.testing.assert_close(loss, expected)
    upstream = torch.arange(9.0, device=device).view(3, 3).mT
    torch.testing.assert_close(grad(loss, logits, upstream, keep=True), grad(expected, logits, upstream))
    mean = ridgeline.cross_entropy(logits[:, :-1], labels[:, 1:], impl=IMPL)
    torch.testing.assert_close(grad(mean, logits), grad(F.cross_entropy(logits[:, :-1].mT, labels[:, 1:]), logits))


@kernels
@pytest.mark.parametrize("impl", ["triton", "torch", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logit_scale(reduction: str, softcap: float | None, dtype: torch.dtype, impl: str, device: str) -> None:
    """The scale comes first, then the softcap, as for Cohere's and Gemma 2's logits; gradients are those of both."""
    logits, target = make(9, 77, device, dtype)
    target[::4] = -100
    with torch.no_grad():
        logits[1, 3], target[1] = float("-inf"), 5
    options = {"label_smoothing": 0.1 if softcap else 0.0, "reduction": reduction}
    loss = ridgeline.cross_entropy(
        logits, target, logit_scale=0.375, softcap=softcap, dtype=torch.float32, impl=impl, **options
    )
    wide = logits.detach().double().requires_grad_()
    x = wide * 0.375
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    expected = F.cross_entropy(x, target, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(loss.shape, device=device)
    exact = grad(expected, wide, upstream.double())
    rtol = 1e-4 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(grad(loss, logits, upstream).double(), exact, rtol=rtol, atol=1e-6)


@kernels
def test_inputs_stay(device: str) -> None:
    logits, target = make(9, 77, device)
    before = logits.detach().clone(), target.clone()
    (ridgeline.cross_entropy(logits, target, softcap=5.0, label_smoothing=0.1, impl=IMPL) * 3).backward()
    assert torch.equal(logits.detach(), before[0])
    assert torch.equal(target, before[1])


@kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [48, 35])
def test_nan_and_infinity_travel_as_in_torch(columns: int, smoothing: float, device: str) -> None:
    logits, target = make(8, columns, device)
    with torch.no_grad():
        logits[0, 3] = float("nan")
        logits[1, 4] = float("inf")
        logits[2] = float("-inf")
        logits[3, ::2] = float("-inf")
        logits[4, 1:] = float("-inf")
        logits[5, target[5]] = float("-inf")
        logits[6] *= 1e4
        logits[7] = torch.finfo(torch.float32).max / 4
        target[3], target[4] = 1, 0
    options = {"label_smoothing": smoothing, "reduction": "none"}
    loss, expected = (
        ridgeline.cross_entropy(logits, target, **options, impl=IMPL),
        F.cross_entropy(logits, target, **options),
    )
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(grad(loss.sum(), logits), grad(expected.sum(), logits), equal_nan=True)


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows(reduction: str, device: str) -> None:
    """Ignored rows count for nothing, whatever their logits; if all are ignored the mean is NaN and gradients are 0."""
    logits, target = make(6, 50, device)
    target[::2] = -100
    with torch.no_grad():
        logits[0] = float("nan")
    loss = ridgeline.cross_entropy(logits, target, reduction=reduction, impl=IMPL)
    kept = F.cross_entropy(logits[1::2], target[1::2], reduction=reduction)
    torch.testing.assert_close(loss[1::2] if reduction == "none" else loss, kept)
    assert reduction != "none" or not loss[::2].any()
    dlogits = grad(loss.sum(), logits)
    assert not dlogits[::2].any()
    torch.testing.assert_close(dlogits, grad(kept.sum(), logits))
    nothing = ridgeline.cross_entropy(logits, torch.full_like(target, -100), reduction=reduction, impl=IMPL)
    torch.testing.assert_close(
        nothing, F.cross_entropy(logits, torch.full_like(target, -100), reduction=reduction), equal_nan=True
    )
    assert not grad(nothing.sum(), logits).any()


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [17000, 70000])
def test_many_losses_add_up(rows: int, reduction: str, device: str) -> None:
    """Beyond 16384 rows the programs that count have several rows each; beyond 65536 so do those that add, in two
    stages.

    The interpreter takes 25 ms a row for the losses, so they are given here."""
    given = torch.rand(rows, device=device)
    logits, target = make(rows, 1, device)
    target[::3] = -100
    loss, saved, none = torch.empty((), device=device), torch.empty(64, device=device), torch.empty(0, device=device)
    # need, ignore_index, label_smoothing, z_loss, softcap, logit_scale
    options = 0, -100, 0.0, 0.0, 0.0, 1.0, reduction
    _rows.launch_fwd(
        lambda losses, *_: losses.copy_(given), False, loss, none, saved, logits.detach(), target, *options
    )
    torch.testing.assert_close(loss, given.sum() / (target != -100).sum() if reduction == "mean" else given.sum())


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [17000, 70000])
def test_many_rows(rows: int, reduction: str, device: str) -> None:
    logits, target = make(rows, 8, device)
    target[::3] = -100
    loss, expected = (
        f(logits, target, reduction=reduction) for f in (partial(ridgeline.cross_entropy, impl=IMPL), F.cross_entropy)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    of_a_row = rows if reduction == "mean" else 1
    torch.testing.assert_close(grad(loss, logits) * of_a_row, grad(expected, logits) * of_a_row)


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_target_that_is_no_class(reduction: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel an invalid target makes its row NaN, and the host does not look.

    Tensors of the interpreter are on a CPU, where it would raise."""
    monkeypatch.setattr(_arguments, "readable", lambda target: False)
    logits, target = make(5, 40, device)
    good = grad(F.cross_entropy(logits, target, reduction=reduction).sum(), logits)
    target[1], target[3] = 40, -(2**40)
    loss = ridgeline.cross_entropy(logits, target, reduction=reduction, impl=IMPL)
    assert loss.isnan().tolist() == ([False, True, False, True, False] if reduction == "none" else True)
    for factor in (1, 2):
        dlogits = grad(loss.sum() * factor, logits, keep=True)
        assert dlogits[1::2].isnan().all()
        torch.testing.assert_close(dlogits[::2], good[::2] * factor)


@kernels
def test_autocast(device: str) -> None:
    logits, target = make(4, 30, device, torch.float16)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss, expected = ridgeline.cross_entropy(logits, target, impl=IMPL), F.cross_entropy(logits, target)
        assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float(), target)
    )  # on a GPU torch's own rounds rows to half precision
    assert grad(loss, logits).dtype == torch.float16


x, y = torch.ones(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
BAD = {
    "shapes": (lambda: ridgeline.cross_entropy(x, y[0]), ["(2, 3, 5)", "(3,)"]),
    "classes in dimension 1": (lambda: ridgeline.cross_entropy(x.mT, y), ["(2, 5, 3)", "(2, 3)"]),
    "no classes": (lambda: ridgeline.cross_entropy(x[..., :0], y), ["(2, 3, 0)"]),
    "a target in int32": (lambda: ridgeline.cross_entropy(x, y.int()), ["int64", "int32"]),
    "probabilities": (lambda: ridgeline.cross_entropy(x, x), ["int64", "float32"]),
    "integer logits": (lambda: ridgeline.cross_entropy(y, y), ["int64", "float32"]),
    "no tensor": (lambda: ridgeline.cross_entropy(x, 3), ["int", "tensor"]),
    "two devices": (lambda: ridgeline.cross_entropy(x, y.to("meta")), ["cpu", "meta"]),
    "another reduction": (lambda: ridgeline.cross_entropy(x, y, reduction="max"), ["max", "mean"]),
    "a part of a class to ignore": (
        lambda: ridgeline.cross_entropy(x, y, ignore_index=1.5),
        ["ignore_index", "1.5", "int"],
    ),
    "no class to ignore": (lambda: ridgeline.cross_entropy(x, y, ignore_index=None), ["ignore_index", "None", "int"]),
    "smooth in words": (
        lambda: ridgeline.cross_entropy(x, y, label_smoothing="a"),
        ["label_smoothing", "'a'", "number"],
    ),
    "no z-loss": (lambda: ridgeline.cross_entropy(x, y, z_loss=None), ["z_loss", "None", "number"]),
    "a cap in words": (lambda: ridgeline.cross_entropy(x, y, softcap="5"), ["softcap", "'5'", "number"]),
    "too smooth": (lambda: ridgeline.cross_entropy(x, y, label_smoothing=1.5), ["1.5", "between 0 and 1"]),
    "a negative z-loss": (lambda: ridgeline.cross_entropy(x, y, z_loss=-1.0), ["-1.0", "at least 0"]),
    "a cap of 0": (lambda: ridgeline.cross_entropy(x, y, softcap=0), ["0", "None"]),
    "a scale in words": (lambda: ridgeline.cross_entropy(x, y, logit_scale="2"), ["logit_scale", "'2'", "number"]),
    "no scale": (lambda: ridgeline.cross_entropy(x, y, logit_scale=None), ["logit_scale", "None", "number"]),
    "a scale of 0": (lambda: ridgeline.cross_entropy(x, y, logit_scale=0), ["logit_scale", "0", "above 0"]),
    "an infinite scale": (
        lambda: ridgeline.cross_entropy(x, y, logit_scale=float("inf")),
        ["logit_scale", "inf", "finite"],
    ),
    "a class too many": (lambda: ridgeline.cross_entropy(x, y + 5), ["0 to 4", "-100"]),
    "a negative class": (lambda: ridgeline.cross_entropy(x, y - 1), ["0 to 4", "-100"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, named = BAD[name]
    with pytest.raises(RidgelineError) as error:
        call()
    said = str(error.value)
    assert said.startswith("cross_entropy: ")
    assert not [word for word in named if word not in said], said


def test_an_ignored_target_may_be_no_class() -> None:
    assert ridgeline.cross_entropy(x, y - 1, ignore_index=-1, reduction="sum") == 0


def test_a_target_that_is_no_class_is_named() -> None:
    bad = torch.tensor([0, 7, -100])
    with pytest.raises(RidgelineError, match="targets must be 0 to 4 or ignore_index -100, got 7"):
        ridgeline.cross_entropy(torch.ones(3, 5), bad)
    with pytest.raises(
        RidgelineError, match="linear_cross_entropy: targets must be 0 to 4 or ignore_index -100, got 7"
    ):
        ridgeline.linear_cross_entropy(torch.ones(3, 2), torch.ones(5, 2), bad)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["0", "1"])
def test_values_on_a_gpu_are_read_where_asked_for(check: str) -> None:
    code = (
        "import torch, ridgeline\nx, y = torch.ones(2, 5, device='cuda'), torch.full((2,), 5, device='cuda')\n"
        "try: print(ridgeline.cross_entropy(x, y).item())\nexcept ridgeline.op.RidgelineError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RIDGELINE_CHECK": check},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("got 5" in done.stdout) if check == "1" else done.stdout.strip() == "nan"


@pytest.mark.gpu
def test_more_than_two_to_the_31() -> None:
    rows, columns = 32770, 65541
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(columns, (rows,), device="cuda")
    dlogits = grad(ridgeline.cross_entropy(logits, target, reduction="sum", impl=IMPL), logits)
    loss = ridgeline.cross_entropy(logits.detach(), target, reduction="none", impl=IMPL)
    for piece in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
        few = logits.detach()[piece].float().requires_grad_()
        expected = F.cross_entropy(few, target[piece], reduction="none")
        torch.testing.assert_close(loss[piece].float(), expected, rtol=1e-2, atol=0)
        torch.testing.assert_close(dlogits[piece].float(), grad(expected.sum(), few), rtol=1e-2, atol=1e-6)
