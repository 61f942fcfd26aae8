"""The recurrent ops: states and their gradients, remainders of chunks, packed sequences, segments, strong gates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
import ridgeline.device
from ridgeline import tuning
from ridgeline.boundary import INTERPRETED
from ridgeline.op import get
from ridgeline.ops.recurrent import ssd
from ridgeline.ops.recurrent.common import calls
from ridgeline.ops.recurrent.cuda import causal_product
from ridgeline.ops.recurrent.triton import channel_chunks, chunks, head_chunks
from ridgeline.select import select, why_not

pytestmark = pytest.mark.kernels

# Where a test changes how a call is cut up, another `tuning.version` keeps it from plans that other tests recorded.
KINDS = ("none", "head", "channel", "rwkv6")
H, HV, K, V = 2, 4, 6, 10


def inputs(kind: str, B: int, T: int, device: str, low: float = -1.0) -> tuple[Any, list[torch.Tensor]]:
    """Returns the public function, and its arguments with gates from `low` to 0."""
    dice = torch.Generator(device).manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    def gates(*shape: int) -> torch.Tensor:
        return low * torch.rand(shape, device=device, generator=dice)

    qkv = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)]
    if kind == "none":
        return ridgeline.linear_attention, qkv
    if kind == "rwkv6":
        return ridgeline.rwkv6, [*qkv, gates(B, T, H, K), normal(H, K)]
    return ridgeline.gated_linear_attention, [*qkv, gates(B, T, H, *(() if kind == "head" else (K,)))]


def everything(function: Any, args: list[torch.Tensor], state: torch.Tensor, impl: str, **given: Any) -> list:
    """Returns o, the final state and all gradients, the first state's last."""
    leaves = [t.detach().clone().requires_grad_() for t in (*args, state)]
    o, last = function(*leaves[:-1], initial_state=leaves[-1], return_state=True, impl=impl, **given)
    dice = torch.Generator(o.device).manual_seed(1)
    incoming = [torch.randn(t.shape, device=t.device, generator=dice).to(t.dtype) for t in (o, last)]
    return [o, last, *torch.autograd.grad((o, last), leaves, incoming)]


def exact(function: Any, args: list[torch.Tensor], state: torch.Tensor, **given: Any) -> list:
    return everything(function, [a.double() for a in args], state.double(), "naive", **given)


def close(found: list, expected: list, bound: float = 3e-6) -> None:
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm().clamp(min=1e-3)
        assert error < bound, f"result {n} is off by {error:.2e}"


def first_state(sequences: int, device: str) -> torch.Tensor:
    return torch.randn(sequences, HV, K, V, device=device, generator=torch.Generator(device).manual_seed(5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 33])
def test_states_and_their_gradients(kind: str, T: int, device: str) -> None:
    function, args = inputs(kind, 1, T, device)
    state = first_state(1, device)
    close(everything(function, args, state, "triton"), exact(function, args, state))


@pytest.mark.parametrize("kind", ["head", "channel", "rwkv6"])
def test_gates_down_to_minus_60(kind: str, device: str) -> None:
    """Nothing overflows, and gates that hardly decay stay exact beside those that forget everything."""
    function, args = inputs(kind, 1, 37, device, low=-60.0)
    keep = torch.rand(args[3].shape, device=device, generator=torch.Generator(device).manual_seed(2)) < 0.6
    args[3] = torch.where(keep, args[3] / 600, args[3])
    close(everything(function, args, first_state(1, device), "triton"), exact(function, args, first_state(1, device)))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_separate_ones(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the same if both have as many segments, which depends on how many sequences a GPU has to do."""
    function, args = inputs(kind, 1, 41, device)
    ends = [0, 17, 17, 19, 41]  # a sequence of one token alone is a step, by another kernel
    state = first_state(4, device)
    packed = everything(
        function, args, state, "triton", cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device)
    )
    close(packed, exact(function, args, state, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device)))
    monkeypatch.setattr(tuning, "version", -1)
    monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (1, -(-tokens // unit) * unit))
    packed = everything(
        function, args, state, "triton", cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device)
    )
    cut = [n for n, a in enumerate(args) if a.dim() > 2]
    for n, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            own = [a[:, start:end] if i in cut else a for i, a in enumerate(args)]
            o, last = function(*own, initial_state=state[n : n + 1], return_state=True, impl="triton")
            assert torch.equal(o, packed[0][:, start:end])
            assert torch.equal(last[0], packed[1][n])
        else:
            assert torch.equal(packed[1][n], state[n])
            assert packed[-1][n].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_segments(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in segments, as where few heads would leave most of a GPU idle."""
    function, args = inputs(kind, 1, 43, device)
    state = first_state(1, device)
    monkeypatch.setattr(tuning, "version", -1)
    monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (-(-tokens // unit), unit))
    close(everything(function, args, state, "triton"), exact(function, args, state))
    args = [a[:, :20] if a.dim() > 2 else a for a in args]
    ends = torch.tensor([0, 0, 17, 20], dtype=torch.int32, device=device)
    state = first_state(3, device)
    given = {"cu_seqlens": ends}
    close(everything(function, args, state, "triton", **given), exact(function, args, state, **given))


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoders_steps(kind: str, device: str) -> None:
    """One token at a time with the state in place gives what the whole sequence gives."""
    function, args = inputs(kind, 2, 5, device)
    state = first_state(2, device)
    o, last = function(*args, initial_state=state, return_state=True, impl="triton")
    kept, place = state.clone(), state.data_ptr()
    for t in range(5):
        step = [a[:, t : t + 1] if a.dim() > 2 else a for a in args]
        one = function(*step, initial_state=kept, inplace=True, impl="triton")
        torch.testing.assert_close(one, o[:, t : t + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, last, rtol=1e-4, atol=1e-5)
    assert state.data_ptr() == place


@pytest.mark.parametrize("kind", KINDS)
def test_reruns_give_the_same_bits(kind: str, device: str) -> None:
    function, args = inputs(kind, 1, 33, device)
    runs = [everything(function, args, first_state(1, device), "triton") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_ssd_with_everything(device: str) -> None:
    """The gradients of the small tensors too: A, D and dt's bias."""
    dice = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    args = [normal(1, 35, 4, 10), normal(1, 35, 4), -normal(4).abs(), *(normal(1, 35, 2, 6) for _ in range(2))]
    extras = {"D": normal(4), "z": normal(1, 35, 4, 10), "dt_bias": normal(4)}
    found = []
    for impl, kind in (("triton", torch.float32), ("naive", torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in (*args, *extras.values(), first_state(1, device))]
        given = dict(zip((*extras, "initial_state"), leaves[5:], strict=True))
        y, last = ridgeline.ssd(*leaves[:5], **given, return_state=True, impl=impl)
        found.append([y, last, *torch.autograd.grad(y.sin().sum() + last.sum(), leaves)])
    close(*found, bound=1e-5)


def plain_product(one: Any, turned: bool) -> None:
    """What each way of causal_product.cu computes."""
    B, T, heads, D = one.a.shape
    shape = (B, heads, D, one.c.shape[3])
    state = torch.zeros(shape, dtype=one.a.dtype)
    turn = (lambda S: S.view(*shape[:2], shape[3], shape[2]).mT) if turned else (lambda S: S.view(shape))
    state = state if one.first is None else turn(one.first).clone()
    new, read = one.factors
    for t in reversed(range(T)) if one.reverse else range(T):
        state = state + new * one.b[:, t, :, :, None] * one.c[:, t, :, None]
        one.out[:, t] = read * (state * one.a[:, t, :, :, None]).sum(-2)
    if one.last is not None:
        turn(one.last).copy_(state)


def test_roles_of_the_causal_product_on_cuda_cores() -> None:
    """The three gradients are the same product with other roles, and states transposed for two of them."""
    dice = torch.Generator().manual_seed(7)
    q, k, v, state, do, dlast = (
        torch.randn(*shape, dtype=torch.float64, generator=dice)
        for shape in ((2, 9, 3, 4), (2, 9, 3, 4), (2, 9, 3, 6), (2, 3, 4, 6), (2, 9, 3, 6), (2, 3, 4, 6))
    )
    leaves = [t.requires_grad_() for t in (q, k, v, state)]
    wanted = ridgeline.op.get("linear_attention").reference(
        q, k, v, initial_state=state, return_state=True, scale=0.7
    )  # fmt: skip
    grads = torch.autograd.grad(wanted, leaves, (do, dlast))
    q, k, v, state = (t.detach() for t in leaves)
    o, last, made = torch.empty_like(v), torch.empty_like(state), [torch.empty_like(t) for t in leaves]
    inputs = q, k, v, None, None, state, None, 0.7, "ieee"
    causal_product.fwd(plain_product, o, last, *inputs)
    causal_product.bwd(plain_product, *made[:3], None, None, made[3], do, dlast, *inputs)
    for found, right in zip((o, last, *made), (*wanted, *grads), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", list(causal_product.WAYS))
@pytest.mark.parametrize(("T", "K", "V"), [(1, 32, 64), (37, 64, 64), (500, 128, 32), (130, 96, 128)])
@pytest.mark.parametrize("stated", [False, True])
def test_the_causal_product_on_cuda_cores(impl: str, T: int, K: int, V: int, stated: bool, device: str) -> None:
    dice = torch.Generator(device).manual_seed(T)
    shapes = (2, T, 3, K), (2, T, 3, K), (2, T, 3, V), (2, 3, K, V)
    leaves = [torch.randn(*shape, device=device, generator=dice) for shape in shapes]
    found = []
    for name, kind in ((impl, torch.float32), (impl, torch.float32), ("naive", torch.float64)):
        args = [t.to(kind).requires_grad_() for t in (leaves if stated else leaves[:3])]
        state = args[3] if stated else None
        made = ridgeline.linear_attention(*args[:3], initial_state=state, return_state=True, scale=K**-0.5, impl=name)
        loss = made[0].sin().sum() + (made[1].cos().sum() if stated else 0)
        found.append([*made, *torch.autograd.grad(loss, args)])
    close(found[0], found[2], 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))


def test_ssd_by_name_is_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`impl="torch"` runs that rung, not the recurrence."""
    dice = torch.Generator().manual_seed(3)
    x, dt, B, C = (torch.randn(*shape, generator=dice) for shape in ((1, 9, 4, 10), (1, 9, 4), *((1, 9, 2, 6),) * 2))
    A, ends = -torch.rand(4, generator=dice), torch.tensor([0, 4, 9], dtype=torch.int32)
    wanted = ridgeline.ssd(x, dt, A, B, C, impl="naive")
    monkeypatch.setattr(ssd, "recurrence", None)
    torch.testing.assert_close(ridgeline.ssd(x, dt, A, B, C, impl="torch"), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ridgeline.RidgelineError, match="packed"):
        ridgeline.ssd(x, dt, A, B, C, cu_seqlens=ends, impl="torch")
    long = torch.empty(1, 4200, 64, 1), torch.empty(1, 4200, 64), torch.empty(64), *(torch.empty(1, 4200, 1, 1),) * 2
    with pytest.raises(ridgeline.RidgelineError, match=f"got {64 * 4200**2}"):  # in all heads
        ridgeline.ssd(*long, impl="torch")


@pytest.mark.parametrize("kind", ["channel", "rwkv6"])
@pytest.mark.parametrize("case", ["1", "17", "33 in segments", "packed", "packed in segments", "down to -60", "wide"])
def test_a_gate_per_channel_in_half_precision(
    kind: str, case: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is another one: remainders, packed sequences, segments, strong gates, gates in float32."""
    T = int(case.split()[0]) if case[0].isdigit() else 41
    function, args = inputs(kind, 1, T, device, low=-60.0 if "60" in case else -1.0)
    if "60" in case:
        keep = torch.rand(args[3].shape, device=device, generator=torch.Generator(device).manual_seed(2)) < 0.6
        args[3] = torch.where(keep, args[3] / 600, args[3])
    args = [a if case == "wide" and n == 3 else a.half() for n, a in enumerate(args)]
    given, state = {}, first_state(1, device)
    if "packed" in case:
        given = {"cu_seqlens": torch.tensor([0, 17, 17, 19, 41], dtype=torch.int32, device=device)}
        state = first_state(4, device)
    if "segments" in case:
        monkeypatch.setattr(tuning, "version", -1)
        monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (-(-tokens // unit), unit))
    found, again = (everything(function, args, state, "triton", **given) for _ in range(2))
    close(found, exact(function, args, state, **given), 3e-3)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("kind", ["channel", "rwkv6"])
@pytest.mark.parametrize("low", [-0.2, -1.0])
def test_chunks_whose_pairs_are_one_product(
    kind: str, low: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chunk's decay and its inverse are in range its rows need no levels: here in all chunks, or in the last,
    short one. bfloat16 does so by itself; float16 has room for a few halvings only."""
    function, args = inputs(kind, 1, 41, device, low)
    args = [a.half() for a in args]
    monkeypatch.setattr(channel_chunks, "span", lambda dtype: 9)
    found = everything(function, args, first_state(1, device), "triton")
    close(found, exact(function, args, first_state(1, device)), 3e-3)
    for T in (32, 37):  # and in a short chunk's first half
        leaves = [a[:, :T].detach().requires_grad_() if a.dim() > 2 else a for a in args]
        o = function(*leaves, impl="triton")
        dg = torch.autograd.grad(o, leaves[3], torch.randn_like(o))[0]
        assert dg[:, 1].any()
        assert not dg[:, 0].any()  # nothing before it is decayed
        assert kind != "rwkv6" or not dg[:, -1].any()  # nothing after it sees what it decays


def stay_in_memory(kind: str, case: str, impl: str, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No access is beyond a tensor, and no result depends on memory that nothing has written."""
    import bounds

    function, args = inputs(kind, 1, 41 if case == "packed" else int(case), "cpu")
    args = [a.half() for a in args]
    given, state = {}, first_state(1, "cpu")
    if case == "packed":
        given = {"cu_seqlens": torch.tensor([0, 17, 17, 19, 41], dtype=torch.int32)}
        state = first_state(4, "cpu")
        monkeypatch.setattr(tuning, "version", -1)
        monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (-(-tokens // unit), unit))
    with bounds.strict():
        found = everything(function, args, state, impl, **given)
    close(found, exact(function, args, state, **given), bound)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's accesses are looked at")
@pytest.mark.parametrize("kind", ["channel", "rwkv6"])
@pytest.mark.parametrize("case", ["16", "17", "packed"])
def test_a_gate_per_channel_stays_in_its_memory(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_memory(kind, case, "triton", 3e-3, monkeypatch)


CASES_OF_HEADS = [
    *("2", "15", "16", "17", "32", "33", "49", "70 in segments"),
    *("packed", "packed in segments", "down to -60", "a gate in float32"),
]


@pytest.mark.parametrize("kind", ["none", "head"])
@pytest.mark.parametrize("case", CASES_OF_HEADS)
def test_all_chunks_side_by_side(kind: str, case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rung whose states are written out: blocks and chunks of every remainder, both blocks' gates, first and last
    states, and the same bits again."""
    T = int(case.split()[0]) if case[0].isdigit() else 41
    function, args = inputs(kind, 1, T, device, low=-60.0 if "60" in case else -1.0)
    if "60" in case and kind == "head":
        keep = torch.rand(args[3].shape, device=device, generator=torch.Generator(device).manual_seed(2)) < 0.6
        args[3] = torch.where(keep, args[3] / 600, args[3])
    args = [a if "float32" in case and n == 3 else a.half() for n, a in enumerate(args)]
    given, state = {}, first_state(1, device)
    if "packed" in case:
        given = {"cu_seqlens": torch.tensor([0, 17, 17, 19, 41], dtype=torch.int32, device=device)}
        state = first_state(4, device)
    if "segments" in case:
        monkeypatch.setattr(tuning, "version", -1)
        monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (-(-tokens // unit), unit))
    found, again = (everything(function, args, state, "triton_chunks", **given) for _ in range(2))
    close(found, exact(function, args, state, **given), 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("kind", ["none", "head"])
def test_packed_sequences_side_by_side_equal_separate_ones(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args = inputs(kind, 1, 63, device)
    args, state, ends = [a.half() for a in args], first_state(4, device), [0, 37, 37, 39, 63]
    monkeypatch.setattr(tuning, "version", -1)
    monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (1, -(-tokens // unit) * unit))
    given = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}
    leaves = [a.detach().requires_grad_() for a in args]
    o, last = function(*leaves, initial_state=state, return_state=True, impl="triton_chunks", **given)
    incoming = torch.randn(o.shape, device=device, generator=torch.Generator(device).manual_seed(1)).half()
    grads = torch.autograd.grad(o, leaves, incoming)
    for n, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            assert torch.equal(last[n], state[n])
            continue
        own = [a[:, start:end].detach().requires_grad_() for a in args]
        first = state[n : n + 1]
        one, final = function(*own, initial_state=first, return_state=True, impl="triton_chunks")
        assert torch.equal(one, o[:, start:end])
        assert torch.equal(final[0], last[n])
        for mine, all_of_them in zip(torch.autograd.grad(one, own, incoming[:, start:end]), grads, strict=True):
            assert torch.equal(mine, all_of_them[:, start:end])


@pytest.mark.parametrize("skip", [False, True])
def test_each_tokens_factor_of_v(skip: bool, device: str) -> None:
    """The kernels' step sizes weigh v's rows, D adds v to o, and gradients of q and k are sums of each head's part."""
    function, args = inputs("head", 1, 49, device)
    q, k, _, g = (a.half() for a in args)
    q, k, dice = q[:, :, :1], k[:, :, :1], torch.Generator(device).manual_seed(3)
    v = torch.randn(1, 49, 4, V, device=device, generator=dice).half()
    g = g[:, :, :1].expand(1, 49, 4).contiguous()
    step, factor = torch.rand(1, 49, 4, device=device, generator=dice) + 0.5, torch.randn(4, device=device)
    leaves = [t.double().requires_grad_() for t in (q, k, v, g, factor, step)]
    own = *(t.expand(1, 49, 4, K) for t in leaves[:2]), leaves[2] * leaves[5].unsqueeze(-1), leaves[3]
    expected, final = function(*own, scale=K**-0.5, return_state=True, impl="naive")
    expected = expected + leaves[2] * leaves[4].unsqueeze(-1) * skip
    do = torch.randn(expected.shape, device=device, generator=torch.Generator(device).manual_seed(1)).half()
    call = chunks.Call(q, k, v, g, None, None, None, K**-0.5, "ieee", step, factor if skip else None)
    o, last = torch.empty_like(v), torch.empty(1, 4, K, V, device=device)
    head_chunks.forward(o, last, call)
    grads = [torch.empty(t.shape, device=device) for t in leaves]
    head_chunks.backward((*grads[:4], grads[4] if skip else None, grads[5], None), do, None, call)
    exact_ones = torch.autograd.grad(expected, leaves, do.double())
    if not skip:
        exact_ones[4].copy_(grads[4].fill_(0))
    close([o, last, *grads], [expected, final, *exact_ones], 1e-3)


class Held(TorchDispatchMode):
    """The most bytes that tensors allocated inside hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(made, torch.Tensor):
            self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
            self.alive.append((StorageWeakRef(made.untyped_storage()), made.untyped_storage().nbytes()))
            self.most = max(self.most, sum(size for _, size in self.alive))
        return made


def test_memory_of_backward_with_one_group() -> None:
    """MiB over the inputs at ssd's size of 64 heads in bfloat16 for an H200: o, the gradients and what backward adds.
    The parts of dC and of dB take 512, one after the other."""
    (x, dt, _, b, c), _ = get("ssd").case("8x4096x64x64, 1 group of 128").make("bfloat16", "meta")
    gates = dt.detach().float(), dt.detach().float()
    made = [torch.empty_like(t) for t in (c, b, x, *gates)]
    with ridgeline.device.pretend("h200"), Held() as held:
        ssd._chunks_bwd(*made, None, None, x, None, c, b, x, *gates, None, None, None, 1.0, "ieee")
    total = held.most + sum(t.nbytes for t in (x, *made))
    assert total < 1740 << 20


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's accesses are looked at")
@pytest.mark.parametrize("kind", ["none", "head"])
@pytest.mark.parametrize("case", ["16", "33", "packed"])
def test_all_chunks_side_by_side_stay_in_their_memory(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_memory(kind, case, "triton_chunks", 1e-3, monkeypatch)


def test_which_calls_have_all_chunks_side_by_side() -> None:
    """By default on Hopper: long sequences with heads for half of the GPU, in half precision, with a gate per head.
    Gluon's chains take those of 128 columns without step sizes."""

    def serving(sizes: tuple[int, ...], kind: torch.dtype, ends: int = 0, channels: int = 0) -> set[str]:
        B, T, heads, width = sizes
        rows = torch.empty(sizes, dtype=kind, device="meta")
        one = torch.empty((B, T, 1, width), dtype=kind, device="meta")
        gate = torch.empty((B, T, heads, *[channels] * (channels > 0)), device="meta")
        packed = torch.empty(ends + 1, dtype=torch.int32, device="meta") if ends else None
        calls = [("gated_linear_attention", [rows, rows, rows, gate, None, None, packed, 1.0, "ieee"], (rows,) * 3)]
        if not channels:
            some = [one, one, rows, gate, gate, None, None, packed, 1.0, "ieee"]
            calls.append(("ssd", some, (rows, gate, gate[0, 0], one, one)))
        names = set()
        for name, inputs, public in calls:
            names.add(select(get(name), None, *inputs, kernels=True).name)
            names.add(select(get(name), None, rows, None, *inputs, direction="bwd", kernels=True).name)
            rung = get(name).implementations["triton_chunks"]
            public = (*public, gate) if len(public) == 3 else public
            reason = rung.left("fwd", *public, cu_seqlens=packed)
            assert reason is None or names == {"triton"}
            assert not any(c.isdigit() for c in reason or "")
        return names

    half = torch.bfloat16
    with ridgeline.device.pretend("sm_90"):
        assert serving((8, 4096, 16, 128), half) == {"gluon", "triton_chunks"}
        assert serving((8, 4096, 16, 64), half) == {"triton_chunks"}
        assert serving((1, 32768, 16, 128), half, 8) == {"gluon", "triton_chunks"}
        assert serving((8, 4096, 16, 128), half, channels=128) == {"triton"}  # a gate per channel
        assert serving((8, 4096, 16, 256), half) == {"triton"}  # too wide
        assert serving((8, 4096, 16, 128), torch.float32) == {"triton"}
        assert serving((8, 4096, 16, 128), torch.float16) == {"gluon", "triton_chunks"}
        assert serving((64, 1, 32, 128), half) == {"triton"}  # a decoder's step
        assert serving((64, 256, 32, 128), half) == {"triton"}  # short
        assert serving((1, 32768, 16, 128), half, 128) == {"triton"}  # short ones, packed
        assert serving((1, 32768, 4, 128), half) == {"triton"}  # few heads
        q = torch.empty((8, 4096, 16, 128), dtype=half, device="meta")
        inputs = q, q, q, None, None, None, None, 1.0, "ieee"
        assert select(get("linear_attention"), None, *inputs, kernels=True).name == "gluon"
        backward = (get("linear_attention"), None, q, None, *inputs)
        assert select(*backward, direction="bwd", kernels=True).name == "gluon"
        rows, gate = (torch.empty((8, 4096, 64, *more), dtype=half, device="meta") for more in ([64], []))
        for shared, expected in ((1, "gluon_chunks"), (16, "triton_chunks")):  # heads that share B and C
            one = torch.empty((8, 4096, shared, 128), dtype=half, device="meta")
            inputs = one, one, rows, gate, gate, None, None, None, 1.0, "ieee"
            assert select(get("ssd"), None, *inputs, kernels=True).name == expected
            assert select(get("ssd"), None, rows, None, *inputs, direction="bwd", kernels=True).name == expected
    with ridgeline.device.pretend("sm_80"):
        assert serving((8, 4096, 16, 128), half) == {"triton"}


def test_all_pairs_of_tokens_have_a_bound() -> None:
    """The tolerance of long calls comes from the recurrence, since all pairs would not fit in memory."""
    args, _ = get("ssd").case("8x4096x64x64, 1 group of 128").make("bfloat16", "meta")
    assert "pairs of tokens" in str(why_not(get("ssd").implementations["torch"], *args))


def test_which_parts_of_gradients_are_bfloat16() -> None:
    """Those of bfloat16 data from eight value heads a head on; a head alone needs no parts."""
    half = torch.bfloat16
    for shared, heads, dtype, wanted in (
        (1, 8, half, half), (1, 64, half, half), (2, 16, half, half), (1, 7, half, torch.float32),
        (2, 14, half, torch.float32), (4, 8, half, torch.float32), (1, 64, torch.float16, torch.float32),
        (1, 64, torch.float32, torch.float32),
    ):  # fmt: skip
        grad = torch.empty(2, 5, shared, 16, dtype=dtype, device="meta")
        parts = calls.parts_of(grad, heads, dtype)
        assert (parts.shape, parts.dtype) == ((2, 5, heads, 16), wanted), (shared, heads, dtype)
        assert calls.parts_of(grad, heads).dtype == torch.float32  # no dtype given
        assert calls.parts_of(grad, shared, dtype) is grad


def test_what_all_chunks_side_by_side_refuse(device: str) -> None:
    wide, long = torch.randn(1, 4, 1, 160, device=device).half(), torch.randn(1, 4, 2, 8, device=device).half()
    for call, words in (
        (lambda: ridgeline.linear_attention(wide, wide, wide, impl="triton_chunks"), "at most 128 columns, got 160"),
        (lambda: ridgeline.gated_linear_attention(long, long, long, -long.abs(), impl="triton_chunks"), "per channel"),
        (lambda: ridgeline.linear_attention(*(long.float(),) * 3, impl="triton_chunks"), "float16, bfloat16"),
    ):
        with pytest.raises(ridgeline.RidgelineError, match=words):
            call()
