"""Tensor parallelism on plain tensors and a group: linear layers by columns and rows, embeddings by vocabulary.

    column   y_r = x W_r^T, a rank's own outputs         backward: dx summed over the ranks
    row      y = sum_r x_r W_r^T, a rank's own inputs    backward: dx_r from the whole dy
    with tokens split between the blocks (sequence parallelism): x is gathered before, and y summed and scattered after

`all_gather_linear` and `linear_reduce_scatter` do these transfers a rank's tokens at a time, each under a product:
around a ring by torch.distributed, or by copies out of the other GPUs' memory.
Sources: Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053); Korthikanti et al., Reducing Activation Recomputation,
2022 (arXiv:2205.05198); Wang et al., Overlap Communication with Dependent Computation via Decomposition, 2023 (ASPLOS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ridgeline
from ridgeline.boundary import first_order
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, pulls, symmetric
from ridgeline.parallel.agreement import agree
from ridgeline.parallel.ring import pass_on

OVER = ("engine", "symmetric")  # transfers of torch.distributed, or reads of the other GPUs' memory


def shared(x: torch.Tensor, group: Any = None, *, over: str = "engine") -> torch.Tensor:
    """Returns x, the same on every rank; backward sums the ranks' gradients. over: as for `summed`."""
    _check_over("shared", over)
    return x if groups.size(group) == 1 else _Shared.apply(x, group, over)


def summed(x: torch.Tensor, group: Any = None, *, over: str = "engine") -> torch.Tensor:
    """Returns the sum of the ranks' x; backward passes the gradient, the same on every rank, on.

    over: "engine" sums by torch.distributed; "symmetric" by `symmetric.all_reduce`, which is for few bytes."""
    _check_over("summed", over)
    return x if groups.size(group) == 1 else _Summed.apply(x, group, over)


def gathered(x: torch.Tensor, group: Any = None, dim: int = 1, *, alike: bool = False) -> torch.Tensor:
    """Returns all ranks' pieces of a dimension, rank after rank.

    Backward sums the gradients of each piece and gives it to its rank. alike: what follows is the same on every rank,
    so each takes its own piece of the gradient instead."""
    return x if groups.size(group) == 1 else _Gathered.apply(x, group, dim % x.dim(), alike)


def scattered(x: torch.Tensor, group: Any = None, dim: int = 1) -> torch.Tensor:
    """Returns this rank's piece of the sum of the ranks' x; backward gathers the gradient."""
    return x if groups.size(group) == 1 else _Scattered.apply(x, group, dim % x.dim())


def piece(x: torch.Tensor, group: Any = None, dim: int = 1) -> torch.Tensor:
    """Returns this rank's piece of x, the same on every rank; backward gathers the gradient."""
    return x if groups.size(group) == 1 else _Piece.apply(x, group, dim % x.dim())


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, over: str) -> torch.Tensor:
        ctx.way = group, over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        return _sum(d, *ctx.way), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, over: str) -> torch.Tensor:
        return _sum(x, group, over)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        return d, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int, alike: bool) -> torch.Tensor:
        ctx.facts = group, dim, alike
        return _gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        group, dim, alike = ctx.facts
        return _own(d, group, dim) if alike else _scatter(d, group, dim), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.facts = group, dim
        return _scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        return _gather(d, *ctx.facts), None, None


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.facts = group, dim
        return _own(x, group, dim).clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        return _gather(d, *ctx.facts), None, None


def _sum(x: torch.Tensor, group: Any, over: str) -> torch.Tensor:
    if over == "symmetric":
        return symmetric.all_reduce(x, group)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    world = groups.size(group)
    out = x.new_empty((world, *x.shape))
    groups.all_gather(out.view(-1), x.contiguous().view(-1), group=group)
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _scatter(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    world = groups.size(group)
    parts = x.unflatten(dim, (world, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    groups.reduce_scatter(out.view(-1), parts.view(-1), group=group)
    return out


def _own(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    return x.chunk(groups.size(group), dim)[groups.rank(group)]


# --- a product under each transfer


def all_gather_linear(
    x: torch.Tensor, weight: torch.Tensor | Sequence[torch.Tensor], *, group: Any = None, over: str = "engine"
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Returns X W^T for the tokens X of all ranks, gathered a rank at a time while the piece before is multiplied.

    x: (..., tokens / ranks, H), this rank's tokens, equally many on each. weight: (N, H), this rank's rows, or several
    such, which share the gather. Returns (..., tokens, N) for each, tokens rank after rank. Gradients flow to x, which
    are summed and scattered a rank at a time, and to the weights. over: "engine" passes tokens from rank to rank by
    torch.distributed; "symmetric" copies them out of the ranks' memory, on GPUs of one host.
    Raises RidgelineError, on every rank, if the shapes do not match, or if the ranks have no symmetric memory.
    """
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    wrong = None
    if x.dim() < 2 or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        wrong = f"x must be (..., tokens, H) and each weight (N, H), got {tuple(x.shape)} and {shapes}"
    wrong = wrong or _unknown(over)
    agree("all_gather_linear", group, x, wrong, shape_of_x=tuple(x.shape), dtype=str(x.dtype), over=over)
    found = _GatherLinear.apply(x, group, over, *weights)
    return found[0] if isinstance(weight, torch.Tensor) else found


def linear_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, *, group: Any = None, over: str = "engine"
) -> torch.Tensor:
    """Returns this rank's tokens of the sum of the ranks' x W^T, summed on the way while the next piece is multiplied.

    x: (..., tokens, K), this rank's inputs of all tokens, a multiple of the ranks. weight: (N, K), this rank's columns.
    Returns (..., tokens / ranks, N). Partial sums travel in x's dtype, as in torch's reduce-scatter. Gradients flow to
    x and weight. over: as for `all_gather_linear`; "symmetric" rounds each term to x's dtype, and the sum once.
    Raises RidgelineError, on every rank, if the shapes do not match, or if the ranks have no symmetric memory.
    """
    wrong, world = None, groups.size(group)
    if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        wrong = f"x must be (..., tokens, K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
    elif x.shape[-2] % world:
        wrong = f"x must have a multiple of {world} tokens, one part for each rank, got {x.shape[-2]}"
    wrong = wrong or _unknown(over)
    alike = {"shape of x": tuple(x.shape[:-1]), "outputs": weight.shape[0], "dtype": str(x.dtype), "over": over}
    agree("linear_reduce_scatter", group, x, wrong, **alike)
    return _LinearScatter.apply(x, weight, group, over)


def _unknown(over: str) -> str | None:
    return None if over in OVER else f"over must be 'engine' or 'symmetric', but is {over!r}"


def _check_over(what: str, over: str) -> None:
    if wrong := _unknown(over):
        raise RidgelineError(f"{what}: {wrong}")


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, over: str, *weights: torch.Tensor) -> Any:
        ctx.save_for_backward(x, *weights)
        ctx.way = group, over
        return tuple(_gather_product(x, weights, group, over))

    @staticmethod
    @first_order
    def backward(ctx: Any, *ds: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        dx: torch.Tensor | None = None
        dws: list[torch.Tensor | None] = [None] * len(weights)
        whole, work = _start_gather(x, *ctx.way) if any(ctx.needs_input_grad[3:]) else (x, None)  # under dx's products
        if ctx.needs_input_grad[0]:
            dx = _product_scatter(torch.cat(ds, -1), torch.cat(weights).mT, *ctx.way)
        if work is not None:
            work.wait()
            dws = [_weight_gradient(d, _joined(whole)) for d in ds]
        return dx, None, None, *dws


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Any, over: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = group, over
        return _product_scatter(x, weight, group, over)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> Any:
        (x, weight), (group, over) = ctx.saved_tensors, ctx.way
        whole, work = _start_gather(d, group, over) if ctx.needs_input_grad[1] else (d, None)
        pieces = work if isinstance(work, pulls.Pieces) else None
        dx = _gather_product(d, [weight.mT], group, over, pieces)[0] if ctx.needs_input_grad[0] else None
        dw = None
        if work is not None:
            work.wait()
            dw = _weight_gradient(_joined(whole), x)
        return dx, dw, None, None


class _Done:
    """Stands for a transfer that a single rank does not need."""

    def wait(self) -> None:
        pass


def _start_gather(x: torch.Tensor, group: Any, over: str) -> tuple[torch.Tensor, Any]:
    """Starts an all-gather; its result is (ranks, *x.shape)."""
    world = groups.size(group)
    if world == 1:
        return x[None], _Done()
    if over == "symmetric":
        pieces = pulls.gather(x, group)
        return pieces.whole, pieces
    out = x.new_empty((world, *x.shape))
    return out, groups.all_gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True)


def _joined(whole: torch.Tensor) -> torch.Tensor:
    """Returns (ranks, ..., tokens, H) as (..., ranks * tokens, H)."""
    return whole.movedim(0, -3).flatten(-3, -2)


def _weight_gradient(d: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return d.reshape(-1, d.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def _multiply(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Writes x W^T into a tensor, without a copy where its rows lie together."""
    if out.is_contiguous() and out.dtype == x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type):
        torch.mm(x.reshape(-1, x.shape[-1]), weight.mT, out=out.view(-1, out.shape[-1]))
    else:
        out.copy_(x @ weight.mT)


def _gather_product(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: Any, over: str, pieces: pulls.Pieces | None = None
) -> list[torch.Tensor]:
    """Returns X W^T for the tokens of all ranks; each rank's tokens travel while those before are multiplied.

    pieces: of a gather that has begun."""
    world, rank, tokens = groups.size(group), groups.rank(group), x.shape[-2]
    outs = [x.new_empty((*x.shape[:-2], world * tokens, w.shape[0])) for w in weights]
    if over == "symmetric" and world > 1 and pieces is None:
        pieces = pulls.gather(x, group)
    for hop in range(world):
        arriving = pass_on(x, group) if pieces is None and hop < world - 1 else None
        source = (rank - hop if pieces is None else rank + hop) % world
        if pieces is not None:
            x = pieces.piece(source)
        for out, w in zip(outs, weights, strict=True):
            _multiply(out.narrow(-2, source * tokens, tokens), x, w)
        if arriving is not None:
            x = arriving.wait()
    return outs


def _product_scatter(x: torch.Tensor, weight: torch.Tensor, group: Any, over: str) -> torch.Tensor:
    """Returns this rank's tokens of the sum of all x W^T; a sum travels while the next piece is multiplied."""
    world, rank = groups.size(group), groups.rank(group)
    tokens, arriving = x.shape[-2] // world, None
    if over == "symmetric" and world > 1:
        shape = *x.shape[:-2], tokens, weight.shape[0]
        return pulls.scatter(
            lambda target, term: _multiply(term, x.narrow(-2, target * tokens, tokens), weight), shape, x, group
        )
    total = x
    for hop in range(world):
        target = (rank - 1 - hop) % world  # the sum for a rank begins at the one after it, and ends there
        total = x.narrow(-2, target * tokens, tokens) @ weight.mT
        if arriving is not None:
            total += arriving.wait()
        arriving = pass_on(total, group) if hop < world - 1 else None
    return total


# --- layers


class Column(nn.Module):
    """A linear layer of which each rank has a part of the outputs, made from the whole layer.

    forward: x, the same on every rank, or with sequence this rank's tokens (..., tokens / ranks, in). Returns this
    rank's outputs of all tokens; with gather, all outputs. over: as for `all_gather_linear`."""

    def __init__(
        self, whole: nn.Linear, group: Any = None, *, sequence: bool = False, gather: bool = False, over: str = "engine"
    ) -> None:
        super().__init__()
        _check_divides("Column", "outputs", whole.out_features, group)
        _check_over("Column", over)
        self.group, self.sequence, self.gather, self.over = group, sequence, gather, over
        self.weight = nn.Parameter(_own(whole.weight.detach(), group, 0).clone())
        self.bias = None if whole.bias is None else nn.Parameter(_own(whole.bias.detach(), group, 0).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            y: Any = all_gather_linear(x, self.weight, group=self.group, over=self.over)
            y = y if self.bias is None else y + self.bias
        else:
            y = ridgeline.linear(shared(x, self.group, over=self.over), self.weight, self.bias)
        return gathered(y, self.group, -1, alike=True) if self.gather else y


class Row(nn.Module):
    """A linear layer of which each rank has a part of the inputs, made from the whole layer.

    forward: x, this rank's inputs of all tokens. Returns all outputs, on every rank, or with sequence of this rank's
    tokens. The bias is whole on every rank; with sequence its gradient is summed over them. over: as for
    `linear_reduce_scatter`."""

    def __init__(self, whole: nn.Linear, group: Any = None, *, sequence: bool = False, over: str = "engine") -> None:
        super().__init__()
        _check_divides("Row", "inputs", whole.in_features, group)
        _check_over("Row", over)
        self.group, self.sequence, self.over = group, sequence, over
        self.weight = nn.Parameter(_own(whole.weight.detach(), group, 1).clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            y = linear_reduce_scatter(x, self.weight, group=self.group, over=self.over)
            return y if self.bias is None else y + shared(self.bias, self.group)
        y = summed(ridgeline.linear(x, self.weight), self.group, over=self.over)
        return y if self.bias is None else y + self.bias


class Vocab(nn.Module):
    """An embedding of which each rank has a part of the vocabulary, made from the whole one.

    forward: token numbers, the same on every rank. Returns their rows on every rank, or with sequence those of this
    rank's tokens (the last dimension of the numbers). `weight` is what `loss.linear_cross_entropy` takes."""

    def __init__(self, whole: nn.Embedding, group: Any = None, *, sequence: bool = False) -> None:
        super().__init__()
        _check_divides("Vocab", "rows", whole.num_embeddings, group)
        self.group, self.sequence = group, sequence
        self.weight = nn.Parameter(_own(whole.weight.detach(), group, 0).clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = looked_up(tokens, self.weight, self.group)
        return scattered(own, self.group, -2) if self.sequence else summed(own, self.group)


def looked_up(tokens: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows of the tokens that this rank's part of an embedding has, and 0 for the others."""
    at = tokens - groups.rank(group) * weight.shape[0]
    here = (at >= 0) & (at < weight.shape[0])
    return nn.functional.embedding(at.where(here, 0), weight) * here[..., None]


def _check_divides(what: str, which: str, size: int, group: Any) -> None:
    world = groups.size(group)
    if size % world:
        raise RidgelineError(f"{what}: the {world} ranks of the group must divide its {size} {which}")
