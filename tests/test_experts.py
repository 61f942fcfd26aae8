"""grouped_matmul, topk_gate and moe beyond their cases: odd groups, ties, rows that are none, buffers, graphs."""

import math
from typing import Any

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline import device as devices
from ridgeline.boundary import observe
from ridgeline.lab.analysis import inspect
from ridgeline.lab.measurement.law import Law
from ridgeline.op import Op, get
from ridgeline.ops.experts import _products
from ridgeline.select import select, why_not

pytestmark = pytest.mark.kernels


def ends_of(sizes: list[int], device: str) -> torch.Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def holds(op: Op, *args: Any, impl: str = "triton", **kwargs: Any) -> None:
    """Fails unless a rung passes the law and repeats its bits."""
    law, rung = Law(op, list(args), kwargs), op.implementations[impl]
    first, again = law.run(rung), law.run(rung)
    verdict = law.judge(*first)
    assert verdict.ok, verdict.reason()
    for one, other in zip([*first[0], *first[1]], [*again[0], *again[1]], strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "sizes", [[0, 0, 0], [0, 70, 0], [1, 1, 1], [33, 0, 31, 6], [3] * 9], ids=lambda s: " ".join(map(str, s))
)
def test_groups(sizes: list[int], dtype: torch.dtype, device: str) -> None:
    T, G, K, N = sum(sizes) + 2, len(sizes), 37, 21  # rows of no multiple of 16 bytes
    x, w, bias = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((T, K), (G, K, N), (G, N)))
    holds(get("grouped_matmul"), x, w, ends_of(sizes, device), bias=bias)
    y = ridgeline.grouped_matmul(x, w, ends_of(sizes, device), impl="triton")
    y.float().square().sum().backward()
    assert not y[sum(sizes) :].any()
    assert not x.grad[sum(sizes) :].any()
    for g, size in enumerate(sizes):
        assert bool(w.grad[g].any()) == (size > 0)


def test_long_sums(device: str) -> None:
    """Long sums in float32 are sums of sums."""
    x = torch.randn(530, 530, device=device).requires_grad_()
    w = torch.randn(1, 530, 5, device=device).requires_grad_()
    holds(get("grouped_matmul"), x, w, ends_of([529], device))


def test_short_float32_sums_are_rounded_once(device: str) -> None:
    """Torch's own sums, in another order, break the law in one of ten draws where all sums are short."""
    sizes = [5, 0, 9, 4]
    x, w, bias, dy = (torch.randn(s, device=device) for s in ((18, 33), (4, 33, 32), (4, 32), (18, 32)))
    y = ridgeline.grouped_matmul(
        x.requires_grad_(), w.requires_grad_(), ends_of(sizes, device), bias=bias, impl="triton"
    )
    found = [y, *torch.autograd.grad(y, (x, w), dy)]
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    parts = [row @ wide[1][g] + bias[g].double() for g, row in enumerate(wide[0].split(sizes))]
    exact = [torch.cat(parts), *torch.autograd.grad(torch.cat(parts), wide, dy.double())]
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other.float())


def test_where_float32_sums_are_made_in_float64() -> None:
    x, few = torch.empty(0), _products.FEW
    for terms, results, how in ((64, few, "double"), (65, few, "ieee"), (64, few + 1, "ieee")):
        assert _products.dot_precision(x, "ieee", terms, results) == how
    assert [_products.dot_precision(t, "tf32", 8, 8) for t in (x, x.half())] == ["tf32", "tf32"]
    with devices.pretend("mi300x"):
        assert _products.dot_precision(x, "ieee", 8, 8) == "ieee"


@pytest.mark.parametrize("impl", ["naive", "triton"])
@pytest.mark.parametrize("transposed", [False, True])
def test_main_grad(impl: str, transposed: bool, device: str) -> None:
    sizes, K, N = [5, 0, 9], 12, 10
    x = torch.randn(16, K, device=device)
    w = torch.randn(3, K, N, device=device, requires_grad=True)
    buffer = torch.randn((3, N, K) if transposed else (3, K, N), device=device)
    buffer = buffer.mT if transposed else buffer
    dy, before = torch.randn(16, N, device=device), buffer.clone()
    ridgeline.grouped_matmul(x, w, ends_of(sizes, device), impl=impl).backward(dy)
    wanted, w.grad = w.grad, None
    ridgeline.grouped_matmul(x, w, ends_of(sizes, device), main_grad=buffer, impl=impl).backward(dy)
    assert w.grad is None
    torch.testing.assert_close(buffer, before + wanted)
    assert torch.equal(buffer[1], before[1])


def test_main_grad_under_compile(device: str) -> None:
    torch._dynamo.reset()
    x, w = torch.randn(9, 8, device=device), torch.randn(2, 8, 6, device=device, requires_grad=True)
    ends, buffer = ends_of([4, 5], device), torch.zeros(2, 8, 6, device=device)
    work = torch.compile(
        lambda: ridgeline.grouped_matmul(x, w, ends, main_grad=buffer, impl="triton"),
        backend="aot_eager",
        fullgraph=True,
    )
    work().sum().backward()
    assert w.grad is None
    (wanted,) = torch.autograd.grad(ridgeline.grouped_matmul(x, w, ends, impl="triton").sum(), w)
    torch.testing.assert_close(buffer, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[50, 3, 40], [-7, 1 << 30, 2], [90, 90, 90]])
def test_ends_out_of_order_touch_nothing_else(ends: list[int]) -> None:
    room = torch.full((3, 60, 32), 7.0, device="cuda", dtype=torch.bfloat16)
    x, w = torch.randn(60, 32, device="cuda", dtype=torch.bfloat16), torch.randn(3, 32, 32, device="cuda").bfloat16()
    given = torch.tensor(ends, dtype=torch.int32, device="cuda")
    y = ridgeline.grouped_matmul(x, w.requires_grad_(), given, impl="triton")
    y.sum().backward()
    torch.cuda.synchronize()
    assert (room == 7).all()


def sorted_gate(logits: torch.Tensor, k: int, impl: str, **options: Any) -> list[Any]:
    weights, indices, counts = ridgeline.topk_gate(logits, k, impl=impl, **options)
    assert counts.tolist() == indices.flatten().bincount(minlength=logits.shape[1]).tolist()
    return [weights, indices.tolist()]


def test_ties_go_by_index(device: str) -> None:
    x = torch.tensor([[1.0, 3, 3, 1, 3, 0], [0, 0, 0, 0, 0, 0]], device=device)
    for impl in ("torch", "triton"):
        assert sorted_gate(x, 4, impl)[1] == [[1, 2, 4, 0], [0, 1, 2, 3]]
        assert sorted_gate(x, 2, impl, score="sigmoid", groups=3, top_groups=2)[1] == [[1, 2], [0, 1]]
        assert sorted_gate(x, 2, impl, groups=3, top_groups=1)[1] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_rows_of_nan_and_infinity(score: str, groups: int, device: str) -> None:
    x = torch.randn(6, 16, device=device)
    x[1, 5], x[2, 3], x[3], x[4, :8] = math.nan, math.inf, -math.inf, -math.inf
    x.requires_grad_()
    found = []
    for impl in ("torch", "triton"):
        weights, indices, _ = ridgeline.topk_gate(
            x, 3, score=score, groups=groups, top_groups=(groups + 1) // 2, impl=impl
        )
        assert indices[1].tolist() == [0, 1, 2]
        assert weights[1].isnan().all()
        (grad,) = torch.autograd.grad((weights * torch.arange(1, 4, device=device)).sum(), x)
        assert grad[1].isnan().all()
        found.append((weights, indices, grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def experts(T: int, E: int, k: int, H: int, width: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """x, weights, indices, gate_up, down"""
    made = [torch.randn(s, device=device) for s in ((T, H), (T, k), (E, 2 * width, H), (E, H, width))]
    x, weights, gate_up, down = (t.to(dtype).requires_grad_() for t in made)
    return [x, weights.detach().float().requires_grad_(), torch.randint(0, E, (T, k), device=device), gate_up, down]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("which", ["all one", "few", "many experts"])
def test_experts_without_tokens(which: str, dtype: torch.dtype, device: str) -> None:
    sizes = {"many experts": (4, 33, 5, 9, 3)}.get(which, (11, 6, 3, 19, 11))
    x, weights, indices, gate_up, down = experts(*sizes, dtype, device)
    if which == "all one":
        indices = torch.full_like(indices, 2)
    if which == "few":
        indices = (indices % 2) * 5
    holds(get("moe"), x, weights, indices, gate_up, down)
    y = ridgeline.moe(x, weights, indices, gate_up, down, impl="triton")
    y.float().square().sum().backward()
    for e in range(sizes[1]):
        used = bool((indices == e).any())
        assert bool(gate_up.grad[e].any()) == used
        assert bool(down.grad[e].any()) == used


@pytest.mark.parametrize("alone", [0, 100])
def test_places_are_a_stable_sort(alone: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program, or by a program for each block of pairs."""
    from ridgeline.ops.experts import _route

    monkeypatch.setattr(_route, "ALONE", alone)
    for n, E in ((1, 1), (17, 4), (700, 5), (300, 130), (8300, 3)):
        indices = torch.randint(0, E, (n, 1), device=device)
        indices[n // 2 :: 3] = int(indices[0])
        order, place, ends = (torch.full((s,), -7, dtype=torch.int32, device=device) for s in (n, n, E))
        _route.route(_route.Pairs(indices, order, place, ends))
        assert order.tolist() == indices.flatten().argsort(stable=True).tolist()
        assert place.tolist() == order.argsort().tolist()
        assert ends.tolist() == indices.flatten().bincount(minlength=E).cumsum(0).tolist()


def test_shapes_and_no_tokens(device: str) -> None:
    x, weights, indices, gate_up, down = experts(6, 4, 2, 8, 5, torch.float32, device)
    flat = ridgeline.moe(x, weights, indices, gate_up, down)
    shaped = ridgeline.moe(x.view(2, 3, 8), weights.view(2, 3, 2), indices.view(2, 3, 2).int(), gate_up, down)
    assert torch.equal(shaped.view(6, 8), flat)
    none = ridgeline.moe(x[:0], weights[:0], indices[:0], gate_up, down)
    none.sum().backward()
    assert none.shape == (0, 8)
    assert not gate_up.grad.any()
    assert not down.grad.any()


@pytest.mark.gpu
def test_an_index_of_no_expert_makes_its_token_nan() -> None:
    x, weights, indices, gate_up, down = experts(40, 6, 2, 64, 32, torch.bfloat16, "cuda")
    wrong = indices.clone()
    wrong[3, 1], wrong[20, 0] = 6, -1
    y = ridgeline.moe(x, weights, wrong, gate_up, down)
    right = ridgeline.moe(x, weights, indices, gate_up, down)
    bad = torch.zeros(40, dtype=torch.bool, device="cuda")
    bad[[3, 20]] = True
    assert y[bad].isnan().all()
    assert torch.equal(y[~bad], right[~bad])
    (dx, *_) = torch.autograd.grad(y[~bad].float().sum(), (x, weights, gate_up, down))
    assert not dx[~bad].isnan().any()


@pytest.mark.gpu
def test_graphs() -> None:
    x, _, _, gate_up, down = experts(32, 8, 2, 128, 64, torch.bfloat16, "cuda")
    logits = torch.randn(32, 8, device="cuda")

    def work() -> tuple[torch.Tensor, ...]:
        shares, chosen, counts = ridgeline.topk_gate(logits, 2)
        y = ridgeline.moe(x, shares, chosen, gate_up, down)
        return y, counts, *torch.autograd.grad(y.float().sum(), (x, gate_up, down))

    replay = captured(work, before=3)
    logits.copy_(torch.randn(32, 8, device="cuda"))
    replayed = [t.clone() for t in replay()]
    for one, other in zip(replayed, work(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("sizes", [(128, 8, 512, 768), (8, 2, 1024, 3584)], ids=str)
def test_layers_in_bfloat16(tokens: int, sizes: tuple[int, ...]) -> None:
    """Sizes of which the law's copies in float64, and their gradients, take less than 12 GiB."""
    x, weights, indices, gate_up, down = experts(tokens, *sizes, torch.bfloat16, "cuda")
    with torch.no_grad():
        gate_up.mul_(sizes[2] ** -0.5)
        down.mul_(sizes[3] ** -0.5)
    holds(get("moe"), x, weights, indices, gate_up, down)


def served(name: str) -> None:
    """Skips a test of a rung for Hopper on other GPUs."""
    x = torch.zeros(8, 8, dtype=torch.float16, device="cuda" if torch.cuda.is_available() else "cpu")
    reason = why_not(get("grouped_matmul").implementations[name], x, x[None], torch.zeros(1, dtype=torch.int32))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("sizes", "K", "N", "turned"),
    [([70, 0, 33, 130], 136, 200, True), ([0, 0, 9], 72, 24, False), ([129], 80, 264, True), ([0, 0], 64, 64, False)],
    ids=str,
)
def test_copies_that_end_at_a_groups_end(sizes: list[int], K: int, N: int, turned: bool, device: str) -> None:
    """Rows past the last end, and of other groups, hold what would show: infinities and NaN."""
    served("triton_tma")
    total, G, op = sum(sizes), len(sizes), get("grouped_matmul")
    x = torch.randn(total + 5, K, device=device).half().requires_grad_()
    w = torch.randn((G, N, K) if turned else (G, K, N), device=device).half()
    w = (w.mT if turned else w).detach().requires_grad_()
    bias, ends = torch.randn(G, N, device=device).half().requires_grad_(), ends_of(sizes, device)
    holds(op, x, w, ends, bias=bias, impl="triton_tma")
    with torch.no_grad():
        x[total:] = math.inf
    y = ridgeline.grouped_matmul(x, w, ends, impl="triton_tma")
    assert y.isfinite().all()
    assert not y[total:].any()
    dy = torch.ones_like(y)
    first = next((g for g, size in enumerate(sizes) if size), None)
    if first is not None:
        dy[: sizes[first]] = math.nan
    dy[total:] = math.nan
    (dw,) = torch.autograd.grad(y, (w,), dy)
    assert dw.shape == w.shape
    assert dw.stride() == w.stride()
    for g in range(G):
        assert dw[g].isnan().any() == (g == first)
        assert bool(dw[g].any()) == (sizes[g] > 0)


@pytest.mark.parametrize("skewed", [False, True])
def test_moe_with_sorted_tokens(skewed: bool, device: str) -> None:
    served("triton_tma")
    T, E, k, H, I = 90, 4, 2, 136, 72
    sizes = (T, H), (T, k), (E, 2 * I, H), (E, H, I)
    x, weights, gate_up, down = (torch.randn(s, device=device).half().requires_grad_() for s in sizes)
    indices = torch.full((T, k), 2, device=device) if skewed else torch.randint(0, E, (T, k), device=device)
    holds(get("moe"), x, weights, indices, gate_up, down, impl="triton_tma")
    with torch.no_grad():
        indices = indices.clone()
        indices[3, 1] = E
        if device == "cuda":
            y = ridgeline.moe(x, weights, indices, gate_up, down, impl="triton_tma")
            assert y.isnan().any(1).nonzero().flatten().tolist() == [3]


def test_which_calls_are_served_by_tma() -> None:
    def chosen(T: int, G: int, K: int, dtype: torch.dtype = torch.bfloat16) -> str:
        x, w = torch.empty(T, K, device="meta", dtype=dtype), torch.empty(G, K, 64, device="meta", dtype=dtype)
        with devices.pretend("sm_90"):
            return select(get("grouped_matmul"), None, x, w, torch.empty(G, dtype=torch.int32, device="meta")).name

    assert chosen(2048, 8, 256) == "triton_tma"
    assert chosen(768, 8, 256) == "triton"
    assert chosen(2048, 8, 252) == "triton"
    assert chosen(2048, 8, 256, torch.float32) == "triton"
    with devices.pretend("sm_100"):
        x = torch.empty(2048, 256, device="meta", dtype=torch.bfloat16)
        assert "sm_90" in str(why_not(get("grouped_matmul").implementations["triton_tma"], x, x[None]))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("impl", ["triton", "triton_tma"])
def test_layouts_of_gate_and_up(interleaved: bool, turned: bool, impl: str, device: str) -> None:
    """Weights as transformers' layers hold them: halves or taking turns, by rows or by columns; an I of half a tile."""
    served(impl)
    T, E, k, H, I = 70, 2, 2, 64, 136
    made = [torch.randn(s, device=device) for s in ((T, H), (E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H))]
    x, gate_up, down, *biases = (t.half() * t.shape[-1] ** -0.5 if t.dim() == 3 else t.half() for t in made)
    gate_up, down = (t.mT.contiguous().mT if turned else t for t in (gate_up, down))
    x, gate_up, down, *biases = (t.requires_grad_() for t in (x, gate_up, down, *biases))
    weights = torch.rand(T, k, device=device).requires_grad_()
    options = {"gate_up_bias": biases[0], "down_bias": biases[1], "interleaved": interleaved}
    holds(get("moe"), x, weights, torch.randint(0, E, (T, k), device=device), gate_up, down, impl=impl, **options)


def test_rows_of_no_multiple_of_a_step_of_k(device: str) -> None:
    """Their gathered rows would end in the next one: then gate and up are those of `triton`."""
    served("triton_tma")
    x, weights, indices, gate_up, down = experts(80, 3, 2, 72, 40, torch.float16, device)
    holds(get("moe"), x, weights, indices, gate_up, down, impl="triton_tma")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 9, 3, 40, 24), {}),
        ((1, 6, 2, 33, 19), {"activation": "swiglu_oai", "limit": 1.5, "interleaved": True}),
        ((2, 12, 2, 70, 13), {"interleaved": True}),
        ((3, 16, 2, 64, 300), {"limit": 0.5}),
    ],
    ids=str,
)
def test_few_tokens_start_two_kernels(
    sizes: tuple[int, ...], options: dict[str, Any], turned: bool, device: str
) -> None:
    T, E, k, H, I = sizes
    made = [torch.randn(s, device=device) for s in ((T, H), (E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H))]
    x, gate_up, down, *biases = (t.half() * t.shape[-1] ** -0.5 if t.dim() == 3 else t.half() for t in made)
    gate_up, down = (t.mT.contiguous().mT if turned else t for t in (gate_up, down))
    options = options | {"gate_up_bias": biases[0], "down_bias": biases[1]} if T > 1 else options
    given = x, torch.rand(T, k, device=device), torch.randint(0, E, (T, k), device=device), gate_up, down
    seen: list[Any] = []
    with observe(seen.append):
        ridgeline.moe(*given, **options, impl="triton")
    assert [one.kernel.fn.__name__ for one in seen] == ["_up", "_down"]
    holds(get("moe"), *given, **options)


def test_who_has_few_tokens(device: str) -> None:
    """Not where tokens share experts, nor float32, nor a call whose gradients are wanted."""

    def kernels(T: int, E: int, k: int, dtype: torch.dtype = torch.float16, grad: bool = False) -> int:
        seen: list[Any] = []
        x, weights, indices, gate_up, down = experts(T, E, k, 16, 8, dtype, device)
        with observe(seen.append), torch.set_grad_enabled(grad):
            ridgeline.moe(x, weights, indices, gate_up, down, impl="triton")
        return len(seen)

    assert kernels(1, 8, 2) == 2
    assert kernels(2, 8, 2) == 2
    assert kernels(3, 8, 2) == 4
    assert kernels(1, 8, 2, torch.float32) == 4
    assert kernels(1, 8, 2, grad=True) == 4


@pytest.mark.gpu
def test_few_tokens_with_an_index_of_no_expert() -> None:
    x, weights, indices, gate_up, down = experts(3, 32, 2, 64, 32, torch.bfloat16, "cuda")
    indices[1, 1] = 32
    with torch.no_grad():
        y = ridgeline.moe(x, weights, indices, gate_up, down)
    assert y.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.compiles
@pytest.mark.parametrize("impl", ["triton", "triton_tma"])
@pytest.mark.parametrize("case", ["4 of 32 experts, 2880 -> 2880", "8 of 128 experts, 2048 -> 768"])
def test_gate_and_up_are_loaded_by_16_bytes(impl: str, case: str) -> None:
    """Columns that take turns were loaded by 2 bytes, and a layer of gpt-oss took ten times as long."""
    op = get("moe")
    (one,) = [c for c in op.cases if c.name.startswith(f"8192 tokens, {case}") and "scales" not in c.kwargs]
    made = inspect.resources(op, op.implementations[impl], one, "bfloat16", "sm_90", ("forward",), True)
    (gated,) = [found for found in made if "OPTIONS" in found.constants]
    assert gated.spill_loads + gated.spill_stores <= 64
    assert gated.loads.get("2", 0) <= 1
    assert set(gated.stores) <= {"16", "tma"}
    wide = impl == "triton_tma" or "2880" in case  # one product for both halves
    assert [name.split(".")[1] for name in gated.matrix] == ["64x256x16" if wide else "64x128x16"]
