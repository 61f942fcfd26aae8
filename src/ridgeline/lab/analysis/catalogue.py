"""The verbs `list` and `explain`: the ops and their implementations, and which one a call runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import ridgeline.device as devices
from ridgeline.lab.analysis.cards import names, pretended
from ridgeline.lab.tables import console, print_table

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op

Row = dict[str, Any]
USES = ("bench", "quick", "check", "grid", "sample")


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops, with the names of their cases; all ops by default")
    parser.add_argument("--json", action="store_true", help="print the implementations as JSON")


def list_main(options: argparse.Namespace) -> int:
    from ridgeline.lab.measurement.cases import chosen_ops

    ops = chosen_ops(options.ops)
    if options.json:
        print(json.dumps([rung(i) for op in ops for i in op.implementations.values()]))
        return 0
    from rich.text import Text

    out = console()
    for op in ops:
        shown = []
        for row in map(rung, op.implementations.values()):
            marks = [word for word, on in (("served", row["served"]), ("no backward", not row["differentiable"])) if on]
            marks += [] if row["deterministic"] else ["not deterministic"]
            only = f"sm_{row['arch']} only" if row["arch"] == row["newest"] else f"sm_{row['arch']} and later"
            marks += [only] if row["arch"] else []
            marks += [f"{row['shared'] >> 10} KiB of shared memory"] if row["shared"] else []
            dtypes = ", ".join(d.replace("float", "f") for d in row["dtypes"])
            shown.append((row["impl"], row["kind"], row["idea"], dtypes, ", ".join(marks)))
        print_table(f"{op.name}  ({op.family})", ["impl", "kind", "idea", "dtypes", ""], [], shown, out)
        if options.ops:
            for use, cases in groupby(sorted(op.cases, key=lambda c: USES.index(c.use)), lambda c: c.use):
                out.print(Text(f"  cases, {use}: {', '.join(c.name for c in cases)}\n"))
    return 0


def rung(implementation: Implementation) -> Row:
    """The declared facts of an implementation."""
    facts = ("kind", "idea", "dtypes", "served", "differentiable", "deterministic", "arch", "newest", "shared")
    return {"op": implementation.op.name, "impl": implementation.name} | {
        fact: getattr(implementation, fact) for fact in facts
    }


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", nargs="?")
    parser.add_argument("--model", help="instead of an op: a transformers model by name or folder, without its weights")
    parser.add_argument("--quantize", help="with --model: int8, int4, fp8 or mxfp4, as hf.patch would")
    parser.add_argument("--case", help="the case to explain (default: the op's first)")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the case's first)")
    parser.add_argument("--device", help=f"cpu or cuda, or a card or architecture that need not be here: {names()}")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def explain_main(options: argparse.Namespace) -> int:
    from ridgeline.lab.measurement.cases import chosen_cases
    from ridgeline.op import RidgelineError, get

    if (options.op is None) == (options.model is None):
        raise RidgelineError("explain takes an op or --model with the name or folder of a transformers model")
    if options.model is not None:
        from ridgeline import hf

        report = hf.explain(hf.on_meta(options.model), quantize=options.quantize)
        print(json.dumps(asdict(report)) if options.json else report)
        return 0
    if options.quantize:
        raise RidgelineError("explain: --quantize is for --model; an op has no layers to quantise")
    op = get(options.op)
    uses = ("check", "quick", "bench")
    call = next(chosen_cases(op, uses, options.case, options.dtype), None)
    if call is None:
        case = op.case(options.case) if options.case else op.cases[0]
        raise RidgelineError(
            f"{op.name}, case {case.name!r} has no dtype {options.dtype!r}; it has {', '.join(case.dtypes)}"
        )
    answer = explain(op, *call, options.device)
    if options.json:
        print(json.dumps(answer))
    else:
        show(op, answer)
    return 0


def explain(op: Op, case: Case, dtype: str, device: str | None = None) -> Row:
    """Which implementations can run a call on a device, which one runs by default (forward), and why not the others.

    device: "cpu", "cuda", or the name of a known card or architecture, which need not be here (see `device.known`).
    Default: the GPU if there is one, else the CPU. Raises RidgelineError if there is no such device.
    """
    from ridgeline.lab.measurement.machine import default_device
    from ridgeline.op import tensors_of

    known = pretended(device)
    with devices.pretend(known) if known else nullcontext():
        args, kwargs = case.make(dtype, "meta" if known else default_device(device))
        target = devices.of(tensors_of(args)[0])
        reasons = {name: why_not(i, args, kwargs) for name, i in op.implementations.items()}
        left = {name: i.left("fwd", *args, **kwargs) for name, i in op.implementations.items()}
        usable = [
            i for name, i in op.implementations.items() if i.served and reasons[name] is None and left[name] is None
        ]
        if (
            op.always
            and target.backend != "cpu"
            and usable
            and not usable[-1].is_kernel
            and refusal(op.function, args, kwargs)
        ):
            left |= {i.name: "on a GPU only kernels run this op by default" for i in usable}
            usable = []
    backward = op.cost(*args, **kwargs)[1] is not None
    able = [i for i in usable if i.differentiable or not backward]
    found = {
        name: {"reason": reasons[name], "left": left[name], "serves": bool(able) and i is able[-1]}
        for name, i in op.implementations.items()
    }
    rungs = [rung(i) | found[name] for name, i in op.implementations.items()]
    return {
        "op": op.name,
        "case": case.name,
        "dtype": dtype,
        "device": target.name,
        "arch": target.arch,
        "rungs": rungs,
    }


def why_not(implementation: Implementation, args: list[Any], kwargs: Row) -> str | None:
    """Why an implementation cannot run a call, or None. For a kernel this calls it."""
    from ridgeline import select

    if not implementation.is_kernel:
        return select.why_not(implementation, *args, **(kwargs if implementation.supports else {}))
    return refusal(implementation, args, kwargs)


def refusal(function: Callable[..., Any], args: list[Any], kwargs: Row) -> str | None:
    """The message of the error that a call raises, or None."""
    from ridgeline.lab.measurement.judge import plain
    from ridgeline.op import RidgelineError

    try:
        function(*args, **kwargs)
    except RidgelineError as error:
        return plain(error)
    return None


def show(op: Op, answer: Row) -> None:
    from rich.text import Text

    title, shown = f"{op.name}, {answer['case']} in {answer['dtype']}, on {answer['device']}", []
    for row in answer["rungs"]:
        word, style, why = "can", "", "a later implementation runs by default"
        if row["serves"]:
            word, style, why = "default", "bold green", "the last one that may run by default and supports the call"
        elif row["reason"]:
            word, style, why = "cannot", "yellow", row["reason"]
        elif not row["served"]:
            why = "for teaching and comparison: it runs only by name"
        elif row["left"]:
            why = f"by name only: {row['left']}"
        shown.append((row["impl"], row["kind"], Text(word, style=style), why))
    print_table(title, ["impl", "kind", "", "why"], [], shown)
    if not any(row["serves"] for row in answer["rungs"]):
        console().print("Nothing runs this call by default: it raises unless `impl=` names an implementation.")
