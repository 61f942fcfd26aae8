"""What a GPU's own counters say of each rung of a ladder, by Nsight Compute: the figure that shows a rung's idea at work.

ncu watches one process that runs every rung once. Between rungs a kernel that does nothing starts, so that each kernel that ncu
tells of is the rung's whose turn it was. Of a rung with several kernels the longest speaks. A rung's counter is read of the kernel before
it in the ladder too, so that one sees it move.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab import nsight

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]
BETWEEN = "empty"
TIME = "gpu__time_duration.sum"


def read(tasks: list[tuple[Op, Case, str]], chosen: Callable[[Op], list[Implementation]]) -> Iterator[Row]:
    """Of each op's first case a row for every chosen rung that names a counter: its value, or why there is none. Where ncu fails one
    row says so.

    tasks: what a run goes through: op, case, dtype. chosen: the rungs of an op that it goes through."""
    first: dict[str, tuple[Op, Case, str]] = {}
    for op, case, dtype in tasks:
        first.setdefault(op.name, (op, case, dtype))
    work = [[op.name, case.name, dtype, [r.name for r in _watched(chosen(op))]] for op, case, dtype in first.values()]
    work = [one for one in work if one[3]]
    if not work:
        return
    names = {rung for one in work for rung in one[3]}
    wanted = sorted({r.counter for op, *_ in first.values() for r in op.implementations.values() if r.counter and r.name in names})
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "rungs.json")
        told.write_text(json.dumps(work))
        outcome = nsight.metrics([sys.executable, "-m", "ridgeline.lab.counters", str(told)], Path(folder), [TIME, *wanted])
        if outcome.ok:
            yield from rows(json.loads(told.read_text()), outcome.said)
        else:
            yield {"type": "counter", "status": "failed", "reason": outcome.said}


def _watched(rungs: list[Implementation]) -> list[Implementation]:
    """Those that name a counter, and the kernel before each."""
    return [
        rung for rung, after in zip(rungs, [*rungs[1:], None], strict=True) if rung.counter or (rung.is_kernel and after and after.counter)
    ]


def rows(rungs: list[Row], table: str) -> Iterator[Row]:
    """The rungs that name a counter, in the order in which they ran, each with its value by ncu's raw table, and `before` that of the rung
    that ran before; those that did not run as they are."""
    lines = table.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    units, *kernels = list(csv.DictReader(io.StringIO("\n".join(lines[start:])))) or [{}]
    turns: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if kernel["Kernel Name"].split("(")[0] == BETWEEN:
            turns.append([])
        elif turns:
            turns[-1].append(kernel)
    yield from (rung for rung in rungs if rung["status"] != "ok" and rung["counter"])
    last: tuple[str, dict[str, str]] | None = None
    for rung, turn in zip([rung for rung in rungs if rung["status"] == "ok"], turns, strict=True):
        slowest = max(turn, key=lambda kernel: _number(kernel[TIME]), default=None)
        if slowest and (name := rung["counter"]):
            before = {"before": _number(last[1][name])} if last and last[0] == rung["op"] else {}
            yield rung | {"value": _number(slowest[name]), **before, "unit": units[name], "kernel": slowest["Kernel Name"].split("(")[0]}
        last = (rung["op"], slowest) if slowest else None


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def main(path: Path) -> None:
    """Under ncu: runs every rung of the work in that file, each in its turn, and leaves a row for each there."""
    import torch

    from ridgeline import cuda
    from ridgeline.op import get

    start = cuda._EMPTY.load({"block": 32}, torch.cuda.current_device())
    told: list[Row] = []
    for name, case, dtype, rungs in json.loads(path.read_text()):
        op = get(name)
        args, kwargs = op.case(case).make(dtype, "cuda")
        for rung in [op.implementations[r] for r in rungs]:
            row = {"type": "counter", "status": "ok", "op": name, "case": case, "dtype": dtype, "direction": "forward", "impl": rung.name}
            reason = _refusal(rung, args, kwargs)
            told.append(row | {"counter": rung.counter} | ({"status": "unsupported", "reason": reason} if reason else {}))
            if not reason:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                start(1, 1, 1, torch.cuda.current_stream().cuda_stream, ())
                with torch.no_grad():
                    rung(*op.fresh(args), **kwargs)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
    path.write_text(json.dumps(told))


def _refusal(rung: Implementation, args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """Why a rung does not take the call, which is made once, so that its kernels are compiled; or None."""
    from ridgeline.op import RidgelineError

    try:
        rung(*rung.op.fresh(args), **kwargs)
    except RidgelineError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
