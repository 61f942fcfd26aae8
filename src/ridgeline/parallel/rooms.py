"""Memory that the GPUs of all ranks of a group read, torch's symmetric memory.

A room has the same size on every rank. Its signals, some words of each rank that all ranks write, order what ranks do
in it. Rooms are made by use and kept with the group; one stream at a time uses a room.
"""

from __future__ import annotations

import socket
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


# By group and use: the group, the bytes asked for, and the room or why there is none.
_rooms: dict[tuple[str, str], tuple[Any, int, Room | str]] = {}


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
        return f"symmetric memory is of GPUs, and the tensors are on the {device.type}"
    groups.ready()
    group = group or dist.group.WORLD
    where = group.group_name, use
    known, most, found = _rooms.get(where, (None, 0, ""))
    if known is not group:  # a former group of this name
        most = 0
    elif isinstance(found, str) or most >= nbytes:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise RidgelineError(
            "parallel: the first call makes symmetric memory, which a graph cannot capture; call once before"
        )
    nbytes = max(nbytes, 2 * most)
    _rooms.pop(where, None)  # its memory is freed first
    del found
    made = _unlike(group) or _made(device, group, nbytes)
    _rooms[where] = group, nbytes, made
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
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    rank, world = groups.rank(group), groups.size(group)
    try:
        # Not by `empty` of that module: tensors of its pools may share their signals.
        tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, group.group_name)
        handle = symmetric.rendezvous(tensor, group.group_name)
        if handle is None:
            return "torch makes no symmetric memory for these ranks"
        starts, signals = handle.buffer_ptrs, handle.signal_pad_ptrs
    except RuntimeError as error:
        return f"torch makes no symmetric memory for these ranks: {str(error).splitlines()[0]}"
    buffers = torch.tensor([p + tensor.data_ptr() - starts[rank] for p in starts], device=device)
    pads = torch.tensor(list(signals), device=device)
    counts = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
    slots = getattr(symmetric, "get_signal_pad_size", lambda: 2048)() // 4
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank signals before all have their tables
    return Room(buffers, pads, counts, rank, min(BLOCKS, slots // world), (handle, tensor))
