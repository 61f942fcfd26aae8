"""The launchers of radix_sort: a digit in passes, or in one; and what is wrong with a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CudaKernel
from ridgeline.ops.movement._bytes import UNITS

FILE = Path(__file__).with_name("radix_sort.cu")
INFINITE = {
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float64: 0x7FF << 52,
}  # the bits of infinity
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "int16", "int8", "uint8")
_TILES, _ROWS = CudaKernel(FILE, "radix_tiles", "PPqi"), CudaKernel(FILE, "radix_rows", "Pqi")
_BASES, _SCATTER = CudaKernel(FILE, "radix_bases", "Pi"), CudaKernel(FILE, "radix_scatter", "PPPPPqii")
_CLEAR, _COUNTS = CudaKernel(FILE, "radix_clear", "Pq"), CudaKernel(FILE, "radix_counts", "PPq")
_ONESWEEP = CudaKernel(FILE, "radix_onesweep", "PPPPPqii")
DIGITS, HEAD, THREADS = (
    256,
    8 * 256 + 8,
    384,
)  # HEAD: State's words of 64 bits before its words a tile, in radix_sort.cu
FEW = 1 << 14  # keys that torch sorts as soon: 61 us on an H100
# Keys of which kernels start early: 86 for 92 us of 2^20 on an H200, but 64 for 58 of 2^18, and 2% more at 2^26.
EARLY = range(1 << 19, 1 << 24)


def _word(n: int) -> int:
    """The bytes of a count beside its state, that of the last tile too, which counts places beyond the last key."""
    return 4 if n < 1 << 29 else 8


def _macros(keys: torch.Tensor, value: int, descending: bool) -> dict[str, Any]:
    """value: the bytes that go with a key."""
    n, size = keys.shape[0], keys.element_size()
    items = 16 if size + value <= 8 else 10 if size + value <= 12 else 8  # registers for two blocks a multiprocessor
    while THREADS * items * (size + value) + (20 << 10) > device.of(keys).shared_memory:
        items //= 2
    kind = 2 if keys.is_floating_point() else int(keys.dtype != torch.uint8)
    macros = {
        "KTYPE": UNITS[size],
        "KIND": kind,
        "INFINITE": INFINITE.get(keys.dtype, 0),
        "DESCENDING": int(descending),
    }
    macros |= {"VTYPE": UNITS[value], "WORD": UNITS[_word(n)], "THREADS": THREADS, "ITEMS": items}
    return macros | {"PACK": 1 if keys.data_ptr() % 16 else 16 // size}


def few(keys: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "torch.sort is as soon for few keys" if keys.shape[0] < FEW else None


def sort(
    onesweep: bool, ordered: Any, moved: Any, keys: torch.Tensor, values: torch.Tensor | None, descending: bool
) -> None:
    """Indices have 4 bytes on their way where that is enough, and 8 in the end."""
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
            launch(
                _ONESWEEP,
                (tiles,),
                *to,
                keys,
                values,
                state,
                n,
                p,
                wide,
                block=THREADS,
                shared=shared,
                **macros,
                **after,
            )
        else:
            launch(_TILES, (tiles,), state, keys, n, p, block=THREADS, **macros)
            launch(_ROWS, (DIGITS,), state, tiles, p, block=DIGITS, **macros)
            launch(_BASES, (1,), state, p, block=DIGITS, **macros)
            launch(_SCATTER, (tiles,), *to, keys, values, state, n, p, wide, block=THREADS, **macros)
        keys, values = to


def fault_of(keys: Any, values: Any, descending: Any) -> str | None:
    """What is wrong with a call, or None."""
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1 or str(keys.dtype)[6:] not in DTYPES:
        given = f"{keys.dtype} of shape {tuple(keys.shape)}" if isinstance(keys, torch.Tensor) else type(keys).__name__
        return f"keys must be a vector (n,) of {', '.join(DTYPES)}, and is {given}"
    if not isinstance(descending, bool):
        return f"descending must be True or False, and is {descending!r}"
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        return f"values must be a tensor or None, and is {type(values).__name__}"
    if values.shape != keys.shape or values.element_size() not in (4, 8):
        return (
            f"values must be a vector of elements of 4 or 8 bytes, as long as keys; keys is {tuple(keys.shape)} "
            f"and values {values.dtype} {tuple(values.shape)}"
        )
    return (
        None
        if values.device == keys.device
        else f"values is on {values.device} and keys on {keys.device}; one device is needed"
    )
