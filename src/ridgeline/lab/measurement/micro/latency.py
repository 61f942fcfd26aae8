"""Latency: chains of instructions and of loads, each waiting for the one before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.lab.measurement.micro.bench import Card, Figure, Micro, figure

LINKS = 256  # of a chain of instructions, in instructions.cu
STEPS = 4096  # of a chase that are timed
LINE = 128  # bytes from one element of a ring to the next: a cache line
# What an instruction is called, and how many the compiler makes of one step.
OPERATIONS = {
    "add_s32": ("int32 add (three operands)", 1),
    "mul_s32": ("int32 multiply", 1),
    "mad_s32": ("int32 multiply-add", 1),
    "shift_s32": ("int32 shift", 1),
    "logic_b32": ("bitwise logic (lop3)", 1),
    "min_s32": ("int32 minimum", 2),
    "popc_b32": ("population count", 1),
    "dp4a_s32": ("int8 dot product of 4 (dp4a)", 1),
    "add_f32": ("fp32 add", 1),
    "mul_f32": ("fp32 multiply", 1),
    "fma_f32": ("fp32 fma", 1),
    "fma_f16x2": ("fp16 fma, two in one", 1),
    "fma_bf16x2": ("bf16 fma, two in one", 1),
    "add_f64": ("fp64 add", 1),
    "fma_f64": ("fp64 fma", 1),
    "ex2_f32": ("2 to the power (ex2)", 1),
    "lg2_f32": ("logarithm (lg2)", 1),
    "rsqrt_f32": ("reciprocal square root", 1),
    "sin_f32": ("sine, with its multiplication", 1),
    "tanh_f32": ("hyperbolic tangent", 1),
    "convert_s32": ("fp32 to int32", 1),
    "shuffle_b32": ("shuffle in a warp", 1),
}
Found = Iterator[tuple[str, dict[str, Figure]]]


def _instruction(operation: str, weight: int) -> Any:
    def measure(card: Card) -> Found:
        timed = card.run(f"instructions:lat_{operation}", "i", 3)
        yield "", card.cycles_and_time(timed.cycles_per(LINKS * weight))

    return measure


def ring(card: Card, size: int, order: str) -> Any:
    """Fills the first `size` bytes with a ring of addresses a line apart, in order or shuffled; returns the memory."""
    import torch

    memory = card.bytes(size, "ring").view(torch.int64)
    count, step = size // LINE, LINE // 8
    places = torch.arange(count, device=memory.device)
    if order == "shuffled":
        dice = torch.Generator(memory.device).manual_seed(0)
        places = torch.cat((places[:1], 1 + torch.randperm(count - 1, device=memory.device, generator=dice)))
    memory[: count * step].view(count, step)[places, 0] = memory.data_ptr() + LINE * places.roll(-1)
    return memory


def _shared(card: Card) -> Found:
    yield "", card.cycles_and_time(card.run("memory:chase_shared", "i", 2048, threads=1).cycles_per(2048))


def _cluster(card: Card) -> Found:
    timed = card.run("memory:chase_cluster", "i", 2048, blocks=2, threads=1, cluster=2)
    yield "", card.cycles_and_time(timed.cycles_per(2048))


def _chase(card: Card, kernel: str, size: int, order: str, warm: bool) -> dict[str, Figure]:
    """Chases through a ring of `size` bytes, which L2 holds before (as far as it can) or, if not `warm`, does not.

    Each run starts elsewhere, so that it does not find the lines of the run before.
    """
    memory, count = ring(card, size, order), size // LINE
    first, runs = min(count, 4096), []
    for run in range(4):
        if warm:
            memory[: size // 8].sum()
        else:
            card.bytes(card.most(4 * max(card.gpu.l2, 32 << 20)), "cold").fill_(1)
        begin = memory[run * (count // 4) * (LINE // 8) :]
        runs.append(card.run(f"memory:{kernel}", "Pii", begin, first, STEPS, threads=1, reps=1, ready=True))
    return card.cycles_and_time(figure([timed.cycles[0] / STEPS for timed in runs[1:]]))


def _l1(card: Card) -> Found:
    yield "", _chase(card, "chase_l1", 32 << 10, "in order", True)


def _l2(card: Card) -> Found:
    yield "", _chase(card, "chase_l2", min(4 << 20, card.gpu.l2 // 4), "shuffled", True)


def large(card: Card) -> int:
    """Bytes of a ring that L2 holds little of: eight times L2, a power of two from 256 MiB to 1 GiB."""
    size = 256 << 20
    while size < 8 * card.gpu.l2 and size < 1 << 30:
        size *= 2
    return card.most(size)


def _dram(order: str) -> Any:
    def measure(card: Card) -> Found:
        yield "", _chase(card, "chase_l2", large(card), order, False)

    return measure


def _sizes(card: Card) -> list[int]:
    top, size, found = large(card), 4 << 10, []
    while size <= top:
        found += [size, size * 3 // 2] if size * 3 // 2 <= top else [size]
        size *= 2
    return found


def _sweep(card: Card) -> Found:
    for size in _sizes(card):
        yield str(size), _chase(card, "chase_l1", size, "shuffled", True)


def no_clusters(capability: int) -> str | None:
    return None if capability >= 90 else "thread-block clusters begin with sm_90"


CHAIN = "one thread's loads, each from the address that the load before read"
MICROS = [
    *(
        Micro(
            "latency",
            name,
            "a chain of 256 of them in one warp",
            "cycles of the chain / 256",
            (f"instructions:lat_{op}",),
            _instruction(op, weight),
        )
        for op, (name, weight) in OPERATIONS.items()
    ),
    Micro("latency", "shared memory", CHAIN, "cycles / 2048 loads", ("memory:chase_shared",), _shared),
    Micro(
        "latency",
        "another block's shared memory",
        f"{CHAIN}, in the other block of a cluster of two",
        "cycles / 2048 loads",
        ("memory:chase_cluster",),
        _cluster,
        no_clusters,
    ),
    Micro("latency", "L1", f"{CHAIN}; 32 KiB, read once before", "cycles / 4096 loads", ("memory:chase_l1",), _l1),
    Micro(
        "latency",
        "L2",
        f"{CHAIN}; 4 MiB in shuffled order, in L2 before, L1 bypassed",
        "cycles / 4096 loads",
        ("memory:chase_l2",),
        _l2,
    ),
    Micro(
        "latency",
        "DRAM",
        f"{CHAIN}; a ring far larger than L2, in the order of addresses",
        "cycles / 4096 loads",
        ("memory:chase_l2",),
        _dram("in order"),
    ),
    Micro(
        "latency",
        "DRAM, shuffled",
        f"{CHAIN}; a ring far larger than L2, shuffled: misses of address translation too",
        "cycles / 4096 loads",
        ("memory:chase_l2",),
        _dram("shuffled"),
    ),
    Micro(
        "chase",
        "loads from a working set",
        f"{CHAIN}; rings of 4 KiB to 1 GiB in shuffled order",
        "cycles / 4096 loads",
        ("memory:chase_l1",),
        _sweep,
    ),
]
