"""The lab measures how fast each implementation is on this machine, how close that is to the hardware's limit, and why.

`ridgeline.lab.benchmark(fn)` times one function; `measure({name: fn})` compares several; `graph(fn)` says what a CUDA
graph makes of one. The lab has three rooms:
`measurement` checks, times and records; `analysis` says what limits what was measured; `presentation` writes pages of
it. A room imports only from itself and the rooms named before it. Each command of `ridgeline` is a module in a room.
The lab calls an implementation of an op a rung, the op's implementations in order its ladder, and the fastest possible
time at the measured bandwidth and FLOP/s the roof.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "benchmark": "measurement.clock",
    "measure": "measurement.clock",
    "differs": "measurement.clock",
    "Law": "measurement.law",
    "check": "measurement.judge",
    "Inline": "inline",
    "graph": "analysis.graph.outcome",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"ridgeline.lab has no {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(f"ridgeline.lab.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
