"""rope: rotary position embedding: pairs (a, b) of a head's dimensions rotate by an angle that grows with position.

    a' = a cos - b sin,  b' = b cos + a sin            backward: the same with the negative angle

Pairs are (x_i, x_{i + r}) (half-split) or (x_{2i}, x_{2i + 1}) (interleaved) for i < r; later dimensions stay.
One launch serves q and k. A program takes several heads at several positions; all heads but the first find the cosines
and sines in L1. The floor is one read and one write of q and k.
Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, dtype_name, nbytes, readable
from ridgeline.select import by_kind, eager, run

Pair = tuple[torch.Tensor, torch.Tensor]


class Heads(NamedTuple):
    """A tensor (batch, heads, seq, D) with its strides. No tuple here holds another: Triton 3.6 would mix them up."""

    data: Any
    batch_stride: int
    head_stride: int
    seq_stride: int
    column_stride: int


class Angles(NamedTuple):
    """Cosines and sines, (length, R), with their strides."""

    cos: Any
    sin: Any
    cos_row_stride: int
    cos_column_stride: int
    sin_row_stride: int
    sin_column_stride: int
    length: int


class Positions(NamedTuple):
    """Positions, (batch, seq), with their strides; data is None if they are 0, 1, ..."""

    data: Any
    batch_stride: int
    seq_stride: int


class Form(NamedTuple):
    """How a head turns: D dimensions in R pairs (BR: the power of 2 from R on), BACK by the negative angle.

    BP: the power of 2 from the number of dimensions on that stay, or 0.
    """

    D: int
    R: int
    INTERLEAVED: bool
    BACK: bool
    BR: int
    BP: int


@triton.jit
def _turned(
    y, x, angles, at, place, fault, seq, batch, head, form: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr
):
    """Rotates heads from `head` on at positions `at` by the angles in rows `place`; fault: (BS,), 0 or NaN, or None.

    Loads of all heads come first, then loads of the angles, then the arithmetic.
    """
    R: tl.constexpr = form.R
    BR: tl.constexpr = form.BR
    BP: tl.constexpr = form.BP
    h = (head + tl.arange(0, BH)).to(tl.int64)[:, None, None]
    rows = at[None, :, None]
    known = rows < seq
    if HEADS % BH:
        known &= h < HEADS
    at_x = x.data + batch * x.batch_stride + h * x.head_stride + rows * x.seq_stride
    at_y = y.data + batch * y.batch_stride + h * y.head_stride + rows * y.seq_stride
    pair = tl.arange(0, BR)[None, None, :]
    if form.INTERLEAVED:
        column = tl.arange(0, 2 * BR)[None, None, :]
        both = known & (column < 2 * R)
        values = tl.load(at_x + column * x.column_stride, mask=both).to(tl.float32)
        a, b = tl.split(tl.reshape(values, (BH, at.shape[0], BR, 2)))
    else:
        half = known & (pair < R)
        a = tl.load(at_x + pair * x.column_stride, mask=half).to(tl.float32)
        b = tl.load(at_x + (pair + R) * x.column_stride, mask=half).to(tl.float32)
    if BP:
        passed = 2 * R + tl.arange(0, BP)[None, None, :]
        beyond = known & (passed < form.D)
        rest = tl.load(at_x + passed * x.column_stride, mask=beyond)
    row = place[None, :, None] + tl.zeros_like(h)
    turns = known & (pair < R)
    at_c = angles.cos + row * angles.cos_row_stride + pair * angles.cos_column_stride
    at_s = angles.sin + row * angles.sin_row_stride + pair * angles.sin_column_stride
    c = tl.load(at_c, mask=turns, other=0).to(tl.float32)
    s = tl.load(at_s, mask=turns, other=0).to(tl.float32)
    if form.BACK:
        s = -s
    if fault is not None:
        c += fault[None, :, None]
        if BP:
            rest += fault[None, :, None].to(rest.dtype)
    to = y.data.dtype.element_ty
    if form.INTERLEAVED:
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (BH, at.shape[0], 2 * BR))
        tl.store(at_y + column * y.column_stride, turned.to(to), mask=both)
    else:
        tl.store(at_y + pair * y.column_stride, (a * c - b * s).to(to), mask=half)
        tl.store(at_y + (pair + R) * y.column_stride, (b * c + a * s).to(to), mask=half)
    if BP:
        tl.store(at_y + passed * y.column_stride, rest, mask=beyond)


@triton.jit
def _fwd(
    yq,
    yk,
    q,
    k,
    angles,
    positions,
    batches,
    seq,
    form: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
):
    of_q: tl.constexpr = tl.cdiv(Q, BH)
    tiles = tl.cdiv(seq, BS)
    # Positions of one group are adjacent, so programs that run together read memory in order.
    group = tl.program_id(0) // tiles
    at = (tl.program_id(0) % tiles).to(tl.int64) * BS + tl.arange(0, BS)
    batch = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    seq = tl.where(batch < batches, seq, 0)
    place = at
    fault = None
    if positions.data is not None:
        where = positions.data + batch * positions.batch_stride + at * positions.seq_stride
        place = tl.load(where, mask=at < seq, other=0)
        fault = tl.where((place >= 0) & (place < angles.length), 0.0, float("nan"))
        place = tl.minimum(tl.maximum(place, 0), angles.length - 1)
    if group < of_q:
        _turned(yq, q, angles, at, place, fault, seq, batch, group * BH, form, Q, BH)
    else:
        _turned(yk, k, angles, at, place, fault, seq, batch, (group - of_q) * BH, form, K, BH)


_SPACE = [{"BH": h, "BS": s, "num_warps": w} for h in (1, 2, 4, 8, 16) for s in (1, 2, 4, 8, 16, 32) for w in (2, 4, 8)]


def _space(row: int) -> list[tuning.Config]:
    """Tiles that give each thread 16 or 32 bytes; `row` is the number of threads for a row."""
    return [c for c in _SPACE if row * c["BH"] * c["BS"] in (32 * c["num_warps"], 64 * c["num_warps"])]


def _launch(back: bool, yq: torch.Tensor, yk: torch.Tensor, *args: Any) -> None:
    q, k, cos, sin, positions, interleaved = args
    (batch, q_heads, seq, d), k_heads, (length, r) = q.shape, k.shape[1], cos.shape
    br = triton.next_power_of_2(r)
    # Threads per row, with 16 bytes each of its halves, or of its pairs.
    row = max(1, br * q.element_size() * (1 + interleaved) // 16)
    most = min(8, triton.next_power_of_2(seq))

    def config() -> tuning.Config:
        def rule() -> tuning.Config:
            """16 bytes of a row per thread; eight warps cover up to eight positions, and heads."""
            rows = max(1, 256 // row)
            return {"BH": max(1, rows // most), "BS": min(rows, most), "num_warps": 8}

        key = f"{dtype_name(q)} {br}{' interleaved' if interleaved else ''} {most}"
        return tuning.config(device.of(q), "rope", "turn", key, rule, lambda: _space(row))

    def grid(c: tuning.Config) -> tuple[int, int, int]:
        groups = triton.cdiv(q_heads, c["BH"]) + triton.cdiv(k_heads, c["BH"])
        return groups * triton.cdiv(seq, c["BS"]), min(batch, 32768), triton.cdiv(batch, 32768)

    steps = (0, 0) if positions is None else (0, positions.stride(0)) if positions.dim() == 1 else positions.stride()
    passed = triton.next_power_of_2(d - 2 * r) if d > 2 * r else 0
    shape = {"form": Form(d, r, interleaved, back, br, passed), "Q": q_heads, "K": k_heads}
    heads = [Heads(t, *t.stride()) for t in (yq, yk, q, k)]
    (cos_row, cos_column), (sin_row, sin_column) = cos.stride(), sin.stride()
    angles = Angles(cos, sin, cos_row, cos_column, sin_row, sin_column, length)
    given = *heads, angles, Positions(positions, *steps), batch, seq
    launch(_fwd, grid, *given, config=config, key=(br, most), **shape)


@kernel_op(
    "rope_turn(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool back, str? impl)"
    " -> (Tensor, Tensor)"
)
def _turn(q: torch.Tensor, k: torch.Tensor, *args: Any) -> Pair:
    *rest, back, impl = args
    out = torch.empty_like(q), torch.empty_like(k)
    run(ROPE, "bwd" if back else "fwd", impl, out, q, k, *rest)
    return out


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Pair:
        positions, interleaved, impl = rest
        ctx.save_for_backward(cos, sin, positions)
        ctx.facts = interleaved, impl
        return _turn(q, k, cos, sin, positions, interleaved, False, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Any:
        (for_q, for_k, *_), (interleaved, impl) = ctx.needs_input_grad, ctx.facts
        given = dq if for_q else dq[:, :0], dk if for_k else dk[:, :0]  # no heads where no gradient is needed
        dq, dk = _turn(*given, *ctx.saved_tensors, interleaved, True, impl)
        return dq if for_q else None, dk if for_k else None, None, None, None, None, None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> Pair:
    r = cos.shape[1]
    c, s = (t[: q.shape[2]] if positions is None else t[positions].unsqueeze(-3) for t in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = (x[..., 0 : 2 * r : 2], x[..., 1 : 2 * r : 2]) if interleaved else (x[..., :r], x[..., r : 2 * r])
        pairs = a * c - b * s, b * c + a * s
        front = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat((front, x[..., 2 * r :]), -1).to(x.dtype)

    return turned(q), turned(k)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with rotary position embedding, as new tensors of their shapes and dtypes. Gradients flow to both.

    q: (b, hq, s, d), k: (b, hk, s, d), floating point, any strides; d is even.
    cos, sin: (max_seq, r), any floating dtype, without gradients: a column per pair of the first 2r <= d dimensions.
    positions: (b, s) or (s), int64: rows of cos and sin; None means 0, 1, ..., s - 1. Values on a GPU are not
    validated: a position out of range gives a row of NaN. On a CPU, or with RIDGELINE_CHECK=1, it raises.
    interleaved: pairs are (2i, 2i + 1); by default (i, i + r).
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """
    (plain,) = _look(q, k, cos, sin, positions is None, impl)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RidgelineError("rope: cos and sin have no gradients, but require them; give them detached")
    if positions is not None:
        _check_positions(positions, q, cos.shape[0])
    if plain is not None and plain.call is not None:
        return plain.call(q, k, cos, sin, positions=positions, interleaved=interleaved)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return differentiate(_Rope, q, k, cos, sin, positions, interleaved, impl)
    return _turn(q, k, cos, sin, positions, interleaved, False, impl)


@by_kind(4)
def _look(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_order: bool, impl: str | None
) -> tuple[Implementation | None]:
    """Checks the inputs but for positions, and chooses. in_order: there are no positions."""
    for name, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            found = getattr(t, "dtype", type(t).__name__)
            raise RidgelineError(f"rope: {name} must be a floating-point tensor, but is {found}")
        if t.device != q.device:
            raise RidgelineError(f"rope: {name} is on {t.device} but q on {q.device}; they must share one device")
    shape, other = q.shape, k.shape
    if len(shape) != 4 or len(other) != 4 or shape[0] != other[0] or shape[2:] != other[2:]:
        found = f"{tuple(shape)} and {tuple(other)}"
        raise RidgelineError(f"rope: q must be (b, hq, s, d) and k (b, hk, s, d), but they are {found}")
    seq, d = shape[2:]
    if cos.dim() != 2 or cos.shape != sin.shape:
        found = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise RidgelineError(f"rope: cos and sin must both be (max_seq, r), but are {found}")
    length, r = cos.shape
    if d % 2 or not 0 < 2 * r <= d:
        wanted = "head dimensions must be even, with a column of cos for each of at most d/2 pairs"
        raise RidgelineError(f"rope: {wanted}; d is {d}, and cos has {r}")
    if in_order and seq > length:
        raise RidgelineError(f"rope: cos has rows for {length} positions, but the sequence is {seq} long")
    return (eager(ROPE, impl, q, k, cos, sin),)


def _check_positions(positions: torch.Tensor, q: torch.Tensor, length: int) -> None:
    """Raises RidgelineError if the positions do not fit q and a table of so many rows."""
    batch, _, seq, _ = q.shape
    if positions.dtype != torch.int64 or positions.shape not in ((seq,), (batch, seq)):
        found = f"{positions.dtype} {tuple(positions.shape)}"
        raise RidgelineError(f"rope: positions must be int64, ({seq}) or ({batch}, {seq}), but are {found}")
    if positions.device != q.device:
        found = f"positions are on {positions.device} but q on {q.device}"
        raise RidgelineError(f"rope: {found}; they must share one device")
    if readable(positions) and positions.numel() and not (0 <= positions.min() and positions.max() < length):
        found = f"{positions.min()} to {positions.max()}"
        raise RidgelineError(f"rope: positions must be from 0 to {length - 1}, but are from {found}")


def cost(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any) -> tuple[Cost, Cost]:
    r, seq, positions = cos.shape[1], q.shape[2], options.get("positions")
    angles = 2 * min(seq, cos.shape[0]) * r * cos.element_size() + (0 if positions is None else nbytes(positions))
    pairs = (q.numel() + k.numel()) // q.shape[3] * r
    both = Cost(nbytes(q, k) + angles, nbytes(q, k), 6 * pairs)
    return both, both


def _case(
    name: str, q: tuple[int, ...], heads: int, table: tuple[int, int], dtype: str | None = None, **facts: Any
) -> Case:
    tables = (Spec(*table, dtype=dtype, grad=False), Spec(*table, dtype=dtype, grad=False))
    return Case(name, (Spec(*q), Spec(q[0], heads, *q[2:]), *tables), **facts)


def _at(*shape: int) -> dict[str, Any]:
    return {"positions": Spec(*shape, dtype="int64", high=50)}


INTERLEAVED = {"interleaved": True}
BENCH: dict[str, Any] = {"dtypes": ("bfloat16",), "use": "bench"}
ROPE = Op(
    rope,
    reference=reference,
    cost=cost,
    sharding=lambda q, k, **_: (  # heads of k that all heads of q share stay whole
        "q bhSD, k bhSD, cos PD, sin PD, positions bS -> bhSD"
        if min(q.shape[1], k.shape[1]) > 1
        else "q bHSD, k bHSD, cos PD, sin PD, positions bS -> bHSD"
    ),
    cases=[
        _case("3x4x9x16", (3, 4, 9, 16), 2, (40, 8)),
        _case("2x4x33x16 interleaved", (2, 4, 33, 16), 2, (40, 8), kwargs=INTERLEAVED),
        _case("1x3x17x22 partial, float32 angles", (1, 3, 17, 22), 1, (17, 5), "float32"),
        _case("2x5x9x40 partial interleaved at positions", (2, 5, 9, 40), 5, (50, 12), kwargs=INTERLEAVED | _at(2, 9)),
        _case("2x2x9x16 at positions", (2, 2, 9, 16), 1, (50, 8), kwargs=_at(9)),
        _case("1x8x256x64", (1, 8, 256, 64), 2, (256, 32), use="quick"),
        _case("4x32x4096x128", (4, 32, 4096, 128), 8, (4096, 64), **BENCH),
        _case("4x32x4096x128 interleaved", (4, 32, 4096, 128), 8, (4096, 64), kwargs=INTERLEAVED, **BENCH),
        _case("4x32x4096x128 partial", (4, 32, 4096, 128), 8, (4096, 32), **BENCH),
    ],
)

ROPE.eager("naive", "the formula in eager PyTorch: about 20 passes over memory", reference, served=True)
ROPE.compiled("the formula fused by torch.compile: one kernel for q, one for k")
ROPE.kernel(
    "triton",
    "q and k in one launch, 16 bytes per thread; a program's heads share cosines and sines in L1",
    kind="triton",
    served=True,
    fwd=partial(_launch, False),
    bwd=partial(_launch, True),
)
