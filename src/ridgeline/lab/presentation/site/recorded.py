"""The recorded rows that the pages of ops show: each GPU's, and the case that stands for an op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis.inspect import default_case
from ridgeline.lab.measurement import query, results
from ridgeline.lab.presentation.served import largest
from ridgeline.op import Case, Op, registry

Row = dict[str, Any]


@dataclass(frozen=True)
class Gpu:
    """A recorded GPU: the stem of its file ("h100"), its name, its rows, and those of each op's largest case."""

    stem: str
    name: str
    rows: list[Row]
    works: dict[results.Work, list[Row]]
    largest: dict[results.Work, list[Row]]

    @property
    def short(self) -> str:
        """The name on a page: "H100"."""
        return self.stem.upper()


@cache
def gpus(root: Path) -> list[Gpu]:
    """The recorded GPUs of a source tree, the one whose figures come first before the others."""
    found = []
    for path, rows in results.gpus(root / "results").items():
        works = results.works(rows)
        found.append(Gpu(path.stem, query.one(rows, "run")["machine"]["gpu"], rows, works, largest(works, registry())))
    return found


def shown(op: Op, root: Path) -> tuple[Case, str]:
    """The case and dtype that stand for an op: the largest that a GPU timed, else its first benchmark."""
    for gpu in gpus(root):
        for name, case, dtype, _ in gpu.largest:
            if name == op.name:
                return op.case(case), dtype
    return default_case(op, None, None)
