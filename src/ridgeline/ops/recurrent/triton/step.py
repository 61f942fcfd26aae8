"""A decoder's step of a recurrent layer: one token, and each state read and written once, over itself if asked.

    S' = diag(e^g) S + b (a^T S) + k v^T        o = scale S'^T q, or with a bonus u: scale (S + diag(u) k v^T)^T q

The bytes of the state bound it. A program holds all rows and some columns of a state, so that the sums over rows stay
in one block. a and b are RWKV-7's, and optional. The gated delta rule has beta instead: S' = diag(e^g) S, to which it
adds beta k (v - S'^T k)^T. Mamba-2's step sizes, skip and gate are applied on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.recurrent.triton.scan import Rows
from ridgeline.tiles.activations import silu
from ridgeline.tiles.online_softmax import exact_exp, log

Maybe = torch.Tensor | None


class Token(NamedTuple):
    """The tensors of one token: (B, 1, heads, columns), a gate also (B, 1, heads); bonus (heads, K)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: Maybe = None
    u: Maybe = None
    a: Maybe = None
    b: Maybe = None
    beta: Maybe = None  # (B, 1, heads)
    normalize: bool = False  # q and k are divided by their L2 norms


class Mamba(NamedTuple):
    """What Mamba-2 has around the state: A, D, dt_bias (heads,), with the step of each, and z as Rows or None."""

    A: Any
    A_step: Any
    D: Any
    D_step: Any
    bias: Any
    bias_step: Any


class State(NamedTuple):
    """States (B * heads, K, V) in float32, next to each other; steps of their rows and columns."""

    first: Any  # None for zeros
    last: Any
    row: Any
    column: Any


class Form(NamedTuple):
    """What a kernel is compiled for."""

    K: int
    V: int
    BK: int
    BV: int
    GATE: int  # 0: none, 1: for each head, 2: for each row of the state, 3: Mamba-2's dt, times A
    SOFTPLUS: bool
    DELTA: bool  # b is the delta rule's beta
    NORMALIZE: bool


@triton.jit
def _row(rows, n, h, columns, width):
    """A token's row of a head, in float32."""
    place = rows.data + n.to(tl.int64) * rows.batch + (h // rows.group) * rows.head
    return tl.load(place + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _softplus(x):
    """log(1 + e^x), to a few ulp also where it is small."""
    e = exact_exp(-tl.abs(x), tl.float32)
    u = 1.0 + e
    tail = tl.where(u == 1.0, e, log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def recurrent_step(out, q, k, v, gate, bonus, a, b, z, mamba, state, heads, scale, form: tl.constexpr):
    """All rows and BV columns of one head's state. gate: Rows, for Mamba-2 of dt."""
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    slices: tl.constexpr = (form.V + form.BV - 1) // form.BV
    pair = tl.program_id(0) // slices
    n, h = pair // heads, pair % heads
    depth, columns = tl.arange(0, BK), tl.program_id(0) % slices * BV + tl.arange(0, BV)
    inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
    at = pair.to(tl.int64) * (form.K * form.V) + depth[:, None] * state.row + columns[None, :] * state.column
    old = tl.zeros([BK, BV], tl.float32)
    if state.first is not None:
        old = tl.load(state.first + at, mask=inside, other=0.0)
    tq, tk = _row(q, n, h, depth, form.K), _row(k, n, h, depth, form.K)
    if form.NORMALIZE:
        tq *= tl.rsqrt(tl.sum(tq * tq, 0) + 1e-6)
        tk *= tl.rsqrt(tl.sum(tk * tk, 0) + 1e-6)
    x = _row(v, n, h, columns, form.V)
    tv = x
    new = old
    if form.GATE == 2:
        new = old * exact_exp(_row(gate, n, h, depth, form.K), tl.float32)[:, None]
    elif form.GATE > 0:
        g = tl.load(gate.data + n.to(tl.int64) * gate.batch + (h // gate.group) * gate.head).to(tl.float32)
        if form.GATE == 3:
            if mamba.bias is not None:
                g += tl.load(mamba.bias + h * mamba.bias_step).to(tl.float32)
            if form.SOFTPLUS:
                g = _softplus(g)
            tv = x * g
            g *= tl.load(mamba.A + h * mamba.A_step).to(tl.float32)
        new = old * exact_exp(g, tl.float32)
    if a is not None:
        along = tl.sum(_row(a, n, h, depth, form.K)[:, None] * old, 0)
        new += _row(b, n, h, depth, form.K)[:, None] * along[None, :]
    if form.DELTA:
        beta = tl.load(b.data + n.to(tl.int64) * b.batch + (h // b.group) * b.head).to(tl.float32)
        tv = (tv - tl.sum(tk[:, None] * new, 0)) * beta
    new += tk[:, None] * tv[None, :]
    if bonus is not None:
        u = tl.load(bonus + (h // q.group) * form.K + depth, mask=depth < form.K, other=0.0).to(tl.float32)
        found = tl.sum(tq[:, None] * old, 0) + tl.sum(tq * u * tk, 0) * tv
    else:
        found = tl.sum(tq[:, None] * new, 0)
    found *= scale
    if form.GATE == 3:  # noqa: SIM102 - Triton 3.6 cannot compare a tuple that holds None with None
        if mamba.D is not None:
            found += x * tl.load(mamba.D + h * mamba.D_step).to(tl.float32)
    if z is not None:
        found *= silu(_row(z, n, h, columns, form.V), tl.float32)
    tl.store(state.last + at, new, mask=inside)
    to = out.data + n.to(tl.int64) * out.batch + h * out.head + columns
    tl.store(to, found.to(out.data.dtype.element_ty), mask=columns < form.V)


def _rows(t: torch.Tensor, heads: int) -> Rows:
    batch, token, head = t.stride()[:3]
    return Rows(t, batch, token, head, max(heads // max(t.shape[2], 1), 1))


def tiles(gpu: device.Device, pairs: int, K: int, V: int) -> tuple[int, int, int]:
    """Rows and columns of a program's part of a state, and warps: 32 numbers a thread; narrower parts of few states."""
    BK = triton.next_power_of_2(K)
    BV = min(triton.next_power_of_2(V), 32)
    if pairs * -(-V // BV) < 4 * gpu.multiprocessors:
        BV = min(BV, 16)
    return BK, BV, min(max(BK * BV // (32 * gpu.warp), 1), 8)


def start(
    o: torch.Tensor, last: torch.Tensor, token: Token, first: Maybe, scale: float, *, dt: Maybe = None,
    mamba: Mamba | None = None, z: Maybe = None, softplus: bool = False,
) -> None:  # fmt: skip
    """Starts a step. first, last: (B, HV, K, V) in float32 with the same strides, contiguous or each state transposed;
    they may be one tensor. dt: (B, 1, HV), with `mamba`, in place of a gate."""
    q, k, v = token.q, token.k, token.v
    B, HV, K, V = *last.shape[:2], q.shape[3], v.shape[3]
    gpu = device.of(q)
    BK, BV, warps = tiles(gpu, B * HV, K, V)
    gate, kind = (token.g, 0 if token.g is None else token.g.dim() - 2) if dt is None else (dt, 3)
    given = [
        None if t is None else _rows(t, HV) for t in (gate, token.a, token.b if token.beta is None else token.beta, z)
    ]
    form = Form(K, V, BK, BV, kind, softplus, token.beta is not None, token.normalize)
    state = State(first, last, last.stride(2), last.stride(3))
    launch(
        recurrent_step, (B * HV * -(-V // BV),), _rows(o, HV), _rows(q, HV), _rows(k, HV), _rows(v, HV), given[0],
        token.u, *given[1:], mamba, state, HV, scale, form=form, num_warps=warps,
    )  # fmt: skip
