"""Two ranks on two GPUs over NCCL, or on one GPU over gloo: our kernels split over them equal one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import ridgeline
import test_parallel_experts as of_experts
import test_parallel_fp8_gather as of_fp8_gather
import test_parallel_loss as of_loss
import test_parallel_tensor as of_tensor
import test_ring_attention as of_rings
from ridgeline.lm.model import Transformer
from ridgeline.parallel import apply, groups
from ridgeline.parallel.optimizer import FlatShardedOptimizer, ShardedOptimizer
from test_parallel_ladders import SIZE, batch

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["nccl", "gloo"], scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """NCCL takes a GPU a rank; gloo's two ranks share the first."""
    gpus = torch.cuda.device_count()
    if request.param == "nccl" and gpus < 2:
        pytest.skip(f"NCCL needs two GPUs, and there are {gpus}")
    return str(request.param)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def rings(given: list[torch.Tensor], options: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Returns the errors of each way's results, and those of one device, against float64."""
    exact = of_rings.alone([t.cuda() for t in given], torch.float64, **options, impl="naive")
    half = [t.cuda().bfloat16() for t in given]
    one = [apart(t, e) for t, e in zip(of_rings.alone(half, torch.bfloat16, **options), exact, strict=True)]
    found = {}
    for way in of_rings.WAYS:
        made = of_rings.split(groups.rank(), way, "zigzag", half, options)
        found[way] = [(apart(t, e), o) for t, e, o in zip(made, exact, one, strict=True)]
    return found


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (300, None)}], ids=str)
def test_rings_of_kernels(options: dict[str, Any], backend: str) -> None:
    given = of_rings.data(1024, 64, heads=8, shared=2)
    for found in groups.spawn(rings, 2, given, options, backend=backend, timeout=120):
        for way, errors in found.items():
            for error, one in errors:
                assert error <= 1.05 * one, (way, error, one)


def losses(given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    own = [t.cuda() for t in given]
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    found = of_loss.split_logits(groups.rank(), own, options), of_loss.split_linear(groups.rank(), own, options, False)
    return [[t.cpu() for t in one] for one in found]


def test_losses_over_a_split_vocabulary(backend: str) -> None:
    given = of_loss.data(96, 500, 64, torch.float32)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}
    target, logits, x, weight, bias = [t.double() if t.is_floating_point() else t for t in given]
    first = ridgeline.cross_entropy(logits, target, **options, impl="naive")
    second = ridgeline.linear_cross_entropy(x, weight, target, bias, **options, impl="naive")
    for one, two in groups.spawn(losses, 2, given, backend=backend, timeout=120):
        assert apart(one[0], first) < 1e-6
        assert apart(two[0], second) < 1e-6
        assert all(bool(t.isfinite().all()) for t in (*one, *two))


def of_split_experts(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.cpu() for t in of_experts.spread(groups.rank(), [t.cuda() for t in given], [11, 5], True, {})]


def test_experts_on_two_gpus(backend: str) -> None:
    given = of_experts.data(16, torch.float32)
    wanted = of_experts.alone([t.double() if t.is_floating_point() else t for t in given], True, {})
    found = of_experts.together(groups.spawn(of_split_experts, 2, given, backend=backend, timeout=120))
    for a, b in zip(found, wanted, strict=True):
        assert apart(a, b) < 1e-5


def split_lm(options: dict[str, Any]) -> float:
    """Returns how far a tensor-parallel step is from one process', the largest of the loss and all gradients."""
    torch.manual_seed(0)
    net = Transformer(of_tensor.SIZE, "ridgeline").cuda()
    inputs = [torch.randint(24, (2, 8)).cuda() for _ in range(2)]
    loss, grads = of_tensor.trained(copy.deepcopy(net), inputs)
    found = of_tensor.split_model(groups.rank(), net, inputs, options)
    return max(apart(found[0], loss), *[apart(found[1][n], g) for n, g in grads.items()])


@pytest.mark.parametrize("options", [{}, {"sequence": True}, {"sequence": True, "vocab": True}], ids=str)
def test_tensor_parallel_model(options: dict[str, Any], backend: str) -> None:
    assert max(groups.spawn(split_lm, 2, options, backend=backend, timeout=120)) < 1e-4


class Gathers:
    """FSDP2's gather by `all_gather`: torch 2.11's gloo ends the process at the one-tensor forms on a GPU."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **_: Any) -> None:
        dist.all_gather(list(output_tensor.chunk(dist.get_world_size(group))), input_tensor, group=group)


class Scatters(Gathers):
    """FSDP2's sum of gradients by `all_reduce`, of which this rank keeps its part."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> None:
        whole = input_tensor.clone()
        dist.all_reduce(whole, options["op"], group=group)
        output_tensor.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def sharded() -> float:
    """Returns how far the weights are after a step of our kernels, and of our optimizer, under FSDP2."""
    torch.manual_seed(0)
    size = replace(SIZE, layers=2, width=64, hidden=128, heads=4, key_heads=2, vocabulary=96)
    one = Transformer(size, "ridgeline").cuda()
    net = copy.deepcopy(one)
    apply(net, checkpointing=True)
    for unit in net.modules() if dist.get_backend() == "gloo" else ():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(Gathers())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(Scatters())  # type: ignore[arg-type]
            unit.set_force_sum_reduction_for_comms(True)
    data = [t[:2, :8].cuda() % 96 for t in batch(0)]
    shards = [t[groups.rank() : groups.rank() + 1] for t in data]
    for model, some in ((one, data), (net, shards)):
        optimizer = ridgeline.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(*some).backward()
            ridgeline.clip_grad_norm(list(model.parameters()), 0.5)
            optimizer.step()
    whole = {n: p.full_tensor() for n, p in net.named_parameters()}  # type: ignore[operator]
    return max(apart(whole[n], p.detach()) for n, p in one.named_parameters())


def test_fsdp2_with_our_kernels(backend: str) -> None:
    assert max(groups.spawn(sharded, 2, backend=backend, timeout=120)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("recipe", "sizes"), [("tensor", (24, 51)), ("tensor", (256, 1024)), ("block", (256, 512))], ids=str
)
def test_8_bit_gathers_are_bitwise_one_process(
    recipe: str, sizes: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    if backend == "gloo":
        pytest.skip("gloo has no gather of 8-bit GPU tensors; tests/test_parallel_fp8_gather.py has it on the CPU")
    for more in ({}, {"checkpointing": True}, {"reshard": False}):
        options = {"sizes": sizes} | more
        groups.spawn(of_fp8_gather.trained, 2, recipe, 3, options, dtype, backend=backend, timeout=120)


def sharded_states() -> list[str]:
    """Returns the devices of a gathered state, and of that state loaded again."""
    params = [torch.nn.Parameter(torch.ones(4, 4, device="cuda")) for _ in range(3)]
    found = []
    for kind in (ShardedOptimizer, FlatShardedOptimizer):
        own, again = (kind(params, torch.optim.AdamW) for _ in range(2))
        for p in params:
            p.grad = torch.ones_like(p)
        own.step()
        saved = own.state_dict()
        again.load_state_dict(saved)
        moments = [s["exp_avg"] for s in saved["state"].values()]
        found.append(f"{len(moments)} on {moments[0].device}")
        loaded = again.local.state.values()
        found += [str({s["exp_avg"].device.index for s in loaded} == {torch.cuda.current_device()})]
    return found


def test_states_gather_on_the_host_and_load_on_their_gpu(backend: str) -> None:
    assert groups.spawn(sharded_states, 2, backend=backend, timeout=120) == [["3 on cpu", "True"] * 2] * 2


def products(given: list[torch.Tensor]) -> list[torch.Tensor]:
    x, w, u, do = [t.cuda() for t in given]
    return [t.cpu() for t in of_tensor.overlapped(groups.rank(), x, w, u, [do])]


def test_products_under_transfers(backend: str) -> None:
    given = [torch.randn(s) for s in ((2, 256, 64), (128, 64), (32, 128), (2, 256, 32))]
    x, w, u = [t.double().requires_grad_() for t in given[:3]]
    y = ((x @ w.mT) * (x @ w.mT * 2)) @ u.mT
    y.backward(given[3].double())
    found = groups.spawn(products, 2, given, backend=backend, timeout=120)
    for n, (wanted, dim) in enumerate(((y.detach(), -2), (x.grad, -2), (w.grad, 0), (u.grad, 1))):
        assert wanted is not None
        assert apart(torch.cat([f[n] for f in found], dim), wanted) < 1e-5
