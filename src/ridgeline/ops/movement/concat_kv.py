"""concat_kv: appends new keys and values to a cache in place: row s of sequence b goes to row positions[b] + s.

    cache_k[b, positions[b] + s] = k[b, s]          cache_v[b, positions[b] + s] = v[b, s]

The floor is one read and one write of the new rows. A sequence's new rows are one piece of memory, and so is their
place in the cache, so the best implementation copies 2 B pieces in one launch. Rows that fall outside the cache are
dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, dense_only, nbytes, readable
from ridgeline.ops.movement._bytes import DRAM, ISSUED
from ridgeline.ops.movement._kv import append_both, append_one, appends_packs, appends_pieces, check_index
from ridgeline.select import eager, run

Pair = tuple[torch.Tensor, torch.Tensor]


@kernel_op(
    "concat_kv_fwd(Tensor(a!) cache_k, Tensor(b!) cache_v, Tensor k, Tensor v, Tensor positions, str? impl) -> ()"
)
def _append(cache_k: Any, cache_v: Any, k: Any, v: Any, positions: Any, impl: str | None) -> None:
    run(CONCAT_KV, "fwd", impl, (), cache_k, cache_v, k, v, positions)


@torch.no_grad()
def reference(cache_k: Any, cache_v: Any, k: Any, v: Any, positions: torch.Tensor) -> Pair:
    rows = positions.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    b, s = ((rows >= 0) & (rows < cache_k.shape[1])).nonzero(as_tuple=True)
    for cache, new in ((cache_k, k), (cache_v, v)):
        cache[b, rows[b, s]] = new[b, s]
    return cache_k, cache_v


@torch.no_grad()
def _naive(cache_k: Any, cache_v: Any, k: Any, v: Any, positions: torch.Tensor) -> Pair:
    for b, at in enumerate(positions.tolist()):
        first, last = max(0, -at), max(0, min(k.shape[1], cache_k.shape[1] - at))
        if first < last:
            cache_k[b, at + first : at + last] = k[b, first:last]
            cache_v[b, at + first : at + last] = v[b, first:last]
    return cache_k, cache_v


def concat_kv(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches, with k and v written into them in place at each sequence's position. It has no gradients.

    cache_k, cache_v: (B, S_max, H, D), any strides but not expanded. k, v: (B, S, H, D), any strides. All of one dtype.
    positions: (B,), int32 or int64: the cache row that takes row 0. Values on a GPU are not validated: rows outside the
    cache are dropped. On a CPU, or with RIDGELINE_CHECK=1, they raise.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    given = {"cache_k": cache_k, "cache_v": cache_v, "k": k, "v": v}
    _check(given, positions)
    plain = eager(CONCAT_KV, impl, *given.values())
    if plain is not None and plain.call is not None:
        plain.call(*given.values(), positions)
        return cache_k, cache_v
    _append(*given.values(), positions, impl)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version((cache_k, cache_v))
    return cache_k, cache_v


def _check(given: dict[str, torch.Tensor], positions: torch.Tensor) -> None:
    """Raises RidgelineError if the inputs do not fit together, before anything is written."""
    for name, t in [*given.items(), ("positions", positions)]:
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"concat_kv: {name} must be a tensor, but is {type(t).__name__}")
    dense_only("concat_kv", [*given.values(), positions])
    cache, new = given["cache_k"], given["k"]
    for name, t in given.items():
        like = cache if "cache" in name else new
        if t.dim() != 4 or t.shape != like.shape or (t.shape[:1], t.shape[2:]) != (new.shape[:1], new.shape[2:]):
            shapes = ", ".join([f"{n} {tuple(x.shape)}" for n, x in given.items()])
            wanted = "caches must be (B, S_max, H, D) and k and v (B, S, H, D), with the same B, H and D"
            raise RidgelineError(f"concat_kv: {wanted}; given: {shapes}")
        if t.dtype != cache.dtype or t.device != cache.device:
            found = f"{name} is {t.dtype} on {t.device} and cache_k {cache.dtype} on {cache.device}"
            raise RidgelineError(f"concat_kv: {found}; they must agree")
        if torch.is_grad_enabled() and t.requires_grad:
            advice = "give it detached or under torch.no_grad()"
            raise RidgelineError(f"concat_kv: it has no gradients, but {name} requires one; {advice}")
        if "cache" in name and any([n > 1 and not s for n, s in zip(t.shape, t.stride(), strict=True)]):
            raise RidgelineError(f"concat_kv: {name} is expanded and cannot be changed in place; give its clone()")
    check_index("concat_kv: positions", positions, cache)
    room, rows = cache.shape[1], new.shape[1]
    if readable(positions) and positions.numel():
        if rows > room:
            raise RidgelineError(f"concat_kv: k and v must have at most the cache's {room} rows, but have {rows}")
        if not (0 <= positions.min() and positions.max() <= room - rows):
            wanted = f"from 0 to {room - rows} for {rows} new rows in {room}"
            found = f"{positions.min()} to {positions.max()}"
            raise RidgelineError(f"concat_kv: positions must be {wanted}, but are from {found}")


def cost(cache_k: Any, cache_v: Any, k: Any, v: Any, positions: Any) -> tuple[Cost, None]:
    return Cost(nbytes(k, v, positions), nbytes(k, v), 0), None


def _case(name: str, shape: tuple[int, ...], room: int, index: str = "int64", **facts: Any) -> Case:
    cache, new = Spec(shape[0], room, *shape[2:], grad=False), Spec(*shape, grad=False)
    return Case(name, (cache, cache, new, new, Spec(shape[0], dtype=index, high=room - shape[1] + 1)), **facts)


CONCAT_KV = Op(
    concat_kv,
    reference=reference,
    cost=cost,
    mutates=(0, 1),
    cases=[
        _case("3x5 of 17x2x16", (3, 5, 2, 16), 17),
        _case("3x1 of 9x3x7", (3, 1, 3, 7), 9, "int32"),
        _case("2x70 of 90x2x24", (2, 70, 2, 24), 90),
        _case("4x0 of 5x1x8", (4, 0, 1, 8), 5),
        _case("8x1 of 256x4x64", (8, 1, 4, 64), 256, use="quick"),
        _case("64x8192 of 8192x8x128", (64, 8192, 8, 128), 8192, dtypes=("bfloat16",), use="bench"),
        _case("64x512 of 8192x8x128", (64, 512, 8, 128), 8192, dtypes=("bfloat16",), use="bench"),
        _case("64x1 of 8192x8x128", (64, 1, 8, 128), 8192, dtypes=("bfloat16",), use="bench"),
    ],
)
COPIED = (*FLOATS, "int8", "uint8", "float8_e4m3fn")  # nothing is computed


def _cuda(name: str, idea: str, launcher: Any, supports: Any, **facts: Any) -> None:
    CONCAT_KV.kernel(name, idea, kind="cuda", fwd=launcher, supports=supports, dtypes=COPIED, served=True, **facts)


CONCAT_KV.eager("naive", "one slice per sequence; the host waits to read each position and starts 2 B copies", _naive)
CONCAT_KV.eager("torch", "index_put of all sequences; the host waits for the valid rows", reference, served=True)
_cuda("cuda", "one element per thread, one launch per tensor, no waiting", partial(append_one, False), None)
PACKED: dict[str, Any] = {"gain": 2.0, "counter": ISSUED}
_cuda("cuda_packed", "16 bytes per thread: fewer loads and stores", partial(append_one, True), appends_packs, **PACKED)
BOTH: dict[str, Any] = {"gain": 1.1, "counter": DRAM}
_cuda("cuda_both", "both tensors in one launch, four loads in flight per thread", append_both, appends_pieces, **BOTH)
