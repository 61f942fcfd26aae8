"""The report's one budget of time: when each stage must end, and which cases fit into the stage that times them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.limits import roof_seconds

if TYPE_CHECKING:
    from ridgeline.lab.measurement.candidates import Candidate
    from ridgeline.op import Case, Op

Clock = Callable[[], float]
MINUTES = 5.5
QUICK_MINUTES = 1.25
# "times": the roof and the benchmarks, which need a quiet machine; "proofs": compilations and interpreted checks.
STAGES = {"times": 0.58, "proofs": 0.38, "page": 0.04}
LATE = "left out to keep within the report's time"


class Budget:
    """A total time, divided among stages that run one after the other. Time left by a stage goes to the later ones."""

    def __init__(self, minutes: float, clock: Clock = time.monotonic):
        self.minutes, self.clock = minutes, clock
        self.end = clock() + 60 * minutes

    def until(self, stage: str) -> float:
        """Returns the clock's time at which a stage that starts now must end."""
        names = list(STAGES)
        coming = names[names.index(stage) :]
        now = self.clock()
        return now + max(0.0, self.end - now) * STAGES[stage] / sum(STAGES[name] for name in coming)


class Pace:
    """Decides what `record` times first, and whether torch.compile still fits: the `pace` of that function.

    Every op's first case comes before any op's second one. A case that would be slow by the measured rates comes last.
    torch.compile takes many seconds a case on a CPU: there it is timed only while all remaining cases would still fit.
    """

    HEAVY = 0.1  # seconds a call may take at the roof
    PLAIN, COMPILE = 2.0, 45.0  # seconds a case takes without and with torch.compile, before any was timed

    def __init__(self, until: float, gpu: bool, tell: Callable[..., None], clock: Clock = time.monotonic):
        self.until, self.gpu, self.tell, self.clock = until, gpu, tell, clock
        self.spent: dict[bool, list[float]] = {True: [], False: []}
        self.last: tuple[float, bool] | None = None
        self.told = False

    def order(self, tasks: list[tuple[Op, Case, str]], run: Any) -> list[tuple[Op, Case, str]]:
        """Returns the tasks in the order in which they are timed, by the run's measured roof; tells of its file."""
        self.tell("run", str(run.path), len(tasks))
        self.told = True
        roof = next(row for row in run.rows if row["type"] == "roof")
        seen: dict[str, int] = {}
        places = []
        for n, (op, case, dtype) in enumerate(tasks):
            nth = seen[op.name] = seen.get(op.name, -1) + 1
            args, kwargs = case.make(dtype, "meta")
            costs = [c for c in op.cost(*args, **kwargs) if c is not None]
            least = sum(roof_seconds(roof, c.units or dtype, c.read, c.write, c.flops)[0] for c in costs)
            places.append((least > self.HEAVY, nth, least, n))
        return [tasks[n] for *_, n in sorted(places)]

    def fit(self, candidates: list[Candidate], left: int) -> list[Candidate]:
        """Returns a case's candidates, "skipped" if they do not fit. left: the cases to come, this one included."""
        from ridgeline.lab.measurement.candidates import Candidate

        now = self.clock()
        if self.last is not None:
            started, compiled = self.last
            self.spent[compiled].append(now - started)
        spare = self.until - now - left * (mean(self.spent[False]) if self.spent[False] else self.PLAIN)
        fits = self.gpu or spare > max(self.spent[True][-3:], default=self.COMPILE)
        self.last = now, fits and any(c.rung.kind == "compile" for c in candidates)
        return [c if fits or c.rung.kind != "compile" else Candidate(c.rung, "skipped", LATE) for c in candidates]
