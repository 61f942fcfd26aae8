"""CUDA graphs for tests that replay one."""

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], Any], before: int = 1) -> Callable[[], Any]:
    """Captures the work in a graph, after warm-up runs on a side stream; returns a function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return lambda: (graph.replay(), result)[1]
