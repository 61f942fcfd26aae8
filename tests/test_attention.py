"""attention and attention_varlen beyond the law's cases: all options together, rows without keys, large logits, strides, capture.

The sample of all options is drawn by hypothesis from SEED, which a failure prints; with it in the environment it is drawn again.
"""

import os
import random
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import ridgeline
from ridgeline.boundary import INTERPRETED
from ridgeline.lab.law import Law, as_tuple
from ridgeline.op import RidgelineError, get
from ridgeline.select import why_not

kernels = pytest.mark.kernels
GPU = torch.cuda.is_available() and not INTERPRETED
SEED = int(os.environ.get("SEED", random.randrange(1 << 31)))
EXAMPLES = int(os.environ.get("EXAMPLES", 8 if INTERPRETED else 400))
IMPLS = [i.name for i in get("attention").implementations.values() if i.is_kernel]
HERE = ["triton", *(["gluon"] if GPU and torch.cuda.get_device_capability() == (9, 0) else [])]
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def make(*shape: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 1.0, dice: int = 3) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(dice)
    return torch.randn(shape, device=device, generator=generator).mul(scale).to(dtype).requires_grad_()


def qkv(q: tuple[int, ...], k: tuple[int, ...], device: str, **given: Any) -> list[torch.Tensor]:
    return [make(*shape, device=device, dice=n, **given) for n, shape in enumerate((q, k, k))]


def outcome(call: Any, args: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    """What a call returns, and its gradients for random incoming ones."""
    outputs = as_tuple(call(*args, **given))
    incoming = [make(*o.shape, device=o.device.type, dice=9 + n).detach().to(o.dtype) for n, o in enumerate(outputs)]
    return [*[o.detach() for o in outputs], *torch.autograd.grad(outputs, [a for a in args if a.requires_grad], incoming)]


def exact(args: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
    return outcome(get("attention").reference, [a.detach().double().requires_grad_() for a in args], **given)


def near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, check_dtype=False, rtol=tolerance, atol=tolerance)


def lawful(name: str, args: list[Any], given: dict[str, Any], impls: list[str]) -> None:
    """Twice what the law allows, or near to the oracle: in few rows and columns how far the standard is off is luck, and where a query
    sees one key its gradient is zero."""
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
    length = st.integers(0, 50) if INTERPRETED else st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 512, 1000]))
    D = st.sampled_from([16, 24, 32, 40] if INTERPRETED else range(16, 257, 8))
    return {
        "sizes": (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(length), draw(length), draw(D)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "mask": draw(st.sampled_from([None, None, "bool", "float", "infinite"])),
        "shape": draw(st.tuples(*[st.booleans()] * 4)),
        "order": draw(st.booleans()),
        "options": draw(options()),
    }


def sampled(device: str) -> Any:
    """Runs a test on hypothesis's examples from SEED."""

    def run(test: Any) -> None:
        print(f"SEED={SEED}")
        rules = hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        hypothesis.seed(SEED)(rules(test))()

    return run


@kernels
def test_all_options_together(device: str) -> None:
    @sampled(device)
    @hypothesis.given(call=calls())
    def _(call: dict[str, Any]) -> None:
        B, Hkv, G, sq, sk, D = call["sizes"]
        shapes = (B, Hkv * G, sq, D), (B, Hkv, sk, D), (B, Hkv, sk, D)
        args = [make(*shape, device=device, dtype=call["dtype"], dice=n) for n, shape in enumerate(shapes)]
        if call["order"]:
            args = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in args]
        mask = None
        if call["mask"] is not None:
            whole = make(*(n if kept else 1 for n, kept in zip((B, Hkv * G, sq, sk), call["shape"], strict=True)), device=device).detach()
            mask = (
                whole > -0.5 if call["mask"] == "bool" else whole if call["mask"] == "float" else whole.masked_fill(whole < 0, -torch.inf)
            )
        lawful("attention", args, call["options"] | {"mask": mask}, IMPLS)


@pytest.mark.gpu
def test_all_options_on_hopper() -> None:
    """The sample that the Gluon kernels take: of the other it is a twentieth."""
    if "gluon" not in HERE:
        pytest.skip("needs a Hopper GPU")
    served = 0

    @sampled("cuda")
    @hypothesis.given(call=calls())
    def _(call: dict[str, Any]) -> None:
        nonlocal served
        B, Hkv, G, sq, sk, D = call["sizes"]
        dtype = torch.bfloat16 if call["dtype"] == torch.float32 else call["dtype"]
        chosen = call["options"] | {"softcap": None, "scale": abs(call["options"]["scale"] or 0.2)}
        D = D - 64 if 128 < D <= 192 else D
        args = qkv((B, Hkv * G, sq, D), (B, Hkv, sk, D), "cuda", dtype=dtype)
        if call["order"]:
            args = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in args]
        served += why_not(get("attention").implementations["gluon"], *args, **chosen) is None
        lawful("attention", args, chosen, ["gluon"])

    assert served > EXAMPLES // 2


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 40, 64, 72, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("same", [None, False])
def test_sums_of_queries_gradients_on_hopper(D: int, same: bool | None) -> None:
    """By the last piece of work or by a kernel afterwards; of blocks that no key is seen from; in memory that begins as NaN."""
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
        expected = outcome(ridgeline.attention, [t.detach().float().requires_grad_() for t in args], **given, return_lse=True, impl="tiled")
        for one, other in zip(found[2:], expected[2:], strict=True):
            assert (one - other).abs().max() <= 4e-3 * other.abs().max()
        assert not found[2][found[1] == -torch.inf].any()


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
    found = [torch.autograd.grad(o, args, g, retain_graph=True) for g in (do[1:].view(1, 2, 70, 64), do[1:].clone().view(1, 2, 70, 64))]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@kernels
def test_all_options_of_packed_sequences(device: str) -> None:
    """Against the law; and against attention, sequence by sequence."""
    lengths = st.lists(st.tuples(*[st.integers(0, 30 if INTERPRETED else 400)] * 2), min_size=1, max_size=3 if INTERPRETED else 9)

    @sampled(device)
    @hypothesis.given(
        lengths, st.integers(1, 2), st.integers(1, 2), st.sampled_from([16, 24] if INTERPRETED else [16, 64, 80, 128]), options()
    )
    def _(sizes: list[tuple[int, int]], Hkv: int, G: int, D: int, chosen: dict[str, Any]) -> None:
        cu = [torch.tensor([0, *n], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in zip(*sizes, strict=True)]
        q, k, v = qkv((int(cu[0][-1]), Hkv * G, D), (int(cu[1][-1]), Hkv, D), device)
        packed = outcome(ridgeline.attention_varlen, [q, k, v, *cu], **chosen | {"return_lse": True}, impl="triton")
        single = []
        for n in range(len(sizes)):
            one, other = (slice(int(c[n]), int(c[n + 1])) for c in cu)
            args = [t.transpose(0, 1)[None] for t in (q[one], k[other], v[other])]
            o, lse = ridgeline.attention(*args, **chosen | {"return_lse": True}, impl="triton")
            single.append((o[0].transpose(0, 1), lse[0]))
        o, lse = (torch.cat(parts, n) for n, parts in enumerate(zip(*single, strict=True)))
        near(packed, outcome(lambda *_: (o, lse), [q, k, v]))
        lawful("attention_varlen", [q, k, v, *cu], chosen, ["triton"])


@kernels
def test_packed_sequences_in_half_precision(device: str) -> None:
    """Against the law; among these, sequences of one side alone."""
    lengths = st.lists(st.tuples(*[st.integers(0, 30 if INTERPRETED else 700)] * 2), min_size=1, max_size=3 if INTERPRETED else 9)
    D = st.sampled_from([16, 24] if INTERPRETED else [16, 40, 64, 80, 128])

    @sampled(device)
    @hypothesis.given(lengths, st.integers(1, 2), st.integers(1, 3), D, st.sampled_from(DTYPES[1:]), options())
    def _(sizes: list[tuple[int, int]], Hkv: int, G: int, D: int, dtype: torch.dtype, chosen: dict[str, Any]) -> None:
        cu = [torch.tensor([0, *n], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in zip(*sizes, strict=True)]
        args = qkv((int(cu[0][-1]), Hkv * G, D), (int(cu[1][-1]), Hkv, D), device, dtype=dtype)
        lawful("attention_varlen", [*args, *cu], chosen, HERE)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_nothing_comes_over_from_other_sequences(impl: str, device: str) -> None:
    """NaN in one sequence, and in what lies after the last, stays there, forward and backward."""
    size, dtype = (10, torch.float16) if INTERPRETED else (100, torch.bfloat16)
    cu = torch.tensor([0, 2, 3, 5] + [6] * INTERPRETED, dtype=torch.int32, device=device) * size  # a CPU holds it to the tokens
    wide = [(False, 128, None), (True, 128, False), (True, 64, None), (False, 64, False)]
    for causal, D, same in ((False, 16, None), (True, 16, None), *wide * (not INTERPRETED)):
        q, k, v, do = (
            t.detach()
            for t in [*qkv((6 * size, 2, D), (6 * size, 1, D), device, dtype=dtype), make(6 * size, 2, D, device=device, dtype=dtype)]
        )
        bad = [t.clone() for t in (q, k, v, do)]
        for t in bad:
            t[2 * size : 3 * size] = t[5 * size :] = torch.nan
        both = []
        for *args, incoming in ((q, k, v, do), bad):
            args = [t.requires_grad_() for t in args]
            o = ridgeline.attention_varlen(*args, cu, cu, causal=causal, deterministic=same, impl=impl)
            both.append([o, *torch.autograd.grad(o, args, incoming)])
        for one, other in zip(*both, strict=True):
            for part in (slice(0, 2 * size), slice(3 * size, 5 * size)):
                assert torch.equal(one[part], other[part])


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_rows_that_see_nothing(impl: str, device: str) -> None:
    """Zeros, lse of -inf and no gradient, whichever option hides the keys; and no NaN from an infinite or a hidden part."""
    dtype = torch.float32 if impl == "triton" else torch.float16
    args = qkv((1, 2, 20, 16), (1, 1, 9, 16), device, dtype=dtype)
    nothing, some = torch.zeros(20, 9, dtype=torch.bool, device=device), torch.ones(20, 9, dtype=torch.bool, device=device)
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
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_large_logits(size: float, device: str) -> None:
    """Scores up to `size`, of which float32 keeps what it can; nothing overflows."""
    q, k, v = qkv((1, 2, 33, 16), (1, 2, 40, 16), device)
    args = [t.detach().mul(size**0.5 / 2).requires_grad_() for t in (q, k)] + [v]
    near(outcome(ridgeline.attention, args, causal=True, impl="triton"), exact(args, causal=True), size * 4e-6)
    _, lse, *_ = found = outcome(ridgeline.attention, args, mask=torch.full((40,), -size, device=device), return_lse=True, impl="triton")
    assert all(t.isfinite().all() for t in found)
    near([lse / size], [exact(args, mask=torch.full((40,), -size, device=device).double(), return_lse=True)[1] / size])


@kernels
def test_smallest_numbers_as_a_mask(device: str) -> None:
    """A mask of float32's smallest number hides keys from rows that see others; a row that it hides all of is their average, as in torch.
    Such a row's lse cannot hold its sum, so that a gradient must not come in there."""
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
    expected = outcome(partial(lse, get("attention").reference), [t.detach().double().requires_grad_(n < 2) for n, t in enumerate(args)])
    near(found, expected)


@kernels
@pytest.mark.parametrize("impl", HERE)
def test_a_gradient_of_an_infinite_lse_goes_nowhere(impl: str, device: str) -> None:
    """NaN that comes into lse of rows that see no key."""
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
    """As torch's own takes them: all become autocast's."""
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
    """(B, S, H, D).transpose(1, 2), and pieces of one packed tensor: no copies, the same bits, and results in the same order."""
    packed = make(2, 17, 3, 2, 16, device=device, dtype=torch.float32 if impl == "triton" else torch.float16)
    q, k, v = packed.detach().unbind(2)
    views = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    copies = [t.detach().contiguous().requires_grad_() for t in views]
    assert not views[0].is_contiguous()
    one, other = (outcome(ridgeline.attention, args, causal=True, return_lse=True, impl=impl) for args in (views, copies))
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
@pytest.mark.parametrize("D", [16] if INTERPRETED else [64, 128])
@pytest.mark.parametrize("impl", HERE)
def test_reruns_are_equal(impl: str, D: int, given: dict[str, Any], device: str) -> None:
    B, S, times = (1, 40, 2) if INTERPRETED else (4, 2000, 1000)
    args = qkv((B, 4, S, D), (B, 2, S, D), device, dtype=torch.float16)
    first = outcome(ridgeline.attention, args, **given, return_lse=True, impl=impl)
    for _ in range(times):
        again = outcome(ridgeline.attention, args, **given, return_lse=True, impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@kernels
@pytest.mark.parametrize("given", [{"causal": True}, {}, {"causal": "bottom_right", "window": (300, None)}], ids=str)
@pytest.mark.parametrize("impl", HERE)
def test_reruns_of_packed_sequences_are_equal(impl: str, given: dict[str, Any], device: str) -> None:
    for D in (16,) if INTERPRETED else (64, 128):
        lengths, times = ((13, 0, 20, 7), 2) if INTERPRETED else ((1500, 0, 130, 3000, 64, 700, 2100, 1, 505), 500)
        cu = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        args = [*qkv((sum(lengths), 4, D), (sum(lengths), 2, D), device, dtype=torch.float16), cu, cu]
        first = outcome(ridgeline.attention_varlen, args, **given, return_lse=True, impl=impl)
        for _ in range(times):
            again = outcome(ridgeline.attention_varlen, args, **given, return_lse=True, impl=impl)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


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
    """The Triton kernels are so either way."""
    args = qkv((1, 2, 18, 16), (1, 2, 20, 16), device)
    first, *others = (outcome(ridgeline.attention, args, deterministic=d, impl="triton") for d in (None, True, False))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_what_serves_a_cpu() -> None:
    """Torch's own where it has the options, else the loop over tiles; float64 goes the same ways."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        args = qkv((1, 2, 18, 16), (1, 1, 20, 16), "cpu", dtype=dtype)
        for given, impl in (({"causal": True}, "torch"), ({"softcap": 2.0, "return_lse": True}, "tiled"), ({"window": (3, 3)}, "tiled")):
            found = outcome(ridgeline.attention, args, **given)
            for a, b in zip(found, outcome(ridgeline.attention, args, **given, impl=impl), strict=True):
                assert torch.equal(a, b)
            if dtype == torch.float64:
                near(found, exact(args, **given), 1e-10)


def test_tiles_are_the_formula() -> None:
    """The rung that sets the law's allowance for windows, caps and lse, over several of its tiles, against the formula in float64."""
    args = qkv((1, 2, 300, 16), (1, 1, 270, 16), "cpu", dtype=torch.float64)
    for given in ({"causal": "bottom_right", "window": (140, None)}, {"causal": True, "softcap": 2.0}, {"window": (9, 150)}):
        found = outcome(partial(ridgeline.attention, impl="tiled"), args, **given, return_lse=True)
        near(found, exact(args, **given, return_lse=True), 1e-11)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gives the same, in pieces and at once."""
    from ridgeline.ops.attention import _attention

    args = qkv((2, 4, 18, 16), (2, 2, 20, 16), "cpu", dtype=torch.float64)
    mask = make(2, 1, 18, 20, device="cpu").detach()
    for given in ({}, {"causal": "bottom_right", "window": (5, None), "softcap": 3.0, "mask": mask}):
        monkeypatch.setattr(_attention, "PIECE", 1 << 27)
        whole = exact(args, **given, return_lse=True)
        monkeypatch.setattr(_attention, "PIECE", 200)
        near(exact(args, **given, return_lse=True), whole, 1e-12)


def test_cost_counts_what_is_seen() -> None:
    from ridgeline.ops.attention._attention import options, pairs, seen

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
            assert pairs(sq, sk, chosen) == (sq * sk if band is None else int(seen(sq, sk, band, torch.device("cpu")).sum()))


# --- on a GPU alone


@pytest.mark.gpu
@pytest.mark.parametrize("impl", HERE)
def test_cuda_graph(impl: str) -> None:
    """Captured once, replayed on other data, packed sequences of other lengths among it."""
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
@pytest.mark.parametrize("impl", HERE)
def test_wrong_lengths_touch_nothing_else(impl: str) -> None:
    """Values of cu_seqlens that make no sense: no illegal address, and what lies around the results stays."""
    q, k, v = qkv((300, 4, 64), (300, 4, 64), "cuda", dtype=torch.bfloat16)
    for ends in ([5, -7, 1 << 30], [0, 200, 100], [0, 900, 1200], [-5, -5, -5], [300, 0, 300], [1 - (1 << 31), -(1 << 31), 300]):
        cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for same in (None, False):
            ridgeline.attention_varlen(q, k, v, cu, cu, causal=True, deterministic=same, impl=impl).sum().backward()
            torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", HERE)
def test_tokens_after_the_last_sequence(impl: str) -> None:
    """They see nothing and are seen by none: zeros, as a buffer of fixed size wants."""
    args = qkv((300, 4, 64), (300, 2, 64), "cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 100, 140], dtype=torch.int32, device="cuda")
    o, lse, *grads = outcome(ridgeline.attention_varlen, [*args, cu, cu], return_lse=True, impl=impl)
    assert (lse[:, 140:] == -torch.inf).all()
    assert not any(t[140:].any() for t in (o, *grads))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("impl", HERE)
def test_more_than_two_to_the_31(impl: str, order: str) -> None:
    """Elements past 2**31 are where they belong, forward and backward."""
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
    q.requires_grad_()
    (dq,) = torch.autograd.grad(ridgeline.attention(q, k, v, impl=impl)[B - 1, H - 1].float().sum(), q)
    assert dq[B - 1, H - 1].any()
    assert not dq[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "times"), [("triton", 1.1), ("gluon", 1.55)][: len(HERE)])
def test_memory(impl: str, times: float) -> None:
    """Forward and backward allocate at most so many times what they return and save: o, lse, dq, dk, dv and a statistic of each row.
    (The Gluon kernels add dQ up in float32.)"""
    args = qkv((1, 16, 65536, 64), (1, 16, 65536, 64), "cuda", dtype=torch.bfloat16)
    do = torch.randn_like(args[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = ridgeline.attention(*args, causal=True, impl=impl)
    grads = torch.autograd.grad(o, args, do)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= times * (sum(t.nbytes for t in (o, *grads)) + 2 * 4 * 16 * 65536)
