"""Atomics by contention, by scope, and by what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.lab.measurement.micro.bench import Card, Figure, Micro

Found = Iterator[tuple[str, dict[str, Figure]]]
ADDRESSES = (1, 32, 1024, 1 << 20)  # different 32-bit words that all threads together add to
TURNS = 32
SHARED = {
    "shared_red_u32": "shared: add uint32",
    "shared_atom_u32": "shared: add and read uint32",
    "shared_red_f32": "shared: add fp32",
    "shared_cas_u32": "shared: compare and swap",
}
GLOBAL = {
    "global_red_u32": "global: add uint32",
    "global_red_u32_block": "global: add uint32, block scope",
    "global_atom_u32": "global: add and read uint32",
    "global_atom_u32_block": "global: add and read uint32, block scope",
    "global_red_f32": "global: add fp32",
    "global_red_f16x2": "global: add two fp16",
    "global_cas_u32": "global: compare and swap",
}


def _shared(kernel: str) -> Any:
    def measure(card: Card) -> Found:
        for addresses in ADDRESSES[:3]:
            timed = card.run(f"atomics:{kernel}", "ii", addresses, TURNS, threads=1024, reps=5)
            yield str(addresses), {"op/clk/SM": timed.per_cycle(TURNS * 1024)}

    return measure


def _global(kernel: str) -> Any:
    def measure(card: Card) -> Found:
        cells = card.bytes(4 << 20, "cells")
        blocks = card.multiprocessors
        for addresses in ADDRESSES:
            timed = card.run(f"atomics:{kernel}", "Pii", cells, addresses, TURNS, blocks=blocks, threads=1024, reps=5)
            yield str(addresses), {"op/s": timed.per_second(TURNS * 1024 * blocks)}

    return measure


EACH = "32 times each; neighbours have neighbouring words"
MICROS = [
    *(
        Micro(
            "atomics",
            name,
            f"1024 threads of one block, {EACH}",
            "operations / cycles of the block",
            (f"atomics:{kernel}",),
            _shared(kernel),
        )
        for kernel, name in SHARED.items()
    ),
    *(
        Micro(
            "atomics",
            name,
            f"1024 threads of every multiprocessor, {EACH}",
            "operations / seconds",
            (f"atomics:{kernel}",),
            _global(kernel),
        )
        for kernel, name in GLOBAL.items()
    ),
]
