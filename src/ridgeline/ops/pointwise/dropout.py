"""dropout: y = x keep / (1 - p), where keep is 0 with probability p and otherwise 1, independently for each element.

    backward: dx = dy keep / (1 - p), with keep regenerated from the seed, so only the seed is saved

Element i, in row-major order, takes word i % 4 of the four that Philox gives for counter i / 4, and is kept if that
word is at least p 2^32. So the same seed drops the same elements, whatever the grid and the layout. One pass reads x
and writes y.
Source: Srivastava et al., Dropout, 2014; Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011
(doi:10.1145/2063384.2063405).
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dtype_name, nbytes
from ridgeline.select import eager, run
from ridgeline.tiles.philox import philox, words


@triton.jit(do_not_specialize=["low", "high", "least"])
def _fwd(y, x, seed, low, high, least, gain, n, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """seed: a tensor, or None for the seed with halves `low` and `high`; least: the bits of the least word kept.

    EACH: 4 or 8 adjacent elements, 16 bytes, belong to one thread, and so do their words.
    """
    group = (tl.program_id(0).to(tl.int64) * (BLOCK // EACH) + tl.arange(0, BLOCK // EACH)) * (EACH // 4)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if seed is not None:
        given = tl.load(seed)
        low = given
        high = given >> 32
    low = low.to(tl.uint32)
    high = high.to(tl.uint32)
    upper = (group >> 32).to(tl.uint32)
    a, b, c, d = philox(group.to(tl.uint32), upper, low, high)
    if EACH == 8:
        e, f, g, h = philox(group.to(tl.uint32) + 1, upper, low, high)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    value = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(y + i, (value * tl.where(word >= least.to(tl.uint32), gain, 0.0)).to(y.dtype.element_ty), mask=i < n)


_SPACE = [{"BLOCK": 32 * warps * each, "num_warps": warps} for warps in (4, 8, 16) for each in (4, 8, 16, 32)]


def _launch(
    direction: str, y: torch.Tensor, x: torch.Tensor, seed: torch.Tensor | None, low: int, high: int, p: float
) -> None:
    n = x.numel()

    def config() -> tuning.Config:
        rule = {"BLOCK": 256 * 16 // x.element_size(), "num_warps": 8}
        return tuning.config(device.of(x), "dropout", direction, dtype_name(x), lambda: rule, lambda: _SPACE)

    least, gain = threshold(p)
    numbers = low, high, _signed(least), gain, n
    each = max(4, 16 // x.element_size())

    def grid(c: tuning.Config) -> tuple[int]:
        return (triton.cdiv(n, c["BLOCK"]),)

    launch(_fwd, grid, y, x.contiguous(), seed, *numbers, EACH=each, config=config, key=direction)


def threshold(p: float) -> tuple[int, float]:
    """The least word whose element is kept, and the factor of kept elements."""
    return min(round(p * 2**32), 2**32 - 1), 1 / (1 - p) if p < 1 else 0.0


def _signed(bits: int) -> int:
    """The 32 low bits of a number, as a signed integer."""
    return (bits + 0x80000000 & 0xFFFFFFFF) - 0x80000000


@kernel_op("dropout_apply(Tensor x, Tensor? seed, SymInt low, SymInt high, float p, bool back, str? impl) -> Tensor")
def _apply(
    x: torch.Tensor, seed: torch.Tensor | None, low: int, high: int, p: float, back: bool, impl: str | None
) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(DROPOUT, "bwd" if back else "fwd", impl, (y,), x, seed, low, high, p)
    return y


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.rest = low, high, p, impl = rest
        return _apply(x, seed, low, high, p, False, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        low, high, p, impl = ctx.rest
        return _apply(dy, *ctx.saved_tensors, low, high, p, True, impl), None, None, None, None, None


def reference(
    x: torch.Tensor, p: float = 0.5, *, training: bool = True, seed: int | torch.Tensor | None = None
) -> torch.Tensor:
    if not training or p == 0:
        return x
    least, gain = threshold(p)
    group = torch.arange(-(-x.numel() // 4), device=x.device)
    word = words(_draw() if seed is None else seed, group & 0xFFFFFFFF, group >> 32).flatten()[: x.numel()]
    return x * (word >= least).view(x.shape) * gain


_drawn, _drawing = torch.empty((), dtype=torch.int64, device="cpu"), Lock()  # reused: allocating a tensor takes longer


def _draw() -> int:
    """A seed from PyTorch's CPU generator, without waiting for a GPU."""
    with _drawing:
        return int(_drawn.random_().item())


def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """x with each element set to 0 with probability p, and the others divided by 1 - p. Gradients flow to x.

    x: any shape and strides, floating point. Returns a contiguous tensor of its shape and dtype; with training=False or
    p = 0, x itself.
    seed: the same seed drops the same elements. An int of 64 bits, or a 0-d int64 tensor on x's device or the CPU. The
    kernel reads a tensor on x's device, so a CUDA graph draws anew when it changes. None draws from PyTorch's CPU
    generator or, under torch.compile or in a CUDA graph, from that of x's device at every run.
    Raises RidgelineError if p is outside [0, 1], if seed is invalid, if x is not floating point, or if `impl` cannot
    run the call.
    """
    if type(p) is not float or not 0.0 <= p <= 1.0:
        if not isinstance(p, int | float) or not 0 <= p <= 1:
            raise RidgelineError(f"dropout: p must be a number from 0 to 1, but is {p!r}")
        p = float(p)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        found = getattr(x, "dtype", type(x).__name__)
        raise RidgelineError(f"dropout: x must be a floating-point tensor, but is {found}")
    if isinstance(seed, torch.Tensor):
        if seed.dim() or seed.dtype != torch.int64 or not (seed.device == x.device or seed.is_cpu):
            wanted, found = f"0-d int64 on {x.device} or the CPU", f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
            raise RidgelineError(f"dropout: a tensor as seed must be {wanted}, but is {found}")
    elif seed is not None and (not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise RidgelineError(f"dropout: seed must be an int of 64 bits, a 0-d int64 tensor or None, but is {seed!r}")
    plain = eager(DROPOUT, impl, x)
    if not training or p == 0:
        return x
    if seed is None and (torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())):
        # A compiled or captured call draws its own seed at each run.
        seed = torch.randint(-(2**63), 2**63 - 1, (), device=x.device)
    if plain is not None and plain.call is not None:
        return plain.call(x, p, training=training, seed=seed)
    where, low, high = _place(seed, x)
    if x.requires_grad and torch.is_grad_enabled():
        return differentiate(_Dropout, x, where, low, high, p, impl)
    return _apply(x, where, low, high, p, False, impl)


def _place(seed: int | torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor | None, int, int]:
    """The seed as kernels take it: a tensor on x's device, or two halves, which need no copy to the GPU."""
    if seed is None:
        seed = _draw()
    if torch.compiler.is_compiling():
        if isinstance(seed, torch.Tensor):
            return seed.to(x.device), 0, 0
        return torch.full((), seed, dtype=torch.int64, device=x.device), 0, 0
    if isinstance(seed, torch.Tensor):
        if x.is_cuda == seed.is_cuda:
            return seed, 0, 0
        seed = int(seed)
    return None, _signed(seed), _signed(seed >> 32)


def cost(x: torch.Tensor, p: float = 0.5, **_: Any) -> tuple[Cost, Cost]:
    one = Cost(nbytes(x), nbytes(x), 2 * x.numel())
    return one, one


DROPOUT = Op(
    dropout,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129), 0.3), {"seed": 7}),
        Case("1001", (Spec(1001),), {"seed": -(1 << 62) + 5}),
        Case("5x40 seed in memory", (Spec(5, 40), 0.9), {"seed": Spec(dtype="int64", high=1 << 62)}),
        Case("33x8 p 1", (Spec(33, 8), 1.0), {"seed": 3}),
        Case("256x1024", (Spec(256, 1024), 0.1), {"seed": 11}, use="quick"),
        Case("16384x8192", (Spec(16384, 8192), 0.1), {"seed": 11}, dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

DROPOUT.eager("naive", "the generator and the formula in eager PyTorch: about 200 kernels", reference, served=True)
DROPOUT.compiled("the generator and the formula fused by torch.compile, in 64-bit integers")
DROPOUT.kernel(
    "triton",
    "four elements per call of the generator, in registers; backward draws again",
    kind="triton",
    served=True,
    fwd=partial(_launch, "fwd"),
    bwd=partial(_launch, "bwd"),
)
