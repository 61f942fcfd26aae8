"""The short convolution in CUDA C++: pieces of sequences for warps, and the starts of causal_conv1d.cu."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CTYPE, CudaKernel

Maybe = torch.Tensor | None
FILE = Path(__file__).with_name("causal_conv1d.cu")
FORWARD = CudaKernel(FILE, "conv_forward", "PPPPPPPiiq")
BACKWARD = CudaKernel(FILE, "conv_backward", "PPPPPPPPPPiiiiq")
CHANNELS, LANES, ROW = 8, 32, 16  # of a thread, of a warp, and bytes of a thread's part of a row
FEWEST = 64  # tokens of a call that this is for
INPUTS = 8  # of the backward launcher, which begin with the gradients of y and the state


class Tiles(NamedTuple):
    """rows: of a warp's piece, at most. warps: of a block. blocks: on a multiprocessor. group, ahead: of backward, the
    rows of a copy, and the copies in flight."""

    rows: int
    warps: int
    blocks: int
    group: int = 4
    ahead: int = 2


FORTH = Tiles(16, 4, 3)
BACK = Tiles(128, 4, 2)
SHORTEST = 32  # rows of a warp's piece in backward where there are fewer pieces than warps


def _count(tokens: int, sequences: int, packed: bool, length: int) -> int:
    """All pieces of this length, unused numbers too."""
    return tokens // length + sequences if packed else sequences * max(-(-tokens // length), 1)


def apart(x: torch.Tensor) -> int:
    """Elements between the rows of x."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0) if x.shape[0] > 1 else x.shape[2]


def _facts(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, activation: str | None, tiles: Tiles) -> dict[str, Any]:
    bias = weight if bias is None else bias
    return {
        "C": x.shape[2], "WIDTH": weight.shape[1], "SILU": activation == "silu", "HALF": x.dtype == torch.float16,
        "FILTER": CTYPE[weight.dtype], "BIAS": CTYPE[bias.dtype], "HIGH": tiles.rows, "GROUP": tiles.group,
        "AHEAD": tiles.ahead, "WARPS": tiles.warps, "BLOCKS": tiles.blocks, "block": tiles.warps * LANES,
    }  # fmt: skip


def forward(
    y: torch.Tensor, last: Maybe, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe,
    activation: str | None,
) -> None:  # fmt: skip
    sequences, tokens = x.shape[0] if ends is None else ends.numel() - 1, x.shape[1]
    across = -(-x.shape[2] // (LANES * CHANNELS))
    count = _count(tokens, sequences, ends is not None, FORTH.rows * FORTH.warps)
    launch(
        FORWARD, (across * count,), y, x, weight, bias, first, last, ends, tokens, sequences, apart(x),
        **_facts(x, weight, bias, activation, FORTH),
    )  # fmt: skip


def backward(
    dx: torch.Tensor, dweight: Maybe, dbias: Maybe, dfirst: Maybe, dy: torch.Tensor, dlast: Maybe, x: torch.Tensor,
    weight: torch.Tensor, bias: Maybe, first: Maybe, ends: Maybe, activation: str | None, add_up: Any = None,
) -> None:  # fmt: skip
    """add_up: writes the gradients of weight and bias from the programs' parts."""
    dy = dy.clone(memory_format=torch.contiguous_format) if dy.data_ptr() % ROW else dy.contiguous()
    sequences, tokens = x.shape[0] if ends is None else ends.numel() - 1, x.shape[1]
    across = -(-x.shape[2] // (LANES * CHANNELS))
    most = max(device.of(x).multiprocessors * BACK.blocks // max(across, 1), 1)
    length = BACK.rows
    while length > SHORTEST and _count(tokens, sequences, ends is not None, length) < most * BACK.warps:
        length //= 2
    count = _count(tokens, sequences, ends is not None, length)
    blocks, parts = min(most, -(-count // BACK.warps)), None
    if dweight is not None:
        shape = blocks, weight.shape[1] + 1, weight.shape[0]
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    rings = 2 * BACK.group * BACK.ahead * ROW
    shared = BACK.warps * LANES * max(rings, (weight.shape[1] + 1) * CHANNELS * 4)
    facts = _facts(x, weight, bias, activation, BACK) | {"PDL": early(device.of(x))["PDL"] and parts is not None}
    launch(
        BACKWARD, (across * blocks,), dx, parts, dfirst, dy, dlast, x, weight, bias, first, ends, tokens, sequences,
        length, count, apart(x), **facts, shared=shared,
    )  # fmt: skip
    if parts is not None:
        add_up(dweight, dbias, parts)


def unfit(*args: Any, **_: Any) -> str | None:
    """Why these kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    x, weight, bias = (args[2:] if len(args) == INPUTS else args)[:3]
    for t in (weight,) if bias is None else (weight, bias):
        if t.dtype not in CTYPE:
            return f"weight and bias must be float32, float16 or bfloat16, but have {t.dtype}"
        if not t.is_contiguous() or t.data_ptr() % ROW:
            return f"weight and bias must be contiguous and begin at multiples of {ROW} bytes"
    if x.shape[2] % CHANNELS:
        return f"the channels must be a multiple of {CHANNELS}, and are {x.shape[2]}"
    if x.data_ptr() % ROW or apart(x) % CHANNELS or x.stride(2) != 1:
        return f"the rows of x must begin at multiples of {ROW} bytes, and its channels must be contiguous"
    if x.shape[0] * x.shape[1] >= 1 << 30:
        return "there must be fewer than 2**30 rows"
    if x.shape[0] > 1 and x.shape[1] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        return "the rows of all sequences must be equally far apart"
    return None


def too_few(*args: Any, **_: Any) -> str | None:
    x = args[2 if len(args) == INPUTS else 0]
    return "few tokens are left to triton" if x.shape[1] < FEWEST else None
