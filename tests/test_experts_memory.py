"""The memory of a training step of moe: counted without a GPU, and gradients that lie where their sources lay."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ridgeline
from ridgeline.lab.measurement.law import Law
from ridgeline.lm.ledger import Ledger, account
from ridgeline.op import get
from ridgeline.ops.experts import _plain

# 8192 tokens in bfloat16: experts, those of a token, H, I; and MiB at the peak, recorded on an H200 (Qwen3 rounded), of
# torch's layer and of ours, when each gradient had memory of its own.
LAYERS = {"Mixtral": ((8, 2, 4096, 14336), 3904, 5632), "Qwen3": ((128, 8, 2048, 768), 2300, 2000)}


def grouped(*given: torch.Tensor) -> torch.Tensor:
    """torch's layer, which the rung `torch_grouped` refuses off a GPU."""
    return _plain.sorted_pairs(_plain.grouped_mm, *given)


def peak(layer: Any, sizes: tuple[int, ...], card: str = "h200", T: int = 8192, keep: bool = False) -> int:
    """Returns the bytes at the peak of a step beyond x, the experts, the weights of tokens and dy."""
    (E, k, H, I), dtype = sizes, torch.bfloat16
    with account(card) as ledger:
        x, gate_up, down = (torch.empty(s, dtype=dtype, requires_grad=True) for s in ((T, H), (E, 2 * I, H), (E, H, I)))
        weights, indices = torch.empty(T, k, requires_grad=True), torch.empty(T, k, dtype=torch.int64)
        dy, since = torch.empty(T, H, dtype=dtype), ledger.tick()
        y = layer(x, weights, indices, gate_up, down)
        y.backward(dy, retain_graph=keep)
        found = most(ledger, since)
        del y, dy
    return found


def most(ledger: Ledger, since: int) -> int:
    _, curve = ledger.curve(since)
    before = sum(r.nbytes for r in ledger.records if r.born < since)
    return max(map(sum, zip(*curve.values(), strict=True))) - before


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_takes_no_more_than_torchs(name: str) -> None:
    sizes, theirs, _ = LAYERS[name]
    counted = peak(grouped, sizes)
    assert abs(counted / 2**20 / theirs - 1) < 0.05  # the count is right
    assert peak(ridgeline.moe, sizes) <= counted
    assert peak(ridgeline.moe, sizes, "a100") <= counted


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_takes_z_and_the_gradients(name: str) -> None:
    """Beside these: y, dx, the rows of pairs where tokens are sorted, and indices of pairs."""
    (E, k, H, I), T = LAYERS[name][0], 8192
    least = 2 * (E * 3 * I * H + T * k * 2 * I + 2 * T * H)
    indices = 1 << 20 if name == "Mixtral" else 2 << 20
    assert peak(ridgeline.moe, LAYERS[name][0]) <= least + 2 * T * k * H + indices
    assert peak(ridgeline.moe, LAYERS[name][0], "a100") <= least + indices


def test_a_kept_graph_costs_dz_only() -> None:
    sizes, _, before = LAYERS["Mixtral"]
    z = 2 * 8192 * 2 * 2 * 14336
    assert peak(ridgeline.moe, sizes, keep=True) == peak(ridgeline.moe, sizes) + z
    assert peak(ridgeline.moe, sizes, keep=True) < before * 2**20


def layer(dtype: torch.dtype, device: str, T: int = 13, E: int = 3, k: int = 2, H: int = 24, I: int = 17) -> Any:
    sizes = (T, H), (T, k), (E, 2 * I, H), (E, H, I)
    x, weights, gate_up, down = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes)
    indices = torch.randint(0, E, (T, k), device=device)
    return (x, weights, indices, gate_up, down), (x, weights, gate_up, down), torch.randn(T, H, device=device).to(dtype)


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [20, 40])  # 20: dh and h fit into the memory of gate_up's gradient
def test_backward_twice(dtype: torch.dtype, tokens: int, device: str) -> None:
    given, wanted, dy = layer(dtype, device, tokens)
    y = ridgeline.moe(*given, impl="triton")
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    again = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    last = torch.autograd.grad(y, wanted, dy)
    same(again, first)
    same(last, first)
    law = Law(get("moe"), list(given), {})
    verdict = law.judge(*law.run(get("moe").implementations["triton"]))
    assert verdict.ok, verdict.reason()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, wanted, dy)


@pytest.mark.kernels
@pytest.mark.parametrize("some", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_some_gradients(some: tuple[int, ...], device: str) -> None:
    given, wanted, dy = layer(torch.float32, device)
    every = torch.autograd.grad(ridgeline.moe(*given, impl="triton"), wanted, dy)
    for n, t in enumerate(wanted):
        t.requires_grad_(n in some)
    found = torch.autograd.grad(ridgeline.moe(*given, impl="triton"), [wanted[n] for n in some], dy)
    same(found, [every[n] for n in some])


@pytest.mark.kernels
def test_what_hooks_keep_is_left_alone(device: str) -> None:
    given, wanted, dy = layer(torch.float32, device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append((t, t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = ridgeline.moe(*given, impl="triton")
    found = torch.autograd.grad(y, wanted, dy)
    assert kept
    for t, before in kept:
        assert torch.equal(t, before)
    same(found, torch.autograd.grad(ridgeline.moe(*given, impl="triton"), wanted, dy))


@pytest.mark.kernels
def test_checkpoint(device: str) -> None:
    given, wanted, dy = layer(torch.float32, device)
    plain = torch.autograd.grad(ridgeline.moe(*given, impl="triton"), wanted, dy)
    y = checkpoint(lambda: ridgeline.moe(*given, impl="triton"), use_reentrant=False)
    same(torch.autograd.grad(y, wanted, dy, retain_graph=True), plain)
    same(torch.autograd.grad(y, wanted, dy), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_on_this_gpu(name: str) -> None:
    """By the allocator, in the first call, the recorded one and a replay; and as the count says."""
    (E, k, H, I), T, dtype = LAYERS[name][0], 8192, torch.bfloat16
    if torch.cuda.get_device_properties(0).total_memory < 12 << 30:
        pytest.skip("a step and its experts take 10 GB")
    x, gate_up, down = (
        torch.randn(s, device="cuda", dtype=dtype).mul_(0.02).requires_grad_()
        for s in ((T, H), (E, 2 * I, H), (E, H, I))
    )
    weights = torch.rand(T, k, device="cuda", requires_grad=True)
    indices = torch.rand(T, E, device="cuda").topk(k, 1).indices
    counted = peak(ridgeline.moe, LAYERS[name][0], "h200" if torch.cuda.get_device_capability() == (9, 0) else "a100")
    dy = torch.randn_like(x)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = ridgeline.moe(x, weights, indices, gate_up, down)
        torch.autograd.grad(y, (x, weights, gate_up, down), dy)
        found = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        assert abs(found / counted - 1) < 0.02
        del y
