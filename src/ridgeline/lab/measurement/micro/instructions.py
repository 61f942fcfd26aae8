"""Throughput of instructions by type, and of matrix instructions by shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.lab.measurement.micro.bench import Card, Figure, Micro
from ridgeline.lab.measurement.micro.latency import OPERATIONS

Found = Iterator[tuple[str, dict[str, Figure]]]
PAIRS = ("fma_f16x2", "fma_bf16x2")  # two results in one instruction
# mma.sync: the chains of `rate_` are 4, its steps 4 in each turn; a chain of `lat_` has 16 steps in each turn.
MMA = (
    "m16n8k16_f16_f32", "m16n8k8_f16_f32", "m16n8k16_f16_f16", "m16n8k16_bf16_f32", "m16n8k8_tf32_f32",
    "m16n8k4_tf32_f32", "m16n8k32_s8_s32", "m16n8k32_e4m3_f32", "m8n8k4_f64_f64",
    "m16n8k8_f64_f64",
)  # fmt: skip
WGMMA = (
    "m64n8k16_bf16_f32", "m64n16k16_bf16_f32", "m64n32k16_bf16_f32", "m64n64k16_bf16_f32", "m64n128k16_bf16_f32",
    "m64n256k16_bf16_f32", "m64n64k16_bf16_f32_registers", "m64n256k16_bf16_f32_registers", "m64n256k16_f16_f32",
    "m64n256k16_f16_f16", "m64n256k8_tf32_f32", "m64n256k32_e4m3_f32", "m64n256k32_s8_s32",
)  # fmt: skip


def _instruction(operation: str, weight: int) -> Any:
    def measure(card: Card) -> Found:
        turns = 32
        timed = card.run(f"instructions:rate_{operation}", "i", turns, blocks=card.multiprocessors, threads=1024)
        results = turns * 32 * 8 * 1024 * weight * (2 if operation in PAIRS else 1)
        yield "", {"op/clk/SM": timed.per_cycle(results)}

    return measure


def work(kernel: str) -> int:
    """The operations of one matrix instruction: "m16n8k16_..." has 2 x 16 x 8 x 16."""
    m, n, k = map(int, re.findall(r"\d+", kernel.split("_")[0]))
    return 2 * m * n * k


def title(kernel: str) -> str:
    """A matrix instruction's name: "mma m16n8k16 f16, f32 sums"."""
    shape, given, sums, *rest = kernel.split("_")
    which = "wgmma" if shape.startswith("m64") else "mma"
    return f"{which} {shape} {given}, {'a in registers' if rest else f'{sums} sums'}"


def _matrix(kernel: str, warps: int, chains: int, steps: int, links: int) -> Any:
    """warps: those that work on one instruction. A turn has `steps` instructions of each chain, or `links` of one."""

    def measure(card: Card) -> Found:
        latency = card.run(f"matrix:lat_{kernel}", "i", 512, threads=32 * warps)
        # 16 warps a multiprocessor for mma, two warpgroups for wgmma; about a millisecond, so that events can time it.
        threads, turns = (512, 2048) if warps == 1 else (256, 1024)
        timed = card.run(f"matrix:rate_{kernel}", "i", turns, blocks=card.multiprocessors, threads=threads)
        done = turns * chains * steps * threads // (32 * warps) * work(kernel)
        yield (
            "",
            {
                "cycles": latency.cycles_per(512 * links),
                "FLOP/clk/SM": timed.per_cycle(done),
                "FLOP/s": timed.per_second(done * card.multiprocessors),
            },
        )

    return measure


def no_wgmma(capability: int) -> str | None:
    return None if capability == 90 else "wgmma is an instruction of sm_90 alone"


def no_mma(kernel: str) -> Callable[[int], str | None]:
    """Why an mma does not run on a capability, or None. Without fp8 the compiler makes fp16 products of it, and equal
    ones only once."""

    def refuses(capability: int) -> str | None:
        if "e4m3" in kernel:
            return None if capability in (89, 120) else "mma has fp8 on sm_89 and sm_120 alone"
        if kernel == "m16n8k8_f64_f64":
            return None if capability >= 90 else "mma has this shape from sm_90 on"
        return None

    return refuses


CHAINS = "eight chains in each of 1024 threads of every multiprocessor"
WARP = "a chain in one warp; then 4 chains in each of 16 warps of every multiprocessor"
GROUP = "each awaited, in one warpgroup; then eight at a time in two warpgroups of every multiprocessor"
DIVIDES = "cycles / instructions; 2 m n k x instructions / cycles of a block, or / seconds"
MICROS = [
    *(
        Micro(
            "instructions",
            name,
            CHAINS,
            "results / cycles of a block",
            (f"instructions:rate_{op}",),
            _instruction(op, weight),
        )
        for op, (name, weight) in OPERATIONS.items()
    ),
    *(
        Micro(
            "matrix",
            title(kernel),
            WARP,
            DIVIDES,
            (f"matrix:lat_{kernel}", f"matrix:rate_{kernel}"),
            _matrix(kernel, 1, 4, 4, 16),
            no_mma(kernel),
        )
        for kernel in MMA
    ),
    *(
        Micro(
            "matrix",
            title(kernel),
            GROUP,
            DIVIDES,
            (f"matrix:lat_{kernel}", f"matrix:rate_{kernel}"),
            _matrix(kernel, 4, 1, 8, 1),
            no_wgmma,
        )
        for kernel in WGMMA
    ),
]
