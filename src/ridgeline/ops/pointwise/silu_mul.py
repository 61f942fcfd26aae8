"""silu_mul: y = silu(gate) * up, silu(g) = g sigmoid(g): the gate of a SwiGLU feed-forward layer.

    backward: dgate = dy up s (1 + g (1 - s)),  dup = dy g s,  s = sigmoid(g)

One pass reads gate and up and writes y; backward reads three tensors, writes two, and needs only the inputs. Source:
Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it in a kernel's module

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.pointwise._generator import Pointwise, pair_cost
from ridgeline.tiles.activations import silu, silu_slope


@triton.jit
def _fwd(gate, up):
    return silu(gate) * up


@triton.jit
def _bwd(dy, gate, up):
    value, slope = silu_slope(gate)
    return dy * up * slope, dy * value


KERNELS = Pointwise("silu_mul", ["gate", "up"], {"": _fwd}, {"": _bwd}, floating=True)


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def silu_mul(gate: torch.Tensor, up: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """`silu(gate) * up`, element by element.

    gate, up: floating-point tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    Gradients flow to both.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """
    (plain,) = KERNELS.look(gate, up, impl)
    return plain(gate, up) if plain else KERNELS(impl, gate, up)


def cost(gate: torch.Tensor, up: torch.Tensor) -> tuple[Cost, Cost]:
    return pair_cost(gate, up, 6, 12)


LARGE = Spec(16384, 8192)
KERNELS.op = SILU_MUL = Op(
    silu_mul,
    reference=reference,
    cost=cost,
    sharding="gate *, up * -> *",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(33, 129))),
        Case("33x129 * 129", (Spec(33, 129), Spec(129))),
        Case("1001 * float32", (Spec(1001), Spec(1001, dtype="float32"))),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024, 1024)), use="quick"),
        Case("16384x8192", (LARGE, LARGE), dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

SILU_MUL.eager("naive", "the formula in eager PyTorch: three passes over memory", reference)
SILU_MUL.eager("torch", "PyTorch's silu, then a product: two passes", lambda gate, up: F.silu(gate) * up, served=True)
SILU_MUL.compiled("the formula fused into one Triton kernel by torch.compile")
KERNELS.triton("a block of elements per program; wide loads left to the compiler; backward in one pass")
