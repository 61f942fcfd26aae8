"""Starts of the Gluon chains of a gate per head or none, on Hopper: half precision, 128 columns of q, k and v."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.common import calls
from ridgeline.ops.recurrent.hopper.head_chains import Scan, ScanMaps, walk_heads
from ridgeline.ops.recurrent.hopper.head_gates import Parts, join_gates
from ridgeline.ops.recurrent.hopper.head_keys import KeyMaps, KeyScan, walk_keys
from ridgeline.ops.recurrent.triton import chunks
from ridgeline.ops.recurrent.triton.chunks import mapped, rows_map

Maybe = torch.Tensor | None
STAGES, STAGES_OF_KEYS = 3, 2  # chunks that tiles are brought ahead, as shared memory allows
ROWS, WIDTH = 64, 128
IDEA = "a head's state stays on chip: two warpgroups go through its chunks, and TMA brings and takes their tiles"


def _rows(t: torch.Tensor, width: int, call: chunks.Call) -> TensorMap:
    return rows_map(t, ROWS, width, call.ends is not None)


def room_of(call: chunks.Call) -> int:
    """Chunks that a head has room for."""
    T = call.q.shape[1]
    return -(-T // ROWS) if call.ends is None else T // ROWS + call.sequences


def _marks_map(marks: Maybe) -> TensorMap | None:
    return None if marks is None else TensorMap(marks, (1, WIDTH // 2, WIDTH), 128)


def _scan(
    call: chunks.Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, out: torch.Tensor, last: Maybe,
    turned: bool, own: Maybe = None, sums: Maybe = None, marks: Maybe = None,
) -> None:  # fmt: skip
    """A pass forward. turned: whether the state's rows are c's columns, as for dq."""
    heads, half, gate = call.v.shape[2], WIDTH // 2, None if call.g is None else call.rows(call.g)
    maps = ScanMaps(
        _rows(a, WIDTH, call), _rows(b, WIDTH, call), _rows(c, half, call),
        _rows(out, half, call) if out.dtype == a.dtype else None,
        None if own is None else _rows(own, half, call), _marks_map(marks),
    )  # fmt: skip
    groups: Any = [heads // t.shape[2] if t is not None else 1 for t in (a, b, c, own)]
    facts: Any = (None, 0, 0, 0, 1) if gate is None else gate
    sizes = Scan._make((
        out, *facts, call.first, last, sums, 0 if sums is None else sums.stride(0), call.ends, call.q.shape[1],
        heads, room_of(call), *groups,
    ))  # fmt: skip
    count = call.sequences * heads
    launch(walk_heads, (count,), sizes, maps, call.scale, STAGES=STAGES, TURNED=turned, num_warps=4, maxnreg=168)


def fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = chunks.Call(*inputs)
    _scan(call, call.q, call.k, call.v, o, last, False)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, du: Maybe, dfirst: Maybe, do: torch.Tensor,
    dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    """A pass for dq, one in reverse for dk and dv, and one that joins the parts of dg."""
    call = chunks.Call(*inputs)
    do = do if mapped(do) else do.clone(memory_format=torch.contiguous_format)
    (B, _, HV, _), room = call.v.shape, room_of(call)
    places = B * HV * room
    queries = keys = own = before = after = None
    if dg is not None:
        fresh: dict[str, Any] = {"dtype": torch.float32, "device": do.device}
        queries, keys = torch.empty((2, places, ROWS), **fresh), torch.empty((2, places, ROWS), **fresh)
        own = torch.empty((places, ROWS), **fresh)
        fresh["dtype"] = do.dtype
        before, after = torch.empty((places, WIDTH, WIDTH), **fresh), torch.empty((places, WIDTH, WIDTH), **fresh)
    _scan(call, do, call.v, call.k, dq, None, True, call.q if dg is not None else None, queries, before)
    half = WIDTH // 2
    rows: Any = [_rows(t, WIDTH, call) for t in (call.q, call.k, call.v, do)]
    maps = KeyMaps._make((
        *rows, _rows(dk, half, call) if dk.dtype == do.dtype else None, _rows(dv, half, call), _marks_map(after),
    ))  # fmt: skip
    gate: Any = (None, 0, 0, 0, 1) if call.g is None else call.rows(call.g)
    apart = places * ROWS
    sizes = KeyScan._make((
        dk, *gate, dlast, dfirst, keys, apart, own, call.ends, call.q.shape[1], HV, room, HV // call.q.shape[2],
    ))  # fmt: skip
    facts: dict[str, Any] = {"STAGES": STAGES_OF_KEYS, "num_warps": 4, "maxnreg": 168}
    launch(walk_keys, (call.sequences * HV,), sizes, maps, call.scale, **facts)
    if dg is not None:
        parts = Parts._make((
            dg, queries, keys, own, before, after, apart, call.ends, call.q.shape[1], HV, room, call.sequences,
        ))  # fmt: skip
        launch(join_gates, (room, B * HV), parts, gate, call.scale, num_warps=4)


def refusal(*args: Any, **given: Any) -> str | None:
    """Why these kernels do not take a call, or None. Takes public arguments, a launcher's inputs, or in backward these
    after two gradients."""
    backward = len(args) > 10
    q, k, v = args[2:5] if backward else args[:3]
    reason = calls.refusal(*args, **given)
    if reason is None and any([t.shape[-1] != WIDTH for t in (q, k, v)]):
        reason = f"q, k and v have {WIDTH} columns, got {[t.shape[-1] for t in (q, k, v)]}"
    if reason is None and not all([mapped(t) for t in (q, k, v)]):
        reason = "rows of q, k and v begin at multiples of 16 bytes"
    if reason is None and not v.numel():
        reason = "there are no tokens"
    if reason is None and backward and args[9] == 0:
        reason = "its backward divides by the scale, which is 0"
    if reason is None and len(args) == 9 and not (args[5] is None or args[5].is_contiguous()):
        reason = "a step's state is contiguous, and not each state's transpose"
    return reason


KERNEL: dict[str, Any] = {
    "kind": "gluon", "fwd": fwd, "bwd": bwd, "supports": refusal, "served": True, "dtypes": ("float16", "bfloat16"),
    "arch": 90, "newest": 90, "shared": 227 << 10,
}  # fmt: skip
