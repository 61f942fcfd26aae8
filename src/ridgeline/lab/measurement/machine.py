"""The facts of this machine, and the device that a verb works on."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import ridgeline.device as devices

Row = dict[str, Any]


@cache
def facts(device: str) -> Row:
    """The facts of this machine, as `run` rows hold them. device: "cpu" or "cuda"."""
    import torch
    import triton

    from ridgeline.lab.measurement.clock import answer, nvidia_smi

    gpu = device.startswith("cuda")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpu:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "gpu": devices.here().name if gpu else None,
        "arch": devices.here().arch if gpu else "cpu",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "driver": next(iter(answer(nvidia_smi("driver_version"))), None) if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "os": platform.platform(terse=True),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def default_device(given: str | None) -> str:
    """Returns the device that a verb works on: the given one, or else the GPU if there is one."""
    import torch

    from ridgeline.op import RidgelineError

    if given not in (None, "cpu", "cuda"):
        raise RidgelineError(f"there is no device {given!r}; the devices are cpu and cuda")
    if given == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("--device cuda needs a GPU, and PyTorch finds none on this machine; use --device cpu")
    return given or ("cuda" if torch.cuda.is_available() else "cpu")
