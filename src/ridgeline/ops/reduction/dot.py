"""dot: y = sum_i a_i b_i, the ladder of what many threads cost that add to one address, and of what to do instead.

    backward: da = dy b,  db = dy a

a and b are read once. The first rungs, after PyTorch's fastAtomicAdd, keep the sum in float16, which holds whole numbers up to 2048 and
nothing above 65504: of products of 0.1 x 0.1 it stays at 32, where half a step is more than a product, so that such data tell nothing of
a kernel. Their cases are therefore of -1, 0 and 1, few of them not 0: every sum on the way is a whole number far below 2048, exact in
whatever order the threads come, and one element lost or counted twice shows.
Source: PyTorch's KernelUtils.cuh; for the sum in order Mark Harris, Optimizing Parallel Reduction in CUDA, 2007.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.reduction._sums import Parts, Positive, Rule, across, add_up, ceil, no_kernel, parts_like
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("dot.cu")


@triton.jit
def _fwd(parts, a, b, n, steps, a_step, b_step, BLOCK: tl.constexpr):
    """A program's part: `steps` blocks side by side."""
    sums = tl.zeros((1, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)[None, :]
    for _ in range(steps):
        left = tl.load(a + first * a_step, mask=first < n, other=0).to(tl.float32)
        sums += left * tl.load(b + first * b_step, mask=first < n, other=0).to(tl.float32)
        first += BLOCK
    tl.store(parts + tl.program_id(0) + tl.zeros((1, 1), tl.int32), across(sums, 16, True))


def _triton(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    block = 4096
    steps = max(1, a.numel() // (block * 64 * device.of(a).multiprocessors))
    parts = parts_like(a, ceil(a.numel(), block * steps), 1)
    launch(_fwd, (len(parts),), parts, a, b, a.numel(), steps, a.stride(0), b.stride(0), BLOCK=block, num_warps=8)
    add_up(y, parts)


@kernel_op("dot_fwd(Tensor a, Tensor b, str? impl) -> Tensor")
def _forward(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = a.new_empty(())
    if not a.numel():
        return y.zero_()
    run(DOT, "fwd", impl, (y,), a, b)
    return y


class _Dot(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _forward(a, b, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return dy * b if ctx.needs_input_grad[0] else None, dy * a if ctx.needs_input_grad[1] else None, None


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a, b)


def dot(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The dot product of two vectors, as `torch.dot`. Gradients flow to both.

    a, b: (N,), any strides, of one dtype and device. Returns a number, (), in that dtype; sums are in float32, and the same bits
    every time.
    Raises RidgelineError where shapes, dtypes or devices do not fit, or `impl` cannot run the call.
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise RidgelineError(f"dot: a and b must be tensors, and are {type(a).__name__} and {type(b).__name__}")
    if a.dim() != 1 or a.shape != b.shape:
        raise RidgelineError(f"dot: a and b must be vectors of one length, and are {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.device != b.device:
        raise RidgelineError(f"dot: a is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; they must agree")
    plain = eager(DOT, impl, a, b)
    if plain is not None and plain.call is not None:
        return plain.call(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return differentiate(_Dot, a, b, impl)
    return _forward(a, b, impl)


def cost(a: torch.Tensor, b: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(a, b), a.element_size(), 2 * a.numel()), Cost(nbytes(a, b), nbytes(a, b), 2 * a.numel())


class Signs(Spec):
    """-1 and 1, one element in `high`; the others are 0."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        signs = torch.randint(0, 2, self.shape, dtype=torch.int8, device=device, generator=generator) * 2 - 1
        if self.high > 1:
            signs *= torch.randint(0, self.high, self.shape, dtype=torch.int16, device=device, generator=generator) == 0
        return signs.to(dtype).requires_grad_(self.grad)


class Strided(Positive):
    """Every second element of twice as many."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args).detach()
        return torch.stack([made, made], -1)[..., 0].requires_grad_(self.grad)


def _signs(n: int, use: str = "check", dtypes: tuple[str, ...] = FLOATS) -> Case:
    """As many of a's elements are not 0 as a float16 sum has room for, eight times over: some 2**15."""
    grad = use == "check"
    name = f"{n >> 20} Mi" if n >> 20 else str(n)
    return Case(name + " signs", (Signs(n, high=max(2, n >> 15), grad=grad), Signs(n, grad=grad)), dtypes=dtypes, use=use)


def _case(name: str, n: int, kind: type[Spec] = Positive, dtypes: tuple[str, ...] = ("float32", "bfloat16"), use: str = "check") -> Case:
    return Case(name, (kind(n, grad=use == "check"), kind(n, grad=use == "check")), dtypes=dtypes, use=use)


DOT = Op(
    dot,
    reference=reference,
    cost=cost,
    cases=[
        _case("1000", 1000),
        _case("1031 strided", 1031, Strided, FLOATS),
        _case("300007", 300007),
        _case("1", 1, dtypes=FLOATS),
        _case("nothing", 0, dtypes=FLOATS),
        _signs(1023),
        _signs(70001),
        _signs(1 << 20, "quick", ("float32", "float16")),
        _signs(32 << 20, "bench", ("float16",)),
        _case("32 Mi", 32 << 20, dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

DOT.eager("torch", "PyTorch's own: cuBLAS on an NVIDIA GPU", reference, served=True)
DOT.compiled(
    "torch.compile of the product and its sum in float32",
    lambda a, b: (a.to(torch.promote_types(a.dtype, torch.float32)) * b).sum().to(a.dtype),
)


def _side_by_side(a: torch.Tensor, b: torch.Tensor, bytes: int = 1) -> str | None:
    """Why a kernel that loads so many bytes at once does not take these, or None."""
    if a.numel() > 1 and not a.stride(0) == b.stride(0) == 1:
        return f"it takes elements that lie side by side, and the strides are {a.stride(0)} and {b.stride(0)}"
    if a.data_ptr() % bytes or b.data_ptr() % bytes:
        return f"its packs begin at multiples of {bytes} bytes, and a and b begin {a.data_ptr() % bytes} and {b.data_ptr() % bytes} beyond"
    return None


def _together(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if (a.data_ptr() - b.data_ptr()) % 16:
        return "its packs of 16 bytes begin together, and those of a and b do not"
    return _side_by_side(a, b)


_kernel = cache(partial(CudaKernel, FILE))


def _atomic(names: tuple[str, str, str], each: int, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Clears the sum, adds to it, and puts it into y. each: the elements of a thread; 0: the GPU's threads share all of them."""
    facts: dict[str, Any] = {"DTYPE": CTYPE[a.dtype], "YTYPE": CTYPE[y.dtype], "THREADS": 256, "LOADS": 1, "PDL": 0}
    zero, kernel, end = map(_kernel, names, ("P", "PPPq", "PP"))
    sums, n = a.new_empty(2, dtype=torch.float16 if each else torch.float32), a.numel()
    # A thread more than packs, for an odd element.
    blocks = ceil(n // each + 1, 256) if each else min(ceil(n, 256), 8 * device.of(a).multiprocessors)
    launch(zero, (1,), sums, **facts, block=32)
    launch(kernel, (blocks,), sums, a, b, n, **facts, block=256)
    launch(end, (1,), y, sums, **facts, block=32)


IN_ORDER = Parts(FILE, "in_order", "add", 2)
RULE: Rule = {"THREADS": 256, "LOADS": 4, "BLOCKS": 128}


def _in_order(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, rule: Rule = RULE) -> None:
    IN_ORDER.start(rule, y, a, b)


def _rung(name: str, idea: str, fwd: Callable[..., None], kind: str = "cuda", **facts: Any) -> None:
    DOT.kernel(name, idea, kind=kind, fwd=fwd, bwd=no_kernel, **facts)


ATOMICS, DRAM = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_atom.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
# What atomics add they add in the order in which the threads come, so that reruns differ, but for whole numbers.
for end, each, gain, idea in (
    ("half", 1, 0.0, "an atomic a thread on one half, which the GPU does by reading, adding and swapping, until nobody was quicker"),
    ("half2", 2, 4.0, "two elements a thread, an atomic on a pair of halves, which the GPU has: half as many, and each done at once"),
    ("padded", 1, 0.5, "one element a thread again, its half in a pair beside a zero: the quick atomic where there is only one value"),
):
    fwd = partial(_atomic, ("half_zero", f"half_{end}", "half_end"), each)
    _rung(
        f"atomic_{end}",
        idea,
        fwd,
        supports=partial(_side_by_side, bytes=2 * each),
        dtypes=("float16",),
        deterministic=False,
        gain=gain,
        counter=ATOMICS,
    )
_rung(
    "atomic_block",
    "sums in registers and shared memory first: one atomic a block, in float32",
    partial(_atomic, ("block_zero", "block_one", "block_end"), 0),
    supports=_side_by_side,
    dtypes=("float16", "bfloat16"),  # of float32 products, so many sums in float32 would err more than the law allows
    deterministic=False,
    gain=1000.0,
    counter=ATOMICS,
)
_rung("triton", "any strides: a program's part, and the parts added in their order", _triton, "triton", served=True)
_rung(
    "cuda",
    "16-byte loads, eight on their way a thread; blocks leave parts, and a second kernel that starts early adds them in order",
    _in_order,
    supports=_together,
    served=True,
    gain=1.1,
    counter=DRAM,
)
