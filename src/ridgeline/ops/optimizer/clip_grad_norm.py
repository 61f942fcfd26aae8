"""clip_grad_norm: scales gradients in place so that their joint norm is at most max_norm.

    norm = (sum of |g|^2)^(1/2), or max |g|          g = g min(1, max_norm / (norm + 1e-6))

Three launches, and the host waits for nothing: partial sums of chunks of all tensors (see `_tensors.py`), their sum in
a fixed order, and the scaling, which reads the norm on the device and touches nothing if the factor is 1. Scaling takes
the chunks in reverse order, since those read last may still be in the cache.
Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2013 (arXiv:1211.5063).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import flops
from ridgeline.boundary import LIBRARY, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, tensors_of
from ridgeline.ops.optimizer._checks import checked, listed, number
from ridgeline.ops.optimizer._sharded import all_plain, changed, dtensor, local, sharded_norm
from ridgeline.ops.optimizer._tensors import (
    CHUNK,
    TL,
    Shelf,
    Table,
    chunk_of,
    dense,
    narrow,
    pointer,
    tabled,
)
from ridgeline.select import eager, run, select


@triton.jit
def _more(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gather(total, x, LARGEST: tl.constexpr):
    return _more(total, tl.abs(x)) if LARGEST else total + x * x


@triton.jit
def _whole(total, LARGEST: tl.constexpr):
    return tl.reduce(total, 0, _more) if LARGEST else tl.sum(total, 0)


@triton.jit
def _partial(
    table,
    owners,
    sums,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    entry, start, size = chunk_of(table, owners, chunk, CHUNK)
    x = pointer(entry, 0, start, DTYPE, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = size // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        total = _gather(total, tl.load(x + at + tl.arange(0, BLOCK)).to(tl.float32), LARGEST)
    if whole < size:
        i = whole + tl.arange(0, BLOCK)
        total = _gather(total, tl.load(x + i, mask=i < size, other=0).to(tl.float32), LARGEST)
    tl.store(sums + chunk, _whole(total, LARGEST))


@triton.jit
def _norm(norm, sums, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = tl.load(sums + i, mask=i < count, other=0)
        total = _more(total, part) if LARGEST else total + part
    whole = _whole(total, LARGEST)
    tl.store(norm, whole if LARGEST else tl.sqrt_rn(whole))


@triton.jit
def _scale(
    table, owners, norm, most, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    factor = most / (tl.load(norm) + 1e-6)
    if not (factor >= 1):  # also true for a NaN factor, which is written
        entry, start, size = chunk_of(table, owners, tl.num_programs(0) - 1 - tl.program_id(0), CHUNK)
        x = pointer(entry, 0, start, DTYPE, ALIGNED)
        whole = size // BLOCK * BLOCK
        for at in range(0, whole, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(x + i, (tl.load(x + i).to(tl.float32) * factor).to(DTYPE))
        if whole < size:
            j = whole + tl.arange(0, BLOCK)
            tl.store(x + j, (tl.load(x + j, mask=j < size).to(tl.float32) * factor).to(DTYPE), mask=j < size)


def _launch_triton(
    norm: torch.Tensor, like: torch.Tensor, tables: Sequence[Table], max_norm: float, largest: bool, known: bool
) -> None:
    """Computes the norm unless it is known, and scales. like: has the first table's dtype, which selects kernels."""
    common: list[dict[str, Any]] = []
    for table in tables:
        block = 256 * 16 // table.dtypes[0].itemsize
        facts = {"DTYPE": TL[table.dtypes[0]], "ALIGNED": table.aligned, "CHUNK": CHUNK, "BLOCK": block, "num_warps": 8}
        common.append(facts)
    if not known:
        count, at = sum(t.chunks for t in tables), 0
        sums = torch.empty(count, dtype=torch.float32, device=norm.device)
        for table, facts in zip(tables, common, strict=True):
            launch(_partial, (table.chunks,), table.table, table.owners, sums[at:], LARGEST=largest, **facts)
            at += table.chunks
        launch(_norm, (1,), norm, sums, count, LARGEST=largest, BLOCK=4096, num_warps=16)
    if max_norm != math.inf:
        for table, facts in zip(tables, common, strict=True):
            launch(_scale, (table.chunks,), table.table, table.owners, norm, max_norm, **facts)


_tables = Shelf(0)


def _run(
    tensors: Sequence[torch.Tensor],
    max_norm: float,
    largest: bool,
    impl: str | None,
    tables: list[Table] | None = None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clips by kernels. tables: those of exactly these tensors. known: their norm, if it is known already."""
    norm = torch.empty((), dtype=torch.float32, device=tensors[0].device) if known is None else known
    keep, copies = False, []
    if tables is None:
        select(CLIP_GRAD_NORM, impl, tensors[0], kernels=True)  # raises here, before anything is started
        rows = [t if dense(t) else t.contiguous() for t in tensors]
        copies = [(t, row) for t, row in zip(tensors, rows, strict=True) if t is not row]
        tables = tabled([(row,) for row in rows])
        keep = not copies
    if not tables:
        return norm.zero_() if known is None else norm
    run(CLIP_GRAD_NORM, "fwd", impl, (norm,), tables[0].like, tables, max_norm, largest, known is not None)
    if keep:
        _tables.keep(None, tensors, tables)
    for tensor, copy in copies:
        tensor.copy_(copy)
    torch.autograd.graph.increment_version(tensors)
    return norm


LIBRARY.define("clip_grad_norm(Tensor(a!)[] tensors, float max_norm, bool largest, str? impl) -> Tensor")
LIBRARY.impl("clip_grad_norm", _run, "CompositeExplicitAutograd")
torch.library.register_fake(
    "ridgeline::clip_grad_norm", lambda tensors, *_: tensors[0].new_empty((), dtype=torch.float32), lib=LIBRARY
)
flops.register("clip_grad_norm")


@torch.no_grad()
def reference(tensors: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    grads = [g for g in gradients(tensors) if g.numel()]
    if not grads:
        return torch.zeros((), device=gradients(tensors)[0].device)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=wide) for g in grads])
    norm = torch.linalg.vector_norm(norms, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(factor.to(g.dtype) if g.dtype == torch.float64 else factor)
    return norm


@torch.no_grad()
def _torch(tensors: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    grads = [g for g in gradients(tensors) if g.numel()]
    if not grads:
        return torch.zeros((), device=gradients(tensors)[0].device)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type, dtype=wide)), norm_type)
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def gradients(tensors: Any) -> list[torch.Tensor]:
    """The `.grad` of parameters and of tensors that require gradients; other tensors are gradients themselves."""
    some = [tensors] if isinstance(tensors, torch.Tensor) else listed("clip_grad_norm", "tensors", tensors)
    found = []
    for t in some:
        if isinstance(t, torch.Tensor) and (t.requires_grad or isinstance(t, torch.nn.Parameter)):  # or a frozen one
            t = t.grad
        if t is not None:
            found.append(t)
    return found


def clip_grad_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, *, impl: str | None = None
) -> torch.Tensor:
    """The gradients' norm; scales them in place to at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    tensors: parameters (each stands for its `.grad`, and is skipped without one; so does any tensor that requires a
    gradient) or gradients; any shapes and strides, floating point, on one device. norm_type: 2, inf, or another order,
    which PyTorch runs. Nothing waits for the GPU.
    DTensors: the local shards are scaled, and the norm is summed over their meshes; every rank must call this,
    with gradients of the same parameters.
    Returns the norm before scaling, over all gradients as one vector: a 0-d tensor, float32 (float64 for float64
    gradients). A norm that is not finite scales as in PyTorch: infinity gives 0 and NaN, NaN gives NaN.
    Raises RidgelineError if max_norm is negative, if gradients lie on several devices, are sparse or integers, or if
    `impl` cannot run the call.
    """
    grads = gradients(tensors)
    max_norm = number("clip_grad_norm", "max_norm", max_norm)
    norm_type = math.inf if norm_type == "inf" else number("clip_grad_norm", "norm_type", norm_type)
    if not max_norm >= 0:
        raise RidgelineError(f"clip_grad_norm: max_norm must be at least 0, but is {max_norm}")
    if not norm_type > 0:
        raise RidgelineError(f"clip_grad_norm: norm_type must be above 0 (2 or inf, say), but is {norm_type}")
    if not all_plain((grads,)):
        if any(map(dtensor, grads)):
            return _sharded(grads, max_norm, norm_type, impl)
        grads = local("clip_grad_norm", ("tensors",), (grads,))[0]
    usual = norm_type in (2.0, math.inf)
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    tables = None if watched or impl is not None or not usual else _tables.find(None, grads)
    if tables is None:
        checked("clip_grad_norm", ("tensors",), (grads,))
        if not grads:
            return torch.tensor(0.0)
        if len({g.device for g in grads}) > 1:
            places = ", ".join(sorted({str(g.device) for g in grads}))
            raise RidgelineError(f"clip_grad_norm: the gradients are on {places}; they must share one device")
        plain = eager(CLIP_GRAD_NORM, impl, *grads)
        if plain is None and not usual:
            if impl is not None:
                reason = f"it takes norm_type 2 and inf, but this is {norm_type}"
                raise RidgelineError(f"clip_grad_norm: impl={impl!r} cannot run this call: {reason}")
            plain = CLIP_GRAD_NORM.implementations["torch"]
        if plain is not None and plain.call is not None:
            return plain.call(grads, max_norm, norm_type)
    facts = grads, max_norm, norm_type == math.inf, impl
    found: torch.Tensor = torch.ops.ridgeline.clip_grad_norm(*facts) if watched else _run(*facts, tables)
    return found


@torch.no_grad()
def _sharded(grads: Sequence[Any], max_norm: float, norm_type: float, impl: str | None) -> torch.Tensor:
    """Clips DTensors: the local shards' norms, their sum over the meshes, and a scaling of the shards."""
    norm = sharded_norm(grads, norm_type, lambda own: clip_grad_norm(own, math.inf, norm_type, impl=impl))
    own = [g for g in local("clip_grad_norm", ("tensors",), (grads,))[0] if g.numel()]
    if own and max_norm != math.inf:
        changed(grads)
        if eager(CLIP_GRAD_NORM, impl, *own) is None:
            _run(own, max_norm, False, impl, known=norm)
        else:
            torch._foreach_mul_(own, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def cost(tensors: Any, max_norm: float, norm_type: float = 2.0) -> tuple[Cost, None]:
    """Clipping reads twice and writes once; a norm alone (max_norm inf) reads once."""
    grads = tensors_of([tensors])
    size, count = nbytes(*grads), sum(g.numel() for g in grads)
    return (Cost(size, 4, 2 * count) if max_norm == math.inf else Cost(2 * size, size, 3 * count)), None


def _specs(*shapes: tuple[int, ...]) -> list[Spec]:
    return [Spec(*shape, grad=False) for shape in shapes]


CLIP_GRAD_NORM = Op(
    clip_grad_norm,
    reference=reference,
    cost=cost,
    mutates=(0,),
    cases=[
        Case("33x129", (Spec(33, 129, grad=False), 1.0)),
        Case("lists", (_specs((5,), (), (0, 3), (40, 257), (9000,)), 10.0)),
        Case("largest", (_specs((33, 129), (8200,)), 0.5, math.inf)),
        Case("not clipped", (_specs((33, 129), (8200,)), 1e6)),
        Case("cubes", (_specs((33, 129), (8200,)), 0.5, 3.0)),
        Case("4 x 1 Mi", (_specs(*[(1 << 20,)] * 4), 1.0), use="quick"),
        Case("4 x 64 Mi", (_specs(*[(1 << 26,)] * 4), 1.0), dtypes=("float32", "bfloat16"), use="bench"),
        Case("4 x 64 Mi, norm alone", (_specs(*[(1 << 26,)] * 4), math.inf), dtypes=("float32",), use="bench"),
    ],
)


CLIP_GRAD_NORM.eager("naive", "a norm per tensor, their norm, and a product per tensor", reference)
CLIP_GRAD_NORM.eager("torch", "torch's foreach kernels: norms of many tensors, then their scaling", _torch, served=True)
CLIP_GRAD_NORM.kernel(
    "triton",
    "partial sums over chunks of all tensors, and a scaling that does nothing if the factor is 1",
    kind="triton",
    fwd=_launch_triton,
    supports=narrow,
    served=True,
)
