"""The delta rules: states and their gradients, remainders of chunks, packed sequences, strong gates, beta up to 2."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import ridgeline
import test_gates
from ridgeline import device as devices
from ridgeline import tuning
from ridgeline.op import RidgelineError
from ridgeline.ops.recurrent.triton import delta_chunks
from test_recurrent import Held, close, everything, exact, first_state

pytestmark = pytest.mark.kernels

KINDS = ("head", "channel", "rwkv7")
H, HV, K, V = 2, 4, 6, 10


def inputs(kind: str, B: int, T: int, device: str, low: float = -1.0) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
    """Returns the public function, its arguments with gates from `low` to 0 and beta up to 2, and its options."""
    dice = torch.Generator(device).manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=dice)

    if kind == "rwkv7":
        ways = [0.7 * torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in range(2)]
        gates = low * uniform(B, T, H, K)
        return ridgeline.rwkv7, [normal(B, T, H, K), gates, normal(B, T, H, K), normal(B, T, HV, V), *ways], {}
    qkv = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)]
    gates = low * uniform(B, T, *((HV,) if kind == "head" else (H, K)))
    return ridgeline.gated_delta_rule, [*qkv, gates, 2 * uniform(B, T, H)], {"normalize": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 17, 33])
def test_states_and_their_gradients(kind: str, T: int, device: str) -> None:
    function, args, given = inputs(kind, 1, T, device)
    state = first_state(1, device)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_down_to_minus_60(kind: str, device: str) -> None:
    """Nothing overflows, and gates that hardly decay stay exact beside those that forget everything."""
    function, args, given = inputs(kind, 1, 37, device, low=-60.0)
    at = 1 if kind == "rwkv7" else 3
    keep = torch.rand(args[at].shape, device=device, generator=torch.Generator(device).manual_seed(2)) < 0.6
    args[at] = torch.where(keep, args[at] / 600, args[at])
    state = first_state(1, device)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_separate_ones(kind: str, device: str) -> None:
    function, args, given = inputs(kind, 1, 41, device)
    ends, state = [0, 0, 17, 17, 19, 41], first_state(5, device)  # one token alone is a step, by another kernel
    packing = torch.tensor(ends, dtype=torch.int32, device=device)
    packed = everything(function, args, state, "triton", cu_seqlens=packing, **given)
    close(packed, exact(function, args, state, cu_seqlens=packing, **given))
    for n, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            own = [a[:, start:end] for a in args]
            o, last = function(*own, initial_state=state[n : n + 1], return_state=True, impl="triton", **given)
            assert torch.equal(o, packed[0][:, start:end])
            assert torch.equal(last[0], packed[1][n])
        else:
            assert torch.equal(packed[1][n], state[n])
            assert packed[-1][n].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoders_steps(kind: str, device: str) -> None:
    """One token at a time with the state in place gives what the whole sequence gives."""
    function, args, given = inputs(kind, 2, 4, device)
    state = first_state(2, device)
    o, last = function(*args, initial_state=state, return_state=True, impl="triton", **given)
    for t in range(4):
        step = [a[:, t : t + 1] for a in args]
        one = function(*step, initial_state=state, inplace=True, impl="triton", **given)
        torch.testing.assert_close(one, o[:, t : t + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_reruns_give_the_same_bits(kind: str, device: str) -> None:
    function, args, given = inputs(kind, 1, 33, device)
    runs = [everything(function, args, first_state(1, device), "triton", **given) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_and_several_slices(kind: str, device: str) -> None:
    """(B, heads, T, columns) in memory, and more channels and columns than a program takes at a time."""
    function, args, given = inputs(kind, 1, 19, device)
    wide = [torch.cat([a] * 6, -1) if a.dim() == 4 else a for a in args]
    turned = [a.transpose(1, 2).contiguous().transpose(1, 2) if a.dim() == 4 else a for a in wide]
    state = torch.randn(1, HV, 6 * K, 6 * V, device=device, generator=torch.Generator(device).manual_seed(5)) / 6
    found = everything(function, turned, state, "triton", **given)
    plain = everything(function, wide, state, "triton", **given)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    close(found, exact(function, wide, state, **given))


def test_rows_of_zeros_and_beta_of_zero(device: str) -> None:
    """Normalized rows of zeros stay zeros, and a beta of zero changes nothing; both have their gradients."""
    function, args, given = inputs("head", 1, 20, device)
    args[0][:, 3] = 0
    args[1][:, 3:5] = 0
    args[4][:, 7:9] = 0
    state = first_state(1, device)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given))


def test_equal_keys(device: str) -> None:
    """Chunks of one key, whose systems have the largest inverses, with beta of 2."""
    function, args, given = inputs("head", 1, 40, device, low=0.0)
    args[1], args[4] = args[1][:, :1].expand(1, 40, H, K), torch.full_like(args[4], 2.0)
    state = first_state(1, device)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given), 5e-5)


def test_more_sequences_than_a_grid_has(device: str) -> None:
    """A grid's second axis ends at 65,535."""
    q, beta = torch.zeros(65536, 2, 1, 16, device=device), torch.zeros(65536, 2, 1, device=device)
    with pytest.raises(RidgelineError, match="at most 65535 sequences times heads, got 65536 times 1"):
        ridgeline.gated_delta_rule(q, q, q, beta, beta, impl="triton")


def in_segments(monkeypatch: pytest.MonkeyPatch, chunks: int = 1) -> None:
    monkeypatch.setattr(tuning, "version", -1)  # no plan that another test recorded
    monkeypatch.setattr(delta_chunks, "span", lambda gpu, programs, most, K: chunks)


def with_halvings(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(tuning, "version", -10 - most)
    monkeypatch.setattr(delta_chunks, "most_halvings", lambda dtype: most)


@pytest.mark.parametrize("kind", KINDS)
def test_segments(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in segments, as where few heads would leave most of a GPU idle: one alone, then packed ones, of which
    some are empty and some have one segment."""
    in_segments(monkeypatch)
    function, args, given = inputs(kind, 1, 70, device, low=-0.1)
    state = first_state(1, device)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given), 5e-6)
    ends, state = torch.tensor([0, 0, 41, 41, 57, 70], dtype=torch.int32, device=device), first_state(5, device)
    found = everything(function, args, state, "triton", cu_seqlens=ends, **given)
    close(found, exact(function, args, state, cu_seqlens=ends, **given), 5e-6)
    assert torch.equal(found[1][0], state[0])
    again = everything(function, args, state, "triton", cu_seqlens=ends, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_segments_without_states(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in segments that begins with a state of zeros and gives none back."""
    in_segments(monkeypatch)
    function, args, given = inputs(kind, 1, 70, device, low=-0.1)
    leaves = [[a.to(dtype).requires_grad_() for a in args] for dtype in (args[0].dtype, torch.float64)]
    found, exactly = [
        [o := function(*a, impl=impl, **given), *torch.autograd.grad(o, a, torch.ones_like(o))]
        for a, impl in zip(leaves, ("triton", "naive"), strict=True)
    ]
    close(found, exactly, 5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_and_packed_sequences_in_half_precision(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in float16, with halvings so that rows meet in one product, in blocks, and by levels."""
    function, args, given = inputs(kind, 1, 150, device, low=-0.1)
    args, state = [a.half() for a in args], first_state(1, device)
    with_halvings(monkeypatch, 6)
    whole = everything(function, args, state, "triton", **given)
    in_segments(monkeypatch, 2)
    cut = everything(function, args, state, "triton", **given)
    expected = exact(function, args, state, **given)
    close(cut, expected, 2e-3)
    close(whole, expected, 2e-3)
    assert not all(torch.equal(a, b) for a, b in zip(cut, whole, strict=True))
    ends, state = torch.tensor([0, 0, 99, 99, 131, 150], dtype=torch.int32, device=device), first_state(5, device)
    found = everything(function, args, state, "triton", cu_seqlens=ends, **given)
    close(found, exact(function, args, state, cu_seqlens=ends, **given), 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shared_memory_of_backward(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward in parts, whose gradients of states lie where states have been read; L, P, U and rows with their decays
    lie in dq and dk, whose last chunk is not whole. The bits are those of all chunks at once in memory of their own."""
    dice = torch.Generator(device).manual_seed(3)

    def results(kind: str) -> list[torch.Tensor]:
        dice.manual_seed(3)
        args = [torch.randn(1, 70, 2, 64, device=device, generator=dice) for _ in range(3)]
        state = torch.randn(1, 2, 64, 64, device=device, generator=dice)
        gates = -torch.rand(1, 70, 2, *([] if kind == "head" else [64]), device=device, generator=dice) / 8
        if kind == "rwkv7":
            ways = [torch.nn.functional.normalize(args[n], dim=-1) for n in (0, 1)]
            given = [args[0], gates, *args[1:], *ways]
            return everything(ridgeline.rwkv7, [a.to(dtype) for a in given], state, "triton")
        beta = 2 * torch.rand(1, 70, 2, device=device, generator=dice)
        given = [a.to(dtype) for a in (*args, gates, beta)]
        return everything(ridgeline.gated_delta_rule, given, state, "triton", normalize=True)

    for kind in KINDS:
        with_halvings(monkeypatch, 6)
        monkeypatch.setattr(tuning, "version", -2)
        monkeypatch.setattr(delta_chunks, "part", lambda chunks, size: 2)
        shared = results(kind)
        monkeypatch.setattr(tuning, "version", -3)
        monkeypatch.setattr(delta_chunks, "part", lambda chunks, size: 0)
        monkeypatch.setattr(delta_chunks, "_in", lambda *_: None)
        assert all(torch.equal(a, b) for a, b in zip(shared, results(kind), strict=True)), kind
        monkeypatch.undo()


@pytest.mark.parametrize(("gate", "most"), [(1, 1000), (2, 1700)])
def test_memory_of_backward(gate: int, most: int) -> None:
    """MiB over the inputs at 8 x 4096 x 16 x 128 in bfloat16 for an H200: o, do, gradients and what backward adds."""
    B, T, H, D = 8, 4096, 16, 128

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, do, dq, dk, dv, o = (empty(B, T, H, D) for _ in range(8))
    g, beta = empty(B, T, H, *([D] if gate == 2 else [])), empty(B, T, H)
    dg, dbeta = (empty(*t.shape, dtype=torch.float32) for t in (g, beta))
    with devices.pretend("h200"), Held() as held:
        made = dq, dk, dv, dg, dbeta, None, None, None
        inputs = q, k, v, g, beta, None, None, None, None, True, 1.0, "ieee"
        delta_chunks.delta_bwd(*made, do, None, *inputs)
    total = held.most + sum(t.nbytes for t in (o, do, dq, dk, dv, dg, dbeta))
    assert total < most << 20


@pytest.mark.parametrize("kind", ["channel", "rwkv7"])
@pytest.mark.parametrize("low", [-0.15, -3.0])
def test_rows_that_meet_in_one_product(kind: str, low: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16's form, in float16 with as many halvings as that has room for: with weak gates whole chunks, the last
    one by levels, with strong ones blocks of few rows beside levels."""
    function, args, given = inputs(kind, 1, 70, device, low)
    args, state = [a.half() for a in args], first_state(1, device)
    with_halvings(monkeypatch, 6)
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given), 2e-3)


@pytest.mark.parametrize("kind", ["channel", "rwkv7"])
@pytest.mark.parametrize("packed", [False, True])
def test_strong_gates_in_some_chunks(kind: str, packed: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most chunks meet in one product, by kernels of their own; one has strong gates in one channel, one is short. The
    kernels for those two look at one chunk at a time or at four, with the same bits."""
    function, args, given = inputs(kind, 1, 140, device, -0.1)
    args, state = [a.half() for a in args], first_state(4 if packed else 1, device)
    args[1 if kind == "rwkv7" else 3][:, 40:45, :, 2] *= 300
    if packed:
        given = given | {"cu_seqlens": torch.tensor([0, 0, 101, 101, 140], dtype=torch.int32, device=device)}
    expected, found = exact(function, args, state, **given), []
    for count in (1, 4):
        with_halvings(monkeypatch, 6)
        monkeypatch.setattr(tuning, "version", -30 - count)
        monkeypatch.setattr(delta_chunks, "apart", lambda gpu, grid, count=count: count)
        found.append(everything(function, args, state, "triton", **given))
        close(found[-1], expected, 2e-3)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["channel", "rwkv7"])
@pytest.mark.parametrize("halvings", [0, 6])
def test_what_comes_later_changes_nothing(
    kind: str, halvings: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers in later rows of a chunk, and weaker gates there, change no bit of an earlier output."""
    function, args, given = inputs(kind, 1, 37, device, -0.15)
    args = [a.half() for a in args]
    with_halvings(monkeypatch, halvings)
    expected = function(*args, impl="triton", **given)
    gate = 1 if kind == "rwkv7" else 3
    for n, arg in enumerate(args):
        arg[:, 20:] *= 0.5 if n == gate else -1.5
    found = function(*args, impl="triton", **given)
    assert torch.equal(found[:, :20], expected[:, :20])
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("ends", [None, [0, 1, 43, 97]])
def test_rows_that_are_one_number_times_another(ends: list[int] | None, device: str) -> None:
    """RWKV-7: the last row's gradient of b is (do . u) r, and the second row's of a is (v . dx) k of the first row.
    Where the first cancels to a thousandth, the gradients are still right."""
    dice, T, half = torch.Generator(device).manual_seed(0), 97, torch.float16
    given = [torch.randn(1, T, 2, 16, device=device, generator=dice) for _ in range(7)]
    given[1] = -0.6 * given[1].sigmoid()
    for n in (4, 5):
        given[n] = 0.7 * torch.nn.functional.normalize(given[n], dim=-1)
    args, do = [t.to(half) for t in given[:6]], given[6].to(half)
    sequences = list(pairwise(ends or [0, T]))
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)

    def run(impl: str, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.to(kind).requires_grad_() for t in args]
        o = ridgeline.rwkv7(*leaves, cu_seqlens=cu_seqlens, impl=impl)
        assert isinstance(o, torch.Tensor)
        return torch.autograd.grad(o, leaves, do.to(kind))

    def without(x: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        """x without its part along a vector, but for a thousandth of its length."""
        way = torch.nn.functional.normalize(along.double(), dim=-1)
        return (x.double() - (x.double() * way).sum(-1, keepdim=True) * way + 1e-3 * x.double().norm() * way).to(half)

    for first, beyond in sequences:
        if beyond - first > 1:
            do[0, beyond - 1] = without(do[0, beyond - 1], _last_u(args, first, beyond))
    numbers, found = run("naive", torch.float64), run("triton", half)
    for first, beyond in sequences:
        if beyond - first > 1:
            for n, row in ((4, first + 1), (5, beyond - 1)):
                error = (found[n].double() - numbers[n])[0, row].norm(dim=-1) / numbers[n][0, row].norm(dim=-1)
                assert (error < 5e-3).all(), (n, row, error)


def _last_u(args: list[torch.Tensor], first: int, beyond: int) -> torch.Tensor:
    _, w, k, v, a, b = [t[0].double() for t in args]
    S = torch.zeros(2, 16, 16, dtype=torch.float64, device=w.device)
    for t in range(first, beyond):
        u = torch.einsum("hk,hkv->hv", a[t], S)
        S = S * w[t].exp()[..., None] + b[t][..., None] * u[:, None] + k[t][..., None] * v[t][:, None]
    return u


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["delta, per channel", "rwkv7"])
@pytest.mark.parametrize("low", [-0.3, -1.0, -5.0, -60.0])
def test_gates_of_all_strengths_in_bfloat16(kind: str, low: float, device: str) -> None:
    """Whole chunks that meet in one product, blocks of 32 to 8 rows, and levels alone, with tokens left over."""
    name, specs, given = test_gates.long(kind, 300)
    dice = torch.Generator(device).manual_seed(3)
    args = [s.make(torch.bfloat16, device, dice) for s in specs]
    at = 1 if kind == "rwkv7" else 3
    keep = torch.rand(args[at].shape, device=device, generator=dice) < (0.6 if low < -5 else 0.0)
    made = low * torch.rand(args[at].shape, device=device, generator=dice)
    args[at] = torch.where(keep, made / 600, made).bfloat16().requires_grad_()
    function = getattr(ridgeline, name)

    def run(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [a.detach().to(dtype).requires_grad_() for a in args]
        o = function(*leaves, impl=impl, **given)
        incoming = torch.randn(o.shape, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16()
        return [o.detach(), *torch.autograd.grad(o, leaves, incoming.to(dtype))]

    for n, (one, other) in enumerate(zip(run("triton", torch.bfloat16), run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm()
        assert error < 0.012, f"result {n} is off by {error:.2e}"
