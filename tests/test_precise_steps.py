"""AdamW where bfloat16 has too few digits: float32 master weights, and stochastic rounding."""

import copy

import pytest
import torch
import triton
import triton.language as tl

import ridgeline
from ridgeline import optim
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError
from ridgeline.ops.optimizer.adamw import _rounded, _stochastic

pytestmark = pytest.mark.kernels
NARROW = torch.float16 if INTERPRETED else torch.bfloat16  # Triton's interpreter is wrong in bfloat16


def lists(device: str, dtype: torch.dtype, *sizes: int) -> list[list[torch.Tensor]]:
    dice = torch.Generator().manual_seed(0)
    made = [[torch.randn(n, generator=dice) for n in sizes] for _ in range(4)]
    made[3] = [v.square() for v in made[3]]
    return [[t.to(device, dtype) for t in some] for some in made]


@pytest.mark.parametrize("moments", [torch.float32, NARROW], ids=str)
def test_masters_are_the_weights_of_a_float32_run(moments: torch.dtype, device: str) -> None:
    """Masters take the same bits as float32 parameters with the same gradients, and parameters are their casts."""
    p, g, m, v = lists(device, NARROW, 9000, 7)
    m, v = ([t.to(moments) for t in some] for some in (m, v))
    w = [t.float() for t in p]
    wide = [t.clone() for t in w], g, [t.clone() for t in m], [t.clone() for t in v]
    for step in (1, 2, 3):
        ridgeline.adamw(p, g, m, v, step, masters=w, lr=0.01)
        ridgeline.adamw(*wide, step, lr=0.01)
    for own, master, other in zip(p, w, wide[0], strict=True):
        assert torch.equal(master, other)
        assert torch.equal(own, master.to(NARROW))


def test_masters_beside_parameters_as_wide(device: str) -> None:
    p, g, m, v = lists(device, torch.float32, 40, 7)
    w, before = [t.clone() for t in p], [t.clone() for t in p]
    ridgeline.adamw(p, g, m, v, 1, masters=w, lr=0.01)
    for own, master, old in zip(p, w, before, strict=True):
        assert torch.equal(own, master)
        assert not torch.equal(own, old)


def test_steps_in_memory_beside_masters(device: str) -> None:
    p, g, m, v = lists(device, NARROW, 40, 7)
    w = [t.float() for t in p]
    others = copy.deepcopy([p, g, m, v, w])
    ridgeline.adamw(p, g, m, v, [torch.tensor(3.0, device=device)] * 2, masters=w, lr=0.01)
    ridgeline.adamw(*others[:4], 3, masters=others[4], lr=0.01)
    torch.testing.assert_close(w, others[4], rtol=1e-6, atol=1e-7)


def test_the_optimizer_keeps_masters(device: str) -> None:
    """A state_dict holds them in float32, and loads into an optimizer that goes on with the same bits."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, device=device, dtype=d)) for n, d in ((50, NARROW), (9, torch.float32))]
    optimizer = optim.AdamW(params, lr=1e-2, master_weights=True)

    def step(optimizer: optim.AdamW, params: list[torch.nn.Parameter]) -> None:
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()

    step(optimizer, params)
    assert optimizer.state[params[0]]["master"].dtype == torch.float32
    assert "master" not in optimizer.state[params[1]]
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = optim.AdamW(again, lr=1e-2, master_weights=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some in ((optimizer, params), (other, again)):
        step(*some)
    assert torch.equal(optimizer.state[params[0]]["master"], other.state[again[0]]["master"])
    for a, b in zip(params, again, strict=True):
        assert torch.equal(a, b)


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.tensor([1.0 + 2.0**-10, -3.0 - 2.0**-9, 1e-40, 0.0, float("inf"), float("nan")])
    bits = torch.arange(1 << 16)
    for value, low in ((x[0], 1.0), (x[1], -3.0)):
        rounded = _stochastic(value.expand(1 << 16).contiguous(), bits).float()
        assert rounded.double().mean() == value.double()  # over all bits, exactly
        assert rounded.unique().numel() == 2
        assert low in rounded
    for value in x[3:]:
        assert torch.equal(
            _stochastic(value.expand(8).contiguous(), bits[:8]).float().nan_to_num(7), value.expand(8).nan_to_num(7)
        )


@triton.jit
def _bits(x, bits, out, N: tl.constexpr):
    i = tl.arange(0, N)
    rounded = _rounded(tl.load(x + i), tl.load(bits + i).to(tl.uint32), tl.bfloat16, True)
    tl.store(out + i, rounded.to(tl.int16, bitcast=True))


def test_kernels_round_as_the_formula(device: str) -> None:
    """Also NaN, infinities, zeros and values next to the largest; the upper half of the random word does nothing."""
    torch.manual_seed(0)
    x = torch.randn(4096) * 10.0 ** torch.randint(-40, 38, (4096,))
    odd = torch.tensor([0x7F800001, -1, 0x7F800000, -0x800000, 0, -0x80000000, 0x7F7FFFFF, 0x7F7F0001, 1])
    x[: len(odd)] = odd.to(torch.int32).view(torch.float32)
    bits = torch.randint(-(1 << 31), 1 << 31, x.shape, dtype=torch.int64)
    out = torch.empty(x.shape, dtype=torch.int16, device=device)
    _bits[(1,)](x.to(device), bits.to(torch.int32).to(device), out, x.numel())
    found, wanted = out.cpu().view(torch.bfloat16), _stochastic(x, bits & 0xFFFF)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_float32_has_nothing_to_round(device: str) -> None:
    """Stochastic steps of float32 tensors are those to nearest, by every implementation and for every seed."""
    for impl, seed in (("naive", 0), ("torch", 0), (None, 1), (None, (1 << 32) - 1)):
        given = lists(device, torch.float32, 40, 7)
        others = copy.deepcopy(given)
        ridgeline.adamw(*given, 3, rounding="stochastic", seed=seed, impl=impl)
        ridgeline.adamw(*others, 3, impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(given[0], others[0], strict=True)), impl


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_a_second_moment_does_not_stick(kernels: bool, device: str) -> None:
    """After 2,000 steps a stochastic bfloat16 moment is where float32's is; rounded to nearest it sticks."""
    if kernels and INTERPRETED:
        pytest.skip("Triton's interpreter is wrong in bfloat16")
    place = device if kernels else "cpu"
    impl = None if kernels else "torch"
    n = 512

    def train(dtype: torch.dtype, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
        dice = torch.Generator().manual_seed(0)
        p = torch.zeros(n, device=place, dtype=dtype)
        m, v = torch.zeros_like(p), torch.full_like(p, 1.0)
        for step in range(1, 2001):
            g = torch.randn(n, generator=dice).mul_(0.1).to(place, dtype)  # the mean of its squares is 0.01
            ridgeline.adamw(p, g, m, v, step, lr=1e-4, rounding=rounding, impl=impl)
        return p.float(), v.float()

    _, wanted = train(torch.float32, "nearest")
    _, stuck = train(torch.bfloat16, "nearest")
    p, moved = train(torch.bfloat16, "stochastic")
    assert abs(moved.mean() / wanted.mean() - 1) < 0.05
    assert stuck.mean() > 3 * wanted.mean()  # the steps are under half an ulp from 0.125 on
    again, _ = train(torch.bfloat16, "stochastic")
    assert torch.equal(p, again)


def test_refusals(device: str) -> None:
    p, g, m, v = lists(device, torch.float16, 5)
    for options, words in (
        ({"rounding": "up"}, 'rounding must be "nearest" or "stochastic", but is \'up\''),
        ({"rounding": "stochastic"}, "float16 is rounded to nearest only"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"masters": [t.clone() for t in p]}, "masters must be float32, but one is float16"),
        ({"masters": []}, "equally long lists"),
    ):
        with pytest.raises(RidgelineError, match=words):
            ridgeline.adamw(p, g, m, v, 1, **options)
    with pytest.raises(RidgelineError, match="rounding must be"):
        optim.AdamW([torch.nn.Parameter(p[0])], rounding="up")
