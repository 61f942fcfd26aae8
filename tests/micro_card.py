"""A GPU that is not there: it runs every microbenchmark's Python, starts nothing, and times by a simple model."""

import contextlib
import math
from types import SimpleNamespace

import torch

from ridgeline import device
from ridgeline.lab.measurement.micro import bench, latency, launches, memory, runs

MACHINE = {"gpu": "NVIDIA H200", "arch": "sm_90", "cpu": "a CPU", "cores": 16, "memory_bytes": 141 << 30,
           "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3",
           "os": "Linux"}  # fmt: skip
LEVELS = ((256 << 10, 40), (30 << 20, 265), (60 << 20, 420), (512 << 20, 720), (4 << 30, 900))


class FakeCard(bench.Card):
    """Keeps what was started in `started`: (name, codes, arguments, blocks, threads, options)."""

    def __init__(self, gpu="h200"):
        self.gpu, self.device = device.known(gpu), "cpu"
        self.threads, self.memory = 2048, 141 << 30
        self._prepare()
        self.started, self.ring_size = [], 0

    def bytes(self, size, name="data"):
        return super().bytes(min(size, 1 << 16), name)

    def tick(self):
        self.start("instructions:spin", "iP", 1, self.out, blocks=1, threads=32)
        self.mhz = 1755.0
        return self.mhz

    def start(self, name, arguments, *args, blocks, threads, **options):
        self.started.append((name, arguments, args, blocks, threads, options))

    def run(self, name, arguments, *args, blocks=1, threads=32, reps=bench.REPS, ready=False, **options):
        self.start(name, arguments, *args, blocks=blocks, threads=threads, **options)
        cycles = model(name.partition(":")[2], args, blocks, threads, self.ring_size)
        around = [cycles * (1 + 0.002 * (n - reps // 2)) for n in range(reps)]
        return bench.Timed(around, [c / 1.755e9 for c in around])


def model(kernel, args, blocks, threads, ring):
    """The cycles of a kernel on an imagined card."""
    if kernel.startswith("chase"):
        if kernel in ("chase_shared", "chase_cluster"):
            return args[0] * (29 if kernel == "chase_shared" else 181)
        below = 0
        for size, cycles in LEVELS:
            if ring <= size:
                return args[2] * (cycles if kernel == "chase_l1" or size > 256 << 10 else 263)
            below = cycles
        return args[2] * below
    if kernel.startswith(("lat_m", "rate_m")) and any(c.isdigit() for c in kernel.split("_")[1]):
        m, n, k = (int(x) for x in kernel.split("_")[1][1:].replace("n", " ").replace("k", " ").split())
        wide = m == 64
        return (
            (args[0] * max(16, n // 2) if wide else args[0] * 16 * 24)
            if kernel.startswith("lat")
            else args[0] * (8 * threads / 128 * m * n * k / 2048 if wide else 16 * threads / 32 * m * n * k / 1300)
        )
    if kernel.startswith("lat_"):
        return 256 * 4.1
    if kernel.startswith("rate_"):
        return (
            args[0]
            * 32
            * 8
            * threads
            / (
                16
                if kernel[5:8] in ("ex2", "lg2", "rcp", "sin", "rsq", "tan", "pop")
                else 64
                if "s32" in kernel
                else 126
            )
        )
    if kernel.startswith("banks"):
        return args[1] * 64 * (memory.ways(int(kernel.split("_")[1]), args[0]) + 0.1)
    moved = {"read_shared": 126, "read_l1": 118}
    if kernel in moved:
        return args[-1] * 8 * threads * 16 / moved[kernel]
    dram = 4.3e12 / 1.755e9
    if kernel == "read_l2":
        return blocks * threads * args[2] * 128 / 4400
    if kernel.endswith("_dram"):
        return (2 if kernel[:4] == "copy" else 1) * args[2] * 16 / dram + 5000
    if kernel.startswith("coalesce"):
        width = int(kernel.split("_")[1])
        return args[2] * width / (dram * memory.useful(width, args[1]))
    if kernel.startswith("flight"):
        flight = blocks * threads * 16 * int(kernel[-1])
        return args[1] * 16 / (1 / (1 / dram**4 + (800 / flight) ** 4) ** 0.25)
    if kernel.startswith("shared_"):
        return args[1] * threads * (1 if args[0] > 1 else 2) / 30
    if kernel.startswith("global_"):
        return blocks * threads * args[2] / min(2 + math.log2(args[1]) * 80, 1300)
    raise AssertionError(kernel)


class _Nothing:
    """A stream, an event or a graph that does nothing."""

    def __init__(self, **options):
        pass

    def __getattr__(self, name):
        return lambda *args: 0.002


def without_torch_cuda(patch):
    """Replaces what `launches` and `latency` take from a GPU."""
    fake = dict.fromkeys(("Event", "Stream", "CUDAGraph"), _Nothing)
    fake |= dict.fromkeys(("synchronize", "_sleep"), lambda *args: None)
    fake |= dict.fromkeys(("stream", "graph"), lambda *args: contextlib.nullcontext())
    for name, value in (fake | {"current_stream": _Nothing}).items():
        patch.setattr(torch.cuda, name, value)
    figures = (2.1e-6, 1.2e-6, 8.4e-6, 0.9e-6, 3.2e-4, 0.8e-6, 7.5e-6, 0.6e-6, 1.3e-6, 5.2e-6)
    patch.setattr(launches, "_clocked", lambda function, many=1: _told(function, figures))
    patch.setattr(launches, "_on_gpu", lambda card, function, many: _told(function, figures))

    def ring(card, size, order):
        card.ring_size = size
        return card.bytes(1 << 16, "ring").view(torch.int64)

    patch.setattr(latency, "ring", ring)


def _told(function, figures):
    function()
    _told.calls = getattr(_told, "calls", 0) + 1
    return bench.figure([figures[_told.calls % len(figures)]])


def record(patch, wanted=(), gpu="h200"):
    """A record of an imagined card, and the card."""
    without_torch_cuda(patch)
    _told.calls = 0
    card = FakeCard(gpu)
    made = runs.run(card, wanted, lambda *said: None, MACHINE, ("1234567", False))
    for about in made["parts"].values():
        about |= {"time": "2026-11-26T12:00:00+00:00", "seconds": 0.5}
    return made, card


Options = SimpleNamespace
