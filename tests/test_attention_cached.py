"""attention_varlen against caches beyond its cases: tables, memory that no key owns, empty sequences, graphs."""

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels
HEADS, SHARED, D, MOST = 4, 2, 32, 5


def call(
    block: int, device: str, dtype: torch.dtype = torch.float32, queries: tuple[int, ...] = (33, 0, 1, 16, 3),
    keys: tuple[int, ...] = (60, 5, 0, 47, 3)
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """A call in blocks; memory that no key owns is NaN, and unused entries of the table are far out of bounds."""
    torch.manual_seed(0)
    sequences = len(keys)
    used = [-(-n // block) for n in keys]
    caches = [torch.full((sum(used) + 2, block, SHARED, D), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    table = torch.full((sequences, max(MOST, *used)), 2**31 - 1, dtype=torch.int32, device=device)
    free = torch.randperm(sum(used) + 2).tolist()
    for b, (count, length) in enumerate(zip(used, keys, strict=True)):
        for n in range(count):
            page = free.pop()
            table[b, n] = page
            inside = min(block, length - n * block)
            for cache in caches:
                cache[page, :inside] = torch.randn(inside, SHARED, D).to(cache)
    q = torch.randn(sum(queries), HEADS, D, device=device).to(dtype)
    cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    return [q, *caches, cu], {"block_table": table, "lengths": lengths}


def one_by_one(args: list[torch.Tensor], cache: dict[str, torch.Tensor], **given: Any) -> tuple[torch.Tensor, ...]:
    """attention of each sequence alone, with its keys collected, in float64."""
    q, k, v, cu = args
    outputs = []
    for b, length in enumerate(cache["lengths"].tolist()):
        pages = cache["block_table"][b, : -(-length // k.shape[1])].long()
        mine = [q[cu[b] : cu[b + 1]], *(t[pages].flatten(0, 1)[:length] for t in (k, v))]
        mine = [t.double().transpose(0, 1)[None] for t in mine]
        o, lse = ridgeline.attention(*mine, causal="bottom_right", return_lse=True, **given)
        outputs.append((o[0].transpose(0, 1), lse[0]))
    return torch.cat([o for o, _ in outputs]), torch.cat([lse for _, lse in outputs], 1)


@pytest.mark.parametrize("impl", ["naive", "tiled", "triton"])
@pytest.mark.parametrize("block", [16, 48, 64])
@pytest.mark.parametrize("given", [{}, {"window": (7, 0)}, {"softcap": 2.0, "scale": 0.3}])
def test_blocks(device: str, block: int, impl: str, given: dict[str, Any]) -> None:
    args, cache = call(block, device)
    o, lse = ridgeline.attention_varlen(*args, **cache, causal=True, return_lse=True, **given, impl=impl)
    expected, sums = one_by_one(args, cache, **given)
    torch.testing.assert_close(o.double(), expected, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse.double(), sums.double(), rtol=5e-3, atol=5e-3)
    assert not o[33].any()  # a query of a sequence without keys
    assert (lse[:, 33] == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64, 128])
def test_half_precision_on_a_gpu(device: str, block: int) -> None:
    args, cache = call(block, device, torch.bfloat16, (300, 1, 0, 64), (700, 513, 9, 64))
    o, lse = ridgeline.attention_varlen(*args, **cache, causal=True, return_lse=True, impl="triton")
    expected, sums = one_by_one(args, cache)
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), sums.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_tables(device: str) -> None:
    """A captured graph serves other lengths and tables with as many tokens and sequences."""
    args, cache = call(16, device, torch.bfloat16)
    other, later = call(16, device, torch.bfloat16, (3, 20, 20, 9, 1), (30, 20, 40, 9, 16))
    expected = ridgeline.attention_varlen(*other, **later, causal=True, impl="triton")
    ridgeline.attention_varlen(*args[:1], *other[1:3], args[3], **cache, causal=True, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ridgeline.attention_varlen(*args[:1], *other[1:3], args[3], **cache, causal=True, impl="triton")
    args[0].copy_(other[0])
    args[3].copy_(other[3])
    for name, t in cache.items():
        t.copy_(later[name])
    graph.replay()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("impl", ["naive", "triton"])
def test_a_contiguous_cache_is_one_block_a_sequence(device: str, impl: str) -> None:
    args, cache = call(64, device, keys=(60, 5, 0, 47, 3))
    rows = cache["block_table"][:, 0].clamp(0, args[1].shape[0] - 1).long()
    flat = [args[0], args[1][rows], args[2][rows], args[3]]
    o = ridgeline.attention_varlen(*flat, lengths=cache["lengths"], causal="bottom_right", impl=impl)
    assert torch.equal(o, ridgeline.attention_varlen(*args, **cache, causal=True, impl=impl))


def test_wrong_arguments(device: str) -> None:
    args, cache = call(16, device)
    for change, words in (
        ({"lengths": None}, "needs lengths"),
        ({"lengths": cache["lengths"][:2]}, "one element more"),
        ({"block_table": cache["block_table"].long()}, "int32"),
        ({"cu_seqlens_k": args[3]}, "cannot be given together"),
        ({"impl": "gluon"}, "no cache|runs on an NVIDIA"),
    ):
        with pytest.raises(RidgelineError, match=words):
            ridgeline.attention_varlen(*args, **cache | change)
    args[0].requires_grad_()
    with pytest.raises(RidgelineError, match="no gradients"):
        ridgeline.attention_varlen(*args, **cache)


def test_traced(device: str) -> None:
    args, cache = call(16, device)

    def run(*args: torch.Tensor) -> torch.Tensor:
        return ridgeline.attention_varlen(*args, **cache, causal=True, impl="triton")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args), run(*args))
