"""Bandwidth of each kind of memory, and what strides, bank conflicts and few bytes in flight cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.lab.measurement.micro.bench import Card, Figure, Micro, Timed, scaled

Found = Iterator[tuple[str, dict[str, Figure]]]
THREADS = 1024  # of a block; one block on each multiprocessor
GIB = 1 << 30
WIDTHS = (4, 8, 16)  # bytes that a thread reads at once
BANK_STRIDES = range(34)
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LOADS = (1, 2, 4)  # of 16 bytes, that a thread has in flight; the compiler does not keep eight together
WARPS = (1, 2, 4, 8, 16, 32, 48, 64)


def ways(width: int, stride: int) -> int:
    """The cycles of a warp's load by the rule of 32 banks of 4 bytes: lanes of 128 bytes at a time, then the most words
    of one bank among them. Lanes that read the same word share it."""
    lanes, total = 128 // width, 0
    for first in range(0, 32, lanes):
        words: dict[int, set[int]] = {}
        for lane in range(first, first + lanes):
            for word in range(width // 4):
                at = lane * stride * (width // 4) + word
                words.setdefault(at % 32, set()).add(at)
        total += max(map(len, words.values()))
    return total


def useful(width: int, stride: int) -> float:
    """The share of what DRAM moves that was asked for, by the rule of sectors of 32 bytes."""
    return width / min(32, stride * width)


def _per_multiprocessor(card: Card, found: Figure) -> dict[str, Figure]:
    """Bytes per cycle of one multiprocessor, and of all of them per second at the measured clock."""
    return {"B/clk/SM": found, "B/s": scaled(found, card.multiprocessors * card.mhz * 1e6)}


def _registers(card: Card) -> Found:
    timed = card.run("instructions:rate_fma_f32", "i", 64, blocks=card.multiprocessors, threads=THREADS)
    yield "", _per_multiprocessor(card, timed.per_cycle(64 * 32 * 8 * THREADS * 16))


def _shared(card: Card) -> Found:
    timed = card.run("memory:read_shared", "i", 512, blocks=card.multiprocessors, threads=THREADS)
    yield "", _per_multiprocessor(card, timed.per_cycle(512 * 8 * THREADS * 16))


def _l1(card: Card) -> Found:
    data = card.bytes(card.multiprocessors << 16)
    timed = card.run("memory:read_l1", "Pi", data, 512, blocks=card.multiprocessors, threads=512)
    yield "", _per_multiprocessor(card, timed.per_cycle(512 * 8 * 512 * 16))


def _l2(card: Card) -> Found:
    window = min(16 << 20, card.gpu.l2 // 4) // 16
    blocks, turns = 2 * card.multiprocessors, 256
    timed = card.run("memory:read_l2", "Pii", card.bytes(16 * window), window, turns, blocks=blocks, threads=512)
    moved = blocks * 512 * turns * 8 * 16
    clocks = [seconds * card.mhz * 1e6 for seconds in timed.seconds]
    yield "", {"B/clk": Timed(clocks, []).per_cycle(moved), "B/s": timed.per_second(moved)}


def _dram(kernel: str, arrays: int) -> Any:
    def measure(card: Card) -> Found:
        size = card.most(2 * GIB)
        a, b = card.bytes(size), card.bytes(size, "to")
        best: dict[str, Figure] = {}
        for blocks, threads in ((8, 256), (4, 512), (2, 1024), (32, 256)):
            timed = card.run(
                f"memory:{kernel}",
                "PPq",
                a,
                b,
                size // 16,
                blocks=blocks * card.multiprocessors,
                threads=threads,
                reps=5,
            )
            found = timed.per_second(arrays * size)
            if not best or found["median"] > best["B/s"]["median"]:
                best = {"B/s": found}
        yield "", best

    return measure


def _banks(width: int) -> Any:
    def measure(card: Card) -> Found:
        for stride in BANK_STRIDES:
            bytes_ = (31 * stride + 1) * width
            timed = card.run(
                f"memory:banks_{width}", "ii", stride, 64, threads=128, shared=-(-bytes_ // 16) * 16, reps=3
            )
            yield str(stride), {"cycles": timed.cycles_per(64 * 16 * 4)}

    return measure


def _coalesce(width: int) -> Any:
    def measure(card: Card) -> Found:
        size = card.most(2 * GIB)
        data = card.bytes(size)
        for stride in STRIDES:
            count = size // (stride * width)
            timed = card.run(
                f"memory:coalesce_{width}",
                "Piq",
                data,
                stride,
                count,
                blocks=16 * card.multiprocessors,
                threads=256,
                reps=3,
            )
            yield str(stride), {"B/s": timed.per_second(count * width)}

    return measure


def _flight(loads: int) -> Any:
    def measure(card: Card) -> Found:
        size = card.most(2 * GIB)
        data = card.bytes(size)
        for warps in WARPS:
            if 32 * warps > card.threads:
                continue
            per_block = min(32 * warps, THREADS) if warps != 48 else 768
            blocks = 32 * warps // per_block * card.multiprocessors
            threads = blocks * per_block
            count = size // 16 // (threads * loads) * threads * loads
            timed = card.run(f"memory:flight_{loads}", "Pq", data, count, blocks=blocks, threads=per_block, reps=3)
            yield str(warps), {"B/s": timed.per_second(count * 16), "B/SM": {"median": float(warps * 32 * 16 * loads)}}

    return measure


FLIGHT = "warps of each multiprocessor read DRAM; a thread waits for all its 16-byte loads before the next ones"
BANKS = "four warps read shared memory; the lanes of a warp read elements a stride apart"
MICROS = [
    Micro(
        "bandwidth",
        "registers",
        "fp32 fma: three registers read and one written",
        "32-bit registers x 4 bytes / cycles",
        ("instructions:rate_fma_f32",),
        _registers,
    ),
    Micro(
        "bandwidth",
        "shared memory, read",
        "1024 threads read 16 bytes each without conflicts",
        "bytes / cycles of a block",
        ("memory:read_shared",),
        _shared,
    ),
    Micro(
        "bandwidth",
        "L1, read",
        "each multiprocessor reads its own 64 KiB, 16 bytes a thread",
        "bytes / cycles of a block",
        ("memory:read_l1",),
        _l1,
    ),
    Micro(
        "bandwidth",
        "L2, read",
        "all read the same part of L2, 16 bytes a thread, L1 bypassed",
        "bytes / seconds",
        ("memory:read_l2",),
        _l2,
    ),
    Micro(
        "bandwidth",
        "DRAM, read",
        "2 GiB once, 16 bytes a thread; the best of four grids",
        "bytes / seconds",
        ("memory:read_dram",),
        _dram("read_dram", 1),
    ),
    Micro(
        "bandwidth",
        "DRAM, write",
        "2 GiB once, 16 bytes a thread; the best of four grids",
        "bytes / seconds",
        ("memory:write_dram",),
        _dram("write_dram", 1),
    ),
    Micro(
        "bandwidth",
        "DRAM, copy",
        "2 GiB read and 2 GiB written; the best of four grids",
        "bytes read and written / seconds",
        ("memory:copy_dram",),
        _dram("copy_dram", 2),
    ),
    *(
        Micro(
            "banks",
            f"{width} bytes a thread",
            BANKS,
            "cycles / loads of a warp",
            (f"memory:banks_{width}",),
            _banks(width),
        )
        for width in WIDTHS
    ),
    *(
        Micro(
            "coalescing",
            f"{width} bytes a thread",
            "neighbouring threads read elements of DRAM a stride apart",
            "bytes asked for / seconds",
            (f"memory:coalesce_{width}",),
            _coalesce(width),
        )
        for width in WIDTHS
    ),
    *(
        Micro(
            "occupancy",
            f"{loads} load{'s' * (loads > 1)} in flight",
            FLIGHT,
            "bytes / seconds",
            (f"memory:flight_{loads}",),
            _flight(loads),
        )
        for loads in LOADS
    ),
]
