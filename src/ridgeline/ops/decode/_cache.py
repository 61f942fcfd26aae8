"""Key and value caches in plain PyTorch: contiguous or in blocks, in full precision or quantised.

A cache is (B, S_max, heads, D), or with a block table (blocks, block, heads, D), where entry n of a sequence's row in
the table holds its tokens from n block on. An int4 cache is uint8 (..., D / 2): two numbers share a byte, and the even
column is the low half. A number is (stored - zero) * scale; without zeros, int4 has a zero of 8 and the rest of 0.
Scales and zeros are float32 per tensor (), head (heads,), or token and head (the cache's first three sizes).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Maybe = torch.Tensor | None
LEVELS = {"int8": (-128, 127), "int4": (0, 15), "float8": (-448, 448)}


def kind_of(cache: torch.Tensor) -> str:
    """ "int8", "int4", "float8", or "" for a cache in full precision."""
    return {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "float8"}.get(cache.dtype, "")


class Half(NamedTuple):
    """One of the two caches, with what its numbers mean."""

    data: torch.Tensor
    scale: Maybe
    zero: Maybe

    def facts(self, at: tuple[torch.Tensor, torch.Tensor]) -> tuple[Maybe, Maybe]:
        """Scale and zero of the tokens at (row, place), shaped to broadcast over (..., heads, D)."""

        def spread(t: Maybe) -> Maybe:
            return t if t is None or not t.dim() else (t[at] if t.dim() == 3 else t).unsqueeze(-1)

        return spread(self.scale), spread(self.zero)

    def read(self, at: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The numbers of the tokens at (row, place), (..., heads, D), in a floating dtype."""
        kind, stored = kind_of(self.data), self.data[at]
        if not kind and self.scale is None:  # codes in float64, as the oracle gets those of fp8, have a scale too
            return stored.to(dtype)
        if kind == "int4":
            stored = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
        scale, zero = self.facts(at)
        wide = torch.promote_types(dtype, torch.float32)
        value = stored.to(wide)
        if zero is not None or kind == "int4":
            value = value - (8.0 if zero is None else zero)
        return value if scale is None else value * scale

    def write(self, at: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """Writes tokens (n, heads, D), quantised, and returns what `read` would give. Scales per token are made here:
        the largest number of a token and head, or its range where there are zeros, fills the levels."""
        kind = kind_of(self.data)
        if not kind:
            self.data[at] = values.to(self.data.dtype)
            return self.data[at].to(values.dtype)
        low, high = LEVELS[kind]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self.scale is not None and self.scale.dim() == 3:
            if self.zero is not None:
                least, most = values.amin(-1), values.amax(-1)
                scale = ((most - least) / (high - low)).clamp(min=1e-12)
                self.zero[at] = (low - (least / scale).round()).to(self.zero.dtype)
            else:
                scale = values.abs().amax(-1).clamp(min=1e-12) / (7 if kind == "int4" else high)
            self.scale[at] = scale.to(self.scale.dtype)
        scale, zero = self.facts(at)
        stored = values if scale is None else values / scale
        if zero is not None or kind == "int4":
            stored = stored + (8.0 if zero is None else zero)
        stored = (stored if kind == "float8" else stored.round()).clamp(low, high)
        if kind == "int4":
            nibbles = stored.to(torch.uint8).unflatten(-1, (-1, 2))
            self.data[at] = nibbles[..., 0] | nibbles[..., 1] << 4
        else:
            self.data[at] = stored.to(self.data.dtype)
        return self.read(at, values.dtype)


def places(tokens: torch.Tensor, table: Maybe, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, place) in the cache of each sequence's tokens (B, n), which must be inside it."""
    if table is None:
        return torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(tokens), tokens
    block = cache.shape[1]
    return table.gather(1, (tokens // block).long()).long(), tokens % block


def capacity(cache: torch.Tensor, table: Maybe) -> int:
    """The most tokens of a sequence."""
    return cache.shape[1] * (1 if table is None else table.shape[1])
