"""Starts of `channels.py`: the chunk engine of the ops with a gate per channel, in half precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent.hopper import channels as hopper
from ridgeline.ops.recurrent.triton import chunks
from ridgeline.ops.recurrent.triton.channels import (
    Masks,
    Own,
    PairForm,
    Prepared,
    own_gradients,
    own_gradients_at_once,
    own_pairs,
    own_pairs_at_once,
    scan_channels,
    write_masks,
)
from ridgeline.ops.recurrent.triton.delta import Packing
from ridgeline.ops.recurrent.triton.scan import Form, States, chain_segments

Maybe = torch.Tensor | None
# ptxas 12.8 moves the sums that find own_gradients' tiles in shared memory before what they add to: on an H200 all but
# 16 rows of a product were other memory, some of it no memory of the block's.
ASSEMBLER = {"assembler": "newer"}


class ChannelPass(NamedTuple):
    """One scan: out from a, b and c, among which are q and k of `made`."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    out: torch.Tensor
    inside: bool
    reverse: bool
    first: Maybe
    last: Maybe
    marks: Maybe = None  # states before chunks
    ends: Maybe = None


class Plan(NamedTuple):
    """What the kernels of a call share."""

    call: chunks.Call
    form: PairForm
    packing: Packing
    grid: tuple[int, int]  # chunks of a head, and heads

    @property
    def chunks(self) -> int:
        return self.grid[0] * self.grid[1]


class Tiles(NamedTuple):
    """Of a kernel that runs over all chunks."""

    channels: int  # at a time
    columns: int  # of v at a time
    facts: dict[str, Any]  # warps, and the most registers of a thread
    programs: int  # to a multiprocessor, if they take several chunks each


def channel_tiles(gpu: device.Device, D: int, N: int) -> tuple[int, int, int, int]:
    """Returns BN, the rows of a chunk, warps and stages of a scan."""
    BD, BN = (max(16, triton.next_power_of_2(n)) for n in (D, N))
    if gpu.backend == "cpu":  # the interpreter: several chunks of few tokens
        return min(BN, 32), 16, 4, 1
    if gpu.capability != 90:
        return min(BN, 32), 32, 4, 1
    return min(BN, 64 if BD <= 128 else 32), 64, 4 if BD <= 128 else 8, 2  # two programs a multiprocessor


def pair_tiles(gpu: device.Device, K: int, V: int) -> Tiles:
    """The tiles of `own_pairs`."""
    BK = max(16, triton.next_power_of_2(K))
    if gpu.backend == "cpu":
        return Tiles(16, 16, {"num_warps": 4}, 2)
    if gpu.capability != 90:
        return Tiles(min(BK, 32), 16, {"num_warps": 4}, 4)
    return Tiles(min(BK, 128), 16, {"num_warps": 8, "maxnreg": 128}, 2)


def gradient_tiles(gpu: device.Device, K: int, V: int) -> Tiles:
    """The tiles of `own_gradients`."""
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (K, V))
    facts = {"num_warps": 4} | assembler(gpu)
    return Tiles(min(BK, 16 if gpu.backend == "cpu" else 32), min(BV, 64), facts, 1)


def once_tiles(gpu: device.Device, K: int, V: int) -> Tiles | None:
    """The tiles of `own_gradients_at_once`, where it serves chunks with mild gates: on Hopper (and interpreted)."""
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (K, V))
    if gpu.backend != "cpu" and (gpu.capability != 90 or max(BK, BV) > 128):
        return None
    facts = {"num_warps": 4} | assembler(gpu)
    return Tiles(min(BK, 16 if gpu.backend == "cpu" else 32), BV if gpu.backend != "cpu" else min(BV, 16), facts, 1)


def assembler(gpu: device.Device) -> dict[str, Any]:
    return ASSEMBLER if gpu.capability == 90 else {}


def once_pair_tiles(gpu: device.Device, K: int) -> Tiles | None:
    """The same for `own_pairs_at_once`."""
    BK = max(16, triton.next_power_of_2(K))
    if gpu.backend != "cpu" and (gpu.capability != 90 or BK > 128):
        return None
    return Tiles(min(BK, 16 if gpu.backend == "cpu" else 64), 16, {"num_warps": 4} | assembler(gpu), 1)


def span(dtype: torch.dtype) -> int:
    """`PairForm.SPAN`: bfloat16's range is 2^127 both ways, and q and k need their share; float16 has none to spare."""
    return 60 if dtype == torch.bfloat16 else 0


def prepare(call: chunks.Call) -> Plan:
    (B, T, HV, V), K, gpu, N = call.v.shape, call.q.shape[3], device.of(call.q), call.sequences
    C = channel_tiles(gpu, K, V)[1]
    chunks = -(-T // C) if call.ends is None else T // C + N  # of a head
    form = PairForm(K, V, 0, 0, C, C.bit_length() - 1, call.u is not None, span(call.q.dtype), gpu.backend != "hip")
    return Plan(call, form, Packing(call.ends, T, HV, chunks, N, C, B * T * HV), (chunks, B * HV))


def make_masks(plan: Plan) -> Masks:
    q, form = plan.call.q, plan.form
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    kinds = (torch.float16, 2), (q.dtype, 2), (wide, 4)
    made = Masks(*(torch.empty((form.LEVELS + n, form.C, form.C), dtype=t, device=q.device) for t, n in kinds))
    launch(write_masks, (form.LEVELS + 4,), made, C=form.C, LEVELS=form.LEVELS, SHIFT=form.SHIFT, num_warps=4)
    return made


def own_weights(plan: Plan, left: Maybe = None) -> Prepared:
    """Makes q and k with their decays and their weights; with `left`, where it is 1."""
    call, form, grid = plan.call, plan.form, plan.grid
    fresh: dict[str, Any] = {"dtype": call.q.dtype, "device": call.q.device}
    of_q, of_k = (torch.empty((*grid, form.C, form.K), **fresh) for _ in range(2))
    sums = torch.empty((*grid, form.K), dtype=torch.float32, device=call.q.device)
    made = Prepared(torch.empty((*grid, form.C, form.C), **fresh), of_q, of_k, sums, left)
    args = *(call.rows(t) for t in (call.q, call.k, call.g) if t is not None), call.u
    gpu = device.of(call.q)
    tiles = pair_tiles(gpu, form.K, form.V)
    programs, count = gpu.multiprocessors * tiles.programs, plan.chunks
    room = torch.empty((programs, form.C, form.K), dtype=torch.float32, device=call.q.device)
    form = form._replace(BS=tiles.channels, BV=tiles.columns)
    if left is None and form.SPAN and (once := once_pair_tiles(gpu, form.K)):
        form = form._replace(APART=True)
        sizes = form._replace(BS=once.channels)
        launch(own_pairs_at_once, (count,), *args, made, plan.packing, form=sizes, num_stages=1, **once.facts)
    facts: dict[str, Any] = {"form": form, "num_stages": 1, **tiles.facts}
    # as a function: under tracing the lesser number would be a guard on the number of chunks
    launch(own_pairs, lambda _: (min(programs, count),), *args, made, plan.packing, room, count, **facts)
    return made


def scan(plan: Plan, made: Prepared, one: ChannelPass) -> None:
    """Starts a pass: one kernel, or where a sequence is cut into segments, three."""
    call, gpu, heads = plan.call, device.of(one.out), plan.call.sequences * plan.call.v.shape[2]
    D, width, like = one.a.shape[-1], one.c.shape[-1], one.out
    BN, C, warps, stages = channel_tiles(gpu, D, width)
    slices = -(-width // BN)
    count, length = chunks.segments(gpu, heads * slices, call.q.shape[1], C)
    if made.left is not None:  # there are chains enough, and `chain_segments` would write the others' last states, too
        count, length = 1, call.q.shape[1]
    form = Form(
        D, width, max(16, triton.next_power_of_2(D)), BN, C, C.bit_length() - 1, 2, one.inside, one.reverse,
        call.u is not None, False, call.precision, False, False,
    )  # fmt: skip
    starts = decays = None
    if count > 1:
        starts = like.new_empty((count, heads, D, width), dtype=torch.float32)
        decays = like.new_empty((count, heads, D if one.inside else width), dtype=torch.float32)
    row, column = (width, 1) if one.inside else (1, D)
    states = States(starts, one.first, one.last, row, column, one.marks, decays)
    if one.inside:
        args: tuple[Any, ...] = one.a, one.b, call.rows(one.c), call.rows(one.out)
    else:
        args = call.rows(one.a), call.rows(one.b), one.c, call.rows(one.out)
    grid = count * slices, heads
    facts: dict[str, Any] = {"form": form, "num_warps": warps, "num_stages": stages}
    args = *args, made, one.ends, states, plan.packing, length, call.scale
    if starts is not None:
        launch(scan_channels, grid, *args, **facts, OUT=False)
        launch(chain_segments, (slices, heads), states, count, **facts)
    launch(scan_channels, grid, *args, **facts, OUT=True)


def fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = chunks.Call(*inputs)
    plan = prepare(call)
    left = hopper.forward(plan, o, last) if hopper.serves(call) else None
    made = own_weights(plan, left)
    scan(plan, made, ChannelPass(made.q, made.k, call.v, o, True, False, call.first, last))


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, du: Maybe, dfirst: Maybe, do: torch.Tensor,
    dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    """Three scans, of which two leave dq and dk without the chunks' own pairs, and a kernel for these and dg."""
    call = chunks.Call(*inputs)
    q, k, v, plan = call.q, call.k, call.v, prepare(call)
    form, grid = plan.form, plan.grid
    kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32  # a state may pass float16's range
    marks = torch.empty((*grid, form.V, form.K), dtype=kept, device=q.device)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    ends, partial = torch.empty((*grid, form.K), **fresh), None
    if du is not None:
        partial = torch.zeros((v.shape[0], v.shape[2], grid[0], form.K), **fresh)
    left = None
    if dg is not None and hopper.serves_backward(call, do, dq, dk, dv, dg):
        left = hopper.backward(plan, (dq, dk, dv, dg), partial, marks, do, dlast, dfirst)
    made = own_weights(plan, left)
    scan(plan, made, ChannelPass(do, v, made.k, dq, False, False, call.first, None, marks))
    scan(plan, made, ChannelPass(v, do, made.q, dk, False, True, dlast, None, marks, ends))
    scan(plan, made, ChannelPass(made.k, made.q, do, dv, True, True, dlast, dfirst))
    del marks
    rows = *(call.rows(t) for t in (q, k, v, call.g) if t is not None), call.u, call.rows(do)
    tiles = gradient_tiles(device.of(q), form.K, form.V)
    form = form._replace(BS=tiles.channels, BV=tiles.columns)
    args = *rows, Own(dq, dk, dg, ends, partial, made.sums, left), make_masks(plan), plan.packing, call.scale
    if left is None and form.SPAN and (once := once_tiles(device.of(q), form.K, form.V)):
        form = form._replace(APART=True)
        sizes = form._replace(BS=once.channels, BV=once.columns)
        launch(own_gradients_at_once, (plan.chunks,), *args, form=sizes, num_stages=1, **once.facts)
    launch(own_gradients, (plan.chunks,), *args, form=form, num_stages=1, **tiles.facts)
    if partial is not None and du is not None:
        torch.sum(partial, (0, 2), out=du)
