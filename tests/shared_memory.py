"""A room of a group whose ranks are threads of one process, for tests of copies between ranks without a GPU."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

from ridgeline.parallel import groups


class Threads:
    """The memory of all ranks, their barrier and their signals. One for each use of a test."""

    def __init__(self, world: int) -> None:
        self.world, self.lock = world, threading.Lock()
        self.memory: dict[str, list[torch.Tensor]] = {}
        self.barrier = threading.Barrier(world)
        self.told: Any = defaultdict(lambda: threading.Semaphore(0))
        self.asked: list[tuple[str, int]] = []

    def room(self, device: torch.device, group: Any, use: str, nbytes: int) -> ThreadsRoom:
        """Stands for `rooms.room`. Memory that nobody wrote is full of ones, which are NaN in float64."""
        with self.lock:
            self.asked.append((use, nbytes))
            if use not in self.memory:
                self.memory[use] = [torch.full((1 << 16,), 255, dtype=torch.uint8) for _ in range(self.world)]
        return ThreadsRoom(self, use, groups.rank(group))


class ThreadsRoom:
    def __init__(self, threads: Threads, use: str, rank: int) -> None:
        self.threads, self.use, self.rank = threads, use, rank

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.threads.memory[self.use][rank][start : start + count].view(dtype).view(shape)

    def meet(self) -> None:
        self.threads.barrier.wait(30)

    def tell(self, rank: int) -> None:
        with self.threads.lock:
            signal = self.threads.told[self.use, self.rank, rank]
        signal.release()

    def hear(self, rank: int) -> None:
        with self.threads.lock:
            signal = self.threads.told[self.use, rank, self.rank]
        assert signal.acquire(timeout=30)
