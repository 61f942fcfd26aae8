"""Attention of a block of queries to a block of keys, in float32 partial results that merge to the whole.

    o, lse over one block of keys; over two:  lse = log(exp lse1 + exp lse2),  o = o1 + (o2 - o1) sigmoid(lse2 - lse1)
    backward of a block: P = exp(s - lse) with the merged lse, delta with the merged o; the blocks' gradients add up

On a GPU, and in Triton's interpreter, blocks run in `attention`'s kernels, else in PyTorch with the same roundings.
Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED
from ridgeline.op import get

FREE = 1 << 30  # left or right of a query that sees all keys on that side


class Piece(NamedTuple):
    """Rows of a rank's queries and of keys: row i of these queries sees the keys i - left to i + right of these.

    cu: where packed sequences end in these rows, which are then the same of queries and keys; None for one."""

    q: slice
    k: slice
    left: int
    right: int
    cu: tuple[int, ...] | None = None


class Given(NamedTuple):
    """The options of a call in the kernels' terms."""

    scale: float
    softcap: float  # 0 for none


@lru_cache(maxsize=4096)
def pieces(mine: tuple[int, ...], theirs: tuple[int, ...], size: int, left: int, right: int) -> tuple[Piece, ...]:
    """Returns the fewest calls for queries and keys in pieces of `size` tokens that begin at these positions.

    A query at position x sees the keys x - left to x + right."""
    both = slice(0, size * len(mine)), slice(0, size * len(theirs))
    if mine == theirs and left >= FREE and right == 0:
        return (Piece(*both, FREE, 0),)  # pieces are in order, so rows are causal as they lie
    found: dict[tuple[int, int], Piece] = {}
    for i, a in enumerate(mine):
        for j, b in enumerate(theirs):
            least, most = b - a - size + 1, b - a + size - 1  # of key positions less query positions
            if most < -left or least > right:
                continue
            bounds = FREE if least >= -left else left - (a - b), FREE if most <= right else right + (a - b)
            found[i, j] = Piece(slice(i * size, i * size + size), slice(j * size, j * size + size), *bounds)
    full = {at for at, piece in found.items() if piece.left >= FREE and piece.right >= FREE}
    if len(full) == len(mine) * len(theirs):
        return (Piece(*both, FREE, FREE),)
    merged: list[Piece] = []
    for j in range(len(theirs)):  # a piece of keys that all queries see
        if len(mine) > 1 and all([(i, j) in full for i in range(len(mine))]):
            merged.append(Piece(both[0], found[0, j].k, FREE, FREE))
            found = {at: piece for at, piece in found.items() if at[1] != j}
    for i in range(len(mine)):  # queries that see all keys
        if len(theirs) > 1 and all([(i, j) in full and (i, j) in found for j in range(len(theirs))]):
            merged.append(Piece(found[i, 0].q, both[1], FREE, FREE))
            found = {at: piece for at, piece in found.items() if at[0] != i}
    return (*merged, *found.values())


def by_kernels(q: torch.Tensor) -> bool:
    """Returns whether kernels run a block, as `attention` itself decides."""
    there = q.is_cuda or INTERPRETED or devices.stand_in is not None
    return there and q.dtype in get("attention").kernel_dtypes


def block_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, given: Given
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and lse of one block, in float32 (or float64): 0 and -inf for a row that sees no key."""
    if by_kernels(q):
        options = _ends(piece, q), *given, piece.left, piece.right, _precision()
        return torch.ops.ridgeline.attention_partial_fwd(q, k, v, *options)
    s, _ = _scores(q, k, piece, given)
    top = s.amax(-1, keepdim=True)
    p = (s - top.masked_fill(top == -torch.inf, 0)).exp()
    total = p.sum(-1, keepdim=True)
    o = p.to(q.dtype).to(p.dtype) @ _wide(v)[:, :, None] / total.masked_fill(total == 0, 1)
    return o.flatten(1, 2), (top + total.log())[..., 0].flatten(1, 2)


def block_backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, piece: Piece, given: Given,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns a block's part of dq, dk and dv, in float32 (or float64). o, lse: merged over all blocks of keys."""
    if by_kernels(q):
        options = _ends(piece, q), *given, piece.left, piece.right, _precision()
        dlse = None if dlse is None else dlse.contiguous()
        return torch.ops.ridgeline.attention_partial_bwd(do, dlse, q, k, v, o, lse.contiguous(), *options)
    groups = k.shape[1], q.shape[1] // k.shape[1]
    s, slope = _scores(q, k, piece, given)
    lse = lse.unflatten(1, groups)[..., None]
    slopes, queries = _wide(do).unflatten(1, groups), _wide(q).unflatten(1, groups)
    p = (s - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    delta = (_wide(o).unflatten(1, groups) * slopes).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.unflatten(1, groups)[..., None]
    ds = (p * (slopes @ _wide(v)[:, :, None].mT - delta) * slope).to(q.dtype).to(p.dtype)
    dq = given.scale * (ds @ _wide(k)[:, :, None])
    dk = given.scale * (ds.mT @ queries).sum(2)
    dv = (p.to(q.dtype).to(p.dtype).mT @ slopes).sum(2)
    return dq.flatten(1, 2), dk, dv


def merge(o: torch.Tensor, lse: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> None:
    """Adds a block's o2 and lse2 to o and lse, in place."""
    weight = torch.sigmoid(lse2 - lse).nan_to_num_(0.0)  # both -inf: a row that has seen no key
    o.lerp_(o2.to(o.dtype), weight[..., None])
    torch.logaddexp(lse, lse2, out=lse)


def add_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Adds a logit of each head to its rows' sums, as a key without a value would, in place."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    o.mul_((lse - whole).exp_().nan_to_num_(0.0)[..., None])  # both -inf: a row that has seen no key
    lse.copy_(whole)


def sinks_backward(
    do: torch.Tensor, dlse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the sinks, from these rows alone. o, lse: merged, with the sinks."""
    delta = (_wide(do) * _wide(o)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = (sinks.to(lse.dtype)[:, None] - lse).exp().masked_fill(lse == -torch.inf, 0)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _ends(piece: Piece, q: torch.Tensor) -> torch.Tensor | None:
    if piece.cu is None:
        return None
    get("attention_varlen")  # loads its kernels
    return torch.tensor(piece.cu, dtype=torch.int32, device=q.device)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _scores(q: torch.Tensor, k: torch.Tensor, piece: Piece, given: Given) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns scores (batch, heads of k, heads that share one, rows, columns), and the softcap's slope."""
    s = _wide(q).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])) @ _wide(k)[:, :, None].mT * given.scale
    slope: torch.Tensor | float = 1.0
    if given.softcap:
        bent = torch.tanh(s / given.softcap)
        s, slope = bent * given.softcap, 1 - bent * bent
    if min(piece.left, piece.right) < FREE:
        apart = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
        s = s.masked_fill((apart < -piece.left) | (apart > piece.right), -torch.inf)
    cu = _ends(piece, q)
    if cu is not None:
        which = torch.searchsorted(cu, torch.arange(q.shape[2], dtype=torch.int32, device=q.device), right=True)
        s = s.masked_fill(which != which[:, None], -torch.inf)
    return s, slope


def _precision() -> str:
    """Returns the precision of float32 products, by PyTorch's setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
