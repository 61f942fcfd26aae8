"""flex_attention: users' functions and masks by blocks against formulas with everything in memory, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import ridgeline
from attention_calls import DTYPES, kernels, make, outcome, qkv
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError, get
from ridgeline.ops.attention.flex.examples import CAP, masks, score_mods


@triton.jit
def shifted(score, b, h, q, k):
    return score + 0.125 * (h + 2 * b) * tl.abs(q - k).to(tl.float32)


@triton.jit
def squared(score, b, h, q, k, weight):
    return score * score * tl.load(weight + h)


@triton.jit
def squared_slope(grad, score, b, h, q, k, weight):
    return grad * 2 * score * tl.load(weight + h)


@triton.jit
def hides(score, b, h, q, k):
    """Hides keys by -inf, all of them from the queries before 7."""
    return tl.where((q >= 7) & (k % 3 != 0), score, float("-inf"))


@triton.jit
def stripes(b, h, q, k):
    """Tells batches and heads apart; queries from 64 to 95 see nothing."""
    return ((q + k + b + h) % 5 != 0) & ((q < 64) | (q >= 96))


def scorer(weight: torch.Tensor) -> ridgeline.ScoreMod:
    return ridgeline.ScoreMod(squared, squared_slope, tensors=[weight])


def direct(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, change: Any = None, seen: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula written out; change: of (score, b, h, q, k)."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    b, h, i, j = [torch.arange(n, device=q.device) for n in s.shape]
    index = b[:, None, None, None], h[:, None, None], i[:, None], j
    s = s if change is None else change(s, *index)
    s = s if seen is None else s.masked_fill(~seen(*index), -torch.inf)
    lse = torch.where((s == -torch.inf).all(-1), -torch.inf, s.logsumexp(-1))
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p @ v.repeat_interleave(group, 1), lse


def compared(args: list[torch.Tensor], change: Any, seen: Any, lse: bool = False, **given: Any) -> None:
    """Compares attention with the formula in float64, in results and gradients."""
    wide = [t.detach().double().requires_grad_() for t in args]
    want = outcome(lambda *t: direct(*t, change, seen) if lse else direct(*t, change, seen)[0], wide)
    found = outcome(ridgeline.attention, args, return_lse=lse, **given)
    size = 3e-5 if args[0].dtype == torch.float32 else 8 * torch.finfo(args[0].dtype).eps
    for one, other in zip(found, want, strict=True):
        assert not one.isnan().any()
        scale = max(1.0, float(other[other.isfinite()].abs().max()))
        torch.testing.assert_close(one, other, check_dtype=False, rtol=size, atol=size * scale)


SIZES = [((1, 2, 37, 16), (1, 1, 45, 16)), ((2, 2, 65, 40), (2, 2, 33, 40))]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_functions_and_their_gradients(sizes: Any, dtype: torch.dtype, device: str) -> None:
    args = qkv(*sizes, device, dtype=dtype)
    weight = torch.linspace(0.5, 2.0, sizes[0][1], device=device)
    adds = ridgeline.ScoreMod(shifted, additive=True)
    compared(args, lambda s, b, h, q, k: s + 0.125 * (h + 2 * b) * (q - k).abs(), None, score_mod=adds)
    compared(args, lambda s, b, h, q, k: s * s * weight.double()[h], None, lse=True, score_mod=scorer(weight))
    causal: Any = {"causal": True, "score_mod": scorer(weight)}
    compared(args, lambda s, b, h, q, k: s * s * weight.double()[h], lambda b, h, q, k: k <= q, **causal)


@kernels
def test_softcap_is_attentions_own(device: str) -> None:
    args = qkv((1, 2, 70, 32), (1, 2, 75, 32), device, scale=4.0)
    mod = score_mods("softcap", 2, device)
    own = outcome(ridgeline.attention, args, softcap=CAP.value, causal=True, impl="triton")
    for impl in ("triton", "naive", "recomputed"):
        found = outcome(ridgeline.attention, args, score_mod=mod, causal=True, impl=impl)
        torch.testing.assert_close(found, own, rtol=2e-5, atol=2e-5)


@kernels
@pytest.mark.parametrize("given", [{"causal": "bottom_right"}, {"window": (9, 4)}, {"causal": True, "prefix": 21}])
def test_bands_are_attentions_own(given: dict[str, Any], device: str) -> None:
    """A function that changes nothing, beside attention's options, whole blocks and edges."""
    args = qkv((1, 4, 70, 16), (1, 2, 83, 16), device)
    alibi = ridgeline.ScoreMod(shifted, additive=True)
    bias = torch.arange(4, device=device)[:, None, None] * 0.125
    i, j = torch.arange(70, device=device)[:, None], torch.arange(83, device=device)
    own = outcome(ridgeline.attention, args, mask=bias * (i - j).abs(), return_lse=True, **given)
    found = outcome(ridgeline.attention, args, score_mod=alibi, return_lse=True, **given)
    torch.testing.assert_close(found, own, rtol=2e-5, atol=2e-5)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["function", "tensor"])
def test_masks_by_blocks(dense: bool, dtype: torch.dtype, device: str) -> None:
    """Per batch and head, with odd lengths and 32 queries that see nothing, alone and with a function."""
    args = qkv((2, 2, 100, 16), (2, 1, 75, 16), device, dtype=dtype)

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q + k + b + h) % 5 != 0) & ((q < 64) | (q >= 96))

    if dense:
        index = [torch.arange(n, device=device) for n in (2, 2, 100, 75)]
        mask = seen(index[0][:, None, None, None], index[1][:, None, None], index[2][:, None], index[3])
        blocks = ridgeline.block_mask(mask, block=32)
    else:
        blocks = ridgeline.block_mask(stripes, 2, 2, 100, 75, block=32, device=device)
    assert blocks.pairs == int(blocks.dense().sum())
    compared(args, None, seen, block_mask=blocks)
    weight = torch.tensor([0.5, 2.0], device=device)
    compared(args, lambda s, b, h, q, k: s * s * weight.double()[h], seen, block_mask=blocks, score_mod=scorer(weight))


@kernels
def test_rows_without_keys(device: str) -> None:
    """o is 0, lse -inf and gradients 0, whether a mask or a function hides all keys."""
    for given in (
        {"block_mask": ridgeline.block_mask(stripes, None, None, 100, 40, block=32, device=device)},
        {"score_mod": ridgeline.ScoreMod(hides, additive=True)},
    ):
        args = qkv((1, 1, 100, 16), (1, 1, 40, 16), device)
        o, lse = ridgeline.attention(*args, return_lse=True, **given)
        rows = slice(64, 96) if "block_mask" in given else slice(0, 7)
        assert bool((o[:, :, rows] == 0).all())
        assert bool((lse[:, :, rows] == -torch.inf).all())
        assert bool((lse == -torch.inf).sum() == rows.stop - rows.start)
        (o.sum() + lse[:, :, rows].sum()).backward()
        assert bool((args[0].grad[:, :, rows] == 0).all())
        assert not any(t.grad.isnan().any() for t in args)


@kernels
@pytest.mark.parametrize(("name", "size"), [("window", 9), ("documents", 20), ("prefix", 60)])
def test_lists_hold_the_blocks_that_are_seen(name: str, size: int, device: str) -> None:
    """Each list names every block with a seen key once, the partly masked ones first, in rows and in columns.

    The results are those of the mask in memory."""
    mask = masks(name, size, 2, 150, device, 32)
    dense = torch.nn.functional.pad(mask.dense(), (0, 10, 0, 10)).unflatten(3, (5, 32)).unflatten(2, (5, 32))
    counts = dense.sum((3, 5))
    assert torch.equal(counts, mask.counts.long())
    assert mask.pairs == int(counts.sum())
    for lists, grid in ((mask.rows, counts), (mask.columns, counts.mT)):
        for listed, row in zip(lists.flatten(0, 2).tolist(), grid.flatten(0, 2).tolist(), strict=True):
            partly = [n for n, seen in enumerate(row) if 0 < seen < 1024]
            full = [n for n, seen in enumerate(row) if seen == 1024]
            assert listed[:2] == [len(partly), len(full)]
            assert listed[2 : 2 + len(partly) + len(full)] == partly + full
    args = qkv((2, 1, 150, 16), (2, 1, 150, 16), device)
    compared(args, None, lambda *_: mask.dense(), block_mask=mask)


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter runs")
def test_hidden_blocks_cost_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask's function runs in partly masked blocks alone, and the score function in these and full ones."""
    from ridgeline.ops.attention.flex import forward

    mask, calls = masks("documents", 30, 1, 150, device, 32), []
    own = forward._add_block
    monkeypatch.setattr(forward, "_add_block", lambda *given: (calls.append(given[-1]), own(*given))[1])
    ridgeline.attention(*[t.detach() for t in qkv((1, 1, 150, 16), (1, 1, 150, 16), device)], block_mask=mask)
    partly, full = mask.rows[..., 0].sum().item(), mask.rows[..., 1].sum().item()
    assert (calls.count(True), calls.count(False)) == (2 * partly, 2 * full)  # tiles of 16 keys in blocks of 32


@kernels
def test_bare_functions_have_no_gradient(device: str) -> None:
    args = qkv((1, 2, 20, 16), (1, 2, 20, 16), device)
    with torch.no_grad():
        found = ridgeline.attention(*args, score_mod=shifted)
    torch.testing.assert_close(
        found, ridgeline.attention(*args, score_mod=ridgeline.ScoreMod(shifted, additive=True)).detach()
    )
    with pytest.raises(RidgelineError, match="derivative of shifted is not known; give its ScoreMod backward="):
        ridgeline.attention(*args, score_mod=shifted)


@kernels
def test_compiled(device: str) -> None:
    """torch.compile makes one graph of a call with a function and a mask, and gives the same."""
    args = qkv((1, 2, 40, 16), (1, 2, 40, 16), device)
    mod, mask = score_mods("alibi", 2, device), masks("window", 9, 1, 40, device, 32)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ridgeline.attention(q, k, v, score_mod=mod, block_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for one, other in zip(outcome(compiled, args), outcome(call, args), strict=True):
        torch.testing.assert_close(one, other)


def test_a_function_of_another_process() -> None:
    """A program that was compiled elsewhere names a function that this process does not know."""
    from ridgeline.ops.attention.flex.score import function_of, key_of

    assert function_of(key_of(shifted)) is shifted
    with pytest.raises(RidgelineError, match="the function gone is not known in this process"):
        function_of("gone:0123")


def test_plain_pytorch_needs_the_formula() -> None:
    args = [torch.ones(1, 1, 4, 16)] * 3
    with pytest.raises(RidgelineError, match="eager="):
        get("flex_attention").function(*args, score_mod=ridgeline.ScoreMod(shifted, additive=True), impl="naive")


a, b = make(1, 2, 20, 16, device="cpu").detach(), make(1, 2, 24, 16, device="cpu").detach()


def small() -> ridgeline.BlockMask:
    return ridgeline.block_mask(torch.ones(20, 24, dtype=torch.bool), block=32)


BAD: dict[str, Any] = {
    "no function": (lambda: ridgeline.ScoreMod(3), ["forward", "triton.jit", "int"]),
    "too few arguments": (lambda: ridgeline.ScoreMod(stripes), ["forward", "score, b, h, q, k", "4 arguments"]),
    "a tensor too many": (lambda: ridgeline.ScoreMod(shifted, tensors=[a]), ["1 tensors", "5 arguments"]),
    "four tensors": (lambda: ridgeline.ScoreMod(shifted, tensors=[a] * 4), ["at most 3", "4"]),
    "strides": (lambda: ridgeline.ScoreMod(squared, tensors=[a.mT]), ["contiguous", "strides"]),
    "numbers": (lambda: ridgeline.ScoreMod(squared, tensors=[2.0]), ["tuple of tensors", "2.0"]),
    "two derivatives": (
        lambda: ridgeline.ScoreMod(squared, squared_slope, tensors=[a], additive=True),
        ["backward", "additive"],
    ),
    "a score_mod of nothing": (lambda: ridgeline.attention(a, b, b, score_mod=3), ["score_mod", "ScoreMod", "3"]),
    "a mask of nothing": (lambda: ridgeline.attention(a, b, b, block_mask=a), ["block_mask", "BlockMask", "Tensor"]),
    "a mask of other lengths": (
        lambda: ridgeline.attention(a, a, a, block_mask=small()),
        ["block_mask", "(1, 1, 20, 24)", "(1, 2, 20, 20)"],
    ),
    "causal with a mask": (lambda: ridgeline.attention(a, b, b, block_mask=small(), causal=True), ["alone", "causal"]),
    "softcap with a mask": (lambda: ridgeline.attention(a, b, b, block_mask=small(), softcap=2.0), ["softcap"]),
    "sizes without a function": (lambda: ridgeline.block_mask(a[0, 0] > 0, Sq=3), ["with a tensor as mask", "sizes"]),
    "a mask without sizes": (lambda: ridgeline.block_mask(stripes), ["Sq", "positive", "None"]),
    "blocks of 48": (lambda: ridgeline.block_mask(stripes, Sq=3, Sk=3, block=48), ["block", "power of two", "48"]),
    "a mask of numbers": (lambda: ridgeline.block_mask(a[0, 0]), ["torch.bool", "float32"]),
    "a mask's arguments": (lambda: ridgeline.block_mask(shifted, Sq=3, Sk=3), ["(b, h, q, k)", "5 arguments"]),
    "functions elsewhere": (
        lambda: ridgeline.attention(
            a.to("meta"), b.to("meta"), b.to("meta"), score_mod=ridgeline.ScoreMod(squared, tensors=[a])
        ),
        ["score_mod", "cpu", "meta"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    call, words = BAD[what]
    with pytest.raises(RidgelineError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
