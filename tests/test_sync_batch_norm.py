"""SyncBatchNorm against batch normalisation of the whole batch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups
from ridgeline.parallel.norm import SyncBatchNorm

BATCHES = 3, 0, 1, 4  # a rank without rows


def begun(norm: Any) -> None:
    """Gives weight and bias values: threads share torch's generator."""
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 5))
        norm.bias.copy_(torch.linspace(2, -3, 5))


def split(rank: int, x: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    parts = [t.split(BATCHES)[groups.rank()] for t in (x, dy)]
    norm = SyncBatchNorm(5, momentum=0.3).to(dtype)
    begun(norm)
    own = parts[0].clone().requires_grad_()
    y = norm(own)
    y.backward(parts[1])
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    return [y.detach(), own.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 3, 2)], ids=str)
def test_equals_one_process(shape: tuple[int, ...]) -> None:
    x, dy = 1000 + torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = kind(5, momentum=0.3).double()
    begun(norm)
    own = x.clone().requires_grad_()
    y = norm(own)
    y.backward(dy)
    wanted = [y.detach(), own.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
    found = run_ranks(4, split, x, dy, torch.float64)
    for n in (0, 1):
        torch.testing.assert_close(torch.cat([f[n] for f in found]), wanted[n], rtol=1e-9, atol=1e-9)
    for n in (2, 3):  # parameters' gradients are each rank's own, as torch's
        torch.testing.assert_close(sum(f[n] for f in found), wanted[n], rtol=1e-9, atol=1e-9)
    for n in (4, 5):
        for f in found:
            torch.testing.assert_close(f[n], wanted[n], rtol=1e-9, atol=1e-9)
    # In float32 a mean far from 0 costs no digits of the variance.
    near = run_ranks(4, split, x.float(), dy.float(), torch.float32)
    torch.testing.assert_close(near[0][5].double(), wanted[5], rtol=1e-3, atol=1e-3)


def test_on_gloo() -> None:
    x, dy = torch.randn(8, 5), torch.randn(8, 5)
    wanted = run_ranks(4, split, x, dy, torch.float32)
    torch.testing.assert_close(groups.spawn(split, 4, 0, x, dy, torch.float32), wanted, rtol=1e-5, atol=1e-5)


def refused(rank: int, channels: int, rows: int) -> str:
    try:
        SyncBatchNorm(5 + channels * (rank == 1))(torch.zeros(rows * (rank == 0), 5))
    except RidgelineError as error:
        return str(error)
    return ""


def test_every_rank_says_what_is_wrong() -> None:
    for given, says in (
        ((1, 4), "on rank 1: the input must be (batch, 6, ...)"),
        ((0, 1), "two values a channel, got 1"),
    ):
        said = run_ranks(2, refused, *given)
        assert said[0] == said[1]
        assert says in said[0]


def test_evaluation_moves_nothing_and_state_is_torch_s() -> None:
    theirs, ours = nn.SyncBatchNorm(5), SyncBatchNorm(5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5)
    torch.testing.assert_close(ours.eval()(x), nn.functional.batch_norm(x, torch.zeros(5), torch.ones(5)))
