"""The gradient of attention's sinks: a sink is a key that every row of its head sees, and that has no value.

    p_sink = exp(sink - lse),  dsink = -sum over the head's rows of p_sink delta

lse holds the sink, so the other gradients need nothing more. delta and lse are there for them; this reads both again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.ops.attention.triton.softmax import load_sink, power


@triton.jit(do_not_specialize=["batch", "rows"])
def _bwd_sinks(dsinks, sinks, terms, batch, rows, APART: tl.constexpr, SIZE: tl.constexpr):
    """Sums a head's rows, first to last: a program per head. Rows that count for nothing have an infinite lse."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    sink = load_sink(sinks, head, APART)
    total = tl.zeros((SIZE,), tl.float32)
    for start in range(0, batch * rows, SIZE):
        n = start + tl.arange(0, SIZE)
        inside = n < batch * rows
        at = ((n // rows).to(tl.int64) * heads + head) * rows + n % rows
        lse = tl.load(terms.lse + at, mask=inside, other=float("inf"))
        delta = tl.load(terms.delta + at, mask=inside, other=0.0)
        total += power(sink, lse, 1.0, APART, tl.float32) * delta
    tl.store(dsinks + head, (-tl.sum(total, 0)).to(dsinks.dtype.element_ty))


def sum_sinks(dsinks: torch.Tensor | None, sinks: torch.Tensor | None, terms: Any, batch: int, apart: bool) -> None:
    """Fills dsinks, if asked for. terms: `RowTerms` (batch, heads, rows), which may have more rows than q."""
    if dsinks is None or sinks is None:
        return
    heads = sinks.shape[0]
    rows = terms.lse.numel() // max(batch * heads, 1)
    launch(_bwd_sinks, (heads,), dsinks, sinks, terms, batch, rows, APART=apart, SIZE=2048, num_warps=8)
