"""Starts of the chunk engine: what each pass of forward and backward takes, tiles, and segments over time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.triton import step
from ridgeline.ops.recurrent.triton.scan import (
    Form,
    Gradient,
    Rows,
    Sequences,
    States,
    Steps,
    chain_segments,
    scan_chunks,
)

MOST = 256  # columns of q, k and v
Maybe = torch.Tensor | None


class Call(NamedTuple):
    """The inputs of the registered ops; g is None, (B, T, heads) or (B, T, heads, K). step and skip are Mamba-2's: a
    factor of each token's v, (B, T, HV), and D, (HV,), by which o gets v; both contiguous in float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: Maybe
    u: Maybe
    first: Maybe
    ends: Maybe
    scale: float
    precision: str
    step: Maybe = None
    skip: Maybe = None

    @property
    def gate(self) -> int:
        return 0 if self.g is None else self.g.dim() - 2

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.ends is None else self.ends.numel() - 1

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
    sums: Maybe = None  # dg, (B, T, heads, K), or a column for each slice of columns
    marks: Maybe = None
    bonus: Maybe = None  # du, or D's gradient
    step: int = 0  # what the step sizes weigh, as in Form


def tiles(gpu: device.Device, dtype: torch.dtype, gate: int, D: int, N: int) -> tuple[int, int, int, int, int]:
    """Returns BN, the rows of a chunk, warps, stages, and the chunks of the shortest segment."""
    BD, BN = (max(16, triton.next_power_of_2(n)) for n in (D, N))
    if gpu.backend == "cpu":  # the interpreter: several chunks and segments of few tokens
        return min(BN, 32), 16, 4, 1, 1 if dtype == torch.float32 else 2
    if dtype == torch.float32:  # short chunks
        return min(BN, 32), 16, 4, 1, 1
    if gpu.capability != 90:  # elsewhere the larger tiles spill (sm_80) or fail to compile (sm_100)
        return min(BN, 32), 32, 4, 1, 16
    if gate == 2:
        return min(BN, 64 if BD <= 128 else 32), 32, 8, 1, 16
    BN = min(BN, 128 if BD <= 128 else 64)
    return BN, 64, 8 if BD * BN >= 128 * 64 else 4, 2, 8


def segments(gpu: device.Device, programs: int, tokens: int, unit: int) -> tuple[int, int]:
    """Returns how many segments a sequence has, and their tokens: more than one only if programs leave units idle."""
    count = max(min(gpu.multiprocessors // max(programs, 1), triton.cdiv(tokens, unit)), 1)
    length = triton.cdiv(triton.cdiv(tokens, count), unit) * unit
    return max(triton.cdiv(tokens, max(length, 1)), 1), max(length, unit)


def scan(call: Call, one: Pass) -> None:
    """Starts a pass: one kernel, or where a sequence is cut into segments, three."""
    gpu, N, HV = device.of(one.a), call.sequences, call.v.shape[2]
    D, width, T = one.a.shape[3], one.c.shape[3], call.q.shape[1]
    BN, C, warps, stages, unit = tiles(gpu, one.a.dtype, call.gate, D, width)
    slices = -(-width // BN)
    count, length = segments(gpu, N * HV * slices, T, C * unit)
    form = Form(
        D, width, max(16, triton.next_power_of_2(D)), BN, C, C.bit_length() - 1, call.gate, one.inside, one.reverse,
        call.u is not None, one.a.dtype == torch.float32, call.precision, one.marks is not None,
        one.bonus is not None, one.step, bool(one.step) and one.inside and call.skip is not None,
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
        gradient = Gradient(*call.rows(one.own), one.sums, of[0], of[1], of[2], partial)
    marks = 1 if one.marks is None else one.marks.shape[1]
    where = Sequences(call.ends, T, HV, length, count, marks)
    gate = None if call.g is None else call.rows(call.g)
    steps = None
    if call.step is not None:
        steps = Steps(*call.rows(call.step), call.skip)
    args = *(call.rows(t) for t in (one.a, one.b, one.c, one.out)), gate, call.u, steps
    facts: dict[str, Any] = {"form": form, "num_warps": warps, "num_stages": stages}
    if starts is not None:
        launch(scan_chunks, (count * slices, N * HV), *args, states, None, where, call.scale, **facts, OUT=False)
        launch(chain_segments, (slices, N * HV), states, count, **facts)
    launch(scan_chunks, (count * slices, N * HV), *args, states, gradient, where, call.scale, **facts, OUT=True)
    if partial is not None and one.bonus is not None:
        torch.sum(partial, 0 if one.step == 0 else (0, 2), out=one.bonus)


def fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = Call(*inputs)
    if call.q.shape[1] == 1 and call.ends is None:
        step.start(o, last, step.Token(*inputs[:5]), call.first, call.scale)
        return
    forward(o, last, call)


def forward(o: torch.Tensor, last: torch.Tensor, call: Call) -> None:
    step = 0 if call.step is None else 1
    scan(call, Pass(call.q, call.k, call.v, o, True, False, call.first, last, step=step))


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, du: Maybe, dfirst: Maybe, do: torch.Tensor,
    dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    backward((dq, dk, dv, dg, du, None, dfirst), do, dlast, Call(*inputs))


def backward(gradients: tuple[Any, ...], do: torch.Tensor, dlast: Maybe, call: Call) -> None:
    """Three scans. The first brings its part to dg, and keeps the states before chunks; the second brings the rest.

    gradients: of q, k, v, g, u (or D), the step sizes and the first state."""
    dq, dk, dv, dg, du, dstep, dfirst = gradients
    weighs = (0, 0, 0) if call.step is None else (1, 2, 3)
    q, k, v = call.q, call.k, call.v
    (B, T, HV, V), K = v.shape, q.shape[3]
    BN, C, _, _, _ = tiles(device.of(q), q.dtype, call.gate, V, K)
    marks = sums = None
    if dg is not None:
        heads, chunks = (B * HV, -(-T // C)) if call.ends is None else (HV, T // C + call.sequences)
        wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32  # a state may pass float16's range
        marks = torch.empty((heads, chunks, V, K), dtype=wide, device=q.device)
        sums = dg if call.gate == 2 else torch.empty((B, T, HV, -(-K // BN)), dtype=torch.float32, device=q.device)
    of_u, of_skip = (du, None) if call.step is None else (None, du)
    scan(call, Pass(do, v, k, dq, False, False, call.first, None, q, sums, marks, of_u, weighs[0]))
    scan(call, Pass(v, do, q, dk, False, True, dlast, None, k, sums, marks, None, weighs[1]))
    del marks
    parts = None
    if dstep is not None:
        BN = tiles(device.of(q), q.dtype, call.gate, K, V)[0]
        parts = torch.empty((B, T, HV, -(-V // BN)), dtype=torch.float32, device=q.device)
    scan(call, Pass(k, q, do, dv, True, True, dlast, dfirst, v, parts, None, of_skip, weighs[2]))
    if parts is not None:
        torch.sum(parts, -1, out=dstep)
    if dg is not None and sums is not None and call.gate == 1:
        torch.sum(sums, -1, out=dg)


def mapped(t: torch.Tensor) -> bool:
    """Whether TMA takes the tensor's rows: they begin at multiples of 16 bytes, and none is repeated."""
    steps = [s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1]
    return t.data_ptr() % 16 == 0 and all([s > 0 and s * t.element_size() % 16 == 0 for s in steps])


def rows_map(t: torch.Tensor, rows: int, width: int, packed: bool, swizzle: int = 128) -> TensorMap:
    """A map whose boxes are `rows` tokens of a head and `width` columns. packed: boxes end with their sequence."""
    return TensorMap(t.transpose(1, 2), (*[1] * (2 + packed), rows, width), swizzle, packed)
