"""The sum over ranks by memory that all ranks read: processes that share files stand for GPUs, in the interpreter."""

from __future__ import annotations

import os
import re
import tempfile
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ridgeline import device
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.lab.analysis import inspect as lab_inspect
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, groups, rooms, symmetric
from ridgeline.parallel.rung import Traffic, observed

Calls = list[tuple[int, torch.dtype, int]]  # elements, dtype, shots


def room_of_files(folder: str, blocks: int) -> rooms.Room:
    """Returns memory of files that all ranks map: each has other addresses for the same bytes, as GPUs do."""
    world, rank = groups.size(), groups.rank()
    sizes = {"memory": 2 * symmetric.HALF, "pads": 4 * world * rooms.BLOCKS}
    for name, nbytes in sizes.items():
        with open(os.path.join(folder, f"{name}{rank}"), "wb") as file:
            file.truncate(nbytes)
    dist.barrier()
    mapped = {
        name: [torch.from_file(os.path.join(folder, f"{name}{r}"), shared=True, size=nbytes, dtype=torch.uint8)
               for r in range(world)]
        for name, nbytes in sizes.items()
    }  # fmt: skip
    tables = [torch.tensor([t.data_ptr() for t in some]) for some in mapped.values()]
    return rooms.Room(*tables, torch.zeros(rooms.BLOCKS, dtype=torch.int32), rank, blocks, mapped)


def given(n: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def in_order(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns the sum in float32 in the order of ranks, rounded once."""
    total, *rest = [given(n, r, dtype, seed).float() for r in range(groups.size())]
    for term in rest:
        total = total + term
    return total.to(dtype)


def sums(folder: str, blocks: int, calls: Calls, half: int, start: int) -> list[str]:
    """Makes calls one after the other in one room, and returns what is wrong. start: meetings before the first."""
    with mock.patch.object(symmetric, "HALF", half):
        return _sums(folder, blocks, calls, half, start)


def _sums(folder: str, blocks: int, calls: Calls, half: int, start: int) -> list[str]:
    room = room_of_files(folder, blocks)
    room.counts.fill_(start)
    for pads in room.kept["pads"]:
        pads.view(torch.int32).fill_(start)
    dist.barrier()
    wrong, launches = [], 0
    for seed, (n, dtype, shots) in enumerate(calls):
        x = given(n, groups.rank(), dtype, seed)
        before = x.clone()
        with observed() as seen:
            found = symmetric.summed_in(room, x, shots)
        if not torch.equal(found, in_order(n, dtype, seed)) or not torch.equal(x, before):
            wrong.append(f"call {seed}: {n} of {dtype}, {shots} shots")
        rung = next(c for c in collectives.LADDER if c.kernel == ("one_shot", "two_shot")[shots - 1])
        launches += -(-x.nbytes // half)
        formula = Traffic().add(str(rung.kernel), x.nbytes, -(-x.nbytes // half))
        if seen != formula or (half == rung.most and seen != rung.traffic(x.nbytes, groups.size())):
            wrong.append(f"{seen} against {formula}")
    counted = set(room.counts.tolist())
    dist.barrier()
    wanted = (start + 2 * launches + 2**31) % 2**32 - 2**31
    return wrong + ([] if counted == {wanted} else [f"counts are {counted}, not {wanted}"])


SIZES = [(1, torch.float32), (2049, torch.float32), (20000, torch.float16), (4096, torch.float16),
         (9999, torch.float32), (3, torch.float16)]  # fmt: skip
EACH = [(n, dtype, shots) for n, dtype in SIZES for shots in (1, 2)]


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="processes share memory in Triton's interpreter alone")
@pytest.mark.parametrize(
    ("world", "blocks", "calls", "half", "start"),
    [
        (2, 2, EACH, 1 << 24, 0),  # several tiles a block
        (3, 128, EACH[:8], 1 << 24, 0),
        (2, 3, EACH, 1 << 14, 2**31 - 6),  # several launches a call, and the count of meetings wraps
        (4, 2, [(9999, torch.float32, 2), (5000, torch.float32, 1)], 1 << 24, 0),
    ],
)
def test_sums_in_the_order_of_ranks(world: int, blocks: int, calls: Calls, half: int, start: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = groups.spawn(sums, world, folder, blocks, calls, half, start, timeout=120)
    assert found == [[]] * world


def sums_of_a_slow_rank(folder: str, shots: int) -> list[str]:
    """Rank 1 is late after each meeting, when rank 0 goes on to the next call."""
    meet = symmetric._meet

    def late(*args: Any, **kwargs: Any) -> None:
        meet(*args, **kwargs)
        time.sleep(0.3 * groups.rank())

    with mock.patch.object(symmetric, "_meet", late):
        return sums(folder, 1, [(50 + n, torch.float32, shots) for n in range(4)], 1 << 24, 0)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="processes share memory in Triton's interpreter alone")
@pytest.mark.parametrize("shots", [1, 2])
def test_no_rank_overwrites_what_a_slow_one_reads(shots: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert groups.spawn(sums_of_a_slow_rank, 2, folder, shots, timeout=60) == [[]] * 2


@pytest.mark.compiles
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_reads_of_other_gpus_are_wide(arch: str, shots: int) -> None:
    """Whatever the number of elements, 16 bytes a thread. Signals are released and acquired for the whole system."""
    launched: list[Launch] = []
    tables = [torch.empty(8, dtype=torch.int64, device="meta") for _ in range(2)]
    counts = torch.empty(rooms.BLOCKS, dtype=torch.int32, device="meta")
    with device.pretend(arch), observe(launched.append):
        x = torch.empty(4097, dtype=torch.bfloat16, device="meta")
        symmetric.summed_in(rooms.Room(*tables, counts, 3, 64), x, shots)
    [launch] = launched
    assert launch.grid == (2,)
    found = lab_inspect.of_launch(launch)
    assert found.spill_loads == found.spill_stores == 0
    ptx = found.texts["ptx"]
    assert ptx.count("ld.global.v4.b32") == 8 + (shots == 2)
    assert len(re.findall(r"atom\.global\.sys\.release\.exch|atom\.global\.release\.sys\.exch", ptx)) == shots
    assert len(re.findall(r"atom\.global\.acquire\.sys\.cas", ptx)) == shots
    assert found.registers <= 128  # 512 threads


@pytest.mark.parametrize(("shots", "share"), [("one_shot", 7.0), ("two_shot", 1.75)])
def test_what_a_rank_reads(shots: str, share: float) -> None:
    rung = next(c for c in collectives.LADDER if c.kernel == shots)
    traffic = rung.traffic(3 * symmetric.HALF // 2, 8)
    assert traffic.calls == {shots: 2}
    assert traffic.sent(8) == share * 3 * symmetric.HALF // 2
    assert rung.traffic(4096, 1) == Traffic()
    assert len(rung.idea) <= 100


def test_two_shots_when_they_read_much_less() -> None:
    assert [symmetric.shots_for(1 << 30, 2), symmetric.shots_for(1 << 18, 4), symmetric.shots_for(1 << 20, 4)] == [
        1,
        1,
        2,
    ]
    assert [symmetric.shots_for(1 << 17, 8), symmetric.shots_for(1 << 18, 8)] == [1, 2]


def refusals() -> list[str]:
    x = torch.zeros(4)
    said = []
    for call in (
        lambda: symmetric.all_reduce(x),
        lambda: symmetric.all_reduce(x.double()),
        lambda: symmetric.all_reduce(x.requires_grad_()),
        lambda: symmetric.all_reduce(x.detach(), shots=3),
    ):
        try:
            call()
        except RidgelineError as error:
            said.append(str(error))
    return said


def test_refusals_are_one_sentence_on_every_rank() -> None:
    said = groups.spawn(refusals, 2)
    assert said[0] == said[1]
    assert said[0] == [
        "parallel: symmetric memory needs GPUs, but the tensors are on the cpu",
        "all_reduce: x must be float32, bfloat16 or float16 over symmetric memory, got torch.float64",
        "all_reduce: no gradient flows through symmetric memory; give x.detach()",
        "all_reduce: shots must be 1, 2 or None, but is 3",
    ]


@pytest.mark.parametrize(
    ("world", "says"),
    [
        (16, "symmetric memory is for at most 8 ranks, and there are 16"),
        (8, "pretended ranks have no symmetric memory"),
    ],
)
def test_groups_without_shared_memory(world: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = torch.device("cuda", 0)
    with groups.pretend(world):
        assert symmetric.refuses(gpu) == says
        assert symmetric.refuses(gpu) == says  # kept
        with pytest.raises(RidgelineError, match=says):
            rooms.room(gpu, None, "sums", 1)


def test_no_memory_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with groups.pretend(2), pytest.raises(RidgelineError, match="which a graph cannot capture; call once before"):
        rooms.room(torch.device("cuda", 0), None, "sums", 1)
    with pytest.raises(RidgelineError, match="there is no process group yet"):
        rooms.room(torch.device("cuda", 0), None, "sums", 1)


def test_a_rank_alone_needs_no_memory() -> None:
    x = torch.randn(5)
    assert torch.equal(symmetric.all_reduce(x), x)
