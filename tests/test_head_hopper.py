"""Linear attention's Gluon chains for Hopper: which calls they serve, how the parts of a gate's gradient join, and what
they give, run as Python (warps.py), which finds deadlocks, missing fences and places given back too early. On a GPU
their results and bits."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import boundary
from ridgeline import device as devices
from ridgeline.cuda import TensorMap
from ridgeline.lab import Law
from ridgeline.op import Spec, get
from ridgeline.ops.recurrent.hopper import delta_gradients, head_chains, head_keys, head_tiles
from ridgeline.ops.recurrent.hopper import heads as head_hopper
from ridgeline.ops.recurrent.hopper.head_gates import Parts, join_gates
from ridgeline.ops.recurrent.triton.scan import Rows
from ridgeline.select import select
from ridgeline.tiles import warpgroup
from warps import Barrier, Pointer, Shared, Turns, define, language, registers

pytestmark = pytest.mark.kernels
FACTOR = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
ROWS, WIDTH = head_hopper.ROWS, head_hopper.WIDTH
REFUSAL: Any = get("gated_linear_attention").implementations["gluon"].supports


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
        head_hopper.fwd(v, last, *inputs)
        head_hopper.bwd(dq, torch.empty_like(dq), v, dg, None, None, v, None, *inputs)
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
        return REFUSAL(rows, rows, rows, gate) or ""

    assert not reason()
    assert not reason(step=8)
    assert not reason(kind=torch.float16)
    assert "multiples of 16 bytes" in reason(step=4)
    assert "128 columns" in reason(64)
    assert "per channel" in reason(channels=128)
    row, state = torch.empty((2, 1, 4, 128), dtype=torch.float16, device="meta"), torch.empty((2, 4, 128, 128))
    others = None, 1.0, "ieee"
    assert not REFUSAL(row, row, row, row[..., 0], None, state, *others)
    assert "transpose" in str(REFUSAL(row, row, row, row[..., 0], None, state.mT, *others))


def test_both_directions_are_served() -> None:
    rows = torch.empty((8, 4096, 16, 128), dtype=torch.bfloat16, device="meta")
    with devices.pretend("h200"):
        for name, gate in (("linear_attention", None), ("gated_linear_attention", rows[..., 0])):
            inputs = rows, rows, rows, gate, None, None, None, 1.0, "ieee"
            assert select(get(name), None, *inputs, kernels=True).name == "gluon"
            assert select(get(name), None, rows, None, *inputs, direction="bwd", kernels=True).name == "gluon"


def test_a_gradient_that_begins_anywhere() -> None:
    """An incoming gradient whose rows TMA does not take is copied, a contiguous one too."""
    rows = torch.zeros((1, 64, 1, 128), dtype=torch.bfloat16)
    shifted = torch.zeros(rows.numel() + 4, dtype=torch.bfloat16)[4:].view(rows.shape)
    inputs = rows, rows, rows, None, None, None, None, 1.0, "ieee"
    with devices.pretend("h200"), boundary.observe(lambda launch: None):
        for do in (shifted, rows[:, :1].expand(rows.shape)):
            head_hopper.bwd(*[torch.empty_like(rows) for _ in "qkv"], None, None, None, do, None, *inputs)


def chunk_parts(q: Any, k: Any, v: Any, g: Any, do: Any, first: Any, dlast: Any) -> tuple[Any, ...]:
    """What the chains leave of one sequence and head, in float64: queries, keys and own (chunks, ROWS), and the states
    before chunks and their gradients after them (chunks, WIDTH, WIDTH)."""
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
    return torch.stack(queries), torch.stack(keys), own, torch.stack(before[:-1]), torch.stack(after[1:])


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
    room = -(-T // ROWS) if ends is None else T // ROWS + len(spans)
    queries, keys = (torch.full((2, H * room, ROWS), torch.nan) for _ in range(2))
    own, before, after = (torch.full((H * room, *rest), torch.nan) for rest in ((ROWS,), *2 * [(WIDTH, WIDTH)]))
    for n, (start, end) in enumerate(spans):
        for h in range(H):
            rows: Any = (t[0, start:end, h] for t in (q, k, v, g.detach(), do))
            if start == end:
                continue
            a, b, *others = chunk_parts(*[*rows, first[n, h], dlast[n, h] / scale])
            at = h * room + start // ROWS + n
            for t, found in ((queries, a), (keys, b)):
                t[0, at : at + len(found)], t[1, at : at + len(found)] = found / 4, found * 3 / 4
            for t, found in zip((own, before, after), others, strict=True):
                t[at : at + len(found)] = found
    dg = torch.empty((1, T, H), device=device)
    parts: Any = [t.to(device) for t in (queries, keys, own, before, after)]
    where = None if cu_seqlens is None else cu_seqlens.to(device)
    given = Parts._make((dg, *parts, H * room * ROWS, where, T, H, room, len(spans)))
    gate = Rows(g.detach().float().to(device), *g.stride(), 1)
    boundary.launch(join_gates, (room, H), given, gate, scale, num_warps=4)
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
    "part of a chunk": ((1, 40, 1, 1), {"states": True}),
}


class Tile(Shared):
    """Shared memory in which products and the copy engine see a thread's stores after its next fence."""

    turns: Turns
    layout = None

    def store(self, x: torch.Tensor) -> None:
        assert x.dtype == self.dtype
        self.turns.me.stored.append(lambda: self.held.copy_(x))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if self.held.dim() > 2:
            return type(self)(self.held.view(dtype))
        return type(self)(self.held.unflatten(1, (shape[0], shape[2])).transpose(0, 1))  # halves of its columns


def names_of(turns: Turns, program: int, module: Any) -> dict[str, Any]:
    """The names that a kernel's source uses."""
    names, tile = language(turns), type("Tile", (Tile,), {"turns": turns})
    define(names, warpgroup, delta_gradients, head_tiles, module)
    names |= {n: x.value for n, x in vars(head_tiles).items() if n.isupper()} | {"FAR": TensorMap.FAR}

    def read(p: Pointer, mask: Any = None, other: Any = 0.0) -> torch.Tensor:
        at = torch.as_tensor(p.at)
        return registers(p.t[at] if mask is None else torch.where(mask, p.t[torch.where(mask, at, 0)], other))

    def put(p: Pointer, x: torch.Tensor, mask: Any = True) -> None:
        at, x, mask = torch.broadcast_tensors(p.at, x, torch.as_tensor(mask))
        p.t[at[mask]] = x[mask].to(p.t.dtype)

    def fence() -> None:
        for write in getattr(turns.me, "stored", ()):
            write()
        turns.me.stored = []

    def run(works: Any, *_: Any) -> None:
        def begin(f: Any, args: Any) -> None:
            turns.me.stored = []
            f(*args)

        turns.run([lambda f=f, args=args: begin(f, args) for f, args in works])

    gl = names["gl"]
    gl.bfloat16, gl.float16, gl.load, gl.store, gl.warp_specialize = torch.bfloat16, torch.float16, read, put, run
    gl.SwizzledSharedLayout = lambda *_: Shared  # numbers that threads read alone
    gl.NVMMASharedLayout = lambda *_: tile
    gl.program_id = lambda axis: torch.tensor(program)
    gl.allocate_shared_memory = lambda dtype, shape, kind: kind(torch.full(shape, torch.nan, dtype=dtype))
    gl.associative_scan = lambda x, axis, f, reverse=False: x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)
    names |= {
        "make_barriers": lambda size, count: Shared([Barrier(count) for _ in range(size)]),
        "barrier": lambda: turns.until(lambda: True),
        "fence_async_shared": fence,
        "operand_layout": lambda parent: None,
        "sums_layout": lambda columns: None,
        "tile": tile,
    }
    return names


def as_python(monkeypatch: pytest.MonkeyPatch, seed: int, device: str) -> None:
    """The launchers' kernels run as Python on a CPU, but the one in Triton."""

    def map_of(given: Any, tile: Any) -> Any:
        if not isinstance(given, TensorMap):
            return given
        t, box = given.tensor, list(given.box)
        size = torch.Size(box).numel() * t.element_size()
        return SimpleNamespace(
            base=t, shape=t.shape, strides=t.stride(), dtype=t.dtype, layout=tile, block_shape=box,
            block_type=SimpleNamespace(shape=box, nbytes=size),
        )  # fmt: skip

    def moved(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return t.to(device, torch.float32 if t.is_floating_point() else t.dtype)  # no bfloat16 in the interpreter

    def whole(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return Pointer(t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,)))

    def launch(kernel: Any, grid: Any, scan: Any, *rest: Any, **facts: Any) -> None:
        if kernel is join_gates:
            there, gate = (bundle._make(map(moved, bundle)) for bundle in (scan, rest[0]))
            boundary.launch(kernel, grid, there, gate, *rest[1:], **facts)
            scan.dg.copy_(there.dg)
            return
        module = head_chains if kernel is head_chains.walk_heads else head_keys
        given = {n: facts[n] for n in ("STAGES", "TURNED") if n in facts}
        for program in range(grid[0]):
            names = names_of(Turns(random.Random(100 * seed + program)), program, module)
            maps = rest[0]._make([map_of(m, names["tile"]) for m in rest[0]])
            names[kernel.__name__](scan._make(map(whole, scan)), maps, *rest[1:], **given)

    monkeypatch.setattr(head_hopper, "launch", launch)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 0), (torch.float16, 1)])
def test_results_as_python(
    case: str, dtype: torch.dtype, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs and gradients in the order of any turns, against the recurrence in float64."""
    (B, T, H, HV), given = CASES[case]
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    ends, mild = given.get("ends"), given.get("mild", 1.0)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    N = B if ends is None else len(ends) - 1
    q, k, v, do = (normal(B, T, heads, 128).to(dtype) for heads in (H, H, HV, HV))
    g = None if mild is None else (mild * torch.nn.functional.logsigmoid(normal(B, T, H) + 2)).to(dtype)
    first = normal(N, HV, 128, 128) if given.get("states") else None
    dlast = torch.ones(N, HV, 128, 128)
    inputs = q, k, v, g, None, first, cu_seqlens, 128**-0.5, "ieee"
    kind = dtype if H == HV else torch.float32
    o, last, (dq, dk) = torch.empty_like(v), torch.empty_like(dlast), torch.empty(2, B, T, HV, 128, dtype=kind)
    dv, dfirst = torch.empty_like(v), None if first is None else torch.empty_like(first)
    dg = None if g is None else torch.empty(B, T, HV)
    as_python(monkeypatch, seed, device)
    head_hopper.fwd(o, last, *inputs)
    head_hopper.bwd(dq, dk, dv, dg, None, dfirst, do, dlast, *inputs)
    leaves = [t if t is None else t.double().requires_grad_() for t in (q, k, v, g, first)]
    options = {"initial_state": leaves[4], "cu_seqlens": cu_seqlens, "return_state": True, "scale": 128**-0.5}
    function: Any = ridgeline.linear_attention if g is None else ridgeline.gated_linear_attention
    outs = function(*[t for t in leaves[:4] if t is not None], impl="naive", **options)
    wanted = [t for t in leaves if t is not None]
    true = [*outs, *torch.autograd.grad(outs, wanted, [do.double(), dlast.double()])]
    shared = [t if t is None else t.unflatten(2, (H, -1)).sum(3, dtype=torch.float32) for t in (dq, dk, dg)]
    found = [t for t in (o, last, *shared[:2], dv, shared[2], dfirst) if t is not None]
    for n, (one, other) in enumerate(zip(found, true, strict=True)):
        error = (one.double() - other).norm() / other.norm()
        assert error < FACTOR[dtype], f"result {n} is off by {error:.2e}"


@pytest.mark.parametrize(("token", "forgets"), [(64, -12.0), (100, -12.0), (127, -12.0), (100, -torch.inf)])
def test_the_gradient_of_a_gate_that_forgets(
    token: int, forgets: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tiny beside the others, and as precise: no larger terms cancel in it."""
    dice = torch.Generator().manual_seed(token)
    q, k, v, do = (torch.randn(1, 192, 1, 128, generator=dice).bfloat16() for _ in range(4))
    g = torch.nn.functional.logsigmoid(torch.randn(1, 192, 1, generator=dice) + 2)
    g[:, token] = forgets
    inputs = q, k, v, g, None, None, None, 1.0, "ieee"
    dg = torch.empty_like(g)
    as_python(monkeypatch, token, device)
    head_hopper.bwd(*[torch.empty_like(q) for _ in "qkv"], dg, None, None, do, None, *inputs)
    leaf = g.double().requires_grad_()
    o = ridgeline.gated_linear_attention(q.double(), k.double(), v.double(), leaf, scale=1.0, impl="naive")
    (true,) = torch.autograd.grad(o, leaf, do.double())
    assert true[0, token].abs() < 1e-3 * true.abs().max()
    assert (dg[0, token] - true[0, token]).abs() <= 0.1 * true[0, token].abs()
    assert dg.isfinite().all()


@pytest.mark.parametrize("rung", ["triton_chunks", "triton"])
def test_a_decay_of_zero(rung: str, device: str) -> None:
    """A gate of -inf begins the sequence anew."""
    dice = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 90, 2, 16, generator=dice).half() for _ in range(4)]
    g = torch.nn.functional.logsigmoid(torch.randn(1, 90, 2, generator=dice) + 2)
    g[:, 50] = -torch.inf

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        q, k, v, do = (t.to(device, kind) for t in rows)
        leaves = [t.requires_grad_() for t in (q, k, v, g.to(device, torch.promote_types(kind, torch.float32)))]
        o = ridgeline.gated_linear_attention(*leaves, impl=impl)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    found, true = run(rung, torch.float16), run("naive", torch.float64)
    assert all((one.double() - other).norm() < 2e-3 * other.norm() for one, other in zip(found, true, strict=True))


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
@pytest.mark.parametrize("gates", ["usual", "mild", "all heads forget"])
def test_long_sequences_keep_the_law(dtype: torch.dtype, T: int, gates: str, device: str) -> None:
    dice = torch.Generator(device).manual_seed(0)
    q, k, v = (Spec(1, T, 16, 128).make(dtype, device, dice) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(1, T, 16, device=device, generator=dice) + 2)
    if gates == "mild":
        g *= 0.01
    if gates == "all heads forget":
        g[:, T // 2 + 100] = -30.0
    g = g.to(dtype).requires_grad_()
    op = get("gated_linear_attention")
    law = Law(op, [q, k, v, g], {})
    verdict = law.judge(*law.run(op.implementations["gluon"]))
    assert verdict.ok, verdict.reason()


def test_chunks_are_those_of_the_kernels() -> None:
    from ridgeline.ops.recurrent.hopper import head_gates as gates
    from ridgeline.ops.recurrent.hopper import head_tiles as tiles

    assert (ROWS, WIDTH) == (tiles.C.value, tiles.WIDE.value) == (gates.C.value, gates.WIDE.value)
