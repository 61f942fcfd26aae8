"""Finds reads and writes outside a kernel's tensors while Triton's interpreter runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ridgeline.op import tensors_of

Extent = tuple[int, int]


class OutOfBounds(Exception):
    """A kernel touched memory outside its tensors. call: "load", "store" or "atomic"; count: how many elements."""

    def __init__(self, call: str, count: int):
        super().__init__(f"{call} of {count} elements outside the tensors")
        self.call, self.count = call, count


def extent(tensor: torch.Tensor) -> Extent:
    """Returns the addresses from a tensor's first element to the end of its last."""
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    last = tensor.data_ptr() + (reach + 1) * tensor.element_size()
    return (tensor.data_ptr(), last) if tensor.numel() else (0, 0)


@contextmanager
def watched() -> Iterator[None]:
    """Inside, an interpreted kernel that touches memory outside its tensors raises OutOfBounds."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    allowed: list[Extent] = []
    prepare = GridExecutor._init_args_hst
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic = InterpreterBuilder.create_atomic_rmw

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        made = prepare(self, args, kwargs)
        allowed[:] = [extent(tensor) for tensor in tensors_of([*made[0], *made[1].values()])]
        return made

    def look(call: str, pointers: Any, mask: Any) -> None:
        places = numpy.asarray(pointers.data, dtype=numpy.uint64).ravel()
        wanted = numpy.broadcast_to(numpy.asarray(mask.data).astype(bool), numpy.shape(pointers.data)).ravel()
        inside = numpy.zeros(places.shape, dtype=bool)
        for first, last in allowed:
            inside |= (places >= first) & (places < last)
        if beyond := int((wanted & ~inside).sum()):
            raise OutOfBounds(call, beyond)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        look("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def added(self: Any, how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look("atomic", pointers, mask)
        return atomic(self, how, pointers, value, mask, *rest)

    GridExecutor._init_args_hst = prepared
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored
    InterpreterBuilder.create_atomic_rmw = added
    try:
        yield
    finally:
        GridExecutor._init_args_hst = prepare
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        InterpreterBuilder.create_atomic_rmw = atomic


def cause(error: BaseException) -> OutOfBounds | None:
    """Returns the OutOfBounds behind an error, or None."""
    while error is not None and not isinstance(error, OutOfBounds):
        error = error.__cause__  # type: ignore[assignment]
    return error
