"""Starts of the Gluon kernels for Hopper of Mamba-2 whose heads share B and C; `_head_chunks.py` serves other calls."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import launch, tracing
from ridgeline.ops.recurrent import _calls, _head_chunks
from ridgeline.ops.recurrent._shared_heads_hopper import HeadMaps, RowGrads, shared_gradients, shared_outputs
from ridgeline.ops.recurrent._shared_heads_keys import shared_keys
from ridgeline.ops.recurrent._shared_heads_plan import (
    ROWS,
    STAGES,
    K,
    V,
    join,
    numbers_map,
    prepare,
    rows_map,
    states_map,
    walk,
)

Maybe = torch.Tensor | None
IDEA, KERNEL, left = _head_chunks.IDEA, _head_chunks.KERNEL, _head_chunks.left
FEWEST = 8  # heads that share one, for what they share to weigh
FACTS: dict[str, Any] = {"num_warps": 4, "maxnreg": 168}


def mapped(t: torch.Tensor) -> bool:
    """Whether TMA takes the tensor's rows."""
    steps = [s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1]
    return t.data_ptr() % 16 == 0 and all([s > 0 and s * t.element_size() % 16 == 0 for s in steps])


def serves(call: Any, *more: torch.Tensor) -> bool:
    """Whether the kernels serve a call, with more rows than its own in backward."""
    if tracing() or call.g is None or call.step is None or call.v.dtype != torch.bfloat16:
        return False
    (heads, width), (shared, depth) = call.v.shape[2:], call.q.shape[2:]
    if width != V or depth != K or heads < FEWEST * shared or not call.v.numel():
        return False
    if device.of(call.v).capability != 90:
        return False
    return all([mapped(t) for t in (call.q, call.k, call.v, *more)])


def forward(o: torch.Tensor, last: torch.Tensor, call: Any) -> None:
    if not serves(call):
        _head_chunks.forward(o, last, call)
        return
    shared = prepare(call)
    marks = walk(shared, call.k, call.v, call.first, last, False)
    q, k, v, out = *(rows_map(t, K, call) for t in (call.q, call.k)), *(rows_map(t, V, call) for t in (call.v, o))
    maps = HeadMaps(q, k, v, None, states_map(marks, shared), None, numbers_map(shared), out)
    launch(shared_outputs, shared.grid, shared.job, maps, call.scale, STAGES=STAGES + 1, **FACTS)


def backward(gradients: tuple[Any, ...], do: torch.Tensor, dlast: Maybe, call: Any) -> None:
    """The states again, their gradients, and two kernels over all chunks; another joins the numbers of rows.

    gradients: of q, k, v, g, D, the step sizes and the first state."""
    if not serves(call, do):
        _head_chunks.backward(gradients, do, dlast, call)
        return
    dq, dk, dv, dg, dD, dstep, dfirst = gradients
    shared = prepare(call)
    room, (B, T, HV, _) = shared.room, call.v.shape
    before = walk(shared, call.k, call.v, call.first, None, False)
    after = walk(shared, call.q, do, dlast, dfirst, True)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": do.device}
    own_q, own_k = (torch.empty((B, T, dq.shape[2] * shared.job.parts, K), **fresh) for _ in range(2))
    of_q, of_k = (dq, dk) if shared.job.parts == 1 else (own_q, own_k)
    rows = torch.empty((8, B * HV, room.chunks, ROWS), **fresh)
    grads = RowGrads(own_q, own_k, of_q, of_k, rows, rows.stride(0))
    q, k = (rows_map(t, K, call) for t in (call.q, call.k))
    v, d, out = (rows_map(t, V, call) for t in (call.v, do, dv))
    maps = HeadMaps(q, k, v, d, None, states_map(after, shared), numbers_map(shared), out)
    launch(shared_keys, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES, **FACTS | {"maxnreg": 128})
    maps = HeadMaps(q, None, v, d, states_map(before, shared), states_map(after, shared), numbers_map(shared), None)
    launch(shared_gradients, shared.grid, grads, shared.job, maps, call.scale, STAGES=STAGES - 1, **FACTS)
    _calls.join_parts(dq, of_q)
    _calls.join_parts(dk, of_k)
    join(shared, rows, dg, dstep, dD)
