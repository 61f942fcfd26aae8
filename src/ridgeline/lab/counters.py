"""What a GPU's own counters say of each rung of a ladder, by Nsight Compute: the figure that shows a rung's idea at work.

ncu watches one process that runs every rung once. Between rungs a kernel that does nothing starts, so that each kernel that ncu
tells of is the rung's whose turn it was. Of a rung with several kernels sums are added up; of all else the longest speaks. A rung's
counter is read of the rung before it in the ladder too, so that one sees it move. A rung that does not take an op's first case has its
turn in the first one that it takes.
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

from ridgeline.lab import nsight

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]
BETWEEN = "empty"
TIME = "gpu__time_duration.sum"


def read(tasks: list[tuple[Op, Case, str]], chosen: Callable[[Op], list[Implementation]]) -> Iterator[Row]:
    """Of each op a row for every chosen rung that names a counter, of the first case that the rung takes: its value, or why there is none.
    Where ncu fails one row says so.

    tasks: what a run goes through: op, case, dtype. chosen: the rungs of an op that it goes through."""
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
            [sys.executable, "-m", "ridgeline.lab.counters", str(told)], Path(folder), [TIME, *wanted]
        )
        if outcome.ok:
            yield from rows(json.loads(told.read_text()), outcome.said)
        else:
            yield {"type": "counter", "status": "failed", "reason": outcome.said}


def _watched(rungs: list[Implementation]) -> list[Implementation]:
    """Those that name a counter, and the kernel before each."""
    return [
        rung
        for rung, after in zip(rungs, [*rungs[1:], None], strict=True)
        if rung.counter or (rung.is_kernel and after and after.counter)
    ]


def rows(rungs: list[Row], table: str) -> Iterator[Row]:
    """The rungs that name a counter, in the order in which they ran, each with its value by ncu's raw table, and `before` that of the rung
    that ran before, if that was in the same case; those that did not run as they are."""
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
    """A counter of a rung's kernels: a sum is that of all, any other the longest one's."""
    if counter.endswith(".sum"):
        return sum([_number(kernel[counter]) for kernel in turn])
    return _number(_longest(turn)[counter])


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def turns(work: list[Any], refusal: Callable[..., str | None]) -> Iterator[Row]:
    """A row for each turn that a rung has, in order, and for each rung with a counter that has none, with the reason.

    A rung runs in the first case that it takes. Where the rung before ran in another, it has a turn in this one too, to compare with.
    work: of each op its name, its cases with their dtypes, and its rungs with their counters. refusal: why a rung does not take a call (op,
    case, dtype, rung), or None."""
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
    """Under ncu: runs every rung of the work in that file, each in its turn, and leaves a row for each there."""
    import torch

    from ridgeline import cuda
    from ridgeline.op import RidgelineError, get

    start = cuda._EMPTY.load({"block": 32}, torch.cuda.current_device())

    @lru_cache(1)
    def made(op: str, case: str, dtype: str) -> Any:
        return get(op).case(case).make(dtype, "cuda")

    def run(op: str, case: str, dtype: str, rung: str) -> None:
        args, kwargs = made(op, case, dtype)
        get(op).implementations[rung](*get(op).fresh(args), **kwargs)

    def refusal(*call: str) -> str | None:
        """The call is made once, so that its kernels are compiled."""
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
