"""ssd: Mamba-2's state space duality.

    S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T        y_t = scale S_t^T C_t + D x_t, times silu(z_t)

The engine takes C, B, x and dt A as linear attention's q, k, v and gate, and dt as a weight of x's tokens, so neither
dt x nor D x is written; heads that share B and C read them once each from memory or L2, and never a copy. dt's bias and
softplus are PyTorch's, and silu(z) is silu_mul's; a decoder's step in place has all of it in one kernel.
Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv:2405.21060).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import kernel_op, tracing
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, get, nbytes
from ridgeline.ops.recurrent.common.arguments import check
from ridgeline.ops.recurrent.common.calls import (
    IDEA,
    Found,
    Given,
    engine,
    finished,
    formulas,
    join_parts,
    one_step,
    pairs,
    parts_of,
    precision,
    recurrence,
    refusal,
    stepped,
)
from ridgeline.ops.recurrent.common.calls import cost as gated_cost
from ridgeline.ops.recurrent.hopper import shared_heads
from ridgeline.ops.recurrent.triton.chunks import Call, backward, forward
from ridgeline.ops.recurrent.triton.step import Mamba, Token, start
from ridgeline.select import by_kind, eager, select

Maybe = torch.Tensor | None
PAIRS = 1 << 30  # of tokens, in all heads, whose weights `torch` holds several times in float32
through = engine("ssd", ("g", "step", "skip"), shared=True)


def _step_sizes(dt: torch.Tensor, dt_bias: Maybe, dt_softplus: bool, wide: torch.dtype) -> torch.Tensor:
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    return F.softplus(step) if dt_softplus else step


def _ssd(run: Any, kind: torch.dtype, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, D: Maybe, z: Maybe,
         dt_bias: Maybe, dt_softplus: bool) -> Any:  # fmt: skip
    """Calls run(dt x in `kind`, dt A in float32 or wider), and adds what is around it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    step = _step_sizes(dt, dt_bias, dt_softplus, wide)
    y, state = run((x.to(wide) * step.unsqueeze(-1)).to(kind), step * A.to(wide))
    if D is not None or z is not None:
        y = y.to(wide)
        y = y if D is None else y + x.to(wide) * D.to(wide).unsqueeze(-1)
        y = y if z is None else y * F.silu(z.to(wide))
    return y.to(x.dtype), state


def _served(impl: str | None, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
            D: Maybe, z: Maybe, dt_bias: Maybe, dt_softplus: bool, given: Given, scale: float) -> Any:  # fmt: skip
    """y and the final state by the kernels."""
    single, first = torch.float32, given.initial_state
    step = _step_sizes(dt, dt_bias, dt_softplus, single).contiguous()
    first = first if first is None or first.is_contiguous() else first.contiguous()
    skip = None if D is None else D.to(single).contiguous()
    y, state = through.run(C, B, x, step * A.to(single), step, skip, first, given.cu_seqlens, scale, precision(), impl)
    return (y if z is None else get("silu_mul").function(z, y).to(x.dtype)), state


@kernel_op(
    "ssd_token(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor(a!) state, bool dt_softplus, float scale, str? impl) -> Tensor"
)
def _token(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: Maybe, z: Maybe,
    dt_bias: Maybe, state: torch.Tensor, dt_softplus: bool, scale: float, impl: str | None,
) -> torch.Tensor:  # fmt: skip
    """y of one token; the state is replaced in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tracing():
        select(OP, impl, C, B, x, kernels=True)
        steps = [0 if t is None else t.stride(0) for t in (A, D, dt_bias)]
        around = Mamba(A, steps[0], D, steps[1], dt_bias, steps[2])
        start(y, state, Token(C, B, x), state, scale, dt=dt, mamba=around, z=z, softplus=dt_softplus)
    return y


def reference(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: Maybe = None,
    z: Maybe = None, dt_bias: Maybe = None, dt_softplus: bool = True, initial_state: Maybe = None,
    return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False, scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, True, cu_seqlens, False, scale)
    wide, factor = torch.promote_types(x.dtype, torch.float32), 1.0 if scale is None else float(scale)

    def run(v: torch.Tensor, g: torch.Tensor) -> Any:
        return recurrence(C.to(wide), B.to(wide), v, g, None, given, factor)

    found = _ssd(run, wide, x, dt, A, D, z, dt_bias, dt_softplus)
    return finished(found[0], found[1], Given(initial_state, return_state, cu_seqlens, inplace, scale))


def ssd(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: torch.Tensor | None =
    None, z: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, dt_softplus: bool = True, initial_state:
    torch.Tensor | None = None, return_state: bool = False, cu_seqlens: torch.Tensor | None = None, inplace: bool =
    False, scale: float | None = None, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns Mamba-2's state space layer: y, (B, T, H, P). Gradients flow to every floating-point argument.

    x: (B, T, H, P); B, C: (B, T, groups, N), H a multiple of groups; one dtype, float32, float16 or bfloat16, any
    strides whose last is 1; P and N from 1 to 256. Head h uses group h // (H / groups).
    dt: (B, T, H); dt_bias: (H,), added to it; dt_softplus: whether softplus follows. A: (H,), below 0. D: (H,).
    z: (B, T, H, P): y is multiplied by silu(z). These are in any floating-point dtype.
    initial_state: (B, H, N, P), float32; zeros if None. return_state: returns (y, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies the state's part of y; 1 if None.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(
        x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens, dt_softplus, return_state, inplace, scale, impl
    )
    plain, factor, step, tidy, sure = known
    if plain is not None and plain.call is not None:
        return plain.call(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, inplace=inplace, scale=scale,
        )  # fmt: skip
    if step and initial_state is not None:
        z = z if tidy or z is None else z.contiguous()
        y = _token(x, dt, A, B, C, D, z, dt_bias, initial_state, dt_softplus, factor, impl, sure)
        return stepped(y, initial_state, return_state, sure)
    whole = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    found = _served(impl, x, dt, A, B, C, D, z, dt_bias, dt_softplus, whole, factor)
    return finished(found[0], found[1], whole)


@by_kind(10, optional=5, strides=True, gradients=True, sure=True)
def _look(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, initial_state: Any, cu_seqlens: Any,
    dt_softplus: bool, return_state: bool, inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    gates: dict[str, Any] = {"dt": (dt, ("BTR",)), "A": (A, ("R",))}
    gates |= {"D": (D, ("R",))} if D is not None else {}
    gates |= {"z": (z, ("BTRV",))} if z is not None else {}
    gates |= {"dt_bias": (dt_bias, ("R",))} if dt_bias is not None else {}
    whole = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    check("ssd", {"C": C, "B": B}, ("x", x), gates, whole)
    if type(dt_softplus) is not bool:
        raise RidgelineError(f"ssd: dt_softplus must be True or False, but is {dt_softplus!r}")
    plain = eager(OP, impl, C, B, x, cu_seqlens=cu_seqlens)
    factor, step = 1.0 if scale is None else float(scale), plain is None and one_step(x, whole)
    return Found(plain, factor, step, z is None or z.stride(-1) == 1)


def _pairs(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: Maybe = None,
    z: Maybe = None, dt_bias: Maybe = None, dt_softplus: bool = True, initial_state: Maybe = None,
    return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False, scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, True, None, False, scale)

    def run(v: torch.Tensor, g: torch.Tensor) -> Any:
        return pairs(C, B, v, g, given, 1.0 if scale is None else float(scale))

    found = _ssd(run, x.dtype, x, dt, A, D, z, dt_bias, dt_softplus)
    return finished(found[0], found[1], Given(initial_state, return_state, cu_seqlens, inplace, scale))


def _refusal_of_pairs(*args: Any, cu_seqlens: Maybe = None, **_: Any) -> str | None:
    if cu_seqlens is not None:
        return "it takes no packed sequences"
    B, T, H = shared_heads.rows_of(*args)[2].shape[:3]
    pairs = B * T * H * T
    return f"it holds at most {PAIRS} pairs of tokens, got {pairs}" if pairs > PAIRS else None


def cost(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *, D: Maybe = None,
    z: Maybe = None, **given: Any,
) -> tuple[Cost, Cost]:  # fmt: skip
    """gated_linear_attention's, with dt for the gate, and z."""
    forward, backward = gated_cost(C, B, x, dt)
    more = 0 if z is None else nbytes(z)
    return (
        Cost(forward.read + more, forward.write, forward.flops),
        Cost(backward.read + more, backward.write + more, backward.flops),
    )


def _call(q: Any, k: Any, v: Any, g: Any, step: Any, skip: Any, first: Any, ends: Any, scale: float, kind: str) -> Call:
    return Call(q, k, v, g, None, first, ends, scale, kind, step, skip)


def _fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    forward(o, last, _call(*inputs))


def _bwd(
    dC: Any, dB: Any, dx: Any, dg: Any, dstep: Any, dD: Any, dfirst: Any, do: Any, dlast: Maybe, *inputs: Any
) -> None:
    call = _call(*inputs)
    parts = [parts_of(t, call.v.shape[2]) for t in (dC, dB)]
    backward((*parts, dx, dg, dD, dstep, dfirst), do, dlast, call)
    for out, part in zip((dC, dB), parts, strict=True):
        join_parts(out, part)


def _chunks_fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    shared_heads.unshared.forward(o, last, _call(*inputs))


def _chunks_bwd(
    dC: Any, dB: Any, dx: Any, dg: Any, dstep: Any, dD: Any, dfirst: Any, do: Any, dlast: Maybe, *inputs: Any
) -> None:
    shared_heads.unshared.backward((dC, dB, dx, dg, dD, dstep, dfirst), do, dlast, _call(*inputs))


def _shared_fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    shared_heads.forward(o, last, _call(*inputs))


def _shared_bwd(
    dC: Any, dB: Any, dx: Any, dg: Any, dstep: Any, dD: Any, dfirst: Any, do: Any, dlast: Maybe, *inputs: Any
) -> None:
    shared_heads.backward((dC, dB, dx, dg, dD, dstep, dfirst), do, dlast, _call(*inputs))


def _left(*args: Any, cu_seqlens: Maybe = None, **_: Any) -> str | None:
    """Which calls `triton_chunks` and `gluon_chunks` leave to `triton`, by what `rows_of` takes."""
    ends = cu_seqlens if len(args) < 10 else args[-3]
    return shared_heads.unshared.left(shared_heads.rows_of(*args)[2], ends)


class Negative(Spec):
    """Random rates, from about -2 to 0."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return (-made.detach().sigmoid() * 2).to(made.dtype).requires_grad_(made.requires_grad)


# docs/notes/ssd.md says where A's gradient misses the law, and by how much; tests/test_recurrent.py checks it too.
CASES = [
    Case("3x19x2x12, 1 group of 8",
         (Spec(3, 19, 2, 12), Spec(3, 19, 2), Negative(2, grad=False), *(Spec(3, 19, 1, 8),) * 2)),
    Case("2x37x4x12, 2 groups of 8", (Spec(2, 37, 4, 12), Spec(2, 37, 4), Negative(4), *(Spec(2, 37, 2, 8),) * 2), {},
         ("float16", "bfloat16")),
    Case("2x18x4x12, 1 group of 8, all",
         (Spec(2, 18, 4, 12), Spec(2, 18, 4), Negative(4, grad=False), *(Spec(2, 18, 1, 8),) * 2),
         {"D": Spec(4, grad=False), "z": Spec(2, 18, 4, 12, grad=False), "dt_bias": Spec(4, grad=False),
          "return_state": True}),
    Case("1x48x2x16", (Spec(1, 48, 2, 16), Spec(1, 48, 2), Negative(2), *(Spec(1, 48, 1, 16),) * 2), {}, ("float32",),
         "quick"),
    Case("8x4096x64x64, 1 group of 128",
         (Spec(8, 4096, 64, 64), Spec(8, 4096, 64), Negative(64), *(Spec(8, 4096, 1, 128),) * 2), {}, ("bfloat16",),
         "bench"),
]  # fmt: skip
OP = Op(
    ssd,
    reference=reference,
    cost=cost,
    sharding=lambda cu_seqlens=None, **_: (
        "x bThP, dt bTh, A h, B bThN, C bThN, D h, z bThP, dt_bias h, initial_state bhNP -> bThP, bhNP"
        if cu_seqlens is None
        else None
    ),
    flops=formulas("ssd", gated_cost) | {"ssd_token": lambda x, dt, A, B, *_: 6 * B.shape[3] * x.numel()},
    residue=2e-6,
    cases=CASES,
)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
OP.eager("torch", "all pairs of tokens at once, as attention without softmax", _pairs, supports=_refusal_of_pairs)
OP.kernel("triton", IDEA, kind="triton", fwd=_fwd, bwd=_bwd, supports=refusal, served=True, gain=2.0)
OP.kernel(
    "triton_chunks", shared_heads.unshared.IDEA, served=True, unless=_left,
    **shared_heads.unshared.KERNEL | {"fwd": _chunks_fwd, "bwd": _chunks_bwd},
)  # fmt: skip
OP.kernel(
    "gluon_chunks", shared_heads.IDEA, served=True, unless=_left, supports=shared_heads.refusal,
    **shared_heads.KERNEL, fwd=_shared_fwd, bwd=_shared_bwd,
)  # fmt: skip
