"""Chooses the ops, cases, dtypes and implementations that a verb runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.op import Case, Implementation, Op


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
