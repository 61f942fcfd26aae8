"""The supported GPUs: what each is, what runs on it, and how far Ridgeline is tested there."""

from __future__ import annotations

from typing import Any

import ridgeline.device as devices

Row = dict[str, Any]
MEASURED = ("h100", "h200")  # the known cards that results are recorded of
STATES = {
    "measured": "timed against PyTorch and the best alternatives, and recorded in results/",
    "compiled": "every kernel is compiled and checked for registers, spills and shared memory, but none has run on one",
}
UNSUPPORTED = (
    "NVIDIA GPUs before the A100 and the RTX 30 series (sm_75 and older)",
    "AMD GPUs other than the MI300X",
    "Intel and Apple GPUs",
)


def names() -> str:
    """The known cards and architectures, for help texts."""
    return ", ".join((*devices.KNOWN, *devices.ARCHES))


def pretended(device: str | None) -> str | None:
    """The known card or architecture that `--device` names, or None if it names this machine's CPU or GPU.

    Raises RidgelineError if it names neither.
    """
    from ridgeline.op import RidgelineError

    if device in (None, "cpu", "cuda"):
        return None
    try:
        devices.known(str(device))
    except RidgelineError as error:
        raise RidgelineError(f"{error}; this machine is cpu or cuda") from None
    return device


def supported() -> list[Row]:
    """The known cards, with their facts and how far each is tested: "state" is a key of STATES.

    Sizes in bytes. kinds: what its kernels are written in. UNSUPPORTED lists the rest.
    """
    found = []
    for card, gpu in devices.KNOWN.items():
        facts = {fact: getattr(gpu, fact) for fact in ("name", "arch", "multiprocessors", "shared_memory", "l2")}
        kinds = [kind for kind, (can, _) in kernels(gpu).items() if can]
        found.append({"card": card, **facts, "kinds": kinds, "state": state(gpu)})
    return found


def state(gpu: devices.Device) -> str | None:
    """How far Ridgeline is tested on a GPU: a key of STATES, or None if its architecture is not supported."""
    from ridgeline.lab.measurement.store import slug

    return "measured" if slug(gpu.name) in MEASURED else "compiled" if gpu.arch in devices.ARCHES else None


def kernels(gpu: devices.Device) -> dict[str, tuple[int, int]]:
    """Per kind of kernel ("cuda", "triton", "gluon"): how many implementations run on a GPU, and how many there are."""
    import torch

    from ridgeline.op import registry
    from ridgeline.select import never

    found = dict.fromkeys(("cuda", "triton", "gluon"), (0, 0))
    for implementation in (i for op in registry().values() for i in op.implementations.values() if i.is_kernel):
        can, count = found[implementation.kind]
        reason = never(implementation, "fwd", getattr(torch, implementation.dtypes[0]), gpu)
        found[implementation.kind] = can + (reason is None), count + 1
    return found
