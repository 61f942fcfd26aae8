"""Check outputs and gradients against a float64 reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.measurement.law import Law, Verdict
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]


def check(
    op: Op, impl: str, case: str, dtype: str, device: str = "cpu", law: Law | None = None, backward: bool = True
) -> Row:
    """Checks one implementation on one case: forward and, if both have gradients, backward.

    Returns a row of type "check". Its `ok` is None if the implementation cannot run the call.
    law: the `Law` of the case, if already made.
    """
    from ridgeline.lab.measurement.law import Law
    from ridgeline.select import find

    return check_row(law or Law.of(op, case, dtype, device), find(op, impl), case, dtype, device, backward)[0]


DRAWS = 3  # tries of a nondeterministic sum: its scale may be off twice as much as torch's by luck, rarely thrice


def check_row(
    law: Law, implementation: Implementation, case: str, dtype: str, device: str, backward: bool = True
) -> tuple[Row, Verdict | None]:
    """Returns the row of `check`, and the verdict itself (None if the implementation cannot run the call)."""
    from ridgeline.op import RidgelineError

    row: Row = {"type": "check", "op": law.op.name, "case": case, "dtype": dtype, "impl": implementation.name}
    reason = cannot_check(implementation, dtype, device)
    verdict = None
    if reason is None:
        try:
            for _ in range(1 if implementation.deterministic else DRAWS):
                verdict = law.judge(*law.run(implementation, backward and implementation.differentiable))
                if {f.where for f in verdict.findings().values() if f.worst > 1} != {"scale"}:
                    break
        except RidgelineError as error:
            reason = plain(error)
    if verdict is None:
        return row | {"ok": None, "reason": reason, "outputs": {}}, None
    findings = {name: finding.row() for name, finding in verdict.findings().items()}
    return row | {"ok": verdict.ok, "reason": verdict.reason(), "outputs": findings}, verdict


def plain(error: Exception) -> str:
    """Returns the reason of a refusal, without the implementation's name, which is printed beside it."""
    return str(error).split("cannot run this call: ")[-1]


def cannot_check(implementation: Implementation, dtype: str, device: str) -> str | None:
    """Returns why an implementation cannot run on a device at all, or None if it can."""
    from ridgeline import device as devices
    from ridgeline.boundary import INTERPRETED
    from ridgeline.select import cannot_run

    if INTERPRETED and implementation.is_kernel and dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly"
    return cannot_run(implementation.kind, devices.CPU if device == "cpu" else devices.here())


def default_device(given: str | None) -> str:
    """Returns the device that a verb works on: the given one, or else the GPU if there is one."""
    import torch

    from ridgeline.op import RidgelineError

    if given not in (None, "cpu", "cuda"):
        raise RidgelineError(f"there is no device {given!r}; the devices are cpu and cuda")
    if given == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("--device cuda needs a GPU, and PyTorch finds none on this machine; use --device cpu")
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def chosen_ops(names: Iterable[str]) -> list[Op]:
    """Returns the ops of these names, or all ops if there are no names."""
    from ridgeline.op import get, registry

    return [get(name) for name in names] or list(registry().values())


def chosen_cases(op: Op, uses: Iterable[str], case: str | None, dtype: str | None) -> Iterator[tuple[Case, str]]:
    """Yields the cases and dtypes of an op that a verb runs.

    uses: the kinds of cases to run, as in `Case.use`.
    case: the name of one case, or a pattern in which * stands for any text; a pattern selects only among `uses`.
    dtype: one dtype; all dtypes of each case by default."""
    from ridgeline.op import FLOATS, RidgelineError

    known = (*FLOATS, *(d for c in op.cases for d in c.dtypes))
    if dtype is not None and dtype not in known:
        raise RidgelineError(f"{op.name} has no case in {dtype!r}; its dtypes are {', '.join(dict.fromkeys(known))}")
    cases = [c for c in op.cases if c.use in uses]
    if case and (case in [c.name for c in op.cases] or "*" not in case):
        cases = [op.case(case)]
    elif case:
        cases = [c for c in cases if fnmatchcase(c.name, case)]
    for one in cases:
        for name in one.dtypes:
            if dtype in (None, name):
                yield one, name


def chosen_work(ops: list[Op], uses: Iterable[str], case: str | None, dtype: str | None) -> list[tuple[Op, Case, str]]:
    """Returns the (op, case, dtype) triples that a verb runs. Raises RidgelineError if there are none."""
    from ridgeline.op import RidgelineError

    found = [(op, *work) for op in ops for work in chosen_cases(op, uses, case, dtype)]
    if not found:
        cases = [c for op in ops for c in op.cases if c.use in uses or c.name == case]
        if not cases:
            raise RidgelineError(f"{', '.join(op.name for op in ops)}: no cases for {' or '.join(uses)}")
        taken = ", ".join(dict.fromkeys(f"{c.name!r} in {', '.join(c.dtypes)}" for c in cases))
        chosen = " and ".join(f"{name} {value!r}" for name, value in (("case", case), ("dtype", dtype)) if value)
        raise RidgelineError(
            f"{', '.join(op.name for op in ops)}: nothing has {chosen or 'a case for this'}; the cases are {taken}"
        )
    return found


def chosen_implementations(op: Op, impl: str | None, without: str | None = None) -> list[Implementation]:
    """Returns the op's implementations in order: all, or those named in `impl`, minus those named in `without`.

    impl, without: names separated by commas; names in `without` that the op lacks are ignored."""
    from ridgeline.select import find

    left_out = (without or "").split(",")
    return [
        i
        for i in ([find(op, name) for name in impl.split(",")] if impl else op.implementations.values())
        if i.name not in left_out
    ]


def choice(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select work for `check` and `bench`."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops, as `ridgeline list` names them (default: all)")
    parser.add_argument("--impl", metavar="NAMES", help="only these implementations, separated by commas")
    parser.add_argument("--case", metavar="NAME", help="only this case; * stands for any text, as in '1024*'")
    parser.add_argument("--dtype", help="only this dtype: float32, float16 or bfloat16")
    parser.add_argument("--device", help="cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def arguments(parser: argparse.ArgumentParser) -> None:
    choice(parser)


def main(options: argparse.Namespace) -> int:
    """Prints a table of verdicts. Returns 1 if an implementation is wrong or one named by --impl cannot be checked."""
    device = default_device(options.device)
    with compiling():
        rows = list(sweep(chosen_ops(options.ops), device, options))
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
    unchecked = options.impl and {row["impl"] for row in rows} - {row["impl"] for row in rows if row["ok"] is not None}
    return int(bool(unchecked) or any(row["ok"] is False for row in rows))


@contextmanager
def compiling() -> Iterator[None]:
    """Makes torch.compile compile every shape or raise, never silently run eagerly; backwards may run twice."""
    import torch._dynamo.config
    import torch._functorch.config

    limits: dict[str, Any] = {
        "recompile_limit": 1 << 20,
        "accumulated_recompile_limit": 1 << 20,
        "fail_on_recompile_limit_hit": True,
    }
    with torch._dynamo.config.patch(**limits), torch._functorch.config.patch(donated_buffer=False):
        yield


def sweep(ops: list[Op], device: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the row of every selected case, dtype and implementation."""
    from rich.console import Console

    from ridgeline.lab.measurement.law import Law

    with Console(stderr=True).status("") as status:
        work = chosen_work(ops, ("check", "quick"), options.case, options.dtype)
        rungs = {op.name: chosen_implementations(op, options.impl) for op in ops}
        for op, case, dtype in work:
            law = Law.of(op, case.name, dtype, device)
            for rung in rungs[op.name]:
                status.update(f"{op.name} {case.name} {dtype} {rung.name}")
                yield check_row(law, rung, case.name, dtype, device)[0]


def show(rows: list[Row]) -> None:
    """Prints a line per implementation: for each dtype, its largest ratio of error to allowed error over all cases."""
    from rich.text import Text

    from ridgeline.lab.tables import console, table

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        lines.setdefault((row["op"], row["impl"]), {}).setdefault(row["dtype"], []).append(row)
    made = table("largest error / allowed error (broken above 1)", ["op", "impl", "cases"], dtypes)
    for (op, impl), cells in lines.items():
        own = [row for found in cells.values() for row in found]
        ran = [row for row in own if row["ok"] is not None]
        count = f"{len(ran)}" if len(ran) == len(own) else f"{len(ran)} of {len(own)}"
        made.add_row(op, impl, count, *(Text(*_cell(cells.get(dtype, []))) for dtype in dtypes))
    out = console()
    out.print(made)
    for op, impl, reason in dict.fromkeys((r["op"], r["impl"], r["reason"]) for r in rows if r["ok"] is None):
        out.print(f"{op} {impl}: not run: {reason}", style="dim", markup=False)
    broken = [row for row in rows if row["ok"] is False]
    for row in broken:
        out.print(
            f"{row['op']} {row['impl']}, {row['case']} {row['dtype']}: {row['reason']}", style="red", markup=False
        )
    out.print(f"{sum(row['ok'] is not None for row in rows)} checked, {len(broken)} broken")


def _cell(rows: list[Row]) -> tuple[str, str]:
    worst = [finding["worst"] for row in rows for finding in row["outputs"].values()]
    return (f"{max(worst):.2f}", "bold red" if max(worst) > 1 else "green") if worst else ("\N{EN DASH}", "dim")
