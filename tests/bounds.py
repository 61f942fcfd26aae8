"""Stricter memory for kernels in Triton's interpreter: no access beyond a tensor's storage, and nothing reads what
`torch.empty` leaves as if it were there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


def storages(some: Any) -> Iterator[tuple[int, int]]:
    """The addresses of all tensors in arguments."""
    for arg in some:
        if isinstance(arg, torch.Tensor):
            yield arg.untyped_storage().data_ptr(), arg.untyped_storage().data_ptr() + arg.untyped_storage().nbytes()
        elif isinstance(arg, tuple | list):
            yield from storages(arg)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, kernels may touch their arguments' storage alone, and new floating-point tensors hold NaN."""
    rooms: list[tuple[int, int]] = []
    builder, executor, empty = interpreter.InterpreterBuilder, interpreter.GridExecutor, torch.empty
    load, store, begin = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst

    def seen(pointers: Any, mask: Any, width: int) -> None:
        at = pointers.data.astype(np.int64).reshape(-1)[mask.data.reshape(-1).astype(bool)]
        inside = np.zeros(at.shape, bool)
        for low, high in rooms:
            inside |= (at >= low) & (at + width <= high)
        assert inside.all(), f"{(~inside).sum()} of {at.size} accesses are beyond the tensors of this kernel"

    def width_of(pointers: Any) -> int:
        return max(pointers.dtype.scalar.element_ty.primitive_bitwidth // 8, 1)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        seen(pointers, mask, width_of(pointers))
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen(pointers, mask, width_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def begun(self: Any, *args: Any) -> Any:
        found = begin(self, *args)
        rooms[:] = storages(found[0])
        return found

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        patch.setattr(executor, "_init_args_hst", begun)
        patch.setattr(torch, "empty", poisoned)
        yield
