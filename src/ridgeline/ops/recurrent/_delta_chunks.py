"""Starts of the delta engine: what its kernels take, and their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent import _step
from ridgeline.ops.recurrent._delta import (
    ChunkStates,
    DeltaForm,
    Grads,
    Matrices,
    Packing,
    Reads,
    chain_gradients,
    chain_states,
    gradients_by_channel,
    gradients_by_token,
    pairs_by_channel,
    pairs_by_token,
)
from ridgeline.ops.recurrent._delta_channels import (
    BlockMasks,
    half_gradients_by_channel,
    half_pairs_by_channel,
    write_block_masks,
)
from ridgeline.ops.recurrent._scan import Rows

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
            return Tiles(64, BV, min(BV, 64), min(BK, 32), (4, wide, 4), (2 if backward else 3, 1))
        return Tiles(32, BV, min(BV, 32), min(BK, 32), (4, wide, 4), (3, 1))
    BV = min(BV, 64 if BK <= 128 else 32)
    return Tiles(32, BV, min(BV, 32), 16, (4, 8 if BK > 64 else 4, 4), (1, 1))


class Plan(NamedTuple):
    """What the launches of a call share."""

    form: DeltaForm
    tiles: Tiles
    packing: Packing
    parallel: tuple[int, int]  # programs: one for each chunk
    chains: tuple[int, int]
    tensors: tuple[Any, ...]  # q, k, v, a, b, g and beta
    reads: Reads
    matrices: Matrices
    masks: BlockMasks | None  # with a gate per channel in half precision


def _solver(call: DeltaCall) -> str:
    """The precision of the float32 products that solve a chunk; other products take the data's dtype."""
    thrice = "ieee" if device.of(call.v).backend == "hip" else "tf32x3"  # AMD's compiler has no tf32x3
    half = {torch.bfloat16: "tf32", torch.float16: thrice}
    return half.get(call.v.dtype, call.precision)


def span(dtype: torch.dtype) -> int:
    """`DeltaForm.SPAN`: bfloat16's range is 2^127 both ways, and rows need their share; float16 has none to spare."""
    return 60 if dtype == torch.bfloat16 else 0


def half_facts(form: DeltaForm, call: DeltaCall) -> dict[str, Any]:
    """What the kernels of `_delta_channels.py` are compiled with: their form, and on Hopper Triton's newer assembler,
    since the other one has miscompiled such a kernel with 4 warps (docs/compiler.md)."""
    facts: dict[str, Any] = {"form": form._replace(SPAN=span(call.v.dtype))}
    return facts | ({"assembler": "newer"} if device.of(call.v).capability == 90 else {})


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
    early = (made[3], made[5]) if form.LOW else (None, None)
    return BlockMasks(made[0], made[1], made[2], *early)


def prepare(call: DeltaCall, tiles: Tiles) -> Plan:
    """Makes the matrices of all chunks, and per channel the rows with their decays."""
    (B, T, HV, V), K, C = call.v.shape, call.k.shape[3], tiles.rows
    low, gate = call.a is not None, call.g.dim() - 2
    form = DeltaForm(
        K, V, max(16, triton.next_power_of_2(K)), tiles.slice, tiles.channels, C, C.bit_length() - 1, gate,
        low, call.normalize, call.v.dtype == torch.float32, _solver(call), False,
    )  # fmt: skip
    sequences = B if call.ends is None else call.ends.numel() - 1
    chunks = -(-T // C) if call.ends is None else T // C + sequences
    wide: dict[str, Any] = {"dtype": torch.float32, "device": call.v.device}
    data: dict[str, Any] = {"dtype": call.v.dtype, "device": call.v.device}
    squares = [torch.empty((B, HV, chunks, C, C), **data) for _ in range(4 if low else 2)]
    read, plain = squares[2:] if low else (None, None)
    lengths = torch.empty((B, HV, chunks, 2, C), **wide) if call.normalize else None
    decays = None if low else torch.empty((B, HV, chunks, 4, C), **wide)
    whole = torch.empty((B, HV, chunks) if gate == 1 else (B, HV, chunks, K), **wide)
    matrices = Matrices(squares[0], squares[1], read, plain, lengths, decays, whole)
    tensors = tuple(call.rows(t) for t in (call.q, call.k, call.v, call.a, call.b, call.g, call.beta))
    q, k, _, a, b, g, beta = tensors
    reads = Reads(q, k, k, None)
    if gate == 2:
        decayed = [torch.empty((B, T, HV, K), **data) for _ in range(3 + low)]
        reads = Reads(*[call.rows(t) for t in decayed], *[None] * (1 - low))
    plan = Plan(
        form, tiles, Packing(call.ends, T, HV, chunks, sequences, C, B * T * HV), (chunks, B * HV),
        (-(-V // tiles.chain), sequences * HV), tensors, reads, matrices,
        block_masks(form, call) if gate == 2 and not form.SINGLE else None,
    )  # fmt: skip
    facts: dict[str, Any] = {"form": form, "num_warps": tiles.warps[0], "num_stages": 1}
    if tiles.registers is not None:
        facts["maxnreg"] = tiles.registers
    if gate == 1:
        launch(pairs_by_token, plan.parallel, q, k, g, beta, matrices, plan.packing, **facts)
    else:
        kernel, more = pairs_by_channel, ()
        if plan.masks is not None:
            kernel, more = half_pairs_by_channel, (plan.masks,)
            facts |= half_facts(form, call)
        launch(kernel, plan.parallel, q, k, a, b, g, beta, reads, matrices, *more, plan.packing, **facts)
    return plan


def chain(plan: Plan, call: DeltaCall, o: Maybe, states: ChunkStates) -> None:
    form = plan.form._replace(BV=plan.tiles.chain, OUT=o is not None)
    launch(
        chain_states, plan.chains, plan.reads, plan.tensors[2], call.rows(o), plan.matrices, states,
        plan.packing, call.scale, form=form, num_warps=plan.tiles.warps[1], num_stages=plan.tiles.stages[0],
    )  # fmt: skip


def delta_fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    call = DeltaCall(*inputs)
    if call.q.shape[1] == 1 and call.ends is None:
        token = _step.Token(call.q, call.k, call.v, call.g, None, call.a, call.b, call.beta, call.normalize)
        _step.start(o, last, token, call.first, call.scale)
        return
    chain(prepare(call, tiles_of(call, False)), call, o, ChunkStates(call.first, last, None, None, None, None))


def delta_bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dg: Maybe, dbeta: Maybe, da: Maybe, db: Maybe,
    dfirst: Maybe, do: torch.Tensor, dlast: Maybe, *inputs: Any,
) -> None:  # fmt: skip
    """Makes the matrices and the states again, then the states' gradients, then everything else chunk by chunk."""
    call = DeltaCall(*inputs)
    plan = prepare(call, tiles_of(call, True))
    B, _, HV, V = call.v.shape
    shape = B, HV, plan.packing.chunks, V, call.k.shape[3]
    fresh: dict[str, Any] = {"dtype": call.v.dtype, "device": call.v.device}
    before, later, solved = torch.empty(shape, **fresh), torch.empty(shape, **fresh), torch.empty(dv.shape, **fresh)
    turned = torch.empty(dv.shape, **fresh) if plan.form.LOW else None
    chain(plan, call, None, ChunkStates(call.first, None, before, None, solved, None))
    q, k, v, a, b, g, beta = plan.tensors
    rows, slices, sums = call.rows(do), plan.chains[0], dbeta
    if dbeta is not None and slices > 1:
        sums = torch.empty((slices, *dbeta.shape), dtype=torch.float32, device=call.v.device)
    grads = Grads(dq, dk, dv, dg, sums, da, db)
    launch(
        chain_gradients, plan.chains, plan.reads, rows, plan.matrices,
        ChunkStates(dlast, dfirst, None, later, solved, turned), grads, plan.packing, call.scale,
        form=plan.form._replace(BV=plan.tiles.chain), num_warps=plan.tiles.warps[1], num_stages=plan.tiles.stages[0],
    )  # fmt: skip
    states = ChunkStates(None, None, before, later, solved, turned)
    facts: dict[str, Any] = {"form": plan.form, "num_warps": plan.tiles.warps[2], "num_stages": plan.tiles.stages[1]}
    if plan.form.GATE == 1:
        launch(
            gradients_by_token, plan.parallel, q, k, g, rows, plan.matrices, states, grads, plan.packing, call.scale,
            **facts,
        )  # fmt: skip
    elif plan.form.SINGLE:
        launch(
            gradients_by_channel, plan.parallel, q, k, v, a, b, g, beta, rows, plan.matrices, states, grads,
            plan.packing, call.scale, **facts,
        )  # fmt: skip
    else:
        facts |= half_facts(plan.form, call)
        launch(
            half_gradients_by_channel, plan.parallel, q, k, v, a, b, g, rows, plan.matrices, states, grads,
            plan.masks, plan.packing, call.scale, **facts,
        )  # fmt: skip
    if dbeta is not None and sums is not None and slices > 1:
        torch.sum(sums, 0, out=dbeta)
