"""Checks Triton's kernels on the CPU, in Triton's interpreter: the work of a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from math import prod
from typing import Any

from ridgeline.lab.measurement.judge import check_row
from ridgeline.lab.measurement.law import Law
from ridgeline.lab.presentation.report.worker import Send
from ridgeline.op import Case, Implementation, Op, Spec, get

Group = tuple[Op, Case, str, list[Implementation]]


def groups(ops: Iterable[str]) -> list[Group]:
    """Returns (op, case, dtype, Triton implementations), cases of few elements first. bfloat16 is left out."""
    found: list[Group] = []
    for op in map(get, ops):
        kernels = [rung for rung in op.implementations.values() if rung.kind == "triton"]
        cases = [case for case in op.cases if case.use == "check"]
        found += [(op, case, d, kernels) for case in cases for d in case.dtypes if kernels and d != "bfloat16"]
    return sorted(found, key=lambda group: _size(group[1]))


def _size(case: Case) -> int:
    return sum(prod(a.shape) for a in case.args if isinstance(a, Spec))


def check(send: Send, ops: list[str], part: int, parts: int) -> None:
    """Sends ("check", row) for every `parts`-th case of `groups` from `part` on."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of infinities that a case holds on purpose
    for op, case, dtype, kernels in groups(ops)[part::parts]:
        law = Law.of(op, case.name, dtype, "cpu")
        for kernel in kernels:
            row: dict[str, Any] = check_row(law, kernel, case.name, dtype, "cpu")[0]
            send("check", row)
