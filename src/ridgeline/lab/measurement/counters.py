"""Reads hardware counters by Nsight Compute (ncu): for each implementation, the metric that shows its idea at work.

ncu watches one process that runs every implementation (rung) once. An empty kernel starts between rungs, and so
separates their kernels in ncu's table. If a rung starts several kernels, counters that are sums are added up; any other
is that of the longest kernel. A counter is also read for the rung before in the ladder, to show the change. If a rung
does not support an op's first case, it runs the first case that it supports.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement import nsight

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]
BETWEEN = "empty"
TIME = "gpu__time_duration.sum"


def read(tasks: list[tuple[Op, Case, str]], chosen: Callable[[Op], list[Implementation]]) -> Iterator[Row]:
    """Yields a row for every chosen rung with a counter: its value in the first case it supports, or why there is none.

    If ncu fails, there is one row with the reason.
    tasks: the (op, case, dtype) triples of the run. chosen: returns the rungs of an op to run."""
    cases: dict[str, list[tuple[str, str]]] = {}
    rungs: dict[str, list[Implementation]] = {}
    for op, case, dtype in tasks:
        cases.setdefault(op.name, []).append((case.name, dtype))
        if op.name not in rungs:
            rungs[op.name] = _watched(chosen(op))
    work = [[name, cases[name], [(r.name, r.counter) for r in watched]] for name, watched in rungs.items() if watched]
    if not work:
        return
    wanted = sorted({r.counter for watched in rungs.values() for r in watched if r.counter})
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "rungs.json")
        told.write_text(json.dumps(work))
        outcome = nsight.metrics(
            [sys.executable, "-m", "ridgeline.lab.measurement.counters", str(told)], Path(folder), [TIME, *wanted]
        )
        if outcome.ok:
            yield from rows(json.loads(told.read_text()), outcome.said)
        else:
            yield {"type": "counter", "status": "failed", "reason": outcome.said}


def _watched(rungs: list[Implementation]) -> list[Implementation]:
    """Returns the rungs that name a counter, and the kernel before each of them."""
    return [
        rung
        for rung, after in zip(rungs, [*rungs[1:], None], strict=True)
        if rung.counter or (rung.is_kernel and after and after.counter)
    ]


def rows(rungs: list[Row], table: str) -> Iterator[Row]:
    """Yields the rows of the rungs with a counter, in the order of their runs, with the values from ncu's raw table.

    `before` is the value for the rung that ran before, if in the same case. Rungs that did not run come first,
    unchanged."""
    lines = table.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    units, *kernels = list(csv.DictReader(io.StringIO("\n".join(lines[start:])))) or [{}]
    kernels_of: list[list[dict[str, str]]] = []
    for kernel in kernels:
        if kernel["Kernel Name"].split("(")[0] == BETWEEN:
            kernels_of.append([])
        elif kernels_of:
            kernels_of[-1].append(kernel)
    yield from (rung for rung in rungs if rung["status"] != "ok" and rung["counter"])
    last: tuple[Any, list[dict[str, str]]] | None = None
    for rung, turn in zip([rung for rung in rungs if rung["status"] == "ok"], kernels_of, strict=True):
        call = [rung[fact] for fact in ("op", "case", "dtype")]
        if turn and (name := rung["counter"]):
            before = {"before": _of_all(last[1], name)} if last and last[0] == call else {}
            longest = _longest(turn)["Kernel Name"].split("(")[0]
            yield rung | {"value": _of_all(turn, name), **before, "unit": units[name], "kernel": longest}
        last = (call, turn) if turn else None


def _longest(turn: list[dict[str, str]]) -> dict[str, str]:
    return max(turn, key=lambda kernel: _number(kernel[TIME]))


def _of_all(turn: list[dict[str, str]], counter: str) -> float:
    """Returns a rung's counter: the sum over its kernels if the metric is a sum, else that of the longest kernel."""
    if counter.endswith(".sum"):
        return sum([_number(kernel[counter]) for kernel in turn])
    return _number(_longest(turn)[counter])


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def turns(work: list[Any], refusal: Callable[..., str | None]) -> Iterator[Row]:
    """Yields a row for each run of a rung, in order, and a row with the reason for each rung with a counter but no run.

    A rung runs the first case that it supports. If the rung before ran another case, it also runs this one, to compare.
    work: for each op its name, its cases with their dtypes, and its rungs with their counters.
    refusal: f(op, case, dtype, rung) -> why the rung does not support the call, or None."""
    for op, cases, rungs in work:
        last = None
        for n, (rung, counter) in enumerate(rungs):
            refused: list[str | None] = []
            for place in cases:
                refused.append(refusal(op, *place, rung))
                if refused[-1] is None:
                    break
            place = cases[0] if refused[-1] else place
            row = {
                "type": "counter",
                "status": "ok",
                "op": op,
                "case": place[0],
                "dtype": place[1],
                "direction": "forward",
            }
            if refused[-1]:
                if counter:
                    yield row | {"impl": rung, "counter": counter, "status": "unsupported", "reason": refused[0]}
                continue
            if last not in (None, place) and refusal(op, *place, rungs[n - 1][0]) is None:
                yield row | {"impl": rungs[n - 1][0], "counter": ""}
            yield row | {"impl": rung, "counter": counter}
            last = place


def main(path: Path) -> None:
    """Runs, under ncu, every rung of the work in this file, one after the other, and writes their rows to the file."""
    import torch

    from ridgeline import cuda
    from ridgeline.op import RidgelineError, get

    start = cuda.EMPTY.load({"block": 32}, torch.cuda.current_device())

    @lru_cache(1)
    def made(op: str, case: str, dtype: str) -> Any:
        return get(op).case(case).make(dtype, "cuda")

    def run(op: str, case: str, dtype: str, rung: str) -> None:
        args, kwargs = made(op, case, dtype)
        get(op).implementations[rung](*get(op).fresh(args), **kwargs)

    def refusal(*call: str) -> str | None:
        """Returns why a call is refused, or None. It makes the call, so that its kernels are compiled."""
        try:
            run(*call)
        except RidgelineError as error:
            return str(error)
        return None

    told: list[Row] = []
    for row in turns(json.loads(path.read_text()), refusal):
        told.append(row)
        if row["status"] == "ok":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            start(1, 1, 1, torch.cuda.current_stream().cuda_stream, ())
            with torch.no_grad():
                run(row["op"], row["case"], row["dtype"], row["impl"])
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    path.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
