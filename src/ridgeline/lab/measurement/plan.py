"""Chooses what a run times: its cases, and the implementations and peers of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ridgeline.lab.measurement.candidates import Candidate, untimed
from ridgeline.lab.measurement.cases import chosen_implementations, chosen_work

if TYPE_CHECKING:
    from ridgeline.lab.measurement.store import Run
    from ridgeline.op import Case, Implementation, Op

Task = tuple["Op", "Case", str]


class Pace(Protocol):
    """Decides, by the time that is left, what is timed first and what is left out."""

    def order(self, tasks: list[Task], run: Run) -> list[Task]:
        """Returns the (op, case, dtype) in the order in which they are timed. run: it has its roof row by now."""

    def fit(self, candidates: list[Candidate], left: int) -> list[Candidate]:
        """Returns a case's candidates, "skipped" if they do not fit. left: the cases to come, this one included."""


@dataclass
class Plan:
    """What a run times.

    tasks: the (op, case, dtype). impl, without: the names of the implementations to time, and of those to leave out,
    separated by commas. peers: whether to time other packages too. pace: None if there is time for everything.
    """

    tasks: list[Task]
    impl: str | None
    without: str | None
    peers: bool
    pace: Pace | None

    def order(self, run: Run) -> None:
        """Puts the tasks in the order of the pace, once the run has its roof."""
        if self.pace:
            self.tasks = self.pace.order(self.tasks, run)

    def implementations(self, op: Op) -> list[Implementation]:
        return chosen_implementations(op, self.impl, self.without)

    def candidates(self, op: Op, left: int) -> list[Candidate]:
        """Returns an op's implementations, then its peers. left: the cases to come, this one included."""
        from ridgeline.lab.measurement import peers

        own = [untimed(rung) or Candidate(rung) for rung in self.implementations(op)]
        if self.pace:
            own = self.pace.fit(own, left)
        others = peers.of(op) if self.peers else []
        return own + [Candidate(peer, "skipped" if missing else "ok", missing) for peer, missing in others]


def plan(
    ops: list[Op],
    uses: Iterable[str],
    *,
    impl: str | None = None,
    without: str | None = None,
    case: str | None = None,
    dtype: str | None = None,
    peers: bool = False,
    pace: Pace | None = None,
) -> Plan:
    """Returns the plan of a run over ops. Raises RidgelineError if a name is wrong or nothing is left to time.

    uses: the kinds of cases, as in `Case.use`. case: the name of one case, or a pattern.
    """
    from ridgeline.op import RidgelineError

    made = Plan(chosen_work(ops, uses, case, dtype), impl, without, peers, pace)
    for op in ops:
        chosen_implementations(op, impl)  # raises for a wrong name
        if not made.implementations(op):
            raise RidgelineError(f"{op.name}: --without {without} leaves no implementation")
    if without and (unknown := {*without.split(",")} - {name for op in ops for name in op.implementations}):
        names = ", ".join(op.name for op in ops)
        raise RidgelineError(f"--without {', '.join(sorted(unknown))}: none of {names} has that implementation")
    return made
