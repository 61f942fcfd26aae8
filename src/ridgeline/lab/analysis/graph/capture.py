"""Captures a function in a CUDA graph, or says what broke the capture and on which line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ridgeline.lab.analysis.graph.watch import Hazard, Place, raised, watch

WARMUP = 3
BROKEN: list[torch.cuda.CUDAGraph] = []  # kept, since the allocator of pinned memory may go on asking them
Function = Callable[[], Any]


@dataclass(frozen=True)
class Broken:
    """What broke a capture. error: what CUDA or PyTorch said. place: the line of the user's code, if known."""

    operation: str
    place: Place | None
    why: str
    advice: str
    error: str


@dataclass(frozen=True)
class Attempt:
    """A capture. replay: replays the graph, or None if the capture broke; broken then says why.

    hazards: what no graph can hold in a call, and how often it comes; of a graph, what it has lost.
    same: whether replays give the results of calls, bit for bit; None if calls differ among themselves or return no
    tensors.
    """

    replay: Function | None
    broken: Broken | None
    hazards: dict[Hazard, int]
    same: bool | None


def attempt(function: Function) -> Attempt:
    """Captures a function on the current GPU. It is called a few times before, on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls = [_copied(function()) for _ in range(WARMUP)][-2:]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, outputs, error = _captured(function)
    if error is not None:
        hazards = watch(function)
        return Attempt(None, blame(error, hazards), hazards, None)

    def replay() -> Any:
        graph.replay()
        return outputs

    repeated = None
    if calls[0] and _equal(*calls):
        replay()
        repeated = _equal(calls[1], _copied(replay()))
    lost = {} if repeated else {h: n for h, n in watch(function).items() if h.kind == "stream"}
    return Attempt(replay, None, lost, repeated)


def _captured(function: Function) -> tuple[torch.cuda.CUDAGraph, Any, Exception | None]:
    """The graph of a call, its outputs, and the exception that broke the capture."""
    graph, side, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    outputs, error = None, None
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool)
        try:
            outputs = function()
        except Exception as raised_:
            error = raised_
        finally:
            try:
                graph.capture_end()
            except RuntimeError as ended:  # says only that something went wrong before, if the function raised
                error = error or ended
    if error is not None:
        _recover(graph, pool)
    return graph, outputs, error


def _recover(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Puts back what torch leaves behind if a capture breaks: its pool of memory, and the state of random numbers."""
    index = torch.cuda.current_device()
    torch.cuda.synchronize()
    with suppress(RuntimeError):  # it has left the pool if only the last steps failed
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    graph.reset()
    BROKEN.append(graph)
    generator = torch.cuda.default_generators[index]
    before = generator.get_state()
    try:
        torch.rand(1, device="cuda")
    except RuntimeError:  # the generator goes on believing in the capture
        generator.graphsafe_set_state(generator.clone_state())
    generator.set_state(before)


def blame(error: BaseException, hazards: dict[Hazard, int]) -> Broken:
    """What broke a capture, from its exception and from what a watched call found."""
    place = raised(error)
    said = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {said[0] if said else ''}"
    at = [h for h in hazards if h.place and place and (h.place.file, h.place.line) == (place.file, place.line)]
    if not at and place is None:  # it broke at the end of the capture, which has no line
        at = list(hazards)
    if at:
        return Broken(at[0].operation, at[0].place, at[0].why, at[0].advice, words)
    other = Hazard("other", "an operation", place)
    return Broken(other.operation, place, other.why, other.advice, words)


def _copied(value: Any) -> list[torch.Tensor]:
    """Copies of the tensors in a value."""
    return [t.detach().clone() for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether tensors are equal to the bit."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(a, b))
