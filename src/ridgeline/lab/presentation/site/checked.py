"""The errors of ops that no GPU has timed on record: on a CPU, and in the interpreter of Triton.

TRITON_INTERPRET=1 python -m ridgeline.lab.presentation.site.checked SECONDS OP ...    prints a row of JSON per rung
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement.law import Law
from ridgeline.lab.presentation.site.recorded import gpus
from ridgeline.op import RidgelineError, get, op_modules

Row = dict[str, Any]
DTYPE = "float32"  # the interpreter computes wrong results in bfloat16


def unrecorded(root: Path) -> list[str]:
    """The ops of which no GPU has recorded an error."""
    known = {work[0] for gpu in gpus(root) for work, rows in gpu.works.items() if any("law" in row for row in rows)}
    return [name for name in op_modules() if name not in known]


def start(root: Path, seconds: float) -> subprocess.Popen[str]:
    """Starts a process that checks the unrecorded ops, as far as it gets in so many seconds."""
    command = [sys.executable, "-m", "ridgeline.lab.presentation.site.checked", str(seconds), *unrecorded(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def collect(process: subprocess.Popen[str]) -> list[Row]:
    """The rows of that process, which it waits for. Raises RidgelineError if it failed."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RidgelineError(f"checking ops in the interpreter failed with exit code {process.returncode}")
    return [json.loads(line) for line in printed.splitlines()]


def rows(name: str) -> list[Row]:
    """A row for each rung that runs on a CPU or in the interpreter, for the op's smallest checked case."""
    op, found = get(name), []
    small = sorted((c for c in op.cases if c.use == "check" and DTYPE in c.dtypes), key=lambda c: len(repr(c.args)))
    for case in small[:1]:
        law = Law.of(op, case.name, DTYPE)
        for rung in op.implementations.values():
            if rung.kind == "compile":
                continue
            try:
                verdict = law.judge(*law.run(rung))
            except RidgelineError:  # it needs a GPU, or cannot take this case
                continue
            worst = {"forward": verdict.worst("forward"), "backward": verdict.worst("backward")}
            found.append({"op": name, "impl": rung.name, "case": case.name, "dtype": DTYPE} | worst)
    return found


def main() -> int:
    """Prints the rows of the ops that the command line names."""
    seconds, *names = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    for name in names:
        if time.monotonic() < until:
            for row in rows(name):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
