"""Hold implementations against the law of tolerance."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.law import Law, Verdict
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]


def check(op: Op, impl: str, case: str, dtype: str, device: str = "cpu", law: Law | None = None, backward: bool = True) -> Row:
    """One implementation of one case against the law, forward and (where it and the case have gradients) backward.

    Returns a row of type "check"; its `ok` is None where the implementation cannot run the call. law: the case's, where it is made already.
    """
    from ridgeline.lab.law import Law
    from ridgeline.select import find

    return check_row(law or Law.of(op, case, dtype, device), find(op, impl), case, dtype, device, backward)[0]


def check_row(law: Law, implementation: Implementation, case: str, dtype: str, device: str, backward: bool = True) -> tuple[Row, Verdict | None]:
    """The row of `check`, and the verdict itself (None where the implementation cannot run the call)."""
    from ridgeline.op import RidgelineError

    row: Row = {"type": "check", "op": law.op.name, "case": case, "dtype": dtype, "impl": implementation.name}
    reason = cannot_check(implementation, dtype, device)
    verdict = None
    if reason is None:
        try:
            verdict = law.judge(*law.run(implementation, backward and implementation.differentiable))
        except RidgelineError as error:
            reason = plain(error)
    if verdict is None:
        return row | {"ok": None, "reason": reason, "outputs": {}}, None
    findings = {name: finding.row() for name, finding in verdict.findings().items()}
    return row | {"ok": verdict.ok, "reason": verdict.reason(), "outputs": findings}, verdict


def plain(error: Exception) -> str:
    """A refusal without the words that name the implementation, which stand beside it already."""
    return str(error).split("cannot run this call: ")[-1]


def cannot_check(implementation: Implementation, dtype: str, device: str) -> str | None:
    """Why an implementation cannot run on a device at all, or None."""
    from ridgeline import device as devices
    from ridgeline.boundary import INTERPRETED
    from ridgeline.select import cannot_run

    if INTERPRETED and implementation.is_kernel and dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly"
    return cannot_run(implementation.kind, devices.CPU if device == "cpu" else devices.here())


def default_device(given: str | None) -> str:
    """The device that a verb works on: the given one, or the GPU where there is one."""
    import torch

    from ridgeline.op import RidgelineError

    if given not in (None, "cpu", "cuda"):
        raise RidgelineError(f"there is no device {given!r}; the devices are cpu and cuda")
    if given == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("--device cuda needs a GPU, and PyTorch sees none on this machine; --device cpu works")
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def chosen_ops(names: Iterable[str]) -> list[Op]:
    """The ops of those names; all ops where none is named."""
    from ridgeline.op import get, registry

    return [get(name) for name in names] or list(registry().values())


def chosen_cases(op: Op, uses: Iterable[str], case: str | None, dtype: str | None) -> Iterator[tuple[Case, str]]:
    """The op's cases and dtypes that a verb goes through: of those uses, or the named case, in every dtype or the named one."""
    from ridgeline.op import FLOATS, RidgelineError

    known = (*FLOATS, *(d for c in op.cases for d in c.dtypes))
    if dtype is not None and dtype not in known:
        raise RidgelineError(f"{op.name} has no case in {dtype!r}; its dtypes are {', '.join(dict.fromkeys(known))}")
    for one in [op.case(case)] if case else [c for c in op.cases if c.use in uses]:
        for name in one.dtypes:
            if dtype in (None, name):
                yield one, name


def chosen_implementations(op: Op, impl: str | None) -> list[Implementation]:
    """The op's ladder, or the named rung of it."""
    from ridgeline.select import find

    return [find(op, impl)] if impl else list(op.implementations.values())


def choice(parser: argparse.ArgumentParser) -> None:
    """The options by which check and bench choose what to go through."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops; all of them by default")
    parser.add_argument("--impl", help="one implementation only")
    parser.add_argument("--case", help="one case only, by its name")
    parser.add_argument("--dtype", help="one dtype only: float32, float16, bfloat16")
    parser.add_argument("--device", help="cpu or cuda; the GPU where there is one by default")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def arguments(parser: argparse.ArgumentParser) -> None:
    choice(parser)


def main(options: argparse.Namespace) -> int:
    """Prints a table of verdicts; the exit code is 1 where an implementation is wrong."""
    device = default_device(options.device)
    rows = list(sweep(chosen_ops(options.ops), device, options))
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return int(any(row["ok"] is False for row in rows))


def sweep(ops: list[Op], device: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every chosen case, dtype and implementation, one after the other."""
    from ridgeline.lab.law import Law

    for op in ops:
        rungs = chosen_implementations(op, options.impl)
        for case, dtype in chosen_cases(op, ("check", "quick"), options.case, options.dtype):
            law = Law.of(op, case.name, dtype, device)
            for rung in rungs:
                print(f"\r\x1b[K{op.name} {case.name} {dtype} {rung.name}", end="\r", file=sys.stderr, flush=True)
                yield check_row(law, rung, case.name, dtype, device)[0]
    print("\r\x1b[K", end="", file=sys.stderr)


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "case", "dtype", "impl", "law", "worst error / allowed", "where")
    unable: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row["ok"] is None:
            place = row["op"], row["impl"], row["reason"]
            unable[place] = unable.get(place, 0) + 1
            continue
        name, worst = max(row["outputs"].items(), key=lambda item: item[1]["worst"])
        verdict = "[green]kept[/]" if row["ok"] else "[bold red]broken[/]"
        table.add_row(row["op"], row["case"], row["dtype"], row["impl"], verdict, f"{worst['worst']:.2f}", f"{name}, {worst['where']}")
    console = Console()
    console.print(table)
    for (op, impl, reason), count in unable.items():
        console.print(f"[dim]{op} {impl}: not run in {count} cases: {reason}[/]")
    broken = sum(row["ok"] is False for row in rows)
    console.print(f"{len(rows) - sum(unable.values())} checked, {broken} broken, {sum(unable.values())} not run")
