"""Compiles every kernel for every known architecture, and says what each takes: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from ridgeline import device
from ridgeline.lab import units
from ridgeline.lab.presentation.report.worker import Send
from ridgeline.op import Implementation, Op, get

FIRST = "sm_90"  # the architecture that most of the kernels were written for

Piece = tuple[Op, Implementation, str]


def pieces(ops: Iterable[str]) -> list[Piece]:
    """Returns every implementation in kernels for every architecture, in the order in which they are compiled.

    First `FIRST`, CUDA C++ before the slower compilers, and each ladder's last implementation before any last but one.
    """

    def place(piece: Piece) -> tuple[bool, bool, int]:
        op, kernel, arch = piece
        alike = [r for r in op.implementations.values() if r.kind == kernel.kind]
        return arch != FIRST, kernel.kind != "cuda", len(alike) - alike.index(kernel)

    kernels = [(op, rung) for op in map(get, ops) for rung in op.implementations.values() if rung.is_kernel]
    return sorted([(*kernel, arch) for kernel, arch in product(kernels, device.ARCHES)], key=place)


def build(send: Send, ops: list[str], part: int, parts: int) -> None:
    """Sends ("built", op, implementation, architecture, rows, reason) for every `parts`-th piece from `part` on."""
    for op, kernel, arch in pieces(ops)[part::parts]:
        send("built", op.name, kernel.name, arch, *built(op, kernel, arch))


def built(op: Op, kernel: Implementation, arch: str) -> tuple[list[dict[str, Any]], str]:
    """Returns what an implementation's kernels take in the first case that it supports, and an empty reason.

    If it supports no case there, returns no rows and the reason why not the first.
    """
    from ridgeline.lab.analysis import inspect
    from ridgeline.op import RidgelineError

    first, _ = inspect.default_case(op, None, None)
    reason = ""
    for case in (first, *(c for c in op.cases if c is not first)):
        dtype = min(case.dtypes, key=lambda d: (d not in kernel.dtypes, d != "bfloat16"))
        try:
            found = inspect.resources(op, kernel, case, dtype, arch)
        except RidgelineError as error:
            reason = reason or str(error).split("cannot run this call: ")[-1]
        else:
            return [_resources(r) | {"case": case.name, "dtype": dtype} for r in found], ""
    return [], reason


def _resources(r: Any) -> dict[str, Any]:
    def counts(by_name: dict[str, int]) -> str:
        return ", ".join(f"{n} x {name}" for name, n in by_name.items()) or units.DASH

    return {
        "kernel": r.kernel,
        "direction": r.direction,
        "registers": r.registers,
        "spilled": r.spill_stores + r.spill_loads > 0,
        "spills": f"{r.spill_stores} B out, {r.spill_loads} B in" if r.spill_stores + r.spill_loads else "none",
        "shared": units.size(r.shared) if r.shared else "none",
        "loads": counts(r.loads),
        "stores": counts(r.stores),
        "matrix": counts(r.matrix),
        "occupancy": f"{units.percent(r.occupancy)}{f' ({r.limit})' if r.limit else ''}",
    }
