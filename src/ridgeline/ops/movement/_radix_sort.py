"""Launchers of radix_sort, with several kernels per digit or one, and checks of its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CudaKernel
from ridgeline.ops.movement._bytes import UNITS

FILE = Path(__file__).with_name("radix_sort.cu")
# The bits of infinity.
INFINITE = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float64: 0x7FF << 52}
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int16", "int8", "uint8")
_TILES, _ROWS = CudaKernel(FILE, "radix_tiles", "PPqi"), CudaKernel(FILE, "radix_rows", "Pqi")
_BASES, _SCATTER = CudaKernel(FILE, "radix_bases", "Pi"), CudaKernel(FILE, "radix_scatter", "PPPPPqii")
_CLEAR, _COUNTS = CudaKernel(FILE, "radix_clear", "Pq"), CudaKernel(FILE, "radix_counts", "PPq")
_ONESWEEP = CudaKernel(FILE, "radix_onesweep", "PPPPPqii")
# HEAD: the 64-bit words of State in radix_sort.cu before its words per tile.
DIGITS, HEAD, THREADS = 256, 8 * 256 + 8, 384
FEW = 1 << 14  # fewer keys are left to torch, which is as fast
# Numbers of keys for which kernels start early; outside, an early start gains nothing.
EARLY = range(1 << 19, 1 << 24)


def _word(n: int) -> int:
    """The bytes of a count with its state, also for the last tile, which counts positions past the last key."""
    return 4 if n < 1 << 29 else 8


def _macros(keys: torch.Tensor, value: int, descending: bool) -> dict[str, Any]:
    """value: the bytes of a key's value."""
    n, size = keys.shape[0], keys.element_size()
    items = 16 if size + value <= 8 else 10 if size + value <= 12 else 8  # two blocks' registers fit a multiprocessor
    while THREADS * items * (size + value) + (20 << 10) > device.of(keys).shared_memory:
        items //= 2
    kind = 2 if keys.is_floating_point() else int(keys.dtype != torch.uint8)
    macros = {"KTYPE": UNITS[size], "KIND": kind, "INFINITE": INFINITE.get(keys.dtype, 0)}
    macros |= {"DESCENDING": int(descending), "VTYPE": UNITS[value], "WORD": UNITS[_word(n)]}
    macros |= {"THREADS": THREADS, "ITEMS": items}
    return macros | {"PACK": 1 if keys.data_ptr() % 16 else 16 // size}


def few(keys: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "torch.sort is as fast for few keys" if keys.shape[0] < FEW else None


def sort(
    onesweep: bool, ordered: Any, moved: Any, keys: torch.Tensor, values: torch.Tensor | None, descending: bool
) -> None:
    """Sorts with indices of 4 bytes where that is enough; the last pass widens them to 8."""
    keys, values = keys.contiguous(), values if values is None else values.contiguous()
    n, passes, where = keys.shape[0], keys.element_size(), keys.device
    value = 4 + 4 * (n > 1 << 32) if values is None else values.element_size()
    macros = _macros(keys, value, descending)
    tiles = -(-n // (THREADS * macros["ITEMS"]))
    state = torch.empty(HEAD + tiles * DIGITS * _word(n) // 8, dtype=torch.int64, device=where)
    some = n if passes > 1 else 0
    spare = keys.new_empty(some), torch.empty(some, dtype=torch.int32 if value == 4 else torch.int64, device=where)
    if onesweep:
        after = early(device.of(keys)) if n in EARLY else {"PDL": False}
        launch(_CLEAR, (-(-state.numel() // 256),), state, state.numel(), block=256, PDL=after["PDL"], **macros)
        counting = min(-(-n // (1024 * macros["PACK"])), 6 * device.of(keys).multiprocessors)
        launch(_COUNTS, (counting,), state, keys, n, block=256, **macros, **after)
        launch(_BASES, (passes,), state, 0, block=DIGITS, **macros, **after)
    for p in range(passes):
        last = p == passes - 1
        to = (ordered, moved) if (passes - p) % 2 else spare
        wide = int(last and moved.element_size() > value)
        if onesweep:
            shared = THREADS * macros["ITEMS"] * (keys.element_size() + value)
            sizes: dict[str, Any] = {"block": THREADS, "shared": shared}
            launch(_ONESWEEP, (tiles,), *to, keys, values, state, n, p, wide, **sizes, **macros, **after)
        else:
            launch(_TILES, (tiles,), state, keys, n, p, block=THREADS, **macros)
            launch(_ROWS, (DIGITS,), state, tiles, p, block=DIGITS, **macros)
            launch(_BASES, (1,), state, p, block=DIGITS, **macros)
            launch(_SCATTER, (tiles,), *to, keys, values, state, n, p, wide, block=THREADS, **macros)
        keys, values = to


def fault_of(keys: Any, values: Any, descending: Any) -> str | None:
    """Why the arguments are refused, or None."""
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1 or str(keys.dtype)[6:] not in DTYPES:
        given = f"{keys.dtype} of shape {tuple(keys.shape)}" if isinstance(keys, torch.Tensor) else type(keys).__name__
        return f"keys must be a vector (n,) of {', '.join(DTYPES)}, but is {given}"
    if not isinstance(descending, bool):
        return f"descending must be True or False, but is {descending!r}"
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        return f"values must be a tensor or None, but is {type(values).__name__}"
    if values.shape != keys.shape or values.element_size() not in (4, 8):
        return (
            f"values must be a vector as long as keys, with elements of 4 or 8 bytes; keys is {tuple(keys.shape)} "
            f"and values {values.dtype} {tuple(values.shape)}"
        )
    if values.device == keys.device:
        return None
    return f"values is on {values.device} but keys on {keys.device}; they must share one device"
