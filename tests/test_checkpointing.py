"""The losses under activation checkpointing and offloading, which must see the gradients that forward makes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ridgeline

pytestmark = pytest.mark.kernels
Loss = Callable[..., torch.Tensor]


def leaves(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 16, device=device).requires_grad_() for n in (12, 50)]


def both(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Both losses; the logits and the gradients made from them are the largest tensors."""
    return 2 * ridgeline.cross_entropy(x @ w.mT, target) + ridgeline.linear_cross_entropy(x, w, target)


def gradients(run: Callable[[Loss, Any], torch.Tensor], device: str) -> tuple[torch.Tensor, ...]:
    x, w = leaves(device)
    target = torch.randint(50, (12,), generator=torch.Generator().manual_seed(1)).to(device)
    loss = run(both, (x, w, target))
    first = torch.autograd.grad(3 * loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, w))  # the gradients of forward are given away once
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    return first


def checkpointed(f: Loss, args: Any) -> torch.Tensor:
    return checkpoint(f, *args, use_reentrant=False)


def offloaded(f: Loss, args: Any) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return f(*args)


def nested(f: Loss, args: Any) -> torch.Tensor:
    return checkpoint(lambda *a: checkpoint(f, *a, use_reentrant=False), *args, use_reentrant=False)


def reentrant(f: Loss, args: Any) -> torch.Tensor:
    return checkpoint(f, *args, use_reentrant=True)


@pytest.mark.parametrize("run", [checkpointed, offloaded, nested, reentrant], ids=lambda f: f.__name__)
def test_gradients_are_those_of_a_plain_call(run: Callable[[Loss, Any], torch.Tensor], device: str) -> None:
    wanted = gradients(lambda f, args: f(*args), device)
    if run is reentrant:  # it allows one backward
        x, w = leaves(device)
        target = torch.randint(50, (12,), generator=torch.Generator().manual_seed(1)).to(device)
        found = torch.autograd.grad(3 * both(x, w, target), (x, w))
        loss = run(both, (x, w, target))
        (3 * loss).backward()
        found = x.grad, w.grad
    else:
        found = gradients(run, device)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_makes_no_gradient_that_a_checkpoint_drops(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward saves statistics alone; the recomputation makes the gradients, once each."""
    from importlib import import_module

    needs: list[tuple[str, int]] = []
    for name, at in (("cross_entropy", 3), ("linear_cross_entropy", 5)):
        module = import_module(f"ridgeline.ops.loss.{name}")
        forward = module._forward
        monkeypatch.setattr(
            module,
            "_forward",
            lambda *a, name=name, at=at, forward=forward: (needs.append((name, a[at])), forward(*a))[1],
        )
    x, w = leaves(device)
    loss = checkpointed(both, (x, w, torch.zeros(12, dtype=torch.int64, device=device)))
    assert needs == [("cross_entropy", 1), ("linear_cross_entropy", 1)]
    loss.backward()
    assert sorted(needs[2:]) == [("cross_entropy", 2), ("linear_cross_entropy", 2)]


def test_hooks_see_the_gradients(device: str) -> None:
    """What forward makes is saved through autograd's hooks, so that it can be moved or freed."""
    seen: list[tuple[int, ...]] = []
    x, w = leaves(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(tuple(t.shape)), t)[1], lambda t: t):
        logits = x @ w.mT
        seen.clear()
        ridgeline.cross_entropy(logits, torch.zeros(12, dtype=torch.int64, device=device)).backward()
    assert seen.count((12, 50)) == 2  # the logits and their gradient


def test_hooks_may_be_any_callable(device: str) -> None:
    x, w = leaves(device)
    target = torch.zeros(12, dtype=torch.int64, device=device)
    wanted = torch.autograd.grad(both(x, w, target), (x, w))
    with torch.autograd.graph.saved_tensors_hooks(partial(torch.mul, 1), partial(torch.mul, 1)):  # without names
        found = torch.autograd.grad(both(x, w, target), (x, w))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_selective_checkpointing(device: str) -> None:
    """A policy that keeps the loss's outputs gets those of a forward like the recomputation's."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "cross_entropy" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def run(f: Loss, args: Any) -> torch.Tensor:
        return checkpoint(
            f, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    x, w = leaves(device)
    target = torch.zeros(12, dtype=torch.int64, device=device)
    wanted = torch.autograd.grad(both(x, w, target), (x, w))
    found = torch.autograd.grad(run(both, (x, w, target)), (x, w))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
