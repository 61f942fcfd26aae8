"""Mamba-2's Gluon kernels for heads that share B and C: plain PyTorch in their place here, and on Hopper themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import ridgeline
import ridgeline.boundary
import ridgeline.device
from ridgeline.boundary import INTERPRETED
from ridgeline.ops.recurrent import _calls, _head_chunks, _shared_heads, _shared_heads_hopper, _shared_heads_plan
from ridgeline.ops.recurrent._chunks import Call

pytestmark = pytest.mark.kernels
ROWS, HALF = _shared_heads_plan.ROWS, _shared_heads_plan.HALF


def chunks_of(job: Any, batch: int) -> Any:
    """Where each chunk is kept among a head's, its place in the data, and its rows that are there."""
    ends = [0, job.tokens] if job.ends is None else job.ends.tolist()
    for n, (start, end) in enumerate(pairwise(ends)):
        kept = 0 if job.ends is None else start // ROWS + n
        for b in range(batch):
            for m, first in enumerate(range(start, end, ROWS)):
                yield b, n if job.ends is not None else b, kept + m, slice(first, min(first + ROWS, end))


def decays(numbers: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Of a chunk: of pairs, since its begin, until its end, and the steps."""
    sums, edge, until, step = numbers.view(4, 2, HALF).double()
    own = torch.where(torch.ones(HALF, HALF).tril().bool(), (sums[:, :, None] - sums[:, None, :]).exp2(), 0.0)
    far = sums[1].exp2()[:, None] * edge[0][None, :]
    pairs = torch.cat([torch.cat([own[0], 0 * own[0]], 1), torch.cat([far, own[1]], 1)])
    since = torch.cat([sums[0].exp2(), edge[1]])
    return pairs[:rows, :rows], since[:rows], until.flatten()[:rows], step.flatten()[:rows]


def plain_outputs(job: Any, maps: Any, scale: float) -> None:
    for b, _, kept, rows in chunks_of(job, maps.v.tensor.shape[0]):
        for h in range(job.heads):
            q, k = (t.tensor[b, h // job.share, rows].double() for t in (maps.q, maps.k))
            v, state = maps.v.tensor[b, h, rows].double(), maps.before.tensor[b, h, kept].double()
            pairs, since, _, step = decays(maps.numbers.tensor[b, h, kept], len(q))
            o = scale * ((q @ k.mT * pairs * step) @ v + since[:, None] * (q @ state))
            maps.out.tensor[b, h, rows] = (o + (0 if job.skip is None else job.skip[h] * v)).float()


def plain_keys(grads: Any, job: Any, maps: Any, scale: float) -> None:
    R = _shared_heads_hopper
    own = job.heads // job.share * job.parts
    grads.own.zero_(), grads.k.zero_()
    rows_of = grads.rows.view(8, maps.v.tensor.shape[0], job.heads, job.chunks, ROWS)
    for b, _, kept, rows in chunks_of(job, maps.v.tensor.shape[0]):
        for h in range(job.heads):
            q, k = (t.tensor[b, h // job.share, rows].double() for t in (maps.q, maps.k))
            v, do = (t.tensor[b, h, rows].double() for t in (maps.v, maps.do))
            after, n = maps.after.tensor[b, h, kept].double(), len(q)
            pairs, _, until, step = decays(maps.numbers.tensor[b, h, kept], n)
            scores, weights = scale * q @ k.mT * pairs, do @ v.mT * pairs * step
            part = h // job.share * job.parts + h % job.share // job.span
            assert part < own
            grads.own[b, rows, part] += (scale * weights @ k).float()
            grads.k[b, rows, part] += (scale * weights.mT @ q + (until * step)[:, None] * (v @ after.mT)).float()
            far = until[:, None] * (k @ after)
            dv = far + scores.mT @ do
            both = scale * q @ k.mT * weights
            made = rows_of[:, b, h, kept]
            made.zero_()
            made[R.KEY.value, :n] = step * (v * far).sum(1)
            made[R.LATER.value, :n] = both.sum(0)
            across = both.clone()
            across[:, HALF:] = 0
            across[:HALF] = 0
            made[R.ACROSS.value, :n] = across.sum(1)
            made[R.EARLIER.value, :n] = (both - across).sum(1)
            made[R.OF_STEP.value, :n] = (v * dv).sum(1)
            made[R.OF_SKIP.value, :n] = (v * do).sum(1)
            dv = step[:, None] * dv + (0 if job.skip is None else job.skip[h] * do)
            maps.out.tensor[b, h, rows] = dv.float()


def plain_queries(grads: Any, job: Any, maps: Any, scale: float) -> None:
    R = _shared_heads_hopper
    rows_of = grads.rows.view(8, maps.do.tensor.shape[0], job.heads, job.chunks, ROWS)
    for b, _, kept, rows in chunks_of(job, maps.do.tensor.shape[0]):
        for h in range(job.heads):
            q, do = maps.q.tensor[b, h // job.share, rows].double(), maps.do.tensor[b, h, rows].double()
            before, after = (t.tensor[b, h, kept].double() for t in (maps.before, maps.after))
            _, since, _, _ = decays(maps.numbers.tensor[b, h, kept], len(q))
            part = h // job.share * job.parts + h % job.share // job.span
            grads.own[b, rows, part] += (scale * since[:, None] * (do @ before.mT)).float()
            made = rows_of[:, b, h, kept]
            made[R.QUERY.value] = 0
            made[R.QUERY.value, : len(q)] = scale * since * (do * (q @ before)).sum(1)
            made[R.PAST.value] = (before * after).sum(1)
    grads.q.copy_(grads.own)


def start(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
    """In place of `launch`: plain PyTorch for kernels that the interpreter does not run."""
    plain = {"shared_outputs": plain_outputs, "shared_keys": plain_keys, "shared_queries": plain_queries}
    if kernel.__name__ in plain:
        plain[kernel.__name__](*args)
    else:
        ridgeline.boundary.launch(kernel, grid, *args, **constants)


@pytest.mark.parametrize("ends", [None, (0, 70, 70, 210)])
def test_the_numbers_around_the_kernels(ends: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays, what joins the gradients of gates, steps and D, and all sums over heads."""
    if not INTERPRETED:
        pytest.skip("a GPU runs the kernels themselves")
    dice = torch.Generator(device).manual_seed(5)
    B, T, H, shared = 1, 210 if ends else 150, 4, 2
    given = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    N = B if ends is None else len(ends) - 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    q, k = (0.3 * normal(B, T, shared, 128) for _ in range(2))
    v, g, step = normal(B, T, H, 64), -normal(B, T, H).abs(), normal(B, T, H).abs()
    leaves = [t.double().requires_grad_() for t in (q, k, v, g, step, normal(H), normal(N, H, 128, 64))]
    Q, KEY, X, G, S, D, first = leaves
    around = _calls.Given(first, True, given, False, None)
    want, kept = _calls.recurrence(Q, KEY, X * S[..., None], G, None, around, 0.7)
    want = want + D[:, None] * X
    do, dlast = normal(*want.shape), normal(*kept.shape)
    grads = torch.autograd.grad((want, kept), leaves, (do.double(), dlast.double()))
    for module in (_shared_heads, _shared_heads_plan):
        monkeypatch.setattr(module, "launch", start)
    one = {"num_warps": 4, "num_stages": 1}
    tiles = _head_chunks.HeadTiles(64, HALF, 2, one, one, one, one)
    monkeypatch.setattr(_head_chunks, "head_tiles", lambda *_: tiles)
    call = Call(q, k, v, g, None, first.detach().float(), given, 0.7, "ieee", step, D.detach().float())
    o, last, made = torch.empty_like(v), torch.empty_like(call.first), [torch.empty(t.shape) for t in leaves]
    _shared_heads.forward(o, last, call)
    dq, dk, dv, dg, dstep, dD, dfirst = made
    _shared_heads.backward((dq, dk, dv, dg, dD, dstep, dfirst), do, dlast, call)
    for found, right in zip((o, last, *made), (want, kept, *grads), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


def test_calls_that_they_take() -> None:
    """bfloat16 with 128 rows and 64 columns of a state, eight heads or more that share B and C, rows for TMA."""

    def reason(heads: int = 64, shared: int = 1, K: int = 128, V: int = 64, step: int = 0, repeat: bool = False) -> str:
        def rows(count: int, width: int) -> torch.Tensor:
            return torch.empty((2, 600, count, width + step), dtype=torch.bfloat16)[..., :width]

        q, k, v, do = rows(shared, K), rows(shared, K), rows(heads, V), rows(heads, V)
        do = do[:, :1].expand(-1, 600, -1, -1) if repeat else do
        gate = torch.empty(2, 600, heads)
        inputs = q, k, v, gate, gate, None, None, None, 1.0, "ieee"
        found = {_shared_heads.refusal(v, gate, gate[0, 0], k, q), _shared_heads.refusal(*inputs)} - {None}
        return str(_shared_heads.refusal(do, None, *inputs)) if not found else found.pop()

    assert reason() == reason(step=8) == reason(16, 2) == "None"
    for wrong, why in (
        ({"heads": 7}, "heads"), ({"shared": 16}, "heads"), ({"K": 64}, "128 rows"), ({"V": 128}, "columns"),
        ({"step": 4}, "16 bytes"), ({"repeat": True}, "repeated"),
    ):  # fmt: skip
        assert why in reason(**wrong)


CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "whole chunks": ((1, 256, 8, 1), {}),
    "tokens left over, two groups, states": ((2, 150, 16, 2), {"states": True}),
    "many sequences": ((10, 150, 64, 1), {"states": True}),
    "packed": ((1, 300, 16, 1), {"ends": [0, 70, 70, 71, 300], "states": True}),
    "many packed": ((1, 1100, 64, 1), {"ends": [0, 100, 100, 101, 300, 428, 600, 700, 900, 1000, 1100]}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_results_and_bits(case: str, device: str) -> None:
    """All outputs and gradients against the recurrence in float64; a rerun gives the same bits."""
    (B, T, H, shared), given = CASES[case]
    dice = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    ends = given.get("ends")
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    N = B if ends is None else len(ends) - 1
    args = [normal(B, T, H, 64), normal(B, T, H), -2 * normal(H).sigmoid(), normal(B, T, shared, 128)]
    args += [0.1 * normal(B, T, shared, 128), normal(H)]
    state, incoming = normal(N, H, 128, 64) if given.get("states") else None, normal(B, T, H, 64).bfloat16()

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(kind, torch.float32)
        leaves = [a.bfloat16().to(kind).requires_grad_() for a in args[:5]]
        leaves += [t.to(wide).requires_grad_() for t in (args[5], state) if t is not None]
        made = ridgeline.ssd(
            *leaves[:5], D=leaves[5], impl=impl, cu_seqlens=cu_seqlens, return_state=True,
            initial_state=None if state is None else leaves[6],
        )  # fmt: skip
        return [*made, *torch.autograd.grad(made, leaves, [incoming.to(kind), torch.ones_like(made[1])])]

    found = run("gluon_chunks", torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(found, run("gluon_chunks", torch.bfloat16), strict=True))
    for n, (one, other) in enumerate(zip(found, run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm()
        assert error < 5e-3, f"result {n} is off by {error:.2e}"
