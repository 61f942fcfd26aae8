"""What a patch did, module by module, with the reasons for what it left alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

PARTS = ("norm", "rotary", "mlp", "experts", "attention", "recurrent", "loss")


@dataclass
class Row:
    """One module. op: what computes it now, or None. reason: why it was left alone, or a remark.

    flops: operations per token of its products, forward; nbytes: bytes per token of its passes over memory.
    """

    name: str
    kind: str
    part: str
    op: str | None
    reason: str = ""
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass
class Report:
    """rows: a row per module. seq_length: of the attention whose operations are counted. str() is a table.

    notes: what was asked for the whole model and holds for less of it.
    """

    model: str
    rows: list[Row] = field(default_factory=list)
    seq_length: int = 4096
    fallbacks: list[str] = field(default_factory=list)
    memory: str | None = None
    notes: list[str] = field(default_factory=list)

    def patched(self) -> list[Row]:
        return [r for r in self.rows if r.op is not None]

    def left(self) -> list[Row]:
        return [r for r in self.rows if r.op is None]

    @property
    def share_of_flops(self) -> float:
        """The share of the model's operations per token, products and attention, that patched modules compute."""
        return _share((r.flops, r.op) for r in self.rows)

    @property
    def share_of_bytes(self) -> float:
        """The share of the bytes per token moved by norms, rotary embeddings, gates and logits in patched modules."""
        return _share((r.nbytes, r.op) for r in self.rows)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for r in self.rows:
            key = re.sub(r"\.\d+\.", ".*.", r.name), r.kind, r.op or "left alone", r.reason
            groups.setdefault(key, []).append(r)
        head = "module", "class", "", "computed by", "remark"
        lines = [(k[0], k[1], f"x{len(g)}", k[2], k[3]) for k, g in groups.items()]
        width = [max(len(x[i]) for x in [head, *lines]) for i in range(4)]
        text = [f"{self.model}: {len(self.patched())} modules patched, {len(self.left())} left alone"]
        text += ["  ".join([*(x[i].ljust(width[i]) for i in range(4)), x[4]]).rstrip() for x in [head, *lines]]
        text.append(
            f"Patched modules do {self.share_of_flops:.0%} of the operations of a step with sequences of "
            f"{self.seq_length} tokens; the rest is products by torch."
        )
        text.append(f"They move {self.share_of_bytes:.0%} of the bytes of norms, rotary embeddings, gates and logits.")
        return "\n".join([*text, *self.notes, *(f"Fell back: {line}" for line in self.fallbacks)])


def _share(pairs: Iterable[tuple[float, str | None]]) -> float:
    pairs = list(pairs)
    total = sum([n for n, _ in pairs])
    return sum([n for n, op in pairs if op is not None]) / total if total else 0.0


def fall_back(module: nn.Module, part: str, reason: str) -> None:
    """Says once, as a warning and in the model's report, that a call goes to the module's own code."""
    report: Any = module.__dict__.get("_ridgeline_report")
    line = f"{part} of {type(module).__name__}: {reason}, so its own code computes it"
    if report is None or line not in report.fallbacks:
        if report is not None:
            report.fallbacks.append(line)
        warnings.warn(f"ridgeline.hf: {line}", stacklevel=3)
