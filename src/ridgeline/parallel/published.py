"""Public runs: what the model predicts of them, and the three constants of a stack that three of them calibrate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.parallel.cluster import cluster
from ridgeline.parallel.cost import Job, Layout, Stack, predict, stack, stacks
from ridgeline.parallel.shapes import shape

# What a constant is before any run is seen, and how far from it runs may pull it: both as in `misfit`.
PRIORS = {"compute": (0.80, 0.25), "link": (0.80, 0.20), "jitter": (0.010, 0.010)}
MEASURED = 0.03  # how far a public figure may be off, as a share


@dataclass(frozen=True)
class Run:
    """A public run. unit: "tokens/s/GPU" or "TFLOP/s/GPU" (Megatron's counts recomputation as work, as its paper does).
    use: "calibrates", "example" (held out, one of the four examples), "experts" (held out, of a model with experts) or
    "" (held out)."""

    name: str
    stack: str
    job: Job
    layout: Layout
    unit: str
    value: float
    use: str
    source: str


@cache
def runs() -> tuple[Run, ...]:
    """Returns the public runs of published.json."""
    read: list[dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
    found = []
    for row in read:
        job = Job(shape(row["model"]), cluster(row["cluster"]), stack(row["stack"]), row["seq"], row["sequences"])
        layout = Layout(**row["layout"])
        found.append(Run(row["name"], row["stack"], job, layout, row["unit"], row["value"], row["use"], row["source"]))
    return tuple(found)


def megatron_flops(run: Run) -> float:
    """Returns the FLOP of a step by the formula of Narayanan et al. 2021, which counts recomputation and all pairs."""
    s, seq = run.job.shape, run.job.seq
    inner = 1 + seq / (6 * s.width) + s.vocabulary / (16 * s.layers * s.width)
    return 96.0 * run.job.tokens * s.layers * s.width**2 * inner


def predicted(run: Run, constants: Stack | None = None) -> float:
    """Returns what the model predicts of a run, in the run's unit."""
    job = replace(run.job, stack=constants or run.job.stack)
    seconds = predict(job, run.layout).seconds
    if run.unit == "tokens/s/GPU":
        return job.tokens / seconds / run.layout.world
    flops = megatron_flops(run) if run.stack == "megatron-2021" else job.shape.flops(job.tokens, job.seq)
    return flops / seconds / run.layout.world / 1e12


def misfit(constants: Stack, seen: Iterable[Run]) -> float:
    """Returns how badly constants fit: squared errors of the runs in units of MEASURED, and of the priors in theirs."""
    total = sum((math.log(predicted(run, constants) / run.value) / MEASURED) ** 2 for run in seen)
    for name, (middle, spread) in PRIORS.items():
        value = getattr(constants, name)
        total += ((value - middle) / spread) ** 2 if name == "jitter" else (math.log(value / middle) / spread) ** 2
    return total


def calibrate(name: str) -> Stack:
    """Returns the stack with the three constants that fit its calibrating runs best, by descent on each in turn.

    No run that is held out is looked at, and at most three runs are."""
    seen = [run for run in runs() if run.stack == name and run.use == "calibrates"]
    compute, link, jitter = (PRIORS[key][0] for key in ("compute", "link", "jitter"))
    found = replace(stack(name), compute=compute, link=link, jitter=jitter)
    best = misfit(found, seen)
    steps = {"compute": 0.08, "link": 0.08, "jitter": 0.004}
    bounds = {"compute": (0.3, 1.0), "link": (0.3, 1.0), "jitter": (0.0, 0.05)}
    while steps["compute"] > 2e-4:
        better = False
        for key, step in steps.items():
            for change in (step, -step):
                low, high = bounds[key]
                changes: dict[str, Any] = {key: min(high, max(low, getattr(found, key) + change))}
                one = replace(found, **changes)
                if (score := misfit(one, seen)) < best - 1e-9:
                    found, best, better = one, score, True
        if not better:
            steps = {key: step / 2 for key, step in steps.items()}
    compute, link, jitter = (float(f"{getattr(found, key):.3g}") for key in steps)
    return replace(found, compute=compute, link=link, jitter=jitter)


def errors(name: str) -> list[float]:
    """Returns predicted over published, less 1, of the stack's dense runs that did not calibrate it."""
    held = [run for run in runs() if run.stack == name and run.use not in ("calibrates", "experts")]
    return [predicted(run) / run.value - 1 for run in held]


def spread(name: str) -> float:
    """Returns the error that two thirds of a stack's held-out runs stay within, at least 5%."""
    found = sorted(abs(e) for e in errors(name))
    return max(0.05, found[math.ceil(len(found) * 2 / 3) - 1]) if found else 0.15


def expert_band() -> tuple[float, float]:
    """Returns how far below and above the prediction two thirds of the public runs with experts are, as shares of it:
    those that are predicted best."""
    reached = sorted(
        (run.value / predicted(run) for run in runs() if run.use == "experts"), key=lambda r: abs(math.log(r))
    )
    best = reached[: math.ceil(len(reached) * 2 / 3)]
    return 1 - min(best), max(0.05, max(best) - 1)


def band(name: str, experts: bool = False) -> tuple[float, float]:
    """Returns how far below and above its prediction a run's speed may be, as shares: that of a stack's public runs,
    the widest of all for a stack without any, and that of the public runs with experts for a model with experts."""
    if experts:
        return expert_band()
    known = calibrating()
    one = spread(name) if name in known else max(spread(other) for other in known)
    return one, one


def rows() -> list[dict[str, Any]]:
    """Returns a row for each public run: published, predicted, and the error."""
    return [
        {"run": run.name, "stack": run.stack, "unit": run.unit, "published": run.value, "use": run.use,
         "predicted": predicted(run), "error": predicted(run) / run.value - 1, "source": run.source}
        for run in runs()
    ]  # fmt: skip


def calibrating() -> list[str]:
    """Returns the stacks with runs of their own."""
    return [name for name in stacks() if any(run.stack == name for run in runs())]


def calibrated() -> dict[str, Stack]:
    """Returns the stacks with runs of their own, calibrated anew."""
    return {name: calibrate(name) for name in calibrating()}
