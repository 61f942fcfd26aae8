"""A small model of each kind of recurrent layer trains as its reference does: 200 steps inside the envelope.

Seven runs of the reference in float32, from weights that differ by up to half an ulp, make the envelope: around the
middle of their losses, the largest half-range within NEAR steps. The median of the kernels' losses, over OURS runs from
such weights, lies within twice that, or within what float32 rounds a loss by. One run alone leaves that by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ridgeline

STEPS, RUNS, OURS, NEAR = 200, 7, 3, 10
INTERPRETED = 12  # steps in the interpreter, where 200 take a minute for each kind
VOCABULARY, WIDTH, LENGTH = 13, 16, 7


def gates(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.logsigmoid(x + 2)


# Each takes q, k, v and gates, (B, T, 1, WIDTH), a parameter (1, WIDTH), and the rung.
KINDS: dict[str, Callable[..., Any]] = {
    "linear_attention": lambda q, k, v, g, u, i: ridgeline.linear_attention(q, k, v, scale=0.1, impl=i),
    "gated, per head": lambda q, k, v, g, u, i: ridgeline.gated_linear_attention(q, k, v, gates(g[..., 0]), impl=i),
    "gated, per channel": lambda q, k, v, g, u, i: ridgeline.gated_linear_attention(q, k, v, gates(g), impl=i),
    "rwkv6": lambda q, k, v, g, u, i: ridgeline.rwkv6(q, k, v, gates(g), u, scale=0.1, impl=i),
    "ssd": lambda q, k, v, g, u, i: ridgeline.ssd(v, g[..., 0], -u[:, 0].exp(), k, q, D=u[:, 1], scale=0.1, impl=i),
}


class Model(nn.Module):
    """An embedding, the short convolution, the recurrent layer, the gated norm, and logits; all by one rung."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.impl = kind, "naive"
        self.embedding, self.logits = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.inner = nn.Linear(WIDTH, 5 * WIDTH)
        self.taps, self.bias = nn.Parameter(torch.randn(3 * WIDTH, 4) / 2), nn.Parameter(torch.zeros(3 * WIDTH))
        self.u, self.weight = nn.Parameter(torch.randn(1, WIDTH) / 2), nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        wide, gate, z = self.inner(x).split([3 * WIDTH, WIDTH, WIDTH], -1)
        q, k, v = ridgeline.causal_conv1d(wide, self.taps, self.bias, impl=self.impl).unsqueeze(2).chunk(3, -1)
        o = KINDS[self.kind](q, k, v, gate.unsqueeze(2), self.u, self.impl).squeeze(2)
        y = ridgeline.gated_rms_norm(o, z, self.weight, impl=self.impl)
        return nn.functional.cross_entropy(self.logits(x + y).flatten(0, 1), ids[:, 1:].flatten())


def train(kind: str, batches: torch.Tensor, seed: int = 0, impl: str = "naive", dtype: Any = torch.float32) -> Any:
    """Returns the losses of a run; seeds other than 0 move each weight by up to half an ulp of float32 before."""
    torch.manual_seed(0)
    model, dice = Model(kind).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            moved = (torch.rand(p.shape, generator=dice) - 0.5) * p.abs() * torch.finfo(torch.float32).eps
            p += moved if seed else 0
    model.to(batches.device, dtype).impl = impl
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-2), []
    for ids in batches:
        loss = model(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def hold(kind: str, impl: str, steps: int, device: str) -> torch.Tensor:
    """Trains the reference and a rung, and returns the rung's median losses, which lie inside the envelope."""
    dice = torch.Generator().manual_seed(1)
    after = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=dice)  # each token has two successors
    ids = [torch.randint(VOCABULARY, (steps, 1), generator=dice)]
    for _ in range(LENGTH):
        ids.append(after[ids[-1], torch.randint(2, (steps, 1), generator=dice)])
    batches = torch.stack(ids, -1).to(device)
    runs = torch.stack([train(kind, batches, seed) for seed in range(RUNS)])
    ours = torch.stack([train(kind, batches, seed, impl) for seed in range(OURS)]).median(0).values
    low, high = runs.amin(0), runs.amax(0)
    half = nn.functional.max_pool1d((high - low)[None] / 2, 2 * NEAR + 1, 1, NEAR)[0]
    allowed = 2 * torch.maximum(half, torch.finfo(torch.float32).eps * high)
    apart = (ours - (low + high) / 2).abs() / allowed
    assert apart.max() <= 1, f"step {int(apart.argmax())} is off by {float(apart.max()):.2f} times what is allowed"
    return ours


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_kernels(kind: str, device: str) -> None:
    steps = STEPS if device == "cuda" else INTERPRETED
    losses = hold(kind, "triton", steps, device)
    assert steps == INTERPRETED or losses[-20:].mean() < losses[:20].mean() / 1.3


def test_pytorchs_rungs() -> None:
    """All pairs of tokens at once, a grouped convolution and PyTorch's norm, for the one kind that has such rungs."""
    losses = hold("ssd", "torch", STEPS, "cpu")
    assert losses[-20:].mean() < losses[:20].mean() / 1.3


def test_own_weights_guard_no_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with symbolic sizes, the launcher of `own_pairs` must not compare its chunks with the GPU's programs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from ridgeline import boundary, device
    from ridgeline.ops.recurrent.triton import channel_chunks, chunks

    card = device.known("sm_90")
    monkeypatch.setattr(device, "of", lambda tensor: card)
    env = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=env)
    q = mode.from_tensor(torch.zeros(3, 37, 2, 16), symbolic_context=context)
    facts: dict = dict.fromkeys(chunks.Call._fields)
    call = chunks.Call(**facts | {"q": q, "k": q, "v": q, "g": q})
    with mode:
        plan = channel_chunks.prepare(call)
        before = len(env.guards)
        boundary._trace.on = True
        try:
            made = channel_chunks.own_weights(plan)
        finally:
            boundary._trace.on = False
    assert made.q.dim() == 4
    assert [str(g.expr) for g in env.guards[before:]] == []
