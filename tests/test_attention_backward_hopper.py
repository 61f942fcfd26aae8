"""attention's backward kernels for Hopper, run as Python (warps.py), with several programs at a time.

Ordinary stores to shared memory become visible to products and the copy engine once the writing thread reaches a
fence, so fences that are too early or too late are found. The order of dQ's sums in memory, pairs of registers, waits
for words in memory and the list of packed sequences' pieces are models.
"""

import random
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.nn.functional import pad

from attention_calls import bands, exact_partial, soft_capped
from ridgeline import device
from ridgeline.boundary import Launch, observe
from ridgeline.cuda import TensorMap
from ridgeline.op import get
from ridgeline.ops.attention.common.arguments import LOG2E, UNBOUNDED, options
from ridgeline.ops.attention.hopper import (
    backward,
    backward_dq,
    backward_launcher,
    backward_pipeline,
    backward_schedule,
    backward_sums,
    backward_wide,
    backward_work,
    pipeline,
    products,
    softmax,
)
from ridgeline.ops.attention.triton.tiles import Heads
from ridgeline.tiles import hopper as shared_hopper
from ridgeline.tiles import warpgroup
from warps import Barrier, Pointer, Shared, Turns, define, language, list_of, nbytes


class Fenced(Shared):
    """Shared memory in which products and the copy engine see a thread's stores after its next fence."""

    turns: Turns

    def store(self, x: torch.Tensor) -> None:
        values = x.clone().to(self.held.dtype)
        self.turns.me.stored.append(lambda: self.held.copy_(values))


class Kernel:
    """One program of a launch."""

    def __init__(self, launch: Launch, program: int, turns: Turns):
        self.turns, self.works = turns, []  # type: ignore[var-annotated]
        names = language(turns)
        kinds = backward_pipeline, backward_work, backward_dq, backward, backward_wide
        define(names, shared_hopper, warpgroup, pipeline, products, softmax, *kinds)
        kind = type("Fenced", (Fenced,), {"turns": turns})

        def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
            if dtype == torch.int64:
                return Shared([Barrier(0) for _ in range(shape[0])])
            if dtype == torch.int32 and len(shape) < 3:
                return Shared(torch.full(shape, -9, dtype=dtype))
            if dtype == torch.int32:  # pairs of probabilities
                dtype, shape = torch.float32, [*shape[:2], 2 * shape[2]]
            return kind(torch.full(shape, float("nan"), dtype=dtype))

        def fence() -> None:
            for write in turns.me.stored:
                write()
            turns.me.stored.clear()

        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.left = count

        def await_word(place: Pointer, count: int, found: int) -> None:
            if found < count:
                turns.until(lambda: int(place.t[place.at]) >= count)

        def add_word(place: Pointer, n: int, sem: str, scope: str) -> int:
            turns.until(lambda: True)
            old = int(place.t[place.at])
            place.t[place.at] += n
            return old

        def add(dq: torch.Tensor, dq_sums: Any, at: list[int], room: Shared, before: int) -> None:
            """Columns are in order, in memory as in shared memory."""
            (number, row, _), rows = at, 2 * dq.shape[1]
            there = dq_sums.base.as_strided(dq_sums.shape, dq_sums.strides)[number, row : row + rows]
            room.held.view(-1, 32)[:rows] = dq.T.reshape(rows, 32)
            held = room.held.view(-1, 32)[: len(there)]
            turns.me.stores.append(lambda: there.copy_(held) if before == 0 else there.add_(held))

        def hand_in(me: int, shares: Pointer, n: int, x: torch.Tensor, column: int, wide: int) -> None:
            shares.t.view(-1, 2, 64, wide)[n, me, :, column : column + x.shape[1]] = x

        def put(to: Pointer, x: torch.Tensor, mask: torch.Tensor) -> None:
            to.t[to.at[mask]] = x[mask]

        def cell(x: torch.Tensor, axis: int) -> int:
            return int(x.max())

        gl = names["gl"]
        gl.store, gl.load = put, lambda of: int(of.t[of.at])
        gl.split = lambda x: (x[..., 0], x[..., 1])
        gl.max, gl.program_id, gl.allocate_shared_memory, gl.atomic_add = cell, lambda _: program, allocate, add_word
        gl.warp_specialize = lambda works, *_: self.works.extend(works)
        names["mbarrier"].init = init
        names |= {
            "KEYS": 2, "FAR": TensorMap.FAR, "uniform": int, "barrier": lambda: None,
            "flat": lambda tile: tile.reshape(tile.shape[-2:]), "fence_async_shared": fence,
            "pack_pairs": lambda p, dtype: p.to(dtype), "pairs_to_operand": lambda p, *_: p,
            "pairs_to_float": lambda p, *_: p.float(), "in_order": lambda pairs: pairs,
            "from_order": lambda pairs, like: pairs, "load_count": lambda place: int(place.t[place.at]),
            "await_count": await_word, "await_writes": names["tma"].store_wait, "add_sums": add,
            "store_share": hand_in,
        }  # fmt: skip
        turns.me.stored = []
        args = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in launch.args]
        (at,) = [n for n, a in enumerate(args) if isinstance(a, backward_pipeline.Maps)]
        args[at] = maps = type(args[at])(*[Pointer(a) if isinstance(a, torch.Tensor) else a for a in args[at]])
        for desc in maps:
            if not isinstance(desc, Pointer):
                desc.block_type = SimpleNamespace(shape=desc.block_shape, nbytes=nbytes(desc))
                desc.dtype, desc.layout = desc.base.dtype, None
        names[launch.kernel.__name__](*args, RULES=launch.constants["RULES"])

    def groups(self) -> list[Any]:
        def work(function: Any, args: tuple[Any, ...]) -> None:
            self.turns.me.stored = []
            function(*args)

        return [lambda f=f, a=a: work(f, a) for f, a in self.works]


def calls(dice: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    D = dice.choice((16, 40, 64, 72, 96, 128, 128, 200, 256))
    step = dice.choice((1, 64, 128))
    rows, columns = (step * dice.randint(1, 400 // step) for _ in range(2))
    given: dict[str, Any] = {"causal": dice.choice((False, True, "bottom_right"))}
    if dice.random() < 0.25:
        given["window"] = dice.choice(((100, None), (70, 64), (None, 128), (200, 3), (300, 0)))
        if not given["causal"]:
            given["window_align"] = dice.choice(("top_left", "bottom_right"))
    if given["causal"] and "window" not in given and dice.random() < 0.5:
        given["prefix"] = dice.randint(1, columns + 70)
    if dice.random() < 0.4:
        given["softcap"] = dice.choice((0.7, 2.0))
    return (dice.choice((1, 2)), dice.choice((1, 2)), dice.choice((1, 1, 2, 4)), rows, columns, D), given


def lies(n: int, heads: int, blocks: int, section: int, down: bool, span: int) -> tuple[int, int]:
    """Returns the head of the n-th piece, and its first key."""
    head = n // (section * blocks) * section
    many, n = min(section, heads - head), n % (section * blocks)
    return head + n % many, (blocks - 1 - n // many if down else n // many) * span


def run_programs(launch: Launch, few: int, dice: random.Random) -> None:
    """Runs the kernel's programs, so many at a time, or so many if programs stay."""
    programs = few if launch.constants["RULES"].STAY else launch.grid[0]
    for first in range(0, programs, few):
        turns = Turns(dice)
        kernels = [Kernel(launch, program, turns) for program in range(first, min(first + few, programs))]
        turns.run([work for kernel in kernels for work in kernel.groups()])


def add_parts(launched: list[Launch]) -> tuple[int, int]:
    """Does what `_join` does. Returns how many pieces are in parts, and D."""
    (join,) = [one for one in launched if one.kernel is backward_sums._join]
    *to, shares, length, whole, parts, heads, turns, blocks, shared, scale = join.args
    rules = join.constants["RULES"]
    assert (join.grid, rules.BD) == ((shares.shape[0] // parts, 8), shares.shape[-1])
    for x in to:
        t = x.data
        assert all(t.shape[n] == 1 or step * rules.UNIT == t.stride(n) for n, step in enumerate(x[1:]))
    for n, left in enumerate(shares.unflatten(0, (-1, parts))[..., : rules.D].sum(1), whole):
        turn, start = lies(n, turns, blocks, heads, join.constants["DOWN"], 128)
        for x, keys, factor in zip(to, left, (scale, 1), strict=True):
            x.data[divmod(turn, shared)][start : start + 128] = keys[: length - start] * factor
    return join.grid[0], rules.D


@pytest.mark.parametrize("seed", range(6))
def test_partial_gradients_of_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks dq, dk and dv of the ring's calls, in float32: any band, packed sequences, and o and lse over other keys.

    Some rows see no key here and some no key anywhere, and some pieces are in parts."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    get("attention_varlen")  # loads the torch ops
    for n in range(6):
        packed = n % 3 == 2
        (B, kv, group, rows, columns, D), given = calls(dice)
        softcap = given.get("softcap", 0.0)
        B, columns = (1, rows) if packed else (B, columns)
        left, right = bands(dice, rows, columns)
        cu = sorted([0, *[dice.randint(0, rows) for _ in range(dice.randint(0, 4))], rows]) if packed else [0, rows]
        dtype = dice.choice((torch.bfloat16, torch.float16))
        q, do = (torch.randn(B, kv * group, rows, D).to(dtype) for _ in range(2))
        k, v = (torch.randn(B, kv, columns, D).to(dtype) for _ in range(2))
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        o, lse = exact_partial(*exact, cu if packed else None, left, right, D**-0.5, softcap)
        # As if other keys, with values of 0.5, took a part of each row.
        more = torch.logaddexp(
            lse, torch.randn(lse.shape).double().masked_fill(torch.rand(lse.shape) < 0.2, -torch.inf)
        )
        share = (lse - more).exp().nan_to_num(0.0)[..., None]
        merged = o * share + 0.5 * (1 - share).masked_fill((more == -torch.inf)[..., None], 0)
        expected = torch.autograd.grad(merged, exact, do.double())
        merged, more = merged.detach(), more.detach()

        launched: list[Launch] = []
        few, section = dice.randint(1, 3), dice.randint(1, 2 * B * kv)
        down = right < UNBOUNDED and dice.random() < 0.7
        monkeypatch.setattr(backward_launcher, "head_section", lambda *_, s=section, down=down: (s, down))
        pieces, split = B * kv * -(-columns // 128), dice.choice((1, 1, 2, 3))
        entire = pieces if split == 1 else dice.randint(0, pieces - 1)
        monkeypatch.setattr(backward_launcher, "split_work", lambda *_, shared=(entire, split): shared)
        ends = torch.tensor(cu, dtype=torch.int32) if packed else None
        options = ends, D**-0.5, softcap, left, right, "ieee", "gluon"
        with device.pretend("sm_90"), observe(launched.append):
            found = torch.ops.ridgeline.attention_partial_bwd(do, None, q, k, v, merged.float(), more.float(), *options)
        (launch,) = [one for one in launched if one.kernel.__name__.startswith("_bwd")]
        assert launch.constants["RULES"].FLOAT == D
        for t in found:
            t.fill_(float("nan"))
        (maps,) = [a for a in launch.args if isinstance(a, backward_pipeline.Maps)]
        order, (sums, tops, deltas) = launch.args[0], (a.base for a in (maps.dq_sums, maps.lse, maps.delta))
        order.zero_(), sums.fill_(float("nan")), tops.fill_(torch.inf), deltas.zero_()
        delta = (merged * do.double()).sum(-1).float()
        scaled = more.float().masked_fill(more == -torch.inf, torch.inf) * LOG2E
        tiles = rows // 64 + len(cu) if packed else -(-rows // 64)
        blocks = [  # first row, end, and number of each block of a head
            (row, min(row + 64, cu[n + 1]), (cu[n] // 64 + n) * packed + (row - cu[n]) // 64)
            for n in range(len(cu) - 1)
            for row in range(cu[n], cu[n + 1], 64)
        ]
        for to, numbers in ((tops, scaled), (deltas, delta)):
            for row, end, number in blocks:
                to.view(B * kv * group, tiles, 64)[:, number, : end - row] = numbers[:, :, row:end].flatten(0, 1)
        args = list(launch.args)
        if packed:
            args[1] = list_of(cu, cu, 64 if D > 128 else 128, dice)
        if launch.kernel is backward._bwd and args[2] is not None:
            args[2].fill_(float("nan"))
        run_programs(Launch(launch.kernel, launch.grid, tuple(args), launch.constants, launch.device), few, dice)
        if launch.kernel is backward._bwd and launch.args[2] is not None:
            add_parts(launched)
        parts = torch.where((order[1:] > 0)[:, None, None], sums.view(-1, D, 64), 0.0).mT * D**-0.5
        for row, end, number in blocks:
            mine = parts.view(B, kv * group, tiles, 64, D)[:, :, number, : end - row]
            found[0][:, :, row:end] = mine
        said = f"{tuple(q.shape)} {columns} {left} {right} {cu} {softcap=} {dtype}"
        said += f" {few} programs, {section} {down=} {split=}"
        for name, one, other in zip("qkv", found, expected, strict=True):
            assert one.dtype == torch.float32
            assert not one.any() or (one != one.to(dtype)).any(), f"{said}: d{name} was rounded"
            what = f"{said}: d{name}"
            torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks dq, dk and dv of calls of all kinds, deterministic and not, with several programs at a time.

    Pieces of the first call are in parts by heads of queries, in one turn of heads or in several. The next two have a
    softcap, whose slope reaches dS in ways of their own at D 256 and D 128, and few keys, so that gradients are large.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for n in range(5):
        (B, kv, group, rows, columns, D), given = calls(dice)
        if n == 0:
            group, D, given = (
                dice.choice((2, 4)),
                dice.choice((64, 72, 128)),
                {"causal": dice.choice((True, "bottom_right"))},
            )
        if n in (1, 2):
            D, rows, columns = (256, 128)[n - 1], dice.randint(65, 190), dice.randint(20, 100)
            given["softcap"] = dice.choice((0.7, 2.0))
        dtype, deterministic = dice.choice((torch.bfloat16, torch.float16)), dice.random() < 0.5
        q, do = (torch.randn(B, kv * group, rows, D).to(dtype) for _ in range(2))
        k, v = (torch.randn(B, kv, columns, D).to(dtype) for _ in range(2))
        band = options(D, **given).band(rows, columns)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        scores = soft_capped(exact[0] @ exact[1].repeat_interleave(group, 1).mT * D**-0.5, given.get("softcap"))
        if band is not None:
            scores = scores.masked_fill(~band.seen(rows, columns, torch.device("cpu")), -torch.inf)
        o = scores.softmax(-1).nan_to_num(0) @ exact[2].repeat_interleave(group, 1)
        expected = torch.autograd.grad(o, exact, do.double())
        lse, o = scores.logsumexp(-1).float().detach(), o.detach().to(dtype)

        launched: list[Launch] = []
        found = [torch.full_like(t, float("nan")) for t in (q, k, v)]
        few, section = dice.randint(1, 3), dice.randint(1, 2 * B * kv)
        down = deterministic and given["causal"] is not False and dice.random() < 0.7
        monkeypatch.setattr(backward_launcher, "head_section", lambda *_, s=section, down=down: (s, down))
        pieces, split = B * kv * -(-columns // 128), dice.randint(1, 3) if n else 2
        entire = pieces if split == 1 else dice.randint(0, pieces - 1) if n else 0
        monkeypatch.setattr(backward_launcher, "split_work", lambda *_, shared=(entire, split): shared)
        apart = dice.choice([m for m in (1, 2, 4) if group % m == 0 and (n or m > 1)])
        monkeypatch.setattr(backward_launcher, "heads_apart", lambda *_, apart=apart: apart)
        chosen = options(D, **given)
        with device.pretend("sm_90"), observe(launched.append):
            backward_launcher.bwd(
                *found, None, do, None, q, k, v, o, lse, None, None, None, None, *chosen, 0, 0, "ieee", deterministic
            )
        (launch,) = [one for one in launched if one.kernel.__name__.startswith("_bwd")]
        by_heads = launch.constants["RULES"].APART
        assert by_heads == apart or n
        split = split if by_heads == 1 else by_heads
        (maps,) = [a for a in launch.args if isinstance(a, backward_pipeline.Maps)]
        order, (sums, tops, deltas) = launch.args[0], (a.base for a in (maps.dq_sums, maps.lse, maps.delta))
        tiles = -(-rows // 64)
        beyond = (0, tiles * 64 - rows)
        tops.copy_(pad(lse.masked_fill(lse == -torch.inf, torch.inf) * LOG2E, beyond, value=torch.inf).view(-1, 64))
        deltas.copy_(pad((o.float() * do.float()).sum(-1), beyond).view(-1, 64))
        order.zero_(), sums.fill_(float("nan"))
        if launch.kernel is backward._bwd and launch.args[2] is not None:
            launch.args[2].fill_(float("nan"))  # partial results of parts

        run_programs(launch, few, dice)
        parts = torch.where((order[1:] > 0)[:, None, None], sums.view(-1, D, 64), 0.0).mT * D**-0.5
        found[0].copy_(parts.reshape(B, kv * group, -1, D)[:, :, :rows])
        if split > 1 and launch.kernel is backward._bwd:
            entire = entire if by_heads == 1 else 0
            assert add_parts(launched) == (pieces - entire, D)
        what = f"{tuple(q.shape)} {columns} {given} {deterministic=} {few} programs, sections of {section}, {down=}"
        what += f", {by_heads=}"
        for name, one, other in zip("qkv", found, expected, strict=True):
            said = lambda m, what=f"{what}: d{name}": f"{what}: {m}"  # noqa: E731
            torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2, msg=said)


@pytest.mark.parametrize("l2", [50, 60])
def test_which_pieces_come_first(l2: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads per section, and whether the lightest pieces come first, as timed on an H100 and on an H200."""
    # Batch, heads, shared by, length, D; causal; in order; packed; on an H100; on an H200.
    cases: list[tuple[tuple[int, ...], bool, bool, bool, tuple[int, bool], tuple[int, bool]]] = [
        ((4, 8, 4, 4096, 128), True, True, False, (16, False), (32, False)),
        ((4, 8, 4, 4096, 128), True, False, False, (16, False), (32, False)),
        ((4, 8, 4, 4096, 128), False, True, False, (8, False), (32, False)),
        ((4, 16, 1, 4096, 128), True, True, False, (6, True), (6, True)),
        ((4, 16, 1, 4096, 128), True, False, False, (8, False), (16, False)),
        ((4, 16, 1, 4096, 128), False, True, False, (8, False), (16, False)),
        ((16, 16, 1, 1024, 128), False, True, False, (16, False), (16, False)),
        ((16, 16, 1, 1024, 128), True, True, False, (16, True), (24, True)),
        ((2, 16, 1, 8192, 128), True, True, False, (3, True), (32, False)),
        ((1, 16, 1, 16384, 128), True, True, False, (1, True), (16, False)),
        ((1, 16, 1, 16384, 128), False, True, False, (4, False), (16, False)),
        ((1, 16, 1, 16384, 128), False, False, False, (4, False), (16, False)),
        ((1, 16, 1, 16384, 128), True, False, False, (4, False), (16, False)),
        ((2, 16, 1, 8192, 128), False, False, False, (8, False), (16, False)),
        ((4, 2, 4, 4096, 256), True, True, False, (4, False), (8, False)),
        ((4, 8, 1, 4096, 256), True, True, False, (4, True), (4, True)),
        ((4, 8, 1, 4096, 256), True, False, False, (4, False), (8, False)),
        ((4, 8, 1, 4096, 256), False, True, False, (4, False), (4, False)),
        ((4, 8, 4, 4096, 64), False, True, False, (8, False), (8, False)),
        ((4, 8, 4, 4096, 64), True, True, False, (32, False), (32, False)),
        ((4, 32, 1, 4096, 64), True, True, False, (12, True), (12, True)),
        ((4, 32, 1, 4096, 64), True, False, False, (16, False), (16, False)),
        ((4, 32, 1, 4096, 64), False, False, False, (12, False), (12, False)),
        ((4, 2, 8, 16384, 128), False, True, False, (8, False), (8, False)),
        ((1, 8, 4, 8192, 128), True, True, True, (8, False), (1, True)),
        ((1, 16, 1, 8192, 128), True, True, True, (3, True), (3, True)),
        ((1, 16, 1, 16384, 128), False, True, True, (8, False), (16, False)),
    ]
    monkeypatch.setattr(device, "stand_in", replace(device.known("sm_90"), l2=l2 << 20))
    for (batch, heads, group, length, D), causal, ordered, packed, *expected in cases:
        q, k = (torch.empty(batch, n, length, D, device="meta") for n in (heads * group, heads))
        found = backward_schedule.head_section(q, k, length, 64 if D > 128 else 128, ordered, causal, False, packed)
        assert found == expected[l2 > 50], (batch, heads, group, length, D, causal, ordered, packed)


class Piece(SimpleNamespace):
    """`backward_work.Work` as Python."""

    def __init__(self, scheduler: Any, batch: int, head: int, first: int, low: int, blocks: int, share: int, *_: Any):
        super().__init__(scheduler=scheduler, place=(batch, head), k_start=first, low=low, blocks=blocks, share=share)
        self.batch, self.head = batch, head

    def __getattr__(self, name: str) -> Any:
        return partial(python(getattr(backward_work.Work, name)), self)


def python(jitted: Any) -> Any:
    gl = SimpleNamespace(cdiv=triton.cdiv, minimum=min, maximum=max, where=lambda c, x, y: x if c else y)
    return FunctionType(jitted.fn.__code__, {"gl": gl, "ROWS": 64, "Work": Piece})


def test_a_packed_sequence_keeps_the_numbers_of_its_call() -> None:
    """All but its blocks of queries, keys and shift; kernels read the call's own scale and softcap, so values agree."""
    sizes, scale = backward_work.Sizes(*range(11)), backward_work.Scale(11, 12, 13)
    call = SimpleNamespace(**sizes._asdict(), **scale._asdict(), RULES="rules", PACKED=True, SPAN=64, SPLIT=False)
    names = {"Sizes": backward_work.Sizes, "Scale": backward_work.Scale, "WorkScheduler": lambda *given: given}
    found = FunctionType(backward_work.WorkScheduler.of_sequence.fn.__code__, names)(call, 20, 21, 22)
    assert found == (sizes._replace(tiles=20, columns=21, shift=22), scale, "rules", True, 64, False)


def test_pieces_of_backward_on_hopper() -> None:
    """Each piece of work comes up once, whole or in parts, and takes all blocks of queries that see its keys.

    It masks the blocks that do not see all of them, and knows how many pieces with lower numbers add to each block.
    Parts are numbered as `_join` expects. Parts by heads have all blocks of some heads of queries."""
    dice = random.Random(0)
    for _ in range(60):
        span, rows, columns, kv, group = (
            dice.choice(c) for c in ((64, 128), range(1, 500), range(1, 500), (1, 2), (1, 2, 4))
        )
        by_heads = dice.choice([n for n in (1, 1, 2, 4) if group % n == 0])
        left, right = dice.choice([(None, None), (None, 0), (200, 0), (3, 2), (70, None), (None, 150)])
        shift, turns = dice.choice((0, columns - rows)), 2 * kv * by_heads
        facts = {
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "DOWN": right is not None and dice.random() < 0.7,
            "GROUP": group // by_heads,
            "APART": by_heads,
            "PREFIX": right is not None and left is None and dice.random() < 0.5,
        }
        first = dice.randint(1, columns + 70) if facts["PREFIX"] else 0
        sizes = {
            "heads": kv * group,
            "section": dice.randint(1, turns),
            "key_heads": turns,
            "tiles": -(-rows // 64),
            "columns": columns,
        }
        pieces, parts = turns * -(-columns // span), dice.choice((1, 1, 2, 5)) if by_heads == 1 else 1
        sizes |= {
            "entire": pieces if parts == 1 else dice.randint(0, pieces - 1),
            "parts": parts,
            "SPLIT": parts > 1 or by_heads > 1,
        }
        call = SimpleNamespace(**sizes, RULES=SimpleNamespace(**facts), PACKED=False, SPAN=span, shift=shift)
        call.window_left, call.window_right = first or left, right
        items = call.entire + parts * (pieces - call.entire)
        works = [python(backward_work.WorkScheduler.work)(call, n, 0, 0, 0, 0) for n in range(items)]
        apart = torch.arange(columns) - torch.arange(rows)[:, None] - shift
        seen = (apart <= (columns + rows if right is None else right)) & (
            apart >= -(columns + rows if left is None else left)
        )
        seen |= torch.arange(columns) < first
        adders: dict[Any, list[Piece]] = {}
        unseen: dict[Any, torch.Tensor] = {}
        heads: set[Any] = set()
        for n, p in enumerate(works):
            number = n if n < call.entire else call.entire + (n - call.entire) // parts
            if by_heads == 1:
                assert (p.share < 0) if n < call.entire else (p.share == n - call.entire)
            else:
                place = divmod(p.place[0] * kv * by_heads + p.place[1], by_heads)
                assert lies(p.share // by_heads, 2 * kv, -(-columns // span), 1, False, span) == (place[0], p.k_start)
                assert p.share % by_heads == place[1]
            for g in range(group // by_heads):
                assert p.queries(g, 0)[1] // group == p.keys(0)[1]
                heads.add((p.k_start, p.queries(g, 0)[:2]))
            mine = unseen.setdefault(number, seen[:, p.k_start : p.k_start + span].clone())
            head, first = lies(number, turns, -(-columns // span), call.section, call.RULES.DOWN, span)
            assert (divmod(head, kv * by_heads), first) == (p.place, p.k_start)
            for block in (p.block(n) for n in range(p.blocks)):
                tile = mine[block * 64 : block * 64 + 64]
                assert p.masked(block * 64) or (tile.shape[1] == span and tile.all())
                tile[:] = False
                adders.setdefault((*p.place, block), []).append(p)
        assert len({(*p.place, p.k_start) for p in works}) == pieces == len(unseen)
        assert len(heads) == pieces // by_heads * group
        assert not any(mine.any() for mine in unseen.values())
        for (*_, block), those in adders.items():
            assert [p.before(block) for p in those] == list(range(len(those)))


def test_which_pieces_go_in_parts() -> None:
    """Pieces that stay whole, and the parts of the others, follow the measured costs."""
    # Heads of keys, shared by, queries, keys, D; left, right.
    full, causal = (UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0)
    cases: list[tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]] = [
        ((4, 4, 2048, 2048, 128), full, (0, 2)),  # 334 to 521 TFLOP/s
        ((4, 4, 2048, 2048, 128), causal, (0, 3)),  # 162 to 235 in two, 301 in four
        ((1, 8, 8192, 8192, 128), causal, (0, 6)),  # 179 to 529, in four parts 462
        ((8, 4, 2048, 2048, 64), causal, (0, 2)),
        ((4, 1, 4096, 4096, 128), full, (128, 1)),
        ((4, 1, 4096, 4096, 128), causal, (128, 1)),  # 307 in two parts 275
        ((8, 1, 1024, 1024, 128), full, (64, 1)),
        ((32, 1, 16384, 16384, 64), full, (4092, 8)),  # 31.03 rounds
        ((16, 1, 16384, 16384, 128), full, (2048, 1)),
        ((4, 8, 8192, 8192, 128), causal, (256, 1)),  # a heavy and a light piece for each program
        ((8, 8, 64, 4096, 128), full, (256, 1)),  # one block of queries cannot be split
        ((16, 1, 8192, 128, 128), full, (0, 8)),
        ((16, 1, 8192, 128, 128), (UNBOUNDED, 128 - 8192), (16, 1)),  # only the last queries see anything
    ]
    for (turns, group, rows, columns, D), (left, right), expected in cases:
        most, tiles = -(-columns // 128), -(-rows // 64)
        found = backward_schedule.split_work(most, turns, False, group, tiles, 0, left, right, D, 132)
        assert found == expected, (turns, group, rows, columns, D, left, right, found)


def test_which_pieces_go_in_parts_by_heads() -> None:
    """Causal pieces of shared heads up to D 128: as timed on an H200, or where the count of parts is as good."""
    timed = {(1, 8, 8192): 8, (8, 4, 2048): 4}  # heads of keys, shared by, length: 791 to 664 us, 251 to 236
    counted = {(1, 8, 16384): 4, (4, 7, 4096): 1, (1, 2, 2048): 1, (1, 4, 4096): 1, (1, 32, 4096): 16, (2, 4, 4096): 4}
    for (kv, group, length), expected in (timed | counted).items():
        for ordered in (True, False):
            assert rules_of(kv, group, length, 128, ordered, causal=True).APART == expected, (kv, group, length)
    assert rules_of(1, 8, 8192, 64, True, causal=True).APART == 8  # 470 to 381 us
    for kv, group, length, D, given in [
        (1, 8, 8192, 128, {}), (1, 8, 8192, 128, {"causal": True, "window": (4096, 0)}),
        (1, 8, 8192, 256, {"causal": True}), (8, 4, 8192, 128, {"causal": True}),
        (64, 8, 256, 128, {"causal": True}),
        (32, 1, 4096, 128, {"causal": True}),
    ]:  # fmt: skip
        assert rules_of(kv, group, length, D, True, **given).APART == 1, (kv, group, length, D, given)


def rules_of(kv: int, group: int, length: int, D: int, ordered: bool, **given: Any) -> Any:
    """Returns what the backward kernel of a call in bfloat16 is compiled for."""
    launched: list[Launch] = []
    q, k = (torch.empty(1, n, length, D, device="meta", dtype=torch.bfloat16) for n in (kv * group, kv))
    chosen, lse = options(D, **given), torch.empty(1, kv * group, length, device="meta")
    with device.pretend("sm_90"), observe(launched.append):
        backward_launcher.bwd(
            q, k, k, None, q, None, q, k, k, q, lse, None, None, None, None, *chosen, 0, 0, "ieee", ordered
        )
    (found,) = [one.constants["RULES"] for one in launched if one.kernel.__name__.startswith("_bwd")]
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(("D", "down", "entire", "parts"), [(64, False, 5, 3), (80, True, 0, 2), (128, False, 16, 4)])
def test_parts_are_added_up(D: int, down: bool, entire: int, parts: int, device: str) -> None:
    B, kv, columns, section, wide = 2, 3, 300, 2, -(-D // 64) * 64
    shares = torch.randn(18 - entire, parts, 2, 128, wide, device=device)
    dk, dv = (torch.full((B, columns, kv, D), float("nan"), device=device).transpose(1, 2) for _ in range(2))
    given, numbers = (
        [Heads(t, *t.stride()[:3]) for t in (dk, dv)],
        (columns, entire, parts, section, B * kv, 3, kv, 0.5),
    )
    rules = backward_sums.converting_rules(D, wide, 0, 1)
    backward_sums._join[18 - entire, 8](*given, shares, *numbers, DOWN=down, RULES=rules)
    for n, left in zip(range(entire, 18), shares.sum(1), strict=True):
        head, first = lies(n, B * kv, 3, section, down, 128)
        for found, sums in zip((dk, dv), left * torch.tensor([0.5, 1.0], device=device)[:, None, None], strict=True):
            mine = found[head // kv, head % kv, first : first + 128]
            torch.testing.assert_close(mine, sums[: columns - first, :D])
            mine.fill_(float("nan"))
    assert dk.isnan().all()
    assert dv.isnan().all()
