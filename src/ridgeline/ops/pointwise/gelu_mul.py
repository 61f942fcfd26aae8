"""gelu_mul: y = gelu(gate) * up: the gate of a GEGLU feed-forward layer, with the tanh or the exact form of gelu.

    backward: dgate = dy up gelu'(gate),  dup = dy gelu(gate)

One pass: gate and up are read once and y written once; backward reads three tensors and writes two.
Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it in a kernel's module

from ridgeline.op import Case, Cost, Op, RidgelineError, Spec
from ridgeline.ops.pointwise._generator import Pointwise, pair_cost
from ridgeline.tiles.activations import gelu, gelu_slope, gelu_tanh, gelu_tanh_slope


@triton.jit
def _tanh(gate, up):
    return gelu_tanh(gate) * up


@triton.jit
def _tanh_grad(dy, gate, up):
    value, slope = gelu_tanh_slope(gate)
    return dy * up * slope, dy * value


@triton.jit
def _exact(gate, up):
    return gelu(gate) * up


@triton.jit
def _exact_grad(dy, gate, up):
    value, slope = gelu_slope(gate)
    return dy * up * slope, dy * value


FORWARD, BACKWARD = {"none": _exact, "tanh": _tanh}, {"none": _exact_grad, "tanh": _tanh_grad}
KERNELS = Pointwise("gelu_mul", ["gate", "up"], FORWARD, BACKWARD, floating=True)


def reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))) * up
    return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up


def gelu_mul(
    gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh", *, impl: str | None = None
) -> torch.Tensor:
    """`gelu(gate) * up`, element by element.

    gate, up: floating-point tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    approximate: "tanh", or "none" (erf). Gradients flow to both.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """
    if approximate not in ("none", "tanh"):
        raise RidgelineError(f'gelu_mul: approximate must be "none" or "tanh", but is {approximate!r}')
    (plain,) = KERNELS.look(gate, up, impl)
    return plain(gate, up, approximate) if plain else KERNELS(impl, gate, up, mode=approximate)


def cost(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> tuple[Cost, Cost]:
    return pair_cost(gate, up, 11, 20)


LARGE, SMALL = Spec(16384, 8192), Spec(1024, 1024)
KERNELS.op = GELU_MUL = Op(
    gelu_mul,
    reference=reference,
    cost=cost,
    sharding="gate *, up * -> *",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(33, 129))),
        Case("33x129 none", (Spec(33, 129), Spec(33, 129), "none")),
        Case("33x129 * 33x1", (Spec(33, 129), Spec(33, 1))),
        Case("1024x1024", (SMALL, SMALL), use="quick"),
        Case("16384x8192", (LARGE, LARGE), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x8192 none", (LARGE, LARGE, "none"), dtypes=("bfloat16",), use="bench"),
    ],
)

GELU_MUL.eager("naive", "the formula in eager PyTorch: ten passes over memory", reference)
GELU_MUL.eager(
    "torch",
    "PyTorch's gelu, then a product: two passes",
    lambda gate, up, approximate="tanh": F.gelu(gate, approximate=approximate) * up,
    served=True,
)
GELU_MUL.compiled("the formula fused into one Triton kernel by torch.compile")
KERNELS.triton("a block of elements per program; wide loads left to the compiler; backward in one pass")
