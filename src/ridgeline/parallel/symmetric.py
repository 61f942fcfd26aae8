"""The sum over ranks by one kernel that reads the other GPUs' memory, torch's symmetric memory.

    one shot     out = sum_r x_r, read from all N ranks: (N - 1) S bytes arrive at a rank, ranks meet once
    two shots    a rank sums its part of all, then reads the others' sums: 2 (N - 1) / N S bytes, ranks meet twice

A block copies its tiles of x to the rank's own half of the memory, tells the blocks of its number on the other ranks,
waits for theirs, and reads the same tiles there. The sum is in float32 in the order of ranks, so every rank has the
same bits, and reruns too. Calls take the two halves in turns: when a rank writes to a half again, all ranks have met in
the call between, so none reads it any more. The turn is counted on the device, so graphs replay it rightly.
Source: the custom all-reduce of NVIDIA's TensorRT-LLM, 2023, which has both ways in CUDA C++.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ridgeline.boundary import launch, repeated
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, rooms
from ridgeline.parallel.rooms import BLOCKS, Room

HALF = 1 << 24  # bytes that one launch sums at most
TILE, WARPS = 8192, 16  # bytes of a tile, 16 for each thread
EXTRA = 1.2e6  # bytes: a second meeting of the ranks takes about as long as NVLink for these, docs/notes/symmetric.md
USE = "sums"  # the name of the rooms
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- the kernel


@triton.jit
def _memory(table, rank, half, kind: tl.constexpr):
    """Returns where a rank's memory of this call begins."""
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(kind)), 16) + half


@triton.jit
def _meet(pads, count, rank, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Tells the blocks of this number on all ranks that this one has come to a count, and waits until all have."""
    peer = tl.arange(0, LANES) % WORLD
    slots = tl.program_id(0) * WORLD
    tl.debug_barrier()  # every thread's stores come before the signal
    theirs = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + slots + rank
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int32) + count, sem="release", scope="sys")
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + slots + peer
    same = tl.zeros([LANES], tl.int32) + count
    while tl.min(tl.atomic_cas(own, same, same, sem="acquire", scope="sys") - count) < 0:  # counts may wrap
        pass
    tl.debug_barrier()  # no thread reads before


@triton.jit
def _all_reduce(
    out, x, buffers, pads, counts, n, rank,
    WORLD: tl.constexpr, LANES: tl.constexpr, SHOTS: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x.dtype.element_ty
    block, blocks = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, TILE)
    tiles = tl.cdiv(n, TILE)
    count = tl.load(counts + block)  # of meetings: two for each call, whether it needs the second or not
    half = ((count >> 1) & 1) * HALF
    own = _memory(buffers, rank, half, kind)
    memory = (_memory(buffers, 0, half, kind),)
    for peer in tl.static_range(1, WORLD):
        memory = memory + (_memory(buffers, peer, half, kind),)
    for tile in range(block, tiles, blocks):
        at = tile * TILE + lane
        tl.store(own + at, tl.load(x + at, mask=at < n, other=0))  # whole tiles, so that reads need no mask
    _meet(pads, count + 1, rank, WORLD, LANES)

    # With two shots the tiles of a block belong to the ranks in turns, from another rank on in each block.
    turn: tl.constexpr = 1 if SHOTS == 1 else WORLD
    first = block + blocks * ((rank + WORLD - block % WORLD) % turn)
    for tile in range(first, tiles, blocks * turn):
        at = tile * TILE + lane
        terms = (tl.load(memory[0] + at),)
        for peer in tl.static_range(1, WORLD):
            terms = terms + (tl.load(memory[peer] + at),)  # reads begin before the first ends
        total = terms[0].to(tl.float32)
        for peer in tl.static_range(1, WORLD):
            total += terms[peer].to(tl.float32)
        if SHOTS == 1:
            tl.store(out + at, total.to(kind), mask=at < n)
        else:
            tl.store(own + at, total.to(kind))  # only this rank reads its tile's terms here
    if SHOTS == 2:
        _meet(pads, count + 2, rank, WORLD, LANES)
        for tile in range(block, tiles, blocks):
            at = tile * TILE + lane
            owner = (tile // blocks + block) % WORLD
            tl.store(out + at, tl.load(_memory(buffers, owner, half, kind) + at), mask=at < n)

    each = tl.arange(0, BLOCKS)
    tl.store(counts + each, tl.zeros([BLOCKS], tl.int32) + count + 2, mask=each % blocks == block)


# --- the sums

LIBRARY = torch.library.Library("ridgeline_parallel", "DEF")  # so that modes see the calls, as those of collectives
for _name in ("one_shot", "two_shot"):
    LIBRARY.define(f"{_name}(Tensor x, Tensor buffers, Tensor pads, Tensor counts, int rank, int blocks) -> Tensor")


def _launched(shots: int, x: torch.Tensor, *room: Any) -> torch.Tensor:
    """Sums x, contiguous and of at most HALF bytes."""
    buffers, pads, counts, rank, blocks = room
    out = torch.empty_like(x)
    tile, world = TILE // x.element_size(), buffers.numel()
    grid = (min(blocks, triton.cdiv(x.numel(), tile)),)
    launch(_all_reduce, grid, out, x, buffers, pads, counts, x.numel(), rank, WORLD=world, SHOTS=shots,
           LANES=triton.next_power_of_2(world), TILE=tile, HALF=HALF // x.element_size(), BLOCKS=BLOCKS,
           num_warps=WARPS)  # fmt: skip
    return out


_SUMS = {}  # by shots
for _shots, _name in ((1, "one_shot"), (2, "two_shot")):
    _SUMS[_shots] = repeated(partial(_launched, _shots), 4, 6)
    LIBRARY.impl(_name, partial(_launched, _shots), "CompositeExplicitAutograd")
    torch.library.register_fake(f"ridgeline_parallel::{_name}", lambda x, *_: torch.empty_like(x), lib=LIBRARY)


def refuses(device: torch.device, group: Any = None) -> str | None:
    """Returns why the ranks of a group cannot sum so, or None. The first call is a collective."""
    return rooms.refuses(device, group, USE, 2 * HALF)


def summed_in(room: Room, x: torch.Tensor, shots: int) -> torch.Tensor:
    """Returns the sum over the ranks of a room."""
    run: Any = _SUMS[shots]
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        run = torch.ops.ridgeline_parallel.one_shot if shots == 1 else torch.ops.ridgeline_parallel.two_shot
    if x.is_contiguous() and 0 < x.numel() * x.element_size() <= HALF:
        return run(x, *room[:5])
    parts = x.contiguous().view(-1).split(HALF // x.element_size())
    sums = [run(part, *room[:5]) for part in parts if part.numel()]
    return (sums[0] if len(sums) == 1 else torch.cat([x.new_empty(0), *sums])).view(x.shape)


def shots_for(nbytes: int, world: int) -> int:
    """Returns which is quicker: one shot while what it reads more costs less than a second meeting."""
    return 1 if (world - 1) * (1 - 2 / world) * nbytes <= EXTRA else 2


def all_reduce(x: torch.Tensor, group: Any = None, *, shots: int | None = None) -> torch.Tensor:
    """Returns the sum over ranks, of any shape, by one kernel over symmetric memory; the same bits on every rank.

    x: float32, bfloat16 or float16 on a GPU, alike on every rank; sums are in float32. shots: 1 or 2; None takes what
    the size suggests. Graphs capture it after a first call. No gradient flows. It waits for a rank that never calls.
    Raises RidgelineError if there is no symmetric memory, for other dtypes, and for tensors that need gradients.
    """
    if x.dtype not in DTYPES:
        raise RidgelineError(f"all_reduce: x must be float32, bfloat16 or float16 over symmetric memory, got {x.dtype}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RidgelineError("all_reduce: no gradient flows through symmetric memory; give x.detach()")
    if shots not in (None, 1, 2):
        raise RidgelineError(f"all_reduce: shots must be 1, 2 or None, but is {shots!r}")
    world = groups.size(group)
    if world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    shared = rooms.room(x.device, group, USE, 2 * HALF)
    return summed_in(shared, x, shots or shots_for(x.nbytes, world))


def one_shot_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks; each reads all of it."""
    return all_reduce(x, group, shots=1)


def two_shot_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks; each sums a part and reads the other parts' sums."""
    return all_reduce(x, group, shots=2)


def engine_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks, by torch's own one-shot kernel over symmetric memory. x: float32 or bfloat16."""
    if groups.size(group) == 1:
        return x.clone(memory_format=torch.contiguous_format)
    shared = rooms.room(x.device, group, "engine", max(x.nbytes, 1 << 20))
    whole: Any = group or dist.group.WORLD
    mine = shared.kept[1][: x.nbytes].view(x.dtype).view(x.shape)
    return torch.ops.symm_mem.one_shot_all_reduce(mine.copy_(x), "sum", whole.group_name)
