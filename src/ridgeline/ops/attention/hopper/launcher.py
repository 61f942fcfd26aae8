"""Starts of the forward kernel for Hopper: which calls it takes, its rules, and its tensor maps."""

from typing import Any

import torch
import triton

from ridgeline import device
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention.common.arguments import UNBOUNDED, column_parts, exponents, whole
from ridgeline.ops.attention.hopper import forward
from ridgeline.ops.attention.hopper.packed_tiles import list_tiles
from ridgeline.ops.attention.hopper.scheduler import Rules, Scale, Sizes, consumer_groups, masked_blocks, paired_heads

MOST_CAP = 1000  # beyond it the rounding of tanh, times the cap, shows in half precision


def refusal(
    x: torch.Tensor, *rest: Any, mask: Any = None, softcap: Any = None, scale: Any = None, prefix: Any = None, **_: Any
) -> str | None:
    """Returns why these kernels do not take a call, or None.

    Takes public arguments or a launcher's inputs; backward's begin with do and dlse.
    """
    q, *rest = rest[1:] if len(rest) > 16 else (x, *rest)
    k, v, *rest = rest[:2] + rest[4:] if len(rest) > 15 else rest
    cu = None
    if len(rest) > 8:  # else public arguments
        mask, cu, _cu_k, _sinks, scale, softcap, _left, _right, _bottom, prefix, *_rest = rest
    if mask is not None or (scale is not None and scale <= 0):
        return "it takes no mask, and only a scale above 0"
    if softcap and softcap > MOST_CAP:
        return f"its tanh is exact to 3e-7, so it takes a softcap of at most {MOST_CAP}"
    if prefix and (q.dim() == 3 or cu is not None):
        return "it takes no prefix of packed sequences"
    if 128 < q.shape[-1] <= 192:  # padded to 256, slower than `triton`'s two parts
        return f"D must be at most 128 or above 192, got {q.shape[-1]}"
    if not (q.numel() and k.numel()):
        return f"no size may be 0, but q is {tuple(q.shape)} and k {tuple(k.shape)}"
    for t in (q, k, v):
        if not whole(t):
            return (
                "it copies 16 bytes at a time: q, k, v and their rows must begin at multiples of 16 bytes, not expanded"
            )
    return None


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, sinks: torch.Tensor | None, scale: float, softcap: float,
    left: int, right: int, bottom: bool, prefix: int, max_q: int, max_k: int, precision: str
) -> None:  # fmt: skip
    """Fills o and lse; see `attention_fwd` in common/kernels.py. A float32 o must be contiguous.

    For packed sequences max_q, or else their average length, decides the height of tiles.
    """
    (batch, heads, rows, D), columns = q.shape, k.shape[2]
    ahead, back, packed = right < UNBOUNDED, left < UNBOUNDED, cu_q is not None
    longest = rows if cu_q is None else min(rows, max_q or rows // max(1, cu_q.numel() - 1))
    programs = device.of(q).multiprocessors
    groups = consumer_groups(D, batch * heads, longest, left, right, packed, programs)
    all_heads, tiles, high = batch * heads, triton.cdiv(rows, 64 * groups), 64 * groups
    listed, group, wide, pairs = None, heads // k.shape[1], triton.next_power_of_2(D), 0
    BN = 64 if D > 128 or (D > 64 and groups == 3) else 128
    # Turns help up to 2048 queries, except for causal calls at D 64, and cost time in long causal calls.
    by_turns = groups == 2 and D > 64 and not (ahead and not back and longest > 8192)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 128 if groups == 3 else 168}
    if cu_q is not None:
        listed, most = list_tiles(q, k, cu_q, cu_q if cu_k is None else cu_k, bottom, left, right, high, BN)
        section = min(heads, 32 * group) if ahead and not back else group
        shift, count = int(bottom), most * heads
        options["launch_pdl"] = True
    else:
        shared = 4 * columns * D * k.shape[1] // heads  # bytes of keys and values per head of queries
        shift = columns - rows if bottom else 0
        if ahead and not (back or prefix) and 0 <= shift + right <= columns - rows + high:  # else pairs are uneven
            most = min((32 << 20) // max(1, shared), triton.cdiv(4 * programs, tiles))
            pairs = paired_heads(all_heads, tiles, programs, most, min((shift + right) // high, 8 * tiles))
        section = max(1, min(all_heads, (24 << 20) // max(1, shared)) if back else all_heads - 2 * pairs)
        count = all_heads * tiles
    rest, stages = column_parts(D)[1] if 64 < D <= 128 else 0, 4 if wide * BN <= 8192 else 2
    masks = masked_blocks(high, BN, columns, shift, right, back, ahead, bottom, packed, prefix)
    single = o.dtype != q.dtype
    rules = Rules(groups, by_turns, stages, back, ahead, BN, rest, masks, prefix > 0, D if single else 0, softcap > 0)
    edges = prefix or left, right
    sizes = Sizes(all_heads, heads, group, pairs, section, tiles, rows, columns, shift, *edges)
    box = (1, 1, 1) if packed else (1, 1)
    tiled = (q, 64), (k, BN), (v, BN), *(() if single else ((o, 64),))
    maps: list[Any] = [TensorMap(t, (*box, n, wide), min(128, 2 * wide), packed) for t, n in tiled]
    maps += [o] if single else []
    scales = Scale(*exponents(scale, softcap))
    forward.start(min(count, programs), lse, sinks, listed, maps, sizes, scales, rules, options)
