"""Starts of the delta engine: what its kernels take, tiles, segments over time, and which tensors share memory."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent.hopper import delta as hopper
from ridgeline.ops.recurrent.triton.delta import (
    ChunkStates,
    DeltaForm,
    Grads,
    Matrices,
    Packing,
    Reads,
    chain_gradients,
    chain_segments,
    chain_states,
    end_rows,
    gradients_by_channel,
    gradients_by_token,
    pairs_by_channel,
    pairs_by_token,
)
from ridgeline.ops.recurrent.triton.delta_at_once import (
    gradients_at_once,
    low_pairs_at_once,
    pairs_at_once,
    write_double_masks,
)
from ridgeline.ops.recurrent.triton.delta_channels import (
    BlockMasks,
    half_gradients_by_channel,
    half_pairs_by_channel,
    write_block_masks,
)
from ridgeline.ops.recurrent.triton.scan import Rows

Maybe = torch.Tensor | None


class DeltaCall(NamedTuple):
    """The inputs of the registered ops. g: (B, T, heads) or (B, T, heads, K); beta, or a and b, are there."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: Maybe
    a: Maybe
    b: Maybe
    first: Maybe
    ends: Maybe
    normalize: bool
    scale: float
    precision: str

    def rows(self, t: Maybe) -> Rows | None:
        if t is None:
            return None
        batch, token, head = t.stride()[:3]
        return Rows(t, batch, token, head, max(self.v.shape[2] // max(t.shape[2], 1), 1))


class Tiles(NamedTuple):
    rows: int  # of a chunk
    chain: int  # columns of v in a program that goes through a sequence
    slice: int  # columns of v at a time in a program of one chunk
    channels: int  # at a time, where each has its gate
    warps: tuple[int, int, int]  # of the matrices, the chains and the gradients
    stages: tuple[int, int]  # of the chains and the gradients
    registers: int | None = None  # at most, in the kernel of the matrices


def tiles_of(call: DeltaCall, backward: bool) -> Tiles:
    gpu, gate = device.of(call.v), call.g.dim() - 2
    return delta_tiles(gpu, call.v.dtype, (gate, call.a is not None, backward), call.k.shape[3], call.v.shape[3])


def delta_tiles(gpu: device.Device, dtype: torch.dtype, kind: tuple[int, bool, bool], K: int, V: int) -> Tiles:
    """kind: 1 or 2 for a gate per token or channel; whether a and b are given; backward."""
    BK, BV = (max(16, triton.next_power_of_2(n)) for n in (K, V))
    gate, low, backward = kind
    if gpu.backend == "cpu":  # the interpreter: several chunks and slices
        return Tiles(32, min(BV, 32), min(BV, 32), 16, (4, 4, 4), (1, 1))
    if dtype == torch.float32:
        return Tiles(32, min(BV, 32 if BK <= 128 else 16), min(BV, 32), min(BK, 32), (4, 4, 4), (1, 1))
    if gpu.capability == 90 and max(BK, BV) <= 128:
        wide = 8 if BV > 64 else 4  # a warp for 16 columns of v
        if gate == 1:
            return Tiles(64, BV, min(BV, 64), BK, (4, wide, 8), (3, 2), 168)
        if not low:
            return Tiles(64, BV, BV, min(BK, 32), (4, wide, 4), (2 if backward else 3, 1))
        return Tiles(32, BV, min(BV, 32), 16, (4, wide, 4), (3, 1))
    BV = min(BV, 64 if BK <= 128 else 32)
    return Tiles(32, BV, min(BV, 32), 16, (4, 8 if BK > 64 else 4, 4), (1, 1))


class Plan(NamedTuple):
    """What the launches of a call share."""

    form: DeltaForm
    tiles: Tiles
    packing: Packing
    parallel: tuple[int, int]  # programs: one for each chunk
    chains: tuple[int, int]  # one for each segment
    pairs: tuple[int, int]  # one for each sequence and head
    tensors: tuple[Any, ...]  # q, k, v, a, b, g and beta
    reads: Reads
    matrices: Matrices
    masks: BlockMasks | None  # with a gate per channel in half precision
    hopper: bool  # whether `hopper/delta.py` goes through the chunks


def _thrice(gpu: device.Device) -> str:
    return "ieee" if gpu.backend == "hip" else "tf32x3"  # AMD's compiler has no tf32x3


def _solver(call: DeltaCall) -> str:
    """The precision of the float32 products that solve a chunk; other products take the data's dtype."""
    half = {torch.bfloat16: "tf32", torch.float16: _thrice(device.of(call.v))}
    return half.get(call.v.dtype, call.precision)


def most_halvings(dtype: torch.dtype) -> int:
    """`DeltaForm.HALVINGS`: bfloat16's range is 2^127 both ways, and rows need their share; float16 has none left."""
    return 60 if dtype == torch.bfloat16 else 0


def half_facts(form: DeltaForm, call: DeltaCall) -> dict[str, Any]:
    """What the kernels of `delta_channels.py` are compiled with: their form, and on Hopper Triton's newer assembler,
    since the other one has miscompiled such a kernel with 4 warps (docs/compiler.md)."""
    facts: dict[str, Any] = {"form": form._replace(HALVINGS=most_halvings(call.v.dtype))}
    return facts | ({"assembler": "newer"} if device.of(call.v).capability == 90 else {})


def at_once_facts(form: DeltaForm, call: DeltaCall) -> dict[str, Any] | None:
    """With what the kernels of `delta_at_once.py` run where they do: on Hopper (and interpreted), in bfloat16."""
    gpu, most = device.of(call.v), max(form.BK, triton.next_power_of_2(form.V))
    if not most_halvings(call.v.dtype) or most > 128 or not (gpu.capability == 90 or gpu.backend == "cpu"):
        return None
    return half_facts(form, call) | {"num_warps": 4, "num_stages": 1}


def apart(gpu: device.Device, grid: tuple[int, int]) -> int:
    """`DeltaForm.APART`: many where programs abound, since most look at their chunks and leave; it divides a part's."""
    return 8 if grid[0] * grid[1] >= 32 * gpu.multiprocessors else 1


def block_masks(form: DeltaForm, call: DeltaCall) -> BlockMasks:
    C, levels, kind = form.C, form.LEVELS, call.v.dtype
    signs = torch.bfloat16 if kind == torch.bfloat16 else torch.float32
    kinds = (torch.float16, 2 * levels + 2), (kind, 3 * levels + 2), (signs, 2 * levels + 3)
    made: list[Any] = []
    for shift in (False, True)[: 1 + form.LOW]:
        gates, pairs, of_sums = (torch.empty((n, C, C), dtype=t, device=call.v.device) for t, n in kinds)
        facts: dict[str, Any] = {"C": C, "LEVELS": levels, "SHIFT": shift, "num_warps": 4}
        launch(write_block_masks, (2 * levels + 2,), BlockMasks(gates, pairs, of_sums, None, None), **facts)
        made += [gates, pairs, of_sums]
    if not form.LOW:
        return BlockMasks(made[0], made[1], made[2], None, None)
    double = None
    if at_once_facts(form, call):
        double = torch.empty((5, 2, C, C), dtype=signs, device=call.v.device)
        launch(write_double_masks, (1,), double, C=C, num_warps=4)
    return BlockMasks(made[0], made[1], made[2], made[3], made[5], double)


PARTS = 4  # of a backward pass that keeps a part's gradients of states at a time
LARGE = 64 << 20  # bytes of all gradients of states from which on it does


@cache
def span(gpu: device.Device, programs: int, chunks: int, K: int) -> int:
    """Returns the chunks of a segment where that takes the least time, by sizes alone; 0 for no segments, as where
    chains fill half of a GPU or two segments' M do not fit in a multiprocessor's shared memory.

    In tenths of a lone chain's step, fitted to one H200: a step takes 10, and 6 more on a full GPU; one without outputs
    3, and 3 for each round of programs; a segment in `chain_segments` 11; two more starts 20. A first segment needs no
    M, and a last one neither."""
    M = gpu.multiprocessors
    BK = max(16, triton.next_power_of_2(K))  # `chain_segments` holds two segments' M
    if K > 128 or not 0 < 2 * programs <= M or gpu.backend == "hip" or gpu.shared_memory < 8 * BK * BK + 128 * BK:
        return 0

    def time(count: int) -> float:
        step = 10 + 6 * (programs * count / M) ** 2
        if count == 1:
            return chunks * step
        return -(-chunks // count) * (step + 6 + 3 * (programs * (2 * count - 3) // M)) + 20 + 11 * count

    best = min(range(1, min(M // programs, max(chunks, 1)) + 1), key=time)
    return -(-chunks // best) if best > 1 else 0


def part(chunks: int, size: int) -> int:
    """Returns how many chunks' gradients of states backward keeps, of `size` bytes for all chunks."""
    return -(-chunks // (16 * PARTS)) * 16 if size >= LARGE and chunks >= 8 * PARTS else 0  # by 16: one kernel for all


def _packing(call: DeltaCall, tiles: Tiles, backward: bool) -> tuple[Packing, int]:
    """Where chunks and segments are, and how many chunks backward takes at a time, or 0 for all."""
    (B, T, HV, V), K, C, ends = call.v.shape, call.k.shape[3], tiles.rows, call.ends
    N = B if ends is None else ends.numel() - 1
    slices, most, some = -(-V // tiles.chain), -(-T // C), 0
    length = span(device.of(call.v), N * HV * slices, most if ends is None else -(-most // max(N, 1)), K)
    if not 0 < length < most:
        length, rooms = most + 1, 1 if ends is None else N
        if backward and ends is None:
            some = part(most, B * HV * most * V * K * call.v.element_size())
    else:
        rooms = -(-most // length) if ends is None else T // (length * C) + N
    chunks = most + some if ends is None else T // C + N
    return Packing(ends, T, HV, chunks, N, C, B * T * HV, 0, length, rooms, slices), some


def _in(room: Maybe, width: int, like: torch.Tensor, own: bool = True) -> Maybe:
    """A tensor (B, T, heads, `width`) of `like`'s dtype in the memory of a gradient that is written last, or None where
    it has another form; without `own` its rows may be longer."""
    if room is None or (own and (room.dtype != like.dtype or room.shape[3] != width)):
        return None
    row = room.shape[3] * room.element_size()
    if width * like.element_size() > row or (not own and row % 16):  # rows that loads of 16 bytes reach
        return None
    return room if own else room.view(like.dtype)


def prepare(call: DeltaCall, tiles: Tiles, rooms: tuple[Maybe, Maybe] | None = None) -> tuple[Plan, int]:
    """Makes the matrices of all chunks, and per channel the rows with their decays. Backward gives rooms: dq and dk,
    which hold what is not read when they are written. Also returns the chunks that backward takes at a time."""
    (B, T, HV, V), K, C = call.v.shape, call.k.shape[3], tiles.rows
    low, gate = call.a is not None, call.g.dim() - 2
    form = DeltaForm(
        K, V, max(16, triton.next_power_of_2(K)), tiles.slice, tiles.channels, C, C.bit_length() - 1, gate,
        low, call.normalize, call.v.dtype == torch.float32, _solver(call), False, False,
    )  # fmt: skip
    packing, some = _packing(call, tiles, rooms is not None)
    chunks, width = packing.chunks, 2 * C
    in_q, in_k = rooms or (None, None)
    wide = _wide(call)
    data: dict[str, Any] = {"dtype": call.v.dtype, "device": call.v.device}
    read = plain = None
    if gate == 1:
        both = _in(in_k, width, call.v, False)
        both = torch.empty((B, T, HV, width), **data) if both is None else both
        width, squares = both.shape[3], [both[..., C:], both]
    else:
        squares = [torch.empty((B, HV, chunks, C, C), **data) for _ in range(4 if low else 2)]
        read, plain = squares[2:] if low else (None, None)
    lengths = torch.empty((B, HV, chunks, 2, C), **wide) if call.normalize else None
    decays = None if low else torch.empty((B, HV, chunks, 6 - gate, C), **wide)
    whole = torch.empty((B, HV, chunks) if gate == 1 else (B, HV, chunks, K), **wide)
    matrices = Matrices(squares[0], squares[1], read, plain, lengths, decays, whole, width)
    tensors = tuple(call.rows(t) for t in (call.q, call.k, call.v, call.a, call.b, call.g, call.beta))
    q, k, _, a, b, g, beta = tensors
    reads = Reads(q, k, k, None)
    if gate == 2:
        held = [_in(t, K, call.v) for t in (in_q, in_k)]
        decayed = [torch.empty((B, T, HV, K), **data) if t is None else t for t in (*held, *[None] * (1 + low))]
        reads = Reads(*[call.rows(t) for t in decayed], *[None] * (1 - low))
    present = -(-T // C) if call.ends is None else chunks
    axis = HV if call.ends is not None else B * HV
    plan = Plan(
        form, tiles, packing, (present, axis), (packing.rooms * packing.slices, axis),
        (packing.slices, packing.sequences * HV), tensors, reads, matrices,
        block_masks(form, call) if gate == 2 and not form.SINGLE else None, hopper.serves(call),
    )  # fmt: skip
    facts: dict[str, Any] = {"form": form, "num_warps": tiles.warps[0], "num_stages": 1}
    if tiles.registers is not None:
        facts["maxnreg"] = tiles.registers
    if gate == 1:
        maps = hopper.pair_maps(call, matrices) if plan.hopper and call.ends is None else None
        launch(pairs_by_token, plan.parallel, q, k, g, beta, matrices, packing, maps, **facts)
    else:
        kernel, more = pairs_by_channel, ()
        if plan.masks is not None:
            kernel, more = half_pairs_by_channel, (plan.masks,)
            facts |= half_facts(form, call)
            if once := at_once_facts(form, call):
                _pairs_at_once(plan, once)
                facts["form"] = facts["form"]._replace(APART=apart(device.of(call.v), plan.parallel))
        grid = plan.parallel
        if facts["form"].APART:
            grid = -(-grid[0] // facts["form"].APART), grid[1]
        launch(kernel, grid, q, k, a, b, g, beta, reads, matrices, *more, packing, **facts)
    return plan, some


def _pairs_at_once(plan: Plan, facts: dict[str, Any]) -> None:
    q, k, _, a, b, g, beta = plan.tensors
    more = plan.reads, plan.matrices, plan.masks, plan.packing
    if plan.form.LOW:  # 166 registers would do without a spill, but 128 are quicker
        launch(low_pairs_at_once, plan.parallel, q, k, a, b, g, *more, **facts, maxnreg=128)
    else:
        form = facts["form"]._replace(BS=min(plan.form.BK, plan.tiles.channels))
        launch(pairs_at_once, plan.parallel, q, k, g, beta, *more, **(facts | {"form": form}))


def _wide(call: DeltaCall) -> dict[str, Any]:
    return {"dtype": torch.float32, "device": call.v.device}


def _segments(plan: Plan, call: DeltaCall) -> tuple[Maybe, Maybe]:
    """Room for N and M of all segments and for the states before them, if sequences are cut."""
    K, V = plan.form.K, plan.form.V
    if plan.packing.span * plan.packing.unit > plan.packing.tokens:
        return None, None
    shape, fresh = (plan.chains[1], plan.packing.rooms), _wide(call)
    return torch.empty((*shape, V + K, K), **fresh), torch.empty((*shape, V, K), **fresh)


def _join(plan: Plan, call: DeltaCall, states: ChunkStates, reverse: bool) -> None:
    """Finds the states before segments, from their N and M."""
    gpu, single = device.of(call.v), plan.form.SINGLE
    form = plan.form._replace(BV=16, PRECISION=call.precision if single else _thrice(gpu))
    facts: dict[str, Any] = {"num_warps": 8, "num_stages": 2 if gpu.capability == 90 else 1}
    grid = -(-form.V // 16), plan.pairs[1]
    launch(chain_segments, grid, states.made, states.starts, plan.packing, form=form, REVERSE=reverse, **facts)


def chain(plan: Plan, call: DeltaCall, o: Maybe, states: ChunkStates) -> None:
    """Goes through all sequences; where they are cut, first for N and M of each segment."""
    args, packing = (plan.reads, plan.tensors[2], call.rows(o), plan.matrices, states), plan.packing
    form = plan.form._replace(BV=plan.tiles.chain, OUT=o is not None)
    facts: dict[str, Any] = {"num_warps": plan.tiles.warps[1], "num_stages": plan.tiles.stages[0]}
    if states.made is not None and plan.hopper:
        hopper.walk(plan, call, hopper.STATES, call.v, None, states, None, (None, None), packing)
        _join(plan, call, states, False)
    elif states.made is not None:
        both = packing._replace(slices=packing.slices + -(-form.K // form.BV))
        grid, ends = (packing.rooms * both.slices, plan.chains[1]), form._replace(OUT=False, ENDS=True)
        launch(chain_states, grid, *args, both, call.scale, form=ends, **facts)
        _join(plan, call, states, False)
    if plan.hopper:
        mode, out = (hopper.STATES, states.solved) if o is None else (hopper.OUTPUTS, o)
        hopper.walk(plan, call, mode, call.v, out, states, states.before, (None, None), packing)
        return
    launch(chain_states, plan.chains, *args, packing, call.scale, form=form, **facts)


def delta_fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = DeltaCall(*inputs)
    plan, _ = prepare(call, tiles_of(call, False))
    chain(plan, call, o, ChunkStates(call.first, last, None, None, None, None, *_segments(plan, call)))


def _from(t: Maybe, chunk: int) -> Maybe:
    return None if t is None else t[:, :, chunk:]


def _chunk_gradients(plan: Plan, call: DeltaCall, rows: Rows, states: ChunkStates, grads: Grads, begin: int,
                     count: int) -> None:  # fmt: skip
    """The gradients of q, k, a, b and the gate in `count` chunks from `begin` on."""
    q, k, v, a, b, g, beta = plan.tensors
    m, packing = plan.matrices, plan.packing._replace(begin=begin)
    own = *[_from(t, begin) for t in (m.lengths, m.decays, m.whole)], m.width  # found by a program's number
    matrices = Matrices(*m[:4], *own)
    before, later = _from(states.before, begin), _from(states.later, begin)
    states = ChunkStates(None, None, before, later, states.solved, states.turned, None, None)
    facts: dict[str, Any] = {"form": plan.form, "num_warps": plan.tiles.warps[2], "num_stages": plan.tiles.stages[1]}
    grid = count, plan.parallel[1]
    if plan.hopper and plan.form.GATE == 1:
        hopper.start_gradients(grid, call, rows.data, matrices, states, grads, packing)
    elif plan.form.GATE == 1:
        launch(gradients_by_token, grid, q, k, g, rows, matrices, states, grads, packing, call.scale, **facts)
    elif plan.form.SINGLE:
        launch(
            gradients_by_channel, grid, q, k, v, a, b, g, beta, rows, matrices, states, grads, packing, call.scale,
            **facts,
        )  # fmt: skip
    else:
        facts |= half_facts(plan.form, call)
        once = at_once_facts(plan.form, call)
        if once and plan.form.LOW:
            wide = once["form"]._replace(BV=max(16, triton.next_power_of_2(plan.form.V)))
            args = q, k, v, a, b, g, rows, matrices, states, grads, plan.masks, packing, call.scale
            launch(gradients_at_once, grid, *args, **(once | {"form": wide}))
        elif once and plan.hopper and hopper.serves_channels(call, grads):
            least = 2.0 ** -once["form"].HALVINGS
            hopper.start_channel_gradients(grid, call, rows.data, matrices, states, grads, packing, least)
        else:
            once = None
        if once:
            count = apart(device.of(call.v), grid)
            facts["form"], grid = facts["form"]._replace(APART=count), (-(-grid[0] // count), grid[1])
        launch(
            half_gradients_by_channel, grid, q, k, v, a, b, g, rows, matrices, states, grads, plan.masks, packing,
            call.scale, **facts,
        )  # fmt: skip


def _end_rows(
    plan: Plan, call: DeltaCall, rows: Rows, states: ChunkStates, grads: Grads, wanted: tuple[bool, ...]
) -> None:
    """The last row's gradient of b, and with time reversed the second row's of a, where they are one number times a
    row: RWKV-7 in half precision, where no gradient of the last state is given, and no first state."""
    if not plan.form.LOW or plan.form.SINGLE:
        return
    q, k, v, a, b, g, _ = plan.tensors
    form, N = plan.form._replace(BV=max(16, min(plan.tiles.chain, 4096 // plan.form.BK))), plan.packing.sequences
    for reverse in wanted:
        grad, kept = (grads.a, states.later) if reverse else (grads.b, states.before)
        if (call.first if reverse else states.first) is None:
            args = q, k, v, a, b, g, rows, kept, grad, plan.packing, call.scale
            launch(end_rows, (N * call.v.shape[2],), *args, form=form, REVERSE=reverse, num_warps=4)


def _reverse(
    plan: Plan, call: DeltaCall, rows: Rows, states: ChunkStates, grads: Grads, some: int, other: Maybe
) -> None:
    """The chain in reverse and the gradients of its chunks, `some` chunks at a time if not 0. other: beta's gradient
    over the second half of v's columns, where halves have their own."""
    form, packing, present = plan.form._replace(BV=plan.tiles.chain), plan.packing, plan.parallel[0]
    facts: dict[str, Any] = {"num_warps": plan.tiles.warps[1], "num_stages": plan.tiles.stages[0]}

    def walk(form: DeltaForm, states: ChunkStates, packing: Packing) -> None:
        if plan.hopper:
            out, kept = (None, None) if form.ENDS else (grads.v, states.later)
            sums = grads.beta, other
            hopper.walk(plan, call, hopper.REVERSE, rows.data, out, states, kept, sums, packing)
            return
        args = plan.reads, rows, plan.matrices, states, grads, packing, call.scale
        launch(chain_gradients, plan.chains, *args, form=form, **facts)

    if states.made is not None:
        walk(form._replace(ENDS=True), states, packing)
        _join(plan, call, states, True)
    if not some:
        walk(form, states, packing)
        _chunk_gradients(plan, call, rows, states, grads, 0, present)
        _end_rows(plan, call, rows, states, grads, (False, True))
        return
    carry = torch.empty((*plan.pairs[1:], form.K, form.V), **_wide(call))
    first = states.first
    if first is None:
        first = carry.fill_(0)
    for begin in range((present - 1) // some * some, -1, -some):
        last = states.last if begin == 0 and states.last is not None else carry
        walk(form, states._replace(first=first, last=last), packing._replace(begin=begin, span=some))
        _chunk_gradients(plan, call, rows, states, grads, begin, min(some, present - begin))
        if begin + some >= present:  # the states before the last chunks are still there
            _end_rows(plan, call, rows, states, grads, (False,))
        first = carry
    _end_rows(plan, call, rows, states, grads, (True,))


def delta_bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, dbeta: Maybe, da: Maybe, db: Maybe,
    dfirst: Maybe, do: torch.Tensor, dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    """Makes the matrices and the states again, then the states' gradients and everything else, in reverse order.

    Memory: the gradients of states are those of some chunks at a time, and lie `some` chunks on in the tensor of the
    states, where those have been read. L and P lie in dk's rows, or the rows that read the state in dq's and dk's,
    and U in dq's: the kernel that writes a row of dq and dk comes after all that read what lies there, or reads it
    first."""
    call = DeltaCall(*inputs)
    plan, some = prepare(call, tiles_of(call, True), (dq, dk))
    B, _, HV, V = call.v.shape
    by_token, K = plan.form.GATE == 1, plan.form.K
    fresh: dict[str, Any] = {"dtype": call.v.dtype, "device": call.v.device}
    before = torch.empty((B, HV, plan.packing.chunks, V, K), **fresh)
    later = before[:, :, some:] if some else torch.empty_like(before)
    solved = _in(dq if by_token else None, V, dv)
    solved = torch.empty(dv.shape, **fresh) if solved is None else solved
    turned = torch.empty(dv.shape, **fresh) if plan.form.LOW else None
    made, starts = _segments(plan, call)
    chain(plan, call, None, ChunkStates(call.first, None, before, None, solved, None, made, starts))
    slices, sums = plan.packing.slices, dbeta
    if dbeta is not None and slices > 1:
        sums = torch.empty((slices, *dbeta.shape), dtype=torch.float32, device=call.v.device)
    if plan.hopper and not hopper.mapped(do):
        do = torch.empty(do.shape, **fresh).copy_(do)
    rows = call.rows(do)
    assert rows is not None
    states = ChunkStates(dlast, dfirst, before, later, solved, turned, made, starts)
    other = torch.empty_like(dbeta) if dbeta is not None and plan.hopper else None
    _reverse(plan, call, rows, states, Grads(dq, dk, dv, dg, sums, da, db), some, other)
    if dbeta is not None and other is not None:
        torch.add(dbeta, other, out=dbeta)  # as replay.py repeats it
    if dbeta is not None and sums is not None and slices > 1:
        torch.sum(sums, 0, out=dbeta)
