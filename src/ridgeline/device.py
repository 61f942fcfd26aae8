"""What a GPU is: the facts that rules and launchers use. Known ones can be pretended, to compile for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU (backend "cpu"). Sizes in bytes; `capability` is 90 for sm_90, 0 where it has no meaning."""

    name: str
    backend: str
    arch: str
    capability: int = 0
    multiprocessors: int = 1
    shared_memory: int = 0
    l2: int = 0
    warp: int = 32

    @property
    def large_l2(self) -> bool:
        """Whether its L2 is larger than an H100's 50 MiB, as an H200's 60 are: what rules tell the two apart by."""
        return self.l2 > 55 << 20


CPU = Device("CPU", "cpu", "cpu")
KNOWN = {
    d.arch: d
    for d in (
        Device("NVIDIA A100", "cuda", "sm_80", 80, 108, 166_912, 40 << 20),
        Device("NVIDIA H100", "cuda", "sm_90", 90, 132, 232_448, 50 << 20),
        Device("NVIDIA B200", "cuda", "sm_100", 100, 148, 232_448, 126 << 20),
        Device("AMD MI300X", "hip", "gfx942", 0, 304, 65_536, 4 << 20, 64),
    )
}

_pretended: Device | None = None


@cache
def gpu(index: int) -> Device:
    """The GPU of that index."""
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = p.gcnArchName.split(":")[0]
        return Device(p.name, "hip", arch, 0, p.multi_processor_count, 65_536, p.L2_cache_size, p.warp_size)
    capability = p.major * 10 + p.minor
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
    return Device(p.name, "cuda", f"sm_{capability}", capability, p.multi_processor_count, shared, p.L2_cache_size)


def of(tensor: torch.Tensor) -> Device:
    """The device that a kernel on this tensor runs on (or is compiled for, while one is pretended)."""
    if _pretended is not None:
        return _pretended
    return gpu(tensor.get_device()) if tensor.is_cuda else CPU


def here() -> Device:
    """The current GPU; the CPU where there is none."""
    if _pretended is not None:
        return _pretended
    return gpu(torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def pretended() -> Device | None:
    return _pretended


@contextmanager
def pretend(arch: str) -> Iterator[Device]:
    """Inside, launchers see the GPU of that architecture and nothing is started (see `boundary.launch`)."""
    global _pretended
    before, _pretended = _pretended, KNOWN[arch]
    try:
        yield _pretended
    finally:
        _pretended = before
