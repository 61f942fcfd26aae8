"""What a GPU's own counters say of each rung of a ladder, by Nsight Compute: the figure that shows a rung's idea at work.

ncu watches one process that runs every rung once. Between rungs a kernel that does nothing starts, so that each kernel that ncu
tells of is the rung's whose turn it was. Of a rung with several kernels the longest speaks.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab import nsight

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]
BETWEEN = "empty"
TIME = "gpu__time_duration.sum"


def counted(op: Op, dtype: str | None = None) -> tuple[Case, str] | None:
    """The case and dtype that an op's counters are read in: its first benchmark."""
    for case in op.cases:
        if case.use == "bench" and dtype in (None, *case.dtypes):
            return case, dtype or case.dtypes[0]
    return None


def read(ops: list[Op], dtype: str | None = None) -> Iterator[Row]:
    """A row for every rung that names a counter, or one row that says why there are none. Nothing where no rung names one."""
    work = [(op, *found) for op in ops if any(r.counter for r in op.implementations.values()) and (found := counted(op, dtype))]
    if not work:
        return
    metrics = sorted({r.counter for op, *_ in work for r in op.implementations.values() if r.counter})
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "rungs.json")
        calls = [word for op, case, name in work for word in (op.name, case.name, name)]
        command = [sys.executable, "-m", "ridgeline.lab.counters", str(told), *calls]
        outcome = nsight.metrics(command, Path(folder), [TIME, *metrics])
        if not outcome.ok:
            yield {"type": "counter", "status": "failed", "reason": outcome.said}
            return
        yield from rows(json.loads(told.read_text()), outcome.said)


def rows(rungs: list[Row], table: str) -> Iterator[Row]:
    """The rungs, in the order in which they ran, each with its counter's value by ncu's raw table."""
    lines = table.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    units, *kernels = list(csv.DictReader(io.StringIO("\n".join(lines[start:])))) or [{}]
    turns: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if kernel["Kernel Name"].split("(")[0] == BETWEEN:
            turns.append([])
        elif turns:
            turns[-1].append(kernel)
    for rung, turn in zip(rungs, turns, strict=True):
        if turn:
            slowest = max(turn, key=lambda kernel: _number(kernel[TIME]))
            value, unit = _number(slowest[rung["counter"]]), units[rung["counter"]]
            yield {"type": "counter", "status": "ok", **rung, "value": value, "unit": unit, "kernel": slowest["Kernel Name"].split("(")[0]}


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def main(words: list[str]) -> None:
    """Under ncu: runs every rung that names a counter, each in its turn."""
    import torch

    from ridgeline import cuda
    from ridgeline.op import get

    start = cuda._EMPTY.load({"block": 32}, torch.cuda.current_device())
    told: list[Row] = []
    for name, case, dtype in zip(words[1::3], words[2::3], words[3::3], strict=True):
        op = get(name)
        args, kwargs = op.case(case).make(dtype, "cuda")
        for rung in op.implementations.values():
            if rung.counter and _runs(rung, args, kwargs):
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                start(1, 1, 1, torch.cuda.current_stream().cuda_stream, ())
                with torch.no_grad():
                    rung(*op.fresh(args), **kwargs)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                told.append({"op": name, "case": case, "dtype": dtype, "direction": "forward", "impl": rung.name, "counter": rung.counter})
    Path(words[0]).write_text(json.dumps(told))


def _runs(rung: Implementation, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a rung takes the call, which is made once, so that its kernels are compiled."""
    from ridgeline.op import RidgelineError

    try:
        rung(*rung.op.fresh(args), **kwargs)
    except RidgelineError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
