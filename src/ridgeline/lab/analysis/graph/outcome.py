"""The outcome of `ridgeline.lab.graph(fn)`: figures of calls and of replays, what broke the capture, and words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.graph.capture import Broken, attempt
from ridgeline.lab.analysis.graph.pace import Pace, paces
from ridgeline.lab.analysis.graph.watch import Hazard, watch
from ridgeline.op import RidgelineError

NO_GPU = "No GPU here: the call was watched on the CPU, as if its tensors were on a GPU. Nothing was captured or timed."
SAME = {
    True: "Replays give the results of calls, bit for bit.",
    False: "Replays give other results than calls: part of the work is not in the graph, or its inputs change.",
    None: "Results were not compared: the calls differ among themselves, or return no tensors.",
}


@dataclass(frozen=True)
class Graph:
    """What a CUDA graph makes of a function; `print` it for the whole story.

    replay: replays the graph and returns its outputs, which each replay overwrites; None if there is no graph.
    calls, replays: the pace of the function and of the graph; None without a GPU or without a graph.
    broken: what broke the capture, or None. hazards: what no graph can hold, and how often a call does it.
    same: whether replays give the results of calls, bit for bit; None if that cannot be told.
    """

    name: str
    replay: Callable[[], Any] | None
    calls: Pace | None
    replays: Pace | None
    broken: Broken | None
    hazards: dict[Hazard, int]
    same: bool | None

    @property
    def speedup(self) -> float | None:
        """The time of a call divided by that of a replay."""
        if self.calls is None or self.replays is None:
            return None
        return self.calls.seconds["median"] / self.replays.seconds["median"]

    def figures(self) -> dict[str, Any]:
        """Everything but the replay, as plain values."""
        return {
            "name": self.name,
            "calls": _pace(self.calls),
            "replays": _pace(self.replays),
            "speedup": self.speedup,
            "broken": asdict(self.broken) if self.broken else None,
            "hazards": [
                asdict(h) | {"why": h.why, "advice": h.advice, "times": count} for h, count in self.hazards.items()
            ],
            "same": self.same,
        }

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *_timed(self), *_said(self)])


def graph(function: Callable[[], Any], name: str | None = None) -> Graph:
    """Times a function's calls, captures it in a CUDA graph, and times the replays; or says what broke the capture.

    function: takes no arguments, and is called about a thousand times at most; a replay does the GPU's part alone.
    Without a GPU it is called once and watched, as if its tensors were on one. Raises RidgelineError if it is no
    function or needs arguments; what the function itself raises passes through.
    >>> print(ridgeline.lab.graph(lambda: model(x)))
    """
    import inspect

    import torch

    if not callable(function):
        raise RidgelineError(f"graph takes a function without arguments, not {type(function).__name__}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise RidgelineError(f"graph calls a function without arguments, and this one needs some ({error})") from error
    except ValueError:  # some callables of C++ have no signature
        pass
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not torch.cuda.is_available():
        return Graph(name, None, None, None, None, watch(function, pretend=True), None)
    tried = attempt(function)
    timed = paces({"calls": function} | ({"replays": tried.replay} if tried.replay else {}))
    return Graph(name, tried.replay, timed["calls"], timed.get("replays"), tried.broken, tried.hazards, tried.same)


def _pace(pace: Pace | None) -> dict[str, Any] | None:
    return asdict(pace) | {"idle_us": pace.idle_us, "idle": pace.idle} if pace else None


def _timed(found: Graph) -> list[str]:
    """The lines about times."""
    if found.calls is None:
        return [NO_GPU]
    lines = []
    for what, pace in (("calls", found.calls), ("replays", found.replays)):
        if pace is not None:
            lines.append(
                f"{what}: {units.seconds(pace.seconds['median'])} {units.spread(pace.seconds)} each; "
                f"{pace.timeline.kernels:g} kernels run for {units.seconds(pace.timeline.busy_us / 1e6)}, and the GPU "
                f"idles {units.percent(pace.idle)} of the time; the host enqueues one in "
                f"{units.seconds(pace.host_us / 1e6)}"
            )
    longest = found.calls.timeline.gaps
    if longest and found.calls.idle > 0.1:
        lines.append("The longest gaps in a call, under the profiler, which lengthens them:")
        lines += [
            f"  {units.seconds(gap.us / 1e6)}, {gap.times:g} a call: from {_short(gap.before)} to {_short(gap.after)}"
            for gap in longest
        ]
    if found.speedup is not None:
        lines.append(f"A replay is {units.times(found.speedup)} as fast as a call. {SAME[found.same]}")
    return lines


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= 50 else f"{kernel[:47]}..."


def _said(found: Graph) -> list[str]:
    """The lines about what broke the capture, or would."""
    lines = []
    if found.broken:
        where = f" at {found.broken.place}" if found.broken.place else ""
        lines += [
            f"The capture broke{where}",
            f"  {found.broken.operation}: {found.broken.why} ({found.broken.error})",
            f"  Instead: {found.broken.advice}.",
        ]
    rest = {h: n for h, n in found.hazards.items() if not found.broken or h.place != found.broken.place}
    if rest:
        lines.append(f"No graph holds {'these either' if found.broken else 'these'}:")
    place: object = None
    for hazard, count in rest.items():
        if hazard.place != place or place is None:
            lines.append(f"  {hazard.place or 'on a line that is not known'}")
        place, times = hazard.place, f", {count} times" if count > 1 else ""
        lines.append(f"    {hazard.operation}{times}: {hazard.why}. Instead: {hazard.advice}.")
    if not lines:
        lines.append("Nothing in a call keeps it from being captured." if found.calls is None else "It is captured.")
    return lines
