"""Starts of the delta rule's Gluon kernels for Hopper: half precision, 128 channels and columns.

The chains and the gradients of chunks are here; with a gate per channel these gradients take bfloat16 alone.
`triton/delta_chunks.py` makes the matrices, joins segments, and serves every other call. Outputs and gradients have the
same places in memory, so either kernel may follow the other's.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.hopper.delta_chains import Walk, WalkMaps, walk_chunks
from ridgeline.ops.recurrent.hopper.delta_channels import ChannelMaps, ChannelNumbers, channel_gradients
from ridgeline.ops.recurrent.hopper.delta_gradients import ChunkMaps, ChunkNumbers, chunk_gradients
from ridgeline.ops.recurrent.triton.chunks import mapped, rows_map
from ridgeline.ops.recurrent.triton.delta import PairMaps

Maybe = torch.Tensor | None
OUTPUTS, STATES, REVERSE = range(3)  # what `walk` makes
# chunks that a chain's tiles are brought ahead, as shared memory allows, with a gate per token and per channel
STAGES = (3, 4, 2), (2, 3, 2)
ROWS, WIDTH = 64, 128


def serves(call: Any) -> bool:
    """Whether these kernels serve a call of `triton/delta_chunks.py`; they make the same numbers but for rounding."""
    if call.a is not None or call.v.dtype not in (torch.bfloat16, torch.float16) or not call.v.numel():
        return False
    if call.k.shape[3] != WIDTH or call.v.shape[3] != WIDTH or device.of(call.v).capability != 90:
        return False
    return all([mapped(t) for t in (call.q, call.k, call.v)])


def _rows(t: torch.Tensor, width: int, call: Any, swizzle: int = 128) -> TensorMap:
    return rows_map(t, ROWS, width, call.ends is not None, swizzle)


def pair_maps(call: Any, matrices: Any) -> PairMaps:
    """What `pairs_by_token`, a kernel of Triton, moves rows by where sequences are not packed."""
    both = matrices.pair[..., : 2 * ROWS]
    return PairMaps(_rows(call.q, WIDTH, call, 0), _rows(call.k, WIDTH, call, 0), _rows(both, ROWS, call, 0))


def walk(
    plan: Any, call: Any, mode: int, rows: torch.Tensor, out: Maybe, states: Any, kept: Maybe,
    sums: tuple[Maybe, Maybe], packing: Any,
) -> None:  # fmt: skip
    """Goes through all sequences, or segments of them, for outputs, for the states before chunks, or in reverse.

    rows: v, or do. out: where o, U / beta or the gradient of v go; None for N, and forward M, of segments alone. kept:
    where states go, or their gradients. sums: for the gradient of beta over each half of v's columns."""
    m, half, channels = plan.matrices, WIDTH // 2, call.g.dim() == 4
    q, k = (plan.reads.q.data, plan.reads.a.data) if channels else (call.q, call.k)
    squares = [TensorMap(t, (1, 1, 1, ROWS, ROWS), 128) for t in (m.pair, m.solve)] if channels else []
    maps = WalkMaps(
        _rows(q, WIDTH, call), _rows(k, WIDTH, call), _rows(rows, half, call),
        squares[0] if channels else _rows(m.pair[..., : 2 * ROWS], ROWS, call),
        TensorMap(m.decays, (1, 1, 1, 4, ROWS)),
        None if out is None else _rows(out, half, call),
        None if kept is None else TensorMap(kept, (1, 1, 1, half, WIDTH), 128),
        _rows(states.solved, half, call) if mode == REVERSE and out is not None else None,
    )  # fmt: skip
    if channels:
        whole = TensorMap(m.whole, (1, 1, 1, WIDTH))
        maps = maps._replace(b=_rows(plan.reads.b.data, WIDTH, call), solve=squares[1], whole=whole)
    sizes = Walk(
        m.whole, states.first, states.last, states.starts, states.made if out is None else None, *sums, packing.ends,
        packing.sequences, packing.tokens, packing.heads, packing.chunks, packing.begin, packing.span, packing.rooms,
        call.v.shape[2] // call.k.shape[2],
    )  # fmt: skip
    facts: dict[str, Any] = {"MODE": mode, "STAGES": STAGES[channels][mode], "num_warps": 4, "maxnreg": 168}
    turns = 2 if out is None and mode != REVERSE else 1
    launch(walk_chunks, (packing.rooms * turns, plan.chains[1]), sizes, maps, call.scale, **facts)


def start_gradients(
    grid: tuple[int, int], call: Any, do: torch.Tensor, matrices: Any, states: Any, grads: Any, packing: Any
) -> None:
    """The gradients of q, k and the gate in the chunks from packing.begin on, of which the numbers begin there."""
    single = grads.q.dtype == torch.float32
    made = (grads.q, grads.k) if single else (_rows(grads.q, WIDTH, call), _rows(grads.k, WIDTH, call))
    inputs = [_rows(t, WIDTH, call) for t in (call.q, call.k, do, grads.v, states.solved)]
    squares = [TensorMap(t, (1, 1, 1, WIDTH, WIDTH), 128) for t in (states.before, states.later)]
    numbers = ChunkNumbers(
        matrices.decays, matrices.lengths, matrices.whole, grads.g, packing.ends, packing.sequences, packing.tokens,
        packing.heads, packing.chunks, packing.begin, call.v.shape[2] // call.k.shape[2],
    )  # fmt: skip
    facts: dict[str, Any] = {"NORMALIZE": call.normalize, "FLOAT": single, "num_warps": 4}
    launch(chunk_gradients, grid, numbers, ChunkMaps(*inputs, *squares, *made), call.scale, **facts)


def serves_channels(call: Any, grads: Any) -> bool:
    """Whether the kernel for gradients with a gate per channel serves chunks with mild gates of a call that `serves`
    takes."""
    wanted = (call.q, call.k, call.g, grads.q, grads.g)
    return all([t.dtype == torch.bfloat16 and mapped(t) for t in wanted]) and call.g.dim() == 4


def start_channel_gradients(
    grid: tuple[int, int], call: Any, do: torch.Tensor, matrices: Any, states: Any, grads: Any, packing: Any,
    least: float,
) -> None:  # fmt: skip
    """The gradients of q, k and the gates in chunks whose decay is at least `least` in all channels."""
    half, heads = WIDTH // 2, call.v.shape[2]
    rows = [_rows(t, WIDTH, call) for t in (call.q, call.k, call.g)]
    rows += [_rows(do, half, call), _rows(grads.v, half, call), _rows(states.solved, WIDTH, call)]
    squares = [TensorMap(t, (1, 1, 1, WIDTH, WIDTH), 128) for t in (states.before, states.later)]
    made = [_rows(t, WIDTH, call) for t in (grads.q, grads.k, grads.g)]
    numbers = ChannelNumbers(
        matrices.decays, matrices.whole, packing.ends, packing.sequences, packing.tokens, packing.heads, packing.chunks,
        packing.begin, grid[0], grid[0] * grid[1], heads // call.k.shape[2], heads // call.g.shape[2],
    )  # fmt: skip
    facts: dict[str, Any] = {"LEAST": least, "NORMALIZE": call.normalize, "num_warps": 8}
    programs = min(grid[0] * grid[1], device.of(call.v).multiprocessors)
    launch(channel_gradients, (programs,), numbers, ChannelMaps(*rows, *squares, *made), call.scale, **facts)
