"""Shared by the tests of attention and attention_varlen: calls, their results, and a sample of all options together.

Hypothesis draws the sample from SEED in the environment, and a failure prints the seed.
"""

import os
import random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from ridgeline.boundary import INTERPRETED
from ridgeline.lab.measurement.law import Law, as_tuple
from ridgeline.op import get
from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.select import why_not

kernels = pytest.mark.kernels
GPU = torch.cuda.is_available() and not INTERPRETED
SEED = int(os.environ.get("SEED", 0))
EXAMPLES = int(os.environ.get("EXAMPLES", 8 if INTERPRETED else 400))
IMPLS = [i.name for i in get("attention").implementations.values() if i.is_kernel]
HERE = ["triton", *(["gluon"] if GPU and torch.cuda.get_device_capability() == (9, 0) else [])]
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def make(
    *shape: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 1.0, dice: int = 3
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(dice)
    return torch.randn(shape, device=device, generator=generator).mul(scale).to(dtype).requires_grad_()


def qkv(q: tuple[int, ...], k: tuple[int, ...], device: str, **given: Any) -> list[torch.Tensor]:
    return [make(*shape, device=device, dice=n, **given) for n, shape in enumerate((q, k, k))]


def outcome(call: Any, args: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    """Returns the results of a call, and its gradients for random incoming ones."""
    outputs = as_tuple(call(*args, **given))
    incoming = [make(*o.shape, device=o.device.type, dice=9 + n).detach().to(o.dtype) for n, o in enumerate(outputs)]
    return [
        *[o.detach() for o in outputs],
        *torch.autograd.grad(outputs, [a for a in args if a.requires_grad], incoming),
    ]


def exact(args: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    return outcome(get("attention").reference, [a.detach().double().requires_grad_() for a in args], **given)


def bands(dice: random.Random, rows: int, columns: int) -> tuple[int, int]:
    """Returns left and right, of bands that lie anywhere: some rows, or all, may see no key."""
    if dice.random() < 0.3:
        return UNBOUNDED, UNBOUNDED
    middle, far = dice.randint(-rows, columns), dice.choice((0, 3, 64, 128, 300))
    right = middle + dice.choice((0, 1, 63, 64, 200))
    right = right // 128 * 128 if dice.random() < 0.4 else right  # edges that need fewer comparisons
    return dice.choice(((far - middle, right), (far - middle, right), (UNBOUNDED, right), (far - middle, UNBOUNDED)))


def exact_partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu: list[int] | None,
    left: int,
    right: int,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and lse in float64 where query i sees the keys i - left to i + right, of its own sequence if packed."""
    q, k, v = [t.double() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    apart = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
    seen = (apart >= -left) & (apart <= right)
    if cu is not None:
        which = torch.searchsorted(torch.tensor(cu, device=q.device), torch.arange(cu[-1], device=q.device), right=True)
        seen &= which == which[:, None]
    s = soft_capped(q @ k.repeat_interleave(group, 1).mT * scale, softcap).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p @ v.repeat_interleave(group, 1), lse


def near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, check_dtype=False, rtol=tolerance, atol=tolerance)


def lawful(name: str, args: list[Any], given: dict[str, Any], impls: list[str]) -> None:
    """Checks against twice the allowed error, or nearness to the oracle.

    With few rows and columns the standard's own error is luck, and a query that sees one key has a gradient of zero."""
    law = Law(get(name), args, given)
    for impl in impls:
        implementation = get(name).implementations[impl]
        if why_not(implementation, *args, **given):
            continue
        outputs, grads = law.run(implementation)
        assert not any(t.isnan().any() for t in (*outputs, *grads))
        verdict = law.judge(outputs, grads)
        if verdict.worst() > 2:
            oracle = law._oracle(args)
            try:
                near([*outputs, *grads], [*oracle[0], *oracle[1]], max(2e-5, 4 * torch.finfo(args[0].dtype).eps))
            except AssertionError as error:
                raise AssertionError(f"{impl}: {verdict.reason()}") from error


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    edge = st.one_of(st.none(), st.integers(0, 40))
    return {
        "causal": draw(st.sampled_from([False, True, "bottom_right"])),
        "window": draw(st.one_of(st.none(), st.tuples(edge, edge))),
        "softcap": draw(st.sampled_from([None, None, 0.7, 20.0])),
        "scale": draw(st.sampled_from([None, None, 0.05, 1.0, -0.3])),
        "return_lse": draw(st.booleans()),
        "deterministic": draw(st.sampled_from([None, False])),
    }


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    length = (
        st.integers(0, 50) if INTERPRETED else st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 512, 1000]))
    )
    D = st.sampled_from([16, 24, 32, 40] if INTERPRETED else range(16, 257, 8))
    return {
        "sizes": (
            draw(st.integers(1, 2)),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
            draw(length),
            draw(length),
            draw(D),
        ),
        "dtype": draw(st.sampled_from(DTYPES)),
        "mask": draw(st.sampled_from([None, None, "bool", "float", "infinite"])),
        "shape": draw(st.tuples(*[st.booleans()] * 4)),
        "order": draw(st.booleans()),
        "options": draw(options()),
    }


def sampled(device: str) -> Any:
    """Runs a test on hypothesis's examples, drawn from SEED."""

    def run(test: Any) -> None:
        print(f"SEED={SEED}")
        rules = hypothesis.settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        hypothesis.seed(SEED)(rules(test))()

    return run


def lawful_call(call: dict[str, Any], device: str, impls: list[str]) -> None:
    """Checks one of `calls` against the law."""
    B, Hkv, G, sq, sk, D = call["sizes"]
    shapes = (B, Hkv * G, sq, D), (B, Hkv, sk, D), (B, Hkv, sk, D)
    args = [make(*shape, device=device, dtype=call["dtype"], dice=n) for n, shape in enumerate(shapes)]
    if call["order"]:
        args = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in args]
    mask = None
    if call["mask"] is not None:
        whole = make(
            *(n if kept else 1 for n, kept in zip((B, Hkv * G, sq, sk), call["shape"], strict=True)), device=device
        ).detach()
        mask = (
            whole > -0.5
            if call["mask"] == "bool"
            else whole
            if call["mask"] == "float"
            else whole.masked_fill(whole < 0, -torch.inf)
        )
    lawful("attention", args, call["options"] | {"mask": mask}, impls)


def soft_capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores
