"""A decoder's step of the recurrent ops against the float64 recurrence: in place, and with the delta rule's pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline.op import get
from ridgeline.ops.recurrent.triton.step import Token, start

pytestmark = pytest.mark.kernels

B, H, HV, K, V = 2, 2, 4, 12, 40


def normal(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed + sum(shape)))


def token(device: str, gate: str, bonus: bool = False, delta: bool = False) -> Token:
    keys = [normal(device, B, 1, H, K, seed=n) for n in range(4)]
    gates = {"none": None, "head": normal(device, B, 1, H), "channel": normal(device, B, 1, H, K, seed=9)}
    g = gates[gate]
    u = normal(device, H, K) if bonus else None
    pair = keys[2:] if delta else (None, None)
    return Token(keys[0], keys[1], normal(device, B, 1, HV, V), None if g is None else -g.abs(), u, *pair)


def exact(given: Token, S: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """S' = diag(e^g) S + b (a^T S) + k v^T and o, in float64, one head after the other."""
    S, o = S.double().clone(), torch.zeros(B, HV, V, dtype=torch.float64, device=S.device)
    q, k, v, g, u, a, b = (None if t is None else t.double() for t in given[:7])
    for n in range(B):
        for h in range(HV):
            i, old = h // (HV // H), S[n, h].clone()
            new = old if g is None else old * g[n, 0, i].exp().reshape(-1, 1)
            if a is not None:
                new = new + torch.outer(b[n, 0, i], a[n, 0, i] @ old)
            pair = torch.outer(k[n, 0, i], v[n, 0, h])
            S[n, h] = new + pair
            seen = S[n, h] if u is None else old + u[i].unsqueeze(-1) * pair
            o[n, h] = scale * q[n, 0, i] @ seen
    return o.unsqueeze(1), S


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected).norm() < 3e-7 * expected.norm()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("gate", "bonus", "delta"),
    [("none", False, False), ("none", False, True), ("head", False, False), ("head", False, True),
     ("channel", False, False), ("channel", False, True), ("channel", True, False)],
)  # fmt: skip
def test_the_kernel(gate: str, bonus: bool, delta: bool, transposed: bool, device: str) -> None:
    """The state is written over itself, whichever of its dimensions is contiguous."""
    given, S = token(device, gate, bonus, delta), normal(device, B, HV, K, V)
    o, S_exact = exact(given, S, 0.7)
    S = S.mT.contiguous().mT if transposed else S
    found = torch.empty(B, 1, HV, V, device=device)
    start(found, S, given, S, 0.7)
    near(found, o)
    near(S, S_exact)


def test_a_gated_delta_rule(device: str) -> None:
    """S' = e^g S;  S = S' + beta k (v - S'^T k)^T, by a = e^g k, b = -beta k and k := beta k."""
    given, S = token(device, "head"), normal(device, B, HV, K, V)
    q, k, v, g = given[:4]
    assert g is not None
    k, beta = torch.nn.functional.normalize(k, dim=-1), normal(device, B, 1, H, 1).sigmoid() * 2
    made, state = torch.empty(B, 1, HV, V, device=device), torch.empty_like(S)
    start(made, state, Token(q, beta * k, v, g, None, g.exp().unsqueeze(-1) * k, -beta * k), S, 1.0)
    q, k, v, g, beta = (t.double()[:, 0].repeat_interleave(HV // t.shape[2], 1) for t in (q, k, v, g, beta))
    old = S.double() * g.exp()[..., None, None]
    new = old + (beta * k).unsqueeze(-1) * (v - (old * k.unsqueeze(-1)).sum(2)).unsqueeze(2)
    near(state, new)
    near(made[:, 0], (new * q.unsqueeze(-1)).sum(2))


def ops(device: str) -> dict[str, tuple[Any, list[torch.Tensor], dict[str, torch.Tensor]]]:
    t = token(device, "channel", bonus=True)
    keys = normal(device, B, 1, 2, K), normal(device, B, 1, 2, K, seed=5)
    mamba = [t.v, normal(device, B, 1, HV) - 4, -normal(device, HV).abs(), *keys]
    around = {"D": normal(device, HV), "z": normal(device, B, 1, HV, V, seed=1), "dt_bias": normal(device, HV, seed=1)}
    gates: Any = t.g
    return {
        "linear_attention": (ridgeline.linear_attention, [t.q, t.k, t.v], {}),
        "per head": (ridgeline.gated_linear_attention, [t.q, t.k, t.v, gates[..., 0]], {}),
        "per channel": (ridgeline.gated_linear_attention, [t.q, t.k, t.v, gates], {}),
        "rwkv6": (ridgeline.rwkv6, [t.q, t.k, t.v, gates, t.u], {}),
        "ssd": (ridgeline.ssd, mamba, {}),
        "ssd with everything": (ridgeline.ssd, mamba, around),
    }


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["linear_attention", "per head", "per channel", "rwkv6", "ssd", "ssd with everything"])
def test_in_place(name: str, transposed: bool, device: str) -> None:
    function, args, more = ops(device)[name]
    S = normal(device, B, HV, K, V)
    wide = [a.double() for a in args], {n: a.double() for n, a in more.items()}
    o, last = function(*wide[0], **wide[1], initial_state=S.double(), return_state=True, impl="naive")
    kept = S.mT.contiguous().mT if transposed else S.clone()
    place = kept.data_ptr()
    found, same = function(*args, **more, initial_state=kept, return_state=True, inplace=True, impl="triton")
    assert same is kept
    assert kept.data_ptr() == place
    near(found, o)
    near(kept, last)
    fresh, other = function(*args, **more, initial_state=S, return_state=True, impl="triton")
    near(fresh, o)
    near(other, last)


@pytest.mark.parametrize("name", ["per head", "ssd with everything"])
def test_a_compiled_step(name: str, device: str) -> None:
    function, args, more = ops(device)[name]
    S = normal(device, B, HV, K, V)
    other = S.clone()

    def step(state: torch.Tensor) -> Any:
        return function(*args, **more, initial_state=state, inplace=True, impl="triton")

    made = torch.compile(step, fullgraph=True, backend="aot_eager")(S)
    assert torch.equal(made, step(other))
    assert torch.equal(S, other)


def test_opcheck(device: str) -> None:
    t, S = token(device, "head"), normal(device, B, HV, K, V)
    get("gated_linear_attention")
    torch.library.opcheck(
        torch.ops.ridgeline.gated_linear_attention_step.default, (t.q, t.k, t.v, t.g, None, S, 1.0, "triton")
    )
    _, args, more = ops(device)["ssd with everything"]
    extras = more["D"], more["z"], more["dt_bias"]
    torch.library.opcheck(torch.ops.ridgeline.ssd_token.default, (*args, *extras, S, True, 1.0, "triton"))


def test_a_state_of_which_nothing_is_contiguous(device: str) -> None:
    _, args, _ = ops(device)["per head"]
    S = normal(device, B, HV, K, 2 * V)[..., ::2]
    with pytest.raises(ridgeline.RidgelineError, match="contiguous initial_state"):
        ridgeline.gated_linear_attention(*args, initial_state=S, inplace=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_delta_step_is_in_place(per_channel: bool, normalize: bool, device: str) -> None:
    """The state is replaced without a copy, with the numbers of the plain recurrence in float64."""
    q, k, v = normal(device, 3, 1, 2, 16), normal(device, 3, 1, 2, 16, seed=1) / 3, normal(device, 3, 1, 4, 24)
    g, beta = -normal(device, 3, 1, 2, *[16] * per_channel).abs(), 2 * normal(device, 3, 1, 4).sigmoid()
    state = normal(device, 3, 4, 16, 24)
    options = {"normalize": normalize, "return_state": True}
    exact = ridgeline.gated_delta_rule(
        *(t.double() for t in (q, k, v, g, beta)), initial_state=state.double(), impl="naive", **options
    )
    apart = ridgeline.gated_delta_rule(q, k, v, g, beta, initial_state=state, impl="triton", **options)
    own = state.clone()
    found = ridgeline.gated_delta_rule(q, k, v, g, beta, initial_state=own, inplace=True, impl="triton", **options)
    assert found[1] is own
    assert own._version == 1
    assert all(torch.equal(a, b) for a, b in zip(found, apart, strict=True))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


def test_rwkv7_steps_in_place(device: str) -> None:
    r, w, k, a, b = (normal(device, 2, 1, 2, 16, seed=n) / 3 for n in range(5))
    v, state = normal(device, 2, 1, 2, 8), normal(device, 2, 2, 16, 8)
    given = r, -w.abs(), k, v, a, b
    exact = ridgeline.rwkv7(*(t.double() for t in given), initial_state=state.double(), return_state=True, impl="naive")
    found = ridgeline.rwkv7(*given, initial_state=state, return_state=True, inplace=True, impl="triton")
    assert found[1] is state
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=2e-6)
