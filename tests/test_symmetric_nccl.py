"""Symmetric memory of real GPUs: sums are bitwise those in the order of ranks, also in graphs; products are equal."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ridgeline.lab.measurement import parallel_ranks
from ridgeline.lm.sizes import SIZES
from ridgeline.parallel import collectives, groups, symmetric, tensor

GPUS = torch.cuda.device_count()
WORLDS = sorted({2, min(GPUS, 8)} - {0, 1})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
several = pytest.mark.skipif(GPUS < 2, reason="two GPUs are needed, and there are fewer")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """New processes: torch numbers the exchanges of symmetric memory in each, and they must agree."""
    groups.close()
    yield
    groups.close()


def given(n: int, rank: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype).cuda()


def in_order(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    total, *rest = [given(n, r, dtype, seed).float() for r in range(groups.size())]
    for term in rest:
        total = total + term
    return total.to(dtype)


def sums(sizes: list[int], reruns: int) -> list[str]:
    """Returns what is wrong: calls of changing sizes, then reruns of each beside a product that keeps the GPU busy."""
    wrong, here = [], groups.rank()
    noise = torch.randn(2048, 2048, device="cuda")
    for seed, n in enumerate(sizes):
        for dtype in DTYPES:
            x, wanted = given(n, here, dtype, seed), in_order(n, dtype, seed)
            for shots in (1, 2):
                if not torch.equal(symmetric.all_reduce(x, shots=shots), wanted):
                    wrong.append(f"{n} of {dtype}, {shots} shots")
                for _ in range(reruns):
                    if here % 2:
                        noise @ noise  # ranks come at different times
                    if not torch.equal(symmetric.all_reduce(x, shots=shots), wanted):
                        wrong.append(f"{n} of {dtype}, {shots} shots, a rerun")
                        break
    return wrong


ODD = [1, 7, 4096, 100_003, 1 << 20]


@several
@pytest.mark.parametrize("world", WORLDS)
def test_sums_in_the_order_of_ranks(world: int) -> None:
    large = symmetric.HALF // 4 + 5  # of float32 it takes two launches
    assert groups.spawn(sums, world, [*ODD, large], 0, backend="nccl", timeout=120) == [[]] * world


@several
@pytest.mark.parametrize("world", WORLDS)
def test_reruns_have_the_same_bits(world: int) -> None:
    assert groups.spawn(sums, world, [9_999], 100, backend="nccl", timeout=120) == [[]] * world


def two_on_one_gpu() -> list[str]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    refused = symmetric.refuses(torch.device("cuda", 0))
    return [refused] if refused else sums([1, 4096, 100_003], 0)


def test_two_processes_on_one_gpu() -> None:
    found = groups.spawn(two_on_one_gpu, 2, backend="gloo", timeout=120)
    if found[0] and found[0][0].startswith("torch makes no symmetric memory"):
        pytest.skip(found[0][0])
    assert found == [[]] * 2


def captured() -> list[str]:
    """Replays of graphs of an odd number of calls, and calls between them."""
    wrong, here, n = [], groups.rank(), 5001
    x = given(n, here, torch.float32, 0)
    for shots in (1, 2):
        symmetric.all_reduce(x, shots=shots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ys = [symmetric.all_reduce(x * k, shots=shots) for k in (1, 2, 4)]
        for seed in range(10):
            x.copy_(given(n, here, torch.float32, seed))
            graph.replay()
            between = symmetric.all_reduce(x, shots=3 - shots)
            wanted = in_order(n, torch.float32, seed)
            if not all(torch.equal(y, wanted * k) for y, k in zip((*ys, between), (1, 2, 4, 1), strict=True)):
                wrong.append(f"{shots} shots, replay {seed}")
    return wrong


@several
@pytest.mark.parametrize("world", WORLDS)
def test_graphs_repeat_it(world: int) -> None:
    assert groups.spawn(captured, world, backend="nccl", timeout=120) == [[]] * world


def products(dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """Returns the errors of results and gradients over symmetric memory and by torch.distributed, against float64."""
    world, here = groups.size(), groups.rank()
    dice = torch.Generator().manual_seed(1)
    shapes = ((2, 128 * world, 64), (96, 64), (48, 96), (2, 128 * world, 48))
    whole = [torch.randn(s, generator=dice).to(dtype).cuda() for s in shapes]
    parts = [whole[0].chunk(world, 1)[here], whole[1] + here, whole[2] - here, whole[3].chunk(world, 1)[here]]
    found = []
    for over in ("engine", "symmetric", "exact"):
        x, w, u = [(t.double() if over == "exact" else t).clone().requires_grad_() for t in parts[:3]]
        way = "engine" if over == "exact" else over
        for _ in range(2):  # the second overwrites the rooms of the first
            x.grad = w.grad = u.grad = None
            y = tensor.linear_reduce_scatter(tensor.all_gather_linear(x, w, over=way), u, over=way)
            y.backward(parts[3].to(y.dtype))
        found.append([y.detach(), *[t.grad for t in (x, w, u)]])
    errors = []
    for name, one, two, exact in zip(("y", "dx", "dw", "du"), *found, strict=True):
        assert one is not None
        assert two is not None
        assert exact is not None
        errors.append((name, *[float((t.double() - exact).norm() / exact.norm()) for t in (two, one)]))
    return errors


@several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_products_are_as_exact_as_the_decomposed(world: int, dtype: torch.dtype) -> None:
    for errors in groups.spawn(products, world, dtype, backend="nccl", timeout=120):
        for name, ours, decomposed in errors:
            assert ours <= 1.05 * decomposed + 2e-7, (name, ours, decomposed)


def rungs() -> list[str]:
    names = tuple(c.name for c in collectives.LADDER if c.kernel)
    work = parallel_ranks.Work(("collectives",), (4096, 1 << 20), SIZES["tiny"], 16, 1, "torch", 0.05, only=names)
    rows = parallel_ranks.rows(work, torch.device("cuda", torch.cuda.current_device()))
    return [f"{r['rung']}: {r['wrong'] or r.get('refused')}" for r in rows if r["wrong"] or "seconds" not in r]


@several
def test_the_rungs_run_in_the_benchmark() -> None:
    assert groups.spawn(rungs, 2, backend="nccl", timeout=120) == [[]] * 2
