"""Experts spread over ranks: values and gradients against one process, the order of results, traffic, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ridgeline
from ranks import one_kernel_at_a_time, run_ranks
from ridgeline.op import RidgelineError
from ridgeline.parallel import experts, groups
from ridgeline.parallel.traffic import expert_traffic

OAI = {"activation": "swiglu_oai", "limit": 1.5, "interleaved": True}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
E, K, H, I = 8, 3, 6, 5
SPREADS = {"even": [4, 4, 4, 4], "uneven": [7, 1, 5, 3], "a rank without tokens": [9, 0, 4, 3]}


def data(tokens: int, dtype: torch.dtype = torch.float64, chosen: int = E) -> list[torch.Tensor]:
    """Returns x, weights, indices, the experts and their biases, and dy. chosen: experts that get tokens."""
    shapes = (tokens, H), (tokens, K), (E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H), (tokens, H)
    x, weights, *rest = [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]
    return [x, weights, torch.rand(tokens, chosen).argsort(1)[:, :K], *rest]


def alone(given: list[torch.Tensor], biased: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    """Returns y and the gradients of x, weights, the experts and their biases, of one process."""
    x, weights, indices, *four, dy = given
    own = [t.clone().requires_grad_() for t in (x, weights, *four[: 4 if biased else 2])]
    biases = dict(zip(("gate_up_bias", "down_bias"), own[4:], strict=False))
    y: Any = ridgeline.moe(own[0], own[1], indices, own[2], own[3], **biases, **options, impl="naive")
    y.backward(dy)
    return [y.detach(), *[t.grad for t in own if t.grad is not None]]


def spread(
    rank: int, given: list[torch.Tensor], tokens: list[int], biased: bool, options: dict[str, Any]
) -> list[torch.Tensor]:
    """The same of one rank's tokens and experts."""
    x, weights, indices, *four, dy = given
    x, weights, indices, dy = (t.split(tokens)[groups.rank()] for t in (x, weights, indices, dy))
    mine = [t.chunk(groups.size())[groups.rank()] for t in four[: 4 if biased else 2]]
    own = [t.clone().requires_grad_() for t in (x, weights, *mine)]
    biases = dict(zip(("gate_up_bias", "down_bias"), own[4:], strict=False))
    y: Any = experts.moe(own[0], own[1], indices, own[2], own[3], **biases, **options)
    y.backward(dy)
    return [y.detach(), *[t.grad for t in own if t.grad is not None]]


def together(found: list[Any]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("options", [{}, OAI], ids=["silu", "swiglu_oai"])
@pytest.mark.parametrize("tokens", SPREADS.values(), ids=list(SPREADS))
def test_spread_experts_equal_one_process(tokens: list[int], options: dict[str, Any]) -> None:
    for chosen in (E, K + 1):  # experts without tokens, and ranks whose experts have none
        given = data(16, chosen=chosen)
        for world, parts in ((2, [sum(tokens[:2]), sum(tokens[2:])]), (4, tokens)):
            biased = bool(options)
            found = together(run_ranks(world, spread, given, parts, biased, options))
            torch.testing.assert_close(found, alone(given, biased, options), **EXACT)


def test_one_process_needs_no_group() -> None:
    given = data(5)
    torch.testing.assert_close(spread(0, given, [5], True, OAI), alone(given, True, OAI), **EXACT)


def on_gloo(given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [spread(0, given, tokens, True, OAI) for tokens in ([3, 6], [9, 0])]


def test_spread_experts_on_gloo() -> None:
    given = data(9, chosen=E - 1)
    wanted = alone(given, True, OAI)
    for found in zip(*groups.spawn(on_gloo, 2, given), strict=True):
        torch.testing.assert_close(together(list(found)), wanted, **EXACT)


def backwards(route: Any, t: torch.Tensor) -> torch.Tensor:
    """A mutant of `Route.back`: each rank's results in the wrong order."""
    return RIGHT(route, t.flip(0))


RIGHT = experts.Route.back


def test_results_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = data(16)
    monkeypatch.setattr(experts.Route, "back", backwards)
    found = together(run_ranks(2, spread, given, [8, 8], False, {}))
    for one, other in zip(found[:3], alone(given, False, {})[:3], strict=True):
        assert not torch.allclose(one, other)


def frozen(rank: int, given: list[torch.Tensor], needs: tuple[bool, ...]) -> list[Any]:
    """Returns the gradients where only some tensors need them."""
    x, weights, indices, gate_up, down, *_ = given
    mine = [t.chunk(2)[rank] for t in (x, weights, gate_up, down)]
    own = [t.clone().requires_grad_(n) for t, n in zip(mine, needs, strict=True)]
    y: Any = experts.moe(own[0], own[1], indices.chunk(2)[rank], own[2], own[3])
    if any(needs):
        y.sum().backward()
    return [t.grad for t in own]


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, False, True), (False, False, True, False)]
)
def test_only_wanted_gradients(needs: tuple[bool, ...]) -> None:
    given = data(8)
    *rest, dy = given
    wanted = alone([*rest, torch.ones_like(dy)], False, {})[1:]
    found = run_ranks(2, frozen, given, needs)
    for n, need in enumerate(needs):
        parts = [f[n] for f in found]
        if need:
            torch.testing.assert_close(torch.cat(parts), wanted[n], **EXACT)
        else:
            assert parts == [None, None]


def test_inference_gives_the_same_bits() -> None:
    given = data(8)
    found = torch.cat([f[0] for f in run_ranks(2, spread, given, [4, 4], False, {})])
    plain = run_ranks(2, inferred, given)
    torch.testing.assert_close(torch.cat(plain), found, rtol=0, atol=0)


def inferred(rank: int, given: list[torch.Tensor]) -> torch.Tensor:
    x, weights, indices, gate_up, down, *_ = given
    return experts.moe(*[t.chunk(2)[rank] for t in (x, weights, indices, gate_up, down)])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_spread_experts_by_kernels(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(device, monkeypatch, experts, "_forward", "_backward")
    for tokens, chosen in ([4, 5], E), ([9, 0], 4):  # then the second rank's experts have no tokens either
        given = data(9, dtype, chosen)
        wanted = alone([t.double() if t.is_floating_point() else t for t in given], True, OAI)
        found = together(run_ranks(2, spread, given, tokens, True, OAI))
        near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, **near)


def refused(rank: int, wrong: str) -> str:
    x, weights, indices, gate_up, down, *_ = [t.clone() for t in data(4)]
    indices.fill_(1)
    gate_up, down = gate_up[:4], down[:4]
    if wrong == "index":
        indices[2, 1] = 8 if rank else 0
    if wrong == "shape":
        down = down[:, :, rank:]
    if wrong == "experts":
        gate_up, down = gate_up[rank:], down[rank:]
    if wrong == "dtype":
        weights = weights.to([torch.float64, torch.float32][rank])
    if wrong == "gradient":
        x.requires_grad_(rank == 0)
    if wrong == "type":
        x = x if rank else None  # type: ignore[assignment]
    options: dict[str, Any] = {"activation": ["silu", "swiglu_oai"][rank] if wrong == "options" else "silu"}
    try:
        experts.moe(x, weights, indices, gate_up, down, **options)
    except RidgelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("index", "moe: on rank 1: indices must be from 0 to 7, 4 experts on each rank, got 1 to 8"),
        ("shape", "moe: on rank 1: weights must be gate_up (E / ranks, 2 I, H) and down (E / ranks, H, I), got"),
        ("experts", "same shapes of gate_up and down, but rank 0 has (4, 10, 6) and (4, 6, 5) and rank 1 (3, 10, 6)"),
        (
            "dtype",
            "same dtypes of x and weights, but rank 0 has torch.float64 and torch.float64 and rank 1 torch.float64",
        ),
        ("gradient", "same needs of gradients (of x, of weights, of anything), but rank 0 has [True, False, True]"),
        ("type", "moe: on rank 0: x must be a dense tensor, got NoneType"),
        ("options", "same options, but rank 0 has ['silu', 'None', 'False'] and rank 1 ['swiglu_oai'"),
    ],
)
def test_every_rank_says_what_is_wrong(wrong: str, says: str) -> None:
    said = run_ranks(2, refused, wrong)
    assert said[0] == said[1]
    assert says in said[0]


def test_calls_and_bytes_in_a_world_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    world, here, sent = 64, 5, []
    real = dist.all_to_all_single

    def exchange(out: Any, x: Any, outs: Any = None, ins: Any = None, **rest: Any) -> Any:
        row = x.numel() // max(1, x.shape[0]) * x.element_size()
        sizes = ins or [x.shape[0] // world] * world
        sent.append((sum(sizes) - sizes[here]) * row)
        return real(out, x, outs, ins, **rest)

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    indices = torch.arange(128).repeat(2)[: 5 * 31].view(31, 5)  # uneven: the last experts get fewer
    leave = int((indices // 2 != here).sum())
    for needs in ((True, True), (True, False), (False, True)):
        x, weights = [
            t.requires_grad_(n) for t, n in zip((torch.zeros(31, 32, dtype=torch.bfloat16), torch.zeros(31, 5)), needs)
        ]
        gate_up, down = [torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in ((2, 16, 32), (2, 32, 8))]
        wanted = expert_traffic(world, 128, leave, leave, 32, of_x=needs[0], of_weights=needs[1])
        with groups.pretend(world, here):
            y: Any = experts.moe(x, weights, indices, gate_up, down)
            assert (len(sent), sum(sent)) == wanted[0]
            sent.clear()
            y.backward(torch.zeros_like(y))
            assert (len(sent), sum(sent)) == wanted[1]
            sent.clear()
    with groups.pretend(world, here), torch.no_grad():
        experts.moe(x, weights, indices, gate_up, down)
        assert (len(sent), sum(sent)) == expert_traffic(world, 128, leave, leave, 32, training=False)[0]
