"""attention's forward kernel for Hopper, run as Python (warps.py): finds overwriting of probabilities that a product
still reads.

Gluon's compilation and inline PTX are not covered: `watch_overflow`, `overflowed`, `cut_columns`, the records of tiles
and the list of packed sequences' tiles are models here.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import ridgeline
from attention_calls import bands, exact_partial, soft_capped
from ridgeline import device
from ridgeline.boundary import Launch, observe
from ridgeline.cuda import TensorMap
from ridgeline.lab.analysis import inspect as lab_inspect
from ridgeline.op import get
from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.ops.attention.hopper import (
    epilogue,
    forward,
    launcher,
    mask,
    pipeline,
    products,
    scheduler,
    softmax,
)
from ridgeline.select import select
from ridgeline.tiles import warpgroup
from test_kernels import OWN
from test_matmul import said_of
from warps import Barrier, Pointer, Shared, Turns, define, language, list_of, nbytes, registers


class Kernel:
    """One program of a launch."""

    def __init__(self, launch: Launch, program: int, dice: random.Random):
        self.facts, self.turns, self.named, self.again, self.scores = (
            launch.constants["RULES"],
            Turns(dice),
            {0: 0, 1: 0},
            0,
            Counter[int](),
        )
        self.lse, self.sinks, self.listed, self.maps, self.sizes, self.scale = launch.args
        self.program, self.programs = program, launch.grid[0]

    def names(self) -> dict[str, Any]:
        """The names that the source uses."""
        turns = self.turns
        names = language(turns)
        define(names, warpgroup, pipeline, products, mask, softmax, scheduler, epilogue, forward)

        def store(to: Pointer, x: torch.Tensor, mask: torch.Tensor) -> None:
            to.t[to.at[mask]] = x[mask]

        def load(of: Pointer) -> Any:
            found = of.t[of.at]
            return found if found.dtype.is_floating_point else int(found)

        def draw(of: Pointer, n: Any, mask: Any, sem: str) -> torch.Tensor:
            turns.until(lambda: True)
            of.t[0] += 1
            return torch.where(mask, of.t[0] - 1, 0)

        def named(me: int, waits: bool) -> None:
            if waits:
                turns.until(lambda: self.named[me] > 0)
                self.named[me] -= 1
            else:
                assert not self.named[me], "a group is let go twice"
                self.named[me] += 1

        def pack(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            """Held in the registers of the last warps: these have no shared memory of their own."""
            old = getattr(turns.me, "packed", None)
            if old is None:
                turns.me.packed = old = p.to(dtype)
            return old.copy_(p)

        def watch(me: int, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            turns.me.beyond = not bool((sums <= 2 ** (15 if dtype == torch.float16 else 60)).all())
            return sums

        def beyond(me: int) -> bool:
            turns.until(lambda: True)
            self.again += turns.me.beyond
            return turns.me.beyond

        def write(board: list[Any], n: int, *fields: int) -> None:
            board[n & 1] = fields

        def cut(s: torch.Tensor, last: torch.Tensor, keep: bool = True) -> torch.Tensor:
            return registers(s.masked_fill((torch.arange(s.shape[1]) > last[:, None]) == keep, -torch.inf))

        started = names["start_scores"]

        def scores(*args: Any) -> torch.Tensor:
            self.scores[get_ident()] += 1
            return started(*args)

        gl = names["gl"]
        gl.num_programs, gl.program_id, gl.store = lambda _: self.programs, lambda _: self.program, store
        gl.load, gl.atomic_add = load, draw
        names |= {
            "NO_KEYS": -1e30,
            "FAR": TensorMap.FAR,
            "gdc_wait": lambda: None,
            "uniform": int,
            "named_barrier": named,
            "pack_pairs": pack,
            "write_record": write,
            "read_record": lambda records, n, ALL: records[n & 1],
            "cut_columns": cut,
            "declare_overflow": lambda *_: None,
            "watch_overflow": watch,
            "overflowed": beyond,
            "pairs_to_operand": lambda p, dtype, layout: p,
            "start_scores": scores,
        }
        return names

    def run(self) -> None:
        names, facts, maps = self.names(), self.facts, self.maps
        groups, wide = facts.GROUPS, maps.q.block_shape[-1]
        plan = object.__new__(names["TileScheduler"])
        plan.__dict__.update(self.sizes._asdict(), **self.scale._asdict(), RULES=facts, BM=64 * groups)
        plan.PACKED = self.listed is not None

        def ring(source: Any, size: int, readers: int) -> Any:
            made = object.__new__(names["Ring"])
            made.tiles = Shared(torch.full((size, *source.block_shape), float("nan"), dtype=source.base.dtype))
            made.ready, made.free = (Shared([Barrier(count) for _ in range(size)]) for count in (1, readers))
            made.SIZE = size
            return made

        for desc in maps[: 3 if facts.FLOAT else 4]:
            desc.block_type = SimpleNamespace(shape=desc.block_shape, nbytes=nbytes(desc))
            desc.dtype = desc.base.dtype
        qs = ring(maps.q, groups if wide > 128 else 2 * groups, 1)
        ks, vs = (ring(source, facts.STAGES, groups) for source in (maps.k, maps.v))
        rings = forward.Rings(qs, ks, vs, [None, None])
        sinks = None if self.sinks is None else Pointer(self.sinks)
        out, listed = Pointer(maps.o) if facts.FLOAT else maps.o, None if self.listed is None else Pointer(self.listed)
        works = [lambda g=g: names["consumer"](g, out, Pointer(self.lse), sinks, rings, plan) for g in range(groups)]
        self.turns.run([*works, lambda: names["producer"](listed, maps, rings, plan)])


def calls(dice: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    D = dice.choice((16, 64, 64, 72, 96, 128, 200, 256))
    kv, group = dice.choice((1, 2)), dice.choice((1, 1, 3))
    step = dice.choice((1, 64, 128))
    rows, columns = (step * dice.randint(1, 640 // step) for _ in range(2))
    given: dict[str, Any] = {"causal": dice.choice((False, True, "bottom_right"))}
    if dice.random() < 0.2:
        given["window"] = dice.choice(((100, None), (70, 64), (None, 128), (200, 3), (300, 0)))
    if not given["causal"] and "window" in given:
        given["window_align"] = dice.choice(("top_left", "bottom_right"))
    if given["causal"] and "window" not in given and dice.random() < 0.5:
        given["prefix"] = dice.randint(1, columns + 70)
    if dice.random() < 0.3:
        given["softcap"] = dice.choice((0.7, 20.0))
    return (dice.choice((1, 2)), kv, group, rows, columns, D), given


@pytest.mark.parametrize("seed", range(8))
def test_every_row_of_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks o and lse of calls of all kinds, with two and three groups of warps, and more tiles than programs.

    In some calls keys grow from the last to the first, the order of the blocks: exponentials relative to the first
    block's maxima overflow."""
    from ridgeline.ops.attention.common.arguments import options

    dice, again = random.Random(seed), Counter[int]()
    torch.manual_seed(seed)
    sure: list[Any] = [
        ((1, 1, 1, 100, 500, 64), {"causal": False}),
        ((2, 1, 1, 448, 576, 72), {"causal": "bottom_right", "window": (64, 0)}),
    ]
    for n in range(10):  # the first two have blocks that are recomputed
        (B, kv, group, rows, columns, D), given = sure[n] if n < 2 else calls(dice)
        shapes = (B, kv * group, rows, D), (B, kv, columns, D), (B, kv, columns, D)
        dtype = dice.choice((torch.bfloat16, torch.float16))
        q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
        grown = n < 2 or dice.random() < 0.4
        if grown:
            queries, keys = (8, 30) if n < 2 else (dice.choice((1, 8)), dice.choice((4, 30)))
            q *= queries
            k *= torch.linspace(keys, 0, columns)[:, None].to(dtype)
        sinks = dice.choice((None, torch.tensor([-torch.inf, 4.0, 1000.0, -1000.0, 0.0, 30.0])[: kv * group]))
        launched: list[Launch] = []
        groups, couples = dice.choice((2, 3)) if D <= 96 or D == 128 else 2, dice.randint(0, B * kv * group // 2)
        monkeypatch.setattr(launcher, "consumer_groups", lambda *_, groups=groups: groups)
        monkeypatch.setattr(launcher, "paired_heads", lambda *_, couples=couples: couples)
        with device.pretend("sm_90"), observe(launched.append):
            o, lse = ridgeline.attention(q, k, v, return_lse=True, impl="gluon", sinks=sinks, **given)
        (launch,) = [one for one in launched if one.kernel is forward._fwd]
        o.fill_(float("nan")), lse.fill_(float("nan"))
        programs = min(launch.grid[0], dice.randint(1, 4))
        launch = Launch(launch.kernel, (programs,), launch.args, launch.constants, launch.device)
        for program in range(programs):
            kernel = Kernel(launch, program, dice)
            kernel.run()
            assert grown or not kernel.again, f"{tuple(q.shape)} {columns} {given}: a block was made again for nothing"
            again[launch.constants["RULES"].MASKS] += kernel.again
        band = options(D, **given).band(rows, columns)
        scores = soft_capped(q.double() @ k.double().repeat_interleave(group, 1).mT * D**-0.5, given.get("softcap"))
        if band is not None:
            scores = scores.masked_fill(~band.seen(rows, columns, torch.device("cpu")), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(B, -1, rows, 1)], -1)
            v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
        expected = scores.softmax(-1).nan_to_num(0) @ v.double().repeat_interleave(group, 1)
        what = f"{tuple(q.shape)} {columns} {given} {groups} groups, {programs} programs"
        torch.testing.assert_close(o.double(), expected, atol=2e-2, rtol=2e-2, msg=lambda m, what=what: f"{what}: {m}")
        torch.testing.assert_close(
            lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4, msg=lambda m, what=what: f"{what}: lse: {m}"
        )
    assert set(again.elements()) >= {1, 3}, "no block's exponentials were beyond what is kept"


@pytest.mark.parametrize("seed", range(8))
def test_partial_results_of_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks o and lse of the ring's calls, in float32: any band, packed sequences, rows without keys."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for n in range(8):
        packed = n % 3 == 2
        (B, kv, group, rows, columns, D), given = calls(dice)
        softcap = given.get("softcap", 0.0)
        B = 1 if packed else B
        columns = rows if packed else columns
        left, right = bands(dice, rows, columns)
        cu = sorted([0, *[dice.randint(0, rows) for _ in range(dice.randint(0, 4))], rows]) if packed else [0, rows]
        ends = torch.tensor(cu, dtype=torch.int32) if packed else None
        dtype = dice.choice((torch.bfloat16, torch.float16))
        q = torch.randn(B, kv * group, rows, D).to(dtype)
        k, v = (torch.randn(B, kv, columns, D).to(dtype) for _ in range(2))
        groups = dice.choice((2, 3)) if D <= 96 or D == 128 else 2
        monkeypatch.setattr(launcher, "consumer_groups", lambda *_, groups=groups: groups)
        launched: list[Launch] = []
        get("attention_varlen")  # loads the torch ops
        with device.pretend("sm_90"), observe(launched.append):
            options = ends, D**-0.5, softcap, left, right, "ieee", "gluon"
            o, lse = torch.ops.ridgeline.attention_partial_fwd(q, k, v, *options)
        (launch,) = [one for one in launched if one.kernel is forward._fwd]
        assert launch.constants["RULES"].FLOAT == D
        o.fill_(float("nan")), lse.fill_(float("nan"))
        args = list(launch.args)
        args[2] = list_of(cu, cu, 64 * groups, dice) if packed else None
        programs = min(launch.grid[0], dice.randint(1, 4))
        launch = Launch(launch.kernel, (programs,), tuple(args), launch.constants, launch.device)
        for program in range(programs):
            Kernel(launch, program, dice).run()
        wanted, sums = exact_partial(q, k, v, cu if packed else None, left, right, D**-0.5, softcap)
        said = (
            f"{tuple(q.shape)} {columns} {left} {right} {cu} {softcap=} {groups} groups, {programs} programs, {dtype}"
        )
        assert o.dtype == torch.float32
        assert left + right == 0 or (o != o.to(dtype)).any() or not o.any(), f"{said}: o was rounded"
        torch.testing.assert_close(o.double(), wanted, atol=2e-2, rtol=2e-2, msg=lambda m, w=said: f"{w}: {m}")
        torch.testing.assert_close(lse.double(), sums, atol=1e-4, rtol=1e-4, msg=lambda m, w=said: f"{w}: lse: {m}")


def test_a_large_softcap_is_left_to_triton() -> None:
    """The rounding of Hopper's tanh, times such a cap, would show; `gluon` says so in a sentence."""
    op = get("attention")
    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 2, 256, device="meta")

    def serving(softcap: float) -> set[str]:
        rest = None, None, None, None, 0.125, softcap, UNBOUNDED, UNBOUNDED, False, 0, 0, 0, "ieee"
        back = select(op, None, q, None, q, q, q, q, lse, *rest, True, direction="bwd", kernels=True)
        return {select(op, None, q, q, q, *rest, kernels=True).name, back.name}

    with device.pretend("sm_90"):
        assert serving(0.0) == serving(1000.0) == {"gluon"}
        assert serving(1e5) == {"triton"}
        ridgeline.attention(q, q, q, softcap=1000.0, impl="gluon")
        with pytest.raises(ridgeline.RidgelineError, match="softcap of at most 1000") as said:
            ridgeline.attention(q, q, q, softcap=1e5, impl="gluon")
        assert "\n" not in str(said.value)


def test_windows_that_three_groups_serve() -> None:
    """Causal windows of 256 to 2048 keys at D 128 in long sequences, whose rounds are full with higher tiles too."""
    for heads, rows, left in [
        (16, 16384, 256),
        (16, 16384, 1024),
        (16, 16384, 2048),
        (128, 4096, 512),
        (32, 8192, 1000),
    ]:
        assert scheduler.consumer_groups(128, heads, rows, left, 0, False, 132) == 3, (heads, rows, left)
    for D, heads, rows, left, right, packed in [
        (128, 16, 16384, 255, 0, False), (128, 16, 16384, 2049, 0, False), (128, 16, 16384, UNBOUNDED, 0, False),
        (128, 16, 16384, 1024, 1, False), (128, 16, 16384, 1024, 0, True), (128, 128, 4096, 1024, 0, False),
        (128, 256, 2048, 256, 0, False), (128, 16, 8192, 1024, 0, False), (120, 16, 16384, 1024, 0, False),
        (256, 16, 16384, 1024, 0, False),
    ]:  # fmt: skip
        assert scheduler.consumer_groups(D, heads, rows, left, right, packed, 132) == 2, (D, heads, rows, left, right)


def test_groups_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute the scores of one block per tile, and those that a group prepares for a tile that never comes."""
    launched: list[Launch] = []
    monkeypatch.setattr(launcher, "consumer_groups", lambda *_: 3)
    q, k = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 640, 64, dtype=torch.bfloat16)
    with device.pretend("sm_90"), observe(launched.append):
        ridgeline.attention(q, k, k, impl="gluon")
    launch = Launch(launched[0].kernel, (1,), launched[0].args, launched[0].constants, launched[0].device)
    kernel = Kernel(launch, 0, random.Random(0))
    kernel.run()
    assert sorted(kernel.scores.values()) == [2 + 1, 2 + 1, 2 * 5 + 1]


@pytest.mark.parametrize("groups", [2, 3])
def test_ragged_tiles_of_full_attention(groups: int) -> None:
    """Every tile comes once. With three groups, tiles with an empty group come last; else a head's last tile is its
    first."""
    dice, names = random.Random(groups), {"ROWS": 64, "gl": SimpleNamespace()}
    define(names, warpgroup, scheduler)
    for _ in range(200):
        heads, rows, high = dice.randint(1, 9), dice.randint(1, 2000), 64 * groups
        tiles, plan = -(-rows // high), object.__new__(names["TileScheduler"])
        rules = SimpleNamespace(LEFT=False, RIGHT=False)
        plan.__dict__.update(all_heads=heads, tiles=tiles, rows=rows, BM=high, RULES=rules)
        places = [plan.place(t) for t in range(heads * tiles)]
        assert sorted(places) == [(head, tile * high) for head in range(heads) for tile in range(tiles)]
        ends = [n for n, (_, row) in enumerate(places) if row == (tiles - 1) * high]
        late = groups == 3 and rows <= tiles * high - 64
        assert ends == (
            list(range(heads * (tiles - 1), heads * tiles)) if late else list(range(0, heads * tiles, tiles))
        )


def loads(heads: int, tiles: int, couples: int, section: int, programs: int, more: int = 0) -> list[float]:
    """Returns the work of each program: blocks of keys, `more` for all tiles, and 1.5 for a tile; checks that each
    tile comes once."""
    names: dict[str, Any] = {
        "gl": SimpleNamespace(num_programs=lambda _: programs, minimum=min, where=lambda c, x, y: x if c else y)
    }
    define(names, warpgroup, scheduler)
    plan, taken, found = object.__new__(names["TileScheduler"]), set(), []
    facts = {
        "all_heads": heads,
        "tiles": tiles,
        "head_pairs": couples,
        "section": section,
        "BM": 128,
        "RULES": SimpleNamespace(LEFT=False, RIGHT=True),
    }
    plan.__dict__.update(facts)
    for program in range(programs):
        names["gl"].program_id = lambda _, program=program: program
        n, load = 0, 0.0
        while (t := plan.nth(n)) < heads * tiles:
            head, row = plan.place(t)
            assert 0 <= head < heads
            assert 0 <= row < tiles * 128
            assert (head, row) not in taken
            taken.add((head, row))
            n, load = n + 1, load + row / 128 + 2.5 + more
        found.append(load)
    assert len(taken) == heads * tiles
    return found


def test_every_tile_is_taken_once() -> None:
    dice = random.Random(0)
    for _ in range(200):
        heads, tiles, programs = dice.randint(1, 40), dice.randint(1, 20), dice.randint(1, 30)
        couples = dice.randint(0, heads // 2)
        loads(heads, tiles, couples, dice.randint(1, max(1, heads - 2 * couples)), programs)
        couples = scheduler.paired_heads(
            heads, tiles * dice.choice((1, 10)), programs, dice.randint(0, 10), dice.randint(0, 9)
        )
        assert 0 <= 2 * couples <= heads


@pytest.mark.parametrize(
    ("heads", "tiles", "programs", "more", "least"),
    [
        (256, 8, 132, 0, 0.985),
        (128, 16, 132, 0, 0.99),
        (64, 32, 132, 0, 0.99),
        (64, 33, 132, 0, 0.99),
        (16, 128, 132, 0, 0.99),
        (80, 24, 132, 0, 0.99),
        (32, 64, 114, 0, 0.99),
        (128, 16, 78, 0, 0.99),
        (1000, 4, 132, 0, 0.985),
        (160, 2, 132, 16, 0.8),
        (96, 4, 132, 32, 0.96),
        (64, 32, 132, 32, 0.97),
    ],
)
def test_causal_programs_end_together(heads: int, tiles: int, programs: int, more: int, least: float) -> None:
    """Programs are busy for at least this share of the longest program's time.

    Pairs alone keep 132 programs busy for 0.970 of it if the number of tiles is a power of two. For chunks at the end
    of long keys (`more`) all tiles are nearly equal, so their number decides."""
    couples = scheduler.paired_heads(heads, tiles, programs, 1000, more)
    found = loads(heads, tiles, couples, heads - 2 * couples, programs, more)
    assert sum(found) / programs / max(found) > least
    if not more:
        assert 0.9 * programs < (heads - 2 * couples) * tiles / 2 < 2.1 * programs
        assert heads - 2 * scheduler.paired_heads(heads, tiles, programs, 0, 0) <= math.ceil(2 * programs / tiles) + 1


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("columns", [64, 128])
def test_masks_by_bits(columns: int, keep: bool) -> None:
    """The inline PTX sets scores beyond, or up to, a row's last column to -inf, for each thread that shares a row."""
    operations: dict[str, Callable[..., int]] = {
        "and": lambda a, b: a & b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "sub": lambda a, b: a - b,
        "add": lambda a, b: a + b, "min": min, "max": max, "setp": lambda a, b: (a != b) == keep, "mov": lambda a: a,
        "bmsk": lambda at, n: ((1 << n) - 1) << at, "selp": lambda a, b, keep: a if keep else b,
    }  # fmt: skip
    N = columns // 2
    text, operands = warpgroup.cutting_code(N, keep)
    assert text.count("setp.ne" if keep else "setp.eq") == N
    assert operands == ",".join(["=f"] * N + [str(n) for n in range(N)] + ["r"] * N)
    lines = [line.strip() for line in text.strip("{} ").split(";") if line.strip() and ".reg" not in line]
    for thread in range(4):
        where = [(n % 4 // 2, n // 4 * 8 + 2 * thread + n % 2) for n in range(N)]  # row, column
        for last in (*range(-9, 137), -(10**6), 10**6):
            lasts = last, 3 - last  # the two rows'
            held: dict[str, Any] = {"%laneid": thread + 4, "0fFF800000": None} | {
                f"${n}": column for n, (_, column) in enumerate(where)
            }
            held |= {f"${2 * N + n}": lasts[row] for n, (row, _) in enumerate(where)}
            for line in lines:
                name, to, *sources = line.replace(",", "").split()
                values = [held[x] if x in held else int(x) for x in sources]
                held[to] = operations[name.split(".")[0]](*values)
            assert [held[f"${n}"] for n in range(N)] == [
                column if (column <= lasts[row]) == keep else None for row, column in where
            ]


@pytest.mark.compiles
@pytest.mark.parametrize(("given", "masks"), [
    ({"causal": "bottom_right"}, 2), ({"causal": "bottom_right", "window": (1000, 0)}, 2), ({"window": (100, None)}, 2),
    ({"window": (1000, 0)}, 3),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("D", [64, 128])
def test_products_with_masks_are_not_serialized(D: int, given: dict[str, Any], masks: int, tmp_path: Path) -> None:
    """With a mask in the loop, ptxas waits early but overlaps products: it must not report that it serialises them."""
    launched: list[Launch] = []
    with device.pretend("sm_90"), observe(launched.append):
        q, k = (torch.empty(4, 32, n, D, dtype=torch.bfloat16, device="meta") for n in (4096, 4101))
        ridgeline.attention(q, k, k, impl="gluon", **given)
    assert launched[0].constants["RULES"].MASKS == masks
    found = lab_inspect.of_launch(launched[0], True)
    few = 16 if launched[0].constants["RULES"].GROUPS == 3 and D == 128 else 0  # bytes that spill, between tiles
    assert masks == 2 or triton.__version__ != OWN or max(found.spill_loads, found.spill_stores) <= few
    said = said_of(found, tmp_path)
    assert "serial" not in said
    assert "C75" not in said


@pytest.mark.compiles
@pytest.mark.parametrize("D", [64, 128])
def test_partial_calls_are_not_serialized(D: int, tmp_path: Path) -> None:
    """Float32 stores take no registers from the loops: forward spills nothing, and ptxas serialises no products."""
    launched: list[Launch] = []
    get("attention")  # loads the torch ops
    with device.pretend("sm_90"), observe(launched.append):
        q, k = (torch.empty(1, n, 8192, D, dtype=torch.bfloat16, device="meta") for n in (32, 8))
        options = None, 0.1, 0.0, UNBOUNDED, 0, "ieee", "gluon"
        o, lse = torch.ops.ridgeline.attention_partial_fwd(q, k, k, *options)
        torch.ops.ridgeline.attention_partial_bwd(q, None, q, k, k, o, lse, *options)
    some = [one for one in launched if "RULES" in one.constants and hasattr(one.constants["RULES"], "FLOAT")]
    assert [one.constants["RULES"].FLOAT for one in some] == [D, D]
    for one in some:
        found = lab_inspect.of_launch(one, True)
        said = said_of(found, tmp_path)
        assert "serial" not in said
        assert "C75" not in said
        assert one.kernel is not forward._fwd or triton.__version__ != OWN or found.spill_loads == 0


@pytest.mark.compiles
@pytest.mark.parametrize(("D", "causal", "dtype"), [
    (128, False, torch.bfloat16), (128, True, torch.float16), (64, False, torch.bfloat16), (80, False, torch.bfloat16),
    (256, False, torch.bfloat16),
])  # fmt: skip
def test_exponentials_come_before_the_wait(D: int, causal: bool, dtype: torch.dtype) -> None:
    """In the machine code of the loop over blocks, scores are awaited, then all exponentials computed, then the other
    products awaited.

    Each group of warps has its own register and barrier to signal that sums are too large."""
    launched: list[Launch] = []
    with device.pretend("sm_90"), observe(launched.append):
        q = torch.empty(4, 32, 4096, D, dtype=dtype, device="meta")
        ridgeline.attention(q, q, q, causal=causal, impl="gluon")
    found, facts = lab_inspect.of_launch(launched[0], True), launched[0].constants["RULES"]
    assert triton.__version__ != OWN or found.spill_loads == found.spill_stores == 0
    most = {torch.float16: "47000000", torch.bfloat16: "5D800000"}[dtype]
    for group in range(facts.GROUPS):
        ptx, flag = found.texts["ptx"], f"overflow{group}"
        assert ptx.count(f".reg .pred {flag};") == 1
        assert ptx.count(f"barrier.cta.red.or.pred {flag}, {10 + group}, 128, {flag};") == 1
        test = rf"setp.gtu(.*).f32 {flag}, %r?f?\d+, 0f{most}(.*);$"
        above = re.findall(test, ptx.replace("; ", ";\n"), re.M)
        assert above == [("", "")] + [(".or", f", overflow{group}")] * 3
    code = re.findall(r"^\s*(?:(\.L_x_\d+):|/\*\w{4,}\*/\s+(.*?) *;)", found.texts["sass"], re.M)
    labels = {label: n for n, (label, _) in enumerate(code) if label}
    tokens = [
        (n, what[0])
        for n, (_, line) in enumerate(code)
        if (what := re.findall(r"HGMMA|MUFU.EX2|WARPGROUP.DEPBAR", line))
    ]
    orders = {}  # after the first product of a loop
    for n, (_, line) in enumerate(code):
        back = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if back and labels[back[1]] < n:
            inside = [i for i, (at, what) in enumerate(tokens) if labels[back[1]] < at < n and what == "HGMMA"]
            if inside:
                orders[inside[0]] = [what for _, what in tokens[inside[0] :]]
    firsts = [o.index("WARPGROUP.DEPBAR") for o in orders.values()]
    wanted = [
        ["HGMMA"] * n + ["WARPGROUP.DEPBAR"] + ["MUFU.EX2"] * (facts.BN // 2) + ["WARPGROUP.DEPBAR"] for n in firsts
    ]
    kept = [o[: len(w)] == w and n > D // 16 for o, w, n in zip(orders.values(), wanted, firsts, strict=True)]
    assert sum(kept) == facts.GROUPS, orders


def test_the_far_coordinate_is_the_maps() -> None:
    assert warpgroup.FAR.value == TensorMap.FAR
