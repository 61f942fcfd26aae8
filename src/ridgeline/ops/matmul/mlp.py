"""mlp: y = activation(x W1^T + b1) W2^T + b2, both products of a small layer in one kernel.

    backward, z = x W1^T + b1 again, h = activation(z):
    dh = dy W2,  dz = dh activation'(z),  dx = dz W1,  dW1 = dz^T x,  dW2 = dy^T h,  db1, db2 = sums of dz's, dy's rows

A program keeps some rows of x and of y on the chip. It walks the hidden columns in steps: a step's products with W1,
the activation, and their products with W2, which are added to y. So hidden values are never in memory; backward makes
them again. Source: OneFlow's fused MLP; the order of the loops is that of FlashAttention without a softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import differentiate
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _mlp
from ridgeline.ops.matmul._activated import ACTIVATIONS, known
from ridgeline.ops.matmul.matmul import agree, in_autocast, rows_of
from ridgeline.select import by_kind, eager

_T = torch.Tensor
_Maybe = torch.Tensor | None


def reference(x: _T, w1: _T, w2: _T, *, b1: _Maybe = None, b2: _Maybe = None, activation: str = "relu") -> _T:
    return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)


def _check(x: Any, w1: Any, w2: Any, b1: Any, b2: Any, activation: Any) -> None:
    agree("mlp", x=x, w1=w1, w2=w2, **{n: t for n, t in (("b1", b1), ("b2", b2)) if t is not None})
    known("mlp", activation, none=False)
    if w1.dim() != 2 or w2.dim() != 2 or not x.dim() or x.shape[-1] != w1.shape[1] or w1.shape[0] != w2.shape[1]:
        shapes = f"{tuple(x.shape)}, {tuple(w1.shape)} and {tuple(w2.shape)}"
        raise RidgelineError(f"mlp: x must be (..., K), w1 (H, K) and w2 (N, H), but they are {shapes}")
    for name, b, w in (("b1", b1, w1), ("b2", b2, w2)):
        if b is not None and b.shape != w.shape[:1]:
            raise RidgelineError(f"mlp: {name} must be {tuple(w.shape[:1])}, but is {tuple(b.shape)}")


def mlp(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None, activation: str = "relu", impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ w1.T + b1) @ w2.T + b2`, (..., N). Gradients flow to all tensors.

    x: (..., K); w1: (H, K); w2: (N, H), laid out as the weights of `torch.nn.Linear`; b1: (H,), b2: (N,) or None; one
    dtype and device, any strides. activation: "relu", "silu", "gelu" or "gelu_tanh", on float32 sums.
    The kernel takes up to 256 columns of x and of y, and any number of hidden ones; wider layers are two products.
    Hidden values are rounded to x's dtype between the products, as in PyTorch, and backward makes them again.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, w1, w2, b1, b2 = in_autocast(x, w1, w2, b1, b2)
    (plain,) = _look(x, w1, w2, b1, b2, activation, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, w1, w2, b1=b1, b2=b2, activation=activation)
    b1, b2 = (None if b is None else b.contiguous() for b in (b1, b2))
    y: torch.Tensor = differentiate(_mlp.Layer, rows_of(x), w1, w2, b1, b2, activation, impl)
    return y.view(*x.shape[:-1], w2.shape[0])


@by_kind(5, optional=2, plain=True)
def _look(
    x: Any, w1: Any, w2: Any, b1: Any, b2: Any, activation: str, impl: str | None
) -> tuple[Implementation | None]:
    """Checks a call and chooses."""
    _check(x, w1, w2, b1, b2, activation)
    return (eager(MLP, impl, x, w1, w2, b1=b1, b2=b2, activation=activation),)


def _refusal(x: _T, w1: _T, w2: _T, *_: Any, **__: Any) -> str | None:
    """Returns why the kernel cannot take a call, or None. Takes public arguments or a launcher's inputs."""
    if max(x.shape[-1], w2.shape[0]) > _mlp.WIDEST:
        return "x and y must have few columns (at most 256 each) to stay on the chip"
    return "the inner sizes must not be 0" if 0 in w2.shape or 0 in w1.shape else None


def _unless(x: _T, w1: _T, w2: _T, *rest: Any, **options: Any) -> str | None:
    """Returns why a call is left to two products, or None: hidden values in memory must cost more than they save."""
    if x.dtype == torch.float32:
        return "cuBLAS is faster in float32"
    if _mlp.few(x.numel() // max(1, x.shape[-1]), w1.shape[0] * (x.shape[-1] + w2.shape[0])):
        return "so few programs, which each read both weights, take longer than two products of many programs"
    return _refusal(x, w1, w2)


def cost(
    x: _T, w1: _T, w2: _T, *, b1: _Maybe = None, b2: _Maybe = None, activation: str = "relu"
) -> tuple[Cost, Cost]:  # fmt: skip
    """Returns the costs. Backward's are without hidden values in memory: five products, of which one is made again."""
    rows = x.numel() // max(1, x.shape[-1])
    y, inputs = rows * w2.shape[0] * x.element_size(), nbytes(x, w1, w2)
    biases = sum([nbytes(b) for b in (b1, b2) if b is not None])
    first, second = 2 * rows * w1.numel(), 2 * rows * w2.numel()
    return Cost(inputs + biases, y, first + second), Cost(inputs + y, inputs + biases, 3 * first + 2 * second)


def _case(M: int, K: int, H: int, N: int, use: str = "check", bias: bool = False, **options: Any) -> Case:
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    more = {"b1": Spec(H), "b2": Spec(N)} if bias else {}
    name = " ".join([f"{M}x{K} -> {H} -> {N}", *(["bias"] * bias), *options.values()])
    return Case(name, (Spec(M, K), Spec(H, K), Spec(N, H)), more | options, dtypes=dtypes, use=use)


MLP = Op(
    mlp,
    reference=reference,
    cost=cost,
    sharding=lambda b2=None, **_: (
        "x ...K, w1 hK, w2 nh, b1 h -> ...n" if b2 is None else "x ...K, w1 HK, w2 nH, b1 H, b2 n -> ...n"
    ),
    flops={"mlp_again": lambda *_: 0},  # the activation alone; the products are torch's
    cases=[
        _case(67, 40, 45, 35, activation="silu"),
        _case(70, 64, 128, 32, bias=True, activation="gelu"),
        _case(17, 33, 16, 70, bias=True),
        _case(512, 64, 256, 64, use="quick"),
        _case(128, 128, 128, 128, use="bench", activation="gelu"),  # the layers of CS336's example
        _case(256, 256, 256, 256, use="bench", activation="gelu"),
        _case(65536, 13, 512, 256, use="bench", bias=True),  # DLRM's first layers
        _case(65536, 128, 512, 128, use="bench", bias=True),
        _case(65536, 256, 1024, 256, use="bench", bias=True, activation="gelu_tanh"),
    ],
)

MLP.eager("torch", "PyTorch's own: two linear calls (cuBLAS), and a pass for the activation", reference, served=True)
MLP.compiled("two products; the activation fused into one pass by torch.compile")
MLP.kernel(
    "triton",
    "both products in one kernel: hidden values stay in registers, and backward recomputes them",
    kind="triton",
    fwd=_mlp.forward,
    bwd=_mlp.forward,
    supports=_refusal,
    unless=_unless,
    leaves=("fwd",),
    served=True,
)
