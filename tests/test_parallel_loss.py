"""Losses over a split vocabulary: values and gradients against one process, calls, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ridgeline
from ranks import one_kernel_at_a_time, run_ranks
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, loss

ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.5}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05, "reduction": "sum"},
    ALL,
    ALL | {"reduction": "none"},
]


def part(classes: int) -> slice:
    """Returns a rank's classes."""
    wide = -(-classes // groups.size())
    return slice(groups.rank() * wide, min(classes, (groups.rank() + 1) * wide))


def data(rows: int, classes: int, H: int, dtype: torch.dtype) -> list[torch.Tensor]:
    target = torch.randint(classes, (rows,))
    target[::3] = -100
    given = [
        torch.randn(s, dtype=torch.float64).to(dtype) for s in ((rows, classes), (rows, H), (classes, H), (classes,))
    ]
    return [target, *given]


def weighted(found: torch.Tensor) -> torch.Tensor:
    """Returns a scalar that has another gradient for each row."""
    rows = torch.arange(1, found.numel() + 1, device=found.device)
    return (found * rows.view(found.shape).to(found.dtype)).sum()


def split_logits(rank: int, given: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    target, logits, *_ = given
    own = logits[:, part(logits.shape[1])].clone().requires_grad_()
    found = loss.cross_entropy(own, target, classes=logits.shape[1], **options)
    weighted(found).backward()
    assert own.grad is not None
    return [found.detach(), own.grad]


def split_linear(rank: int, given: list[torch.Tensor], options: dict[str, Any], rows: bool) -> list[torch.Tensor]:
    target, _, x, weight, bias = given
    mine = part(weight.shape[0])
    x = x.tensor_split(groups.size())[groups.rank()] if rows else x
    own = [t.clone().requires_grad_() for t in (x, weight[mine], bias[mine])]
    found = loss.linear_cross_entropy(
        own[0], own[1], target, own[2], classes=weight.shape[0], split_rows=rows, chunk_memory=2000, **options
    )
    weighted(found).backward()
    return [found.detach(), *[t.grad for t in own if t.grad is not None]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy_equals_one_process(options: dict[str, Any]) -> None:
    given = data(18, 27, 8, torch.float64)
    target, logits = given[0], given[1].clone().requires_grad_()
    wanted = ridgeline.cross_entropy(logits, target, **options, impl="naive")
    weighted(wanted).backward()
    for world in (1, 2, 4):
        found = run_ranks(world, split_logits, given, options)
        for value, _ in found:
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([d for _, d in found], 1), logits.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [False, True], ids=["whole rows", "split rows"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_cross_entropy_equals_one_process(options: dict[str, Any], rows: bool) -> None:
    given = data(20, 27, 8, torch.float64)
    target, _, *own = given
    x, weight, bias = [t.clone().requires_grad_() for t in own]
    wanted = ridgeline.linear_cross_entropy(x, weight, target, bias, **options, impl="naive")
    weighted(wanted).backward()
    for world in (1, 2, 4):
        found = run_ranks(world, split_linear, given, options, rows)
        dx = [f[1] for f in found]
        for value, *_ in found:
            torch.testing.assert_close(value, wanted.detach().to(value.dtype), rtol=1e-12, atol=1e-12)
        for d in [torch.cat(dx)] if rows else dx:
            torch.testing.assert_close(d, x.grad, rtol=1e-12, atol=1e-12)
        for n, t in ((2, weight), (3, bias)):
            torch.testing.assert_close(torch.cat([f[n] for f in found]), t.grad, rtol=1e-12, atol=1e-12)


def on_gloo(given: list[torch.Tensor]) -> list[Any]:
    return [split_logits(0, given, ALL), split_linear(0, given, ALL, False), split_linear(0, given, ALL, True)]


def test_losses_on_gloo() -> None:
    given = data(20, 27, 8, torch.float32)
    threads = run_ranks(2, lambda rank: on_gloo(given))
    torch.testing.assert_close(groups.spawn(on_gloo, 2, given), threads, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_losses_by_kernels(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(device, monkeypatch, loss, "_part", "_gradient")
    given = data(10, 41, 8, dtype)
    options = ALL | {"reduction": "none", "dtype": torch.float32}
    target, *own = given
    logits, x, weight, bias = [t.double().requires_grad_() for t in own]
    wanted = ridgeline.cross_entropy(logits, target, **ALL, reduction="none", impl="naive")
    weighted(wanted).backward()
    near = {"rtol": 3e-3, "atol": 3e-3} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-5}
    found = run_ranks(3, split_logits, given, options)
    torch.testing.assert_close(found[1][0], wanted.detach().float(), **near)
    torch.testing.assert_close(torch.cat([d for _, d in found], 1).double(), logits.grad, **near)
    wanted = ridgeline.linear_cross_entropy(x, weight, target, bias, **ALL, reduction="none", impl="naive")
    weighted(wanted).backward()
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    found = run_ranks(2, split_linear, given, options, True)
    torch.testing.assert_close(found[0][0], wanted.detach().float(), **near)
    torch.testing.assert_close(torch.cat([f[1] for f in found]).double(), x.grad, **near)
    for n, t in ((2, weight), (3, bias)):
        torch.testing.assert_close(torch.cat([f[n] for f in found]).double(), t.grad, **near)


def refused(rank: int, wrong: str) -> str:
    target, logits = torch.zeros(4, dtype=torch.int64), torch.randn(4, 6)
    try:
        if wrong == "class":
            loss.cross_entropy(logits, target + 12 * (rank == 1))
        elif wrong == "width":
            loss.cross_entropy(logits[:, rank:], target)
        elif wrong == "classes":
            loss.cross_entropy(logits, target, classes=11)
        elif wrong == "target":
            loss.linear_cross_entropy(torch.randn(4, 8), torch.randn(6, 8), target + rank)
    except RidgelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("class", "on rank 1: targets must be 0 to 11 or ignore_index -100, got 12"),
        ("width", "same number of classes on a rank (else give classes), but rank 0 has 6 and rank 1 5"),
        ("classes", "on rank 1: of 11 classes rank 1 of 2 has 5, but its input has 6"),
        ("target", "all ranks must have the same target"),
    ],
)
def test_every_rank_says_what_is_wrong(wrong: str, says: str) -> None:
    said = run_ranks(2, refused, wrong)
    assert said[0] == said[1]
    assert says in said[0]


def test_one_gather_of_four_numbers_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def seen(name: str, real: Any) -> Any:
        def call(*args: Any, **rest: Any) -> Any:
            calls.append((name, args[-1].numel(), rest.get("async_op", False)))
            return real(*args, **rest)

        return call

    for module, name in ((groups, "all_gather"), (groups, "reduce_scatter"), (dist, "all_reduce")):
        monkeypatch.setattr(module, name, seen(name, getattr(module, name)))
    x, weight = torch.zeros(20, 8, requires_grad=True), torch.zeros(6, 8, requires_grad=True)
    with groups.pretend(64, 3):
        found = loss.linear_cross_entropy(x, weight, torch.zeros(20, dtype=torch.int64))
        assert calls == [("all_gather", 80, False)]
        found.backward()
    assert calls[1:] == [("all_reduce", 160, True)]
