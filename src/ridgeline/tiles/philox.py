"""Philox4x32-10, a counter-based generator: random bits are a function of a seed and a position, whatever the grid.

One call of `philox` gives 128 bits. In `keep`, 8 neighbours of a row take 16 bits each, so p is rounded to 1/65536.
Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011 (doi:10.1145/2063384.2063405).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def threshold(p: float) -> int:
    """The threshold of `keep` for elements dropped with probability p."""
    return round(p * 65536)


@triton.jit
def philox(c0, c1, k0, k1):
    """The four words for a counter (its low 64 bits, in two halves) and a key, all unsigned 32-bit."""
    c2 = c0 * 0
    c3 = c1 * 0
    for _ in tl.static_range(10):
        x = c2.to(tl.uint64) * 0xCD9E8D57
        y = c0.to(tl.uint64) * 0xD2511F53
        c0 = (x >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = x.to(tl.uint32)
        c2 = (y >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = y.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keep(seed, row, start, threshold, BN: tl.constexpr):
    """Which columns from `start` (a multiple of 8) on are kept: booleans (BM, BN) for int32 rows (BM, 1); BN >= 8."""
    group = row * 0 + (start // 8 + tl.arange(0, BN // 8))[None, :]
    a, b, c, d = philox(
        group.to(tl.uint32), (row + group * 0).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    words = tl.join(tl.join(a, c), tl.join(b, d))  # (..., high bit of the word's number, low bit)
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits.to(tl.int32), (row.shape[0], BN)) >= threshold


def words(seed: int | torch.Tensor, c0: torch.Tensor, c1: torch.Tensor) -> torch.Tensor:
    """`philox` for int64 counters of one shape, in plain PyTorch: (..., 4)."""
    low = 0xFFFFFFFF
    seed = torch.as_tensor(seed, dtype=torch.int64, device=c0.device)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        x, y = c2 * 0xCD9E8D57, c0 * 0xD2511F53  # the low 64 bits of products; the sign is just one of them
        c0, c1, c2, c3 = (x >> 32 & low) ^ c1 ^ k0, x & low, (y >> 32 & low) ^ c3 ^ k1, y & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return torch.stack([c0, c1, c2, c3], -1)


def kept(seed: int | torch.Tensor, rows: int, columns: int, p: float, device: torch.device | str) -> torch.Tensor:
    """`keep` for all rows and columns, in plain PyTorch: booleans (rows, columns)."""
    groups = -(-columns // 8)
    column, row = torch.arange(groups, device=device), torch.arange(rows, device=device)[:, None]
    found = words(seed, column.expand(rows, groups), row.expand(rows, groups))
    bits = torch.stack([found & 0xFFFF, found >> 16], -1)
    return bits.reshape(rows, groups * 8)[:, :columns] >= threshold(p)
