"""Starts of the Gluon kernels for Hopper of Mamba-2 whose heads share B and C; `_head_chunks.py` serves other calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch, tracing
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent import _calls, _chunks, _head_chunks
from ridgeline.ops.recurrent._shared_heads_hopper import HeadJob, HeadMaps, RowGrads, shared_outputs, shared_queries
from ridgeline.ops.recurrent._shared_heads_keys import shared_keys
from ridgeline.ops.recurrent._shared_heads_numbers import ChunkRoom, TokenGrads, join_rows, write_numbers
from ridgeline.ops.recurrent._shared_heads_states import StateJob, StateMaps, shared_states

Maybe = torch.Tensor | None
ROWS, HALF, K, V = 128, 64, 128, 64  # of a chunk and its blocks; columns
FEWEST = 8  # heads that share one, for what they share to weigh
STAGES = 3  # heads that tiles are brought ahead; 4 for outputs
WALKERS = 4  # heads of a program that walks the chunks
TILE = 8  # heads at a time in the kernels of numbers


class Shared(NamedTuple):
    """What the kernels of a call share."""

    call: _chunks.Call
    room: ChunkRoom
    numbers: torch.Tensor
    job: HeadJob
    grid: tuple[int, int]


def mapped(t: torch.Tensor) -> bool:
    """Whether TMA takes the tensor's rows."""
    steps = [s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1]
    return t.data_ptr() % 16 == 0 and all([s > 0 and s * t.element_size() % 16 == 0 for s in steps])


def serves(call: _chunks.Call, *more: torch.Tensor) -> bool:
    """Whether the kernels serve a call, with more rows than its own in backward."""
    if tracing() or call.g is None or call.step is None or call.v.dtype != torch.bfloat16:
        return False
    (heads, width), (shared, depth) = call.v.shape[2:], call.q.shape[2:]
    if width != V or depth != K or heads < FEWEST * shared or not call.v.numel():
        return False
    if device.of(call.v).capability != 90:
        return False
    return all([mapped(t) for t in (call.q, call.k, call.v, *more)])


def prepare(call: _chunks.Call) -> Shared:
    (B, T, HV, _), H = call.v.shape, call.q.shape[2]
    share, chunks = HV // H, triton.cdiv(T, ROWS) if call.ends is None else T // ROWS + call.sequences
    room = ChunkRoom(call.ends, T, HV, chunks, call.sequences)
    numbers = torch.empty((B, HV, chunks, 4, ROWS), dtype=torch.float32, device=call.v.device)
    assert call.g is not None
    assert call.step is not None
    args = call.rows(call.g), call.rows(call.step), numbers, room
    launch(write_numbers, (chunks, B * triton.cdiv(HV, TILE)), *args, HEADS=TILE, R=HALF, num_warps=4)
    parts = min(max(device.of(call.v).multiprocessors // max(chunks * B * H, 1), 1), share)
    span = triton.cdiv(share, parts)
    parts = triton.cdiv(share, span)
    job = HeadJob(numbers, call.skip, call.ends, call.sequences, T, HV, chunks, share, span, parts)
    return Shared(call, room, numbers, job, (chunks, B * H * parts))


def _rows(t: torch.Tensor, width: int, call: _chunks.Call) -> TensorMap:
    packed = call.ends is not None
    return TensorMap(t.transpose(1, 2), (*[1] * (2 + packed), HALF, width), 128, packed)


def _states(marks: torch.Tensor, shared: Shared) -> TensorMap:
    return TensorMap(marks.view(-1, shared.room.heads, shared.room.chunks, K, V), (1, 1, 1, K, V), 128)


def _numbers(shared: Shared) -> TensorMap:
    return TensorMap(shared.numbers, (1, 1, 1, 4, ROWS))


def _walk(
    shared: Shared, a: torch.Tensor, c: torch.Tensor, first: Maybe, last: Maybe, reverse: bool
) -> torch.Tensor:  # fmt: skip
    """The states before all chunks, (heads, chunks, K, V), or in reverse their gradients after them."""
    call, room = shared.call, shared.room
    each = triton.cdiv(shared.job.share, WALKERS) * call.q.shape[2]
    if 2 * each * room.sequences < device.of(a).multiprocessors:
        plan = _head_chunks.prepare(call)
        return _head_chunks.walk(plan, a, c, first, last, torch.bfloat16, reverse)
    marks = torch.empty((call.v.shape[0] * room.heads, room.chunks, K, V), dtype=a.dtype, device=a.device)
    maps = StateMaps(
        _rows(a, K, call), _rows(c, V, call), TensorMap(shared.numbers, (1, 1, 1, 4, HALF)), _states(marks, shared)
    )
    job = StateJob(shared.numbers, first, last, call.ends, room.tokens, room.heads, room.chunks, shared.job.share)
    facts: dict[str, Any] = {"STAGES": STAGES, "num_warps": 4, "maxnreg": 96, "REVERSE": reverse}
    launch(shared_states, (each, room.sequences), job, maps, call.scale if reverse else 1.0, **facts)
    return marks


FACTS: dict[str, Any] = {"num_warps": 4, "maxnreg": 168}


def forward(o: torch.Tensor, last: torch.Tensor, call: _chunks.Call) -> None:
    shared = prepare(call)
    marks = _walk(shared, call.k, call.v, call.first, last, False)
    q, k, v, out = *(_rows(t, K, call) for t in (call.q, call.k)), *(_rows(t, V, call) for t in (call.v, o))
    maps = HeadMaps(q, k, v, None, _states(marks, shared), None, _numbers(shared), out)
    launch(shared_outputs, shared.grid, shared.job, maps, call.scale, STAGES=STAGES + 1, **FACTS)


def backward(gradients: tuple[Any, ...], do: torch.Tensor, dlast: Maybe, call: _chunks.Call) -> None:
    """The states again, their gradients, and two kernels over all chunks; another joins the numbers of rows.

    gradients: of q, k, v, g, D, the step sizes and the first state."""
    dq, dk, dv, dg, dD, dstep, dfirst = gradients
    shared = prepare(call)
    room, (B, T, HV, _) = shared.room, call.v.shape
    before = _walk(shared, call.k, call.v, call.first, None, False)
    after = _walk(shared, call.q, do, dlast, dfirst, True)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": do.device}
    own = torch.empty((B, T, dq.shape[2] * shared.job.parts, K), **fresh)
    of_q, of_k = (dq, dk) if shared.job.parts == 1 else (own, torch.empty_like(own))
    rows = torch.empty((8, B * HV, room.chunks, ROWS), **fresh)
    grads = RowGrads(own, of_q, of_k, rows, rows.stride(0))
    q, k = (_rows(t, K, call) for t in (call.q, call.k))
    v, d, out = (_rows(t, V, call) for t in (call.v, do, dv))
    maps = HeadMaps(q, k, v, d, None, _states(after, shared), _numbers(shared), out)
    launch(shared_keys, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES, **FACTS)
    maps = HeadMaps(q, None, None, d, _states(before, shared), _states(after, shared), _numbers(shared), None)
    launch(shared_queries, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES, **FACTS)
    _calls.join_parts(dq, of_q)
    _calls.join_parts(dk, of_k)
    skips = None if dD is None else torch.empty((B, room.chunks, HV), **fresh)
    made = TokenGrads(dg, dstep, skips)
    grid = room.chunks, B * triton.cdiv(HV, TILE)
    launch(join_rows, grid, rows, shared.numbers, made, room, rows.stride(0), HEADS=TILE, R=HALF, num_warps=4)
    if skips is not None:
        torch.sum(skips, (0, 1), out=dD)
