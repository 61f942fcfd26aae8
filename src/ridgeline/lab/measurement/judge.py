"""Judges the results of one implementation on one case by the law of tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.measurement.law import Law, Verdict
    from ridgeline.op import Implementation, Op

Row = dict[str, Any]
DRAWS = 3  # tries of a nondeterministic sum: its scale may be off twice as much as torch's by luck, rarely thrice


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
