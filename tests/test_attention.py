"""attention beyond the law's cases: all options together, rows without keys, large logits, strides, capture."""

from functools import partial
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch

import ridgeline
from attention_calls import (
    EXAMPLES,
    HERE,
    IMPLS,
    calls,
    exact,
    kernels,
    lawful,
    lawful_call,
    make,
    near,
    outcome,
    qkv,
    sampled,
)
from ridgeline import tuning
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.lab.measurement.law import Law
from ridgeline.op import RidgelineError, get
from ridgeline.ops.attention.hopper import backward_launcher, forward, launcher
from ridgeline.select import why_not


@kernels
def test_all_options_together(device: str) -> None:
    @sampled(device)
    @hypothesis.given(call=calls())
    def _(call: dict[str, Any]) -> None:
        lawful_call(call, device, IMPLS)


@pytest.mark.gpu
def test_all_options_on_hopper() -> None:
    """Runs the part of the sample that the Gluon kernels support, a twentieth of the whole."""
    if "gluon" not in HERE:
        pytest.skip("needs a Hopper GPU")
    served = 0

    @sampled("cuda")
    @hypothesis.given(call=calls())
    def _(call: dict[str, Any]) -> None:
        nonlocal served
        B, Hkv, G, sq, sk, D = call["sizes"]
        dtype = torch.bfloat16 if call["dtype"] == torch.float32 else call["dtype"]
        chosen = call["options"] | {"scale": abs(call["options"]["scale"] or 0.2)}
        D = D - 64 if 128 < D <= 192 else D
        args = qkv((B, Hkv * G, sq, D), (B, Hkv, sk, D), "cuda", dtype=dtype)
        if call["order"]:
            args = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in args]
        served += why_not(get("attention").implementations["gluon"], *args, **chosen) is None
        lawful("attention", args, chosen, ["gluon"])

    assert served > EXAMPLES // 2


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 40, 64, 72, 80, 96, 128, 200, 232, 256])
@pytest.mark.parametrize("same", [None, False])
def test_sums_of_queries_gradients_on_hopper(D: int, same: bool | None) -> None:
    """Blocks of queries that see no key, and blocks that many pieces of work add to, in memory filled with NaN; o and
    lse too."""
    if "gluon" not in HERE:
        pytest.skip("needs a Hopper GPU")
    long = [(70, 4200, {}), (4200, 4200, {"causal": True})] if D == 64 else []
    for rows, columns, given in [
        (300, 333, {}),
        (333, 300, {"causal": True}),
        (500, 290, {"causal": "bottom_right", "window": (3, 2)}),
        *long,
    ]:
        args = qkv((1, 4, rows, D), (1, 2, columns, D), "cuda", dtype=torch.float16)
        torch.full((1 << 27,), torch.nan, device="cuda")
        found = outcome(ridgeline.attention, args, **given, return_lse=True, deterministic=same, impl="gluon")
        expected = outcome(
            ridgeline.attention,
            [t.detach().float().requires_grad_() for t in args],
            **given,
            return_lse=True,
            impl="tiled",
        )
        nothing = expected[1] == -torch.inf
        assert torch.equal(found[1] == -torch.inf, nothing)
        found[1], expected[1] = (lse.masked_fill(nothing, 0.0) for lse in (found[1], expected[1]))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 4e-3 * other.abs().max()
        assert not any(t[nothing].any() for t in (found[0], found[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_masks_of_wide_heads(D: int) -> None:
    args = qkv((1, 4, 300, D), (1, 2, 200, D), "cuda", dtype=torch.bfloat16)
    bias = make(1, 4, 300, 200, device="cuda").detach()
    for mask in (bias, bias > 0):
        lawful("attention", args, {"mask": mask}, ["triton"])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", HERE)
def test_an_incoming_gradient_that_begins_anywhere(impl: str) -> None:
    args = qkv((1, 2, 70, 64), (1, 1, 90, 64), "cuda", dtype=torch.float16)
    do = torch.randn(1 + 2 * 70 * 64, device="cuda", dtype=torch.float16)
    o = ridgeline.attention(*args, impl=impl)
    found = [
        torch.autograd.grad(o, args, g, retain_graph=True)
        for g in (do[1:].view(1, 2, 70, 64), do[1:].clone().view(1, 2, 70, 64))
    ]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_rows_that_see_nothing(impl: str, device: str) -> None:
    """Rows without keys give 0, lse -inf and no gradient, whichever option hides the keys; infinite or hidden parts
    give no NaN."""
    dtype = torch.float32 if impl == "triton" else torch.float16
    args = qkv((1, 2, 20, 16), (1, 1, 9, 16), device, dtype=dtype)
    nothing, some = (
        torch.zeros(20, 9, dtype=torch.bool, device=device),
        torch.ones(20, 9, dtype=torch.bool, device=device),
    )
    some[3:7] = False
    bias = torch.zeros(20, 9, device=device).masked_fill(~some, -torch.inf)
    for hidden, given in (
        (slice(None), {"mask": nothing}),
        (slice(3, 7), {"mask": some}),
        (slice(3, 7), {"mask": bias, "softcap": 3.0}),
        (slice(0, 11), {"causal": "bottom_right"}),
        (slice(12, 20), {"window": (3, 2)}),
    ):
        if impl == "gluon" and "mask" in given:
            continue
        o, lse, dq, dk, dv = found = outcome(ridgeline.attention, args, **given, return_lse=True, impl=impl)
        assert not any(t.isnan().any() for t in found)
        for t in (o, dq):
            assert not t[:, :, hidden].any()
        assert (lse[:, :, hidden] == -torch.inf).all()
        near(found, exact(args, **given, return_lse=True), 2e-5 if impl == "triton" else 4e-3)
        if hidden == slice(None):
            assert not dk.any()
            assert not dv.any()


@kernels
def test_no_keys_at_all(device: str) -> None:
    for q, k in (((2, 2, 5, 16), (2, 1, 0, 16)), ((2, 2, 0, 16), (2, 1, 5, 16)), ((0, 2, 5, 16), (0, 1, 5, 16))):
        args = qkv(q, k, device)
        near(outcome(ridgeline.attention, args, return_lse=True, impl="triton"), exact(args, return_lse=True))


@kernels
def test_a_sum_of_no_queries(device: str) -> None:
    """The gradient arrives expanded, and is not copied to be contiguous."""
    for q, k in (((2, 2, 0, 16), (2, 1, 5, 16)), ((0, 2, 5, 16), (0, 1, 5, 16)), ((1, 0, 5, 16), (1, 0, 5, 16))):
        args = qkv(q, k, device)
        grads = torch.autograd.grad(ridgeline.attention(*args, impl="triton").sum(), args)
        assert [g.shape for g in grads] == [a.shape for a in args]
        assert not any(g.any() for g in grads)
    cu = torch.zeros(2, dtype=torch.int32, device=device)
    args = qkv((0, 2, 16), (0, 1, 16), device)
    torch.autograd.grad(ridgeline.attention_varlen(*args, cu, cu, impl="triton").sum(), args)


@kernels
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_large_logits(size: float, device: str) -> None:
    """With scores up to `size`, nothing overflows, within float32's precision."""
    q, k, v = qkv((1, 2, 33, 16), (1, 2, 40, 16), device)
    args = [t.detach().mul(size**0.5 / 2).requires_grad_() for t in (q, k)] + [v]
    near(outcome(ridgeline.attention, args, causal=True, impl="triton"), exact(args, causal=True), size * 4e-6)
    _, lse, *_ = found = outcome(
        ridgeline.attention, args, mask=torch.full((40,), -size, device=device), return_lse=True, impl="triton"
    )
    assert all(t.isfinite().all() for t in found)
    near([lse / size], [exact(args, mask=torch.full((40,), -size, device=device).double(), return_lse=True)[1] / size])


@kernels
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"causal": "bottom_right"}, {"window": (300, 0)}], ids=str)
@pytest.mark.parametrize(
    ("D", "groups"), [(16, 0)] if INTERPRETED else [(64, 2), (64, 3), (80, 2), (80, 3), (128, 2), (128, 3), (256, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16], ids=str)
def test_maxima_that_rise_from_block_to_block(
    dtype: torch.dtype, D: int, groups: int, given: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores grow from the last key to the first, the order of the blocks.

    Exponentials relative to the first block's maxima would overflow the dtype, and float32."""
    monkeypatch.setattr(launcher, "consumer_groups", lambda *_: groups)
    for length in (40, 90) if INTERPRETED else (500, 1030):
        shapes = (1, 3, length, D), (1, 3, length + 5, D)
        q, k, v = (t.detach() for t in qkv(*shapes, device, dtype=dtype))
        k = k * torch.linspace(60, 0, length + 5, device=device)[:, None].to(dtype)
        first = length // 3  # a sequence of so many queries and keys, all as another, and all queries with so many keys
        parts = [[t[:, :, :first] for t in (q, k, v)], [q, k, v], [q, k[:, :, -first:], v[:, :, -first:]]]
        packed = [torch.cat([t[0].transpose(0, 1) for t in ts]) for ts in zip(*parts, strict=True)]
        ends = [[0, first, first + n, first + n + more] for n, more in ((length, length), (length + 5, first))]
        cu = [torch.tensor(n, device=device, dtype=torch.int32) for n in ends]
        exact = [get("attention").reference(*(t.double() for t in part), return_lse=True, **given) for part in parts]
        for impl in HERE:
            launched: list[Launch] = []
            with (
                tuning.listen(lambda request: None),
                observe(launched.append),
            ):  # else the third call of a kind is a replay of the second
                all_, lses = ridgeline.attention_varlen(*packed, *cu, return_lse=True, impl=impl, **given)
                found = [(all_[a:b].transpose(0, 1)[None], lses[:, a:b][None]) for a, b in pairwise(ends[0])]
                found.append(ridgeline.attention(q, k, v, return_lse=True, impl=impl, **given))
            assert (
                impl != "gluon"
                or [one.constants["RULES"].GROUPS for one in launched if one.kernel is forward._fwd] == [groups] * 2
            )
            for (o, lse), (o_exact, lse_exact) in zip(found, [*exact, exact[1]], strict=True):
                near([o], [o_exact], 1e-2)
                near([lse], [lse_exact], 1e-4)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_a_query_that_is_not_a_number(impl: str, device: str) -> None:
    """The call keeps its own o and lse, and no others."""
    q, k, v = (t.detach() for t in qkv((1, 1, 70, 16), (1, 1, 400, 16), device, dtype=torch.float16))
    q[0, 0, 5] = torch.nan
    kept = torch.arange(70, device=device) != 5
    o, lse = ridgeline.attention(q, k, v, return_lse=True, impl=impl)
    assert o[:, :, 5].isnan().all()
    assert lse[:, :, 5].isnan().all()
    o_exact, lse_exact = get("attention").reference(*(t.double() for t in (q[:, :, kept], k, v)), return_lse=True)
    near([o[:, :, kept], lse[:, :, kept]], [o_exact, lse_exact], 1e-2)


@kernels
def test_smallest_numbers_as_a_mask(device: str) -> None:
    """A mask of float32's smallest number hides keys from rows that see others; a row that it hides all of is their
    average, as in torch.

    The lse of such a row cannot hold its sum, so no gradient may enter there."""
    args = qkv((1, 1, 18, 16), (1, 1, 20, 16), device)
    mask = torch.zeros(18, 20, device=device)
    mask[:, 11:] = mask[5] = torch.finfo(torch.float32).min
    kept = torch.ones(18, 1, device=device)
    kept[5] = 0
    calls = partial(ridgeline.attention, impl="triton"), get("attention").reference
    near(*[outcome(lambda *a, c=call: c(*a, mask=mask) * kept, args) for call in calls])
    torch.testing.assert_close(ridgeline.attention(*args, mask=mask, impl="triton")[0, 0, 5], args[2].mean(2)[0, 0])


@kernels
def test_lse_alone_has_a_gradient(device: str) -> None:
    args = qkv((1, 4, 18, 16), (1, 2, 20, 16), device)
    lse = partial(lambda call, *a: call(*a, causal=True, softcap=2.0, return_lse=True)[1])
    found = outcome(partial(lse, partial(ridgeline.attention, impl="triton")), args[:2] + [args[2].detach()])
    expected = outcome(
        partial(lse, get("attention").reference),
        [t.detach().double().requires_grad_(n < 2) for n, t in enumerate(args)],
    )
    near(found, expected)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_a_gradient_of_an_infinite_lse_goes_nowhere(impl: str, device: str) -> None:
    """NaN enters as the gradient of lse, in rows that see no key."""
    args = qkv((1, 2, 20, 16), (1, 1, 9, 16), device, dtype=torch.float16)
    outputs = ridgeline.attention(*args, causal="bottom_right", return_lse=True, impl=impl)
    bad = torch.where(outputs[1].isinf(), torch.nan, 0.5)
    for one, other in zip(
        torch.autograd.grad(outputs, args, [outputs[0].detach(), bad], retain_graph=True),
        torch.autograd.grad(outputs, args, [outputs[0].detach(), bad.nan_to_num(0)]),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_dtypes_mixed_under_autocast() -> None:
    """Under autocast all inputs are cast, as for torch's own op."""
    q, k, v = qkv((1, 2, 18, 16), (1, 2, 20, 16), "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ridgeline.attention(q, k, v.detach().to(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RidgelineError, match="one floating-point dtype"):
        ridgeline.attention(q, k, v.detach().to(torch.bfloat16))


@kernels
@pytest.mark.parametrize("D", [16, 40, 72, 80, 96, 136, 256])
def test_dimensions(D: int, device: str) -> None:
    dtype = torch.float16
    lawful("attention", qkv((1, 2, 20, D), (1, 1, 18, D), device, dtype=dtype), {"causal": True}, IMPLS)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_tokens_before_heads(impl: str, device: str) -> None:
    """Transposed views and views of one packed tensor: no copies, the same bits, and results in the same order of
    dimensions."""
    packed = make(2, 17, 3, 2, 16, device=device, dtype=torch.float32 if impl == "triton" else torch.float16)
    q, k, v = packed.detach().unbind(2)
    views = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    copies = [t.detach().contiguous().requires_grad_() for t in views]
    assert not views[0].is_contiguous()
    one, other = (
        outcome(ridgeline.attention, args, causal=True, return_lse=True, impl=impl) for args in (views, copies)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    for t in (one[0], *one[2:]):
        assert t.transpose(1, 2).is_contiguous()
    assert all(t.is_contiguous() for t in other)


@kernels
@pytest.mark.parametrize("shape", [(), (20,), (18, 1), (2, 1, 18, 20), (1, 4, 1, 20), (4, 18, 20)])
def test_masks_broadcast(shape: tuple[int, ...], device: str) -> None:
    args = qkv((2, 4, 18, 16), (2, 2, 20, 16), device)
    bias = make(*shape, device=device).detach()
    for mask in (bias, bias > 0):
        near(outcome(ridgeline.attention, args, mask=mask, impl="triton"), exact(args, mask=mask))


@kernels
@pytest.mark.parametrize("given", [{"causal": True}, {}, {"window": (300, 100)}, {"window": (100, None)}], ids=str)
@pytest.mark.parametrize("D", [16] if INTERPRETED else [64, 80, 128, 256])
@pytest.mark.parametrize("impl", HERE)
def test_reruns_are_equal(impl: str, D: int, given: dict[str, Any], device: str) -> None:
    B, S, times = (1, 40, 2) if INTERPRETED else (4, 2000, 1000)
    args = qkv((B, 4, S, D), (B, 2, S, D), device, dtype=torch.float16)
    first = outcome(ridgeline.attention, args, **given, return_lse=True, impl=impl)
    for _ in range(times):
        again = outcome(ridgeline.attention, args, **given, return_lse=True, impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_what_is_told_of_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run closer together than the rule allows: with a relaxed signal, one rerun in a hundred lost lines."""
    if "gluon" not in HERE:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(backward_launcher, "head_section", lambda *_: (8, True))
    args = qkv((2, 8, 4096, 256), (2, 2, 4096, 256), "cuda", dtype=torch.bfloat16)
    first = outcome(ridgeline.attention, args, causal=True, impl="gluon")
    for _ in range(600):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, outcome(ridgeline.attention, args, causal=True, impl="gluon"), strict=True)
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given", [{}, {"causal": True}, {"window": (200, 0)}, {"causal": "bottom_right", "window": (None, 100)}], ids=str
)
@pytest.mark.parametrize("D", [40, 80, 128, 256])
def test_more_tiles_than_programs(D: int, given: dict[str, Any]) -> None:
    """A program has several tiles, and begins the next one before or after it leaves one."""
    args = qkv((3, 32, 700, D), (3, 16, 650, D), "cuda", dtype=torch.bfloat16)
    lawful("attention", args, given, HERE)
    cu = [torch.tensor([0, 300, 310, 1000, n], device="cuda", dtype=torch.int32) for n in (2100, 1950)]
    args = [*(t.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for t in args), *cu]
    lawful("attention_varlen", args, given, HERE)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window": (200, 0)}], ids=str)
@pytest.mark.parametrize("D", [40, 64, 80, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_pieces_in_parts(deterministic: bool, D: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys whose queries are split over several programs."""
    args = qkv((2, 8, 1500, D), (2, 4, 1450, D), "cuda", dtype=torch.bfloat16)
    for whole, parts in ((0, 3), (50, 2), (95, 7)):  # of 2 x 4 x 12 pieces
        monkeypatch.setattr(backward_launcher, "split_work", lambda *_, shared=(whole, parts): shared)
        lawful("attention", args, given | {"deterministic": deterministic}, HERE)
    monkeypatch.setattr(
        backward_launcher, "split_work", lambda *_: (10, 3)
    )  # of 2 x 12, whose two blocks of queries leave one part empty
    args = qkv((1, 4, 70, D), (1, 2, 1450, D), "cuda", dtype=torch.float16)
    lawful(
        "attention",
        args,
        given | {"causal": "causal" in given and "bottom_right", "deterministic": deterministic},
        HERE,
    )


@pytest.mark.gpu
def test_long_sums_in_full_float32() -> None:
    """Accumulating all blocks in one chain of roundings gives two to three times the allowed error here."""
    args = qkv(*[(1, 1, 16384, 32)] * 2, "cuda")
    law = Law(get("attention"), args, {"causal": True})
    verdict = law.judge(*law.run(get("attention").implementations["triton"]))
    assert verdict.ok, verdict.reason()


@kernels
def test_one_graph(device: str) -> None:
    """torch.compile(fullgraph=True), with every option and packed sequences too, gives the same bits."""
    torch._dynamo.reset()
    q, k, v = args = qkv((1, 2, 20, 16), (1, 1, 18, 16), device)
    given = {"causal": "bottom_right", "window": (7, None), "softcap": 3.0, "return_lse": True, "impl": "triton"}
    compiled = torch.compile(partial(ridgeline.attention, **given), backend="aot_eager", fullgraph=True)
    for a, b in zip(outcome(compiled, args), outcome(partial(ridgeline.attention, **given), args), strict=True):
        assert torch.equal(a, b)
    cu = torch.tensor([0, 7, 18], dtype=torch.int32, device=device)
    args = [t.detach()[0, :, :18].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v)] + [cu, cu]
    compiled = torch.compile(partial(ridgeline.attention_varlen, **given), backend="aot_eager", fullgraph=True)
    for a, b in zip(outcome(compiled, args), outcome(partial(ridgeline.attention_varlen, **given), args), strict=True):
        assert torch.equal(a, b)


@kernels
def test_autocast(device: str) -> None:
    args = qkv((1, 2, 18, 16), (1, 2, 20, 16), device)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    with torch.autocast(device, dtype=dtype):
        o = ridgeline.attention(*args, impl="triton")
        assert o.dtype == torch.nn.functional.scaled_dot_product_attention(*args).dtype == dtype
    assert torch.autograd.grad(o.sum(), args)[0].dtype == torch.float32


@kernels
def test_deterministic_is_a_word_only(device: str) -> None:
    """The Triton kernels are deterministic either way."""
    args = qkv((1, 2, 18, 16), (1, 2, 20, 16), device)
    first, *others = (outcome(ridgeline.attention, args, deterministic=d, impl="triton") for d in (None, True, False))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_what_serves_a_cpu() -> None:
    """Torch's own op serves if it has the options, else the loop over tiles; the same holds for float64."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        args = qkv((1, 2, 18, 16), (1, 1, 20, 16), "cpu", dtype=dtype)
        for given, impl in (
            ({"causal": True}, "torch"),
            ({"softcap": 2.0, "return_lse": True}, "tiled"),
            ({"window": (3, 3)}, "tiled"),
        ):
            found = outcome(ridgeline.attention, args, **given)
            for a, b in zip(found, outcome(ridgeline.attention, args, **given, impl=impl), strict=True):
                assert torch.equal(a, b)
            if dtype == torch.float64:
                near(found, exact(args, **given), 1e-10)


def test_tiles_are_the_formula() -> None:
    """The implementation that sets the tolerance for windows, softcap and lse, over several tiles, against the formula
    in float64."""
    args = qkv((1, 2, 300, 16), (1, 1, 270, 16), "cpu", dtype=torch.float64)
    for given in (
        {"causal": "bottom_right", "window": (140, None)},
        {"causal": True, "softcap": 2.0},
        {"window": (9, 150)},
    ):
        found = outcome(partial(ridgeline.attention, impl="tiled"), args, **given, return_lse=True)
        near(found, exact(args, **given, return_lse=True), 1e-11)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gives the same in pieces and at once."""
    from ridgeline.ops.attention.common import reference

    args = qkv((2, 4, 18, 16), (2, 2, 20, 16), "cpu", dtype=torch.float64)
    mask = make(2, 1, 18, 20, device="cpu").detach()
    for given in ({}, {"causal": "bottom_right", "window": (5, None), "softcap": 3.0, "mask": mask}):
        monkeypatch.setattr(reference, "PIECE", 1 << 27)
        whole = exact(args, **given, return_lse=True)
        monkeypatch.setattr(reference, "PIECE", 200)
        near(exact(args, **given, return_lse=True), whole, 1e-12)


def test_cost_counts_what_is_seen() -> None:
    from ridgeline.ops.attention.common.arguments import options
    from ridgeline.ops.attention.common.cost import pairs

    for sq, sk in ((18, 20), (20, 18), (5, 5), (3, 0)):
        for given in (
            {},
            {"causal": True},
            {"causal": "bottom_right"},
            {"window": (3, 2)},
            {"causal": "bottom_right", "window": (4, None)},
        ):
            chosen = options(16, **given)
            band = chosen.band(sq, sk)
            assert pairs(sq, sk, chosen) == (
                sq * sk if band is None else int(band.seen(sq, sk, torch.device("cpu")).sum())
            )


# --- on a GPU alone


@pytest.mark.gpu
@pytest.mark.parametrize("impl", HERE)
def test_cuda_graph(impl: str) -> None:
    """A graph is captured once and replayed on other data, including packed sequences of other lengths."""
    q, k, v = args = qkv((300, 4, 64), (300, 2, 64), "cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 100, 130, 300], dtype=torch.int32, device="cuda")
    call = partial(outcome, ridgeline.attention_varlen, [*args, cu, cu], causal=True, return_lse=True, impl=impl)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    incoming = [torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16), torch.randn(4, 300, device="cuda")]
    with torch.cuda.graph(graph):
        outputs = ridgeline.attention_varlen(*args, cu, cu, causal=True, return_lse=True, impl=impl)
        found = [*outputs, *torch.autograd.grad(outputs, args, incoming)]
    with torch.no_grad():
        for t in (q, k, v):
            t.normal_()
        cu.copy_(torch.tensor([0, 7, 290, 300], dtype=torch.int32))
    graph.replay()
    outputs = ridgeline.attention_varlen(*args, cu, cu, causal=True, return_lse=True, impl=impl)
    for a, b in zip(found, [*outputs, *torch.autograd.grad(outputs, args, incoming)], strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("impl", HERE)
def test_more_than_two_to_the_31(impl: str, order: str) -> None:
    """Elements past 2**31 are correct, forward and backward."""
    B, H, S, D = (129, 32, 4096, 128) if order == "heads first" else (3, 96, 60000, 128)
    shape = (B, H, S, D) if order == "heads first" else (B, S, H, D)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q = q if order == "heads first" else q.transpose(1, 2)
    k, v = q[:, :8, :256], q[:, 8:16, 256:512]
    o = ridgeline.attention(q, k, v, impl=impl)
    for b, h in ((0, 0), (B // 2, H // 2), (B - 1, H - 1)):
        one = [t[b : b + 1, n : n + 1] for t, n in ((q, h), (k, h // (H // 8)), (v, h // (H // 8)))]
        assert torch.equal(o[b, h], ridgeline.attention(*[t.contiguous() for t in one], impl=impl)[0, 0])
    del o
    inputs = [q.requires_grad_(), k.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()]
    grads = torch.autograd.grad(ridgeline.attention(*inputs, impl=impl)[B - 1, H - 1].float().sum(), inputs)
    last = [t.detach()[B - 1 :, -1:].contiguous().requires_grad_() for t in inputs]
    alone = torch.autograd.grad(ridgeline.attention(*last, impl=impl).float().sum(), last)
    for grad, expected in zip(grads, alone, strict=True):
        torch.testing.assert_close(grad[B - 1, -1], expected[0, 0])
        assert not grad[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "times"), [("triton", 1.1), ("gluon", 1.55)][: len(HERE)])
def test_memory(impl: str, times: float) -> None:
    """Forward and backward allocate at most a multiple of what they return and save: o, lse, dq, dk, dv and a
    statistic a row.

    The Gluon kernels accumulate dQ in float32."""
    args = qkv((1, 16, 65536, 64), (1, 16, 65536, 64), "cuda", dtype=torch.bfloat16)
    do = torch.randn_like(args[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = ridgeline.attention(*args, causal=True, impl=impl)
    grads = torch.autograd.grad(o, args, do)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= times * (sum(t.nbytes for t in (o, *grads)) + 2 * 4 * 16 * 65536)
