"""mla_decode in Triton: a program per tile of rows and part of a sequence's keys; then the parts are combined.

All heads share one key, whose first `latent` columns are the value too, so a program keeps a tile of keys in shared
memory and uses it in both products. Row r of a sequence is query r // heads of head r % heads. Programs that share keys
have neighbouring numbers, so that the second finds them in L2. New tokens are attended to from registers by the program
of the last part, which also writes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.op import dtype_name
from ridgeline.ops.decode._cache import capacity, kind_of
from ridgeline.ops.decode._parts import (
    LOG2E,
    Cached,
    Numbers,
    Queries,
    Results,
    Rules,
    Tokens,
    absorb,
    combine,
    finish,
    new_tokens,
    offsets,
    parts_of,
    quantised,
    rotated,
    scale_and_zero,
    span,
    stored,
    three_steps,
    visible,
)  # fmt: skip
from ridgeline.tiles.float8 import decoded, encoded


@triton.jit
def _scores(q, q_rope, k, k_rope, s, seen, scale, RULES: tl.constexpr):
    """Scores in base 2 of a tile of rows and keys, -inf where a row does not see a key."""
    x = tl.dot(q, tl.trans(k), input_precision=RULES.PRECISION)
    x = tl.dot(q_rope, tl.trans(k_rope), x, input_precision=RULES.PRECISION)
    if RULES.KIND != "":
        x *= s[None, :]
    return tl.where(seen, x * scale, float("-inf"))


@triton.jit
def _append(cache, tokens, b, h, n, known, x, x_rope, RULES: tl.constexpr, ROPE: tl.constexpr):
    """Writes new tokens at n. Returns both parts as the cache would give them, with their scales."""
    written = known & (n < tokens.capacity)
    at, scale, zero = offsets(cache, tokens, b, h, n, written, RULES)
    d, e = tl.arange(0, x.shape[1]), tl.arange(0, x_rope.shape[1])
    inside = written[:, None] & (d < RULES.D)[None, :]
    inside_rope = written[:, None] & (e < ROPE.D)[None, :]
    to = cache.data + at[:, None] + d[None, :]
    to_rope = cache.data + RULES.D + at[:, None] + e[None, :]
    s = known.to(tl.float32)
    if RULES.KIND == "":
        tl.store(to, x.to(cache.data.dtype.element_ty), mask=inside)
        tl.store(to_rope, x_rope.to(cache.data.dtype.element_ty), mask=inside_rope)
    else:
        levels, s, _ = quantised((x, x_rope), known, written, scale, zero, cache, RULES)
        code, code_rope = encoded(levels[0], RULES.NATIVE), encoded(levels[1], RULES.NATIVE)
        tl.store(to, code, mask=inside)
        tl.store(to_rope, code_rope, mask=inside_rope)
        x, x_rope = decoded(code, RULES.NATIVE).to(x.dtype), decoded(code_rope, RULES.NATIVE).to(x.dtype)
        s = tl.where(known, s, 0.0)
    return x, x_rope, s


@triton.jit
def _attend_latent(
    results, queries, keys, tokens, new, numbers, RULES: tl.constexpr, ROPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    size = numbers.queries * numbers.group
    tiles = tl.cdiv(size, BM)
    programs = tl.num_programs(0) // tiles
    tile, turn = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    part, turn = turn % numbers.parts, turn // numbers.parts
    b, h = turn.to(tl.int64), turn * 0
    length = tl.minimum(tl.load(tokens.lengths + b), tokens.capacity)
    first = length if new.k is not None else length - numbers.queries  # the place of the first query
    low, share, active = span(length, first, numbers, RULES, BN)
    if (part >= active) & (part > 0):
        return
    total = first + numbers.queries
    r = tile * BM + tl.arange(0, BM)
    j, row = r // numbers.group, r % numbers.group
    inside = (j < numbers.queries) & (length >= 0)
    place = first + j
    q_at = b * queries.steps[0] + j * queries.steps[1] + row * queries.steps[2]
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = rotated(queries.q, q_at, inside, place, d, new, RULES)
    q_rope = rotated(queries.q + RULES.D, q_at, inside, place, e, new, ROPE)
    state = (
        tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32),
        (tl.zeros((BM, BD), tl.float32),),
    )  # fmt: skip
    begin = low + part * share
    for start in range(begin, tl.minimum(begin + share, length), BN):
        n = start + tl.arange(0, BN)
        known = n < length
        at, scale, zero = offsets(keys, tokens, b, h, n, known, RULES)
        k = stored(keys, at, known, RULES, BD, q.dtype)
        k_rope = stored(keys, at + RULES.D, known, ROPE, BE, q.dtype)
        s, z = scale_and_zero(keys, scale, zero, known, RULES)
        seen = visible(j, place, n, known, row, inside, total, b, queries, numbers, RULES)
        x = _scores(q, q_rope, k[0], k_rope[0], s, seen, numbers.scale, RULES)
        state = absorb(state, x, k, s, z, RULES)
    if new.k is not None:  # noqa: SIM102  # the compiler knows this, and not the next
        if part == active - 1:
            i = tl.arange(0, BS)
            fresh = (i < numbers.queries) & (length >= 0)
            n = length + i
            new_at = b * new.k_steps[0] + i * new.k_steps[1]
            k = rotated(new.k, new_at, fresh, n, d, new, RULES)
            k_rope = rotated(new.k + RULES.D, new_at, fresh, n, e, new, ROPE)
            # Programs of several tiles of rows write the same bytes.
            k, k_rope, s = _append(keys, tokens, b, h, n, fresh, k, k_rope, RULES, ROPE)
            seen = visible(j, place, n, fresh, row, inside, total, b, queries, numbers, RULES)
            x = _scores(q, q_rope, k, k_rope, s, seen, numbers.scale, RULES)
            state = absorb(state, x, (k,), s, tl.zeros_like(s), RULES)
    if RULES.PDL:
        gdc_launch_dependents()
    finish(results, queries, state, part, turn, programs, b, j, row, r, numbers, RULES, BD)


def rule(gpu: device.Device, rows: int, width: int, size: int, bits: int, paged: bool) -> tuning.Config:
    """Tiles of up to 32 keys, which need no more than 255 registers; one fewer tile than stages is held at a time.

    size: bytes of a query's number; bits: bytes of a stored one. paged: reading the block table takes two stages more,
    which need no room."""
    if gpu.backend == "cpu":
        return {"BN": 16, "num_warps": 4, "num_stages": 1}
    blackwell, most = gpu.capability in (100, 103), 4 if rows < 64 else 3
    tensor_memory = blackwell and rows >= 64  # the products' operands wait in shared memory, two tiles more of them
    tiles = ((32, most), (32, 3), (16, 3), (16, 2))
    if blackwell:  # by registers; untimed there
        tiles = ((32, 2), (16, 2)) if tensor_memory else ((16, 2),)
    for bn, stages in tiles:
        held = (stages + 1 if tensor_memory else stages - 1) * bits + (0 if bits == size else 2 * size)
        if rows * width * size + bn * width * held + (32768 if tensor_memory else 12288) <= gpu.shared_memory:
            return {"BN": bn, "num_warps": 8, "num_stages": stages + 2 * paged}
    return {"BN": 16, "num_warps": 8, "num_stages": 1}


def space() -> list[tuning.Config]:
    return [{"BN": bn, "num_warps": 8, "num_stages": stages} for bn in (16, 32, 64) for stages in (1, 2, 3)]


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, lengths: Any, kv: Any, block_table: Any,
    cos: Any, sin: Any, kv_scale: Any, latent: int, scale: float, interleaved: bool, invariant: bool, precision: str,
) -> None:  # fmt: skip
    """Fills o and lse, and appends kv."""
    B, S, heads, D = q.shape
    gpu, most, kind, rope, rows = device.of(q), capacity(cache, block_table), kind_of(cache), D - latent, S * heads
    bd, be = max(16, triton.next_power_of_2(latent)), max(16, triton.next_power_of_2(rope))
    bm = min(
        64 if q.element_size() == 2 and gpu.shared_memory >= 200 << 10 else 16, max(16, triton.next_power_of_2(rows))
    )
    tiles = triton.cdiv(rows, bm)
    parts = parts_of(gpu.multiprocessors, B * tiles, most, invariant)
    pieces = torch.empty(parts * B * rows * (latent + 2), dtype=torch.float32, device=q.device) if parts > 1 else None
    second = early(gpu)
    bits = 1 if kind else q.element_size()

    def config() -> dict[str, Any]:
        key = f"{dtype_name(q)}{' ' + kind if kind else ''} {bm}x{bd}{'' if block_table is None else ' blocks'}"
        made = partial(rule, gpu, bm, bd + be, q.element_size(), bits, block_table is not None)
        return tuning.config(gpu, "mla_decode", "fwd", key, made, space)

    per_token = kv_scale is not None and kv_scale.dim() == 2
    block = 0 if block_table is None else cache.shape[1]
    common = kind, 1, per_token, block, False, False, invariant, gpu.capability >= 89, precision
    pdl = parts > 1 and second["PDL"]
    rules = Rules(latent, 0, interleaved, *common, pdl)
    scale_steps = (*kv_scale.stride(), 0) if per_token else three_steps(kv_scale)
    data = cache.view(torch.uint8) if kind else cache
    tokens = Tokens(lengths, block_table, 0 if block_table is None else block_table.stride(0), most)
    numbers = Numbers(S, 1, heads, parts, scale * LOG2E, 0.0, -1)
    results, angles = Results(o, lse, pieces), new_tokens(kv, None, cos, sin, None)
    given = (
        results, Queries(q, None, None, q.stride()[:3], None),
        Cached(data, kv_scale, None, (*cache.stride()[:2], 0), scale_steps, None), tokens, angles, numbers,
    )  # fmt: skip
    sizes: dict[str, Any] = {
        "RULES": rules,
        "ROPE": Rules(rope, 0 if cos is None else cos.shape[1], interleaved, *common, pdl),
    }
    sizes |= {"BM": bm, "BS": 16, "BD": bd, "BE": be}
    launch(_attend_latent, (tiles * parts * B,), *given, config=config, key=("latent", bm), **sizes)
    if pieces is not None:
        facts = {"APPENDED": kv is not None, "RULES": rules, "BN": config()["BN"], "BD": bd, "SOME": 16}
        facts |= {"num_warps": 4} | {n: v for n, v in second.items() if n == "launch_pdl"}
        launch(combine, (B * rows,), results, None, tokens, numbers, **facts)
