"""causal_conv1d: the short depthwise convolution of linear attention layers, and silu.

    z_t = bias + sum over j < width of w_j x_{t-width+1+j}          y_t = silu(z_t)

    backward:  dz = dy silu'(z),  dx_t = sum over j of w_j dz_{t+width-1-j},  dw_j = sum over t of dz_t x_{t-width+1+j}

A thread walks along time with the last inputs of its channels in registers. The floor is one read of x and one write of
y; backward reads x and dy and writes dx.
Source: Gu and Dao, Mamba, 2023 (arXiv:2312.00752).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from ridgeline import device
from ridgeline.boundary import INTERPRETED, Function, differentiate, early, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dense_only, nbytes, readable
from ridgeline.ops.recurrent.common.calls import Found, stepped
from ridgeline.ops.recurrent.cuda import short_conv as short_conv_cuda
from ridgeline.ops.recurrent.triton.short_conv import (
    Filters,
    Line,
    Pieces,
    Shape,
    Sums,
    Windows,
    conv_backward,
    conv_forward,
    conv_sums,
)
from ridgeline.select import by_kind, eager, run

Maybe = torch.Tensor | None
WIDTHS = (2, 3, 4)
ACTIVATIONS = ("silu", None)
LENGTH = 128  # tokens of a piece


class Tiles(NamedTuple):
    """channels: of a program. forward, backward: tokens whose loads are in flight together. programs: those of
    backward that a multiprocessor runs at once."""

    channels: int
    forward: int
    backward: int
    warps: int
    programs: int


def tiles(gpu: device.Device) -> Tiles:
    return Tiles(64, 2, 2, 1, 2) if gpu.backend == "cpu" else Tiles(256, 8, 4, 2, 8)


def _length(gpu: device.Device) -> int:
    return 8 if gpu.backend == "cpu" else LENGTH  # the interpreter: several pieces of few tokens


def _pieces(x: torch.Tensor, ends: Maybe, length: int) -> Pieces:
    B, T, _ = x.shape
    if ends is None:
        return Pieces(None, T, B, length, B * max(-(-T // length), 1))
    sequences = ends.numel() - 1
    return Pieces(ends, T, sequences, length, T // length + sequences)


def _line(t: torch.Tensor) -> Line:
    return Line(t, t.stride(0), t.stride(1))


def _shape(x: torch.Tensor, width: int, activation: str | None, pieces: Pieces, channels: int, step: int) -> Shape:
    channels = min(channels, max(triton.next_power_of_2(x.shape[2]), 16))
    rounds = 0 if pieces.ends is None else pieces.sequences.bit_length()
    single = x.dtype == torch.float32
    quick = device.of(x).backend == "cuda" and not single and not INTERPRETED
    return Shape(width, activation == "silu", channels, step, rounds, single, quick)


def launch_fwd(
    y: torch.Tensor, last: Maybe, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe,
    activation: str | None,
) -> None:  # fmt: skip
    gpu, C = device.of(x), x.shape[2]
    pieces, chosen = _pieces(x, ends, _length(gpu)), tiles(gpu)
    form = _shape(x, weight.shape[1], activation, pieces, chosen.channels, chosen.forward)
    filters = Filters(weight, weight.stride(0), weight.stride(1), bias)
    launch(
        conv_forward, (-(-C // form.BC) * pieces.count,), _line(y), _line(x), filters, Windows(first, last), pieces, C,
        shape=form, num_warps=chosen.warps,
    )  # fmt: skip


def launch_bwd(
    dx: torch.Tensor, dweight: Maybe, dbias: Maybe, dfirst: Maybe, dy: torch.Tensor, dlast: Maybe, x: torch.Tensor,
    weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe, activation: str | None,
) -> None:  # fmt: skip
    gpu, (C, width) = device.of(x), weight.shape
    pieces, chosen, parts = _pieces(x, ends, _length(gpu)), tiles(gpu), None
    form = _shape(x, width, activation, pieces, chosen.channels, chosen.backward)
    filters = Filters(weight, weight.stride(0), weight.stride(1), bias)
    programs = pieces.count
    if dweight is not None:
        most = max(gpu.multiprocessors * chosen.programs // max(-(-C // chosen.channels), 1), 1)
        rounds = max(-(-programs // most), 1)
        programs = max(-(-programs // rounds), 1)  # no more than these rounds need, so that all have as many pieces
        parts = torch.empty((programs, width + 1, C), dtype=torch.float32, device=x.device)
    launch(
        conv_backward, (-(-C // form.BC) * programs,), _line(dx), Sums(parts), _line(dy), _line(x), filters,
        Windows(first, None), Windows(dfirst, dlast), pieces, C, shape=form, num_warps=chosen.warps,
    )  # fmt: skip
    if parts is not None:
        add_up(dweight, dbias, parts)


def add_up(dweight: Maybe, dbias: Maybe, parts: torch.Tensor) -> None:
    """Writes the gradients of weight and bias from their parts, (programs, width + 1, C) in float32."""
    programs, rows, C = parts.shape
    launch(
        conv_sums, (rows * -(-C // 64),), dweight, dbias, parts, programs, C, WIDTH=rows - 1, BP=16, BC=64,
        num_warps=4, **early(device.of(parts)),
    )  # fmt: skip


@kernel_op(
    "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? first, Tensor? ends, str? activation, bool keep, "
    "str? impl) -> (Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe, activation: str | None, keep: bool,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y, and the state after it: empty unless `keep`."""
    sequences = x.shape[0] if ends is None else ends.numel() - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = torch.empty((sequences, *weight.shape) if keep else 0, dtype=x.dtype, device=x.device)
    run(OP, "fwd", impl, (y, last if keep else None), x, weight, bias, first, ends, activation)
    return y, last


@kernel_op(
    "causal_conv1d_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, str? activation, str? impl) -> Tensor"
)
def _step(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, state: torch.Tensor, activation: str | None, impl: str | None
) -> torch.Tensor:
    """One token; the state is replaced in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(OP, "fwd", impl, (y, state), x, weight, bias, state, None, activation)
    return y


@kernel_op(
    "causal_conv1d_bwd(Tensor dy, Tensor? dlast, Tensor x, Tensor weight, Tensor? bias, Tensor? first, Tensor? ends, "
    "str? activation, int need, str? impl) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _backward(
    dy: torch.Tensor, dlast: Maybe, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe,
    activation: str | None, need: int, impl: str | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of x, weight (bit 0 of `need`), bias (bit 1) and the first state; empty where there is none."""
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    dlast = dlast if dlast is None or dlast.is_contiguous() else dlast.contiguous()
    C, width = weight.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dfirst = None if first is None else torch.empty(first.shape, dtype=first.dtype, device=x.device)
    # Contiguous, whatever the filters' own strides are.
    dweight = torch.empty((C, width), dtype=weight.dtype, device=x.device) if need else None
    dbias = None if bias is None or not need else torch.empty(C, dtype=bias.dtype, device=x.device)
    run(OP, "bwd", impl, (dx, dweight, dbias, dfirst), dy, dlast, x, weight, bias, first, ends, activation)
    made = dx, dweight, dbias, dfirst
    return tuple([torch.empty(0, dtype=x.dtype, device=x.device) if t is None else t for t in made])


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """args: x, weight, bias, the first state, cu_seqlens, activation, whether a state is returned, impl."""
        ctx.save_for_backward(*args[:5])
        ctx.facts = args[5], args[7]
        ctx.set_materialize_grads(False)
        return _forward(*args)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Any, dlast: Any) -> Any:
        if dy is None and dlast is None:
            return (None,) * 8
        x, weight, bias, first, ends = ctx.saved_tensors
        activation, impl = ctx.facts
        dy = torch.zeros_like(x) if dy is None else dy
        dlast = dlast if dlast is None or dlast.numel() else None
        need = ctx.needs_input_grad[1] + 2 * ctx.needs_input_grad[2]
        dx, dweight, dbias, dfirst = _backward(dy, dlast, x, weight, bias, first, ends, activation, int(need), impl)
        return (
            dx,
            dweight if need & 1 else None,
            dbias if need & 2 else None,
            None if first is None else dfirst,
            *(None,) * 4,
        )


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, *, activation: str | None = "silu",
    initial_state: Maybe = None, return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False,
) -> Any:  # fmt: skip
    wide, width = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    places = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        places = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    outputs, states = [], []
    for n, (b, start, end) in enumerate(places):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].t()
        seen = torch.cat([before.to(x.dtype), x[b, start:end]])
        z = torch.zeros_like(x[b, start:end], dtype=wide)
        for j in range(width):
            z = z + seen[j + 1 : j + 1 + end - start].to(wide) * weight[:, j].to(wide)
        z = z if bias is None else z + bias.to(wide)
        outputs.append(z * torch.sigmoid(z) if activation == "silu" else z)
        states.append(seen[seen.shape[0] - width :].t())
    y = torch.cat(outputs).view(x.shape) if outputs else x.to(wide)
    if not y.numel():  # a gradient of nothing is zero for every argument
        y = y + sum([t.sum() * 0 for t in (weight, bias) if t is not None], start=y.new_zeros(()))
    state = torch.stack(states) if states else x.new_zeros((0, *weight.shape))
    return _finished(y.to(x.dtype), state, initial_state, return_state, inplace)


def _finished(y: torch.Tensor, state: torch.Tensor, first: Maybe, return_state: bool, inplace: bool) -> Any:
    if inplace and first is not None:
        state = first.copy_(state)
    return (y, state) if return_state else y


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = "silu",
    initial_state: torch.Tensor | None = None, return_state: bool = False, cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns each channel of x convolved along time with its own filter, then silu: y, of x's shape and dtype.

    Gradients flow to x, weight, bias and initial_state.
    x: (B, T, C), float32, float16 or bfloat16, any strides whose last is 1. weight: (C, width), width 2 to 4; its last
    column meets the token itself. bias: (C,) or None. Both in any floating-point dtype and any strides.
    activation: "silu" or None.
    initial_state: (B, C, width), the inputs before the first token, the latest last, in x's dtype; zeros if None.
    return_state: returns (y, state after the last token).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state, for T = 1 without a copy; without
    gradients only.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    plain, _, step, tidy, sure = _look(x, weight, bias, initial_state, cu_seqlens, activation, inplace, impl)
    if plain is not None and plain.call is not None:
        options: dict[str, Any] = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        options |= {"activation": activation, "return_state": return_state, "inplace": inplace}
        return plain.call(x, weight, bias, **options)
    bias = bias if tidy or bias is None else bias.contiguous()
    if step:
        return stepped(_step(x, weight, bias, initial_state, activation, impl, sure), initial_state, return_state, sure)
    first = initial_state
    first = first if first is None or first.is_contiguous() else first.contiguous()
    args = x, weight, bias, first, cu_seqlens, activation, return_state or inplace, impl
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in args[:4]]):
        y, state = differentiate(_Conv, *args)
    else:
        y, state = _forward(*args)
    return _finished(y, state, initial_state, return_state, inplace)


@by_kind(5, optional=3, strides=True, gradients=True, sure=True)
def _look(
    x: Any, weight: Any, bias: Any, initial_state: Any, cu_seqlens: Any, activation: str | None, inplace: bool,
    impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    wrong = _fault(given, activation, inplace)
    if wrong:
        raise RidgelineError(f"causal_conv1d: {wrong}")
    plain = eager(OP, impl, x, weight, bias, cu_seqlens=cu_seqlens)
    step = inplace and initial_state is not None and x.shape[1] == 1 and cu_seqlens is None
    return Found(plain, 1.0, step, bias is None or bias.is_contiguous())


def _fault(given: dict[str, Any], activation: Any, inplace: bool) -> str | None:
    """Why the arguments do not fit together, or None."""
    for name, t in given.items():
        optional = name not in ("x", "weight")
        if not isinstance(t, torch.Tensor) and not (optional and t is None):
            return f"{name} must be a tensor{' or None' if optional else ''}, but is {type(t).__name__}"
    x, weight, bias, first, ends = given.values()
    dense_only("causal_conv1d", given.values())
    for name in ("x", "weight", "bias"):
        t = given[name]
        if t is not None and not t.is_floating_point():
            return f"{name} must be floating point (float32, float16, bfloat16), but is {t.dtype}"
    if x.dim() != 3:
        return f"x must be (B, T, C), but is {tuple(x.shape)}"
    B, T, C = x.shape
    if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] not in WIDTHS:
        return f"weight must be ({C}, width) with a width of 2, 3 or 4, but is {tuple(weight.shape)}"
    if bias is not None and bias.shape != (C,):
        return f"bias must be ({C},) or None, but is {tuple(bias.shape)}"
    if x.stride(2) != 1 and C > 1:
        return f"the last dimension of x must be contiguous (stride 1), but has stride {x.stride(2)}"
    for name, t in given.items():
        if t is not None and t.device != x.device:
            return f"{name} is on {t.device} but x on {x.device}; they must share one device"
    if activation not in ACTIVATIONS:
        return f"activation must be 'silu' or None, but is {activation!r}"
    sequences = B
    if ends is not None:
        if ends.dtype != torch.int32 or ends.dim() != 1 or not ends.numel() or not ends.is_contiguous():
            return f"cu_seqlens must be (sequences + 1,) in int32, contiguous, but is {ends.dtype} {tuple(ends.shape)}"
        if B != 1:
            return f"packed sequences need a batch of 1, but it is {B}"
        sequences = ends.numel() - 1
        if readable(ends):
            places = ends.tolist()
            if places[0] or places[-1] != T or sorted(places) != places:
                return f"cu_seqlens must rise from 0 to the {T} tokens, but is {places}"
    return _state_fault(x, weight, bias, first, (sequences, *weight.shape), inplace)


def _state_fault(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, first: Maybe, shape: tuple[int, ...], inplace: bool
) -> str | None:
    if first is not None and (first.shape != shape or first.dtype != x.dtype):
        return f"initial_state must be {shape} in {str(x.dtype)[6:]}, but is {first.dtype} {tuple(first.shape)}"
    if inplace:
        if first is None:
            return "inplace needs an initial_state, and it is None"
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, weight, bias, first)]):
            return "inplace has no gradients; call it under torch.no_grad() or without inplace"
        if not first.is_contiguous():
            return f"inplace needs a contiguous initial_state, but its strides are {first.stride()}"
    return None


def _torch(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, *, activation: str | None = "silu",
    initial_state: Maybe = None, return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False,
) -> Any:  # fmt: skip
    width = weight.shape[1]
    seen = F.pad(x.mT, (width, 0)) if initial_state is None else torch.cat([initial_state, x.mT], 2)
    bias = bias if bias is None else bias.to(x.dtype)
    z = F.conv1d(seen[:, :, 1:], weight.to(x.dtype).unsqueeze(1), bias, groups=weight.shape[0])
    y = F.silu(z) if activation == "silu" else z
    state = seen[:, :, seen.shape[2] - width :].contiguous()
    return _finished(y.mT.contiguous(), state, initial_state, return_state, inplace)


def cost(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, *, activation: str | None = "silu",
    initial_state: Maybe = None, return_state: bool = False, **given: Any,
) -> tuple[Cost, Cost]:  # fmt: skip
    """x is read and y written once; backward reads x and dy and writes dx. A multiply and an add each tap."""
    filters = nbytes(*[t for t in (weight, bias) if t is not None])
    state = 0 if initial_state is None else nbytes(initial_state)
    kept = x.shape[0] * nbytes(weight) // weight.element_size() * x.element_size() if return_state else 0
    taps, silu = 2 * weight.shape[1], 4 if activation == "silu" else 0
    return (
        Cost(nbytes(x) + filters + state, nbytes(x) + kept, x.numel() * (taps + silu)),
        Cost(2 * nbytes(x) + filters + state + kept, nbytes(x) + filters + state, x.numel() * (3 * taps + 2 * silu)),
    )


def _unpacked(*_: Any, cu_seqlens: Any = None, **__: Any) -> str | None:
    return None if cu_seqlens is None else "it takes no packed sequences"


def _refusal(*args: Any, **_: Any) -> str | None:
    """Why the kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    for t in args:
        if isinstance(t, torch.Tensor) and t.dim() == 3 and t.shape[2] > 1 and t.stride(2) != 1:
            return "the last dimension must be contiguous"
    return None


_small = Spec(2, 19, 40), Spec(40, 4), Spec(40)
OP = Op(
    causal_conv1d,
    reference=reference,
    cost=cost,
    sharding=lambda cu_seqlens=None, **_: (
        "x bTc, weight cW, bias c, initial_state bcW -> bTc, bcW" if cu_seqlens is None else None
    ),
    flops={"causal_conv1d_step": lambda x, weight, bias, *_: cost(x, weight, bias)[0].flops},
    cases=[
        Case("2x19x40", _small),
        Case("2x19x40 no bias, width 2", (Spec(2, 19, 40), Spec(40, 2)), {"activation": None}),
        Case("1x9x70 width 3", (Spec(1, 9, 70), Spec(70, 3), Spec(70)), {"return_state": True}),
        Case("2x19x40 filters in float32", (Spec(2, 19, 40), Spec(40, 4, dtype="float32"), Spec(40, dtype="float32")),
             dtypes=("float16", "bfloat16")),
        Case("2x512x256", (Spec(2, 512, 256), Spec(256, 4), Spec(256)), dtypes=("float32",), use="quick"),
        Case("8x4096x4096", (Spec(8, 4096, 4096), Spec(4096, 4), Spec(4096)), dtypes=("bfloat16",), use="bench"),
        Case("8x4096x8192 no bias", (Spec(8, 4096, 8192), Spec(8192, 4)), dtypes=("bfloat16",), use="bench"),
    ],
)  # fmt: skip
OP.eager("naive", "the formula in eager PyTorch, a sequence and a tap at a time", reference, served=True)
OP.eager(
    "torch", "PyTorch's grouped convolution, channels first, then its silu", _torch, supports=_unpacked, served=True
)
OP.kernel(
    "triton",
    "a walk along time with the last inputs in registers: each input is read once, each output written once",
    kind="triton",
    fwd=launch_fwd,
    bwd=launch_bwd,
    supports=_refusal,
    served=True,
    gain=2.0,
)
OP.kernel(
    "cuda",
    "16 bytes a thread, copied rows ahead into shared memory that no other thread reads",
    kind="cuda",
    fwd=short_conv_cuda.forward,
    bwd=partial(short_conv_cuda.backward, add_up=add_up),
    supports=short_conv_cuda.unfit,
    unless=short_conv_cuda.too_few,
    dtypes=("float16", "bfloat16"),
    arch=80,
    served=True,
    gain=1.1,
)
