"""ridgeline.nn's modules beside torch.nn's of the same names: constructor, parameters, state_dict, repr, results."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import ridgeline
from ridgeline import nn as ours
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels

# (class, constructor arguments, input shape)
TWINS = [
    ("RMSNorm", (48,), {}, (3, 5, 48)),
    ("RMSNorm", ((6, 8),), {"eps": 1e-6}, (5, 6, 8)),
    ("RMSNorm", (48,), {"elementwise_affine": False}, (5, 48)),
    ("LayerNorm", (48,), {}, (3, 5, 48)),
    ("LayerNorm", ([6, 8],), {"bias": False}, (5, 6, 8)),
    ("LayerNorm", (48,), {"elementwise_affine": False, "eps": 1e-3}, (5, 48)),
    ("GroupNorm", (3, 12), {}, (2, 12, 5, 4)),
    ("GroupNorm", (3, 12), {"affine": False, "eps": 1e-3}, (2, 12, 9)),
    ("GELU", (), {}, (5, 48)),
    ("GELU", ("tanh",), {}, (5, 48)),
    ("Softmax", (1,), {}, (3, 5, 7)),
    ("LogSoftmax", (-1,), {}, (5, 48)),
    ("Dropout", (0.25,), {}, (5, 48)),
    ("Linear", (48, 48), {}, (3, 5, 48)),
    ("Linear", (48, 48), {"bias": False}, (5, 48)),
]
named = pytest.mark.parametrize(
    ("name", "args", "kwargs", "shape"), TWINS, ids=[f"{n}{a}{''.join(map(str, k.items()))}" for n, a, k, _ in TWINS]
)


def close(mine: torch.Tensor, theirs: torch.Tensor, oracle: torch.Tensor) -> None:
    """A simple law: at most twice torch's own error, plus an ulp."""
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype
    wrong, allowed = (mine.double() - oracle).norm(), 2 * (theirs.double() - oracle).norm()
    assert wrong <= allowed + torch.finfo(mine.dtype).eps * oracle.norm()


def twins(name: str, args: tuple, kwargs: dict, device: str) -> tuple[nn.Module, nn.Module]:
    return tuple(getattr(where, name)(*args, **kwargs).to(device) for where in (ours, nn))


@named
def test_twins(name: str, args: tuple, kwargs: dict, shape: tuple, device: str) -> None:
    """A state_dict loads both ways, strictly, and outputs and gradients are torch's."""
    mine, theirs = twins(name, args, kwargs, device)
    assert isinstance(mine, type(theirs))
    assert repr(mine) == repr(theirs)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    exact = getattr(nn, name)(*args, **kwargs).to(device, torch.float64)
    exact.load_state_dict(mine.state_dict())
    if name == "Dropout":
        for module in (mine, theirs, exact):
            module.eval()
    results = []
    x = torch.randn(shape, device=device)
    slope = torch.randn(shape, device=device)
    for module, dtype in ((mine, torch.float32), (theirs, torch.float32), (exact, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        y = module(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], slope.to(dtype))])
    for three in zip(*results, strict=True):
        close(*three)


@named
def test_constructors(name: str, args: tuple, kwargs: dict, shape: tuple) -> None:
    """Arguments have torch's names, order and defaults; additional ones are keyword-only."""
    mine, theirs = (inspect.signature(getattr(where, name)).parameters for where in (ours, nn))
    shared = [p for p in mine.values() if p.name in theirs]
    assert [(p.name, p.default, p.kind) for p in shared] == [(p.name, p.default, p.kind) for p in theirs.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in mine.values() if p.name not in theirs)


@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 3}, {"label_smoothing": 0.1, "reduction": "sum"}, {"reduction": "none"}]
)
def test_cross_entropy(options: dict, device: str) -> None:
    """Losses equal torch's for two dimensions, and torch's with its classes moved last for more."""
    mine, theirs = ours.CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    assert repr(mine) == repr(theirs)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    x, target = torch.randn(4, 6, 33, device=device), torch.randint(33, (4, 6), device=device)
    for logits, labels in ((x, target), (x[0], target[0])):
        leaves = [logits.detach().clone().to(d).requires_grad_() for d in (torch.float32, torch.float32, torch.float64)]
        losses = [
            mine(leaves[0], labels),
            *(theirs(leaf.movedim(-1, 1) if leaf.dim() > 2 else leaf, labels) for leaf in leaves[1:]),
        ]
        close(*losses)
        close(*(torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in zip(losses, leaves, strict=True)))


def test_cross_entropy_constructor() -> None:
    mine, theirs = (inspect.signature(where.CrossEntropyLoss).parameters for where in (ours, nn))
    assert [(n, p.default) for n, p in mine.items()][: len(theirs)] == [(n, p.default) for n, p in theirs.items()]
    assert [n for n, p in mine.items() if p.kind is p.KEYWORD_ONLY] == ["z_loss", "softcap", "logit_scale"]
    assert repr(ours.CrossEntropyLoss(z_loss=1e-4, softcap=30.0)) == "CrossEntropyLoss(z_loss=0.0001, softcap=30.0)"
    assert repr(ours.CrossEntropyLoss(softcap=30.0)) == "CrossEntropyLoss(softcap=30.0)"
    assert repr(ours.CrossEntropyLoss(logit_scale=0.5)) == "CrossEntropyLoss(logit_scale=0.5)"


def test_submodules_of_the_package() -> None:
    """`import ridgeline` is enough for what the guide names, and still imports no torch."""
    code = (
        "import sys, ridgeline; assert 'torch' not in sys.modules; ridgeline.{}; "
        "print('ridgeline.{}'.split('.')[1] in dir(ridgeline))"
    )
    for name in ("nn.RMSNorm", "optim.AdamW", "lab.benchmark", "op.RidgelineError", "RidgelineError"):
        said = subprocess.run(
            [sys.executable, "-c", code.format(name, name)], check=True, capture_output=True, text=True
        ).stdout.strip()
        assert said == "True", name
    named = "ridgeline has no 'nothing'; its ops are .*gelu.*, its modules nn, optim, hf, formats, parallel, lab, op"
    with pytest.raises(AttributeError, match=named):
        _ = ridgeline.nothing


def test_gated(device: str) -> None:
    gate, up = (torch.randn(5, 48, device=device) for _ in range(2))
    torch.testing.assert_close(ours.SiLUMul()(gate, up), nn.functional.silu(gate) * up)
    torch.testing.assert_close(ours.GELUMul()(gate, up), nn.functional.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(ours.GELUMul("none")(gate, up), nn.functional.gelu(gate) * up)
    torch.testing.assert_close(ours.QuickGELU()(gate), gate * torch.sigmoid(1.702 * gate))
    assert repr(ours.GELUMul()) == "GELUMul(approximate='tanh')"


def test_norms_of_sums(device: str) -> None:
    """AddRMSNorm and AddLayerNorm load the state_dicts of their plain counterparts, and return the sum too."""
    x, residual = (torch.randn(5, 48, device=device) for _ in range(2))
    for name in ("RMSNorm", "LayerNorm"):
        mine, theirs = getattr(ours, f"Add{name}")(48).to(device), getattr(nn, name)(48).to(device)
        with torch.no_grad():
            theirs.weight.normal_()
        mine.load_state_dict(theirs.state_dict())
        y, total = mine(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(y, theirs(x + residual))


def test_dropout(device: str) -> None:
    """In training it drops about p of the elements and scales the others; a model can leave and re-enter training."""
    x = torch.ones(64, 256, device=device)
    module = ours.Dropout(0.25)
    y = module(x)
    assert abs((y == 0).float().mean() - 0.25) < 0.02
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert not torch.equal(y, module(x))
    assert torch.equal(module.eval()(x), x)


def test_refusals() -> None:
    x = torch.randn(2, 8)
    for wrong, sentence in (
        (lambda: ours.Softmax()(x), "Softmax: dim is None"),
        (lambda: ours.LogSoftmax()(x), "LogSoftmax: dim is None"),
        (lambda: ours.Dropout(inplace=True), "inplace=True is not supported"),
        (lambda: ours.CrossEntropyLoss(torch.ones(8)), "class weights are not supported"),
        (lambda: ours.RMSNorm((4, 8))(x), r"the last dimensions must be \(4, 8\)"),
        (lambda: ours.LayerNorm(9)(x), r"the last dimensions must be \(9,\)"),
        (lambda: ours.GroupNorm(2, 6)(x), "shape"),
    ):
        with pytest.raises(RidgelineError, match=sentence):
            wrong()


def test_imports_no_op() -> None:
    """`import ridgeline.nn` imports no op; each is imported at its first call."""
    code = "import sys, ridgeline.nn; print([m for m in sys.modules if m.startswith('ridgeline.ops.')])"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_one_graph(device: str) -> None:
    """A block of these modules compiles without a break."""
    block = nn.Sequential(
        ours.RMSNorm(48), nn.Linear(48, 48), ours.GELU("tanh"), ours.LayerNorm(48), ours.Softmax(-1)
    ).to(device)
    x = torch.randn(5, 48, device=device)
    torch.testing.assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(x), block(x))
