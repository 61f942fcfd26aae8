"""A call of short kernels as a decoder runs it: in a CUDA graph, in a row with others, over cold arguments.

Events around one call of 10 us also time the gaps before and after its kernels. Here a graph calls the function on one
copy of the arguments after the other. The copies are several times as large as L2 together, so each call finds its own
gone; the time of a call is the graph's divided by the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import Implementation

COLD = 4  # times L2 that the copies are large together
LEAST = 8  # calls, so that the graph's own start does not count


class Graphed:
    """A function of no arguments that replays `calls` calls. `one` is a single call outside the graph."""

    def __init__(self, one: Callable[[], Any], calls: int, replay: Callable[[], Any], held: Any):
        self.one, self.calls, self.replay, self.held = one, calls, replay, held

    def __call__(self) -> None:
        self.replay()


def copies(size: int, cache: int) -> int:
    """Returns how many copies of arguments of `size` bytes are COLD times as large as the cache."""
    return max(1, -(-COLD * cache // max(size, 1)))


def graphed(law: Law, rung: Implementation, cache: int) -> Graphed:
    """Returns an implementation's forward as a graph. cache: the bytes of L2."""
    import torch

    from ridgeline.op import nbytes, tensors_of

    given = [*law.args, *law.kwargs.values()]
    count = copies(nbytes(*tensors_of(given)), cache)
    with torch.no_grad():
        calls = [partial(rung, *_copied(law.args), **_copied(law.kwargs)) for _ in range(count)]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles, and lets caches of the host fill
            for call in calls[:2] * 2:
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph, total = torch.cuda.CUDAGraph(), max(LEAST, count)
        with torch.cuda.graph(graph):
            for call in islice(cycle(calls), total):
                call()
    return Graphed(calls[0], total, graph.replay, (graph, calls))


def _copied(value: Any) -> Any:
    """Returns a value with copies of its tensors, which keep their strides."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(v) for name, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value
