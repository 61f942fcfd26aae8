"""attention's sinks, prefix and aligned windows, in every implementation: results, gradients, edges."""

from typing import Any

import pytest
import torch

import ridgeline
from attention_calls import DTYPES, HERE, exact, kernels, lawful, make, near, outcome, qkv
from ridgeline.boundary import INTERPRETED
from ridgeline.lab.measurement.law import as_tuple
from ridgeline.op import get
from ridgeline.select import why_not

PLAIN = ["naive", "tiled"]
SINKS = [-torch.inf, 2.0, 80.0, -80.0]
SHAPES: list[tuple[Any, ...]] = [  # q and k, and options
    ((2, 4, 40, 16), (2, 2, 33, 16), {"causal": "bottom_right"}),  # rows that see nothing
    ((1, 4, 37, 64), (1, 1, 45, 64), {"causal": True, "prefix": 30}),
    ((1, 4, 35, 128), (1, 4, 50, 128), {"window": (5, 3), "window_align": "bottom_right"}),
    ((1, 4, 2, 16), (1, 1, 700, 16), {}),  # keys in parts
    ((1, 4, 3, 16), (1, 1, 600, 16), {"causal": True, "prefix": 550}),
    ((1, 4, 2, 16), (1, 1, 520, 16), {"window": (90, 0), "window_align": "bottom_right"}),  # one part
]


def sinks(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(SINKS, device=device, dtype=dtype).requires_grad_()


def results(impl: str | None, args: list[torch.Tensor], logits: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    """Returns o, lse and the gradients of q, k, v and the sinks; impl: None for the reference."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> Any:
        if impl is None:
            return get("attention").reference(q, k, v, sinks=s, **given)
        return ridgeline.attention(q, k, v, sinks=s, impl=impl, **given)

    return outcome(call, [*args, logits])


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c[0]} {c[2]}")
def test_sinks(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    """Of -inf, beyond all scores and below them, with gradients of o; lse's in another test, as -inf has none."""
    q, k, given = case
    args, logits = qkv(q, k, device, dtype=dtype), sinks(device)
    wide = [t.detach().double().requires_grad_() for t in args]
    want = results(None, wide, logits.detach().double().requires_grad_(), **given)
    for impl in [*HERE, *PLAIN]:
        if why_not(get("attention").implementations[impl], *args, **given):
            continue
        found = results(impl, args, logits, **given)
        assert not any(t.isnan().any() for t in found), impl
        size = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        for one, other in zip(found, want, strict=True):
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, check_dtype=False, rtol=size, atol=size * scale)


@kernels
@pytest.mark.parametrize("impl", ["tiled", *HERE])
def test_lse_holds_the_sink(impl: str, device: str) -> None:
    """A row that sees no key has its sink's lse, of -inf without one; the gradient of lse goes to the sink alone."""
    dtype = torch.float16
    args = qkv((1, 4, 40, 16), (1, 2, 17, 16), device, dtype=dtype)
    logits = sinks(device)
    o, lse = ridgeline.attention(*args, sinks=logits, causal="bottom_right", return_lse=True, impl=impl)
    assert bool((o[:, :, :23] == 0).all())
    assert torch.equal(lse[0, :, :23], logits[:, None].expand(4, 23))
    assert bool((lse[0, 0] == -torch.inf)[23:].logical_not().all())
    lse[:, 1:, :23].sum().backward()
    near(
        [logits.grad, *[t.grad for t in args]], [torch.tensor([0.0, 23, 23, 23], device=device), *[0 * a for a in args]]
    )


@kernels
@pytest.mark.parametrize("given", [{"prefix": 21}, {"prefix": 500}, {"prefix": 0}, {"prefix": 64}], ids=str)
@pytest.mark.parametrize("causal", [True, "bottom_right"])
@pytest.mark.parametrize("sizes", [(70, 75), (75, 40), (1, 90)])
def test_a_prefix_is_a_mask(sizes: tuple[int, int], causal: Any, given: dict[str, Any], device: str) -> None:
    """It equals a mask in memory, in o and gradients."""
    rows, columns = sizes
    args = qkv((1, 2, rows, 16), (1, 1, columns, 16), device)
    last = torch.arange(rows, device=device)[:, None] + (columns - rows if causal == "bottom_right" else 0)
    j = torch.arange(columns, device=device)
    mask = (j <= last) | (j < given["prefix"])
    want = exact(args, mask=mask, return_lse=True)
    for impl in ("triton", *PLAIN):
        found = outcome(ridgeline.attention, args, causal=causal, return_lse=True, impl=impl, **given)
        near(found, want)


@kernels
@pytest.mark.parametrize("window", [(7, 3), (0, None), (None, 0), (100, 2)])
@pytest.mark.parametrize("sizes", [(40, 75), (75, 40)])
def test_windows_from_the_bottom_right(sizes: tuple[int, int], window: Any, device: str) -> None:
    """They equal a mask in memory; from the top left, today's windows."""
    rows, columns = sizes
    args = qkv((1, 2, rows, 16), (1, 1, columns, 16), device)
    apart = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    left, right = (10**6 if w is None else w for w in window)
    for align, shift in (("top_left", 0), ("bottom_right", columns - rows)):
        mask = (apart >= shift - left) & (apart <= shift + right)
        want = exact(args, mask=mask, return_lse=True)
        for impl in ("triton", *PLAIN):
            given = {"window": window, "window_align": align, "impl": impl, "return_lse": True}
            near(outcome(ridgeline.attention, args, **given), want)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "given",
    [{"causal": True}, {"causal": True, "prefix": 20}, {"window": (9, 4), "window_align": "bottom_right"}],
    ids=str,
)
def test_packed_sequences(given: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Each is its own call of attention: sinks, their gradient over all, and tokens after the last sequence."""
    ends, keys = [0, 33, 33, 70], [0, 40, 47, 90]
    q, k, v = (
        make(n, h, 64, device=device, dtype=dtype, dice=i) for i, (n, h) in enumerate(((70, 4), (90, 2), (90, 2)))
    )
    logits = sinks(device)
    cu = [torch.tensor(e, dtype=torch.int32, device=device) for e in (ends, keys)]

    def single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        made = []
        for n in range(3):
            own = slice(ends[n], ends[n + 1]), slice(keys[n], keys[n + 1])
            heads = [t[part].transpose(0, 1)[None] for t, part in ((q, own[0]), (k, own[1]), (v, own[1]))]
            made.append(get("attention").reference(*heads, sinks=s, **given)[0].transpose(0, 1))
        return torch.cat(made)

    wide = [t.detach().double().requires_grad_() for t in (q, k, v, logits)]
    want = outcome(single, wide)
    for impl in ("tiled", *HERE):
        if why_not(get("attention_varlen").implementations[impl], q, k, v, *cu, **given):
            continue

        def packed(q: Any, k: Any, v: Any, s: Any, impl: str = impl) -> Any:
            return ridgeline.attention_varlen(q, k, v, *cu, sinks=s, impl=impl, **given)

        size = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        for one, other in zip(outcome(packed, [q, k, v, logits]), want, strict=True):
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, check_dtype=False, rtol=size, atol=size * scale)


def test_derivatives_are_differences() -> None:
    """gradcheck of the reference and of `tiled`, sinks and prefix included."""
    q, k, v = [t.detach().double().requires_grad_() for t in qkv((1, 2, 5, 16), (1, 1, 6, 16), "cpu")]
    s = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    for call in (get("attention").reference, get("attention").implementations["tiled"].call):
        for given in ({"causal": True, "prefix": 3}, {"window": (1, 1), "window_align": "bottom_right"}):

            def loss(*args: torch.Tensor, call: Any = call, given: dict[str, Any] = given) -> Any:
                return as_tuple(call(*args[:3], sinks=args[3], return_lse=True, **given))

            assert torch.autograd.gradcheck(loss, (q, k, v, s))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_dtypes_and_strides_of_sinks(dtype: torch.dtype, device: str) -> None:
    """A sink's gradient has its dtype; strided ones are taken, and the same sink for all heads."""
    args = qkv((1, 4, 20, 16), (1, 2, 20, 16), device)
    logits = torch.tensor([1.0, 9, 2, 9, 0, 9, -1, 9], device=device, dtype=dtype).requires_grad_()
    for taken in (lambda t: t[::2], lambda t: t[:1].expand(4)):
        (got,) = torch.autograd.grad(ridgeline.attention(*args, sinks=taken(logits), impl="triton").sum(), logits)
        wide = [t.detach().double() for t in args]
        exact_logits = logits.detach().double().requires_grad_()
        o = get("attention").reference(*wide, sinks=taken(exact_logits))
        (want,) = torch.autograd.grad(o.sum(), exact_logits)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("given", [{"causal": True}, {"causal": True, "window": (127, 0)}, {}], ids=str)
def test_sinks_in_bfloat16(given: dict[str, Any], D: int) -> None:
    """By the law for o and lse; the sinks' gradient, too, and bitwise equal reruns."""
    args = qkv((2, 8, 1000, D), (2, 2, 1000, D), "cuda", dtype=torch.bfloat16)
    logits = torch.linspace(-2, 6, 8, device="cuda").requires_grad_()
    lawful("attention", args, given | {"sinks": logits.detach(), "return_lse": True}, HERE)
    wide = [t.detach().double().requires_grad_() for t in args]
    want = results(None, wide, logits.detach().double().requires_grad_(), **given)[-1]
    for impl in HERE:
        first, second = (results(impl, args, logits, **given) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert float((first[-1] - want).norm() / want.norm()) < 2e-2, impl


@pytest.mark.skipif(INTERPRETED, reason="torch.compile needs no interpreter")
def test_compiled_in_one_graph() -> None:
    args = qkv((1, 2, 9, 16), (1, 1, 9, 16), "cpu")
    logits = torch.tensor([0.5, -1.0], requires_grad=True)

    def call(q: Any, k: Any, v: Any, s: Any) -> Any:
        return ridgeline.attention(q, k, v, sinks=s, causal=True, prefix=4)

    near(
        outcome(torch.compile(call, fullgraph=True, backend="aot_eager"), [*args, logits]),
        outcome(call, [*args, logits]),
    )
