"""index_add: y = x, and y[index[k]] += alpha * source[k] for every k, along one dimension.

    backward: dx = dy,  dsource[k] = alpha dy[index[k]]

Rows that an index names twice take both, so that either additions must be atomic, or one thread must make all of a place. Served is the
second: few indices are looked through by every warp, many are sorted first, and a row's sources are added in order, in float32.
Source: PyTorch's and OneFlow's kernels for the teaching rungs (documents of index_add); sorting by destination is the embedding
gradient's old way.
"""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("index_add.cu")
_COPY, _BWD = CudaKernel(FILE, "index_add_copy", "PPq"), CudaKernel(FILE, "index_add_bwd", "PPPqqqqf")
_FEW, _STARTS = CudaKernel(FILE, "index_add_few", "PPPPqqqqf"), CudaKernel(FILE, "index_add_starts", "PPqq")
_SEGMENTS = CudaKernel(FILE, "index_add_segments", "PPPPPPqqqqf")
FEW = 1024  # indices that warps look through; more are sorted
INT = {torch.int32: "int", torch.int64: "long long"}


def _facts(y: torch.Tensor, dim: int, index: torch.Tensor, *others: torch.Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The sizes (outer, size, n, inner) that y and a source have around `dim`, and the macros: packs of 16 bytes where all lie at such."""
    inner, pack = math.prod(y.shape[dim + 1 :]), 16 // y.element_size()
    whole = inner % pack == 0 and not any([t.data_ptr() % 16 for t in (y, *others)])
    macros = {"DTYPE": CTYPE[y.dtype], "ITYPE": INT[index.dtype], "PACK": pack if whole else 1}
    return (math.prod(y.shape[:dim]), y.shape[dim], index.shape[0], inner), macros | {"ROWS": 1, "LANES": 32, "BATCH": 8, "OTYPE": "int"}


def _copy(y: torch.Tensor, x: torch.Tensor, macros: dict[str, Any]) -> None:
    """y = x, as the ground to add on."""
    if not x.is_contiguous():
        y.copy_(x)
        return
    pack = 1 if y.data_ptr() % 16 or x.data_ptr() % 16 else 16 // y.element_size()
    launch(_COPY, (-(-y.numel() // (1024 * pack)),), y, x, y.numel(), block=256, **macros | {"PACK": pack})


def _blocks(threads: int, block: int = 256) -> tuple[int]:
    return (min(-(-threads // block), (1 << 31) - 1),)


def _unordered(kernel: CudaKernel, most: int, y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """The copy, then a kernel that adds to it. most: blocks a multiprocessor, of a grid that walks; 0 for as many as there is work."""
    index, source = index.contiguous(), source.contiguous()
    sizes, macros = _facts(y, dim, index, source)
    _copy(y, x, macros)
    count = y.numel() // max(1, sizes[1]) if kernel.name.endswith("small") else source.numel()
    blocks = _blocks(count // (macros["PACK"] if kernel.name.endswith("packed") else 1), 128)[0]
    blocks = min(blocks, most * device.of(y).multiprocessors) if most else blocks
    launch(kernel, (blocks,), y, index, source, *sizes, alpha, block=128, **macros)


def _ordered(y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """Every place of y by one thread. Rows that no index names are copied by the same kernel, or where they are most by one before."""
    index, source = index.contiguous(), source.contiguous()
    if not x.is_contiguous():
        y.copy_(x)
        x = y  # a thread reads what it then writes
    sizes, macros = _facts(y, dim, index, x, source)
    outer, size, n, inner = sizes
    rows = size <= 4 * n or (n <= 64 and inner * y.element_size() >= 512)
    if not rows and x is not y:
        _copy(y, x, macros)
    macros["ROWS"], items = int(rows), size if rows else n
    if n <= FEW:
        pieces = -(-inner // (128 * macros["PACK"]))
        launch(_FEW, _blocks(outer * items * pieces * 32), y, x, index, source, *sizes, alpha, block=256, **macros)
        return
    sorted_, order = torch.sort(index, stable=True)
    starts = torch.empty(size + 1 if rows else 0, dtype=torch.int32, device=y.device)
    if rows:
        launch(_STARTS, _blocks(size + 1), starts, sorted_, size, n, block=256, **macros)
    packs = inner // macros["PACK"]
    lanes = min(32, 1 << (max(1, packs) - 1).bit_length())
    threads = outer * items * -(-packs // lanes) * lanes
    macros |= {"LANES": lanes, "OTYPE": INT[order.dtype]}
    launch(_SEGMENTS, _blocks(threads), y, x, sorted_, order, starts, source, *sizes, alpha, block=256, **macros)


def _launch_bwd(dsource: Any, dy: Any, dim: int, index: Any, source: None, alpha: float, deterministic: bool) -> None:
    dy, index = dy.contiguous(), index.contiguous()
    sizes, macros = _facts(dy, dim, index, dsource)
    launch(_BWD, _blocks(dsource.numel() // macros["PACK"]), dsource, dy, index, *sizes, alpha, block=256, **macros)


@kernel_op("index_add_fwd(Tensor x, Tensor index, Tensor source, int dim, float alpha, bool deterministic, str? impl) -> Tensor")
def _forward(x: Any, index: Any, source: Any, dim: int, alpha: float, deterministic: bool, impl: str | None) -> torch.Tensor:
    y = x.new_empty(x.shape)
    if y.numel():
        run(INDEX_ADD, "fwd", impl, (y,), x, dim, index, source, alpha, deterministic)
    return y


@kernel_op("index_add_bwd(Tensor dy, Tensor index, int dim, float alpha, str? impl) -> Tensor")
def _backward(dy: torch.Tensor, index: torch.Tensor, dim: int, alpha: float, impl: str | None) -> torch.Tensor:
    dsource = dy.new_empty((*dy.shape[:dim], index.shape[0], *dy.shape[dim + 1 :]))
    if dsource.numel():
        run(INDEX_ADD, "bwd", impl, (dsource,), dy, dim, index, None, alpha, True)
    return dsource


class _IndexAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, index: Any, source: Any, dim: int, alpha: float, deterministic: bool, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.facts = dim, alpha, impl
        return _forward(x, index, source, dim, alpha, deterministic, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dsource = _backward(dy, *ctx.saved_tensors, *ctx.facts) if ctx.needs_input_grad[2] else None
        return dy if ctx.needs_input_grad[0] else None, None, dsource, None, None, None, None


def reference(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1, deterministic: bool | None = None) -> torch.Tensor:
    return torch.index_add(x, dim, index, source, alpha=alpha)


def _fault(x: Any, dim: Any, index: Any, source: Any, alpha: Any, deterministic: Any) -> str | None:
    """What is wrong with a call, or None."""
    for name, t in (("x", x), ("index", index), ("source", source)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, and is {type(t).__name__}"
        if t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}; one device is needed"
    if not isinstance(dim, int | torch.SymInt) or not -x.dim() <= dim < x.dim():
        return f"dim must be an int from {-x.dim()} to {x.dim() - 1} for an x of {x.dim()} dimensions, and is {dim!r}"
    if index.dtype not in INT or index.dim() != 1:
        return f"index must be a vector of int64 or int32, and is {index.dtype} of shape {tuple(index.shape)}"
    dim %= x.dim()
    if source.dtype != x.dtype or source.shape != (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]):
        return (
            f"source must be x with {index.shape[0]} rows, as many as there are indices, in dimension {dim}; "
            f"x is {x.dtype} {tuple(x.shape)} and source {source.dtype} {tuple(source.shape)}"
        )
    if not isinstance(alpha, Real | torch.SymInt | torch.SymFloat):
        return f"alpha must be a number, and is {type(alpha).__name__}"
    if deterministic not in (None, True, False):
        return f"deterministic must be None, True or False, and is {deterministic!r}"
    if readable(index) and index.numel() and not (index.min() >= 0 and index.max() < x.shape[dim]):
        return f"index must be in 0 to {x.shape[dim] - 1}, and holds {index.min()} to {index.max()}"
    return None


def index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1, deterministic: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """x with `alpha * source` added to the rows of dimension `dim` that `index` names, as `torch.index_add`. Gradients flow to x and source.

    x: any strides, one dimension or more. index: (n,), int64 or int32; an index may come again, and then all its rows are added. source: x's
    shape and dtype but for n in dimension `dim`. Sums are in float32, in the order of the source, and the same bits every time.
    deterministic: False allows packed atomics, whose sums are in x's dtype and in no order, where there are many indices.
    Returns a contiguous tensor of x's shape. On a GPU an index out of range gives NaN in the nearest row; on a CPU, and everywhere with
    RIDGELINE_CHECK=1, it raises. Raises RidgelineError where shapes, dtypes or devices do not fit, or `impl` cannot run the call.
    """
    fault = _fault(x, dim, index, source, alpha, deterministic)
    if fault:
        raise RidgelineError(f"index_add: {fault}")
    plain = eager(INDEX_ADD, impl, x, dim, index, source, alpha, deterministic)
    if plain is not None and plain.call is not None:
        return plain.call(x, dim, index, source, alpha=alpha)
    same = deterministic is not False or torch.are_deterministic_algorithms_enabled()
    given = x, index, source, dim % x.dim(), float(alpha), same, impl
    if torch.is_grad_enabled() and (x.requires_grad or source.requires_grad):
        return differentiate(_IndexAdd, *given)
    return _forward(*given)


def cost(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1, deterministic: bool | None = None) -> tuple[Cost, Cost]:
    forward = Cost(nbytes(x, index, source), nbytes(x), 2 * source.numel())
    return forward, Cost(min(nbytes(x), nbytes(source)) + nbytes(index), nbytes(source), source.numel())


def _case(shape: tuple[int, ...], dim: int, n: int, use: str, dtype: str = "int64", **facts: Any) -> Case:
    grad = use == "check"
    source = Spec(*shape[:dim], n, *shape[dim + 1 :], grad=grad)
    name = f"{n} into {'x'.join(map(str, shape))}{f' dim {dim}' if dim else ''}{' alpha' if facts.get('kwargs') else ''}"
    return Case(name, (Spec(*shape, grad=grad), dim, Spec(n, dtype=dtype, high=shape[dim]), source), use=use, **facts)


INDEX_ADD = Op(
    index_add,
    reference=reference,
    cost=cost,
    cases=[
        _case((33, 129), 1, 65, "check"),
        _case((40, 64), 0, 15, "check", kwargs={"alpha": -0.5}),
        _case((9, 300), 0, 1, "check", dtype="int32"),
        _case((5, 7, 24), 1, 1500, "check", dtype="int32"),
        _case((9000,), 0, 2000, "check"),
        _case((300, 72), 0, 1100, "check", kwargs={"alpha": 2.0}),
        _case((3, 5), 0, 0, "check"),
        _case((4096, 256), 0, 32768, "quick"),
        *(
            _case(shape, 0, n, "bench", dtypes=("float32",))
            for n in (15, 1024)
            for shape in ((1 << 25,), (1 << 15, 1 << 10), (1 << 5, 1 << 10, 1 << 10))
            if n == 15 or len(shape) < 3
        ),
        _case((50000, 256), 0, 1 << 20, "bench", dtypes=("float16",)),
    ],
)  # fmt: skip


def _small(x: Any, dim: int, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] <= 16 else f"it takes 16 indices at most, and these are {index.shape[0]}"


def _packs(x: torch.Tensor, dim: int, index: Any, source: Any = None, *rest: Any) -> str | None:
    """A launcher's y and copies of strided inputs begin at 16 bytes, as all that PyTorch allocates."""
    size, pack = math.prod(x.shape[dim % max(1, x.dim()) + 1 :]), 16 // x.element_size()
    lies = source is None or source.data_ptr() % 16 == 0 or not source.is_contiguous()
    return None if size % pack == 0 and lies else f"it adds {pack} neighbours at once, and these rows of {size} are not made of such"


def _slow(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    return (
        None
        if deterministic is False and index.shape[0] > FEW
        else "its sums have no order: deterministic=False and many indices ask for it"
    )


def _left(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    return "deterministic=False asks for atomics" if deterministic is False and index.shape[0] > FEW else None


INDEX_ADD.eager("torch", "PyTorch's own: a copy, then atomics", reference, served=True)
INDEX_ADD.kernel_dtypes |= set(INT)  # the indices'; that x is of floats each rung's own dtypes say
ATOMICS = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_red.sum"


def _atomic(name: str, idea: str, most: int, **facts: Any) -> None:
    kernel = CudaKernel(FILE, f"index_add_{name}", "PPPqqqqf")
    INDEX_ADD.kernel(f"cuda_{name}", idea, kind="cuda", fwd=partial(_unordered, kernel, most), bwd=_launch_bwd, **facts)


_atomic("small", "at most 16 indices: a loop over them inside, so that no two threads meet and nothing is atomic", 8, supports=_small)
# The three that follow add by atomics, whose order differs from run to run, and with it the rounding.
_atomic("large", "threads over the source's elements, as many as the GPU holds, an atomic each", 8, deterministic=False, counter=ATOMICS)
_atomic("atomic", "a thread for each element of the source, as in OneFlow: no loop, and the GPU keeps itself full", 0, deterministic=False,
        gain=1.0, counter="sm__warps_active.avg.pct_of_peak_sustained_active")  # fmt: skip
_atomic("packed", "16 bytes an atomic (two halves at once before Hopper): an eighth of the requests", 0, deterministic=False,
        supports=_packs, served=True, unless=_slow, gain=4.0, counter=ATOMICS)  # fmt: skip
INDEX_ADD.kernel(
    "cuda",
    "no atomics: indices looked through or sorted, each row made by the threads that own it, read once, in order, in float32",
    kind="cuda",
    fwd=_ordered,
    bwd=_launch_bwd,
    served=True,
    unless=_left,
    gain=1.5,
    counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
