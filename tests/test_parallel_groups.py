"""Processes and meshes of `ridgeline.parallel`, and what each rank says when another is wrong, late or dead."""

import multiprocessing
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups


def summed(x: float) -> tuple[float, int]:
    t = torch.full((3,), x + groups.rank())
    dist.all_reduce(t)
    return t[0].item(), os.getpid()


def test_the_pool_runs_worlds_of_several_sizes_in_the_same_processes() -> None:
    first = groups.spawn(summed, 2, 1.0)
    assert [value for value, _ in first] == [3.0, 3.0]
    more = groups.spawn(summed, 4, 1.0)
    assert [value for value, _ in more] == [10.0] * 4
    assert [pid for _, pid in more[:2]] == [pid for _, pid in first]
    assert groups.spawn(summed, 1, 1.0)[0][0] == 1


def reduce_after(what: str) -> None:
    """Rank 1 ends or raises in its way; the others wait for it."""
    if groups.rank() == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises":
            raise ValueError("my own mistake")
        time.sleep(60)
    with groups.answered("the sum"):
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("what", ["killed", "raises", "hangs"])
def test_the_others_end_with_one_sentence(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GRACE", 1.0)
    start = time.monotonic()
    zero, one = groups.spawn(reduce_after, 2, what, timeout=2, check=False)
    assert time.monotonic() - start < 12
    assert zero.error == (
        "parallel: rank 0 of 2 cannot go on with the sum, because another rank has ended or did not answer in time"
    )
    said = {"killed": "exit code -9", "raises": "my own mistake", "hangs": "did not end within 2 s, and was killed"}
    assert said[what] in one.error
    if what == "raises":
        with pytest.raises(RidgelineError, match="rank 1 of 2: ValueError: my own mistake"):
            groups.spawn(reduce_after, 2, what, timeout=2)
    assert groups.spawn(summed, 2, 0.0)[0][0] == 1  # the pool has new processes


def mesh_of(dims: dict[str, int]) -> tuple[str, ...]:
    return groups.mesh(**dims).mesh_dim_names


def test_meshes() -> None:
    assert groups.spawn(mesh_of, 4, {"dp": 2, "tp": 2}) == [("dp", "tp")] * 4
    for outcome in groups.spawn(mesh_of, 2, {"dp": 3}, check=False):
        assert outcome.error == "parallel: a mesh of dp=3 has 3 ranks, but there are 2"


def launched(pipe: Any, environment: dict[str, str], timeout: float) -> None:
    """The life of a process that a launcher has started."""
    for name in (*groups.LAUNCHED, "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        device = groups.start("gloo", timeout=timeout)
        t = torch.ones(1)
        dist.all_reduce(t)
        pipe.send(f"{int(t)} {device} {groups.rank()}")
        groups.leave()
    except RidgelineError as error:
        pipe.send(str(error))


def started(environments: list[dict[str, str]], timeout: float = 3) -> list[str]:
    """Starts a process for each environment, and returns what each says."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    context = multiprocessing.get_context("forkserver")
    running = []
    for one in environments:
        ours, theirs = context.Pipe()
        process = context.Process(target=launched, args=(theirs, common | one if one else {}, timeout))
        process.start()
        running.append((process, ours))
    found = [pipe.recv() if pipe.poll(40) else "nothing" for _, pipe in running]
    for process, _ in running:
        process.join(10)
        assert process.exitcode == 0
    return found


def test_start_joins_what_a_launcher_started() -> None:
    assert started([{"RANK": str(n), "WORLD_SIZE": "2"} for n in (0, 1)], 30) == ["2 cpu 0", "2 cpu 1"]


def test_a_missing_launcher() -> None:
    assert started([{}]) == [
        "parallel: no launcher started this process, since RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set; "
        "start it with: torchrun --nproc-per-node N"
    ]


def test_worlds_that_differ_and_ranks_that_are_missing() -> None:
    assert started([{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "3"}], 20) == [
        "parallel: rank 1 was started with a world of 3, and rank 0 with 2",
        "parallel: rank 0 was started with a world of 2, and rank 1 with 3",
    ]
    assert started([{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "3"}], 20) == [
        "parallel: rank 0 was started with a world of 3, and rank 1 with 2",
        "parallel: rank 1 was started with a world of 2, and rank 0 with 3",
    ]
    twice = started([{"RANK": "0", "WORLD_SIZE": "3"}, *[{"RANK": "1", "WORLD_SIZE": "3"}] * 2], 2)
    assert "parallel: two processes call themselves rank 1" in twice
    assert twice[0] == "parallel: rank 2 of 3 did not start within 2 s"
    assert started([{"RANK": "0", "WORLD_SIZE": "2"}], 1) == ["parallel: rank 1 of 2 did not start within 1 s"]
    assert "rank 1 cannot reach rank 0 at 127.0.0.1" in started([{"RANK": "1", "WORLD_SIZE": "2"}], 1)[0]
    assert started([{"RANK": "2", "WORLD_SIZE": "2"}]) == [
        "parallel: RANK must be between 0 and WORLD_SIZE - 1, but is 2 of 2"
    ]
    assert started([{"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}]) == [
        "parallel: MASTER_PORT must be between 1 and 65535, but is 0"
    ]
    assert started([{"RANK": "x", "WORLD_SIZE": "2"}]) == ["parallel: RANK must be a whole number, but is 'x'"]


def test_backends() -> None:
    with pytest.raises(RidgelineError, match="must be gloo or nccl, but is 'mpi'"):
        groups.spawn(summed, 2, 1.0, backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(RidgelineError, match="nccl needs a GPU for each local rank"):
            groups.spawn(summed, 2, 1.0, backend="nccl")
    with pytest.raises(RidgelineError, match="at least 1 rank"):
        groups.spawn(summed, 0, 1.0)
