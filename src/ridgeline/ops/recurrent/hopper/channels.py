"""Starts of the Gluon kernels for Hopper for a gate per channel: bfloat16, 64 or 128 channels and columns.

They serve chains whose gates are mild. Others they mark, for the kernels of `triton/channels.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch, tracing
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.hopper.channel_chains import ChainMaps, Chains, forward_chains
from ridgeline.ops.recurrent.hopper.channel_gradients import Backward, GradientMaps, gradient_chains, mark_states
from ridgeline.ops.recurrent.triton.chunks import mapped, rows_map
from ridgeline.ops.recurrent.triton.scan import find_head, find_span, tile_at

Maybe = torch.Tensor | None
ROWS, HALF = 64, 64
SPAN = 60.0  # as in the kernels; a test holds them equal


def serves(call: Any) -> bool:
    """Whether the kernels serve a call of `triton/channel_chunks.py`."""
    if tracing() or call.g is None or call.g.dim() != 4 or call.q.shape[1] < ROWS:
        return False
    tensors = call.q, call.k, call.v, call.g
    if any([t.dtype != torch.bfloat16 for t in tensors]) or call.g.shape[2] != call.k.shape[2]:
        return False
    K, V, gpu = call.k.shape[3], call.v.shape[3], device.of(call.v)
    if (K, V) not in ((64, 64), (128, 128)) or gpu.capability != 90:
        return False
    return enough(gpu, call.sequences * call.v.shape[2]) and all([mapped(t) for t in tensors])


def enough(gpu: device.Device, chains: int) -> bool:
    """Whether so many chains fill the GPU well; fewer are cut into segments by `triton/channels.py`."""
    return 2 * chains >= gpu.multiprocessors


@triton.jit
def find_strong(strong, gate, packing, C: tl.constexpr, K: tl.constexpr, LEAST: tl.constexpr):
    """Marks the sequences and heads whose first chunk has gates that add up to less than LEAST, a natural logarithm."""
    pair = tl.program_id(0)
    n, h = pair // packing.heads, pair % packing.heads
    start, tokens = find_span(packing, n)
    g = tile_at(find_head(gate, n, h, packing.ends, start), gate.token, tl.arange(0, C), tl.arange(0, K), tokens, K)
    total = tl.sum(g.to(tl.float32), 0)
    tl.store(strong + pair, tl.max(tl.where(total >= LEAST, 0, 1), 0))


def _rows(t: torch.Tensor, width: int, call: Any) -> TensorMap:
    return rows_map(t, ROWS, width, call.ends is not None)


def look(plan: Any) -> torch.Tensor:
    """Marks the chains whose first chunk has strong gates."""
    call = plan.call
    strong = torch.empty((call.sequences, call.v.shape[2]), dtype=torch.int32, device=call.v.device)
    facts: dict[str, Any] = {"C": ROWS, "K": call.k.shape[3], "LEAST": -SPAN * 0.6931471805599453}
    launch(find_strong, (strong.numel(),), strong, call.rows(call.g), plan.packing, **facts, num_warps=4)
    return strong


def forward(plan: Any, o: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Makes o and the last states of all chains with mild gates. Returns marks of the others, (sequences, heads)."""
    call = plan.call
    K, V = call.k.shape[3], call.v.shape[3]
    strong = look(plan)
    left = torch.empty_like(strong)
    maps = ChainMaps(
        _rows(call.q, K, call), _rows(call.k, K, call), _rows(call.v, HALF, call), _rows(call.g, K, call),
        _rows(o, HALF, call),
    )  # fmt: skip
    group = call.v.shape[2] // call.k.shape[2]
    sizes = Chains(left, strong, call.first, last, call.u, call.ends, call.q.shape[1], call.v.shape[2], group)
    parts = V // HALF
    facts: dict[str, Any] = {"PARTS": parts, "STAGES": 3 if parts == 2 else 2, "maxnreg": 128 if parts == 2 else 80}
    launch(forward_chains, (left.numel(),), sizes, maps, call.scale, **facts, num_warps=4)
    return left


def serves_backward(call: Any, do: torch.Tensor, *grads: Maybe) -> bool:
    """Whether the kernels serve a call's backward pass with these gradients of rows. With 128 channels there is no room
    for RWKV-6's u."""
    rows, fits = (do, *grads), call.u is None or call.k.shape[3] == HALF
    return fits and serves(call) and all([t is not None and t.dtype == torch.bfloat16 and mapped(t) for t in rows])


def backward(
    plan: Any, grads: tuple[torch.Tensor, ...], of_bonus: Maybe, states: torch.Tensor, do: torch.Tensor, dlast: Maybe,
    dfirst: Maybe,
) -> torch.Tensor:  # fmt: skip
    """Makes the gradients of q, k, v and g, and of the first state, for all chains with mild gates. Returns marks of
    the others, (sequences, heads).

    of_bonus: room for parts of du, zeros for each chunk. states: room for those before all chunks."""
    call = plan.call
    dq, dk, dv, dg = grads
    V, parts = call.v.shape[3], call.k.shape[3] // HALF
    strong = look(plan)
    left = torch.empty_like(strong)
    marked = torch.empty((parts, *strong.shape), dtype=torch.int32, device=left.device)
    rows, flat = (call.q, call.k, call.v, call.g, do, dq, dk, dv, dg), states.view(-1, V)
    maps = GradientMaps._make((*(_rows(t, HALF, call) for t in rows), TensorMap(flat, (HALF, HALF), 128)))
    group = call.v.shape[2] // call.k.shape[2]
    sizes = Backward(
        marked, strong, states, call.first, None, None, None, call.ends, call.q.shape[1], call.v.shape[2], group,
        plan.grid[0],
    )  # fmt: skip
    facts: dict[str, Any] = {"PARTS": parts, "num_warps": 4}
    more: dict[str, Any] = {"STAGES": 4 if parts == 2 else 3, "maxnreg": 168 if parts == 2 else 128}
    whole = maps._replace(v=_rows(call.v, V, call))
    launch(mark_states, (left.numel(),), sizes, whole, **facts, **more)
    sizes = sizes._replace(left=left, strong=marked, first=dlast, last=dfirst, bonus=call.u, of_bonus=of_bonus)
    more = {"STAGES": 2, "maxnreg": 128 if parts == 2 else 168}
    launch(gradient_chains, (left.numel(),), sizes, maps, call.scale, **facts, **more)
    return left
