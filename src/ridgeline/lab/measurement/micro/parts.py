"""The microbenchmarks by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.lab.measurement.micro import atomics, instructions, latency, launches, memory

SCHEMA = 1
PARTS = {
    "latency": "Latency of instructions and of memory",
    "chase": "Latency of a load by working set",
    "bandwidth": "Bandwidth",
    "banks": "Bank conflicts of shared memory by stride",
    "coalescing": "Bandwidth of DRAM by stride and width",
    "occupancy": "Bandwidth of DRAM by bytes in flight (Little's law)",
    "instructions": "Throughput of instructions",
    "matrix": "Matrix instructions by shape and dtype",
    "atomics": "Atomics by different addresses and scope",
    "launches": "Launches, graphs, events",
    "streams": "Small kernels on several streams",
}


def micros(parts: Sequence[str]) -> list[Any]:
    """The `bench.Micro` of some parts (all, if none is named). Raises RidgelineError for an unknown part."""
    from ridgeline.op import RidgelineError

    if unknown := [part for part in parts if part not in PARTS]:
        raise RidgelineError(f"there is no part {unknown[0]!r} of micro; the parts are {', '.join(PARTS)}")
    every = [*latency.MICROS, *memory.MICROS, *instructions.MICROS, *atomics.MICROS, *launches.MICROS]
    return [micro for part in PARTS for micro in every if micro.part == part and (not parts or part in parts)]
