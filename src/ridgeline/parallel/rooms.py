"""Memory that the GPUs of all ranks of a group read, torch's symmetric memory.

A room has the same size on every rank. Its signals, some words of each rank that all ranks write, order what ranks do
in it. Rooms are made by use and kept with the group; one stream at a time uses a room.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups

BLOCKS = 128  # of a kernel whose blocks wait for those of other ranks: all must fit on a GPU at once
RANKS = 8  # of one NVLink domain


class Room(NamedTuple):
    """A group's shared memory.

    buffers, pads: addresses of each rank's memory and signals, (ranks,). counts: meetings so far, of each block.
    blocks: of a kernel that the signals suffice for. kept: torch's handle, and the tensor that owns the memory."""

    buffers: torch.Tensor
    pads: torch.Tensor
    counts: torch.Tensor
    rank: int
    blocks: int
    kept: Any = None

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Returns a tensor in a rank's memory, from the byte `start` on."""
        return self.kept[0].get_buffer(rank, shape, dtype, start // dtype.itemsize)

    def meet(self) -> None:
        """Lets the current stream wait until all ranks' streams have come here."""
        self.kept[0].barrier(channel=0)

    def tell(self, rank: int) -> None:
        """Tells a rank that what the current stream has written may be read."""
        self.kept[0].put_signal(rank, channel=1)

    def hear(self, rank: int) -> None:
        """Lets the current stream wait until a rank has told this one."""
        self.kept[0].wait_signal(rank, channel=1)


@dataclass
class Known:
    """A group's rooms of one use.

    refused: sizes that could not be made, and why. captured: whether a graph may hold the room's addresses; such a
    room is moved to `kept` when a larger one replaces it."""

    group: weakref.ref[Any]
    room: Room | None = None
    nbytes: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    captured: bool = False
    kept: list[Room] = field(default_factory=list)


_rooms: dict[tuple[torch.device, str, str], Known] = {}  # by device, the group's name and use
groups.at_leave.append(_rooms.clear)


def refuses(device: torch.device, group: Any, use: str, nbytes: int) -> str | None:
    """Returns why there can be no such room, or None. The first call is a collective."""
    found = _found(device, group, use, nbytes)
    return found if isinstance(found, str) else None


def room(device: torch.device, group: Any, use: str, nbytes: int) -> Room:
    """Returns a room of at least so many bytes a rank, made by all ranks at the first call and when it must grow.

    Raises RidgelineError with the reason if there can be none, or if it had to be made while a graph is captured."""
    found = _found(device, group, use, nbytes)
    if isinstance(found, str):
        raise RidgelineError(f"parallel: {found}")
    return found


def _found(device: torch.device, group: Any, use: str, nbytes: int) -> Room | str:
    if device.type != "cuda":
        return f"symmetric memory needs GPUs, but the tensors are on the {device.type}"
    groups.ready()
    group = group or dist.group.WORLD
    where = device, group.group_name, use
    known = _rooms.get(where)
    if known is None or known.group() is not group:  # the first use, or a former group had this name
        known = Known(weakref.ref(group))
    capturing = torch.cuda.is_current_stream_capturing()
    if known.room is not None and known.nbytes >= nbytes:
        known.captured |= capturing
        return known.room
    if (reason := _refused(known, nbytes)) is not None:
        return reason
    if capturing:
        raise RidgelineError(
            "parallel: the first call makes symmetric memory, which a graph cannot capture; call once before"
        )
    for ended in [key for key, other in _rooms.items() if other.group() is None]:
        del _rooms[ended]
    _rooms[where] = known
    return _grown(known, device, group, nbytes)


def _refused(known: Known, nbytes: int) -> str | None:
    """Returns why so many bytes could not be made before; more bytes cannot be either."""
    return next((why for least, why in known.refused.items() if least <= nbytes), None)


def _grown(known: Known, device: torch.device, group: Any, nbytes: int) -> Room | str:
    """Makes a room that replaces the former, of twice its size if possible. After a failure the former stays."""
    if known.room is None and (reason := _unlike(group)) is not None:
        known.refused[0] = reason
        return reason
    made: Room | str = ""
    for size in sorted({nbytes, max(nbytes, 2 * known.nbytes)}, reverse=True):
        made = _refused(known, size) or _made(device, group, size)
        if isinstance(made, str):
            known.refused[size] = made
            continue
        if known.room is not None and known.captured:
            known.kept.append(known.room)
        known.room, known.nbytes, known.captured = made, size, False
        break
    return made


def _unlike(group: Any) -> str | None:
    """Returns what speaks against shared memory before it is tried, the same on each rank."""
    world = groups.size(group)
    if world > RANKS:
        return f"symmetric memory is for at most {RANKS} ranks, and there are {world}"
    if dist.get_backend(group) == "fake":
        return "pretended ranks have no symmetric memory"
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    many = len(set(hosts))
    return f"symmetric memory is for GPUs of one host, and the ranks are on {many}" if many > 1 else None


def _made(device: torch.device, group: Any, nbytes: int) -> Room | str:
    """Returns a new room, or why one of the ranks has none: the same on each rank."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    rank, world = groups.rank(group), groups.size(group)
    tensor = handle = None
    reason = ""
    try:
        # Not by `empty` of that module: tensors of its pools may share their signals.
        tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, group.group_name)
    except RuntimeError as error:
        reason = _said(error)
    if wrong := _first(reason, group):  # else the others would wait for this rank in `rendezvous`
        return wrong
    assert tensor is not None
    try:
        handle = symmetric.rendezvous(tensor, group.group_name)
        reason = "" if handle is not None else "no handle"
        if handle is not None:
            starts, signals = handle.buffer_ptrs, handle.signal_pad_ptrs
            buffers = torch.tensor([p + tensor.data_ptr() - starts[rank] for p in starts], device=device)
            pads = torch.tensor(list(signals), device=device)
            counts = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = _said(error)
    if wrong := _first(reason, group):  # this meeting also keeps a rank from signalling before all have their tables
        return wrong
    slots = getattr(symmetric, "get_signal_pad_size", lambda: 2048)() // 4
    return Room(buffers, pads, counts, rank, min(BLOCKS, slots // world), (handle, tensor))


def _said(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _first(reason: str, group: Any) -> str | None:
    """Exchanges what the ranks have to say, and returns the first reason."""
    reasons: list[Any] = [None] * groups.size(group)
    dist.all_gather_object(reasons, reason, group=group)
    for rank, why in enumerate(reasons):
        if why:
            return f"torch makes no symmetric memory for these ranks: rank {rank} says: {why}"
    return None
