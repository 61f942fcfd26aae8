"""The gates' gradients where a sum of all pairs would cancel: the first tokens of a sequence, and long sequences."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import test_delta
import test_recurrent
from ridgeline.lab import Law
from ridgeline.op import Spec, get

KINDS = {
    "per head": ("gated_linear_attention", "head"),
    "per channel": ("gated_linear_attention", "channel"),
    "rwkv6": ("rwkv6", "rwkv6"),
    "delta, per head": ("gated_delta_rule", "head"),
    "delta, per channel": ("gated_delta_rule", "channel"),
    "rwkv7": ("rwkv7", "rwkv7"),
}


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "rung"), [*((k, "triton") for k in KINDS), ("per head", "triton_chunks")])
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_tokens_of_a_sequence(kind: str, rung: str, packed: bool, device: str) -> None:
    """Without a first state nothing is decayed by the first gate: its gradient is 0 to the bit. The second token's is
    that of one key alone, which a rounding in the sums of later pairs must not reach."""
    name, form = KINDS[kind]
    module = test_delta if name in ("gated_delta_rule", "rwkv7") else test_recurrent
    function, args, *more = module.inputs(form, 1, 37, device)
    given: dict[str, Any] = dict(more[0]) if more else {}
    starts = [0, 3] if packed else [0]
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 3, 37], dtype=torch.int32, device=device)
    found = []
    for impl, dtype in ((rung, torch.float16), ("naive", torch.float64)):
        leaves = [a.half().to(dtype).requires_grad_() for a in args]
        o = function(*leaves, impl=impl, **given)
        incoming = torch.randn(o.shape, device=device, generator=torch.Generator(device).manual_seed(1)).half()
        found.append(torch.autograd.grad(o, leaves[1 if form == "rwkv7" else 3], incoming.to(dtype))[0].double())
    ours, exact = found
    for start in starts:
        assert not exact[:, start].any()
        assert not ours[:, start].any()
        assert (ours - exact)[:, start + 1].norm() < 2e-3 * exact[:, start + 1].norm()
    assert (ours - exact).norm() < 2e-3 * exact.norm()


def long(kind: str, T: int) -> tuple[str, list[Spec], dict[str, Any]]:
    """An op, its inputs at T tokens, heads enough for rows that the law takes as rows, and its options."""
    name = "ssd" if kind == "ssd" else KINDS[kind][0]
    own = sys.modules[get(name).reference.__module__]
    H = 16 if "head" in kind or kind == "ssd" else 2
    key, gate = Spec(1, T, H, 64), None if kind == "ssd" else own.Decay(1, T, H, *(() if "head" in kind else (64,)))
    if kind == "ssd":
        return name, [key, Spec(1, T, H), own.Negative(H), *(Spec(1, T, 1, 64),) * 2], {}
    if kind == "rwkv7":
        return name, list(own._case(1, T, H, H, 64, 64)), {}
    if kind == "rwkv6":
        return name, [key, key, key, gate, Spec(H, 64)], {}
    if "delta" in kind:
        return name, [key, key, key, gate, own.Beta(1, T, H)], {"normalize": True}
    return name, [key, key, key, gate], {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "impl"),
    [*((k, "triton") for k in (*KINDS, "ssd")), ("per head", "triton_chunks"), ("ssd", "triton_chunks")],
)
def test_long_sequences_keep_the_law(kind: str, impl: str, device: str) -> None:
    name, specs, given = long(kind, 4096)
    dice = torch.Generator(device).manual_seed(0)
    law = Law(get(name), [s.make(torch.bfloat16, device, dice) for s in specs], given)
    verdict = law.judge(*law.run(get(name).implementations[impl]))
    assert verdict.ok, verdict.reason()
