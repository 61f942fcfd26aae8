"""A process of its own, with TRITON_INTERPRET=1: checks Triton's kernels on the CPU, the small cases first, one JSON line each.

python -m ridgeline.lab.report.interpreter SECONDS
"""

from __future__ import annotations

import json
import sys
import time
from math import prod

from ridgeline.lab.check import check_row
from ridgeline.lab.law import Law
from ridgeline.lab.report.measure import say
from ridgeline.op import Case, Spec, registry


def _size(case: Case) -> int:
    return sum(prod(a.shape) for a in case.args if isinstance(a, Spec))


def main(seconds: float) -> None:
    """Prints a check row for every rung, case and dtype that fits into the time, then {"left": how many did not}."""
    until = time.monotonic() + seconds
    work = [
        (op, case, dtype)
        for op in registry().values()
        for case in op.cases
        if case.use == "check"
        for dtype in case.dtypes
    ]
    left = 0
    for op, case, dtype in sorted(work, key=lambda w: _size(w[1])):
        rungs = [rung for rung in op.implementations.values() if rung.kind == "triton" and dtype != "bfloat16"]
        if not rungs:
            continue
        if time.monotonic() > until:
            left += len(rungs)
            continue
        say(f"checking {op.name} {case.name} {dtype} in the interpreter")
        law = Law.of(op, case.name, dtype, "cpu")
        for rung in rungs:
            print(json.dumps(check_row(law, rung, case.name, dtype, "cpu")[0]))
    say("")
    print(json.dumps({"left": left}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
