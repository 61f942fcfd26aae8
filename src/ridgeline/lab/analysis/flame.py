"""Flame graphs of a profiler's trace, as SVG files and as the folded stacks that viewers read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from typing import Any

from ridgeline.lab import units

KINDS = {"python_function": "python", "cpu_op": "op", "user_annotation": "range"} | dict.fromkeys(
    ("cuda_runtime", "cuda_driver"), "runtime"
)
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ROW, TOP = 19, 56
ROUNDING = 0.01  # microseconds
LEAST = 0.0008  # of all time; shorter frames are left out
STYLE = (
    "text{font:12px system-ui,sans-serif}.title{font-size:17px}rect{stroke:#fff}.python{fill:#f6c894}.op{fill:#a9cdf2}"
    ".range{fill:#d9dde3}.runtime{fill:#d6c3ee}.gpu{fill:#9fd8b4}svg:hover>rect{stroke:#1c2430}"
)

Path = tuple[tuple[str, str], ...]  # frames, the outermost first: each is a name and a kind
Stacks = dict[Path, float]  # the own microseconds of each call path


def stacks(trace: dict[str, Any], step: str) -> tuple[Stacks, Stacks]:
    """Returns the host's time and the GPU's time of a Chrome trace, by call path below the ranges named `step...`.

    GPU time is counted under the call path that launched it.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(step)]
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") in KINDS:
            by_thread[event["tid"]].append(event)
    host: Stacks = defaultdict(float)
    gpu: Stacks = defaultdict(float)
    launched: dict[Any, Path] = {}
    for thread, those in by_thread.items():
        home = any(thread == e["tid"] for e in steps)
        for path, event, own in _nested(those):
            below = _below(path, step) if home else (("other thread", "range"), *path)
            if below and any(e["ts"] <= event["ts"] < e["ts"] + e["dur"] for e in steps):
                host[below] += own
                launched[event.get("args", {}).get("correlation")] = below
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in GPU and correlation is not None and correlation in launched:
            gpu[*launched[correlation], (event["name"], "gpu")] += event["dur"]
    return host, gpu


def _nested(events: list[dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any], float]]:
    """Yields (path, event, own time) for the nested events of one thread.

    A range may outlive the call that opened it; that call is then taken to end where the range begins.
    """
    opened: list[tuple[float, dict[str, Any], list[float], tuple[str, str]]] = []

    def close() -> tuple[Path, dict[str, Any], float]:
        path = tuple(frame for *_, frame in opened)
        _, event, inner, _ = opened.pop()
        return path, event, max(event["dur"] - sum(inner), 0.0)

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while opened and (opened[-1][0] <= event["ts"] or opened[-1][0] < end - ROUNDING):
            yield close()
        if opened:
            opened[-1][2].append(event["dur"])
        name = re.sub(r"^\S*/([^/]+/[^/]+\.py\(\d+\))", r"\1", event["name"])  # without the folders above its package
        opened.append((end, event, [], (name, KINDS[event["cat"]])))
    while opened:
        yield close()


def _below(path: Path, step: str) -> Path:
    """Returns the part of a path from the step on, or () if it is in none. All steps count as one."""
    for index, (name, kind) in enumerate(path):
        if kind == "range" and name.startswith(step):
            return ((step, "range"), *path[index + 1 :])
    return ()


def folded(found: Stacks) -> str:
    """Returns the folded stacks that speedscope, inferno and flamegraph.pl read: a path and its own ns in each line."""
    paths = ((";".join(name.replace(";", ",") for name, _ in path), own) for path, own in found.items())
    return "".join(f"{path} {own * 1e3:.0f}\n" for path, own in paths)


def frames(found: Stacks, depth: int = 0, left: float = 0.0) -> Iterator[tuple[tuple[str, str], int, float, float]]:
    """Yields (frame, depth, left, time): a caller before what it calls, and the longest call first."""
    calls: dict[tuple[str, str], Stacks] = defaultdict(dict)
    for path, own in found.items():
        if len(path) > depth:
            calls[path[depth]][path] = own
    for frame, inside in sorted(calls.items(), key=lambda call: -sum(call[1].values())):
        time = sum(inside.values())
        yield frame, depth, left, time
        yield from frames(inside, depth + 1, left)
        left += time


def svg(found: Stacks, title: str, steps: int) -> str:
    """Returns a flame graph, with the callers on top, as the text of an SVG file. Times are per step."""
    total = sum(found.values()) or 1.0
    drawn = list(frames(found))
    wide = [frame for frame in drawn if frame[3] >= LEAST * total]
    rows = []
    for (name, kind), depth, left, time in wide:
        told = f"{name}\n{units.seconds(time / steps * 1e-6)} per step, {units.percent(time / total)}"
        place = f'x="{left / total:.4%}" y="{TOP + depth * ROW}" width="{time / total:.4%}" height="{ROW}"'
        box = f'<rect class="{kind}" width="100%" height="100%"/><text x="4" y="14">{escape(name)}</text>'
        rows.append(f"<svg {place}><title>{escape(told)}</title>{box}</svg>")  # an inner svg cuts long names off
    note = f"{units.seconds(total / steps * 1e-6)} per step over {steps} steps; width is time"
    note += f"; {len(drawn) - len(wide)} narrow frames left out" if len(drawn) > len(wide) else ""
    height = TOP + ROW * (1 + max((depth for _, depth, _, _ in wide), default=0))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}" style="background:#fff">'
    words = f'<text class="title" x="4" y="22">{escape(title)}</text><text x="4" y="44">{escape(note)}</text>'
    return "\n".join([head, f"<style>{STYLE}</style>", words, *rows, "</svg>\n"])
