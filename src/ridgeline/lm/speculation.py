"""Speculative decoding's exact rule: what a draft proposes is accepted so that the result is the target's own draw.

    q, p: the final distributions of draft and target after each token; x drawn from q
    x stays with probability min(1, p(x) / q(x)); the first that does not is drawn again from max(p - q, 0), normalised
    if all stay, one more is drawn from p

Greedy decoding is the case in which both distributions have all their mass in one token.
Source: Leviathan, Kalman and Matias, Fast inference from Transformers via speculative decoding, 2022
(arXiv:2211.17192); Chen et al., Accelerating large language model decoding with speculative sampling, 2023
(arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import ridgeline


class Sampling(NamedTuple):
    """How tokens are drawn, as in `ridgeline.sample`. A temperature of 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def distribution(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Returns the probabilities (..., V), float32, from which `ridgeline.sample` draws for these logits (..., V)."""
    x = logits.float()
    if how.temperature < 1e-37:
        best = ridgeline.sample(x.reshape(-1, x.shape[-1]), temperature=0.0)
        best = best.view(*x.shape[:-1], 1)  # type: ignore[union-attr]
        return torch.zeros_like(x).scatter_(-1, best.clamp(min=0), torch.where(best < 0, torch.nan, 1.0))
    p = (x / how.temperature).softmax(-1)
    if how.top_k is None and how.top_p is None and how.min_p is None:
        return p
    p, order = p.sort(dim=-1, descending=True, stable=True)
    if how.top_k is not None:
        p[..., how.top_k :] = 0
    if how.top_p is not None:
        before = p.cumsum(-1) - p
        p = p.where((before < how.top_p * p.sum(-1, keepdim=True)) | (before == 0), 0)
    if how.min_p is not None:
        p = p.where(p >= how.min_p * p[..., :1], 0)
    p = torch.zeros_like(p).scatter_(-1, order, p)
    return p / p.sum(-1, keepdim=True)


def accept(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, u: torch.Tensor,
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns tokens (B, n + 1) and how many of them count (B,): those accepted, and one more.

    p: the target's distributions (B, n + 1, V). q: the draft's (B, n, V), from which drafted (B, n) are drawn.
    u: (B, n), uniform in [0, 1). draw: takes logits (B, V) and returns a token for each row (B,)."""
    n = drafted.shape[1]
    mine, theirs = (t.gather(2, drafted[..., None])[..., 0] for t in (p[:, :n], q))
    stays = (u * theirs < mine).long().cumprod(1).sum(1)
    left = torch.cat(((p[:, :n] - q).clamp(min=0), p[:, n:]), 1)
    at = stays[:, None, None].expand(-1, 1, p.shape[2])
    rest, whole = left.gather(1, at)[:, 0], p.gather(1, at)[:, 0]
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, whole)  # nothing is left where rounding alone rejected
    tokens = torch.cat((drafted, drafted.new_zeros(len(drafted), 1)), 1)
    return tokens.scatter(1, stays[:, None], draw(rest.log())[:, None]), stays + 1
