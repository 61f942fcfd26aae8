"""Starts of the backward kernels for Hopper.

By default a tile of dQ receives its additions in the order of the pieces' numbers, so reruns are bitwise equal. With
`deterministic=False` they are added as they come. A kernel converts the sums to dq afterwards. If there are too few
pieces for the GPU, some or all are split: each program has some of the queries, and a kernel adds dK and dV.
Packed sequences' pieces come from a list (packed_tiles.py), the longest sequences first.
"""

from typing import Any

import torch
import triton

from ridgeline import device
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention.common.arguments import UNBOUNDED, column_parts, exponents, whole
from ridgeline.ops.attention.hopper import backward, backward_wide
from ridgeline.ops.attention.hopper.backward_schedule import head_section, heads_apart, list_pieces, split_work
from ridgeline.ops.attention.hopper.backward_sums import add_shares, convert_dq, row_terms


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dsinks: torch.Tensor | None, do: torch.Tensor,
    dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    mask: None, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, sinks: torch.Tensor | None, scale: float,
    softcap: float, left: int, right: int, bottom: bool, prefix: int, max_q: int, max_k: int, precision: str,
    deterministic: bool
) -> None:  # fmt: skip
    """Fills dq, dk, dv and, unless it is None, dsinks; see `attention_bwd` in common/kernels.py.

    dk and dv of float32 must be contiguous.
    No block of queries has rows of two packed sequences: a sequence's first block is cu // 64 + the sequence's number.
    """
    do = do if whole(do) else do.clone(memory_format=torch.contiguous_format)
    (batch, heads, rows, D), (kv, columns) = q.shape, k.shape[1:3]
    key_heads, group, wide = batch * kv, heads // kv, triton.next_power_of_2(D)
    span = 64 if wide > 128 else 128  # keys of a piece
    ahead, back, packed = right < UNBOUNDED, left < UNBOUNDED, cu_q is not None
    sequences = None if cu_q is None else cu_q.numel() - 1
    # Without max_q, some sequences are assumed to be four times as long as the average.
    longest = rows if sequences is None else min(rows, max_q or 4 * rows // max(1, sequences))
    tiles = triton.cdiv(rows, 64) if sequences is None else rows // 64 + sequences + 1
    listed, most = None, triton.cdiv(columns, span)
    if cu_q is not None:
        listed, most = list_pieces(q, k, cu_q, cu_q if cu_k is None else cu_k, bottom, left, right, span)
    tops, deltas, order = row_terms(o, do, dlse, lse, tiles, cu_q, dsinks, sinks)
    # In the order of `as_held` (backward_dq.py).
    sums = torch.empty((batch * heads * tiles, 2 * D, 32), dtype=torch.float32, device=q.device)
    facts, programs = (longest, span, deterministic, ahead, back, packed), device.of(q).multiprocessors
    section, down = head_section(q, k, *facts)
    box, room = (1, 1, 1) if packed else (1, 1), 32 if wide > 128 else min(wide, 64)
    single = dk.dtype != q.dtype
    tiled = (q, k, v, do) if single else (q, k, v, do, dk, dv)
    maps: list[Any] = [TensorMap(t, (*box, 64, wide), min(128, 2 * wide), packed) for t in tiled]
    maps += [dk, dv] if single else []
    maps += [TensorMap(sums, (1, 2 * room, 32), 128), TensorMap(tops, (1, 64)), TensorMap(deltas, (1, 64))]
    shift = int(bottom) if packed else columns - rows if bottom else 0
    # Pieces that stay whole, parts of each of the others, and the parts' dK and dV in float32.
    entire, parts, apart, shares = key_heads * most, 1, 1, None
    if not packed and wide <= 128:
        entire, parts = split_work(most, key_heads, down, group, tiles, shift, left, right, wide, programs, prefix)
        if not entire and ahead and not back:
            apart = heads_apart(key_heads * most, group, parts, programs)
    if apart > 1:
        parts, (section, down) = apart, head_section(q, k, *facts, apart)
    left_over = key_heads * most - entire
    pieces = entire + left_over * parts
    if left_over:
        shares = torch.empty((left_over * parts, 2, span, wide), dtype=torch.float32, device=q.device)
    sizes = pieces, entire, parts, heads, section, key_heads * apart, tiles, columns, shift, prefix or left, right
    inputs = maps, sizes, (scale, *exponents(scale, softcap)), (prefix > 0, D if single else 0, softcap > 0)
    options = back, ahead, down, group // apart, apart, deterministic
    if wide > 128:
        backward_wide.start_wide(pieces, options, order, listed, *inputs)
    else:
        rest = column_parts(D)[1] if D > 64 else 0
        # Persistence takes registers, which D 128 lacks.
        backward.start(pieces if wide == 128 else min(pieces, programs), rest, options, order, listed, shares, *inputs)
    if shares is not None:
        add_shares(dk, dv, shares, entire, parts, *((1, False) if apart > 1 else (section, down)), scale)
    convert_dq(dq, sums, order, cu_q, tiles, scale)
