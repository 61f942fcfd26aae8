"""Linear attention's Gluon chains for Hopper: which calls they serve, how the parts of a gate's gradient join, and on a
GPU their results and bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import boundary
from ridgeline import device as devices
from ridgeline.lab import Law
from ridgeline.op import Spec, get
from ridgeline.ops.recurrent import _head_hopper
from ridgeline.ops.recurrent._head_hopper_gates import Parts, join_gates

pytestmark = pytest.mark.kernels
FACTOR = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
ROWS, EVERY, WIDTH = _head_hopper.ROWS, _head_hopper.EVERY, _head_hopper.WIDTH


def started(gate: bool, heads: int = 16, card: str = "h200") -> list[boundary.Launch]:
    """The launches of both passes of a call whose q and k have `heads` heads and v has 16."""

    def empty(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    q, v, wide = empty(8, 4096, heads, 128), empty(8, 4096, 16, 128), torch.float32
    g, last = empty(8, 4096, heads) if gate else None, empty(8, 16, 128, 128, kind=wide)
    dq = empty(8, 4096, 16, 128, kind=torch.bfloat16 if heads == 16 else wide)
    dg = empty(8, 4096, 16, kind=wide) if gate else None
    seen: list[boundary.Launch] = []
    inputs = q, q, v, g, None, None, None, 1.0, "ieee"
    with devices.pretend(card), boundary.observe(seen.append):
        _head_hopper.fwd(v, last, *inputs)
        _head_hopper.bwd(dq, torch.empty_like(dq), v, dg, None, None, v, None, *inputs)
    return seen


def test_kernels_of_a_call() -> None:
    """Backward is two chains, and a kernel that joins the parts of a gate's gradient. All fit a multiprocessor."""
    chains = ["walk_heads", "walk_heads", "walk_keys"]
    assert [one.kernel.__name__ for one in started(False)] == chains
    for heads in (16, 4):
        assert [one.kernel.__name__ for one in started(True, heads)] == [*chains, "join_gates"]


def test_calls_that_they_refuse() -> None:
    def reason(width: int = 128, step: int = 0, kind: torch.dtype = torch.bfloat16, channels: int = 0) -> str:
        rows = torch.empty((8, 4096, 16, width + step), dtype=kind, device="meta")[..., :width]
        gate = torch.empty((8, 4096, 16, *[channels] * (channels > 0)), device="meta")
        return _head_hopper.refusal_of_gates(rows, rows, rows, gate) or ""

    assert not reason()
    assert not reason(step=8)
    assert not reason(kind=torch.float16)
    assert "multiples of 16 bytes" in reason(step=4)
    assert "128 columns" in reason(64)
    assert "per channel" in reason(channels=128)


def chunk_parts(q: Any, k: Any, v: Any, g: Any, do: Any, first: Any, dlast: Any) -> tuple[Any, ...]:
    """What the chains leave of one sequence and head, in float64: queries, keys and own (chunks, ROWS), and meets
    (states, WIDTH)."""
    tokens, chunks = q.shape[0], -(-q.shape[0] // ROWS)

    def cut(t: torch.Tensor) -> torch.Tensor:
        short = torch.zeros((chunks * ROWS - tokens, *t.shape[1:]), dtype=t.dtype)
        return torch.cat([t, short]).unflatten(0, (chunks, ROWS))

    q, k, v, do, g = (cut(t) for t in (q, k, v, do, g))
    since = g.cumsum(1)
    until = since[:, -1:] - since
    whole = since[:, -1].exp()
    before = [first]
    for c in range(chunks):
        before.append(whole[c] * before[-1] + (k[c] * until[c].exp()[:, None]).mT @ v[c])
    after = [dlast]
    for c in reversed(range(chunks)):
        after.insert(0, whole[c] * after[0] + (q[c] * since[c].exp()[:, None]).mT @ do[c])
    queries = [(q[c] * (do[c] @ before[c].mT)).sum(1) * since[c].exp() for c in range(chunks)]
    keys = [(k[c] * (v[c] @ after[c + 1].mT)).sum(1) * until[c].exp() for c in range(chunks)]
    apart = (since[:, None, :] - since[:, :, None]).triu().exp().triu()
    pairs = (k @ q.mT) * (v @ do.mT) * apart  # keys by queries
    own = torch.stack([pairs[:, :t, t:].sum((1, 2)) for t in range(ROWS)], 1)
    meets = [(before[c] * whole[c] * after[c + 1]).sum(1) for c in range(0, chunks, EVERY)]
    if chunks % EVERY != 1:
        meets.append((before[chunks] * after[chunks]).sum(1))
    return torch.stack(queries), torch.stack(keys), own, torch.stack(meets)


@pytest.mark.parametrize("ends", [None, [0, 0, 64, 192, 193, 449, 770]])
def test_parts_of_a_gates_gradient_join(ends: list[int] | None, device: str) -> None:
    """They give the gradient of the recurrence; the first token's is 0 to the bit without a first state."""
    T, H, scale, dice = 770, 2, 0.3, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64)

    q, k, v, do = (normal(1, T, H, WIDTH) for _ in range(4))
    g = (torch.nn.functional.logsigmoid(normal(1, T, H) + 2) / 8).requires_grad_()
    spans = [(0, T)] if ends is None else [*pairwise(ends)]
    first, dlast = torch.zeros(len(spans), H, WIDTH, WIDTH, dtype=torch.float64), normal(len(spans), H, WIDTH, WIDTH)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    out = ridgeline.gated_linear_attention(
        q, k, v, g, initial_state=first, return_state=True, cu_seqlens=cu_seqlens, scale=scale, impl="naive"
    )
    (expected,) = torch.autograd.grad(out, g, (do, dlast))
    sequences = 1 if ends is None else len(spans)
    room = EVERY * (T // (EVERY * ROWS) + 2 * sequences)
    queries, keys = (torch.full((2, H * room, ROWS), torch.nan) for _ in range(2))
    own, meets = torch.full((H * room, ROWS), torch.nan), torch.full((H * room // EVERY, WIDTH), torch.nan)
    for n, (start, end) in enumerate(spans):
        for h in range(H):
            rows: Any = (t[0, start:end, h] for t in (q, k, v, g.detach(), do))
            if start == end:
                continue
            a, b, c, d = chunk_parts(*[*rows, first[n, h], dlast[n, h] / scale])
            at = h * room + EVERY * (start // (EVERY * ROWS) + 2 * n)
            for t, found in ((queries, a), (keys, b)):
                t[0, at : at + len(found)], t[1, at : at + len(found)] = found / 4, found * 3 / 4
            own[at : at + len(c)] = c
            meets[at // EVERY : at // EVERY + len(d)] = d
    dg = torch.empty((1, T, H), device=device)
    parts: Any = [t.to(device) for t in (queries, keys, own, meets)]
    where = None if cu_seqlens is None else cu_seqlens.to(device)
    given = Parts._make((dg, *parts, H * room * ROWS, where, T, H, room, sequences))
    boundary.launch(join_gates, (room, H), given, scale, num_warps=1)
    assert (dg.cpu() - expected).norm() < 1e-5 * expected.norm()
    assert not any([dg[0, start].any() for start, end in spans if end > start])


CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "whole chunks": ((2, 256, 2, 2), {}),
    "tokens left over, states": ((1, 200, 2, 2), {"states": True}),
    "an odd number of chunks": ((1, 300, 2, 2), {"states": True}),
    "heads that share q and k": ((1, 130, 2, 4), {"states": True}),
    "packed": ((1, 400, 2, 2), {"ends": [0, 0, 150, 150, 151, 216, 400], "states": True}),
    "mild gates": ((1, 300, 2, 2), {"states": True, "mild": 0.01}),
    "no gate": ((1, 200, 2, 2), {"states": True, "mild": None}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", FACTOR)
def test_results_and_bits(case: str, dtype: torch.dtype, device: str) -> None:
    """All outputs and gradients against the recurrence in float64; a rerun gives the same bits."""
    (B, T, H, HV), given = CASES[case]
    dice = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    ends, mild = given.get("ends"), given.get("mild", 1.0)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    N = B if ends is None else len(ends) - 1
    args = [normal(B, T, H, 128), normal(B, T, H, 128), normal(B, T, HV, 128)]
    if mild is not None:
        args.append(mild * torch.nn.functional.logsigmoid(normal(B, T, H) + 2))
    function: Any = ridgeline.linear_attention if mild is None else ridgeline.gated_linear_attention
    state = normal(N, HV, 128, 128) if given.get("states") else None
    incoming = normal(B, T, HV, 128).to(dtype)

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [a.to(dtype).to(kind).requires_grad_() for a in args]
        first = None if state is None else state.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        o = function(*leaves, impl=impl, initial_state=first, cu_seqlens=cu_seqlens, return_state=True, scale=128**-0.5)
        wanted = leaves if first is None else [*leaves, first]
        grads = torch.autograd.grad([o[0], o[1]], wanted, [incoming.to(kind), torch.ones_like(o[1])])
        return [o[0].detach(), o[1].detach(), *grads]

    found = run("gluon", dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, run("gluon", dtype), strict=True))
    for n, (one, other) in enumerate(zip(found, run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm()
        assert error < FACTOR[dtype], f"result {n} is off by {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "T"), [(torch.bfloat16, 4096), (torch.float16, 1000)])
@pytest.mark.parametrize("mild", [1.0, 0.01])
def test_long_sequences_keep_the_law(dtype: torch.dtype, T: int, mild: float, device: str) -> None:
    dice = torch.Generator(device).manual_seed(0)
    q, k, v = (Spec(1, T, 16, 128).make(dtype, device, dice) for _ in range(3))
    gates = torch.nn.functional.logsigmoid(torch.randn(1, T, 16, device=device, generator=dice) + 2)
    g = (mild * gates).to(dtype).requires_grad_()
    op = get("gated_linear_attention")
    law = Law(op, [q, k, v, g], {})
    verdict = law.judge(*law.run(op.implementations["gluon"]))
    assert verdict.ok, verdict.reason()


def test_chunks_are_those_of_the_kernels() -> None:
    from ridgeline.ops.recurrent import _head_hopper_gates as gates
    from ridgeline.ops.recurrent import _head_hopper_tiles as tiles

    assert (ROWS, EVERY, WIDTH) == (tiles.C.value, tiles.EVERY.value, tiles.WIDE.value)
    assert (ROWS, EVERY, WIDTH) == (gates.C.value, gates.EVERY.value, gates.WIDE.value)
