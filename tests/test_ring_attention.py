"""Attention over a split sequence: values and gradients against one process, errors of rings, faults, traffic."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ridgeline
from attention_calls import bands, exact_partial
from ranks import one_kernel_at_a_time, run_ranks
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError, get
from ridgeline.parallel import blocks, context, groups, packing, recurrence, ring, sequence, ways
from ridgeline.parallel.rung import observed
from ridgeline.parallel.traffic import context_traffic
from ridgeline.select import why_not

WAYS = {"ring": context.ring_attention, "gathered": context.gathered_attention, "ulysses": context.ulysses_attention}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (9, None)},
    {"window": (5, 11)},
    {"causal": True, "softcap": 2.0, "scale": 0.3},
]


def data(S: int, D: int, heads: int = 8, shared: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, n, S, D, dtype=torch.float64).to(dtype) for n in (heads, shared, shared, heads)]


def split(rank: int, way: str, layout: str, given: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """Returns o, dq, dk and dv, whole."""
    *parts, do = [sequence.shard(t, dim=2, layout=layout).detach().requires_grad_() for t in given]
    o: Any = WAYS[way](*parts, layout=layout, **options)
    o.backward(do.detach())
    grads = [p.grad for p in parts if p.grad is not None]
    return [sequence.unshard(t.detach(), dim=2, layout=layout) for t in (o, *grads)]


def alone(given: list[torch.Tensor], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    q, k, v, do = [t.detach().to(dtype, copy=True) for t in given]
    own = [t.requires_grad_() for t in (q, k, v)]
    o: Any = ridgeline.attention(*own, **options)
    o.backward(do)
    return [o.detach(), *[t.grad for t in own if t.grad is not None]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", sequence.LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_split_attention_equals_one_process(way: str, layout: str, options: dict[str, Any]) -> None:
    given = data(32, 16)
    wanted = alone(given, torch.float64, **options, impl="naive")
    for world in (1, 2, 4):
        for found in run_ranks(world, split, way, layout, given, options):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_one_process_needs_no_group(way: str) -> None:
    given = data(16, 16)
    wanted = alone(given, torch.float64, causal=True, impl="naive")
    torch.testing.assert_close(split(0, way, "zigzag", given, {"causal": True}), wanted, rtol=1e-12, atol=1e-12)


def on_gloo(given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [split(groups.rank(), way, "zigzag", given, {"causal": True}) for way in WAYS]


@pytest.mark.parametrize("world", [2, 4])
def test_split_attention_on_gloo(world: int) -> None:
    given = data(32, 80)
    wanted = alone(given, torch.float64, causal=True, impl="naive")
    for found in groups.spawn(on_gloo, world, given):
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)


def test_the_pieces_cover_what_a_query_sees() -> None:
    """By brute force, against the mask of the whole sequence."""
    for world, layout, left, right in [
        (w, layout, *band)
        for w in (1, 2, 3, 4)
        for layout in sequence.LAYOUTS
        for band in ((blocks.FREE,) * 2, (blocks.FREE, 0), (5, 0), (3, 7), (0, 0))
    ]:
        apart = torch.arange(4 * world) - torch.arange(4 * world)[:, None]
        wanted = (apart >= -left) & (apart <= right)
        for rank in range(world):
            for source in range(world):
                (mine, size), (theirs, _) = [sequence.starts(r, world, 4, layout) for r in (rank, source)]
                seen = torch.zeros(4, 4, dtype=torch.int)
                for p in blocks.pieces(mine, theirs, size, left, right):
                    part = seen[p.q, p.k]
                    off = torch.arange(part.shape[1]) - torch.arange(part.shape[0])[:, None]
                    part += ((off >= -p.left) & (off <= p.right)).int()
                rows, columns = [torch.cat([torch.arange(b, b + size) for b in some]) for some in (mine, theirs)]
                torch.testing.assert_close(seen, wanted[rows][:, columns].int(), msg=f"{world} {layout} {left} {right}")


PACKED = (0, 3, 3, 14, 15, 29, 32)  # an empty sequence, one of a token, and some over several ranks


def packed_split(rank: int, way: str, layout: str, given: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """Returns o, dq, dk, dv and dsinks, whole; packed if options say so, with lse's gradient in rings."""
    *parts, sinks, do = given
    *parts, do = [sequence.shard(t, dim=2, layout=layout).detach().requires_grad_() for t in (*parts, do)]
    own = sinks.clone().requires_grad_()
    options = options | {"layout": layout, "sinks": own} | ({} if way == "ulysses" else {"return_lse": True})
    o: Any = WAYS[way](*parts, **options)
    o, lse = (o, None) if way == "ulysses" else o
    ((o * do.detach()).sum() + (0 if lse is None else lse.sin().sum())).backward()
    assert own.grad is not None
    dsinks = own.grad.clone()
    dist.all_reduce(dsinks)  # as the gradient of any weight
    grads = [p.grad for p in parts if p.grad is not None]
    return [*[sequence.unshard(t.detach(), dim=2, layout=layout) for t in (o, *grads)], dsinks]


def packed_alone(given: list[torch.Tensor], with_lse: bool, cu: Any = None, **options: Any) -> list[torch.Tensor]:
    *own, do = [t.clone() for t in given]
    own = [t.requires_grad_() for t in own]
    options |= {"return_lse": True, "impl": "naive", "sinks": own[3]}
    if cu is None:
        o, lse = ridgeline.attention(*own[:3], **options)
    else:
        rows = [t[0].transpose(0, 1) for t in own[:3]]
        ends = torch.tensor(cu, dtype=torch.int32)
        o, lse = ridgeline.attention_varlen(*rows, ends, ends, **options)
        o = o.transpose(0, 1)[None]
    ((o * do).sum() + (lse.sin().sum() if with_lse else 0)).backward()
    return [o.detach(), *[t.grad for t in own if t.grad is not None]]


def sunk(heads: int = 8, batch: int = 1, S: int = 32) -> list[torch.Tensor]:
    q, k, v, do = [t[:batch] for t in data(S, 16, heads)]
    return [q, k, v, torch.randn(heads, dtype=torch.float64), do]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", sequence.LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_and_sinks_equal_one_process(way: str, layout: str, options: dict[str, Any]) -> None:
    given = sunk()
    for cu in (PACKED, (0, 32)):
        wanted = packed_alone(given, way != "ulysses", cu, **options)
        for world in (2, 4):
            for found in run_ranks(world, packed_split, way, layout, given, options | {"cu_seqlens": cu}):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def packed_on_gloo(given: list[torch.Tensor], whole: list[torch.Tensor]) -> list[Any]:
    cu = torch.tensor(PACKED)
    options: dict[str, Any] = {"causal": True, "window": (9, None), "cu_seqlens": cu}
    return [
        *[packed_split(groups.rank(), way, "zigzag", given, options) for way in WAYS],
        packed_split(groups.rank(), "ring", "plain", whole, {"causal": True}),  # a batch, with sinks alone
    ]


def test_packed_sequences_and_sinks_on_gloo() -> None:
    given, whole = sunk(), sunk(batch=2)
    wanted = [packed_alone(given, way != "ulysses", PACKED, causal=True, window=(9, None)) for way in WAYS]
    wanted.append(packed_alone(whole, True, causal=True))
    for found in groups.spawn(packed_on_gloo, 2, given, whole):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_pieces_of_packed_sequences_cover_what_a_query_sees() -> None:
    """By brute force, against the mask of the whole row; sequences of random lengths."""
    dice = torch.Generator().manual_seed(0)
    for world, layout, left, right in [
        (w, layout, *band)
        for w in (1, 2, 3, 4)
        for layout in sequence.LAYOUTS
        for band in ((blocks.FREE,) * 2, (blocks.FREE, 0), (5, 0), (3, 7), (0, 0), (0, blocks.FREE))
        for _ in range(3)
    ]:
        total = 6 * world
        cuts = torch.randint(0, total + 1, (int(torch.randint(0, 6, (), generator=dice)),), generator=dice)
        ends = (0, *sorted(cuts.tolist()), total)
        which = torch.tensor([packing.number(ends, t) for t in range(total)])
        apart = torch.arange(total) - torch.arange(total)[:, None]
        wanted = (apart >= -left) & (apart <= right) & (which == which[:, None])
        for rank in range(world):
            for source in range(world):
                (mine, size), (theirs, _) = [sequence.starts(r, world, 6, layout) for r in (rank, source)]
                seen = torch.zeros(6, 6, dtype=torch.int)
                for p in packing.packed_pieces(mine, theirs, size, left, right, ends):
                    part = seen[p.q, p.k]
                    off = torch.arange(part.shape[1]) - torch.arange(part.shape[0])[:, None]
                    inside = (off >= -p.left) & (off <= p.right)
                    if p.cu is not None:
                        own = torch.tensor([packing.number(p.cu, t) for t in range(len(part))])
                        inside &= own == own[:, None]
                    part += inside.int()
                rows, columns = [torch.cat([torch.arange(b, b + size) for b in some]) for some in (mine, theirs)]
                assert torch.equal(seen, wanted[rows][:, columns].int()), (world, layout, left, right, ends)


def test_a_ring_stops_after_the_last_rank_that_a_sequence_reaches() -> None:
    whole = context.Facts(None, "plain", blocks.FREE, 0, blocks.Given(1.0, 0.0), False, None)
    with groups.pretend(8):
        assert whole.hops(16) == 7
        assert whole._replace(ends=tuple(range(0, 129, 16))).hops(16) == 0
        assert whole._replace(ends=(0, 24, 60, 128)).hops(16) == 4  # tokens 60 to 127 lie on the ranks 3 to 7


@pytest.mark.kernels
def test_packed_rings_of_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(device, monkeypatch, context, "block_forward", "block_backward")
    cu = (0, 5, 43, 44, 96)
    q, k, v, sinks, do = sunk(2, S=96)
    given = [*[t.half() for t in (q, k[:, :1], v[:, :1])], sinks, do.half()]
    for options, world, layout in (({"causal": True}, 2, "zigzag"), ({"window": (9, 30)}, 3, "plain")):
        wanted = packed_alone([t.double() for t in given], True, cu, **options)
        found = run_ranks(world, packed_split, "ring", layout, given, options | {"cu_seqlens": cu})[0]
        assert max(errors(found, wanted)) < 2e-3, (options, errors(found, wanted))


def test_zigzag_gives_ranks_equal_work() -> None:
    pairs = []
    for rank in range(8):
        mine, size = sequence.starts(rank, 8, 64, "zigzag")
        mine_pairs = 0
        for source in range(8):
            for p in blocks.pieces(mine, sequence.starts(source, 8, 64, "zigzag")[0], size, blocks.FREE, 0):
                whole = (p.q.stop - p.q.start) * (p.k.stop - p.k.start)
                mine_pairs += whole if p.right else (whole + 64) // 2
        pairs.append(mine_pairs)
    assert len(set(pairs)) == 1


def errors(found: list[torch.Tensor], oracle: list[torch.Tensor]) -> list[float]:
    return [float((f.double() - o).norm() / o.norm()) for f, o in zip(found, oracle, strict=True)]


def test_a_ring_is_as_exact_as_one_device() -> None:
    """In bfloat16, with the kernels' roundings done in PyTorch: at most 1.05 times the error of one device."""
    given = data(1024, 64, 2, 1, torch.bfloat16)
    oracle = alone(given, torch.float64, causal=True, impl="naive")
    one = errors(run_ranks(1, split, "ring", "zigzag", given, {"causal": True})[0], oracle)
    for world in (2, 8, 32):
        found = errors(run_ranks(world, split, "ring", "zigzag", given, {"causal": True})[0], oracle)
        assert all(r <= 1.05 * o for r, o in zip(found, one, strict=True)), (world, found, one)


@pytest.mark.kernels
def test_a_ring_of_kernels_is_as_exact_as_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(device, monkeypatch, context, "block_forward", "block_backward")
    assert INTERPRETED
    for options, world, layout in (({"causal": True}, 4, "zigzag"), ({"window": (20, 30)}, 3, "plain")):
        given = [t[:1] for t in data(96, 24, 2, 1, torch.float16)]
        oracle = alone(given, torch.float64, **options, impl="naive")
        one = errors(alone(given, torch.float16, **options, impl="triton"), oracle)
        found = errors(run_ranks(world, split, "ring", layout, given, options)[0], oracle)
        assert all(r <= 1.05 * o for r, o in zip(found, one, strict=True)), (world, found, one)


@pytest.mark.kernels
def test_partial_results_leave_in_float32(device: str) -> None:
    q, k, v = [torch.randn(1, n, 20, 16, device=device).half() for n in (2, 1, 1)]
    options = None, 0.25, 0.0, -3, 7, "ieee"  # a query sees the keys 3 to 7 places after it
    ridgeline.attention(q, k, v)  # loads the op
    o, lse = torch.ops.ridgeline.attention_partial_fwd(q, k, v, *options)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    piece = blocks.Piece(slice(0, 20), slice(0, 20), -3, 7)
    wanted = blocks.block_forward(*wide, piece, blocks.Given(0.25, 0.0))
    assert o.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), wanted[0].detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), wanted[1].detach(), rtol=1e-5, atol=1e-5)
    do = torch.randn_like(q)
    grads = torch.ops.ridgeline.attention_partial_bwd(do, None, q, k, v, o, lse, *options)
    wanted[0].backward(do.double())
    for found, t in zip(grads, wide, strict=True):
        assert found.dtype == torch.float32
        assert t.grad is not None
        torch.testing.assert_close(found.double(), t.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [16, 64, 72, 96, 128, 160, 200, 256])
@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_partial_calls_of_every_shape(impl: str, D: int, dtype: torch.dtype) -> None:
    """o, lse, dq, dk and dv in float32, of any band, of packed sequences, and with o and lse over other keys too."""
    dice = random.Random(D)
    torch.manual_seed(D)
    get("attention_varlen")  # loads the torch ops
    least = 4e-3 if dtype == torch.bfloat16 else 5e-4
    for n in range(24):
        packed, kv, group, B = n % 3 == 2, dice.choice((1, 2, 8)), dice.choice((1, 4)), dice.choice((1, 2))
        rows, columns = [dice.choice((1, 64, 128)) * dice.randint(1, 12) for _ in range(2)]
        B, columns = (1, rows) if packed else (B, columns)
        left, right = bands(dice, rows, columns)
        softcap = dice.choice((0.0, 0.7, 20.0))
        cu = sorted([0, *[dice.randint(0, rows) for _ in range(dice.randint(0, 4))], rows])
        # A piece of a longer row, as the ring cuts it.
        q, do = [torch.randn(B, kv * group, 2 * rows, D, device="cuda").to(dtype)[:, :, rows:] for _ in range(2)]
        k, v = torch.randn(2, B, kv, 2 * columns, D, device="cuda").to(dtype)[:, :, :, columns:]
        if why_not(get("attention").implementations[impl], q, k, v):
            pytest.skip(f"{impl} does not take D {D} here")
        wide = [t.double().requires_grad_() for t in (q, k, v)]
        o, lse = exact_partial(*wide, cu if packed else None, left, right, D**-0.5, softcap)
        more = torch.logaddexp(lse, torch.randn_like(lse).masked_fill(torch.rand_like(lse) < 0.2, -torch.inf))
        share = (lse - more).exp().nan_to_num(0.0)[..., None]
        merged = o * share + 0.5 * (1 - share).masked_fill((more == -torch.inf)[..., None], 0)
        grads = torch.autograd.grad(merged, wide, do.double())
        ends = torch.tensor(cu, dtype=torch.int32, device="cuda") if packed else None
        options = ends, D**-0.5, softcap, left, right, "ieee", impl
        made = torch.ops.ridgeline.attention_partial_fwd(q, k, v, *options)
        given = do, None, q, k, v, merged.detach().float(), more.detach().float()
        made += torch.ops.ridgeline.attention_partial_bwd(*given, *options)
        again = torch.ops.ridgeline.attention_partial_bwd(*given, *options)
        assert all(torch.equal(a, b) for a, b in zip(made[2:], again, strict=True)), "reruns differ"
        some = lse != -torch.inf
        assert torch.equal(made[1] == -torch.inf, ~some)
        torch.testing.assert_close(made[1].double()[some], lse[some], atol=1e-4, rtol=1e-5)
        for name, one, other in zip(("o", "dq", "dk", "dv"), (made[0], *made[2:]), (o, *grads), strict=True):
            error = float((one.double() - other).norm() / (other.norm() + 1e-2 * math.sqrt(other.numel())))
            assert one.dtype == torch.float32
            assert error < least, f"{name} {tuple(q.shape)} of {columns}, {left=} {right=} {softcap=} {cu=}: {error}"


def ring_on_one(
    given: list[torch.Tensor], world: int, layout: str, left: int, right: int, ends: packing.Ends | None
) -> list[torch.Tensor]:
    """Returns o, dq, dk and dv of a ring whose ranks' blocks one device computes, one after the other."""
    length, options = given[0].shape[2] // world, blocks.Given(given[0].shape[-1] ** -0.5, 0.0)
    places = [sequence.starts(rank, world, length, layout) for rank in range(world)]
    rows = [torch.cat([torch.arange(b, b + size) for b in begins]) for begins, size in places]
    parts = [[t[:, :, own.to(t.device)] for t in given] for own in rows]
    wide = torch.promote_types(given[0].dtype, torch.float32)
    found = [torch.zeros_like(t, dtype=wide) for t in (given[0], *given[:3])]
    for rank, (q, _, _, do) in enumerate(parts):
        o, lse = torch.zeros_like(q, dtype=wide), torch.full_like(q[..., 0], -torch.inf, dtype=wide)
        seen = [
            (source, piece)
            for source in range(world)
            for piece in packing.packed_pieces(places[rank][0], places[source][0], places[0][1], left, right, ends)
        ]
        for source, p in seen:
            k, v = [t[:, :, p.k] for t in parts[source][1:3]]
            blocks.merge(o[:, :, p.q], lse[:, :, p.q], *blocks.block_forward(q[:, :, p.q], k, v, p, options))
        o = o.to(q.dtype)
        found[0][:, :, rows[rank]] = o.to(wide)
        for source, p in seen:
            k, v = [t[:, :, p.k] for t in parts[source][1:3]]
            own = do[:, :, p.q], None, q[:, :, p.q], k, v, o[:, :, p.q], lse[:, :, p.q]
            to = rows[rank][p.q], rows[source][p.k], rows[source][p.k]
            for whole, at, made in zip(found[1:], to, blocks.block_backward(*own, p, options), strict=True):
                whole[:, :, at] += made
    return [t.to(given[0].dtype) for t in found]


RINGS = [
    *product((2, 4, 8), sequence.LAYOUTS, [(None, 0), (None, None), (300, 0), (70, 200)], [None]),
    *product((4,), sequence.LAYOUTS, [(None, 0), (None, None)], [(0, 100, 1000, 1001, 2048)]),
]


@pytest.mark.parametrize(("world", "layout", "window", "ends"), RINGS, ids=str)
def test_a_ring_on_one_device_is_the_ring(world: int, layout: str, window: Any, ends: Any) -> None:
    """What the next test runs, in float64 and PyTorch, on 1/64 of the tokens."""
    given = [t[:1] for t in data(64, 16, 2, 1)]
    left, right = [blocks.FREE if w is None else -(-w // 16) for w in window]
    ends = None if ends is None else tuple(sorted({0, 3, 31, 32, 64}))
    causal = {"causal": True} if right == 0 else {}
    wanted = packed_alone(
        [*given[:3], torch.full((2,), -torch.inf, dtype=torch.float64), given[3]],
        False,
        ends or (0, 64),
        window=[None if w == blocks.FREE else w for w in (left, right)],
        **causal,
    )
    found = ring_on_one(given, world, layout, left, right, ends)
    torch.testing.assert_close(found, wanted[:4], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "layout", "window", "ends"), RINGS, ids=str)
def test_a_ring_on_a_gpu_is_as_exact_as_one_call(world: int, layout: str, window: Any, ends: Any) -> None:
    """In bfloat16, by the kernels that serve: at most 1.05 times the error of one call."""
    torch.manual_seed(0)
    get("attention_varlen")
    given = [torch.randn(1, n, 2048, 64, device="cuda").bfloat16() for n in (8, 2, 2, 8)]
    left, right = [blocks.FREE if w is None else w for w in window]
    wide = [t.double().requires_grad_() for t in given[:3]]
    o, _ = exact_partial(*wide, None if ends is None else list(ends), left, right, 0.125)
    oracle = [o.detach(), *torch.autograd.grad(o, wide, given[3].double())]
    one = errors(ring_on_one(given, 1, "plain", left, right, ends), oracle)
    found = errors(ring_on_one(given, world, layout, left, right, ends), oracle)
    assert all(r <= 1.05 * o for r, o in zip(found, one, strict=True)), (found, one)


def test_a_stale_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = data(16, 16)
    wanted = alone(given, torch.float64, causal=True, impl="naive")
    monkeypatch.setattr(context, "pass_on", lambda t, group, by=1: ring.Arriving(t.clone(), None, t))
    found = run_ranks(4, split, "ring", "zigzag", given, {"causal": True})[0]
    assert all((f - w).abs().max() > 0.01 for f, w in zip(found, wanted, strict=True))


def refused(rank: int, call: Any) -> str:
    try:
        call(rank)
    except RidgelineError as error:
        return str(error)
    return ""


def many(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.ulysses_attention(q, q[:, :2], q[:, :2])


def unlike(rank: int) -> Any:
    q = torch.randn(1, 4, 8 + 2 * (rank == 1), 16)
    return context.ring_attention(q, q, q)


def wrong_on_one(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.ring_attention(q, q, q, window=(-7, 2) if rank == 2 else None)


def long_batch(rank: int) -> Any:
    q = torch.randn(2, 4, 8, 16)
    return context.ring_attention(q, q, q, cu_seqlens=(0, 32))


def short(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.ulysses_attention(q, q, q, cu_seqlens=torch.tensor([0, 9, 16]))


def unlike_lengths(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.gathered_attention(q, q, q, cu_seqlens=[0, 9 + (rank == 3), 32])


def no_lengths(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.ring_attention(q, q, q, cu_seqlens=torch.zeros(2))


def few_sinks(rank: int) -> Any:
    q = torch.randn(1, 4, 8, 16)
    return context.ring_attention(q, q, q, sinks=torch.zeros(3))


def odd(rank: int) -> Any:
    return sequence.shard(torch.zeros(1, 12))


def refused_on_gloo(call: Any) -> str:
    return refused(groups.rank(), call)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (many, "multiples of the 4 ranks, got 4 and 2"),
        (unlike, r"same shape of q, but rank 0 has \(1, 4, 8, 16\) and rank 1 \(1, 4, 10, 16\)"),
        (wrong_on_one, "on rank 2: window must be"),
        (long_batch, "with cu_seqlens q must have a batch of 1, .*, got 2"),
        (short, r"cu_seqlens must rise from 0 to the tokens of all ranks, 32, got \[0, 9, 16\]"),
        (unlike_lengths, r"same cu_seqlens, but rank 0 has \(0, 9, 32\) and rank 3 \(0, 10, 32\)"),
        (no_lengths, r"cu_seqlens must be a tuple of ints, .*, got torch.float32 \(2,\)"),
        (few_sinks, r"sinks must be .* for each head of q, \(4,\), on q's device, got torch.float32 \(3,\) on cpu"),
        (odd, "multiple of twice the number of ranks, 8, of tokens, got 12"),
    ],
)
def test_every_rank_says_what_is_wrong(call: Any, says: str) -> None:
    import re

    said = run_ranks(4, refused, call)
    assert len(set(said)) == 1
    assert re.search(says, said[0])
    if call is unlike:
        assert groups.spawn(refused_on_gloo, 4, call) == said


def moved(rank: int) -> list[torch.Tensor]:
    tokens = torch.arange(32).view(2, 16)
    return [
        sequence.positions(16),
        sequence.next_labels(tokens),
        sequence.shard(tokens),
        sequence.unshard(sequence.shard(tokens)),
    ]


def test_positions_and_labels_go_with_the_tokens() -> None:
    tokens = torch.arange(32).view(2, 16)
    for rank, (places, labels, mine, whole) in enumerate(run_ranks(4, moved)):
        assert places.tolist() == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        assert torch.equal(mine, tokens[:, places])
        assert torch.equal(whole, tokens)
        assert torch.equal(labels, torch.where(places < 15, mine + 1, -100))


def packed_moved(rank: int) -> list[torch.Tensor]:
    tokens = torch.arange(16).view(1, 16)
    return [sequence.positions(16, cu_seqlens=(0, 5, 5, 16)), sequence.next_labels(tokens, cu_seqlens=(0, 5, 5, 16))]


def test_positions_and_labels_of_packed_sequences() -> None:
    for rank, (places, labels) in enumerate(run_ranks(4, packed_moved)):
        tokens = [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        assert places.tolist() == [t if t < 5 else t - 5 for t in tokens]
        assert labels.tolist() == [[-100 if t in (4, 15) else t + 1 for t in tokens]]


def unsharded_slope(rank: int) -> torch.Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    (sequence.unshard(x) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


def test_unshard_sums_gradients() -> None:
    for slope in run_ranks(4, unsharded_slope):
        assert torch.equal(slope, torch.full((2, 4), 10.0))


def states(rank: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
    *parts, do = [sequence.shard(t, layout="plain").detach().requires_grad_() for t in given]
    op: Any = recurrence.gated_linear_attention if len(parts) == 4 else recurrence.linear_attention
    o = op(*parts)
    o.backward(do.detach())
    return [sequence.unshard(t.detach(), layout="plain") for t in (o, *[p.grad for p in parts if p.grad is not None])]


@pytest.mark.parametrize("gate", [None, (2, 16, 2), (2, 16, 2, 8)], ids=str)
def test_linear_attention_equals_one_process(gate: tuple[int, ...] | None) -> None:
    q, k, v = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 4, 12)
    given = [q, k, v, *([torch.nn.functional.logsigmoid(torch.randn(gate))] if gate else [])]
    own = [t.clone().requires_grad_() for t in given]
    op: Any = ridgeline.gated_linear_attention if gate else ridgeline.linear_attention
    do = torch.randn_like(v)
    o = op(*own)
    o.backward(do)
    wanted = [o.detach(), *[t.grad for t in own]]
    for world in (2, 4):
        for found in run_ranks(world, states, [*given, do]):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", ways.LADDER, ids=lambda way: way.name)
def test_the_ladder_of_ways_moves_what_it_says(way: ways.Way) -> None:
    q, k, v = [torch.zeros(1, n, 4, 16, dtype=torch.bfloat16, requires_grad=True) for n in (128, 64, 64)]
    with groups.pretend(64, 5):
        with observed() as seen:
            o = way.run(q, k, v, causal=True)
            o.backward(torch.zeros_like(o))
        formula = way.traffic(tuple(q.shape), 64, 64, 2)  # type: ignore[arg-type]
        assert seen == formula, f"{seen} against {formula}"
        wanted = context_traffic(way.how, 64, tuple(q.shape), 64)  # type: ignore[arg-type]
        assert formula.sent(64) == sum(one.bytes for one in wanted)
        assert sum(formula.calls.values()) == sum(one.calls for one in wanted)
    assert len(way.idea) <= 100
    assert way.refuses(128, 64, 64) is None
    assert way.share(2) == (0.75 if way.name.endswith("plain") else 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_bytes_in_a_world_of_64(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, sent = 64, []
    real, gather, scatter = dist.all_to_all_single, groups.all_gather, groups.reduce_scatter

    def exchange(out: Any, x: Any, outs: Any = None, ins: Any = None, **rest: Any) -> Any:
        size = x.element_size()
        sent.append(sum(ins) * size if ins else x.numel() * size * (world - 1) // world)
        return real(out, x, outs, ins, **rest)

    def gathers(out: Any, x: Any, **rest: Any) -> Any:
        sent.append(x.numel() * x.element_size() * (world - 1))
        return gather(out, x, **rest)

    def scatters(out: Any, x: Any, **rest: Any) -> Any:
        sent.append(out.numel() * out.element_size() * (world - 1))
        return scatter(out, x, **rest)

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(groups, "all_gather", gathers)
    monkeypatch.setattr(groups, "reduce_scatter", scatters)
    q, k, v = [torch.zeros(1, n, 4, 16, dtype=torch.bfloat16, requires_grad=True) for n in (128, 64, 64)]
    for layout, window, hops in (("zigzag", None, None), ("plain", (10, None), 3 if way == "ring" else None)):
        wanted = context_traffic(way, world, tuple(q.shape), 64, hops=hops)  # type: ignore[arg-type]
        with groups.pretend(world, 5):
            o: Any = WAYS[way](q, k, v, causal=True, layout=layout, window=window)
            assert (len(sent), sum(sent)) == wanted[0]
            sent.clear()
            o.backward(torch.zeros_like(o))
            assert (len(sent), sum(sent)) == wanted[1]
            sent.clear()
