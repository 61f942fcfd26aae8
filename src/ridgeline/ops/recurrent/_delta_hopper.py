"""Starts of the delta rule's Gluon kernel for Hopper: a gate per token, half precision, 128 channels and columns.

It goes through the chunks forward. `_delta_chunks.py` makes the matrices, joins segments, and serves every other call
and backward.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import launch, tracing
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent._delta_hopper_chains import Walk, WalkMaps, walk_chunks

Maybe = torch.Tensor | None
STAGES = 3, 4  # chunks that tiles are brought ahead for outputs and for N and M, as shared memory allows
ROWS, WIDTH = 64, 128


def mapped(t: torch.Tensor) -> bool:
    """Whether TMA takes the tensor's rows."""
    steps = [s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1]
    return t.data_ptr() % 16 == 0 and all([s > 0 and s * t.element_size() % 16 == 0 for s in steps])


def serves(call: Any) -> bool:
    """Whether the kernel serves a call of `_delta_chunks.py`; it makes the same numbers."""
    if tracing() or call.g.dim() != 3 or call.a is not None or call.v.dtype not in (torch.bfloat16, torch.float16):
        return False
    if call.k.shape[3] != WIDTH or call.v.shape[3] != WIDTH or device.of(call.v).capability != 90:
        return False
    return all([mapped(t) for t in (call.q, call.k, call.v)])


def _rows(t: torch.Tensor, width: int, call: Any) -> TensorMap:
    packed = call.ends is not None
    return TensorMap(t.transpose(1, 2), (*[1] * (2 + packed), ROWS, width), 128, packed)


def walk(plan: Any, call: Any, out: Maybe, states: Any, packing: Any) -> None:
    """Goes through all sequences, or segments of them, for outputs; without them for segments' N and M."""
    m, half = plan.matrices, WIDTH // 2
    maps = WalkMaps(
        _rows(call.q, WIDTH, call), _rows(call.k, WIDTH, call), _rows(call.v, half, call),
        _rows(m.pair[..., : 2 * ROWS], ROWS, call), TensorMap(m.decays, (1, 1, 1, 4, ROWS)),
        None if out is None else _rows(out, half, call),
    )  # fmt: skip
    sizes = Walk(
        m.whole, states.first, states.last, states.starts, states.made if out is None else None, packing.ends,
        packing.sequences, packing.tokens, packing.heads, packing.chunks, packing.span, packing.rooms,
        call.v.shape[2] // call.k.shape[2],
    )  # fmt: skip
    facts: dict[str, Any] = {"STAGES": STAGES[out is None], "num_warps": 4, "maxnreg": 168}
    turns = 2 if out is None else 1
    launch(walk_chunks, (packing.rooms * turns, plan.chains[1]), sizes, maps, call.scale, **facts)
