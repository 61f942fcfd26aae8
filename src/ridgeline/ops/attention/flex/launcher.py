"""Starts of flex_attention's kernels: arguments in bundles, functions by their keys, and the sizes of tiles."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.ops.attention.common.arguments import LOG2E, UNBOUNDED, column_parts
from ridgeline.ops.attention.flex.score import function_of
from ridgeline.ops.attention.flex.walk import FlexRules, FlexSizes, Lists
from ridgeline.ops.attention.triton.launcher import heads, rounded_off, step_unit
from ridgeline.ops.attention.triton.softmax import Scale

__all__ = ["UNBOUNDED", "Call", "heads", "start", "step_unit"]


class Call(NamedTuple):
    """The inputs and options of a launcher; see `flex_attention_fwd` in kernels.py."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor | None  # the mask's lists
    columns: torch.Tensor | None
    score_a: torch.Tensor | None  # what the functions read
    score_b: torch.Tensor | None
    score_c: torch.Tensor | None
    mask_a: torch.Tensor | None
    mask_b: torch.Tensor | None
    mask_c: torch.Tensor | None
    forward: str | None  # keys of functions
    backward: str | None
    mask: str | None
    block: int
    scale: float
    left: int
    right: int
    bottom: bool
    prefix: int
    precision: str

    @property
    def apart(self) -> bool:
        """Whether exponentials have base e: for float32, and where a scale that is not positive would turn maxima."""
        return self.q.dtype == torch.float32 or (self.forward is None and self.scale <= 0)

    def rules(self, unit: int) -> FlexRules:
        main, rest = column_parts(self.q.shape[-1])
        # With a mask the last queries have the most keys as a rule, as with causal: their tiles come first.
        right = self.right < UNBOUNDED or self.mask is not None
        facts = self.left < UNBOUNDED, right, self.bottom, False, self.apart, self.q.shape[-1], main, rest
        return FlexRules(*facts, unit, self.precision, self.prefix > 0, self.block, False)

    def scales(self) -> Scale:
        base_2 = LOG2E if self.forward is not None else self.scale * LOG2E
        return Scale(self.scale, rounded_off(self.scale) if self.apart else base_2, 0.0)

    def lists(self, keys: bool) -> Lists | None:
        """Returns the lists by columns of blocks, for tiles of keys, or by rows."""
        x = self.columns if keys else self.rows
        if x is None:
            return None
        batch_step, head_step = [
            0 if size == 1 else step for size, step in zip(x.shape[:2], x.stride()[:2], strict=True)
        ]
        return Lists(x, batch_step, head_step, x.stride(2))


def _read(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Returns the tensors that a function reads, None for none."""
    return tuple([t for t in tensors if t is not None]) or None


def _rule(gpu: device.Device, kernel: str, call: Call) -> tuning.Config:
    """Returns a kernel's tiles: BM rows of queries, BN of keys. None is timed; on Hopper few registers spill."""
    width, single = sum(column_parts(call.q.shape[-1])), call.q.dtype == torch.float32
    if gpu.backend == "cpu":  # the interpreter: few programs, with several blocks
        found = 32, 16, 4, 1
    elif single and (call.precision == "ieee" or gpu.backend == "hip" or width > 128):
        found = 32, 32 if width <= 128 else 16, 4, 1
    elif single:
        found = 64 if kernel == "fwd" else 32, 32, 4, 2
    elif gpu.backend == "hip" or gpu.shared_memory < 227 << 10:
        found = (32, 32 if width > 64 else 64, 4, 1) if kernel == "bwd" else (64, 32, 4, 1)
    elif gpu.capability >= 100 and kernel == "bwd":
        found = (32, 32, 4, 2) if width > 64 else (32, 64, 4, 2)
    elif kernel == "fwd" and gpu.capability >= 100:
        found = (128, 32, 8, 2) if width > 128 else (128, 64, 8, 2)
    elif kernel == "fwd":
        wide = 64 if width <= 64 or call.mask is not None else 128  # a mask's function needs registers
        found = (128, 32, 8, 2) if width > 128 else (128, wide, 8, 3)
    elif kernel == "bwd" and width > 64:
        found = (32, 64, 8, 2) if width > 128 else (32, 128, 8, 3) if call.backward is not None else (32, 64, 4, 3)
    elif kernel == "bwd":
        found = (64, 64, 4, 3) if call.forward is None else (64, 128, 8, 3)
    else:
        found = (64, 32, 8, 2) if width > 128 else (128, 64, 8, 2) if width > 64 else (64, 64, 4, 3)
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), found))


def _space() -> list[tuning.Config]:
    sizes = [(128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4),
             (32, 64, 4)]  # fmt: skip
    return [
        {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
        for bm, bn, warps in sizes
        for stages in (1, 2, 3, 4)
    ]


def start(kernel: Any, name: str, given: tuple[Any, ...], call: Call, unit: int, tail: bool) -> None:
    """Starts a kernel with one program per tile of queries, or of keys if its name is "bwd".

    given: its arguments before the lists; unit: of the steps in them; tail: whether its last blocks need comparisons
    whatever the sizes.
    """
    q, k, keys = call.q, call.k, name == "bwd"
    (batch, query_heads, rows, D), columns, group = q.shape, k.shape[2], q.shape[1] // max(k.shape[1], 1)
    turns = k.shape[1] if keys else query_heads
    across, along = (columns, rows) if keys else (rows, columns)
    shared = 2 * along * D * q.element_size() * (group if keys else 1)  # bytes that all tiles of a head read
    gpu, width = device.of(q), sum(column_parts(D))
    section = max(1, min(batch * turns, gpu.l2 // 2 // max(shared, 1) * (1 if keys else group)))
    rules, changed = call.rules(unit), call.forward is not None

    def config() -> dict[str, Any]:
        words = [dtype_name(q), *([call.precision] if q.dtype == torch.float32 else []), str(width)]
        key = " ".join([*words, *(["mask"] * (call.block > 0)), *(["score"] * changed)])
        chosen = dict(tuning.config(gpu, "flex_attention", name, key, partial(_rule, gpu, name, call), _space))
        if call.block:  # a tile lies within a block
            chosen |= {size: min(chosen[size], call.block) for size in ("BM", "BN")}
        ragged = along % chosen["BM" if keys else "BN"] != 0
        return chosen | {"RULES": rules._replace(TAIL=tail or ragged)}

    def grid(c: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(across, c["BN" if keys else "BM"]) * turns * batch,)

    prefix = call.prefix or None
    sizes = FlexSizes(rows, columns, turns, batch, section, call.left, call.right, prefix, group)
    functions = {"SCORE": function_of(call.forward), "MASK": function_of(call.mask)}
    if name != "fwd":
        functions["SLOPE"] = function_of(call.backward)
    read = _read(call.score_a, call.score_b, call.score_c), _read(call.mask_a, call.mask_b, call.mask_c)
    bundles = call.lists(keys), *read, sizes, call.scales()
    launch(kernel, grid, *given, *bundles, config=config, key=(name, rows, columns, rules), **functions)
