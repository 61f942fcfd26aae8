"""Hopper's 8-bit matrix products without a GPU: results box by box, order at barriers, refusals."""

import random
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import ridgeline
from ridgeline import device as devices
from ridgeline import tuning
from ridgeline.boundary import Launch, observe
from ridgeline.lab.analysis import inspect
from ridgeline.op import RidgelineError, get
from ridgeline.ops.matmul import _hopper, _hopper8
from ridgeline.ops.matmul._scaled import blocks
from test_matmul import PLACE, box, put, said_of
from test_matmul import emulate as emulate_copy

E4M3 = torch.float8_e4m3fn


def flat(t: torch.Tensor, at: Any) -> torch.Tensor:
    """Returns the elements of a tensor by their distance in memory from its first."""
    return t.as_strided((1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())),), (1,))[at]


def emulate(launch: Launch) -> None:
    """Computes on the CPU what a launch of these kernels would, tile by tile, step by step and box by box."""
    if launch.kernel.__name__ == "_align":
        launch.args[0].fill_(77)  # the columns beyond a copy must not count
        emulate_copy(launch)
        return
    if launch.kernel.__name__ == "_columns":
        sums, b, N, K, b_k, b_n = launch.args
        sums.copy_(b.as_strided((K, N), (b_k, b_n)).sum(0))
        return
    (y, out), (a, b, _), (scale_a, scale_b, zero_a, sums, bias), M, N, steps, *strides = launch.args
    a_row, a_block, b_column, b_block, zero_step, bias_step = strides
    tile = launch.constants["tile"]
    rows, wide = tile.ROWS, tile.BN
    tiles = SimpleNamespace(M=M, N=N, steps=steps, batch=1, parts=1, BM=2 * rows, BN=wide, GROUP=tile.GROUP)
    piece = min(wide, 128)
    for t in range(triton.cdiv(M, 2 * rows) * triton.cdiv(N, wide)):
        m, n, batch, _, low, high = PLACE(tiles, t)
        for first in (m, m + rows):
            i, j = (first + torch.arange(rows)).clamp(max=M - 1), n + torch.arange(wide)
            total = torch.zeros(rows, wide, dtype=torch.float32 if a.base.is_floating_point() else torch.int32)
            for k in range(low, high):
                part = box(a, [0, first, 128 * k]).to(total.dtype) @ box(b, [0, n, 128 * k]).to(total.dtype).T
                if launch.constants["BLOCKS"]:
                    columns = [
                        min(n // 128 + p, triton.cdiv(N, 128) - 1) * b_column + k * b_block
                        for p in range(wide // piece)
                    ]
                    part *= flat(scale_a, i * a_row + k * a_block)[:, None]
                    part *= flat(scale_b, torch.tensor(columns)).repeat_interleave(piece)
                total += part
            inside = j.clamp(max=N - 1)
            if zero_a is not None:
                total -= flat(zero_a, i * zero_step)[:, None].int() * sums[inside]
            x = total.float()
            if not launch.constants["BLOCKS"]:
                x = x * flat(scale_a, i * a_row)[:, None] * flat(scale_b, inside * b_column)
            if bias is not None:
                x = x + flat(bias, inside * bias_step).float()
            put(out, y[None], x, int(batch), first, n, N)


def operand(lines: int, K: int, whole: bool, dice: random.Random) -> torch.Tensor:
    """Returns (lines, K) with rows at multiples of 16 bytes, perhaps a slice of more."""
    room = torch.randint(-128, 128, (lines + 2, triton.cdiv(K, 16) * 16 + 32), dtype=torch.int8)
    room = room if whole else torch.randn(room.shape).to(E4M3)
    return dice.choice(
        (room[1 : lines + 1, 16 : 16 + K], room[:lines, :K].contiguous() if K % 16 == 0 else room[:lines, :K])
    )


def anyhow(lines: int, K: int, whole: bool, dice: random.Random) -> torch.Tensor:
    """Returns (lines, K) with rows anywhere, every second element, or its columns; one row for all, or as in
    `operand`."""
    room = torch.randint(-128, 128, (lines + 1, 2 * K + 3), dtype=torch.int8)
    room = room if whole else torch.randn(room.shape).to(E4M3)
    pieces = [room[1:, 1 : K + 1], room[1:, :K].contiguous(), room[1:, 1 : 2 * K : 2], room[1:, :K].T.contiguous().T]
    return dice.choice((*pieces, *pieces, room[:1, 1 : K + 1].expand(lines, K), operand(lines, K, whole, dice)))


def scale(rows: int, columns: int, dice: random.Random) -> torch.Tensor:
    return dice.choice((torch.rand(rows, columns), torch.rand(columns, rows).T, torch.rand(rows, 2 * columns)[:, ::2]))


@pytest.mark.parametrize("impl", ["gluon", "gluon_padded"])
@pytest.mark.parametrize("op", ["fp8 rows", "fp8 blocks", "int8"])
def test_products_tile_by_tile(op: str, impl: str) -> None:
    """Launches, emulated on the CPU, have correct maps, steps, places of scales, edges and copies."""
    dice, made = random.Random(0), []
    torch.manual_seed(0)

    def see(launch: Launch) -> None:
        name = launch.kernel.__name__
        made.append((name, name == "_fwd" and launch.args[0].out is None))
        emulate(launch)

    with devices.pretend("sm_90"), observe(see):
        for _ in range(25):
            M, N, K = (
                dice.choice((1, 17, 129, 300)),
                dice.choice((1, 8, 136, 300, 392)),
                dice.choice((16, 100, 128, 300, 640)),
            )
            lie = operand
            if impl == "gluon_padded":
                N, K, lie = dice.choice((N, 1, 37, 261)), dice.choice((K, 1, 129, 257, 1101)), anyhow
            a, b = lie(M, K, op == "int8", dice), lie(N, K, op == "int8", dice).T
            deep = triton.cdiv(K, 128)
            scales = scale(M, 1, dice), dice.choice((scale(1, N, dice), torch.rand(1)))
            if op == "fp8 blocks":
                scales = scale(M, deep, dice), scale(deep, triton.cdiv(N, 128), dice)
            bias = dice.choice((None, torch.randn(N), torch.randn(2 * N)[::2]))
            options: dict[str, Any] = {"bias": bias, "out_dtype": dice.choice((torch.float16, torch.bfloat16))}
            if op == "int8":
                options["out_dtype"] = dice.choice((torch.bfloat16, torch.float32))
                options["zero_a"] = dice.choice(
                    (None, *[torch.randint(-128, 128, (rows, 1), dtype=torch.int32) for rows in (M, 1)])
                )
            function = ridgeline.int8_matmul if op == "int8" else ridgeline.fp8_matmul
            tile = _hopper.tile_of(*dice.choice(_hopper8.TILES), False)
            with tuning.listen(lambda request, tile=tile: tile if request.kernel == "hopper" else None):
                y = function(a, b, *scales, **options, impl=impl)
            exact = function(
                a, b, *[s.double() for s in scales], **options | {"out_dtype": torch.float64}, impl="naive"
            )
            rtol = 8e-3 if y.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=1e-5 * float(exact.abs().max()))
    assert {one for name, one in made if name == "_fwd"} == {True, False}
    assert ("_align" in {name for name, _ in made}) == (impl == "gluon_padded")


class Barrier:
    """Emulates `mbarrier`: a phase ends after this many arrivals, and a wait for a parity ends with the phase of that
    parity."""

    def __init__(self, count: int):
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0, "more arrivals than a phase has"
        if not self.pending:
            self.phase, self.pending = self.phase + 1, self.count

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity


def program(pipelined: bool, stages: int, steps: int, tiles: int, lag: int, dice: random.Random) -> list[list[Any]]:
    """Runs the parts of a program in random order from wait to wait; returns what each group read of the ring, and
    should have.

    Products of floats are not pipelined: a separate warp brings their scales."""
    sources = 1 if pipelined else 2
    ready, free, begun = [Barrier(sources) for _ in range(stages)], [Barrier(2) for _ in range(stages)], Barrier(1)
    ring: list[list[Any]] = [[None] * sources for _ in range(stages)]
    read: list[list[Any]] = [[], []]

    def after(place: int, odd: int) -> tuple[int, int]:
        return (place + 1) % stages, odd ^ (place + 1 == stages)

    def fetch(source: int) -> Generator[Any]:
        place, odd = 0, 0
        for t in range(tiles):
            for k in range(steps):
                yield free[place], odd ^ 1
                ring[place][source] = t, k
                ready[place].arrive()
                place, odd = after(place, odd)

    def multiply(me: int) -> Generator[Any]:
        place, odd = 0, 0
        for t in range(tiles):
            if pipelined and me * lag and t == 0:
                yield ready[min(lag, steps - 1)], 0
            elif not pipelined and me == 1 and t == 0:
                yield begun, 0
            given = None
            for k in range(steps):
                yield ready[place], odd
                if not pipelined and me == 0 and t == 0 and k == min(lag, steps - 1):
                    begun.arrive()
                yield None  # products run
                read[me].append((list(ring[place]), [(t, k)] * sources))
                if pipelined and given is not None:
                    free[given].arrive()
                if not pipelined:
                    free[place].arrive()
                given = place
                place, odd = after(place, odd)
            if pipelined:
                free[given].arrive()

    parts = {part: next(part, "end") for part in (*map(fetch, range(sources)), multiply(0), multiply(1))}
    while parts:
        able = [
            part for part, wanted in parts.items() if wanted is None or wanted == "end" or wanted[0].over(wanted[1])
        ]
        assert able, (stages, steps, tiles, lag)
        part = dice.choice(able)
        if parts[part] == "end":
            del parts[part]
        else:
            parts[part] = next(part, "end")
    return read


@pytest.mark.parametrize("pipelined", [False, True])
def test_barriers_in_any_order_of_warps(pipelined: bool) -> None:
    """No part waits forever, and each multiplies the right data.

    pipelined: a step is released while the next one's products run."""
    for seed in range(300):
        dice = random.Random(seed)
        stages, steps, tiles = dice.choice((3, 4, 6, 8)), dice.randint(1, 9), dice.randint(1, 4)
        for group in program(pipelined, stages, steps, tiles, dice.randint(0, min(2, stages - 2)), dice):
            assert [found for found, _ in group] == [wanted for _, wanted in group]
            assert len(group) == steps * tiles


@pytest.mark.parametrize(
    ("rows", "columns", "K", "kernel"),
    [(64, 48, 64, ""), (65, 48, 64, "_hopper8"), (16, 8192, 1024, ""), (64, 8192, 1024, "")],
)
@pytest.mark.parametrize("name", ["int8_matmul", "fp8_matmul"])
def test_few_rows_are_left_to_smaller_tiles(name: str, rows: int, columns: int, K: int, kernel: str) -> None:
    """Serves calls of any size if nothing needs a copy."""
    started: list[str] = []
    a, b = (torch.zeros(lines, K, dtype=torch.int8) for lines in (rows, columns))
    a, b = (a, b) if name == "int8_matmul" else (a.view(E4M3), b.view(E4M3))
    with devices.pretend("sm_90"), observe(lambda launch: started.append(launch.kernel.__module__.rsplit(".", 1)[1])):
        get(name).function(a, b.T, torch.ones(1), torch.ones(1))
    assert started == [kernel or name]


@pytest.mark.parametrize(
    ("rows", "columns", "how", "kernel"),
    [
        (17, 8192, "blocks", "_hopper8"),
        (16, 8192, "blocks", "fp8_matmul"),
        (17, 8064, "blocks", "fp8_matmul"),
        (17, 8192, "rows", "fp8_matmul"),
    ],
)
def test_few_rows_by_blocks(rows: int, columns: int, how: str, kernel: str) -> None:
    """For a wide weight in blocks, 64 rows were faster with tiles of 128, and 16 with smaller ones and K in parts."""
    started: list[str] = []
    a, b = torch.zeros(rows, 1024).to(E4M3), torch.zeros(columns, 1024).to(E4M3).T
    deep, wide = (8, columns // 128) if how == "blocks" else (1, columns)
    with devices.pretend("sm_90"), observe(lambda launch: started.append(launch.kernel.__module__.rsplit(".", 1)[1])):
        ridgeline.fp8_matmul(a, b, torch.ones(rows, deep), torch.ones(deep, wide))
    assert started == [kernel]


LAID = {
    "as they are": lambda t: t,
    "rows": lambda t: t[:, :-1].contiguous(),
    "beginning": lambda t: t[:, 1:],
    "columns": lambda t: t.T.contiguous().T,
}
KEPT = torch.zeros(1024, 1024, dtype=torch.int8)


@pytest.mark.parametrize("how", LAID)
@pytest.mark.parametrize("name", ["int8_matmul", "fp8_matmul"])
def test_what_serves_operands_that_lie_anyhow(name: str, how: str) -> None:
    """Copies operands if they need it and there is enough work; otherwise nothing is copied."""
    codes = KEPT if name == "int8_matmul" else KEPT.view(E4M3)

    def kernels(a: torch.Tensor, b: torch.Tensor) -> list[str]:
        seen: list[Any] = []
        with devices.pretend("sm_90"), observe(lambda launch: seen.append(launch.kernel)):
            get(name).function(a, b.T, torch.ones(1), torch.ones(1))
        return [f"{kernel.__module__.rsplit('.', 1)[1]}.{kernel.__name__}" for kernel in seen]

    laid, copy, product = LAID[how](codes), ["_hopper._align"], ["_hopper8._fwd"]
    assert kernels(laid, laid) == copy * (0 if how == "as they are" else 2) + product
    if how != "as they are":
        fine = torch.zeros(1024, 1024, dtype=torch.int8).view(codes.dtype)[:, : laid.shape[1]]
        assert kernels(laid, fine) == kernels(fine, laid) == copy + product
        for M, N, K in ((64, 512, 512), (512, 512, 512)):
            a, b = LAID[how](codes[:M, :K]), LAID[how](codes[:N, :K])
            assert kernels(a, b) == [f"{name}._fwd"]


@pytest.mark.gpu
@pytest.mark.parametrize("how", list(LAID)[1:])
@pytest.mark.parametrize("op", ["fp8 rows", "fp8 blocks", "int8"])
def test_copies_change_no_bit(op: str, how: str) -> None:
    """The same bits as `gluon` gives for operands that it takes as they are."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rungs are Hopper's")
    function = ridgeline.int8_matmul if op == "int8" else ridgeline.fp8_matmul
    for M, N, K in ((300, 264, 642), (129, 137, 1106), (1024, 1032, 1042)):
        a, b = (torch.randint(-128, 128, (lines, K), dtype=torch.int8, device="cuda") for lines in (M, N))
        if op != "int8":
            a, b = (t.float().div(32).to(E4M3) for t in (a, b))
        moved = [LAID[how](t) for t in (a, b)]
        K = moved[0].shape[1]
        fine = [t.new_empty(t.shape[0], 2048)[:, :K].copy_(t) for t in moved]
        assert all(_hopper.whole(t) for t in fine)
        assert not any(_hopper.whole(t) for t in moved)
        deep, wide = (triton.cdiv(K, 128), triton.cdiv(N, 128)) if op == "fp8 blocks" else (1, N)
        given = torch.rand(M, deep, device="cuda"), torch.rand(deep, wide, device="cuda")
        options: dict[str, Any] = {"bias": torch.randn(N, device="cuda")}
        if op == "int8":
            options["zero_a"] = torch.randint(-128, 128, (M, 1), dtype=torch.int32, device="cuda")
        wanted = function(fine[0], fine[1].T, *given, **options, impl="gluon")
        for _ in range(3):  # the third call is replayed
            assert torch.equal(function(moved[0], moved[1].T, *given, **options, impl="gluon_padded"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["fp8_matmul", "int8_matmul"])
@pytest.mark.parametrize("sizes", [(4097, 2048, 1040), (300, 520, 4096), (130, 4104, 256), (77, 45, 160)], ids=str)
def test_scales_of_rows_and_columns(op: str, sizes: tuple[int, int, int]) -> None:
    """Scales of each row and column, by every tile: several tiles a program, edges, results that threads write."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rung is Hopper's")
    M, N, K = sizes
    dice = torch.Generator("cuda").manual_seed(M)
    dtype = torch.int8 if op == "int8_matmul" else torch.float8_e4m3fn
    a, b = ((torch.randn(n, K, device="cuda", generator=dice) * 20).clamp(-100, 100).to(dtype) for n in (M, N))
    scales = torch.rand(M, 1, device="cuda", generator=dice), torch.rand(1, N, device="cuda", generator=dice)
    bias = (torch.randn(N, device="cuda", generator=dice) * 100 * K**0.5).bfloat16()  # as large as the products
    ways: list[dict[str, Any]] = [{}, {"bias": bias}]
    if dtype == torch.int8:
        zeros = torch.randint(-9, 9, (M, 1), dtype=torch.int32, device="cuda", generator=dice)
        ways += [{"zero_a": zeros, "bias": bias}, {"out_dtype": torch.float32}]
    for tile in _hopper8.TILES:
        for options in ways:
            with tuning.listen(lambda request, t=tile: _hopper.tile_of(*t, False)):
                first, again = (getattr(ridgeline, op)(a, b.T, *scales, impl="gluon", **options) for _ in range(2))
            assert torch.equal(first, again)
            exact = (a.double() - options.get("zero_a", 0)) @ b.double().T * scales[0] * scales[1] + options.get(
                "bias", 0
            )
            near = 1e-5 if first.dtype == torch.float32 else 8e-3
            torch.testing.assert_close(first.double(), exact, rtol=near, atol=near / 8 * exact.abs().max().item())


def test_what_is_refused() -> None:
    a, b = torch.zeros(32, 64).to(E4M3), torch.zeros(48, 64).to(E4M3).T
    one, scales = torch.ones(1), (torch.ones(32, 1), torch.ones(1, 1))
    rows = b.contiguous()
    odd = torch.zeros(32, 40).to(E4M3)
    deep, single = torch.zeros(32, 144).to(E4M3), (torch.ones(32, 2), torch.ones(2, 48))
    wide = torch.zeros(48, 144).to(E4M3).T
    assert _hopper8.refusal(a, b, one, one) is None
    assert _hopper8.refusal(a, b, *scales) is None
    assert blocks(deep, wide, *single) == 1
    assert blocks(a, b, scales[0], torch.ones(1, 48)) == 1  # which is also contiguous by columns
    assert _hopper8.refusal(a, b, scales[0], torch.ones(1, 48)) is None
    for words, given, options in (
        ("b's columns must be contiguous", (a, rows, one, one), {}),
        ("a's rows must be contiguous", (torch.zeros(64, 32).to(E4M3).T, b, one, one), {}),
        ("begin at multiples of 16 bytes", (odd, torch.zeros(40, 48).to(E4M3).T.contiguous().T, one, one), {}),
        ("too coarse", (a, b, one, one), {"out_dtype": torch.float32}),
        ("single columns", (deep, wide, *single), {}),
        ("size 0", (a[:0], b, one, one), {}),
    ):
        reason = _hopper8.refusal(*given, **options)
        assert words in str(reason), (words, reason)
        with devices.pretend("sm_90"), pytest.raises(RidgelineError, match="'gluon'"):
            ridgeline.fp8_matmul(*given, **options, impl="gluon")
        copied = words.startswith(("b's", "a's", "begin"))
        assert _hopper8.odd(*given, **options) == (None if copied else reason)
    with devices.pretend("sm_90"), observe(lambda launch: None):
        whole = torch.zeros(32, 64, dtype=torch.int8)
        assert ridgeline.int8_matmul(whole, whole.T, one, one, out_dtype=torch.float32, impl="gluon").shape == (32, 32)


def test_rules_fit_their_machine() -> None:
    gpu = devices.known("sm_90")
    ruled = [_hopper8.rule(gpu, *sizes) for sizes in ((1, 1, 1), (500, 300, 40), (8192, 8192, 8192))]
    for choice in _hopper8.space() + ruled:
        rows, wide = choice["ROWS"], choice["BN"]
        stage = 128 * (2 * rows + wide) + 4 * (2 * rows + 2)  # operands and scales
        assert choice["STAGES"] * stage + 2 * choice["BOARDS"] * rows * 128 + 640 <= gpu.shared_memory
        alone = 8 * (rows + wide)  # both groups' scales, of rows and columns
        assert (
            choice["STAGES"] * 128 * (2 * rows + wide) + 2 * choice["BOARDS"] * rows * 128 + alone + 512
            <= gpu.shared_memory
        )
        assert choice["LAG"] < choice["STAGES"] - 1
        assert set(choice) == {"ROWS", "BN", "STAGES", "BOARDS", "GROUP", "LAG"}
    assert (ruled[-1]["ROWS"], ruled[-1]["BN"]) == (64, 256)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["fp8_matmul", "int8_matmul"])
def test_products_are_not_serialized(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """ptxas overlaps products with the arrival of scales and the sums: otherwise it would say so."""
    op, dtype = get(name), {"fp8_matmul": "float8_e4m3fn", "int8_matmul": "int8"}[name]
    cases = [
        c for c in op.cases if c.name in ("4096x4096x4096", "4096x4096x4096 rows", "4096x4096x4096 blocks by columns")
    ]
    assert cases
    for case in cases:
        with tuning.listen(lambda request: _hopper.tile_of(*_hopper8.TILES[0], False)):
            for r in inspect.resources(op, op.implementations["gluon"], case, dtype, "sm_90"):
                said = said_of(r, tmp_path)
                assert "serial" not in said
                assert "C75" not in said
                assert not r.stack
                assert r.shared <= 232448
