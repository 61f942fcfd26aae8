"""Starts of the Triton kernels: arguments in bundles, and the sizes of tiles for each GPU."""

from __future__ import annotations

from ctypes import c_float
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.ops.attention.common.arguments import LOG2E, UNBOUNDED, column_parts
from ridgeline.ops.attention.triton.scheduler import Sequences, Sizes
from ridgeline.ops.attention.triton.softmax import Mask, Scale
from ridgeline.ops.attention.triton.tiles import Heads, Rules


class Call(NamedTuple):
    """The inputs and options of a launcher; see `attention_fwd` in common/kernels.py."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float
    softcap: float
    left: int
    right: int
    bottom: bool
    prefix: int
    max_q: int
    max_k: int
    precision: str

    @property
    def apart(self) -> bool:
        """Whether scores are scaled separately from the exponential.

        They are if a mask or softcap follows, or if folding the scale in would cost float32's last bits.
        """
        return self.mask is not None or self.softcap > 0 or self.scale <= 0 or self.q.dtype == torch.float32

    @property
    def products(self) -> str:
        """How `start`'s kernels make float32 products, as `tl.dot` names it: on Hopper, a full one by three of TF32's.

        Each operand is a TF32 number and what is left of it; the product of what is left of both is dropped."""
        gpu, full = device.of(self.q), self.q.dtype == torch.float32 and self.precision == "ieee"
        return "tf32x3" if full and gpu.capability == 90 and self.q.shape[-1] <= 128 else self.precision

    def rules(self, unit: int, products: str | None = None) -> Rules:
        """products: of float32, where they are not of the call's own precision."""
        main, rest = column_parts(self.q.shape[-1])
        facts = self.left < UNBOUNDED, self.right < UNBOUNDED, self.bottom, self.softcap > 0, self.apart
        return Rules(*facts, self.q.shape[-1], main, rest, unit, products or self.precision, self.prefix > 0)

    def scales(self) -> Scale:
        return Scale(self.scale, rounded_off(self.scale) if self.apart else self.scale * LOG2E, self.softcap)

    def masked(self) -> Mask | None:
        """Returns the mask, seen with the shape of all heads' scores."""
        if self.mask is None:
            return None
        t = self.mask.view(torch.uint8) if self.mask.dtype == torch.bool else self.mask
        t = t.expand(*self.q.shape[:3], self.k.shape[2])
        return Mask(t, *steps(t))

    def sequences(self) -> Sequences | None:
        return None if self.cu_q is None else Sequences(self.cu_q, self.cu_q if self.cu_k is None else self.cu_k)


def rounded_off(scale: float) -> float:
    """Returns what float32 rounds off the scale."""
    return scale - c_float(scale).value


def steps(x: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides, 0 for dimensions of size 1."""
    return tuple([0 if size == 1 else step for size, step in zip(x.shape, x.stride())])


def step_unit(tensors: tuple[torch.Tensor, ...]) -> int:
    """Returns 8 if rows begin at multiples of 8 elements, which lets the compiler move 16 bytes at a time, else 1."""
    return 1 if any([step % 8 for t in tensors for step in steps(t)[:3]]) else 8


def heads(x: torch.Tensor, unit: int) -> Heads:
    """Returns a tensor as kernels take it, with steps in multiples of `unit`."""
    return Heads(x, *[step // unit for step in steps(x)[:3]])


def _rule(
    gpu: device.Device, kernel: str, dtype: torch.dtype, precision: str, width: int, masked: bool
) -> tuning.Config:
    """Returns a kernel's tiles for heads of `width` dimensions: BM rows of queries, BN of keys.

    With a mask they are smaller, since its tiles, in float32 too, share shared memory with those of keys and values.
    """
    found = _half(gpu, kernel, width) if dtype != torch.float32 else _single(gpu, kernel, width, precision)
    if masked and kernel == "fwd" and dtype != torch.float32 and gpu.backend == "cuda":
        rows, columns, warps, stages = found
        found = (64, 32, warps, 2) if width > 128 else (rows, min(columns, 64), warps, min(stages, 2))
        found = (*found[:3], found[3] if _roomy(gpu) else 1)
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), found))


def _roomy(gpu: device.Device) -> bool:
    """Whether a block can have the 227 KiB of shared memory that the tiles for sm_90 and sm_100 were chosen for."""
    return gpu.shared_memory >= 227 << 10


def _half(gpu: device.Device, kernel: str, width: int) -> tuple[int, int, int, int]:
    if gpu.backend == "cpu":  # the interpreter: few programs, with several blocks
        return 32, 16, 4, 1
    if gpu.backend == "hip":
        small = (64, 32, 4, 1) if width > 128 else (128, 64, 4, 1)
        return small if kernel == "fwd" else (32, 32, 4, 1) if width > 128 else (64, 64, 4, 1)
    if not _roomy(gpu):  # not timed: tiles without register spills, smaller ones on consumer cards (99 KiB)
        small = gpu.shared_memory < 128 << 10
        if kernel == "fwd":
            return (64, 32, 8, 2) if width > 128 else (64, 32 if small else 64, 4, 2) if width > 64 else (128, 64, 8, 2)
        if kernel == "bwd" and 64 < width < (129 if small else 128):
            return 32, 64, 8, 2
        return ((32, 32, 8, 2) if small and kernel == "bwd" else (32, 32, 4, 1)) if width > 128 else (64, 64, 8, 2)
    if kernel == "fwd" and gpu.capability >= 100:  # not timed either
        return (128, 32, 8, 2) if width > 128 else (128, 64, 8, 3) if width > 64 else (128, 64, 8, 2)
    if kernel == "fwd":
        return (128, 64, 8, 2) if width > 128 else (128, 128, 8, 3) if width > 64 else (128, 64, 8, 3)
    if kernel == "bwd":
        return (32, 64, 8, 2) if width > 128 else (32, 64, 4, 3) if width > 64 else (64, 64, 4, 3)
    return (64, 32, 8, 2) if width > 128 else (64, 64, 4, 2) if width > 64 else (64, 64, 4, 3)


def _single(gpu: device.Device, kernel: str, width: int, precision: str) -> tuple[int, int, int, int]:
    if gpu.backend == "cpu":
        return 32, 16, 4, 1
    if precision == "tf32x3":  # tiles of 64 rows, by wgmma, are no quicker, and faulted on an H200 at D 80
        return 32, 32, 8 if width == 128 else 4, 1
    if precision == "ieee" or gpu.backend == "hip":
        return (32, 16, 4, 1) if width > 128 else (32, 32, 4, 1)
    return (32, 32, 4, 1) if width > 128 else (64, 32, 4, 2) if kernel == "fwd" else (32, 32, 4, 2)


def _space(products: str) -> list[tuning.Config]:
    if products == "tf32x3":
        sizes = [(32, 32, 4), (32, 32, 8), (16, 32, 4), (32, 16, 4)]
        return [{"BM": bm, "BN": bn, "num_warps": warps, "num_stages": 1} for bm, bn, warps in sizes]
    sizes = [
        (128, 128, 8),
        (128, 64, 8),
        (128, 64, 4),
        (64, 128, 8),
        (64, 128, 4),
        (64, 64, 4),
        (64, 32, 4),
        (32, 64, 4),
    ]
    return [
        {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
        for bm, bn, warps in sizes
        for stages in (1, 2, 3, 4)
    ]


def start(kernel: Any, name: str, given: tuple[Any, ...], call: Call, unit: int, tail: bool) -> None:
    """Starts a kernel with one program per tile of queries, or of keys if its name is "bwd".

    given: its arguments before the mask; unit: of the steps in them; tail: whether its last blocks need comparisons
    whatever the sizes.
    """
    q, k, cu = call.q, call.k, call.sequences()
    (batch, query_heads, rows, D), columns, group = q.shape, k.shape[2], q.shape[1] // max(k.shape[1], 1)
    keys = name == "bwd"
    turns = k.shape[1] if keys else query_heads
    across, along = (columns, rows) if keys else (rows, columns)
    shared = 2 * along * D * q.element_size() * (group if keys else 1)  # bytes that all tiles of a head read
    gpu, width = device.of(q), sum(column_parts(D))
    section = max(1, min(batch * turns, gpu.l2 // 2 // max(shared, 1) * (1 if keys else group)))
    masked, products = call.mask is not None, call.products
    sequences = batch if cu is None else cu.q.numel() - 1

    def config() -> dict[str, Any]:
        words = [dtype_name(q), *([products] if q.dtype == torch.float32 else []), str(width)]
        key = " ".join([*words, *(["causal"] * (call.right < UNBOUNDED)), *(["mask"] * masked)])
        rule = partial(_rule, gpu, name, q.dtype, products, width, masked)
        chosen = tuning.config(gpu, "attention", name, key, rule, partial(_space, products))
        ragged = cu is not None or along % chosen["BM" if keys else "BN"] != 0
        return chosen | {"TAIL": tail or masked or ragged}

    def grid(c: dict[str, Any]) -> tuple[int]:
        size = c["BN" if keys else "BM"]
        tiles = across // size + sequences + 1 if cu is not None else triton.cdiv(across, size)
        return (tiles * turns * (1 if cu is not None else batch),)

    sizes = Sizes(rows, columns, turns, sequences, section, call.left, call.right, call.prefix or None)
    bundles = call.masked(), cu, sizes, group, call.scales()
    launch(kernel, grid, *given, *bundles, config=config, key=(name, rows, columns), RULES=call.rules(unit, products))
