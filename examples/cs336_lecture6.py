"""Every benchmark() and profile() call of Stanford CS336's lecture 6, by its name, on this machine.

    python examples/cs336_lecture6.py            # the lecture's sizes on a GPU, small ones on a CPU
    python examples/cs336_lecture6.py gelu       # only the calls whose name has this in it
    python examples/cs336_lecture6.py --quick    # small sizes everywhere

The lecture's benchmark() takes the mean of three runs, with the host's time in it. Ridgeline's clock gives the median
of many with its 95% interval, from a cold cache. All times are milliseconds: where the lecture says seconds, it errs.
`ridgeline lm scale` shows the scaling with fitted exponents.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline import cli
from ridgeline.lab import benchmark as clock
from ridgeline.lm import lab as lm

Run = Callable[[], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu" or "--quick" in sys.argv
MATMUL_DIMS = (128, 256, 512) if SMALL else (1024, 2048, 4096, 8192, 16384)
DIM = 256 if SMALL else 2048  # of add, matmul, cdist, gelu and softmax in profile()
POINTWISE_DIM = 512 if SMALL else 16384  # of gelu and softmax in benchmark()
MLP = {"dim": 64, "num_layers": 4, "batch_size": 64, "num_steps": 2} if SMALL else None  # None: the lecture's own
SCALING = MLP or {"dim": 256, "num_layers": 4, "batch_size": 256, "num_steps": 2}
PROFILED = MLP or {"dim": 2048, "num_layers": 64, "batch_size": 1024, "num_steps": 2}
# The lecture's name of an implementation: ours.
GELUS = {"manual": "naive", "pytorch": "torch", "cuda": "cuda_packed", "triton": "triton", "compiled": "compile"}
SOFTMAXES = {"manual": "naive", "compiled": "compile", "pytorch": "torch", "triton": "triton_row"}


def run_operation1(dim: int, operation: Callable[[torch.Tensor], Any]) -> Run:
    x = torch.randn(dim, dim, device=DEVICE)
    return lambda: operation(x)


def run_operation2(dim: int, operation: Callable[[torch.Tensor, torch.Tensor], Any]) -> Run:
    x, y = (torch.randn(dim, dim, device=DEVICE) for _ in range(2))
    return lambda: operation(x, y)


def run_mlp(dim: int, num_layers: int, batch_size: int, num_steps: int) -> Run:
    """Linear layers of (dim, dim) with GELU; the mean is the loss; gradients add up, without an optimizer."""
    model = nn.Sequential(*[m for _ in range(num_layers) for m in (nn.Linear(dim, dim), nn.GELU())]).to(DEVICE)
    x = torch.randn(batch_size, dim, device=DEVICE)

    def run() -> None:
        for _ in range(num_steps):
            model(x).mean().backward()

    return run


def sleep_50ms() -> None:
    time.sleep(0.05)


def gelu(impl: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(ridgeline.gelu, approximate="tanh", impl=impl)


def softmax(impl: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(ridgeline.softmax, impl=impl)


def benchmarks() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yields each call's description, and a function that makes what it runs, outside the timing."""
    yield "sleep", lambda: sleep_50ms
    for dim in MATMUL_DIMS:
        yield f"matmul(dim={dim})", partial(run_operation2, dim, torch.matmul)
    yield "run_mlp", partial(run_mlp, **SCALING)
    for name in ("num_steps", "num_layers", "batch_size", "dim"):
        for scale in (2, 3, 4, 5):
            sizes = SCALING | {name: scale * SCALING[name]}
            yield f"run_mlp({scale}x {name})", partial(run_mlp, **sizes)
    for name, impl in GELUS.items():
        yield f"{name}_gelu", partial(run_operation1, POINTWISE_DIM, gelu(impl))
    for name, impl in SOFTMAXES.items():
        yield f"{name}_softmax", partial(run_operation1, POINTWISE_DIM, softmax(impl))


@cache
def profiles() -> dict[str, Callable[[], Run]]:
    """Returns each call's description, and a function that makes what it runs."""
    made: dict[str, Callable[[], Run]] = {
        "sleep": lambda: sleep_50ms,
        "add": partial(run_operation2, DIM, torch.add),
        "matmul": partial(run_operation2, DIM, torch.matmul),
        "matmul(dim=128)": partial(run_operation2, 128, torch.matmul),
        "cdist": partial(run_operation2, DIM, torch.cdist),
        "gelu": partial(run_operation2, DIM, lambda a, b: nn.functional.gelu(a + b)),
        "softmax": partial(run_operation2, DIM, lambda a, b: nn.functional.softmax(a + b, dim=-1)),
        "mlp": partial(run_mlp, **PROFILED),
    }
    made |= {f"{name}_gelu": partial(run_operation1, DIM, gelu(impl)) for name, impl in GELUS.items()}
    made |= {f"{name}_softmax": partial(run_operation1, DIM, softmax(impl)) for name, impl in SOFTMAXES.items()}
    return made


def benchmark(
    description: str, make: Callable[[], Run], num_trials: int = 3, record: Path | None = None
) -> float | None:
    """Prints a call's time and returns the median in milliseconds; None, with the reason, if it cannot run here.

    record: append a row to this file of JSON lines."""
    try:
        found = clock(make(), budget=0.1 if SMALL else 1.0, min_reps=num_trials)
    except ridgeline.RidgelineError as error:
        print(f"benchmark({description!r}): {error}")
        return None
    low, high = (found.seconds[end] * 1e3 for end in ("low", "high"))
    print(f"benchmark({description!r}): {found.median * 1e3:.3f} ms (95%: {low:.3f} to {high:.3f})")
    if record:
        lm.record(record, [{"description": description, "seconds": found.seconds}], "lecture6")
    return found.median * 1e3


def profile(description: str, make: Callable[[], Run], folder: Path) -> None:
    """Prints a call's operators and kernels, and writes its Chrome trace and flame graphs into the folder."""
    global current
    print(f"\nprofile({description!r})", flush=True)
    try:
        current = make()
        current()
    except ridgeline.RidgelineError as error:
        print(error)
        return
    name = description.translate(str.maketrans("(=)", "___")).strip("_")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{name}.py"  # `ridgeline profile` takes a function of a file
        file.write_text(f"import sys\n\nstep = sys.modules[{__name__!r}].current\n")
        cli.main(["profile", f"{file}:step", "--steps", "1", "--out", str(folder / name)])


current: Run = sleep_50ms


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="only the calls whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="small sizes also on a GPU")
    parser.add_argument(
        "--out", type=Path, default=Path("lecture6"), help="write traces and flame graphs here (lecture6)"
    )
    parser.add_argument("--record", type=Path, help="append the benchmarks' times to this file of JSON lines")
    options = parser.parse_args(arguments)
    lm.recordable(options.record)
    chosen = [(d, make) for d, make in benchmarks() if options.name in d]
    for description, make in chosen:
        benchmark(description, make, record=options.record)
    for description, make in profiles().items():
        if options.name in description:
            profile(description, make, options.out)


if __name__ == "__main__":
    main()
