"""Facts about GPUs that rules and launchers use.

A known card can be pretended, to compile for a GPU that is not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not at run time: the command line's help lists the cards without importing torch
    import torch


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU (backend "cpu").

    capability: 90 for sm_90, 0 where it has no meaning. shared_memory: the most bytes of a block. l2: bytes.
    warp: threads.
    """

    name: str
    backend: str
    arch: str
    capability: int = 0
    multiprocessors: int = 1
    shared_memory: int = 0
    l2: int = 0
    warp: int = 32


CPU = Device("CPU", "cpu", "cpu")

# Shared memory is from the CUDA Programming Guide, section 5.1 ("Compute Capabilities"), "Maximum amount of shared
# memory per thread block"; multiprocessors and L2 are what cudaGetDeviceProperties reports.
# Cards by name. The first card of an architecture stands for it where only the architecture is named.
KNOWN = {
    "a100": Device("NVIDIA A100", "cuda", "sm_80", 80, 108, 166_912, 40 << 20),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", "cuda", "sm_86", 86, 82, 101_376, 6 << 20),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", "cuda", "sm_89", 89, 128, 101_376, 72 << 20),
    "l40s": Device("NVIDIA L40S", "cuda", "sm_89", 89, 142, 101_376, 96 << 20),
    "h100": Device("NVIDIA H100", "cuda", "sm_90", 90, 132, 232_448, 50 << 20),
    "h200": Device("NVIDIA H200", "cuda", "sm_90", 90, 132, 232_448, 60 << 20),
    "b200": Device("NVIDIA B200", "cuda", "sm_100", 100, 148, 232_448, 126 << 20),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", "cuda", "sm_120", 120, 170, 101_376, 96 << 20),
    "mi300x": Device("AMD MI300X", "hip", "gfx942", 0, 304, 65_536, 4 << 20, 64),
}
ARCHES: dict[str, Device] = {}
for _card in KNOWN.values():
    ARCHES.setdefault(_card.arch, _card)

stand_in: Device | None = None  # the card that is pretended; the quick path reads it without a call


def known(name: str) -> Device:
    """The known card of that name ("rtx4090"), or the first one of that architecture ("sm_89").

    Capitals, spaces, hyphens and underscores do not matter. Raises RidgelineError if there is none.
    """
    names = KNOWN | {arch.replace("_", ""): card for arch, card in ARCHES.items()}
    plain = "".join(c for c in name.lower() if c not in " -_").removeprefix("nvidia").removeprefix("geforce")
    if plain in names:
        return names[plain]
    from ridgeline.op import RidgelineError

    alike = [n if n in KNOWN else names[n].arch for n in get_close_matches(plain, names, cutoff=0.7)]
    meant = f" (perhaps {' or '.join(alike)} is meant)" if alike else ""
    cards, arches = ", ".join(KNOWN), ", ".join(ARCHES)
    raise RidgelineError(f"unknown GPU {name!r}{meant}; the cards are {cards}, and the architectures {arches}")


@cache
def gpu(index: int) -> Device:
    """The GPU of that index."""
    import torch

    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = p.gcnArchName.split(":")[0]
        return Device(p.name, "hip", arch, 0, p.multi_processor_count, 65_536, p.L2_cache_size, p.warp_size)
    capability = p.major * 10 + p.minor
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
    return Device(p.name, "cuda", f"sm_{capability}", capability, p.multi_processor_count, shared, p.L2_cache_size)


def of(tensor: torch.Tensor) -> Device:
    """The device that a kernel on this tensor runs on (or is compiled for, while one is pretended)."""
    if stand_in is not None:
        return stand_in
    return gpu(tensor.get_device()) if tensor.is_cuda else CPU


def here() -> Device:
    """The current GPU; the CPU where there is none."""
    import torch

    if stand_in is not None:
        return stand_in
    return gpu(torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def pretended() -> Device | None:
    """The card that is pretended, or None."""
    return stand_in


@contextmanager
def pretend(name: str) -> Iterator[Device]:
    """Inside, launchers see the known card or architecture of that name, and `boundary.launch` starts nothing.

    Raises RidgelineError if there is none.
    """
    global stand_in
    before, stand_in = stand_in, known(name)
    try:
        yield stand_in
    finally:
        stand_in = before
