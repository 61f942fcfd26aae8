"""causal_conv1d: states and their gradients, packed sequences, remainders of pieces, and steps in place."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import get
from ridgeline.ops.recurrent.cuda import short_conv as short_conv_cuda

pytestmark = pytest.mark.kernels

C = 40


def inputs(B: int, T: int, width: int, sequences: int, device: str) -> list[torch.Tensor]:
    """Returns x, weight, bias and a state."""
    dice = torch.Generator(device).manual_seed(T)
    shapes = (B, T, C), (C, width), (C,), (sequences, C, width)
    return [torch.randn(shape, device=device, generator=dice) for shape in shapes]


def everything(args: list[torch.Tensor], impl: str, **given: Any) -> list[torch.Tensor]:
    """Returns y, the final state, and the gradients of x, weight, bias and the first state."""
    *args, state = leaves = [t.detach().clone().requires_grad_() for t in args]
    y, last = ridgeline.causal_conv1d(*args, initial_state=state, return_state=True, impl=impl, **given)
    dice = torch.Generator(y.device).manual_seed(1)
    incoming = [torch.randn(t.shape, device=t.device, generator=dice).to(t.dtype) for t in (y, last)]
    return [y, last, *torch.autograd.grad((y, last), leaves, incoming)]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-3)
        assert error < 5e-7, f"result {n} is off by {error:.2e}"


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("T", "width"), [(1, 4), (2, 4), (3, 2), (7, 3), (8, 4), (9, 4), (17, 2), (19, 4)])
def test_states_and_their_gradients(T: int, width: int, activation: str | None, device: str) -> None:
    args = inputs(2, T, width, 2, device)
    exact = everything([a.double() for a in args], "naive", activation=activation)
    close(everything(args, "triton", activation=activation), exact)
    close(everything([a.double() for a in args], "torch", activation=activation), exact)


@pytest.mark.parametrize("ends", [[0, 5, 5, 7, 16, 16, 24, 41], [0, 0, 8, 8, 8, 9], [0, 1, 2, 3], [0, 40]])
def test_packed_sequences_equal_separate_ones(ends: list[int], device: str) -> None:
    args = inputs(1, ends[-1], 4, len(ends) - 1, device)
    given = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}
    packed = everything(args, "triton", **given)
    close(packed, everything([a.double() for a in args], "naive", **given))
    x, weight, bias, state = args
    for n, (start, end) in enumerate(pairwise(ends)):
        y, last = ridgeline.causal_conv1d(
            x[:, start:end], weight, bias, initial_state=state[n : n + 1], return_state=True, impl="triton"
        )
        assert torch.equal(y, packed[0][:, start:end])
        assert torch.equal(last[0], packed[1][n])


@pytest.mark.parametrize("impl", ["triton", "torch", "naive"])
def test_a_decoders_steps(impl: str, device: str) -> None:
    """One token at a time with the state in place gives what the whole sequence gives."""
    x, weight, bias, state = inputs(3, 6, 4, 3, device)
    y, last = ridgeline.causal_conv1d(x, weight, bias, initial_state=state, return_state=True, impl=impl)
    kept, place = state.clone(), state.data_ptr()
    for t in range(6):
        one, same = ridgeline.causal_conv1d(
            x[:, t : t + 1], weight, bias, initial_state=kept, inplace=True, return_state=True, impl=impl
        )
        assert same is kept
        torch.testing.assert_close(one, y[:, t : t + 1])
    assert torch.equal(kept, last)
    assert state.data_ptr() == place


def test_in_place_with_several_tokens(device: str) -> None:
    x, weight, bias, state = inputs(1, 21, 4, 1, device)
    y, last = ridgeline.causal_conv1d(x, weight, bias, initial_state=state, return_state=True, impl="naive")
    found = ridgeline.causal_conv1d(x, weight, bias, initial_state=state, inplace=True, impl="triton")
    torch.testing.assert_close(found, y)
    assert torch.equal(state, last)


def test_strided_inputs_and_filters(device: str) -> None:
    """Slices of a projection, and filters whose taps are not next to each other."""
    x, weight, bias, state = inputs(2, 11, 4, 2, device)
    wide = torch.cat([x, x, x], 2)[:, :, C : 2 * C]
    other = weight.t().contiguous().t()
    spread = torch.stack([bias, bias], 1)[:, 0]
    found = ridgeline.causal_conv1d(wide, other, spread, initial_state=state, impl="triton")
    assert torch.equal(found, ridgeline.causal_conv1d(x, weight, bias, initial_state=state, impl="triton"))


def halves(args: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [a.to(dtype) for a in args]


def near(found: list[torch.Tensor], expected: list[torch.Tensor], eps: float) -> None:
    """Results in half precision are a few roundings from those of the same numbers in float64."""
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-3)
        assert error < eps, f"result {n} is off by {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype", "activation"),
    [(2, torch.bfloat16, "silu"), (3, torch.float16, None), (4, torch.bfloat16, "silu"), (4, torch.float16, "silu")],
)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 63, 64, 65, 67, 500])
def test_copies_ahead(T: int, width: int, dtype: torch.dtype, activation: str | None, device: str) -> None:
    args = halves(inputs(3, T, width, 3, device), dtype)
    exact = everything([a.double() for a in args], "naive", activation=activation)
    near(everything(args, "cuda", activation=activation), exact, torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[0, 5, 5, 7, 16, 16, 24, 41], [0, 0, 8, 8, 8, 9], [0, 1, 2, 3], [0, 300, 301, 1000]])
def test_copies_ahead_of_packed_sequences(ends: list[int], device: str) -> None:
    args = halves(inputs(1, ends[-1], 4, len(ends) - 1, device), torch.bfloat16)
    given = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}
    exact = everything([a.double() for a in args], "naive", **given)
    near(everything(args, "cuda", **given), exact, 2**-7)


@pytest.mark.gpu
def test_copies_ahead_of_many_rows(device: str) -> None:
    """Pieces of the full length, several a warp, in slices of a projection, with filters in float32; and reruns."""
    x, weight, bias, _ = inputs(40, 700, 4, 40, device)
    wide = torch.cat([x] * 27, 2)[:, :, C : C + 1032].bfloat16().requires_grad_()
    x, taps, bias = wide, *[torch.cat([t] * 26)[:1032].requires_grad_() for t in (weight, bias)]
    dy = torch.randn_like(x)
    found = [
        (y := ridgeline.causal_conv1d(x, taps, bias, impl=impl), *torch.autograd.grad(y, (x, taps, bias), dy))
        for impl in ("cuda", "cuda", "triton")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
    near(list(found[0]), [t.double() for t in found[2]], 2**-8)


def test_what_cuda_refuses() -> None:
    x, weight, bias, _ = halves(inputs(2, 64, 4, 2, "cpu"), torch.float16)
    wide = torch.cat([x, x], 2)
    reason = lambda *args: short_conv_cuda.unfit(*args) or ""  # noqa: E731
    assert not reason(x, weight, None)
    assert not reason(wide[:, :, 8 : C + 8], weight.float(), bias)
    assert "float64" in reason(x, weight.double(), bias)
    assert "float64" in reason(x, weight, bias.double())
    assert "contiguous" in reason(x, weight.t().contiguous().t(), bias)
    assert "multiple of 8" in reason(x[:, :, :36], weight[:36], None)
    assert "begin at multiples" in reason(wide[:, :, 4 : C + 4], weight, None)
    assert "equally far apart" in reason(x[:, :60], weight, None)


def test_reruns_give_the_same_bits(device: str) -> None:
    args = inputs(2, 37, 4, 2, device)
    runs = [everything(args, "triton") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_only_what_is_asked_for(device: str) -> None:
    """A frozen weight and no state: backward gives x's gradient alone."""
    x, weight, bias, _ = inputs(1, 9, 4, 1, device)
    x.requires_grad_()
    (found,) = torch.autograd.grad(ridgeline.causal_conv1d(x, weight, bias, impl="triton").sum(), x)
    (own,) = torch.autograd.grad(ridgeline.causal_conv1d(x, weight, bias, impl="naive").sum(), x)
    torch.testing.assert_close(found, own)


def test_a_compiled_step(device: str) -> None:
    x, weight, bias, state = inputs(2, 1, 4, 2, device)
    other = state.clone()

    def step(x: torch.Tensor, state: torch.Tensor) -> Any:
        return ridgeline.causal_conv1d(x, weight, bias, initial_state=state, inplace=True, impl="triton")

    made = torch.compile(step, fullgraph=True, backend="aot_eager")(x, state)
    assert torch.equal(made, step(x, other))
    assert torch.equal(state, other)


def test_opcheck_of_the_step(device: str) -> None:
    x, weight, bias, state = inputs(2, 1, 4, 2, device)
    get("causal_conv1d")
    torch.library.opcheck(torch.ops.ridgeline.causal_conv1d_step.default, (x, weight, bias, state, "silu", "triton"))
