"""The implementations that may be timed on a case, each with the reason if it is not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.calls import DIRECTIONS
from ridgeline.lab.measurement.judge import check_row

if TYPE_CHECKING:
    from ridgeline.lab.measurement.clock import Function
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import Implementation

Row = dict[str, Any]
FULL = "it needs more memory than there is"


@dataclass
class Candidate:
    """An implementation that may be timed. law, broken: what the tolerance check found, per direction."""

    rung: Implementation
    status: str = "ok"
    reason: str | None = None
    law: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str | None] = field(default_factory=dict)


def judge(law: Law, candidate: Candidate, case: str, dtype: str, device: str) -> Row | None:
    """The check row of a candidate, or None if the check did not finish; the outcome is noted on the candidate."""
    import torch

    row = None
    try:
        row, verdict = check_row(law, candidate.rung, case, dtype, device)
        if verdict is None:
            candidate.status, candidate.reason = "unsupported", row["reason"]
            return row
        for direction in DIRECTIONS:
            candidate.law[direction] = verdict.worst(direction)
            candidate.broken[direction] = verdict.reason(direction)
    except torch.OutOfMemoryError:
        release(device)
        candidate.status, candidate.reason = "oom", FULL
    except Exception as error:  # whatever a broken kernel raises is its row's reason, and the others go on
        candidate.status, candidate.reason = "wrong", blame(candidate, error)
    return row


def untimed(rung: Implementation) -> Candidate | None:
    """A candidate that is not timed, if the implementation would run in Triton's interpreter; else None."""
    from ridgeline.boundary import INTERPRETED

    return (
        Candidate(rung, "unsupported", "Triton's interpreter is not timed") if INTERPRETED and rung.is_kernel else None
    )


def blame(candidate: Candidate, error: Exception) -> str:
    """What an implementation raised, as a reason.

    Raises RidgelineError after an error of the GPU itself, since nothing else can run then.
    """
    from ridgeline.op import RidgelineError

    text = str(error).strip().splitlines() or [""]
    reason = f"it raised {type(error).__name__}: {text[0]}"
    if "CUDA error" in str(error):
        raise RidgelineError(
            f"{candidate.rung.op.name} {candidate.rung.name} broke the GPU's context: {reason}"
        ) from error
    return reason


def stumbles(candidate: Candidate, make: Callable[[], Function]) -> str | None:
    """Returns what a function raises when it is called twice, or None. Running out of memory is left to `timed`."""
    import torch

    try:
        function = make()
        function()
        function()
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # as in judge
        return blame(candidate, error)
    return None


def release(device: str) -> None:
    """Frees memory that is no longer used."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
