"""Tensors that ranks copy out of each other's memory while they compute: a gather, and a scatter of sums.

Copies run on a stream of their own, by the GPU's copy engines, so that no multiprocessor is taken from the products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch

from ridgeline.parallel import groups, rooms

ALIGNED = 256  # bytes: each tensor in a room begins at a multiple
GATHERS, SCATTERS = "gathers", "scatters"  # uses of rooms, and streams

_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def _stream(device: torch.device, use: str) -> torch.cuda.Stream | None:
    """Returns the stream of a use; on a CPU, where nothing runs beside, None."""
    if device.type != "cuda":
        return None
    if (device, use) not in _streams:
        _streams[device, use] = torch.cuda.Stream(device)
    return _streams[device, use]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _after(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Returns an event after what a stream has to do."""
    return None if stream is None else stream.record_event()


def _wait(event: torch.cuda.Event | None, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Lets a stream, a device's current one by default, wait for an event."""
    if event is not None:
        (stream or torch.cuda.current_stream(device)).wait_event(event)


def _now(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class Pieces:
    """All ranks' tensors, on their way. whole: (ranks, *shape of one)."""

    def __init__(self, own: torch.Tensor, rank: int, world: int) -> None:
        self.own, self.rank = own, rank
        self.whole = own.new_empty((world, *own.shape))
        self.arrived: dict[int, torch.cuda.Event | None] = {}

    def piece(self, source: int) -> torch.Tensor:
        """Returns a rank's tensor; the current stream waits for it."""
        if source == self.rank:
            return self.own
        _wait(self.arrived[source], self.own.device)
        return self.whole[source]

    def wait(self) -> None:
        """Lets the current stream wait for `whole`, and puts this rank's own tensor into it."""
        for event in self.arrived.values():
            _wait(event, self.own.device)
        self.whole[self.rank].copy_(self.own)


def gather(x: torch.Tensor, group: Any = None) -> Pieces:
    """Starts to copy all ranks' tensors here, each the shape of x, the next rank's first.

    All pieces must be waited for before the next gather, or it may overwrite what is still being read."""
    x = x.contiguous()
    world, rank, shape = groups.size(group), groups.rank(group), tuple(x.shape)
    room, beside = rooms.room(x.device, group, GATHERS, x.nbytes), _stream(x.device, GATHERS)
    room.meet()  # all ranks have read what lies there
    room.part(rank, shape, x.dtype).copy_(x)
    room.meet()  # all ranks have written
    pieces = Pieces(x, rank, world)
    _wait(_now(x.device), x.device, beside)
    for hop in range(1, world):
        source = (rank + hop) % world
        with _on(beside):
            pieces.whole[source].copy_(room.part(source, shape, x.dtype))
        pieces.arrived[source] = _after(beside)
    return pieces


def scatter(
    make: Callable[[int, torch.Tensor], Any], shape: tuple[int, ...], like: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Returns this rank's sum of all ranks' terms; each term is copied while the terms for other ranks are made.

    make: writes this rank's term for a rank into a tensor. shape: of a term. like: has its dtype and device. Terms are
    rounded to that dtype, and summed in float32 if it has fewer bits."""
    world, rank, dtype = groups.size(group), groups.rank(group), like.dtype
    size = -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    room, beside = rooms.room(like.device, group, SCATTERS, (world - 1) * size), _stream(like.device, SCATTERS)
    room.meet()  # all ranks have read what lies there
    terms = like.new_empty((world, *shape))
    _wait(_now(like.device), like.device, beside)
    for hop in range(world - 1):
        target, source = (rank + 1 + hop) % world, (rank - 1 - hop) % world
        make(target, room.part(rank, shape, dtype, hop * size))
        room.tell(target)
        with _on(beside):
            room.hear(source)
            terms[source].copy_(room.part(source, shape, dtype, hop * size))
    make(rank, terms[rank])
    _wait(_after(beside), like.device)
    return terms[0] + terms[1] if world == 2 else terms.sum(0)
