"""The causal product in float32 on CUDA cores: starts of causal_product.cu, forward and for each gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel

Maybe = torch.Tensor | None
FILE = Path(__file__).with_name("causal_product.cu")
SHARED, REGISTERS = (CudaKernel(FILE, f"product_{name}", "PPPPPPiiiiff") for name in ("shared", "registers"))
STATES = CudaKernel(FILE, "segment_states", "PPPiiif")
CHAIN = CudaKernel(FILE, "chain_states", "PPPiiii")
OUTPUTS = CudaKernel(FILE, "segment_outputs", "PPPPPiiiff")
TOKENS = 16  # rows of a and b in shared memory at once
SHORTEST = 64  # tokens of a segment, at least
WARPS = 16  # of all segments on a multiprocessor, at least
WIDTHS = (32, 64, 96, 128)  # columns of a head
BACKWARD = 11  # inputs of the backward launcher, which begin with the gradients of o and the state


class Pass(NamedTuple):
    """out from a, b and c, contiguous (B, T, H, columns) in float32, and the states before and after, or None."""

    out: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    first: Maybe
    last: Maybe
    reverse: bool
    scale: float

    @property
    def factors(self) -> tuple[float, float]:
        """What multiplies new pairs, and what is read: a state is never scaled, and its gradient is."""
        return (self.scale, 1.0) if self.reverse else (1.0, self.scale)

    def facts(self) -> dict[str, Any]:
        """Macros. The kernels' D and N are the columns of a and c."""
        return {"D": self.a.shape[3], "N": self.c.shape[3], "REVERSE": self.reverse, "TOKENS": TOKENS}

    def steps(self, turned: bool) -> tuple[int, int]:
        """Elements between a state's rows and columns. turned: the caller's states lie transposed."""
        return (1, self.a.shape[3]) if turned else (self.c.shape[3], 1)


def whole(kernel: CudaKernel, one: Pass, turned: bool) -> None:
    """A block for each sequence and head."""
    (B, T, H, D), N = one.a.shape, one.c.shape[3]
    facts = one.facts() | {"block": N, "shared": 4 * D * N if kernel is SHARED else 0}
    launch(
        kernel, (B * H,), one.out, one.a, one.b, one.c, one.first, one.last, T, H, *one.steps(turned), *one.factors,
        **facts,
    )  # fmt: skip


def segmented(one: Pass, turned: bool) -> None:
    """A block for each segment of a sequence, in two passes around a sum of states in order."""
    (B, T, H, D), N = one.a.shape, one.c.shape[3]
    blocks = device.of(one.a).multiprocessors * WARPS * 32 // N
    count = max(min(-(-blocks // max(B * H, 1)), T // SHORTEST), 1)
    tokens = max(-(-T // count), 1)
    count = max(-(-T // tokens), 1)
    starts = torch.empty((count, B * H, D, N), dtype=torch.float32, device=one.a.device)
    facts, steps = one.facts(), one.steps(turned)
    launch(STATES, (B * H, count), starts, one.b, one.c, T, H, tokens, one.factors[0], **facts, block=N)
    blocks = -(-B * H * D * N // 256)
    launch(CHAIN, (blocks,), starts, one.first, one.last, B * H, count, *steps, **facts, block=256)
    launch(
        OUTPUTS, (B * H, count), one.out, starts, one.a, one.b, one.c, T, H, tokens, *one.factors, **facts, block=N
    )  # fmt: skip


WAYS: dict[str, Any] = {
    "cuda": partial(whole, SHARED),
    "cuda_registers": partial(whole, REGISTERS),
    "cuda_segments": segmented,
}


def fwd(way: Any, o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    q, k, v, _, _, first, _, scale, _ = inputs
    way(Pass(o, q, k, v, first, last, False, scale), False)


def bwd(way: Any, dq: Any, dk: Any, dv: Any, dg: Any, du: Any, dfirst: Any, do: Any, dlast: Any, *inputs: Any) -> None:
    """Three passes. Those of q and k hold the state with v's columns as rows, so it lies transposed for them."""
    q, k, v, _, _, first, _, scale, _ = inputs
    do = do.clone(memory_format=torch.contiguous_format) if do.data_ptr() % 16 else do.contiguous()
    way(Pass(dq, do, v, k, first, None, False, scale), True)
    way(Pass(dk, v, do, q, dlast, None, True, scale), True)
    way(Pass(dv, k, q, do, dlast, dfirst, True, scale), False)


def unfit(*args: Any, **given: Any) -> str | None:
    """Why these kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    args = args[2:] if len(args) == BACKWARD else args
    q, k, v = args[:3]
    others = [*args[3:], given.get("cu_seqlens")]
    if any(isinstance(t, torch.Tensor) and t.dtype in (torch.int32, torch.int64) for t in others):
        return "it takes no packed sequences"
    if q.shape[2] != v.shape[2]:
        return f"it takes as many heads of q and k as of v, got {q.shape[2]} and {v.shape[2]}"
    if any(isinstance(t, torch.Tensor) and not t.is_contiguous() for t in args[3:]):
        return "it takes contiguous states"
    if q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return f"a head has {', '.join(map(str, WIDTHS))} columns, got {q.shape[3]} and {v.shape[3]}"
    if any(not t.is_contiguous() or t.data_ptr() % 16 for t in (q, k, v)):
        return "it takes contiguous tensors that begin at a multiple of 16 bytes"
    return None
