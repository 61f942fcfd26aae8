"""The adapters of `examples/cs336_a2`, in the setups and within the tolerances of the assignment's tests (26.1.1)."""

import importlib.util
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ridgeline.parallel import groups


def adapters() -> Any:
    path = Path(__file__).resolve().parents[1] / "examples/cs336_a2/adapters.py"
    spec = importlib.util.spec_from_file_location("adapters", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Frozen(nn.Module):
    """Three layers, the second with a frozen bias, and a frozen parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 10, bias=False), nn.Linear(10, 50), nn.Linear(50, 5, bias=False)
        self.b.bias.requires_grad_(False)
        self.still = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Tied(nn.Module):
    """Five layers; the second and the fourth have one weight."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(10, 10), (10, 50), (50, 10), (10, 50), (50, 5)]
        self.layers = nn.ModuleList([nn.Linear(*w, bias=False) for w in widths])
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (self.weight * y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


class Words(nn.Module):
    """vocabulary 100, width 64, hidden 128."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm1, self.linear1 = nn.Embedding(100, 64), Rms(64), nn.Linear(64, 128, bias=False)
        self.norm2, self.linear2, self.head = Rms(128), nn.Linear(128, 64, bias=False), nn.Linear(64, 100, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear1(self.norm1(self.embedding(x))))
        return self.head(self.linear2(self.norm2(x)))


def data_parallel(kind: type[nn.Module], bucket: float | None) -> int:
    page, here, world = adapters(), groups.rank(), groups.size()
    torch.manual_seed(here)
    one = kind()
    wrapped = page.get_ddp(deepcopy(one)) if bucket is None else page.get_ddp_bucketed(deepcopy(one), bucket)
    for (name, p), q in zip(one.named_parameters(), wrapped.module.parameters(), strict=True):
        assert torch.allclose(p, q) == (here == 0 or name == "still"), name
    for t in wrapped.module.state_dict().values():
        everyone = [torch.empty_like(t) for _ in range(world)]
        dist.all_gather(everyone, t)
        assert all(torch.equal(t, other) for other in everyone)
    one.load_state_dict(wrapped.module.state_dict())
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 10, generator=dice), torch.randn(20, 5, generator=dice)
    plain, sharded = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, wrapped))
    for _ in range(5):
        plain.zero_grad()
        sharded.zero_grad()
        nn.functional.mse_loss(one(x), y).backward()
        plain.step()
        own = [t.chunk(world)[here] for t in (x, y)]
        nn.functional.mse_loss(wrapped(own[0]), own[1]).backward()
        page.ddp_on_after_backward(wrapped, sharded)
        sharded.step()
        for p, q in zip(one.parameters(), wrapped.module.parameters(), strict=True):
            assert torch.allclose(p, q)
        order = torch.randperm(20, generator=dice)
        x, y = x[order], y[order]
    return len(wrapped.buckets)


@pytest.mark.parametrize("kind", [Frozen, Tied])
def test_data_parallel(kind: type[nn.Module]) -> None:
    groups.spawn(data_parallel, 2, kind, None)


def test_buckets_of_the_edition_of_2025() -> None:
    assert [groups.spawn(data_parallel, 2, Frozen, mb)[0] for mb in (0.0016, 0.0001, 0.01)] == [2, 3, 1]


def sharded_optimizer(kind: type[nn.Module]) -> None:
    torch.manual_seed(42)
    one = kind()
    other = deepcopy(one)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    plain = torch.optim.AdamW(one.parameters(), **options)
    sharded = adapters().get_sharded_optimizer(other.parameters(), torch.optim.AdamW, **options)
    for _ in range(10):
        x, y = torch.rand(32, 10), torch.rand(32, 5)
        for m, optimizer in ((one, plain), (other, sharded)):
            optimizer.zero_grad()
            (y - m(x)).square().sum().backward()
            optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", [Frozen, Tied])
def test_sharded_optimizer(kind: type[nn.Module]) -> None:
    groups.spawn(sharded_optimizer, 2, kind)


def cast(module: nn.Module, dtype: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
    """Runs a module in one process with its Linear and Embedding weights in a dtype."""
    if dtype is None:
        return module(x)
    given = {f"{name}.weight": m.weight.to(dtype) for name, m in module.named_modules()
             if isinstance(m, nn.Linear | nn.Embedding)}  # fmt: skip
    return torch.func.functional_call(module, given, (x,))


def fully_sharded(dtype: torch.dtype | None) -> None:
    page, here, world = adapters(), groups.rank(), groups.size()
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(42)
        one = Words()
        wrapped = page.get_fsdp(deepcopy(one), compute_dtype=dtype)
        ddp, engine = page.get_ddp(deepcopy(one)), deepcopy(one)
        mesh = groups.mesh(shard=world)
        for m in (*engine.children(), engine):
            fully_shard(m, mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (one, wrapped, ddp, engine)]
        torch.manual_seed(123)
        x, y = torch.randint(0, 100, (20, 8)), torch.randint(0, 100, (20,))
        for n in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            own, wanted = x.chunk(world)[here], y.chunk(world)[here]
            nn.functional.cross_entropy(cast(one, dtype, x)[:, -1].float(), y).backward()
            for m in (wrapped, ddp, engine):
                nn.functional.cross_entropy(m(own)[:, -1].float(), wanted).backward()
            page.fsdp_on_after_backward(wrapped, optimizers[1])
            page.ddp_on_after_backward(ddp, optimizers[2])
            for optimizer in optimizers:
                optimizer.step()
            found = page.fsdp_gather_full_params(wrapped)
            for name, p in one.named_parameters():
                if dtype is None:
                    assert torch.equal(found[name], engine.get_parameter(name).full_tensor()), name
                    assert torch.equal(found[name], ddp.module.get_parameter(name)), name
                    ulp = torch.finfo(torch.float32).eps * p.abs().clamp(min=p.abs().max() / 8)
                    assert ((found[name] - p).abs() <= (n + 1) * ulp).all(), name
                else:
                    torch.testing.assert_close(found[name], p.detach(), rtol=1e-4, atol=1e-4)
            order = torch.randperm(20)
            dist.broadcast(order, 0)
            x, y = x[order], y[order]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_fsdp(dtype: torch.dtype | None) -> None:
    groups.spawn(fully_sharded, 2, dtype)


def fsdp_gradients(dtype: torch.dtype | None) -> None:
    page = adapters()
    torch.manual_seed(42)
    wrapped = page.get_fsdp(Words(), compute_dtype=dtype)
    torch.manual_seed(groups.rank())
    wrapped(torch.randint(0, 100, (4, 8))).sum().backward()
    page.fsdp_on_after_backward(wrapped, None)
    modules = dict(wrapped.module.named_modules())
    for name, p in wrapped.module.named_parameters():
        assert p.grad.shape == p.shape, name
        assert p.grad.dtype == p.dtype == torch.float32, name
        if isinstance(modules[name.rpartition(".")[0]], Rms):
            everyone = [torch.empty_like(p) for _ in range(groups.size())]
            dist.all_gather(everyone, p.grad)
            assert torch.equal(*everyone), name


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_fsdp_gradients(dtype: torch.dtype | None) -> None:
    groups.spawn(fsdp_gradients, 2, dtype)


def flash(function: Any, device: str, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(4, 128, 64, device=device) for _ in range(4))
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    o = function.apply(*ours, causal)
    scores = plain[0] @ plain[1].mT / 8
    if causal:
        scores = scores.masked_fill(~torch.ones(128, 128, device=device).tril().bool(), -1e6)
    wanted = scores.softmax(-1) @ plain[2]
    [lse] = [t for t in o.grad_fn.saved_tensors if t.shape == (4, 128)]
    torch.testing.assert_close(o, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-2, atol=1e-2)
    o.backward(do)
    wanted.backward(do)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_in_pytorch(causal: bool) -> None:
    flash(adapters().get_flashattention_autograd_function_pytorch(), "cpu", causal)


@pytest.mark.kernels
def test_flash_in_triton(device: str) -> None:
    for causal in (True, False) if device == "cuda" else (True,):
        flash(adapters().get_flashattention_autograd_function_triton(), device, causal)
