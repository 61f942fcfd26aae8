"""The sum over ranks by memory that all ranks read: processes that share memory stand for GPUs, in the interpreter."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, groups, symmetric
from ridgeline.parallel.rung import Traffic, observed

interpreted = pytest.mark.skipif(not INTERPRETED, reason="processes share memory in Triton's interpreter alone")
CPU = torch.device("cpu")


def room_of_files(folder: str, blocks: int) -> symmetric.Room:
    """Returns memory of files that all ranks map: each has other addresses for the same bytes, as GPUs do."""
    world, rank = groups.size(), groups.rank()

    def mapped(name: str, nbytes: int) -> list[torch.Tensor]:
        paths = [os.path.join(folder, f"{name}{r}") for r in range(world)]
        return [torch.from_file(p, shared=True, size=nbytes, dtype=torch.uint8) for p in paths]

    if rank == 0:
        for r in range(world):
            for name, nbytes in (("memory", 2 * symmetric.HALF), ("pads", 4 * world * symmetric.BLOCKS)):
                with open(os.path.join(folder, f"{name}{r}"), "wb") as file:
                    file.truncate(nbytes)
    dist.barrier()
    memory, pads = mapped("memory", 2 * symmetric.HALF), mapped("pads", 4 * world * symmetric.BLOCKS)
    counts = torch.zeros(symmetric.BLOCKS, dtype=torch.int32)
    tables = [torch.tensor([t.data_ptr() for t in some]) for some in (memory, pads)]
    return symmetric.Room(*tables, counts, rank, blocks, (memory, pads))


def given(n: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def in_order(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns the sum in float32 in the order of ranks, rounded once."""
    first, *rest = [given(n, r, dtype, seed).float() for r in range(groups.size())]
    for term in rest:
        first = first + term
    return first.to(dtype)


def sums(folder: str, blocks: int, calls: list[tuple[int, torch.dtype, int]]) -> list[str]:
    """Makes calls one after the other in one room, and returns those whose bits are wrong."""
    room = room_of_files(folder, blocks)
    wrong = []
    for seed, (n, dtype, shots) in enumerate(calls):
        x = given(n, groups.rank(), dtype, seed)
        before = x.clone()
        found = symmetric.summed_in(room, x, shots)
        if not torch.equal(found, in_order(n, dtype, seed)) or not torch.equal(x, before):
            wrong.append(f"call {seed}: {n} of {dtype}, {shots} shots")
    counted = set(room.counts.tolist())
    dist.barrier()
    return wrong + ([] if counted == {2 * len(calls)} else [f"counts are {counted}"])


CALLS = [
    (n, dtype, shots)
    for n, dtype in ((1, torch.float32), (2049, torch.float32), (20000, torch.float16), (4096, torch.float16),
                     (9999, torch.float32), (3, torch.float16))
    for shots in (1, 2)
]  # fmt: skip


@pytest.mark.kernels
@interpreted
@pytest.mark.parametrize("world", [2, 3])
def test_sums_in_the_order_of_ranks(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in groups.spawn(sums, world, folder, 2 if world == 2 else 128, CALLS * (2 if world == 2 else 1)):
            assert found == []
