"""torch.compile of a model of our ops, with checkpointing, autocast and gradient accumulation: one graph, once."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ridgeline
from ridgeline import nn

pytestmark = pytest.mark.kernels


class Layer(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.post = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.gate, self.up = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k = ridgeline.rope(q, k, cos, sin)
        o = ridgeline.attention(q, k, v, causal=True).transpose(1, 2).reshape(batch, tokens, width)
        y, x = ridgeline.add_rms_norm(self.out(o).to(x.dtype), x, self.post.weight)
        return x + self.down(ridgeline.silu_mul(self.gate(y), self.up(y)))


class Model(torch.nn.Module):
    def __init__(self, width: int = 32, classes: int = 40):
        super().__init__()
        self.embed = torch.nn.Embedding(classes, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(1))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        return ridgeline.linear_cross_entropy(self.norm(x), self.embed.weight, target)


def test_one_graph_and_no_recompilation(device: str) -> None:
    torch.manual_seed(0)
    plain, compiled = Model().to(device), Model().to(device)
    compiled.load_state_dict(plain.state_dict())
    angle = torch.arange(8)[:, None] / 10 ** torch.linspace(0, 3, 8)
    cos, sin = (f(angle).to(device) for f in (torch.cos, torch.sin))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(compiled, fullgraph=True, backend=counter)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, compiled)]
    half = torch.float16 if device == "cpu" else torch.bfloat16
    for step in range(3):
        if step == 2:
            torch._dynamo.config.error_on_recompile = True
        try:
            losses = []
            for model, optimizer in zip((plain, fast), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                for micro in range(2):
                    dice = torch.Generator().manual_seed(10 * step + micro)
                    tokens, target = torch.randint(40, (2, 2, 8), generator=dice).to(device)
                    with torch.autocast(torch.device(device).type, dtype=half):
                        loss = model(tokens, target, cos, sin)
                    (loss / 2).backward()
                losses.append(loss.detach())
                optimizer.step()
        finally:
            torch._dynamo.config.error_on_recompile = False
        torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)
    assert counter.frame_count == 1
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-3)
