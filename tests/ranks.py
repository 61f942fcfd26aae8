"""Ranks as threads of one process, for tests of what torch.distributed moves between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def run_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs fn(rank, *args) on `world` ranks, each a thread with a group of its own, and returns what each returned.

    A rank that raises ends the others; what it raised first is raised here."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    found: list[Any] = [None] * world
    wrong: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            torch.autograd.set_multithreading_enabled(False)
            found[rank] = fn(rank, *args)
        except BaseException as error:
            wrong.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    ranks = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        if wrong:
            raise wrong[0]
        return found
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def one_kernel_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    """Lets one thread at a time into these functions of a module, since Triton's interpreter runs one kernel at a time.

    Skips the test on a GPU, where ranks are no threads."""
    if device != "cpu":
        pytest.skip("ranks are threads on the CPU")
    lock = threading.Lock()

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any) -> Any:
            with lock:
                return function(*args)

        return locked

    for name in names:
        monkeypatch.setattr(module, name, alone(getattr(module, name)))
