"""Starts of the Gluon kernels for Hopper of Mamba-2 whose heads share B and C.

`triton/head_chunks.py` makes the states.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.ops.recurrent.common import calls
from ridgeline.ops.recurrent.hopper.shared_keys import shared_keys
from ridgeline.ops.recurrent.hopper.shared_outputs import HeadMaps, RowGrads, shared_outputs, shared_queries
from ridgeline.ops.recurrent.hopper.shared_plan import (
    ROWS,
    STAGES,
    K,
    V,
    block_map,
    join,
    mapped,
    numbers_map,
    prepare,
    states_map,
)
from ridgeline.ops.recurrent.triton import head_chunks as unshared

Maybe = torch.Tensor | None
IDEA = "a program goes through heads that share B and C: their products once, dB and dC added up in registers"
KERNEL: dict[str, Any] = {"kind": "gluon", "dtypes": ("bfloat16",), "arch": 90, "newest": 90}
FEWEST = 8  # heads that share one, for what they share to weigh
FACTS: dict[str, Any] = {"num_warps": 4, "maxnreg": 168}


def rows_of(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """C, B and x of ssd's public arguments, of these three alone, or of a launcher's inputs, in backward after its two
    gradients."""
    if 3 < len(args) < 10:
        return args[4], args[3], args[0]
    at = max(len(args) - 10, 0)
    return args[at], args[at + 1], args[at + 2]


def refusal(*args: Any, **given: Any) -> str | None:
    """Why the kernels do not take a call of ssd, or None. Takes what `rows_of` does."""
    reason = unshared.refusal(*args, **given)
    if reason is not None:
        return reason
    q, k, v = rows_of(*args)
    if (q.shape[-1], v.shape[-1]) != (K, V):
        return f"a state has {K} rows and {V} columns, got {q.shape[-1]} and {v.shape[-1]}"
    if v.shape[2] < FEWEST * q.shape[2]:
        return f"at least {FEWEST} heads share one of B and C, got {v.shape[2]} for {q.shape[2]}"
    if not all([mapped(t) for t in (q, k, v, *(args[:1] if len(args) > 10 else ()))]):
        return "rows must begin at multiples of 16 bytes, and none may be repeated"
    return None


def forward(o: torch.Tensor, last: torch.Tensor, call: Any) -> None:
    if not call.v.numel():
        unshared.forward(o, last, call)
        return
    shared = prepare(call)
    marks = unshared.walk(shared.plan, call.k, call.v, call.first, last, call.v.dtype, False)
    q, k, v, out = *(block_map(t, K, call) for t in (call.q, call.k)), *(block_map(t, V, call) for t in (call.v, o))
    maps = HeadMaps(q, k, v, None, states_map(marks, shared), None, numbers_map(shared), out)
    launch(shared_outputs, shared.grid, shared.job, maps, call.scale, STAGES=STAGES + 1, **FACTS)


def backward(gradients: tuple[Any, ...], do: torch.Tensor, dlast: Maybe, call: Any) -> None:
    """The states again, their gradients, and two kernels over all chunks; another joins the numbers of rows.

    gradients: of q, k, v, g, D, the step sizes and the first state."""
    if not call.v.numel():
        unshared.backward(gradients, do, dlast, call)
        return
    dq, dk, dv, dg, dD, dstep, dfirst = gradients
    shared = prepare(call)
    room, (B, T, HV, _) = shared.room, call.v.shape
    before = unshared.walk(shared.plan, call.k, call.v, call.first, None, call.v.dtype, False)
    after = unshared.walk(shared.plan, call.q, do, dlast, dfirst, call.v.dtype, True)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": do.device}
    own = torch.empty((B, T, dq.shape[2] * shared.job.parts, K), **fresh)
    of_q, of_k = (dq, dk) if shared.job.parts == 1 else (own, torch.empty_like(own))
    rows = torch.empty((8, B * HV, room.chunks, ROWS), **fresh)
    grads = RowGrads(own, of_q, of_k, rows, rows.stride(0))
    q, k = (block_map(t, K, call) for t in (call.q, call.k))
    v, d, out = (block_map(t, V, call) for t in (call.v, do, dv))
    maps = HeadMaps(q, k, v, d, None, states_map(after, shared), numbers_map(shared), out)
    launch(shared_keys, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES, **FACTS)
    maps = HeadMaps(q, None, None, d, states_map(before, shared), states_map(after, shared), numbers_map(shared), None)
    launch(shared_queries, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES, **FACTS)
    calls.join_parts(dq, of_q)
    calls.join_parts(dk, of_k)
    join(shared, rows, dg, dstep, dD)
