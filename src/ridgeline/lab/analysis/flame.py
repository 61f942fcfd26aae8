"""Flame graphs: turns a profiler's trace into a tree of times, and the tree into one SVG file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

HOST = ("python_function", "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
WIDTH, ROW, TOP, MARGIN = 1200, 19, 64, 12
ROUNDING = 0.01  # microseconds
LEAST = 0.0008  # of the width; narrower frames are left out

STYLE = """
.flame { font: 12px system-ui, sans-serif; background: #fff; }
.flame text { fill: #1c2430; pointer-events: none; }
.flame .title { font-size: 17px; font-weight: 600; } .flame .note { fill: #5b6675; }
.flame rect { stroke: #fff; stroke-width: 0.6; rx: 2; } .flame g:hover > rect { stroke: #1c2430; }
.flame .python { fill: #f6c894; } .flame .op { fill: #a9cdf2; } .flame .range { fill: #d9dde3; }
.flame .runtime { fill: #d6c3ee; } .flame .gpu { fill: #9fd8b4; }
@media (prefers-color-scheme: dark) {
  .flame { background: #12161c; } .flame text { fill: #e8ecf1; } .flame .note { fill: #97a3b3; }
  .flame rect { stroke: #12161c; } .flame g:hover > rect { stroke: #e8ecf1; }
  .flame .python { fill: #7d5523; } .flame .op { fill: #2a5688; } .flame .range { fill: #3a424e; }
  .flame .runtime { fill: #5b4680; } .flame .gpu { fill: #27693f; }
}
"""


@dataclass
class Node:
    """A frame: all calls of a function from one call path. Times are in microseconds; `own` excludes the children."""

    name: str
    kind: str
    own: float = 0.0
    calls: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.own + sum(child.total for child in self.children.values())

    def child(self, name: str, kind: str) -> Node:
        return self.children.setdefault(name, Node(name, kind))

    def at(self, path: tuple[tuple[str, str], ...]) -> Node:
        """Returns the node at the end of a path of (name, kind), creating what is missing."""
        node = self
        for name, kind in path:
            node = node.child(name, kind)
        return node

    def depth(self) -> int:
        return 1 + max((child.depth() for child in self.children.values()), default=0)


Path = tuple[tuple[str, str], ...]


def trees(trace: dict[str, Any], step: str) -> tuple[Node, Node]:
    """Returns the trees of host time and of GPU time of a Chrome trace, by call path below the ranges named `step...`.

    GPU time is counted under the call path that launched it.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = [
        (e["ts"], e["ts"] + e["dur"], e["tid"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(step)
    ]
    host, gpu = Node("host", "range"), Node("GPU", "range")
    launched: dict[Any, Path] = {}
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST:
            by_thread[event["tid"]].append(event)
    for thread, those in by_thread.items():
        for path, event, own in _walk(those):
            if not any(begin <= event["ts"] < end for begin, end, _ in steps):
                continue
            below = (
                _below(path, step)
                if any(thread == home for _, _, home in steps)
                else (("other thread", "range"), *path)
            )
            if below:
                node = host.at(below)
                node.own += own
                node.calls += 1
                if "correlation" in event.get("args", {}):
                    launched[event["args"]["correlation"]] = below
    for event in events:
        if event.get("cat") in GPU:
            correlation = event.get("args", {}).get("correlation")
            if correlation in launched:
                node = gpu.at((*launched[correlation], (event["name"], "gpu")))
                node.own += event["dur"]
                node.calls += 1
    return host, gpu


def _walk(events: list[dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any], float]]:
    """Yields (path, event, own time) for the nested events of one thread.

    A range may outlive the call that opened it; that call is then taken to end where the range begins.
    """
    open_: list[tuple[float, dict[str, Any], list[float], tuple[str, str]]] = []

    def close() -> tuple[Path, dict[str, Any], float]:
        path = tuple(label for *_, label in open_)
        _, event, (inner,), _ = open_.pop()
        return path, event, max(event["dur"] - inner, 0.0)

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_ and (open_[-1][0] <= event["ts"] or open_[-1][0] < end - ROUNDING):
            yield close()
        if open_:
            open_[-1][2][0] += event["dur"]
        open_.append((end, event, [0.0], (_short(event["name"]), _kind(event["cat"]))))
    while open_:
        yield close()


def _below(path: Path, step: str) -> Path:
    """Returns the part of a path from the step on, or () if it is in none. All steps count as one."""
    for index, (name, kind) in enumerate(path):
        if kind == "range" and name.startswith(step):
            return ((step, "range"), *path[index + 1 :])
    return ()


def _kind(category: str) -> str:
    return {"python_function": "python", "cpu_op": "op", "user_annotation": "range"}.get(category, "runtime")


def _short(name: str) -> str:
    """Returns the name of a Python frame without the folders above its package."""
    return re.sub(r"^\S*/([^/]+/[^/]+\.py\(\d+\))", r"\1", name)


def svg(root: Node, title: str, steps: int) -> str:
    """Returns a flame graph, with the root on top, as the text of an SVG file. Times are per step."""
    from ridgeline.lab import units

    total = root.total or 1.0
    rows, hidden = [], 0

    def draw(node: Node, left: float, depth: int) -> None:
        nonlocal hidden
        width = node.total / total * (WIDTH - 2 * MARGIN)
        if width < LEAST * WIDTH:
            hidden += 1
            return
        y = TOP + depth * ROW
        room = int((width - 6) / 6.4)
        text = node.name if len(node.name) <= room else node.name[: max(room - 1, 0)] + "\N{HORIZONTAL ELLIPSIS}"
        told = f"{node.name}\n{units.seconds(node.total / steps * 1e-6)} per step, {units.percent(node.total / total)}"
        told += f"; own {units.seconds(node.own / steps * 1e-6)}; {node.calls / steps:g} calls" if node.calls else ""
        label = f'<text x="{left + 4:.1f}" y="{y + 13.5}">{escape(text)}</text>' if room >= 3 else ""
        box = f'<rect class="{node.kind}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}"/>'
        rows.append(f"<g><title>{escape(told)}</title>{box}{label}</g>")
        for child in sorted(node.children.values(), key=lambda n: -n.total):
            draw(child, left, depth + 1)
            left += child.total / total * (WIDTH - 2 * MARGIN)

    draw(root, MARGIN, 0)
    height = TOP + root.depth() * ROW + MARGIN
    note = f"{units.seconds(total / steps * 1e-6)} per step over {steps} steps; width is time"
    note += f"; {hidden} narrow frames left out" if hidden else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="flame" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<desc>{escape(title)}</desc>",
            f"<style>{STYLE}</style>",
            f'<text class="title" x="{MARGIN}" y="26">{escape(title)}</text>',
            f'<text class="note" x="{MARGIN}" y="46">{escape(note)}</text>',
            *rows,
            "</svg>\n",
        ]
    )
