"""What the kernels of heads that share q and k are started with: numbers of rows and tensor maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.hopper.shared_numbers import TokenGrads, join_rows, write_numbers
from ridgeline.ops.recurrent.hopper.shared_outputs import HeadJob
from ridgeline.ops.recurrent.triton import chunks, head_chunks
from ridgeline.ops.recurrent.triton.chunks import mapped as mapped  # for who starts these kernels
from ridgeline.ops.recurrent.triton.chunks import rows_map

Maybe = torch.Tensor | None
ROWS, HALF, K, V = 128, 64, 128, 64  # of a chunk and its blocks; columns
STAGES = 3  # heads that tiles are brought ahead; 4 for outputs
TILE = 8  # heads at a time in the kernels of numbers


class Shared(NamedTuple):
    """What the kernels of a call share."""

    call: chunks.Call
    plan: Any  # of `triton/head_chunks.py`, which makes the states
    room: Any  # of `plan`
    numbers: torch.Tensor
    job: HeadJob
    grid: tuple[int, int]


def prepare(call: chunks.Call) -> Shared:
    plan = head_chunks.prepare(call)
    (B, T, HV, _), H = call.v.shape, call.q.shape[2]
    room = plan.room
    share, chunks = HV // H, room.chunks
    assert room.unit == ROWS
    numbers = torch.empty((B, HV, chunks, 4, ROWS), dtype=torch.float32, device=call.v.device)
    assert call.g is not None
    assert call.step is not None
    args = call.rows(call.g), call.rows(call.step), numbers, room
    launch(write_numbers, (chunks, B * triton.cdiv(HV, TILE)), *args, HEADS=TILE, R=HALF, num_warps=4)
    parts = min(max(device.of(call.v).multiprocessors // max(chunks * B * H, 1), 1), share)
    span = triton.cdiv(share, parts)
    parts = triton.cdiv(share, span)
    job = HeadJob(numbers, call.skip, call.ends, call.sequences, T, HV, chunks, share, span, parts)
    return Shared(call, plan, room, numbers, job, (chunks, B * H * parts))


def block_map(t: torch.Tensor, width: int, call: chunks.Call) -> TensorMap:
    return rows_map(t, HALF, width, call.ends is not None)


def states_map(marks: torch.Tensor, shared: Shared) -> TensorMap:
    return TensorMap(marks.view(-1, shared.room.heads, shared.room.chunks, K, V), (1, 1, 1, K, V), 128)


def numbers_map(shared: Shared) -> TensorMap:
    return TensorMap(shared.numbers, (1, 1, 1, 4, ROWS))


def join(shared: Shared, rows: torch.Tensor, dg: torch.Tensor, dstep: torch.Tensor, dD: Maybe) -> None:
    """The gradients of gates, steps and D, from the numbers of rows."""
    room, B = shared.room, shared.call.v.shape[0]
    skips = None
    if dD is not None:
        skips = torch.empty((B, room.chunks, room.heads), dtype=torch.float32, device=rows.device)
    made, grid = TokenGrads(dg, dstep, skips), (room.chunks, B * triton.cdiv(room.heads, TILE))
    launch(join_rows, grid, rows, shared.numbers, made, room, rows.stride(0), HEADS=TILE, R=HALF, num_warps=4)
    if skips is not None:
        torch.sum(skips, (0, 1), out=dD)
