"""The process that runs a learner's file: it tests it, compiles it, or times it, and leaves the rows in a file.

python -m ridgeline.lab.analysis.lesson.worker test|compile|time LESSON FILE DEVICE ROWS

Tests on a CPU run in Triton's interpreter, so the caller sets TRITON_INTERPRET=1; compiling needs it unset.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis.lesson.attempt import Attempt, configured, given, line, load, short
from ridgeline.lab.analysis.lesson.exercises import EXERCISES, Exercise, Probe
from ridgeline.lab.analysis.lesson.wording import say
from ridgeline.translation import choose, told

Row = dict[str, Any]
ARCH = "sm_90"


def tests(number: int, path: Path, device: str) -> list[Row]:
    """Returns a row for each test: its name, `ok` (None if it did not run), and the reason and hint of a failure."""
    import torch

    from ridgeline.boundary import INTERPRETED

    exercise = EXERCISES[number]
    function = load(path, number, exercise)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then holds NaN, so nothing unwritten passes
    watch: Any = nullcontext
    if INTERPRETED:
        from ridgeline.lab.analysis.lesson.bounds import watched as watch
    rows: list[Row] = []
    try:
        for probe in exercise.probes:
            with watch():
                rows.append(_test(exercise, probe, function, device, path))
            if not rows[0]["ok"]:
                break
    finally:
        torch.use_deterministic_algorithms(before)
    return rows


def _test(exercise: Exercise, probe: Probe, function: Any, device: str, path: Path) -> Row:
    import torch

    from ridgeline.lab.inline import NeedsGpu
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import get

    tensors = [t.to(device).requires_grad_(False) for t in probe.make(torch.Generator().manual_seed(0))]
    law = Law(get(exercise.op), [*tensors, *exercise.fixed], probe.options)
    before = [t.clone() for t in tensors]
    row: Row = {"test": probe.name, "ok": False, "hint": probe.hint}
    try:
        result = function(*tensors, **probe.options)
    except NeedsGpu:
        return row | {"ok": None, "reason": say("cuda")}
    except Exception as error:  # whatever a learner's kernel raises is the reason
        return row | _blamed(error, path, plain=probe is exercise.probes[0])
    if not isinstance(result, torch.Tensor):
        return row | {"reason": say("returned", got=type(result).__name__), "hint": "hint.returned"}
    if any(not torch.equal(a, b) for a, b in zip(tensors, before, strict=True)):
        return row | {"reason": say("changed"), "hint": "hint.changed"}
    verdict = law.judge([result])
    where = max(verdict.outputs.values(), key=lambda finding: finding.worst).where
    reason = verdict.reason()
    if where == "form":
        wanted = torch.empty_like(_expected(exercise, tensors, probe.options), device="meta")
        return row | {"reason": say("form", got=_form(result), wanted=_form(wanted)), "hint": "hint.form"}
    if where == "nonfinite" and probe is exercise.probes[0]:
        row["hint"] = "hint.unwritten"
    return row | {"ok": reason is None, "reason": reason and told(reason)}


def _expected(exercise: Exercise, tensors: list[Any], options: Row) -> Any:
    from ridgeline.op import get

    result = get(exercise.op).reference(*tensors, *exercise.fixed, **options)
    return result[0] if isinstance(result, tuple) else result


def _form(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _blamed(error: Exception, path: Path, plain: bool) -> Row:
    """Returns the reason of an error, and its hint where the test's own would mislead.

    plain: this is the first test, which has no special inputs.
    """
    from ridgeline.boundary import INTERPRETED

    if INTERPRETED:
        from ridgeline.lab.analysis.lesson.bounds import cause

        if found := cause(error):
            did = "reads" if found.call == "load" else "writes"
            call = {"atomic": "atomic_add"}.get(found.call, found.call)
            hint = {"hint": "hint.outside"} if plain else {}
            return {"reason": say("beyond", did=say(did), count=found.count, call=call)} | hint
    text, at = short(error), line(error, path)
    hint = {"hint": "hint.raised"} if plain else {}
    if INTERPRETED and "NoneType" in text and "libdevice" in path.read_text():
        hint = {"hint": "hint.libdevice"}
    if "not compiled with CUDA" in text or "NVIDIA driver" in text:
        hint = {"hint": "hint.device"}
    return {"reason": say("raised-at", line=at, error=text) if at else say("raised", error=text)} | hint


def compiled(number: int, path: Path) -> list[Row]:
    """Returns what each kernel of the learner's, and of our rungs, takes when compiled for the architecture."""
    from ridgeline.lab.analysis.inspect import resources
    from ridgeline.op import RidgelineError, get
    from ridgeline.select import find

    exercise = EXERCISES[number]
    op = get(exercise.op)
    case = op.case(exercise.case)
    found: list[tuple[str, Any]] = []
    try:
        found += [("yours", r) for r in _own(exercise, load(path, number, exercise), case)]
    except RidgelineError:
        raise
    except Exception as error:  # as in `_test`
        reason = say("values") if "meta tensor" in str(error) else short(error)
        return [{"impl": "yours", "failed": say("uncompiled", arch=ARCH, error=reason)}]
    if not found:
        return [{"impl": "yours", "failed": say("no-kernel")}]
    for name in exercise.rungs:
        ours = resources(op, find(op, name), case, exercise.dtype, ARCH, ("forward",), disassemble=True)
        found += [(name, r) for r in ours]
    return [r.to_dict() | {"impl": name, "double": _doubles(r.texts.get("sass", ""))} for name, r in found]


def _own(exercise: Exercise, function: Any, case: Any) -> list[Any]:
    """Returns the resources of the kernels that the learner's function starts on tensors without data."""
    import torch
    from triton.runtime.jit import JITFunction

    from ridgeline import boundary, device
    from ridgeline.lab.analysis.inspect import of_launch

    launches: list[Any] = []
    run = JITFunction.run

    def seen(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        bound = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
        launches.append(boundary.Launch(kernel, (1,), (), bound, device.known(ARCH)))
        return None

    with device.pretend(ARCH), boundary.observe(launches.append):
        args, kwargs = case.make(exercise.dtype, "meta")
        JITFunction.run = seen
        try:
            given(exercise, function)(*[a.detach() for a in args if isinstance(a, torch.Tensor)], **kwargs)
            return [of_launch(launch, disassemble=True) for launch in launches]
        finally:
            JITFunction.run = run


def _doubles(sass: str) -> int:
    """Returns how many instructions of some machine code compute in float64."""
    import re

    return len(re.findall(r"\b(?:DFMA|DMUL|DADD|DSETP|F2F\.F64\.F32|F2F\.F32\.F64)\b", sass))


def timed(number: int, path: Path, device: str) -> list[Row]:
    """Returns the bench rows of the learner's function between our rungs, checked and timed by the lab's clock."""
    from dataclasses import replace

    from ridgeline.lab.measurement.candidates import Candidate
    from ridgeline.lab.measurement.roof import measure_roof
    from ridgeline.lab.measurement.timing import bench_case
    from ridgeline.op import get

    exercise = EXERCISES[number]
    op, function = get(exercise.op), load(path, number, exercise)
    case = op.case(exercise.case)
    if device == "cpu":  # for tests of this file: a laptop has no use for the times
        case = next(c for c in op.cases if c.use == "quick" and c.args[exercise.tensors :] == exercise.fixed)
    case = replace(case, args=tuple(_without_gradient(a) for a in case.args))
    mine = Attempt(op, "yours", "your kernel", "eager", given(exercise, function), differentiable=False)
    candidates = [Candidate(rung) for rung in op.implementations.values() if _compared(rung, exercise, device)]
    roof = measure_roof(device, quick=True)
    rows = bench_case(op, case, exercise.dtype, device, [*candidates, Candidate(mine)], roof, budget=1.0)
    return [row for row in rows if row["type"] == "bench" and row["direction"] == "forward"]


def _without_gradient(value: Any) -> Any:
    from ridgeline.op import Spec

    return Spec(*value.shape, dtype=value.dtype, grad=False, high=value.high) if type(value) is Spec else value


def _compared(rung: Any, exercise: Exercise, device: str) -> bool:
    return rung.name == "torch" or (rung.name in exercise.rungs and device != "cpu")


def main(arguments: list[str]) -> int:
    from ridgeline.op import RidgelineError

    what, number, path, device, rows, spoken = arguments
    choose(spoken)
    configured()
    try:
        run = {"test": tests, "time": timed}.get(what)
        found = run(int(number), Path(path), device) if run else compiled(int(number), Path(path))
    except RidgelineError as error:
        found = [{"refused": str(error)}]
    Path(rows).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
