"""Which rung serves which calls of an op, and why, by the rules of `ridgeline explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.lab.analysis.catalogue import explain
from ridgeline.lab.presentation.site.markdown import plain, table
from ridgeline.lab.presentation.site.recorded import shown
from ridgeline.op import Op, RidgelineError

Row = dict[str, Any]
CARDS = {"h100": "H100", "rtx4090": "RTX 4090", "b200": "B200"}  # for which the choice is shown
CASES = 10  # at most so many benchmarked cases are explained


def rules(op: Op, root: Path) -> tuple[str, str]:
    """The case that stands for an op, and a table of its rungs on each card and on a CPU, with the reasons below."""
    case, dtype = shown(op, root)
    answers = {name: explain(op, case, dtype, card) for card, name in CARDS.items()} | {"CPU": on_cpu(op)}
    heads = [name for name, answer in answers.items() if answer]
    rows, reasons = [], []
    for n, rung in enumerate(op.implementations.values()):
        facts = [answer["rungs"][n] for answer in answers.values() if answer]
        rows.append([f"`{rung.name}`", *map(word, facts)])
        if why := " ".join(dict.fromkeys(reason(fact) for fact in facts if reason(fact))):
            reasons.append(f"- `{rung.name}`: {plain(why)}")
    return f"`{case.name}` in {dtype}", "\n\n".join(filter(None, [table(["", *heads], rows), "\n".join(reasons)]))


def on_cpu(op: Op) -> Row | None:
    """The answer for the smallest checked case on a CPU, or None if no case runs there."""
    for case in sorted((c for c in op.cases if c.use == "check"), key=lambda c: len(repr(c.args))):
        try:
            return explain(op, case, case.dtypes[0], "cpu")
        except RidgelineError:
            continue
    return None


def word(fact: Row) -> str:
    """What a rung is in one call: the default, possible by name, or impossible."""
    if fact["serves"]:
        return "**default**"
    return "cannot" if fact["reason"] else "by name"


def reason(fact: Row) -> str:
    """Why a rung is not the default, as one sentence; empty if there is nothing to add."""
    if fact["serves"]:
        return ""
    text = fact["reason"] or (f"left to another rung: {fact['left']}" if fact["served"] and fact["left"] else "")
    if not text and not fact["served"]:
        text = "for teaching and comparison"
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def cases(op: Op) -> str:
    """A list of rungs with the benchmarked cases that each serves on an H100; empty if one serves them all."""
    found: dict[str, list[str]] = {}
    benched = [c for c in op.cases if c.use == "bench"]
    for case in benched[:: max(1, -(-len(benched) // CASES))]:
        dtype = "bfloat16" if "bfloat16" in case.dtypes else case.dtypes[0]
        answer = explain(op, case, dtype, "h100")
        name = next((row["impl"] for row in answer["rungs"] if row["serves"]), "none")
        found.setdefault(name, []).append(case.name if dtype == "bfloat16" else f"{case.name} in {dtype}")
    if len(found) < 2:
        return ""
    return "\n".join(f"- Served by `{name}`: {plain('; '.join(names))}." for name, names in found.items())
