"""radix_sort: sorts keys, and values along with them; equal keys keep their order.

    keys'_i <= keys'_(i+1),   values'_i = values[order_i],   keys'_i = keys[order_i]

By digits of 8 bits, the lowest first, each pass stable. A key's bits map to an unsigned number of the same order, whose
digits are sorted. The best implementation counts all digits in one read. Each pass then reads and writes every key
once: a block ranks a tile by the equal digits within its warps, and looks back at the counts that earlier tiles have
published. The floor for 32-bit keys is five reads and four writes of them.
Source: Adinets and Merrill, Onesweep: a faster least significant digit radix sort for GPUs, 2022 (arXiv:2206.01784).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import SECTORS
from ridgeline.ops.movement._radix_sort import DTYPES, fault_of, few, sort
from ridgeline.select import eager, run


@kernel_op("radix_sort_fwd(Tensor keys, Tensor? values, bool descending, str? impl) -> (Tensor, Tensor)")
def _forward(
    keys: torch.Tensor, values: torch.Tensor | None, descending: bool, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.int64 if values is None else values.dtype
    made = keys.new_empty(keys.shape), torch.empty(keys.shape, dtype=dtype, device=keys.device)
    if keys.numel():
        run(RADIX_SORT, "fwd", impl, made, keys, values, descending)
    return made


def reference(
    keys: torch.Tensor, values: torch.Tensor | None = None, *, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    made, order = torch.sort(keys.detach(), stable=True, descending=descending)
    return made, order if values is None else values.detach()[order]


def radix_sort(
    keys: torch.Tensor, values: torch.Tensor | None = None, *, descending: bool = False, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys in order, and the values in the order of their keys, as `torch.sort(keys, stable=True)` and its indices.

    keys: (n,), any stride, float32, float16, bfloat16, float64, int64, int32, int16, int8 or uint8. values: (n,), any
    dtype of 4 or 8 bytes; None stands for 0, 1, ..., n - 1 in int64. descending: the greatest first.
    Equal keys keep their order, also when descending. NaN is greater than all numbers, and -0 equals 0.
    Returns (sorted keys, values), both contiguous. It has no gradients.
    Raises RidgelineError for other shapes, dtypes or devices, or if `impl` cannot run the call.
    """
    fault = fault_of(keys, values, descending)
    if fault:
        raise RidgelineError(f"radix_sort: {fault}")
    plain = eager(RADIX_SORT, impl, keys, values, descending)
    if plain is not None and plain.call is not None:
        return plain.call(keys, values, descending=descending)
    return _forward(keys.detach(), None if values is None else values.detach(), descending, impl)


def cost(keys: torch.Tensor, values: torch.Tensor | None = None, *, descending: bool = False) -> tuple[Cost, None]:
    """One read and one write, whatever the passes: the traffic of a sort that knew the order."""
    moved = 8 * keys.numel() if values is None else nbytes(values)
    return Cost(nbytes(keys) + (moved if values is not None else 0), nbytes(keys) + moved, 0), None


def _case(n: int, dtype: str = "", value: str = "", use: str = "check", high: int = 0, **kwargs: Any) -> Case:
    """dtype: of integer keys, drawn below `high`; "" means the case's floats. value: the values' dtype; "" means
    indices."""
    keys = Spec(n, dtype=dtype or None, grad=False, high=high)
    args = (keys, Spec(n, dtype=value, high=(1 << 31) - 1)) if value else (keys,)
    name = " ".join(
        [f"{n >> 20} Mi" if n >= 1 << 20 else str(n), dtype, f"with {value}" if value else "", *kwargs]
    ).split()
    return Case(
        " ".join(name), args, kwargs, dtypes=(dtype,) if dtype else FLOATS if use == "check" else ("float32",), use=use
    )


RADIX_SORT = Op(
    radix_sort,
    reference=reference,
    cost=cost,
    cases=[
        _case(12345),
        _case(9001, descending=True),
        _case(8000, value="int64"),
        _case(1),
        _case(0),
        _case(20011, "int32", high=(1 << 31) - 1),
        _case(20011, "int32", "int32", high=1000),
        _case(7001, "int64", "int32", high=1 << 62),
        _case(9973, "int16", high=1 << 15, descending=True),
        _case(30001, "int8"),
        _case(16001, "uint8", "int64", high=256),
        _case(1 << 20, use="quick"),
        _case(1 << 26, use="bench"),
        _case(1 << 26, "int32", high=(1 << 31) - 1, use="bench"),
        _case(1 << 26, "int32", "int32", high=(1 << 31) - 1, use="bench"),
    ],
)

RADIX_SORT.eager("torch", "torch.sort, stable, then a gather of the values", reference, served=True)


def _rung(name: str, idea: str, onesweep: bool, **facts: Any) -> None:
    RADIX_SORT.kernel(name, idea, kind="cuda", fwd=partial(sort, onesweep), dtypes=DTYPES, **facts)


_rung("cuda_passes", "per 8-bit digit: count by tile, add up, scatter, one kernel each", False, counter=SECTORS)
_rung(
    "cuda",
    "all digits counted once, one look-back kernel per digit, tiles sorted in shared memory",
    True,
    served=True,
    unless=few,
    gain=1.5,
    counter=SECTORS,
)
