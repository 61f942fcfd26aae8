"""mla_decode's starts of the Gluon kernel: which calls it takes, and the kernel that appends new tokens before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.decode import _latent_hopper
from ridgeline.ops.decode._latent import fwd as triton_fwd  # noqa: F401  # the op's file takes both from here
from ridgeline.ops.decode._parts import LOG2E, Numbers, Results, Rules, Tokens, combine, parts_of

AHEAD = 4  # so many tiles before its turn a tile is brought into L2


def refusal(
    q: torch.Tensor, cache: torch.Tensor, lengths: Any, kv: Any = None, block_table: Any = None, cos: Any = None,
    sin: Any = None, kv_scale: Any = None, latent: int = 512, scale: float = 1.0, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    """Why the kernel does not take a call, or None."""
    if latent != 512 or q.shape[-1] != 576:
        return f"it takes 512 latent columns and 64 for rotation, got {latent} and {q.shape[-1] - latent}"
    if block_table is not None or cos is not None or cache.dtype != q.dtype:
        return "it takes a contiguous cache of q's dtype, and q and kv already rotated"
    if scale <= 0:
        return f"scale must be above 0, got {scale}"
    if not (q.numel() and cache.numel()):
        return f"no size may be 0, but q is {tuple(q.shape)} and the cache {tuple(cache.shape)}"
    if q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2):
        return f"the heads of a query must lie before those of the next, but q's strides are {q.stride()}"
    for name, t in (("q", q), ("cache", cache), ("kv", kv)):
        if t is not None and (t.data_ptr() % 16 or any(n > 1 and s % 8 for n, s in zip(t.shape[:-1], t.stride()))):
            return f"it copies 16 bytes at a time: {name} and its rows must begin at multiples of 16 bytes"
    return None


def few(q: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Why automatic choice leaves a call to Triton, or None."""
    return "the call has fewer rows than a program" if q.shape[1] * q.shape[2] < 64 else None


@triton.jit
def _append(cache, kv, lengths, capacity, steps, kv_steps, D: tl.constexpr, BD: tl.constexpr):
    """Writes a new token at its place, if the cache has room for it."""
    b, i, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BD)
    length = tl.load(lengths + b)
    n = tl.minimum(length, capacity) + i
    x = tl.load(kv + b * kv_steps[0] + i * kv_steps[1] + d, mask=d < D, other=0.0)
    tl.store(cache + b * steps[0] + n.to(tl.int64) * steps[1] + d, x, mask=(d < D) & (length >= 0) & (n < capacity))


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, lengths: Any, kv: Any, block_table: Any,
    cos: Any, sin: Any, kv_scale: Any, latent: int, scale: float, interleaved: bool, invariant: bool, precision: str,
) -> None:  # fmt: skip
    """Fills o and lse, and appends kv."""
    B, S, heads, D = q.shape
    gpu, capacity, rows = device.of(q), cache.shape[1], S * heads
    tiles = triton.cdiv(rows, 64)
    parts = parts_of(gpu.multiprocessors, B * tiles, capacity, invariant)
    pieces = torch.empty(parts * B * rows * (latent + 2), dtype=torch.float32, device=q.device) if parts > 1 else None
    second = early(gpu)
    facts: dict[str, Any] = {"APPENDED": kv is not None, "FIXED": invariant, "PDL": False}
    facts["AHEAD"] = AHEAD if cache.stride(1) == D else 0
    if kv is not None:
        launch(
            _append,
            (B, S),
            cache,
            kv,
            lengths,
            capacity,
            cache.stride()[:2],
            kv.stride()[:2],
            D=D,
            BD=1024,
            num_warps=4,
        )
        facts |= second
    flat = q.as_strided((B, rows, D), (q.stride(0), q.stride(2), 1))

    def sequences(t: torch.Tensor | None, columns: int) -> TensorMap | None:
        return None if t is None else TensorMap(t[None], (1, 1, 1, 64, columns), 128, ragged=True)

    maps = _latent_hopper.Maps(
        *(TensorMap(flat, (1, 64, columns), 128) for columns in (256, 64)),
        *(sequences(t, columns) for t in (cache, kv) for columns in (256, 64)),
        cache,
    )
    sizes = _latent_hopper.Sizes(heads, S, parts, capacity, scale * LOG2E, -capacity % 64, cache.stride(0))
    launch(
        _latent_hopper.attend, (tiles * parts * B,), _latent_hopper.Results(o, lse, pieces), maps, lengths, sizes,
        **facts, num_warps=4, maxnreg=168,
    )  # fmt: skip
    if pieces is not None:
        common = "", 1, False, 0, False, False, invariant, True, precision
        rules = Rules(latent, 0, False, *common, second["PDL"])
        numbers, tokens = Numbers(S, 1, heads, parts, scale * LOG2E, 0.0, -1), Tokens(lengths, None, 0, capacity)
        last: dict[str, Any] = {"APPENDED": kv is not None, "RULES": rules, "BN": 128, "BD": 512, "SOME": 16}
        last |= {"num_warps": 4} | {n: v for n, v in second.items() if n == "launch_pdl"}
        launch(combine, (B * rows,), Results(o, lse, pieces), None, tokens, numbers, **last)
