"""The lab: how fast each implementation is on this machine, how far that is from the roof, and why.

`ridgeline.lab.benchmark(fn)` is the clock as a function; `measure({name: fn})` compares several. The verbs are modules.
"""

from importlib import import_module
from typing import Any

_HOMES = {"benchmark": "clock", "measure": "clock", "differs": "clock", "Law": "law", "check": "check"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"ridgeline.lab has no {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(f"ridgeline.lab.{_HOMES[name]}"), name)
