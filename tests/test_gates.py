"""The gates' gradients where a sum of all pairs would cancel: the first tokens of a sequence, and long sequences."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import test_delta
import test_recurrent
from ridgeline.boundary import INTERPRETED
from ridgeline.lab import Law
from ridgeline.op import Spec, get
from ridgeline.ops.recurrent.triton.scan import to_tf32

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


def cut_off(x: np.ndarray) -> np.ndarray:
    """Without the bits that TF32 does not hold, as a GPU's products take it."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@triton.jit
def _round(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), to_tf32(tl.load(x + tl.arange(0, N))))


@pytest.mark.kernels
def test_rounding_to_tf32(device: str) -> None:
    """To the nearest of the numbers that TF32 holds; infinities and a GPU's own NaN stay."""
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([0.0, math.inf, -math.inf, 1 + 2**-11, -1 - 2**-11, 2 - 2**-12])
    x = torch.cat([odd, nan, torch.randn(248) * 10.0 ** torch.randint(-9, 9, (248,))]).to(device)
    found = torch.empty_like(x)
    _round[(1,)](x, found, 256)
    found, x = found.cpu(), x.cpu()
    assert found[:6].tolist() == [0.0, math.inf, -math.inf, 1 + 2**-10, -1 - 2**-10, 2.0]
    assert found[6:8].isnan().all()
    assert (found[8:] == torch.from_numpy(cut_off(found[8:].numpy()))).all()
    assert ((found - x).abs() <= x.abs() * 2**-11)[8:].all()


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="a GPU's products cut in any case")
@pytest.mark.parametrize(("kind", "rung"), [*((k, "triton") for k in KINDS), ("per head", "triton_chunks")])
def test_float16_loses_nothing_in_tf32(kind: str, rung: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's products in TF32 cut the last bits of terms off, which would make a gate's gradient 0.03% too small in
    all. Their terms are rounded before, so products that cut give the bits of those that do not."""
    from triton.runtime import interpreter

    name, form = KINDS[kind]
    module = test_delta if name in ("gated_delta_rule", "rwkv7") else test_recurrent
    function, args, *more = module.inputs(form, 1, 37, device)
    own, cuts = interpreter.InterpreterBuilder.create_dot, []

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        if a.data.dtype == np.float32 and precision == interpreter._ir.INPUT_PRECISION.TF32:
            cuts.append(precision)
            a, b = (interpreter.TensorHandle(cut_off(t.data), t.dtype) for t in (a, b))
        return own(self, a, b, d, precision, most)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [a.half().requires_grad_() for a in args]
        o = function(*leaves, impl=rung, **(more[0] if more else {}))
        return torch.autograd.grad(o, leaves, torch.ones_like(o))

    expected = gradients()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    for one, other in zip(gradients(), expected, strict=True):
        assert torch.equal(one, other)
    assert cuts or (kind, rung) == ("per head", "triton")


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
@pytest.mark.parametrize(("dtype", "T"), [(torch.bfloat16, 4096), (torch.float16, 1000)])
def test_long_sequences_keep_the_law(kind: str, impl: str, dtype: torch.dtype, T: int, device: str) -> None:
    name, specs, given = long(kind, T)
    dice = torch.Generator(device).manual_seed(0)
    law = Law(get(name), [s.make(dtype, device, dice) for s in specs], given)
    verdict = law.judge(*law.run(get(name).implementations[impl]))
    assert verdict.ok, verdict.reason()
