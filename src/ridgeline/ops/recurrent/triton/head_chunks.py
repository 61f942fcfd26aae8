"""Starts of `heads.py`: the chunk engine of the ops with a gate per head or none, with states written out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent.common import calls
from ridgeline.ops.recurrent.triton import chunks
from ridgeline.ops.recurrent.triton.heads import (
    BlockForm,
    Decays,
    HeadGrads,
    Room,
    join_gates,
    write_decays,
    write_key_gradients,
    write_outputs,
    write_query_gradients,
    write_states,
)
from ridgeline.ops.recurrent.triton.scan import Form, Rows, States, chain_segments

MOST = 128  # columns of q, k and v
LONG = 512  # tokens of a sequence from which on writing its states out pays, by count
HEADS = 66  # of all sequences: fewer leave half of a Hopper GPU to segments
APART = 1 << 24  # of a chunk's rows in elements, whose offsets have 32 bits
IDEA = "states written out, then all chunks side by side; the pairs of dk and dv made once"
Maybe = torch.Tensor | None


class HeadTiles(NamedTuple):
    columns: int  # of v in a program that walks the chunks
    rows: int  # of a block
    blocks: int  # of a chunk
    walk: dict[str, Any]  # warps and stages of `write_states`
    outputs: dict[str, Any]
    queries: dict[str, Any]  # of `write_query_gradients`
    keys: dict[str, Any]  # of `write_key_gradients`


class Plan(NamedTuple):
    """What the kernels of a call share."""

    call: chunks.Call
    tiles: HeadTiles
    form: BlockForm
    room: Room
    decays: Decays | None
    step: Rows | None  # each token's factor of v, (B, T, value heads)


def head_tiles(gpu: device.Device, V: int) -> HeadTiles:
    BV = max(16, triton.next_power_of_2(V))
    one: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
    if gpu.backend == "cpu":  # the interpreter: several chunks and slices
        return HeadTiles(min(BV, 16), 16, 2, one, one, one, one)
    if gpu.capability != 90:
        return HeadTiles(min(BV, 32), 32, 2, one, one, one, one)
    three: dict[str, Any] = one | {"maxnreg": 168}  # programs a multiprocessor, where two without
    return HeadTiles(min(BV, 64), 64, 2, one | {"num_stages": 2}, three, three, one)


def prepare(call: chunks.Call) -> Plan:
    (B, T, HV, V), K, N = call.v.shape, call.q.shape[3], call.sequences
    tiles = head_tiles(device.of(call.q), V)
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (K, V))
    C = tiles.rows * tiles.blocks
    chunks = -(-T // C) if call.ends is None else T // C + N  # of a head
    room = Room(call.ends, T, HV, chunks, N, C)
    form = BlockForm(K, V, BK, BV, tiles.rows, tiles.blocks, call.gate)
    decays = None
    if call.g is not None:
        fresh: dict[str, Any] = {"dtype": torch.float32, "device": call.q.device}
        sums, soon, since, until = (torch.empty((B * HV, chunks, C), **fresh) for _ in range(4))
        decays = Decays(sums, soon, since, until, torch.empty((B * HV, chunks), **fresh))
        launch(write_decays, (chunks, B * HV), call.rows(call.g), decays, room, form=form, num_warps=1)
    step = None if call.step is None else call.rows(call.step)
    return Plan(call, tiles, form, room, decays, step)


def walk(
    plan: Plan, a: torch.Tensor, c: torch.Tensor, first: Maybe, last: Maybe, kept: torch.dtype, reverse: bool
) -> torch.Tensor:  # fmt: skip
    """Returns the states before all chunks, (heads, chunks, K, V): one kernel, or three in segments."""
    call, tiles, form, room = plan.call, plan.tiles, plan.form, plan.room
    heads, slices = call.sequences * room.heads, -(-form.V // tiles.columns)
    count, length = chunks.segments(device.of(a), heads * slices, call.q.shape[1], room.unit)
    own = Form(
        form.K, form.V, form.BK, tiles.columns, room.unit, 0, form.GATE, True, reverse, False, False, "", False, False
    )  # fmt: skip
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": a.device}
    marks = torch.empty((call.v.shape[0] * room.heads, room.chunks, form.K, form.V), dtype=kept, device=a.device)
    starts = decays = None
    if count > 1:
        starts = torch.empty((count, heads, form.K, form.V), **fresh)
        decays = torch.empty((count, heads), **fresh) if form.GATE else None
    states = States(starts, first, last, form.V, 1, marks, decays)
    args = call.rows(a), call.rows(c), plan.decays, None if reverse else plan.step, states, room, length
    args = *args, call.scale if reverse else 1.0
    if count > 1:
        launch(write_states, (count * slices, heads), *args, form=own, **tiles.walk, OUT=False)
        launch(chain_segments, (slices, heads), states, count, form=own, **tiles.walk)
    launch(write_states, (count * slices, heads), *args, form=own, **tiles.walk, OUT=True)
    return marks


def fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = chunks.Call(*inputs)
    if call.q.shape[1] == 1 and call.ends is None:
        chunks.fwd(o, last, *inputs)
        return
    forward(o, last, call)


def forward(o: torch.Tensor, last: torch.Tensor, call: chunks.Call) -> None:
    plan = prepare(call)
    room = plan.room
    marks = walk(plan, call.k, call.v, call.first, last, call.q.dtype, False)
    rows = *(call.rows(t) for t in (call.q, call.k, call.v, o)), plan.decays
    grid = room.chunks * plan.tiles.blocks, call.v.shape[0] * room.heads
    args = *rows, plan.step, call.skip, marks, room, call.scale
    launch(write_outputs, grid, *args, form=plan.form, **plan.tiles.outputs)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, du: Maybe, dfirst: Maybe, do: torch.Tensor,
    dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    backward((dq, dk, dv, dg, None, None, dfirst), do, dlast, chunks.Call(*inputs))


def backward(gradients: tuple[Any, ...], do: torch.Tensor, dlast: Maybe, call: chunks.Call) -> None:
    """The states again, their gradients, and two kernels over all chunks; another joins the parts of dg.

    gradients: of q, k, v, g, D, the step sizes and the first state. Those of q and k are of value heads or, where
    these share q and k, of its heads: sums of a part for each value head."""
    dq, dk, dv, dg, dD, dstep, dfirst = gradients
    plan = prepare(call)
    tiles, room, (B, T, HV, _) = plan.tiles, plan.room, call.v.shape
    heads, grid = B * HV, room.chunks * tiles.blocks
    wide = torch.bfloat16 if call.q.dtype == torch.bfloat16 else torch.float32  # a state may pass float16's range
    before = walk(plan, call.k, call.v, call.first, None, wide, False)
    after = walk(plan, call.q, do, dlast, dfirst, wide, True)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": do.device}
    parts = past = None
    if dg is not None:
        parts, past = (
            torch.empty((5, heads, room.chunks, room.unit), **fresh),
            torch.empty((heads, room.chunks), **fresh),
        )
    parts_of_q = calls.parts_of(dq, HV, call.q.dtype)
    parts_of_k = dk if parts_of_q is dq else parts_of_q  # dq's parts are summed before
    of_skip = None if dD is None else torch.empty((B, T, HV), **fresh)
    grads = HeadGrads(parts_of_q, parts_of_k, dv, dg, dstep, of_skip, parts, heads * room.chunks * room.unit, past)
    rows = *(call.rows(t) for t in (call.q, call.k, call.v, do)), plan.decays
    args = *rows, plan.step, before, grads, room, call.scale
    launch(write_query_gradients, (grid, heads), *args, form=plan.form, **tiles.queries)
    calls.join_parts(dq, parts_of_q)
    args = *rows, plan.step, call.skip, before, after, grads, room, call.scale
    launch(write_key_gradients, (grid, heads), *args, form=plan.form, **tiles.keys)
    if dg is not None:
        launch(join_gates, (grid, heads), grads, room, call.scale, form=plan.form, num_warps=1)
    calls.join_parts(dk, parts_of_k)
    if of_skip is not None:
        torch.sum(of_skip, (0, 1), out=dD)


def refusal(*args: Any, **given: Any) -> str | None:
    """Why these kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    rows = [t for t in args[:5] if isinstance(t, torch.Tensor) and t.dim() == 4]
    widest, apart = max(t.shape[-1] for t in rows), max(t.stride(1) for t in rows)
    reason = calls.refusal(*args, **given)
    if reason is None and widest > MOST:
        reason = f"a head has at most {MOST} columns, got {widest}"
    if reason is None and apart > APART:
        reason = f"tokens are at most {APART} elements apart, got {apart}"
    return reason


def left(v: torch.Tensor, ends: Maybe) -> str | None:
    """Why automatic choice leaves a call to the chain of chunks, or None."""
    gpu, (B, T, HV, _) = device.of(v), v.shape
    sequences = B if ends is None else ends.numel() - 1
    if gpu.capability != 90 and not (v.is_meta and gpu.backend == "cpu"):  # recorded calls are asked for by sizes alone
        return "its tiles are for Hopper"
    if B * T < LONG * sequences:
        return "its sequences are short"
    return "its heads fill less than half of the GPU" if sequences * HV < HEADS else None


def left_of_gates(*args: Any, cu_seqlens: Maybe = None, **_: Any) -> str | None:
    """As `left`, of calls with a gate per head or none, by public arguments or a launcher's inputs."""
    if len(args) < 9:
        return left(args[2], cu_seqlens)
    inputs = args[len(args) - 9 :]  # after backward's two gradients
    return left(inputs[2], inputs[6])


KERNEL: dict[str, Any] = {
    "kind": "triton", "fwd": fwd, "bwd": bwd, "supports": refusal, "dtypes": ("float16", "bfloat16"),
}  # fmt: skip
