"""Starts of the chunk engine: what each pass of forward and backward takes, tiles, and segments over time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent import _step
from ridgeline.ops.recurrent._channels import Own, PairForm, Prepared, own_gradients, own_pairs, scan_channels
from ridgeline.ops.recurrent._delta import Packing
from ridgeline.ops.recurrent._scan import Form, Gradient, Rows, Sequences, States, chain_segments, scan_chunks

MOST = 256  # columns of q, k and v
Maybe = torch.Tensor | None


class Call(NamedTuple):
    """The inputs of the registered ops; g is None, (B, T, heads) or (B, T, heads, K)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: Maybe
    u: Maybe
    first: Maybe
    ends: Maybe
    scale: float
    precision: str

    @property
    def gate(self) -> int:
        return 0 if self.g is None else self.g.dim() - 2

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.ends is None else self.ends.numel() - 1

    @property
    def by_channel(self) -> bool:
        """Whether the kernels of `_channels.py` serve it."""
        return self.gate == 2 and self.q.dtype != torch.float32

    def room(self, C: int) -> int:
        """Chunks to make room for, per sequence and head or packed per head."""
        return -(-self.q.shape[1] // C) if self.ends is None else self.q.shape[1] // C + self.sequences

    def rows(self, t: torch.Tensor) -> Rows:
        batch, token, head = t.stride()[:3]
        return Rows(t, batch, token, head, max(self.v.shape[2] // max(t.shape[2], 1), 1))


class Pass(NamedTuple):
    """One scan: out from a, b and c."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    out: torch.Tensor
    inside: bool
    reverse: bool
    first: Maybe
    last: Maybe
    own: Maybe = None  # q or k, where the gate has a gradient
    sums: Maybe = None
    into: Maybe = None  # dg
    marks: Maybe = None
    bonus: Maybe = None  # du
    made: Prepared | None = None  # in half precision with a gate per channel, whose q and k are among a, b and c
    ends: Maybe = None


def tiles(gpu: device.Device, dtype: torch.dtype, gate: int, D: int, N: int) -> tuple[int, int, int, int]:
    """Returns BN, the rows of a chunk, warps and stages."""
    BD, BN = (max(16, triton.next_power_of_2(n)) for n in (D, N))
    if gpu.backend == "cpu" or dtype == torch.float32:  # the interpreter: several chunks of few tokens
        return min(BN, 32), 16, 4, 1
    if gpu.capability != 90:  # elsewhere the larger tiles spill (sm_80) or fail to compile (sm_100)
        return min(BN, 32), 32, 4, 1
    if gate == 2:
        return min(BN, 64 if BD <= 128 else 32), 64, 4 if BD <= 128 else 8, 2  # two programs a multiprocessor
    BN = min(BN, 128 if BD <= 128 else 64)
    return BN, 64, 8 if BD * BN >= 128 * 64 else 4, 2


def own_tiles(gpu: device.Device, K: int, V: int) -> tuple[int, int, int]:
    """Returns channels at a time, v's columns at a time and warps for the kernels of a chunk's own pairs."""
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (K, V))
    if gpu.backend == "cpu":
        return 16, 16, 4
    return min(BK, 32), min(BV, 64), 8 if gpu.capability == 90 else 4


def segments(gpu: device.Device, programs: int, tokens: int, unit: int) -> tuple[int, int]:
    """Returns how many segments a sequence has, and their tokens: more than one only if programs leave units idle."""
    count = max(min(gpu.multiprocessors // max(programs, 1), triton.cdiv(tokens, unit)), 1)
    length = triton.cdiv(triton.cdiv(tokens, count), unit) * unit
    return max(triton.cdiv(tokens, max(length, 1)), 1), max(length, unit)


def scan(call: Call, one: Pass) -> None:
    """Starts a pass: one kernel, or where a sequence is cut into segments, three."""
    gpu, N, HV = device.of(one.a), call.sequences, call.v.shape[2]
    D, width, T = one.a.shape[-1], one.c.shape[-1], call.q.shape[1]
    BN, C, warps, stages = tiles(gpu, one.a.dtype, call.gate, D, width)
    slices = -(-width // BN)
    count, length = segments(gpu, N * HV * slices, T, C)
    form = Form(
        D, width, max(16, triton.next_power_of_2(D)), BN, C, C.bit_length() - 1, call.gate, one.inside, one.reverse,
        call.u is not None, one.a.dtype == torch.float32, call.precision, one.sums is not None,
        one.bonus is not None,
    )  # fmt: skip
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": one.a.device}
    starts = decays = partial = None
    if count > 1:
        starts = torch.empty((count, N * HV, D, width), **fresh)
        decays = torch.empty((count, N * HV, D if one.inside else width), **fresh) if call.gate else None
    row, column = (width, 1) if one.inside else (1, D)  # dq and dk hold the state with v's columns as rows
    states = States(starts, one.first, one.last, row, column, one.marks, decays)
    gradient = None
    if one.sums is not None and one.own is not None:
        if one.bonus is not None:
            partial = torch.empty((count * N, HV, width), **fresh)
        of = one.sums.stride()
        gradient = Gradient(*call.rows(one.own), one.sums, one.into, of[0], of[1], of[2], partial)
    where = Sequences(call.ends, T, HV, length, count, call.room(C))
    facts: dict[str, Any] = {"form": form, "num_warps": warps, "num_stages": stages}
    kernel: Any = scan_chunks
    gate = None if call.g is None else call.rows(call.g)
    args: tuple[Any, ...] = *(call.rows(t) for t in (one.a, one.b, one.c, one.out)), gate, call.u, states, gradient
    if one.made is not None:
        a, b, c = one.a, one.b, one.c
        roles = (a, b, call.rows(c)) if one.inside else (call.rows(a), call.rows(b), c)
        kernel, args = scan_channels, (*roles, call.rows(one.out), one.made, one.ends, states)
    if starts is not None:
        launch(kernel, (count * slices, N * HV), *args, where, call.scale, **facts, OUT=False)
        launch(chain_segments, (slices, N * HV), states, count, **facts)
    launch(kernel, (count * slices, N * HV), *args, where, call.scale, **facts, OUT=True)
    if partial is not None and one.bonus is not None:
        torch.sum(partial, 0, out=one.bonus)


def fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = Call(*inputs)
    if call.q.shape[1] == 1 and call.ends is None:
        _step.start(o, last, _step.Token(*inputs[:5]), call.first, call.scale)
        return
    q, k, made = call.q, call.k, None
    if call.by_channel:
        made = own_weights(call)
        q, k = made.q, made.k
    scan(call, Pass(q, k, call.v, o, True, False, call.first, last, made=made))


def _own(call: Call) -> tuple[PairForm, Packing, tuple[int, int], int]:
    """What the kernels of chunks' own pairs share: their form, where chunks are, the grid and the warps."""
    (B, T, HV, V), K, gpu = call.v.shape, call.q.shape[3], device.of(call.q)
    C = tiles(gpu, call.q.dtype, call.gate, K, V)[1]
    BS, BV, warps = own_tiles(gpu, K, V)
    form = PairForm(K, V, BS, BV, C, C.bit_length() - 1, call.u is not None, False)
    chunks = call.room(C)
    return form, Packing(call.ends, T, HV, chunks, call.sequences, C, B * T * HV), (chunks, B * HV), warps


def own_weights(call: Call) -> Prepared:
    form, packing, grid, warps = _own(call)
    fresh: dict[str, Any] = {"dtype": call.q.dtype, "device": call.q.device}
    of_q, of_k = (torch.empty((*grid, form.C, form.K), **fresh) for _ in range(2))
    sums = torch.empty((*grid, form.K), dtype=torch.float32, device=call.q.device)
    made = Prepared(torch.empty((*grid, form.C, form.C), **fresh), of_q, of_k, sums)
    args = *(call.rows(t) for t in (call.q, call.k, call.g) if t is not None), call.u
    launch(own_pairs, grid, *args, made, packing, form=form, num_warps=warps, num_stages=1)
    return made


def bwd_by_channel(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: torch.Tensor, du: Maybe, dfirst: Maybe,
    do: torch.Tensor, dlast: Maybe, call: Call,
) -> None:  # fmt: skip
    """Three scans, of which two leave dq and dk without the chunks' own pairs, and a kernel for these and dg."""
    q, k, v = call.q, call.k, call.v
    form, packing, grid, warps = _own(call)
    marks = torch.empty((*grid, form.V, form.K), dtype=q.dtype, device=q.device)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    ends, partial = torch.empty((*grid, form.K), **fresh), None
    if du is not None:
        partial = torch.zeros((call.v.shape[0], call.v.shape[2], grid[0], form.K), **fresh)
    made = own_weights(call)
    scan(call, Pass(do, v, made.k, dq, False, False, call.first, None, marks=marks, made=made))
    scan(call, Pass(v, do, made.q, dk, False, True, dlast, None, marks=marks, made=made, ends=ends))
    scan(call, Pass(made.k, made.q, do, dv, True, True, dlast, dfirst, made=made))
    del marks
    args = *(call.rows(t) for t in (q, k, v, call.g) if t is not None), call.u, call.rows(do)
    launch(
        own_gradients, grid, *args, Own(dq, dk, dg, ends, partial), packing, call.scale, form=form, num_warps=warps,
        num_stages=1,
    )  # fmt: skip
    if partial is not None and du is not None:
        torch.sum(partial, (0, 2), out=du)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, du: Maybe, dfirst: Maybe, do: torch.Tensor,
    dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    """Three scans. The first leaves q dq in dg, and states at marks; the second turns them into dg."""
    call = Call(*inputs)
    if call.by_channel and dg is not None:
        bwd_by_channel(dq, dk, dv, dg, du, dfirst, do, dlast, call)
        return
    q, k, v = call.q, call.k, call.v
    gpu, K, V = device.of(q), q.shape[3], v.shape[3]
    BN, C, _, _ = tiles(gpu, q.dtype, call.gate, V, K)
    marks = sums = into = None
    if dg is not None:
        fresh: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        marks = torch.empty((q.shape[0], v.shape[2], call.room(C), V, K), dtype=q.dtype, device=q.device)
        sums = torch.empty((*dg.shape[:3], K if call.gate == 2 else -(-K // BN)), **fresh)
        into = dg if call.gate == 2 else torch.empty_like(sums)
    scan(call, Pass(do, v, k, dq, False, False, call.first, None, q, sums, into, marks, du))
    scan(call, Pass(v, do, q, dk, False, True, dlast, None, k, sums, into, marks))
    scan(call, Pass(k, q, do, dv, True, True, dlast, dfirst))
    if dg is not None and into is not None and call.gate == 1:
        torch.sum(into, -1, out=dg)
