"""Sequences split over the ranks of a group: which tokens a rank holds, and how tensors get there and back.

    plain    rank r of N holds the r-th of N equal pieces
    zigzag   rank r holds the pieces r and 2N - 1 - r of 2N, so that causal attention costs each rank the same

Positions (for rope) and labels (for the loss) go with the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, packing

LAYOUTS = "zigzag", "plain"


def layout_fault(layout: Any) -> str | None:
    """Returns what is wrong with a layout's name, or None."""
    return None if layout in LAYOUTS else f'layout must be "zigzag" or "plain", got {layout!r}'


@lru_cache(maxsize=1024)
def starts(rank: int, world: int, length: int, layout: str) -> tuple[tuple[int, ...], int]:
    """Returns where a rank's pieces begin in the whole sequence, and their length. length: of the rank's tokens."""
    if layout == "plain":
        return (rank * length,), length
    return (rank * (length // 2), (2 * world - 1 - rank) * (length // 2)), length // 2


def positions(
    length: int, *, group: Any = None, cu_seqlens: Any = None, layout: str = "zigzag",
    device: torch.device | str | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns the places of this rank's tokens in the sequence, (length / ranks,), int64, as rope takes them.

    length: of the whole sequence. cu_seqlens: of packed ones, as `context.ring_attention` takes it; places then count
    in each. Raises RidgelineError if the length does not divide, or cu_seqlens does not end there."""
    own = _own_length("positions", length, group, layout)
    begins, size = starts(groups.rank(group), groups.size(group), own, layout)
    if cu_seqlens is not None:
        whole = packing.places(_ends("positions", cu_seqlens, length)).to(device)
        return torch.cat([whole[b : b + size] for b in begins])
    return torch.cat([torch.arange(b, b + size, device=device) for b in begins])


def _ends(name: str, cu_seqlens: Any, length: int) -> packing.Ends:
    ends = packing.read(cu_seqlens)
    wrong = packing.fault(cu_seqlens, ends, length)
    if wrong or ends is None:
        raise RidgelineError(f"{name}: {wrong}")
    return ends


def shard(x: torch.Tensor, *, group: Any = None, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Returns this rank's part of a tensor that every rank holds whole; gradients flow to that part.

    dim: of the tokens, whose number is a multiple of the ranks, or with zigzag of twice that.
    Raises RidgelineError if it is not."""
    own = _own_length("shard", x.shape[dim], group, layout)
    begins, size = starts(groups.rank(group), groups.size(group), own, layout)
    return torch.cat([x.narrow(dim, b, size) for b in begins], dim)


def unshard(x: torch.Tensor, *, group: Any = None, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Returns the whole tensor on every rank, in one all-gather; backward sums the ranks' gradients of a part."""
    wrong = layout_fault(layout)
    if wrong:
        raise RidgelineError(f"unshard: {wrong}")
    return in_order(Gather.apply(x, group), x.shape[dim], dim, layout)


def in_order(gathered: torch.Tensor, length: int, dim: int, layout: str) -> torch.Tensor:
    """Returns (ranks, *x.shape) as one tensor whose dim `dim` has all tokens in the sequence's order."""
    world = gathered.shape[0]
    dim %= gathered.dim() - 1
    parts: dict[int, torch.Tensor] = {}
    for rank in range(world):
        begins, size = starts(rank, world, length, layout)
        for n, begin in enumerate(begins):
            parts[begin] = gathered[rank].narrow(dim, n * size, size)
    return torch.cat([parts[b] for b in sorted(parts)], dim)


def next_labels(
    tokens: torch.Tensor, *, group: Any = None, cu_seqlens: Any = None, dim: int = 1, layout: str = "zigzag",
    ignore_index: int = -100
) -> torch.Tensor:  # fmt: skip
    """Returns the next token of each of this rank's tokens: labels for a loss that does not shift them again.

    tokens: the whole sequences; cu_seqlens: of packed ones. A sequence's last token has the label `ignore_index`."""
    length = tokens.shape[dim]
    last = torch.full_like(tokens.narrow(dim, 0, 1), ignore_index)
    labels = torch.cat([tokens.narrow(dim, 1, length - 1), last], dim)
    if cu_seqlens is not None:
        ends = sorted({end - 1 for end in _ends("next_labels", cu_seqlens, length)} - {-1})
        labels.index_fill_(dim, torch.tensor(ends, device=labels.device), ignore_index)
    return shard(labels, group=group, dim=dim, layout=layout)


class Gather(torch.autograd.Function):
    """All ranks' tensors of one shape, (ranks, *shape). Backward: a rank gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, world = group, groups.size(group)
        if world == 1:
            return x[None].clone()
        out = x.new_empty((world * x.numel(),))
        groups.all_gather(out, x.contiguous().view(-1), group=group)
        return out.view(world, *x.shape)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        if groups.size(ctx.group) == 1:
            return d[0], None
        out = d.new_empty((d[0].numel(),))
        groups.reduce_scatter(out, d.contiguous().view(-1), group=ctx.group)
        return out.view(d.shape[1:]), None


class AllToAll(torch.autograd.Function):
    """Sends x[n] to rank n: result n is rank n's piece for this rank. Backward sends gradients the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        return _exchanged(d, ctx.group), None


def _exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    if groups.size(group) == 1:
        return x.clone()
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out.view(-1), x.view(-1), group=group)
    return out


def _own_length(name: str, length: int, group: Any, layout: str) -> int:
    """Returns the tokens of a rank, of `length` in all. Raises RidgelineError if they cannot be split so."""
    wrong, world = layout_fault(layout), groups.size(group)
    pieces = world * (2 if layout == "zigzag" else 1)
    if not wrong and (length < 1 or length % pieces):
        twice = "twice the number of ranks" if layout == "zigzag" else "the number of ranks"
        wrong = f"layout {layout!r} needs a multiple of {twice}, {pieces}, of tokens, got {length}"
    if wrong:
        raise RidgelineError(f"{name}: {wrong}")
    return length // world
