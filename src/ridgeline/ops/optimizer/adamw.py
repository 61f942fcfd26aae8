"""adamw: one step of Adam with decoupled weight decay, over many tensors at once and in place.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2          p = p - lr (decay p + m^ / (sqrt(v^) + eps))
    m^ = m / (1 - b1^t),  v^ = v / (1 - b2^t)  at step t = 1, 2, ...

One pass: four reads and three writes per element. One launch serves all tensors of the same dtypes (see `_tensors.py`).
Factors that depend on the step alone are computed once on the host, or in the kernel if the step is a tensor.
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2017 (arXiv:1711.05101).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device as devices
from ridgeline import flops, tuning
from ridgeline.boundary import LIBRARY, launch
from ridgeline.codegen import Loose
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, tensors_of
from ridgeline.ops.optimizer._checks import checked, listed, number
from ridgeline.ops.optimizer._sharded import all_plain, changed, local
from ridgeline.ops.optimizer._tensors import (
    CHUNK,
    TL,
    Shelf,
    Table,
    address_key,
    chunk_of,
    dense,
    narrow,
    pointer,
    tabled,
)
from ridgeline.select import eager, run, select
from ridgeline.tiles.philox import philox, words

Tensors = torch.Tensor | Sequence[torch.Tensor]
NAMES = "params", "grads", "exp_avgs", "exp_avg_sqs", "masters"
ROUNDING = "nearest", "stochastic"


@triton.jit
def _one_less(x):
    """1 - exp(x) for x <= 0, also precise near 0."""
    small = x * (
        1 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * (0.0013888889 + x * 1.984127e-4)))))
    )
    return tl.where(x > -0.5, -small, 1 - tl.exp(x))


@triton.jit
def _rounded(x, bits, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """x in DTYPE: to nearest or, for bfloat16, up with the probability of what lies above. bits: 16 random bits."""
    if STOCHASTIC and DTYPE == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True)
        finite = (word & 0x7F800000) != 0x7F800000
        word = tl.where(finite, word + (bits & 0xFFFF), word | ((word << 9) != 0).to(tl.uint32) << 22)  # NaN stays NaN
        result = (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(DTYPE)
    return result


class Numbers(NamedTuple):
    """The numbers of a step.

    lr_at: the learning rate's address, or None to use lr. one, two: 1 - b1, 1 - b2. first, second: 1 / (1 - b1^t) and
    1 / sqrt(1 - b2^t); with STEPS, when steps are in memory, log b1 and log b2. count: t, for random bits.
    """

    lr_at: torch.Tensor | None
    lr: float
    decay: float
    one: float
    two: float
    first: float
    second: float
    eps: float
    count: float


class Dtypes(NamedTuple):
    """Of parameters, gradients and both moments."""

    P: Any
    G: Any
    M: Any
    V: Any


class Rules(NamedTuple):
    """MASTER: the fifth tensors are float32 weights. ALIGNED: all begin at multiples of 16 bytes."""

    MASTER: bool
    ALIGNED: bool
    STEPS: bool
    MAXIMIZE: bool
    STOCHASTIC: bool


class Chunk(NamedTuple):
    """Where a chunk of a parameter, its gradient, its moments and its float32 weights (or itself) begin."""

    p: Any
    g: Any
    m: Any
    v: Any
    w: Any


class Factors(NamedTuple):
    """A step's factors of the averaged gradient, of the weights and of the root of the second average."""

    rate: Any
    decay: Any
    correct: Any


@triton.jit
def _update(chunk, i, mask, numbers, factors, place, seed, rules: tl.constexpr):
    """Updates the elements i. place, seed: of the random bits."""
    p, g, m, v, w = chunk
    one = numbers.one
    STOCHASTIC: tl.constexpr = rules.STOCHASTIC
    x, slope = tl.load(w + i, mask=mask).to(tl.float32), tl.load(g + i, mask=mask).to(tl.float32)
    mean, square = tl.load(m + i, mask=mask).to(tl.float32), tl.load(v + i, mask=mask).to(tl.float32)
    if rules.MAXIMIZE:
        slope = -slope
    mean = tl.where(one < 0.5, mean + one * (slope - mean), slope - (1 - one) * (slope - mean))  # exact for 1
    square += numbers.two * (slope * slope - square)
    x -= factors.decay * x + factors.rate * tl.div_rn(mean, tl.sqrt_rn(square) * factors.correct + numbers.eps)
    a, b = i, i
    if STOCHASTIC:
        index, step = (place + i).to(tl.uint32), (i * 0 + numbers.count).to(tl.uint32)
        key = seed.to(tl.int64)
        a, b, _, _ = philox(index, step, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    if rules.MASTER:
        tl.store(w + i, x, mask=mask)
    tl.store(p + i, _rounded(x, a, p.dtype.element_ty, STOCHASTIC), mask=mask)
    tl.store(m + i, _rounded(mean, a >> 16, m.dtype.element_ty, STOCHASTIC), mask=mask)
    tl.store(v + i, _rounded(square, b, v.dtype.element_ty, STOCHASTIC), mask=mask)


@triton.jit
def _chunk(entry, start, dtypes: tl.constexpr, rules: tl.constexpr):
    P: tl.constexpr = dtypes.P
    G: tl.constexpr = dtypes.G
    M: tl.constexpr = dtypes.M
    V: tl.constexpr = dtypes.V
    ALIGNED: tl.constexpr = rules.ALIGNED
    p, g = pointer(entry, 0, start, P, ALIGNED), pointer(entry, 1, start, G, ALIGNED)
    m, v = pointer(entry, 2, start, M, ALIGNED), pointer(entry, 3, start, V, ALIGNED)
    w = p
    if rules.MASTER:
        w = pointer(entry, 4, start, tl.float32, ALIGNED)
    return Chunk(p, g, m, v, w)


@triton.jit(do_not_specialize=["seed"])
def _step(
    table,
    owners,
    numbers,
    seed,
    dtypes: tl.constexpr,
    rules: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one chunk. seed: the key of the random bits, for STOCHASTIC."""
    entry, start, size = chunk_of(table, owners, tl.program_id(0), CHUNK)
    chunk = _chunk(entry, start, dtypes, rules)
    rate = numbers.lr
    first, second, count = numbers.first, numbers.second, numbers.count
    if numbers.lr_at is not None:
        rate = tl.load(numbers.lr_at).to(tl.float32)
    if rules.STEPS:
        count = tl.load(pointer(entry, 5 if rules.MASTER else 4, 0, tl.float32, False)).to(tl.float32)
        first = 1 / _one_less(first * count)
        second = 1 / tl.sqrt_rn(_one_less(second * count))
    factors = Factors(rate * first, numbers.decay * rate, second)
    numbers = Numbers(
        numbers.lr_at, numbers.lr, numbers.decay, numbers.one, numbers.two, first, second, numbers.eps, count
    )
    place = tl.program_id(0) * CHUNK
    whole = size // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        _update(chunk, at + tl.arange(0, BLOCK), None, numbers, factors, place, seed, rules)
    if whole < size:
        i = whole + tl.arange(0, BLOCK)
        _update(chunk, i, i < size, numbers, factors, place, seed, rules)


def _launch_triton(
    like: torch.Tensor, table: Table, steps: bool, numbers: Numbers, seed: int, maximize: bool, stochastic: bool
) -> None:
    def rule() -> tuning.Config:
        """16 bytes of the widest tensors per thread, for eight warps."""
        return {"BLOCK": 4096 // max([d.itemsize for d in table.dtypes]), "num_warps": 8}

    def config() -> tuning.Config:
        space = [
            {"BLOCK": b, "num_warps": w} for b in (512, 1024, 2048, 4096) for w in (4, 8, 16) if 2 <= b // w // 32 <= 16
        ]
        return tuning.config(devices.of(like), "adamw", "step", key, rule, lambda: space)

    key = " ".join([str(d)[6:] for d in table.dtypes])
    dtypes = Dtypes(*[TL[d] for d in table.dtypes[:4]])
    rules = Rules(len(table.dtypes) > 4, table.aligned, steps, maximize, stochastic)
    flags: dict[str, Any] = {"dtypes": dtypes, "rules": rules, "CHUNK": CHUNK}
    given = table.table, table.owners, numbers, seed
    launch(_step, (table.chunks,), *given, **flags, config=config, key=key)


def _in_layout(row: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The row in the parameter's layout or, if that has gaps, contiguous; tensors of other layouts are copied."""
    p = row[0]
    if all([t.is_contiguous() for t in row]):
        return row
    if any(size > 1 and not step for t in (p, *row[2:]) for size, step in zip(t.shape, t.stride(), strict=True)):
        advice = "give params and moments their own memory"
        raise RidgelineError(f"adamw: an expanded tensor cannot be changed in place; {advice}")
    like = p if dense(p) else torch.empty_like(p, memory_format=torch.contiguous_format)
    return tuple([t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t) for t in row])


_tables = Shelf(1)


def _fixed(lists: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor], stochastic: bool) -> Any:
    """What tables depend on besides the gradients, or None if none are kept."""
    key = address_key(lists[0], *lists[2:], steps)
    return key and (stochastic, key)


def _run(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], steps: Sequence[torch.Tensor], step: int,
    lr_at: torch.Tensor | None, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool,
    stochastic: bool, seed: int, impl: str | None, tables: list[Table] | None = None
) -> None:  # fmt: skip
    """A step by kernels. steps: a tensor per parameter, or empty if `step` is the step of them all.

    masters: a tensor per parameter, or empty. tables: those of exactly these tensors, if they are known.
    """
    lists = params, grads, exp_avgs, exp_avg_sqs, *([masters] if masters else [])
    keep, copies = False, []
    if tables is None:
        select(ADAMW, impl, params[0], kernels=True)  # raises here, before anything is started
        own = list(zip(*lists, strict=True))
        rows = [_in_layout(row) for row in own]
        pairs = [
            (n, t, c)
            for o, r in zip(own, rows, strict=True)
            for n, (t, c) in enumerate(zip(o, r, strict=True))
            if c is not t
        ]
        copies = [(t, c) for n, t, c in pairs if n != 1]  # the gradients are only read
        tables = tabled(rows, steps)
        keep = not pairs
    if steps:
        first, second = (math.log(b) if b else -math.inf for b in (beta1, beta2))
    else:
        first, second = 1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    numbers = Numbers(lr_at, lr, weight_decay, 1 - beta1, 1 - beta2, first, second, eps, float(step))
    for n, table in enumerate(tables):
        key = Loose(seed ^ n << 32)  # tables number their elements alike
        run(ADAMW, "fwd", impl, (), table.like, table, bool(steps), numbers, key, maximize, stochastic)
    if keep and (fixed := _fixed(lists, steps, stochastic)):
        _tables.keep(fixed, grads, tables)
    for tensor, copy in copies:
        tensor.copy_(copy)
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *masters])  # all that is written


LIBRARY.define(
    "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor[] steps, SymInt step, Tensor? lr_at, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool maximize, bool stochastic, int seed, str? impl) -> ()"
)
LIBRARY.impl("adamw", _run, "CompositeExplicitAutograd")
torch.library.register_fake("ridgeline::adamw", lambda *args: None, lib=LIBRARY)
flops.register("adamw")


@torch.no_grad()
def reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    step: int | torch.Tensor | Sequence[torch.Tensor], *, lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False,
    masters: Tensors | None = None
) -> None:  # fmt: skip
    lists = [[a] if isinstance(a, torch.Tensor) else a for a in (params, grads, exp_avgs, exp_avg_sqs)]
    lists.append(lists[0] if masters is None else [masters] if isinstance(masters, torch.Tensor) else masters)
    steps = step if isinstance(step, list | tuple) else [step] * len(lists[0])
    for p, g, m, v, w, t in zip(*lists, steps, strict=True):
        g = -g if maximize else g
        m.lerp_(g.to(m.dtype), 1 - betas[0])
        v.lerp_((g * g).to(v.dtype), 1 - betas[1])
        w.mul_(1 - lr * weight_decay)
        w.sub_(lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))
        if w is not p:
            p.copy_(w)


def _stochastic(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 x in bfloat16, up with the probability of what lies above. bits: 16 random bits each, int64."""
    word = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    up = ((word + bits) & 0xFFFF0000).to(torch.int64)
    up = torch.where(up >= 1 << 31, up - (1 << 32), up).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), up, x).bfloat16()


def _round_into(own: torch.Tensor, x: torch.Tensor, which: int, step: float, seed: int) -> None:
    """Writes float32 x to bfloat16 memory with the bits that the kernel's word `which` gives a lone tensor."""
    place = torch.arange(x.numel(), device=x.device)
    word = words(seed, place, torch.full_like(place, int(step)))
    bits = (word[:, 0] & 0xFFFF, word[:, 0] >> 16, word[:, 1] & 0xFFFF)[which]
    own.copy_(_stochastic(x.contiguous().flatten(), bits).view(x.shape))


def _torch(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, step: Any, *, lr: Any = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False,
    masters: Any = None, rounding: str = "nearest", seed: int = 0
) -> None:  # fmt: skip
    """torch._fused_adamw_ takes tensors of one dtype; a parameter whose moments differ goes through float32 copies."""
    lists = [[a] if isinstance(a, torch.Tensor) else a for a in (params, grads, exp_avgs, exp_avg_sqs)]
    narrow = lists[0]
    if masters is not None:
        lists[0] = [masters] if isinstance(masters, torch.Tensor) else masters
    steps = step if isinstance(step, list | tuple) else [step] * len(lists[0])
    groups: dict[Any, Any] = {}
    shared: dict[Any, torch.Tensor] = {}
    for *row, t in zip(*lists, steps, strict=True):
        if not isinstance(t, torch.Tensor) or t.device != row[0].device or t.dtype != torch.float32:
            where = row[0].device, id(t)
            if where not in shared:
                shared[where] = torch.full((), float(t), device=row[0].device)
            t = shared[where]
        alike = len({x.dtype for x in row}) == 1 and (rounding == "nearest" or row[0].dtype != torch.bfloat16)
        given = row if alike else [x.float() for x in row]
        groups.setdefault((given[0].dtype, given[0].device), []).append((*given, t, row))
    rate = float(lr) if isinstance(lr, torch.Tensor) and not lr.is_cuda else lr
    options: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay, "eps": eps}
    options |= {"amsgrad": False, "maximize": maximize}
    with torch.no_grad():
        for group in groups.values():
            p, g, m, v, t, rows = map(list, zip(*group, strict=True))
            torch._fused_adamw_(p, g, m, v, [], t, lr=rate, **options)
            for *given, n, row in zip(p, m, v, t, rows, strict=True):
                for which, (x, own) in enumerate(zip(given, (row[0], *row[2:]), strict=True)):
                    if x is not own and rounding == "stochastic" and own.dtype == torch.bfloat16:
                        _round_into(own, x, which, float(n), seed)
                    elif x is not own:
                        own.copy_(x)
        for n, (own, master) in enumerate(zip(narrow, lists[0], strict=True)):
            if own is not master and rounding == "stochastic" and own.dtype == torch.bfloat16:
                _round_into(own, master, 0, float(steps[n]), seed)
            elif own is not master:
                own.copy_(master)


def adamw(
    params: torch.Tensor | Sequence[torch.Tensor], grads: torch.Tensor | Sequence[torch.Tensor],
    exp_avgs: torch.Tensor | Sequence[torch.Tensor], exp_avg_sqs: torch.Tensor | Sequence[torch.Tensor],
    step: int | torch.Tensor | Sequence[torch.Tensor], *, lr: float | torch.Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2, maximize: bool = False,
    masters: torch.Tensor | Sequence[torch.Tensor] | None = None, rounding: str = "nearest", seed: int = 0,
    impl: str | None = None
) -> None:  # fmt: skip
    """One step of AdamW in place, as `torch.optim.AdamW` takes it. Returns None; it has no gradients.

    params, grads, exp_avgs, exp_avg_sqs: equally long lists of tensors, or one tensor each. The tensors of one
    parameter have its shape, any strides, and each float32, float16 or bfloat16 (moments may be float32 beside a
    narrower parameter). The arithmetic is float32.
    masters: float32 weights, one for each parameter. The step updates them and writes them to the parameters, rounded.
    rounding: "nearest", or "stochastic": a bfloat16 result is rounded up with the probability of what lies above, so
    that updates under half an ulp are not lost (with beta2 0.999 a bfloat16 second moment sticks otherwise). The random
    bits depend on `seed`, the step and an element's place alone, so reruns are equal.
    step: the number of this step, from 1. A 0-d float32 tensor, or a list of one per parameter, is read on the device,
    so that a CUDA graph can be replayed with other values; so is a tensor as lr. Nothing waits for the GPU.
    betas: how much of each average is kept, both in [0, 1). eps: added to the root of the second average, at least 0.
    weight_decay: subtracted as lr * weight_decay * param (decoupled), at least 0. maximize: ascend the gradient.
    Raises RidgelineError if lists do not fit together, if a tensor is sparse, expanded or not floating point, if
    masters are not float32, if float16 is to be rounded stochastically, if a number is out of range, or if `impl`
    cannot run the call.
    """
    given = params, grads, exp_avgs, exp_avg_sqs, *(() if masters is None else (masters,))
    one = isinstance(params, torch.Tensor)
    lists: Any = [[a] if one else listed("adamw", name, a) for name, a in zip(NAMES, given, strict=False)]
    if not all_plain(lists):
        changed([t for n, some in enumerate(lists) if n != 1 for t in some])  # gradients are only read
        lists = local("adamw", NAMES[: len(lists)], lists)
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise RidgelineError(f"adamw: betas must be two numbers, but are {betas!r}")
    beta1, beta2 = [number("adamw", "betas", b) for b in betas]
    eps, weight_decay = number("adamw", "eps", eps), number("adamw", "weight_decay", weight_decay)
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 <= eps < math.inf and 0 <= weight_decay < math.inf):
        wanted, found = "in [0, 1), eps and weight_decay finite and at least 0", f"{betas}, {eps} and {weight_decay}"
        raise RidgelineError(f"adamw: betas must be {wanted}, but are {found}")
    lr_at = lr if isinstance(lr, torch.Tensor) and not lr.is_cpu else None
    if lr_at is not None and (
        lr_at.numel() != 1 or (lists[0] and lr_at.device != getattr(lists[0][0], "device", None))
    ):
        found = f"{lr_at.numel()} on {lr_at.device}"
        raise RidgelineError(f"adamw: lr must be a number or one element on the params' device, but has {found}")
    rate = 0.0 if lr_at is not None else number("adamw", "lr", lr)
    if not 0 <= rate < math.inf:
        raise RidgelineError(f"adamw: lr must be finite and at least 0, but is {rate}")
    if rounding not in ROUNDING:
        raise RidgelineError(f'adamw: rounding must be "nearest" or "stochastic", but is {rounding!r}')
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise RidgelineError(f"adamw: seed must be a whole number from 0 to 2^32 - 1, but is {seed!r}")
    steps, count = _steps(step, len(lists[0]))
    stochastic = rounding == "stochastic"
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    fixed = None if watched or impl is not None else _fixed(lists, steps, stochastic)
    tables = fixed and _tables.find(fixed, lists[1])
    if tables is None:
        checked("adamw", NAMES[: len(lists)], lists)
        _precise(lists, stochastic)
        for t, p in zip(steps, lists[0], strict=False):
            if not isinstance(t, torch.Tensor) or t.dim() or t.dtype != torch.float32 or t.device != p.device:
                found = f"{t.dtype} {tuple(t.shape)} on {t.device}" if isinstance(t, torch.Tensor) else repr(t)
                wanted = f"0-d float32 tensors on {p.device}, their param's device"
                raise RidgelineError(f"adamw: steps in memory must be {wanted}, but one is {found}")
        if not lists[0]:
            return
        plain = eager(ADAMW, impl, *chain(*lists))
        if plain is not None and plain.call is not None:
            extra: dict[str, Any] = {} if masters is None else {"masters": lists[4]}
            if stochastic and any([t.dtype == torch.bfloat16 for t in chain(*lists)]):  # else there is nothing to round
                extra |= {"rounding": rounding, "seed": seed}
            options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
            plain.call(*lists[:4], step, **options, **extra)
            return
    call: Any = torch.ops.ridgeline.adamw if watched else _run
    known = () if tables is None else (tables,)
    more = () if len(lists) > 4 else ((),)
    numbers = lr_at, rate, beta1, beta2, eps, weight_decay, maximize, stochastic, seed
    call(*lists, *more, steps, count, *numbers, impl, *known)


def _precise(lists: Sequence[Sequence[torch.Tensor]], stochastic: bool) -> None:
    """Raises RidgelineError if the masters' dtype, or a dtype to be rounded stochastically, is wrong."""
    for t in lists[4] if len(lists) > 4 else ():
        if t.dtype != torch.float32:
            raise RidgelineError(f"adamw: masters must be float32, but one is {str(t.dtype)[6:]}")
    if stochastic and any(t.dtype == torch.float16 for some in (lists[0], *lists[2:4]) for t in some):
        raise RidgelineError('adamw: rounding="stochastic" is for bfloat16; float16 is rounded to nearest only')


def _steps(step: Any, count: int) -> tuple[Sequence[torch.Tensor], int]:
    """The steps as tensors on the device (none if the step is a number), and the number."""
    if isinstance(step, list | tuple):
        if len(step) != count:
            raise RidgelineError(f"adamw: step must be one for all params or a list of {count}, but has {len(step)}")
        return step, 1
    if isinstance(step, torch.Tensor) and not step.is_cpu:
        return [step] * count, 1
    if not 1 <= number("adamw", "step", step) < math.inf:
        raise RidgelineError(f"adamw: step counts from 1, but is {step}")
    return (), int(step)


def cost(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *_: Any, masters: Any = None, **__: Any
) -> tuple[Cost, None]:
    """Returns the cost. Master weights are read in the place of the parameters, and both are written."""
    p, g, m, v, w = (nbytes(*tensors_of([a])) for a in (params, grads, exp_avgs, exp_avg_sqs, masters))
    flops = 16 * sum(t.numel() for t in tensors_of([params]))
    return Cost((w or p) + g + m + v, p + m + v + w, flops), None


class Squares(Spec):
    """Non-negative random data, as means of squares are."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args).square_()


def _specs(*shapes: tuple[int, ...], moments: str | None = None) -> tuple[Any, ...]:
    return tuple(
        [
            [kind(*s, dtype=d, grad=False) for s in shapes]
            for kind, d in ((Spec, None), (Spec, None), (Spec, moments), (Squares, moments))
        ]
    )


LARGE = _specs(*[(1 << 26,)] * 4)
ADAMW = Op(
    adamw,
    reference=reference,
    cost=cost,
    mutates=(0, 2, 3),
    cases=[
        Case("33x129", (*(a[0] for a in _specs((33, 129))), 3), {"lr": 0.1}),
        Case("lists", (*_specs((5,), (), (0, 3), (40, 257), (9000,)), 1), {"lr": 0.1, "maximize": True}),
        Case(
            "float32 moments",
            (*_specs((33, 129), (9000,), moments="float32"), 7),
            {"lr": 0.1},
            dtypes=("float16", "bfloat16"),
        ),
        Case(
            "no decay", (*(a[0] for a in _specs((8200,))), 1000), {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.95)}
        ),
        Case("4 x 1 Mi", (*_specs(*[(1 << 20,)] * 4), 10), use="quick"),
        Case("4 x 64 Mi", (*LARGE, 10), dtypes=("float32", "bfloat16"), use="bench"),
        Case(
            "4 x 64 Mi float32 moments",
            (*_specs(*[(1 << 26,)] * 4, moments="float32"), 10),
            dtypes=("bfloat16",),
            use="bench",
        ),
    ],
)


def _full_precision(*args: Any, **_: Any) -> str | None:
    narrow = any([t.dtype in (torch.float16, torch.bfloat16) for t in tensors_of(args)])
    return "in half precision, rounding after every pass exceeds the tolerance" if narrow else None


ADAMW.eager("naive", "the formula in eager PyTorch: a dozen passes per tensor", reference, supports=_full_precision)
ADAMW.eager("torch", "torch's fused kernel: addresses as parameters, float64 arithmetic", _torch, served=True)
ADAMW.kernel(
    "triton",
    "one launch over chunks of all tensors, from a kept table of addresses; float32 arithmetic",
    kind="triton",
    fwd=_launch_triton,
    supports=narrow,
    served=True,
)
