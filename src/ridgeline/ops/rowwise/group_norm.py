"""group_norm: y = u or silu(u), u = (x - mean) rstd w + b, with mean and rstd = 1 / sqrt(variance + eps) of a group.

    backward, xh = (x - mean) rstd, g = dy or dy silu'(u), means over the group:
    dx = rstd (w g - mean(w g) - xh mean(w g xh)), dw = sum of g xh, db = sum of g, over images and space

A group is read once if it fits the registers of one program, or the shared memory of a thread-block cluster
(group_norm.cu). Otherwise it is read in chunks, twice, the second time from L2. Backward's sums over space, one per
channel and concurrent image, are added by a second kernel in a fixed order. SiLU costs no bytes: backward computes u
again. The floor is one read of x and one write of y; backward reads dy and x and writes dx.
Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494). Chunks take the variance around a first guess of the
mean; clusters merge their parts' as in Chan, Golub and LeVeque, 1979.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.rowwise import _group_cluster, _group_tiles
from ridgeline.ops.rowwise._channels import empty_in_format
from ridgeline.ops.rowwise._norm_options import known_eps
from ridgeline.select import eager, run


@kernel_op(
    "group_norm_fwd(Tensor x, Tensor? w, Tensor? b, int groups, float eps, bool silu, ScalarType? dtype, "
    "str? impl) -> (Tensor, Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, w: Any, b: Any, groups: int, eps: float, silu: bool, dtype: Any, impl: str | None
) -> tuple[torch.Tensor, ...]:
    y = empty_in_format(x, dtype)
    mean, rstd = [torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device) for _ in range(2)]
    run(GROUP_NORM, "fwd", impl, (y, mean, rstd), x, w, b, groups, eps, silu)
    return y, mean, rstd


@kernel_op(
    "group_norm_bwd(Tensor dy, Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor rstd, int groups, bool silu, "
    "int need, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int, silu: bool, need: int,
    impl: str | None
) -> Any:  # fmt: skip
    dx = empty_in_format(x) if need & 1 else x.new_empty(0)
    dw, db = [x.new_empty(p.shape, dtype=p.dtype) if need & bit else x.new_empty(0) for p, bit in ((w, 2), (b, 4))]
    run(GROUP_NORM, "bwd", impl, (dx, dw, db), dy, x, w, b, mean, rstd, groups, silu, need)
    return dx, dw, db


class _GroupNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float, silu: bool, dtype: Any, impl: str | None
    ) -> torch.Tensor:
        y, mean, rstd = _forward(x, w, b, groups, eps, silu, dtype, impl)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.facts = groups, silu, impl
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        groups, silu, impl = ctx.facts
        wanted = ctx.needs_input_grad[:3]
        grads = _backward(dy, *ctx.saved_tensors, groups, silu, wanted[0] + 2 * wanted[1] + 4 * wanted[2], impl)
        return *[g if w else None for g, w in zip(grads, wanted, strict=True)], *[None] * 5


def reference(
    x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
    activation: str | None = None
) -> torch.Tensor:  # fmt: skip
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (num_groups, -1)).flatten(2)
    off = rows - rows.mean(-1, keepdim=True)
    y = (off * torch.rsqrt(off.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    each = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(each)
    y = y if bias is None else y + bias.reshape(each)
    return (y * torch.sigmoid(y) if activation else y).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Each image's groups of channels normalised to mean 0 and variance 1, as `torch.nn.functional.group_norm`.

    x: (images, channels, ...), floating point, in NCHW or channels_last memory without a copy. num_groups: a divisor of
    channels. weight, bias: (channels,), of any floating dtype, or None. eps: at least 0, added to a group's variance.
    activation: None, or "silu" for u sigmoid(u) of the normalised u, in the same pass, forward and backward.
    Returns a tensor of x's shape, dtype and memory format; under autocast it is float32, as torch's is.
    Gradients flow to x, weight and bias.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        given = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"group_norm: x must be a floating-point tensor (images, channels, ...), but is {given}")
    shape = x.shape
    if not isinstance(num_groups, int) or num_groups < 1 or shape[1] % num_groups:
        raise RidgelineError(f"group_norm: num_groups must divide the {shape[1]} channels of x, but is {num_groups!r}")
    grad = x.requires_grad
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            if (
                not isinstance(p, torch.Tensor)
                or p.shape != shape[1:2]
                or p.device != x.device
                or not p.is_floating_point()
            ):
                given = f"{tuple(p.shape)} {p.dtype} on {p.device}" if isinstance(p, torch.Tensor) else type(p).__name__
                wanted = f"floating point of shape ({shape[1]},) on {x.device}"
                raise RidgelineError(f"group_norm: {name} must be {wanted}, but is {given}")
            grad = grad or p.requires_grad
    if type(eps) is not float or not eps >= 0:
        eps = known_eps("group_norm", eps)
    if activation not in (None, "silu"):
        raise RidgelineError(f"group_norm: activation must be None or 'silu', but is {activation!r}")
    silu = activation is not None
    plain = eager(GROUP_NORM, impl, x, num_groups, weight, bias, eps)
    if plain is not None and plain.call is not None:
        return plain.call(x, num_groups, weight, bias, eps, activation=activation)
    dtype = torch.float32 if x.is_cuda and x.dtype != torch.float32 and torch.is_autocast_enabled("cuda") else None
    if grad and torch.is_grad_enabled():
        return differentiate(_GroupNorm, x, weight, bias, num_groups, eps, silu, dtype, impl)
    return _forward(x, weight, bias, num_groups, eps, silu, dtype, impl)[0]


def _torch(
    x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
    activation: str | None = None
) -> torch.Tensor:  # fmt: skip
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # torch's backward fails with a bias but no weight
    if all([p is None or p.dtype == x.dtype for p in (weight, bias)]):
        y = torch.group_norm(x, num_groups, weight, bias, eps)
        return F.silu(y) if activation else y
    w, b = [None if p is None else p.float() for p in (weight, bias)]  # torch's CUDA kernel takes one dtype
    y = torch.group_norm(x.float(), num_groups, w, b, eps)
    return (F.silu(y) if activation else y).to(x.dtype)


def cost(
    x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *,
    activation: str | None = None
) -> tuple[Cost, Cost]:  # fmt: skip
    parameters = [p for p in (weight, bias) if p is not None]
    needed = parameters if activation else [weight] if weight is not None else []
    more = 4 if activation else 0
    return (
        Cost(nbytes(x, *parameters), nbytes(x), (8 + more) * x.numel()),
        Cost(2 * nbytes(x) + nbytes(*needed), nbytes(x, *parameters), (14 + 2 * more) * x.numel()),
    )


class Last(Spec):
    """Random data in channels_last memory."""

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        return x.detach().to(memory_format=torch.channels_last).requires_grad_(x.requires_grad)


def _case(name: str, x: Spec, groups: int, dtype: str | None = None, silu: bool = False, **facts: Any) -> Case:
    channels, options = x.shape[1], {"activation": "silu"} if silu else {}
    name += ", silu" if silu else ""
    return Case(name, (x, groups, Spec(channels, dtype=dtype), Spec(channels, dtype=dtype)), options, **facts)


BENCH: dict[str, Any] = {"dtypes": ("bfloat16", "float32"), "use": "bench"}
GROUP_NORM = Op(
    group_norm,
    reference=reference,
    cost=cost,
    sharding=lambda x, **_: f"x {'bCDEFG'[: x.dim()]}, weight C, bias C -> {'bCDEFG'[: x.dim()]}",
    cases=[
        _case("3x12x7x9, 4 groups", Spec(3, 12, 7, 9), 4),
        _case("3x20x7x5, 4 groups, channels last", Last(3, 20, 7, 5), 4),
        _case("4x6x100x90, 2 groups", Spec(4, 6, 100, 90), 2),
        _case("4x6x100x90, 2 groups, channels last", Last(4, 6, 100, 90), 2),
        _case("1x40x52x36, 4 groups, channels last", Last(1, 40, 52, 36), 4),
        _case("3x12x7x9, 4 groups", Spec(3, 12, 7, 9), 4, silu=True),
        _case("4x6x100x90, 2 groups, channels last", Last(4, 6, 100, 90), 2, silu=True),
        _case("1x40x52x36, 4 groups", Spec(1, 40, 52, 36), 4, silu=True),
        Case("2x10x9, 5 groups, no parameters, silu", (Spec(2, 10, 9), 5), {"activation": "silu"}),
        _case("2x8x9, 2 groups, float32 parameters", Spec(2, 8, 9), 2, "float32", dtypes=("float16", "bfloat16")),
        Case("70x40, 5 groups, no parameters", (Spec(70, 40), 5)),
        _case("1x4x2x1, 4 groups", Spec(1, 4, 2, 1), 4),
        _case("no images", Spec(0, 4, 3), 2),
        _case("2x64x32x32, 8 groups", Spec(2, 64, 32, 32), 8, use="quick"),
        _case("32x512x64x64, 32 groups", Spec(32, 512, 64, 64), 32, **BENCH),
        _case("32x512x64x64, 32 groups, channels last", Last(32, 512, 64, 64), 32, **BENCH),
        _case("32x512x64x64, 32 groups", Spec(32, 512, 64, 64), 32, silu=True, **BENCH),
        _case("32x512x64x64, 32 groups, channels last", Last(32, 512, 64, 64), 32, silu=True, **BENCH),
    ],
)

GROUP_NORM.eager("naive", "the formula in eager PyTorch, in float32: ten passes over memory", reference)
GROUP_NORM.eager("torch", "PyTorch's own kernels: statistics, a pass that scales, one for SiLU", _torch, served=True)
GROUP_NORM.compiled("the formula fused by torch.compile")
GROUP_NORM.kernel(
    "triton",
    "one group per program: in registers, or in chunks that are read twice, the second time from L2",
    kind="triton",
    fwd=_group_tiles.launch_fwd,
    bwd=_group_tiles.launch_bwd,
    served=True,
)
GROUP_NORM.kernel(
    "cuda_cluster",
    "a group (channels_last: several, 128 bytes wide) in a cluster's shared memory: read once",
    kind="cuda",
    fwd=_group_cluster.launch_fwd,
    bwd=_group_cluster.launch_bwd,
    served=True,
    arch=90,
    shared=227 << 10,
    supports=_group_cluster.fits,
)
