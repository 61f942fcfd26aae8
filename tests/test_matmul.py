"""Hopper's matrix products without a GPU: operands for the copy engine, order of tiles, the rule, machine code."""

import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch._dynamo.testing import CompileCounterWithBackend
from triton.backends.nvidia import compiler

import ridgeline
from ridgeline import device as devices
from ridgeline import tuning
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.lab.analysis import catalogue, inspect
from ridgeline.op import Case, Spec, get
from ridgeline.ops.matmul import _cluster, _hopper, _hopper_pipeline, _persistent
from ridgeline.ops.matmul._epilogue import Epilogue, add_up
from ridgeline.ops.matmul._hopper import aligned, copied, whole
from ridgeline.select import why_not

HALF = torch.bfloat16
PLACE = FunctionType(_hopper_pipeline.Tiles.place.fn.__code__, {"gl": SimpleNamespace(cdiv=triton.cdiv, minimum=min)})


def test_which_operands_the_copy_engine_takes() -> None:
    room = torch.empty(4096, dtype=HALF)
    taken = {
        "rows": room[:640].view(16, 40),
        "columns": room[:640].view(16, 40).mT,
        "a slice": room[:640].view(16, 40)[:, 8:21],
        "one row": room[:13].view(1, 13),
        "one column": room[:13].view(13, 1),
        "an odd row alone": torch.empty(1, 4097, dtype=HALF),
        "a batch of one matrix": room[:640].view(16, 40).expand(3, 16, 40),
    }
    refused = {
        "odd rows": room[: 16 * 41].view(16, 41),
        "an odd beginning": room[1:641].view(16, 40),
        "one row for all": room[:40].expand(16, 40),
        "every second": room[:1280].view(16, 80)[:, ::2],
        "an odd batch": torch.empty(2, 3, 5, dtype=HALF),
    }
    fine = room[:64].view(8, 8)
    for name, t in taken.items():
        assert _hopper.refusal(t, fine) is None, name
        assert _hopper.refusal(fine, t) is None, name
    for name, t in refused.items():
        assert "16 bytes" in str(_hopper.refusal(t, fine)), name
        assert str(_hopper.refusal(fine, t)).count("b must begin"), name
    assert "size 0" in str(_hopper.refusal(torch.empty(0, 8, dtype=HALF), fine))


def test_every_tile_is_computed_once() -> None:
    """`Tiles.place`, run as Python, gives all tiles of all matrices, and for each all steps of K, once."""
    dice = random.Random(0)
    for _ in range(100):
        M, N, steps, batch = (dice.randint(1, most) for most in (2000, 2000, 60, 3))
        BM, BN, GROUP = (dice.choice(of) for of in ((128, 256), (32, 64, 256), (1, 8, 16)))
        parts = dice.randint(1, min(7, steps))
        tiles = SimpleNamespace(M=M, N=N, steps=steps, batch=batch, parts=parts, BM=BM, BN=BN, GROUP=GROUP)
        count = triton.cdiv(M, BM) * triton.cdiv(N, BN) * parts * batch
        found = [PLACE(tiles, t) for t in range(count)]
        wanted = {
            (m, n, b, p) for m in range(0, M, BM) for n in range(0, N, BN) for b in range(batch) for p in range(parts)
        }
        assert {f[:4] for f in found} == wanted
        for b in range(batch):
            ends = sorted({f[4:] for f in found if f[2] == b})
            assert [low for low, _ in ends] == [0, *[high for _, high in ends[:-1]]]
            assert ends[-1][1] == steps
            assert all(low < high for low, high in ends)


def box(desc: Any, at: list[int]) -> torch.Tensor:
    """Returns what the copy engine reads of a tensor map at a place: zeros beyond the edges."""
    t = desc.base.as_strided(desc.shape, desc.strides)
    found = torch.zeros(desc.block_shape, dtype=t.dtype)
    here = t[tuple([slice(i, i + n) for i, n in zip(at, desc.block_shape)])]
    found[tuple([slice(n) for n in here.shape])] = here
    return found[0]


def put(desc: Any, y: torch.Tensor, x: torch.Tensor, batch: int, m: int, n: int, N: int) -> None:
    t = y.view(-1, y.shape[-2], N) if desc is None else desc.base.as_strided(desc.shape, desc.strides)
    there = t[batch, m : m + x.shape[0], n : n + x.shape[1]]
    there.copy_(x[: there.shape[0], : there.shape[1]])


ENDS = {"": lambda x: x, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def emulate(launch: Launch) -> None:
    """Computes on the CPU what a launch of these kernels would, tile by tile and box by box."""
    name, args, facts = launch.kernel.__name__, launch.args, launch.constants
    if name == "_align":
        out, t, rows, columns, _pitch, *strides = args
        out[..., :columns].copy_(t.as_strided((out.shape[0], rows, columns), strides))
        return
    if name == "_sum":
        y, (z, bias, residual), sums, *_ = args
        x = sums.sum(0)[..., : y.shape[-1]] + (0 if bias is None else bias)
        if z is not None:
            z.view(y.shape).copy_(x)
        y.copy_(ENDS[facts["ACTIVATION"]](x) + (0 if residual is None else residual.view(y.shape)))
        return
    y, (out, z, z_up), (bias, residual), (a, b, up), M, N, steps, batches, parts, a_step, b_step = args
    tile = facts["tile"]
    rows, wide = tile.ROWS, tile.BN // (1 if up is None else 2)
    tiles = SimpleNamespace(M=M, N=N, steps=steps, batch=batches, parts=parts, BM=2 * rows, BN=wide, GROUP=tile.GROUP)
    for t in range(triton.cdiv(M, 2 * rows) * triton.cdiv(N, wide) * parts * batches):
        m, n, batch, part, low, high = PLACE(tiles, t)
        for first in (m, m + rows):
            sums = [torch.zeros(rows, wide) for _ in range(1 if up is None else 2)]
            for k in range(64 * low, 64 * high, 64):
                left = box(a, [batch * a_step, first, k]) if tile.A_BY_K else box(a, [batch * a_step, k, first]).T
                for total, right in zip(sums, (b, up)):
                    side = box(right, [batch * b_step, n, k]).T if tile.B_BY_K else box(right, [batch * b_step, k, n])
                    total += left.float() @ side.float()
            x = sums[0] if bias is None else sums[0] + F.pad(bias[n : n + wide], (0, max(0, n + wide - N)))
            for kept, value in ((z, x), (z_up, sums[-1])):
                if kept is not None:
                    put(kept, y, value, batch, first, n, N)
            x = ENDS[facts["ACTIVATION"]](x) * (1 if up is None else sums[1])
            if residual is not None:
                x += torch.cat([box(residual, [batch, first, n + c]) for c in range(0, wide, 64)], 1).float()
            put(out, y, x, part * batches + batch, first, n, N)


def laid(lines: int, K: int, how: str, batch: tuple[int, ...] = ()) -> torch.Tensor:
    """Returns (lines, K) with rows along K, columns along K, a slice of more, or rows that begin anywhere."""
    if how == "rows":
        return torch.randn(*batch, lines, K).half()
    if how == "columns":
        return torch.randn(*batch, K, lines).half().mT
    if how == "slice":
        return torch.randn(*batch, lines + 3, (K + 7) // 8 * 8 + 16).half()[..., 2 : lines + 2, 8 : 8 + K]
    return torch.randn(*batch, lines, K + 1).half()[..., 1:]


def close(one: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(one.double(), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))


def test_products_tile_by_tile() -> None:
    """Launches, emulated on the CPU, have correct maps, steps, parts, batches, edges and copies."""
    dice, made = random.Random(0), []
    torch.manual_seed(0)

    def see(launch: Launch) -> None:
        name, tile = launch.kernel.__name__, launch.constants.get("tile")
        made.append((name, *(() if tile is None else (tile.A_BY_K, tile.B_BY_K, launch.args[1].out is None))))
        emulate(launch)

    with devices.pretend("sm_90"), observe(see):
        for _ in range(40):
            M, N, K = (dice.choice((1, 8, 17, 64, 129, 136, 300)) for _ in range(3))
            batch = dice.choice(((), (), (2,)))
            a, b = (laid(lines, K, dice.choice(("rows", "columns", "slice", "anywhere")), batch) for lines in (M, N))
            if batch and dice.random() < 0.5:
                a = a[:1].expand_as(a)
            tile = dice.choice(_hopper.TILES)
            with tuning.listen(
                lambda request, tile=tile: {**_hopper.tile_of(*tile, False), "PARTS": dice.choice((1, 1, 3))}
            ):
                y = torch.full((*batch, M, N), float("nan"), dtype=torch.float16)
                _hopper.padded(y, a, b.mT, "ieee")
            close(y, a.double() @ b.double().mT)
        for _ in range(10):
            M, N, K = dice.choice((8, 130, 264)), dice.choice((8, 72, 264)), dice.choice((8, 120, 712))
            activation = dice.choice(("silu", "gelu", "gelu_tanh"))
            x, weight, up = torch.randn(M, K).half(), laid(N, K, "rows"), laid(N, K, "rows")
            bias, residual = dice.choice((None, torch.randn(N).half())), dice.choice((None, torch.randn(M, N).half()))
            y, z, z_up = (torch.empty(M, N, dtype=torch.float16) for _ in range(3))
            _hopper.product(y, x, weight.mT, z=z, bias=bias, residual=residual, activation=activation)
            exact = F.linear(*[None if t is None else t.double() for t in (x, weight, bias)])
            close(z, exact)
            close(y, ENDS[activation](exact) + (0 if residual is None else residual.double()))
            _hopper.product(y, x, weight.mT, up=up.mT, z=z, z_up=z_up, activation=activation)
            exact, other = x.double() @ weight.double().mT, x.double() @ up.double().mT
            for one, wanted in ((z, exact), (z_up, other), (y, ENDS[activation](exact) * other)):
                close(one, wanted)
    assert {name for name, *_ in made} == {"_fwd", "_align", "_sum"}
    products = [one[1:] for one in made if one[0] == "_fwd"]
    assert {one[:2] for one in products} == set(product((True, False), repeat=2))
    assert {one[2] for one in products} == {True, False}


@pytest.mark.parametrize("more", [False, True])
def test_rules_fit_their_machine(more: bool) -> None:
    gpu = devices.known("sm_90")
    for gated in (False, True):
        for choice in _hopper.space(gated, more, False) + [
            _hopper.rule(gpu, 1, m, 4096, 4096, gated, more, False) for m in (1, 500, 9000)
        ]:
            rows, wide = choice["ROWS"], choice["BN"]
            shared = choice["STAGES"] * 128 * (2 * rows + wide) + 2 * choice["BOARDS"] * rows * 128
            assert shared + 1024 <= gpu.shared_memory, choice
            assert wide >= (128 if gated else 64), choice
            assert choice["LAG"] < choice["STAGES"] - 1, choice
            chunks = wide // (128 if gated else 64)
            assert more or all(chunks * kept % choice["BOARDS"] == 0 for kept in ((1, 3) if gated else (1, 2))), choice
    assert _hopper.rule(gpu, 1, 512, 512, 65536, False, more, False)["PARTS"] > 4
    assert _hopper.rule(gpu, 1, 8192, 8192, 8192, False, more, False)["PARTS"] == 1


def test_the_rule_takes_what_was_fastest() -> None:
    gpu = devices.known("sm_90")
    for sizes in ((1024, 1024, 1024), (1000, 1000, 1000)):
        small = _hopper.rule(gpu, 1, *sizes, False, False, False, starts=(gcd(2 * sizes[0], 128),) * 2)
        assert (small["ROWS"], small["BN"], small["LAG"], small["PARTS"]) == (64, 64, 0, 1)
    for sizes in (
        (2048, 2048, 2048),
        (2048, 2048, 8192),
        (8192, 8192, 8192),
        (16384, 2048, 2048),
        (4096, 1024, 4096),
        (5000, 3000, 7000),
    ):
        for start in (128, 16):
            made = _hopper.rule(gpu, 1, *sizes, False, False, False, starts=(start, start))
            assert (made["ROWS"], made["BN"], made["PARTS"]) == (64, 256, 1), sizes
            assert made["LAG"] == (0 if start < 128 or sizes[0] * sizes[1] <= 132 * 128 * 256 else 2), sizes


@pytest.mark.parametrize(
    ("N", "K", "parts"),
    [(8192, 8192, 1), (6144, 4096, 1), (4096, 4096, 1), (2048, 2048, 1), (4096, 14336, 2), (1024, 8192, 8)],
)
def test_gemv_of_few_rows_takes_the_parts_that_were_fastest(N: int, K: int, parts: int) -> None:
    launches: list[Launch] = []
    a, x = (torch.empty(rows, K, dtype=torch.bfloat16, device="meta") for rows in (N, 8))
    with devices.pretend("sm_90"), observe(launches.append):
        ridgeline.gemv(a, x, impl="triton")
    assert launches[0].grid == (N // 64, parts)


def test_clusters_fit_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cluster, "resident_clusters", lambda gpu, size: {1: 132, 2: 66, 4: 30}[size])  # of an H100
    gpu = devices.known("sm_90")
    found = [
        _cluster.rule(gpu, 1, *sizes, lines) for sizes in ((8, 8, 8), (1000,) * 3, (8192,) * 3) for lines in (1, 1.875)
    ]
    assert found[0]["BN"] == 64
    alone = _cluster.rule(gpu, 1, 1024, 1024, 1024, 1)
    assert (alone["BN"], alone["DOWN"], alone["ACROSS"]) == (64, 1, 1)
    assert (found[3]["BN"], found[3]["DOWN"], found[3]["ACROSS"]) == (128, 2, 2)  # the fastest on an H100
    assert (found[4]["BN"], found[4]["DOWN"], found[4]["ACROSS"]) == (256, 2, 1)
    for choice in found + _cluster.space():
        assert choice["STAGES"] * (128 * (128 + choice["BN"]) + 16) + 4 * 8192 + 1024 <= gpu.shared_memory, choice
        assert choice["LAG"] < choice["STAGES"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [None, 3, "shared"])
def test_clusters_of_blocks(batch: int | str | None, layout: str) -> None:
    """Every tile, cluster, band and lag is as close to float64 as torch's, with the same bits again; edges, tails of
    K."""
    rung = get("matmul").implementations["cuda_cluster"]
    sizes = (() if batch is None else (3,), () if batch in (None, "shared") else (3,))
    for M, N, K in ((520, 648, 200), (1304, 776, 72), (1304, 776, 40), (8, 1032, 4104)):
        shapes = [(*s, *(m[::-1] if t == "t" else m)) for s, m, t in zip(sizes, ((M, K), (K, N)), layout, strict=True)]
        a, b = [
            x.mT if t == "t" else x
            for x, t in zip([torch.randn(s, device="cuda", dtype=HALF) for s in shapes], layout, strict=True)
        ]
        if reason := why_not(rung, a, b):
            pytest.skip(reason)
        exact, theirs = a.double() @ b.double(), torch.matmul(a, b)
        for config in [None, *_cluster.space()]:
            with tuning.listen(lambda request, config=config: config and dict(config)):
                y, again = rung(a, b), rung(a, b)
            assert torch.equal(y, again), config
            assert (y - exact).norm() <= 1.5 * (theirs - exact).norm(), config


def test_persistent_tiles_fit_their_machine() -> None:
    for arch, size, wholes in product(("sm_90", "sm_100"), (2, 4), (True, False)):
        gpu = devices.known(arch)
        for choice in _persistent.space(gpu, size, wholes):
            stage, results = choice["BK"] * size * (128 + choice["BN"]), 128 * choice["BN"] // choice["PIECES"] * size
            assert choice["num_stages"] * stage + results + 1024 <= gpu.shared_memory, choice
            assert choice["num_stages"] > 3, choice
            assert choice["BK"] * size == 128, choice
    h100, small = devices.known("sm_90"), devices.known("rtx5090")
    widths = {M: _persistent.rule(h100, 2, 1, M, M, M, True)["BN"] for M in (1024, 2048, 4096, 8192)}
    assert widths == {
        1024: 64,
        2048: 256,
        4096: 256,
        8192: 256,
    }  # one tile per program; one of 128 x 256 instead of two
    assert _persistent.rule(h100, 2, 1, 4096, 4097, 4096, False)["BN"] == 128
    assert _persistent.rule(small, 2, 1, 8192, 8192, 8192, True)["BN"] == 64


def test_what_persistent_programs_take() -> None:
    rung, a = get("matmul").implementations["triton_persistent"], torch.zeros(16, 24, dtype=HALF)
    with devices.pretend("sm_90"):
        assert why_not(rung, a, a.mT) is None
        assert why_not(rung, a.float(), a.mT.float(), "tf32") is None
        assert "TF32" in str(why_not(rung, a.float(), a.mT.float(), "ieee"))
        assert "a must begin at a multiple of 16 bytes" in str(why_not(rung, a[:, 1:], a.mT[1:]))
        assert "b must begin at a multiple of 16 bytes" in str(why_not(rung, a, torch.zeros(24, 17, dtype=HALF)))
        assert "size 0" in str(why_not(rung, a[:0], a.mT))
    with devices.pretend("sm_80"):
        assert "sm_90" in str(why_not(rung, a, a.mT))


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [None, 3, "shared"])
def test_persistent_programs(
    batch: int | str | None, layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile, with several tiles per program: edges, results stored by threads, batches, the same bits again."""
    rung, dtype = get("matmul").implementations["triton_persistent"], torch.float16 if INTERPRETED else HALF
    monkeypatch.setattr(devices, "CPU", replace(devices.CPU, multiprocessors=3, shared_memory=232_448))
    sizes = (() if batch is None else (3,), () if batch in (None, "shared") else (3,))
    for M, N, K in ((264, 520, 72), (136, 8, 200), (8, 77, 64), (200, 200, 8)):
        pitches = (M, K)[layout[0] == "n"], (K, N)[layout[1] == "n"]
        if any(p % 8 for p in pitches):
            continue
        shapes = [(*s, *(m[::-1] if t == "t" else m)) for s, m, t in zip(sizes, ((M, K), (K, N)), layout, strict=True)]
        a, b = [
            x.mT if t == "t" else x
            for x, t in zip([torch.randn(s, device=device).to(dtype) for s in shapes], layout, strict=True)
        ]
        if reason := why_not(rung, a, b):
            pytest.skip(reason)
        exact, theirs = a.double() @ b.double(), torch.matmul(a, b)
        configs = _persistent.space(devices.of(a), 2, N % 8 == 0)
        if INTERPRETED:  # where loops are not flattened; bands of 2 end within these few tiles
            configs = [{**one, "GROUP": 2} for one in configs if one["FLAT"] and one["GROUP"] == 8]
        for config in configs:
            with tuning.listen(lambda request, config=config: dict(config)):
                y = rung(a, b)
                assert INTERPRETED or torch.equal(y, rung(a, b)), config
            assert (y - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-4 * exact.norm(), config


@pytest.mark.kernels
@pytest.mark.parametrize("columns", [40, 45])
def test_gradients_by_descriptors(columns: int, device: str) -> None:
    """Gradients with odd layouts, such as expanded or with odd rows, are copied for the copy engine."""
    dtype = torch.float16 if INTERPRETED else HALF
    a, b = (torch.randn(n, 72, device=device).to(dtype).requires_grad_() for n in (64, columns))
    if reason := why_not(get("matmul").implementations["triton_persistent"], a, b.mT):
        pytest.skip(reason)
    for dy in (
        torch.ones((), device=device, dtype=dtype).expand(64, columns),
        torch.randn(columns, 64, device=device).to(dtype).mT,
    ):
        mine = torch.autograd.grad(ridgeline.matmul(a, b.mT, impl="triton_persistent"), (a, b), dy)
        exact = dy.double() @ b.detach().double(), dy.double().mT @ a.detach().double()
        for one, wanted in zip(mine, exact, strict=True):
            assert (one - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


def test_where_rows_begin() -> None:
    room = torch.empty(1 << 16, dtype=HALF)
    for pitch, start in ((64, 128), (128, 128), (32, 64), (16, 32), (8, 16), (1000, 16), (7000, 16)):
        assert _hopper.begins(room[: 4 * pitch].view(1, 4, pitch)) == start
    assert _hopper.begins(room[:8].view(1, 1, 8)) == 128


class Plain:
    """Returns the kernels' activations, in float32 on the CPU."""

    share = staticmethod(lambda u: 1 / (1 + torch.exp2(u)))
    activate = FunctionType(_hopper._activate.fn.__code__, {"_share": share})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_16_bits(activation: str, dtype: torch.dtype) -> None:
    """Rows of similar values, so that each row of tails must be right by itself: at most twice torch's error and half
    an ulp."""
    x = torch.linspace(-12, 12, 1 << 20).view(4096, -1).to(dtype)
    exact, own = ENDS[activation](x.double()), ENDS[activation](x)
    mine = Plain.activate(x.float(), activation).to(dtype)
    moved = ENDS[activation](torch.nextafter(x, torch.full_like(x, -99)).double())
    allowed = 2 * torch.maximum((own - exact).norm(dim=1), (moved - exact).norm(dim=1) / 2) + torch.finfo(
        dtype
    ).eps / 2 * exact.norm(dim=1)
    allowed += 1e-15 * x.double().norm(dim=1)  # the oracle's own error: it computes 1 + tanh
    assert ((mine - exact).norm(dim=1) <= allowed).all()
    assert abs(float((mine.double() * exact).sum() / (exact * exact).sum()) - 1) < torch.finfo(dtype).eps / 16
    inf, nan = float("inf"), float("nan")
    ends, wanted = torch.tensor([inf, -inf, nan, 0.0, 3e38, -3e38]), torch.tensor([inf, nan, nan, 0.0, 3e38, 0.0])
    torch.testing.assert_close(Plain.activate(ends, activation), wanted, rtol=0, atol=0, equal_nan=True)


def test_what_serves_on_hopper() -> None:
    """The automatic choice is what was timed to be faster than PyTorch, by sizes and options; it never refuses the
    call."""

    def serves(op: str, *shapes: tuple[int, ...], arch: str = "sm_90", **options: Any) -> str:
        specs = {k: Spec(*v) if isinstance(v, tuple) else v for k, v in options.items()}
        answer = catalogue.explain(get(op), Case("", tuple([Spec(*s) for s in shapes]), specs), "bfloat16", arch)
        return next(r["impl"] for r in answer["rungs"] if r["serves"])

    n, odd = (2048, 2048), (2048, 2047)
    assert serves("matmul", n, n) == "torch"
    assert serves("matmul", odd, odd[::-1]) == "gluon_padded"
    assert serves("matmul", odd, odd[::-1], arch="sm_80") == serves("matmul", odd, odd[::-1], arch="sm_100") == "torch"
    assert (
        serves("matmul", (64, 2047), odd[::-1])
        == serves("matmul", (2047,), odd[::-1])
        == serves("matmul", n, (2048,))
        == "torch"
    )
    assert serves("linear", n, n) == serves("linear", (8, 2048), n, activation="silu") == "torch"
    assert serves("linear", n, n, (2048,), activation="gelu") == serves("linear", n, n, residual=n) == "gluon"
    assert serves("linear", odd, odd, residual=n) == "gluon_padded"
    assert serves("gated_linear", n, n, n) == "gluon"
    assert serves("gated_linear", odd, odd, odd) == "gluon_padded"
    assert serves("gated_linear", (0, 2048), n, n) == serves("gated_linear", n, (2044, 2048), (2044, 2048)) == "torch"


@pytest.mark.parametrize("how", ["rows", "columns", "slice", "anywhere"])
def test_whatever_is_served_is_taken(how: str) -> None:
    """Forward and backward without `impl`, of operands that begin anywhere: a served implementation runs them."""
    started: list[str] = []
    with devices.pretend("sm_90"), observe(lambda launch: started.append(launch.kernel.__name__)):
        a, b, odd = (laid(1024, K, how).requires_grad_() for K in (1024, 1024, 1025))
        residual = torch.zeros(1024 * 1024 + 1, dtype=torch.float16)[1:].view(1024, 1024)
        for call in (
            lambda: ridgeline.matmul(odd, odd.mT),
            lambda: ridgeline.linear(a, b, residual=residual),
            lambda: ridgeline.linear(a, b, activation="silu"),
            lambda: ridgeline.gated_linear(a, b, laid(1024, 1024, "rows").requires_grad_()),
            lambda: ridgeline.gated_linear(a, b, laid(1024, 1024, "columns").requires_grad_()),
        ):
            y = call()
            assert "_fwd" in started
            started.clear()
            y.sum().backward()
            assert started.count("_fwd") >= 2
            started.clear()


def test_the_choice_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice depends only on sizes, so that torch.compile can follow it: one graph for each answer."""
    monkeypatch.setattr(
        sys.modules[get("matmul").function.__module__], "run", lambda *_: None
    )  # no kernel takes the address of a fake tensor
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: ridgeline.matmul(a, b) + 1, backend=counter, fullgraph=True, dynamic=True)
    with devices.pretend("sm_90"):
        for n in (2048, 1536, 2047, 1601, 3001):
            compiled(torch.zeros(1100, n, dtype=HALF), torch.zeros(n, 1032, dtype=HALF))
    assert counter.frame_count == 2


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(33, 45), (2, 19, 130)])
def test_copies_that_the_copy_engine_takes(shape: tuple[int, ...], device: str) -> None:
    t = torch.randn(shape, device=device).half()
    kinds = [
        t,
        t.mT.contiguous().mT,
        torch.stack([t, t], -1)[..., 0],
        t[..., :1].expand(shape),
        t[..., :1, :].expand(shape),
    ]
    for one in [*kinds, t[None, 0].expand(3, *t.shape[1:]) if t.dim() == 3 else t]:
        copy = aligned(one)
        assert whole(copy) or whole(copy.mT)
        assert torch.equal(copy.expand(one.shape) if copy.dim() == one.dim() else copy[0], one)
    fine = torch.randn(16, 24, device=device).half()
    assert aligned(fine) is fine


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(33, 45), (70, 1100), (2, 19, 130)])
def test_copies_of_bytes(shape: tuple[int, ...], device: str) -> None:
    """Contiguous by rows, by columns, or neither."""
    t = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    for one in (t, t.mT.contiguous().mT, torch.stack([t, t], -1)[..., 0], t[..., :1, :].expand(shape)):
        copy = copied(one)
        assert whole(copy)
        assert torch.equal(copy.view(shape), one)


@pytest.mark.kernels
def test_parts_are_added_up(device: str) -> None:
    sums, bias = torch.randn(3, 2, 17, 28, device=device), torch.randn(26, device=device)
    residual = torch.randn(2, 17, 26, device=device)
    y, z = torch.empty_like(residual), torch.empty_like(residual)
    add_up(y, sums, Epilogue(z, bias, residual), "gelu")
    exact = sums.sum(0)[..., :26] + bias
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(y, torch.nn.functional.gelu(exact) + residual)


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(8, 17, 4096), (100, 12, 8192), (1, 5, 4096), (300, 136, 16384)])
def test_parts_are_written_by_the_copy_engine(shape: tuple[int, int, int]) -> None:
    """Their rows are padded, whatever N is, so that the kernel has a tensor map for them."""
    M, N, K = shape
    case = Case("", (Spec(M, K), Spec(N, K)), dtypes=("bfloat16",))
    made = [
        one
        for _, one in inspect.launches(
            get("linear"), get("linear").implementations["gluon"], case, "bfloat16", "sm_90", ("forward",)
        )
    ]
    assert len(made) == 2
    sums, (out, *_) = made[0].args[:2]
    assert sums.dtype == torch.float32
    assert out is not None
    assert list(out.block_shape)[-1] == 32


def said_of(r: inspect.Resources, folder: Path) -> str:
    """Returns the output of ptxas for a kernel for Hopper."""
    path = folder / "kernel.ptx"
    path.write_text(r.texts["ptx"])
    ptxas = compiler.get_ptxas(90).path
    return subprocess.run(
        [ptxas, "-v", "-arch=sm_90a", path, "-o", "/dev/null"], capture_output=True, text=True, check=True
    ).stderr


@pytest.mark.compiles
def test_products_are_not_serialized(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """ptxas overlaps products with the start of the next ones and moves no sums: otherwise it would say so."""
    ops = [
        ("matmul", impl, Case("", (Spec(512, 512), Spec(512, 2048)), dtypes=("bfloat16",)))
        for impl in ("gluon", "triton_persistent")
    ]
    ops += [
        ("matmul", "triton_persistent", next(c for c in get("matmul").cases if c.name == f"8192x14336x4096{how}"))
        for how in ("", " tt")
    ]
    ops += [
        (name, "gluon", next(c for c in get(name).cases if c.use == "bench")) for name in ("linear", "gated_linear")
    ]
    for name, impl, case in ops:
        for r in inspect.resources(get(name), get(name).implementations[impl], case, "bfloat16", "sm_90"):
            if r.kind == "triton" and r.kernel != "_stay":
                continue
            said = said_of(r, tmp_path)
            assert "serial" not in said
            assert "C75" not in said
            assert not r.stack
