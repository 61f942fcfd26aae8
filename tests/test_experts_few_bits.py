"""moe with experts of int8, int4 and mxfp4 codes: against the same weights in full, many rows, layouts, refusals."""

from typing import Any

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline import formats
from ridgeline.lab.measurement.law import Law
from ridgeline.nn import MoE, QuantizedMoE
from ridgeline.op import RidgelineError, get

pytestmark = pytest.mark.kernels
KINDS = ("int8", "int4", "mxfp4")


def layer(
    kind: str, T: int, E: int, k: int, H: int, width: int, dtype: torch.dtype, device: str, group: int = 32
) -> tuple[list[torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """The arguments of moe, its options, and the weights in full that the codes stand for, in float32."""
    x, weights = torch.randn(T, H, device=device).to(dtype), torch.rand(T, k, device=device)
    indices = torch.randint(0, E, (T, k), device=device)
    coded = [
        QuantizedMoE.codes(torch.randn(s, device=device) / 8, kind, group) for s in ((E, 2 * width, H), (E, H, width))
    ]
    full = []
    for q, scale, zero in coded:
        if kind == "mxfp4":
            w = torch.stack([formats.unpack_mxfp4(a, b) for a, b in zip(q, scale, strict=True)])
        elif kind == "int8":
            w = q.float() * scale[..., None]
        else:
            numbers = torch.stack((q & 15, q >> 4), -1).flatten(2).float().unflatten(2, (-1, group))
            w = ((numbers - zero[..., None].float()) * scale[..., None]).flatten(2)
        full.append(w)
    (gate_up, s, a), (down, t, b) = coded
    options = {"scales": (s, t), "zeros": None if a is None else (a, b)}
    return [x, weights, indices, gate_up, down], options, full


def close(y: torch.Tensor, given: list[torch.Tensor], full: list[torch.Tensor], **options: Any) -> None:
    """Fails unless y is near the float64 result of the weights in full."""
    x, weights, indices, *_ = given
    exact = ridgeline.moe(x.double(), weights.double(), indices, *[w.double() for w in full], impl="naive", **options)
    error = (y.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[y.dtype], float(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "unit", [{}, {"activation": "swiglu_oai", "limit": 0.5, "interleaved": True}], ids=["silu", "oai"]
)
def test_codes_are_the_weights(kind: str, dtype: torch.dtype, unit: dict[str, Any], device: str) -> None:
    given, few, full = layer(kind, 9, 4, 2, 96, 64, dtype, device)
    biases = {"gate_up_bias": torch.randn(4, 128, device=device), "down_bias": torch.randn(4, 96, device=device)}
    for impl in ("naive", "torch", "triton"):
        own = {n: b.to(dtype) for n, b in biases.items()}
        y = ridgeline.moe(*given, **own, **few, **unit, impl=impl)
        close(y, given, full, **unit, **{n: b.double() for n, b in own.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_more_rows_than_a_tile_and_of_none(kind: str, device: str) -> None:
    given, few, full = layer(kind, 40, 3, 2, 64, 32, torch.float32, device)
    given[2] = torch.where(given[2] == 1, 0, given[2])
    close(ridgeline.moe(*given, **few, impl="triton"), given, full)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_take_weights_in_full(kind: str, device: str) -> None:
    given, few, full = layer(kind, 130, 2, 1, 64, 32, torch.float32, device)
    close(ridgeline.moe(*given, **few, impl="triton"), given, full)


def test_a_group_that_kernels_do_not_take(device: str) -> None:
    given, few, full = layer("int4", 5, 3, 2, 48, 16, torch.float32, device, group=16)
    close(ridgeline.moe(*given, **few), given, full)
    with pytest.raises(RidgelineError, match="cannot run this call: it takes groups of a multiple of 32 columns"):
        ridgeline.moe(*given, **few, impl="triton")


def test_no_tokens_and_leading_dimensions(device: str) -> None:
    given, few, _ = layer("int4", 6, 4, 2, 32, 32, torch.float32, device)
    flat = ridgeline.moe(*given, **few)
    shaped = ridgeline.moe(*[t.view(2, 3, -1) for t in given[:3]], *given[3:], **few)
    assert torch.equal(shaped.view(6, 32), flat)
    none = ridgeline.moe(*[t[:0] for t in given[:3]], *given[3:], **few)
    assert none.shape == (0, 32)


def test_codes_that_are_a_slice_of_others(device: str) -> None:
    given, few, _ = layer("mxfp4", 4, 3, 2, 64, 32, torch.float32, device)
    room = [torch.cat([q, q], 1)[:, : q.shape[1]] for q in given[3:]]
    assert torch.equal(ridgeline.moe(*given[:3], *room, **few), ridgeline.moe(*given, **few))


def test_gradients_are_refused(device: str) -> None:
    given, few, _ = layer("int8", 4, 3, 2, 32, 32, torch.float32, device)
    given[1].requires_grad_()
    with pytest.raises(RidgelineError, match=r"moe: quantised experts have no gradients; call it under torch.no_grad"):
        ridgeline.moe(*given, **few)
    with torch.no_grad():
        ridgeline.moe(*given, **few)


def test_compile_in_one_graph(device: str) -> None:
    torch._dynamo.reset()
    given, few, _ = layer("int4", 4, 3, 2, 32, 32, torch.float32, device)
    work = torch.compile(lambda: ridgeline.moe(*given, **few, impl="triton"), backend="aot_eager", fullgraph=True)
    assert torch.equal(work(), ridgeline.moe(*given, **few, impl="triton"))


def test_operations_are_counted(device: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given, few, _ = layer("int4", 4, 3, 2, 32, 64, torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        ridgeline.moe(*given, **few, impl="triton")
    assert counter.get_total_flops() == 6 * 4 * 2 * 32 * 64
    cost, backward = get("moe").cost(*given, **few)
    read = sum(t.numel() * t.element_size() for t in (*given, *few["scales"], *few["zeros"]))
    assert (cost.read, cost.flops, backward) == (read, 6 * 4 * 2 * 32 * 64, None)


@pytest.mark.parametrize("kind", KINDS)
def test_module(kind: str, device: str) -> None:
    full = MoE(64, 32, 4, 2, shared=8, scale=1.5, balance=0.1, score="sigmoid", device=device).eval()
    few = QuantizedMoE.of(full, kind)
    assert few.router is full.router
    assert sum(b.numel() * b.element_size() for b in few.buffers()) < full.gate_up_proj.numel() * 4
    x = torch.randn(2, 3, 64, device=device)
    with torch.no_grad():
        y, exact = few(x), full(x)
        assert (y - exact).norm() < {"int8": 0.02, "int4": 0.2, "mxfp4": 0.3}[kind] * exact.norm()
        other = QuantizedMoE(64, 32, 4, 2, kind=kind, shared=8, scale=1.5, balance=0.1, score="sigmoid", device=device)
        other.load_state_dict(few.state_dict())
        assert torch.equal(other(x), y)
    with pytest.raises(RidgelineError, match="no gradients"):
        few(x)


def test_module_refuses() -> None:
    for options, words in (
        ({"kind": "int3"}, "kind must be 'int8', 'int4' or 'mxfp4', got 'int3'"),
        ({"kind": "int4", "group": 24}, "group=24 divides 64 columns"),
        ({"kind": "mxfp4"}, "divides 40 columns of mxfp4"),
    ):
        with pytest.raises(RidgelineError, match=words):
            QuantizedMoE(64, 40, 4, 2, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(128, 8, 512, 768), (8, 4, 2880, 2880)], ids=str)
def test_layers_in_bfloat16(kind: str, tokens: int, sizes: tuple[int, ...]) -> None:
    """Sizes of which the law's copies in float64 take a few GiB."""
    given, few = layer(kind, tokens, *sizes, torch.bfloat16, "cuda", group=64)[:2]
    few = {n: list(v) for n, v in few.items() if v is not None}
    law, rung = Law(get("moe"), given, few), get("moe").implementations["triton"]
    first, again = law.run(rung), law.run(rung)
    verdict = law.judge(*first)
    assert verdict.ok, verdict.reason()
    assert torch.equal(first[0][0], again[0][0])


@pytest.mark.gpu
def test_graph() -> None:
    given, few, _ = layer("int4", 32, 8, 2, 128, 64, torch.bfloat16, "cuda")
    replay = captured(lambda: (ridgeline.moe(*given, **few),), before=3)
    given[0].copy_(torch.randn(32, 128, device="cuda"))
    assert torch.equal(replay()[0], ridgeline.moe(*given, **few))
