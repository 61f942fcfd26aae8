"""What surrounds the backward kernel on Hopper: lse and delta by blocks before it, dQ and split dK and dV after it."""

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.ops.attention.common.arguments import column_parts
from ridgeline.ops.attention.triton.backward import RowTerms, start_delta, sum_sinks
from ridgeline.ops.attention.triton.launcher import heads as as_heads
from ridgeline.ops.attention.triton.launcher import step_unit
from ridgeline.ops.attention.triton.scheduler import place, row_tile
from ridgeline.ops.attention.triton.tiles import Parts, Rules, head_rows, store_tile


@triton.jit
def load_held(at, place, D: tl.constexpr, W: tl.constexpr):
    """Loads W columns, from a multiple of 8 on, of a tile (64, D) in the order of `as_held` in backward_dq.py.

    Beyond D they are 0.
    """
    n = place * 64 + tl.arange(0, 64 * W)
    held = tl.load(at + n, mask=n < 64 * D, other=0.0)
    return held.reshape(W // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, W)


@triton.jit(do_not_specialize=["rows", "tiles", "batch"])
def _narrow(dq, sums, order, cu, rows, tiles, heads, batch, scale, RULES: tl.constexpr):
    """Converts dq's float32 sums; a tile without additions is 0. heads: over the batch, and per sequence."""
    head = tl.program_id(0) % heads[0]
    tile = tl.program_id(0) // heads[0]
    start, limit = row_tile(tile, rows, cu, batch, 64)
    number = head.to(tl.int64) * tiles + tile
    some = tl.load(order + 1 + number) > 0
    main = tl.where(some, load_held(sums + number * 64 * RULES.D, 0, RULES.D, RULES.BD) * scale, 0.0)
    rest = main
    if RULES.BE:
        rest = tl.where(some, load_held(sums + number * 64 * RULES.D, RULES.BD, RULES.D, RULES.BE) * scale, 0.0)
    to = head_rows(dq, head // heads[1], head % heads[1], start, RULES)
    store_tile(to, Parts(main, rest), tl.arange(0, 64), limit, RULES)


@triton.jit(do_not_specialize=["columns", "entire", "parts", "section", "all_heads", "blocks"])
def _join(
    dk, dv, shares, columns, entire, parts, section, all_heads, blocks, heads, scale, DOWN: tl.constexpr,
    RULES: tl.constexpr
):  # fmt: skip
    """Adds dk and dv over the parts of split pieces (numbered as in `WorkScheduler.work`), first to last."""
    SPAN: tl.constexpr = 128
    W: tl.constexpr = RULES.BD
    row, d = tl.program_id(1) * 16 + tl.arange(0, 16), tl.arange(0, W)
    at = shares + tl.program_id(0).to(tl.int64) * parts * (2 * SPAN * W) + row[:, None] * W + d[None, :]
    keys, values = tl.zeros((16, W), tl.float32), tl.zeros((16, W), tl.float32)
    for _ in range(parts):
        keys += tl.load(at)
        values += tl.load(at + SPAN * W)
        at += 2 * SPAN * W
    tile, head = place(entire + tl.program_id(0), blocks, all_heads, section, DOWN)
    k_start, b, h = tile * SPAN, head // heads, head % heads
    limit = columns - k_start
    store_tile(head_rows(dk, b, h, k_start, RULES), Parts(keys * scale, None), row, limit, RULES)
    store_tile(head_rows(dv, b, h, k_start, RULES), Parts(values, None), row, limit, RULES)


def row_terms(
    o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, lse: torch.Tensor, tiles: int,
    cu: torch.Tensor | None, dsinks: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns lse and delta by `tiles` blocks of 64 rows per head, and the zeroed counts of additions to them.

    Fills dsinks unless it is None.
    """
    many = o.shape[0] * o.shape[1] * tiles
    terms = RowTerms(*[torch.empty((many, 64), dtype=torch.float32, device=o.device) for _ in range(2)])
    order = torch.empty((1 + many,), dtype=torch.int32, device=o.device)
    start_delta(terms, o, do, dlse, lse, order, cu)
    sum_sinks(dsinks, sinks, terms, o.shape[0])
    return *terms, order


def converting_rules(D: int, main: int, rest: int, unit: int) -> Rules:
    return Rules(False, False, False, False, False, D, main, rest, unit, "")


def convert_dq(
    dq: torch.Tensor, sums: torch.Tensor, order: torch.Tensor, cu: torch.Tensor | None, tiles: int, scale: float
) -> None:
    """Fills dq from its sums, `tiles` blocks of 64 rows per head."""
    (batch, heads, rows, D), unit = dq.shape, step_unit((dq,))
    numbers = rows, tiles, (batch * heads, heads), None if cu is None else cu.numel() - 1, scale
    rules = converting_rules(D, *column_parts(D), unit)
    facts: dict[str, Any] = {"RULES": rules, "num_warps": 8 if D > 64 else 4}
    launch(_narrow, (tiles * batch * heads,), as_heads(dq, unit), sums, order, cu, *numbers, **facts)


def add_shares(
    dk: torch.Tensor, dv: torch.Tensor, shares: torch.Tensor, entire: int, split: int, section: int, down: bool,
    scale: float
) -> None:  # fmt: skip
    """Fills what split pieces have of dk and dv; pieces before `entire` are whole, the others are in `split` parts."""
    (batch, heads, columns, D), unit = dk.shape, step_unit((dk, dv))
    places = columns, entire, split, section, batch * heads, triton.cdiv(columns, 128), heads, scale
    given = as_heads(dk, unit), as_heads(dv, unit), shares, *places
    rules = converting_rules(D, shares.shape[-1], 0, unit)
    launch(_join, (shares.shape[0] // split, 8), *given, DOWN=down, RULES=rules)
