"""What is kept of symmetric memory, and what ranks say when one of them has none. No GPU is needed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric
from torch._C._distributed_c10d import _SymmetricMemory

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, pulls, rooms

GPU = torch.device("cuda", 0)


class Card:
    """Makes rooms of at most `most` bytes; a graph is captured while `capturing`."""

    def __init__(self) -> None:
        self.most, self.capturing = 1000, False
        self.asked: list[int] = []

    def make(self, device: torch.device, group: Any, nbytes: int) -> rooms.Room | str:
        self.asked.append(nbytes)
        t = torch.empty(0)
        return rooms.Room(t, t, t, 0, 1, object()) if nbytes <= self.most else f"no {nbytes} bytes"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(rooms, "_made", card.make)
    monkeypatch.setattr(rooms, "_unlike", lambda group: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
    return card


def test_a_failed_growth_keeps_the_room(card: Card) -> None:
    with groups.pretend(2):
        first = rooms.room(GPU, None, "a", 600)
        assert rooms.refuses(GPU, None, "a", 2000) == "no 2000 bytes"
        assert rooms.room(GPU, None, "a", 600) is first
        assert rooms.refuses(GPU, None, "a", 3000) == "no 2000 bytes"  # not tried
        assert rooms.room(GPU, None, "a", 900) is not first  # twice the size fails, and the size itself does not
        with pytest.raises(RidgelineError, match=r"^parallel: no 1200 bytes$"):
            rooms.room(GPU, None, "a", 1200)
    assert card.asked == [600, 2000, 1200, 900]


def test_rooms_that_a_graph_holds_are_kept(card: Card) -> None:
    with groups.pretend(2):
        captured, _ = (rooms.room(GPU, None, use, 100) for use in ("a", "b"))
        card.capturing = True
        assert rooms.room(GPU, None, "a", 100) is captured
        card.capturing = False
        for use in ("a", "b"):
            rooms.room(GPU, None, use, 300)
            rooms.room(GPU, None, use, 700)
        kept = {where[2]: known.kept for where, known in rooms._rooms.items()}
    assert kept["a"] == [captured]
    assert kept["b"] == []


def test_each_device_has_its_room(card: Card) -> None:
    with groups.pretend(2):
        one, two = (rooms.room(torch.device("cuda", n), None, "a", 100) for n in (0, 1))
        assert one is not two


def test_a_group_that_has_ended_leaves_no_room(card: Card) -> None:
    with groups.pretend(2):
        rooms.room(GPU, None, "a", 100)
        group = rooms._rooms[GPU, dist.group.WORLD.group_name, "a"].group  # type: ignore[union-attr]
        assert group() is dist.group.WORLD
    assert rooms._rooms == {}
    assert group() is None


def test_a_group_that_torch_destroyed_leaves_no_room(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "at_leave", [])
    with groups.pretend(2):
        rooms.room(GPU, None, "a", 100)
    with groups.pretend(2):
        rooms.room(GPU, None, "b", 100)
        assert [use for _, _, use in rooms._rooms] == ["b"]
    rooms._rooms.clear()


def refused_by_one() -> str:
    """Rank 1 gets no memory; the others would wait for it in torch's `rendezvous`."""

    def fails(*_: Any) -> torch.Tensor:
        if groups.rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it.")
        return torch.empty(0)

    def meets(*_: Any) -> None:
        dist.barrier()

    with (
        mock.patch.object(_SymmetricMemory, "empty_strided_p2p", fails),
        mock.patch.object(torch_symmetric, "rendezvous", meets),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        pytest.raises(RidgelineError) as raised,
    ):
        rooms.room(GPU, None, "a", 100)
    return str(raised.value)


def test_all_ranks_hear_of_one_without_memory() -> None:
    says = "parallel: torch makes no symmetric memory for these ranks: rank 1 says: CUDA out of memory."
    assert groups.spawn(refused_by_one, 3, timeout=20) == [says] * 3


def test_waits_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stream(device: Any = None) -> Any:
        asked.append(device)
        return mock.Mock()

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    pieces = pulls.Pieces(torch.zeros(2, device="meta"), 0, 2)
    pieces.arrived[1] = mock.Mock()
    pieces.piece(1)
    pieces.wait()
    assert asked == [torch.device("meta")] * 2
