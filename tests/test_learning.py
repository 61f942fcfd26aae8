"""A small Transformer that trains with Ridgeline's ops learns as it does with torch's.

Five runs with torch's ops start from weights moved by half an ulp. The envelope is how far their losses stray from an
unmoved run's, up to each step: the effect of rounding alone. A run with Ridgeline's ops from the unmoved weights must
stay inside twice the envelope. Both sides use torch's attention and matrix products, and every loss is computed in
float32 by the same code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from ridgeline import optim

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    steps: int
    batch: int
    length: int
    width: int
    heads: int
    classes: int
    layers: int = 2
    rate: float = 3e-3


@dataclass(frozen=True)
class Ops:
    """The ops that the two sides train with."""

    rms_norm: Callable[..., torch.Tensor]
    rope: Callable[..., Any]
    silu_mul: Callable[..., torch.Tensor]
    cross_entropy: Callable[..., torch.Tensor]
    adamw: Callable[..., torch.optim.Optimizer]


def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Applies rotary positions in plain PyTorch, pairing the halves of a head; cos, sin: (length, half a head)."""
    pairs = [t.float().chunk(2, -1) for t in (q, k)]
    return [torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(q.dtype) for a, b in pairs]


TORCH = Ops(
    lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
    turned,
    lambda gate, up: F.silu(gate) * up,
    lambda logits, target: F.cross_entropy(logits.flatten(0, -2), target.flatten()),
    torch.optim.AdamW,
)
OURS = Ops(ridgeline.rms_norm, ridgeline.rope, ridgeline.silu_mul, ridgeline.cross_entropy, optim.AdamW)


def weights(size: Size, device: str) -> Weights:
    dice = torch.Generator().manual_seed(0)
    w, shapes = (
        size.width,
        {"embed": (size.classes, size.width), "head": (size.classes, size.width), "norm": (size.width,)},
    )
    for layer in range(size.layers):
        own = {
            "norm1": (w,),
            "qkv": (3 * w, w),
            "out": (w, w),
            "norm2": (w,),
            "gate": (2 * w, w),
            "up": (2 * w, w),
            "down": (w, 2 * w),
        }
        shapes |= {f"{layer}.{name}": shape for name, shape in own.items()}
    made = {
        n: torch.randn(s, generator=dice) * s[-1] ** -0.5 if len(s) > 1 else torch.ones(s) for n, s in shapes.items()
    }
    return {name: t.to(device) for name, t in made.items()}


def moved(given: Weights, dtype: torch.dtype, seed: int) -> Weights:
    """Moves every weight up or down by half an ulp of the dtype that is computed in."""
    dice = torch.Generator().manual_seed(seed)

    def move(t: torch.Tensor) -> torch.Tensor:
        sign = (torch.randint(2, t.shape, generator=dice) * 2 - 1).to(t.device)
        return t + sign * t.abs().log2().floor().exp2() * (torch.finfo(dtype).eps / 2)

    return {name: move(t) for name, t in given.items()}


def text(size: Size, device: str) -> torch.Tensor:
    """Returns random text, (steps, batch, length + 1), in which each character has four possible successors."""
    dice = torch.Generator().manual_seed(1)
    follow = torch.randint(size.classes, (size.classes, 4), generator=dice)
    found = [torch.randint(size.classes, (size.steps, size.batch), generator=dice)]
    for _ in range(size.length):
        found.append(follow[found[-1], torch.randint(4, (size.steps, size.batch), generator=dice)])
    return torch.stack(found, -1).to(device)


def logits(
    ops: Ops, p: Weights, tokens: torch.Tensor, size: Size, turn: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    x = F.embedding(tokens, p["embed"])
    for layer in range(size.layers):
        own = {name.partition(".")[2]: t for name, t in p.items() if name.startswith(f"{layer}.")}
        h = F.linear(ops.rms_norm(x, own["norm1"]), own["qkv"])
        q, k, v = h.unflatten(-1, (3, size.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = ops.rope(q, k, *turn)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), own["out"])
        h = ops.rms_norm(x, own["norm2"])
        x = x + F.linear(ops.silu_mul(F.linear(h, own["gate"]), F.linear(h, own["up"])), own["down"])
    return F.linear(ops.rms_norm(x, p["norm"]), p["head"])


def train(ops: Ops, start: Weights, data: torch.Tensor, size: Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns the losses of a run with float32 weights that computes in `dtype`."""
    master = {name: t.clone().requires_grad_() for name, t in start.items()}
    optimizer = ops.adamw(list(master.values()), lr=size.rate, weight_decay=0.1)
    half = size.width // size.heads // 2
    angle = torch.arange(size.length, device=data.device)[:, None] * 1e4 ** -(
        torch.arange(half, device=data.device) / half
    )
    turn = angle.cos(), angle.sin()
    losses = []
    for tokens in data:
        y = logits(ops, {name: t.to(dtype) for name, t in master.items()}, tokens[:, :-1], size, turn)
        target = tokens[:, 1:].contiguous()
        ops.cross_entropy(y, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(F.cross_entropy(y.detach().flatten(0, -2).float(), target.flatten()))
    return torch.stack(losses).double().cpu()


def check(ours: Ops, size: Size, dtype: torch.dtype, device: str) -> float:
    """Raises if our run leaves twice the envelope; returns the largest share of it that the run used."""
    start, data = weights(size, device), text(size, device)
    run = partial(train, data=data, size=size, dtype=dtype)
    base = run(TORCH, start)
    runs = torch.stack([run(TORCH, moved(start, dtype, seed)) for seed in range(5)])
    ulps = 2 * torch.finfo(torch.float32).eps * base  # the float32 loss itself
    envelope = (runs - base).abs().amax(0).cummax(0).values + ulps
    used = (run(ours, start) - base).abs() / (2 * envelope)
    worst = int(used.argmax())
    assert used[worst] <= 1, (
        f"at step {worst} the loss {base[worst]:.6f} is off by {used[worst]:.2f} times twice the envelope"
    )
    return float(used[worst])


@pytest.mark.kernels
def test_a_few_steps(device: str) -> None:
    """Takes seconds in Triton's interpreter."""
    check(OURS, Size(steps=6, batch=2, length=8, width=32, heads=2, classes=19), torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_hundred_steps(dtype: torch.dtype) -> None:
    size = Size(steps=200, batch=16, length=64, width=128, heads=4, classes=64)
    check(OURS, size, dtype, "cuda")


@pytest.mark.gpu
def test_it_learns() -> None:
    """The task can be learnt in 200 steps, else staying with torch would mean little."""
    size = Size(steps=200, batch=16, length=64, width=128, heads=4, classes=64)
    losses = train(OURS, weights(size, "cuda"), text(size, "cuda"), size, torch.bfloat16)
    assert losses[:5].mean() > 4
    assert losses[-5:].mean() < 1.7


@pytest.mark.kernels
@pytest.mark.parametrize("wrong", ["rms_norm", "silu_mul", "cross_entropy"])
def test_notices(wrong: str, device: str) -> None:
    """A gradient that is 1% off in one row leaves the envelope within a few steps, even with torch's own ops."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return torch.cat([dy[:1] * 1.01, dy[1:]])

    def off(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return getattr(TORCH, wrong)(Off.apply(x), *args)

    size = Size(steps=6, batch=2, length=8, width=32, heads=2, classes=19)
    broken = Ops(**{**vars(TORCH), wrong: off})
    with pytest.raises(AssertionError, match="times twice the envelope"):
        check(broken, size, torch.float32, device)
