"""Gradients as PyTorch's engine passes them on: each belongs to the caller, and our inputs are never changed."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import ridgeline
from graphs import captured
from ridgeline import bias_mask_scale_add, dropout, gemv, matmul, rope
from ridgeline import device as devices
from ridgeline.boundary import Launch, observe
from ridgeline.lab.measurement.law import Law, as_tuple, leaves
from ridgeline.op import Op, RidgelineError, _copy, registry
from ridgeline.select import never, why_not

pytestmark = pytest.mark.kernels

OPS = {
    name: op
    for name, op in registry().items()
    if any(i.is_kernel and i.differentiable for i in op.implementations.values())
}
OPS = {name: op for name, op in OPS.items() if not op.mutates}
FIRST = {name: next(c for c in op.cases if c.use == "check") for name, op in OPS.items()}


def distinct(*tensors: torch.Tensor) -> bool:
    """Returns whether no two share memory."""
    places = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return len(set(places)) == len(places)


@pytest.mark.parametrize("name", OPS)
def test_twice_in_a_graph(name: str, device: str) -> None:
    """Two calls, one incoming gradient, two backwards: every .grad passes the law and has its own memory."""
    op = OPS[name]
    law = Law.of(op, FIRST[name].name, "float32", device)
    args, others = _copy(law.args), _copy(law.args)
    outputs = as_tuple(op.function(*args, **law.kwargs))
    pairs = zip(outputs, as_tuple(op.function(*others, **law.kwargs)), law.incoming, strict=True)
    sums, incoming = zip(*[(o + p, g) for o, p, g in pairs if o.requires_grad], strict=True)
    before = [g.clone() for g in incoming]
    wanted = [*leaves(args), *leaves(others)]
    for _ in range(2):
        torch.autograd.backward(sums, incoming, retain_graph=True)
        assert distinct(*[t.grad for t in wanted], *incoming)
    for some in (args, others):
        verdict = law.judge([o.detach() for o in outputs], [t.grad / 2 for t in leaves(some)])
        assert verdict.ok, verdict.reason()
    for k in range(len(sums)):  # one output alone
        for t in wanted:
            t.grad = None
        torch.autograd.backward(sums[k], incoming[k], retain_graph=True)
        assert distinct(*[t.grad for t in wanted if t.grad is not None], *incoming)
        torch.autograd.grad(sums[k], wanted, incoming[k], create_graph=True, allow_unused=True)
    for was, g in zip(before, incoming, strict=True):
        assert torch.equal(was, g)
        assert not g.requires_grad


@pytest.mark.parametrize("shape", [(33, 8), (1, 8), (8,), ()])
def test_a_gradient_passed_on(shape: tuple[int, ...], device: str) -> None:
    """bias_mask_scale_add returns dy itself, or its sums, as the gradient of `add`."""
    x, bias, mask = (torch.randn(s, device=device) for s in ((33, 8), (8,), (33, 8)))
    one, other = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    dy = torch.randn(33, 8, device=device)
    before = dy.clone()
    y = sum(bias_mask_scale_add(x, bias, mask, 2.0, add, impl="triton") for add in (one, other))
    for times in (1, 2):
        y.backward(dy, retain_graph=True)
        assert torch.equal(dy, before)
        for t in (one, other):
            torch.testing.assert_close(t.grad, times * dy.sum_to_size(shape))
    assert distinct(one.grad, other.grad, dy)


@pytest.mark.parametrize("impl", [None, *OPS["matmul"].implementations])
@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_matmul_under_autocast(impl: str | None, dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Dtypes and values, also of gradients, are those of torch.matmul; without autocast two dtypes are refused."""
    if impl is not None and (rung := OPS["matmul"].implementations[impl]).is_kernel:
        reason = never(rung, "fwd", torch.float64 if torch.float64 in dtypes else torch.float16, devices.here())
        if reason:
            pytest.skip(reason)
    a, w = (torch.randn(16, 16, device=device, dtype=d, requires_grad=True) for d in dtypes)
    options = {"impl": impl} | ({"accumulate": "float16"} if impl == "triton_half" else {})
    with torch.autocast(device, dtype=torch.float16):
        y, expected = matmul(a, w, **options), torch.matmul(a, w)
        row = matmul(a[0], w, **options)
    assert (y.dtype, row.dtype) == (expected.dtype, expected.dtype)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, (a, w), dy) for out in (y, expected))
    loose = {} if torch.float64 in dtypes else {"rtol": 1e-3, "atol": 1e-5}  # float32 computed in float16
    torch.testing.assert_close(found, wanted, **loose)
    if dtypes[0] != dtypes[1]:
        with pytest.raises(RidgelineError, match="must agree"):
            matmul(a, w, **options)


OWN = {  # of torch itself: the implementation `torch` rounds torch's result to the input's dtype
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "rms_norm": lambda x, w: F.rms_norm(
        x.float(), w.shape, w.float(), 1e-6
    ),  # not on autocast's list in torch 2.11, but in later versions
    "add_layer_norm": lambda x, residual, w, b: (F.layer_norm(x + residual, w.shape, w, b), x + residual),
    "add_rms_norm": lambda x, residual, w: (F.rms_norm((x + residual).float(), w.shape, w.float(), 1e-6), x + residual),
    "group_norm": F.group_norm,
}
DTYPES = [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "parameters"), DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_under_autocast(name: str, dtype: str, parameters: str) -> None:
    """Dtypes, also of gradients, are those of torch under autocast (of the formula, if torch has no such op); values
    are close.

    parameters: the dtype of weights and biases."""
    op = OPS[name]
    args, kwargs = FIRST[name].make(dtype, "cuda")
    for n, a in enumerate(args):
        if isinstance(a, torch.Tensor) and a.dim() == 1 and a.is_floating_point() and a.numel() < args[0].numel():
            args[n] = a.detach().to(getattr(torch, parameters)).requires_grad_(a.requires_grad)
    plain = op.implementations.get("torch") or op.implementations["naive"]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, theirs = (as_tuple(call(*args, **kwargs)) for call in (op.function, OWN.get(name, plain.call)))
    assert [o.dtype for o in ours] == [o.dtype for o in theirs]
    incoming = [torch.randn_like(o) for o in ours]
    grads = [torch.autograd.grad(outputs, leaves(args), incoming) for outputs in (ours, theirs)]
    for one, other in zip([*ours, *grads[0]], [*theirs, *grads[1]], strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= 2**-5 * other.double().norm()


def _called(op: Op, impl: str, device: str) -> tuple[Callable[..., Any], torch.Tensor]:
    """Returns the op's first case as a function of its first tensor alone, and that tensor."""
    args, kwargs = FIRST[op.name].make("float32", device)
    place = next(k for k, a in enumerate(args) if isinstance(a, torch.Tensor))
    given = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]

    def f(x: torch.Tensor) -> torch.Tensor:
        return as_tuple(op.function(*given[:place], x, *given[place + 1 :], **kwargs, impl=impl))[0]

    return f, given[place]


def kernel_of(op: Op, device: str) -> str:
    """Returns the Triton implementation or, if there is none, the last served one that runs the first case here."""
    served = [i for i in op.implementations.values() if i.name == "triton" or (i.served and i.is_kernel)]
    chosen = sorted(served, key=lambda i: i.name == "triton")[::-1]
    args, kwargs = FIRST[op.name].make("float32", device)
    reasons = [why_not(i, *args, *kwargs.values()) for i in chosen]
    return next((i.name for i, reason in zip(chosen, reasons, strict=True) if reason is None), None) or pytest.skip(
        str(reasons[0])
    )


@pytest.mark.parametrize("name", OPS)
def test_forward_mode(name: str, device: str) -> None:
    """Raises one sentence instead of dropping a tangent; plain PyTorch supports it. Without a tangent, calls work."""
    op = OPS[name]
    f, x = _called(op, kernel_of(op, device), device)
    expected = f(x)
    with pytest.raises(RidgelineError, match="no forward-mode derivatives"):
        torch.func.jvp(f, (x,), (x,))
    with forward_ad.dual_level():
        for primal in (x, x.clone().requires_grad_()):
            with pytest.raises(RidgelineError, match="no forward-mode derivatives"):
                f(forward_ad.make_dual(primal, torch.ones_like(x)))
        assert torch.equal(f(x), expected)
    plain = next(i.name for i in op.implementations.values() if i.kind == "eager")
    if name == "fp8_linear":  # its gradients are formulas of their own, in plain PyTorch too
        with pytest.raises(RidgelineError, match="no forward-mode derivatives"):
            torch.func.jvp(_called(op, plain, device)[0], (x,), (x,))
        return
    assert torch.func.jvp(_called(op, plain, device)[0], (x,), (x,))[1].shape == expected.shape


@pytest.mark.parametrize("name", OPS)
def test_inside_torch_func(name: str, device: str) -> None:
    f, x = _called(OPS[name], kernel_of(OPS[name], device), device)
    with pytest.raises(RidgelineError, match=r"cannot be differentiated inside torch.func.s transforms"):
        torch.func.grad(lambda x: f(x).sum())(x)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["naive", "triton"])
def test_replays_of_dropout_draw_anew(impl: str) -> None:
    """Every replay of a CUDA graph drops other elements, in backward the same as in forward.

    Calls before the capture draw on the host, with another kernel."""
    x, dy = torch.ones(1000, device="cuda", requires_grad=True), torch.ones(1000, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = dropout(x, 0.5, impl=impl)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    replay = captured(step, 3)
    seen = []
    for _ in range(2):
        y, dx = replay()
        assert torch.equal(y, dx)
        assert 300 < (y == 0).sum() < 700
        seen.append(y.clone())
    assert not torch.equal(*seen)


def test_dropout_draws_on_the_device_while_captured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a GPU: a capture would record a call whose seed comes from memory."""
    module = importlib.import_module("ridgeline.ops.pointwise.dropout")
    seeds = []
    monkeypatch.setattr(module, "_apply", lambda x, seed, *_: seeds.append(seed))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(module, "_place", lambda seed, x: (seed, 0, 0))

    class Placed(torch.Tensor):
        is_cuda = True

    x = torch.ones(8, device=device)
    dropout(x if x.is_cuda else x.as_subclass(Placed), impl="triton")
    assert seeds[0].dtype == torch.int64


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_rope_turns_what_is_needed(wanted: str, device: str) -> None:
    """If q or k alone needs a gradient, backward computes no heads of the other."""
    args, kwargs = FIRST["rope"].make("float32", device)
    expected = torch.autograd.grad(sum(t.sum() for t in rope(*args, **kwargs)), args[:2])["qk".index(wanted)]
    x = args["qk".index(wanted)]
    args = [a if a is x else a.detach() for a in args]
    y = sum(t.sum() for t in rope(*args, **kwargs, impl="triton"))
    launches: list[Launch] = []
    with observe(launches.append):
        (dx,) = torch.autograd.grad(y, x)
    assert torch.equal(dx, expected)
    for _ in range(4):  # also in replays
        y = sum(t.sum() for t in rope(*args, **kwargs, impl="triton"))
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert [h.data.numel() for h in launches[-1].args[:4]] == [t.numel() if t is x else 0 for t in args[:2]] * 2


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (6, 40)], ids=str)
def test_gemv_of_few_rows(shape: tuple[int, ...], impl: str | None, device: str) -> None:
    """The matrix's gradient is a separate product, which some implementation must serve."""
    a, x = (torch.randn(*s, device=device, requires_grad=True) for s in ((24, 40), shape))
    dy = torch.randn(*shape[:-1], 24, device=device)
    found = torch.autograd.grad(gemv(a, x, impl=impl), (a, x), dy)
    torch.testing.assert_close(list(found), list(torch.autograd.grad(F.linear(x, a), (a, x), dy)), rtol=1e-5, atol=1e-5)


def test_vmap_of_a_forward_pass(device: str) -> None:
    """One sample at a time. Values that validation cannot read inside vmap are not read."""
    logits, target = torch.randn(3, 4, 32, device=device), torch.zeros(3, 4, dtype=torch.int64, device=device)
    torch.testing.assert_close(torch.vmap(ridgeline.gelu)(logits), ridgeline.gelu(logits))
    found = torch.vmap(ridgeline.cross_entropy)(logits, target)
    wanted = torch.stack([ridgeline.cross_entropy(*one) for one in zip(logits, target, strict=True)])
    torch.testing.assert_close(found, wanted)
