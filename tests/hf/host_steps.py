"""What a patched training step still runs in full, on a CPU that emulates a GPU (`host_calls.emulate`).

`python tests/hf/host_steps.py NAME ...` prints for each of these models, as JSON, the launchers that a fifth step runs
instead of repeating their recorded work, and how many functions of Python and of C the step calls for each layer. With
`--time` it prints the least microseconds of forward and backward for each layer, of the patched and the plain model.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from models import build, tokens

from ridgeline import cuda, hf, replay

LAYERS = 4
ran: list[str] = []


def watch() -> None:
    """Notes each launcher that runs, of ops that are loaded later."""
    learn = replay.Plans.learn

    def noted(self: Any, *args: Any) -> Any:
        ran.append(getattr(self.launcher, "__qualname__", str(self.launcher)))
        return learn(self, *args)

    replay.Plans.learn = noted  # type: ignore[method-assign]
    # Ops take these as they load, too.
    torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda index: 7  # type: ignore[attr-defined]


def stepper(name: str, patched: bool) -> Any:
    """A function that makes a forward and a backward, and returns the seconds of each."""
    model = build(name, num_hidden_layers=LAYERS, layer_types=None).bfloat16()
    if patched:
        hf.patch(model)
    ids, parameters = tokens(1, 16), list(model.parameters())

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        between = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        for p in parameters:
            p.grad = None
        return between - start, end - between

    return step


def least(step: Any) -> list[int]:
    """The least microseconds of a layer's forward and backward."""
    for _ in range(5):
        step()
    parts = zip(*[step() for _ in range(150)], strict=True)
    return [round(min(part) * 1e6 / LAYERS) for part in parts]


def main(names: list[str], timed: bool) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # its products of a few rows take longer than all else
    watch()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    host_calls = import_module("host_calls")
    plain = {name: least(stepper(name, False)) for name in names if timed}
    steps = {name: stepper(name, True) for name in names}
    host_calls.emulate()
    cuda.encoded = lambda pointer, view: bytes(128)  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for name, step in steps.items():
        if timed:
            print(f"{name}: us a layer, forward and backward: {least(step)}, plain {plain[name]}", flush=True)
            continue
        for _ in range(4):
            step()
        ran.clear()
        calls = [n // LAYERS for n in host_calls.counted(step)]
        found[name] = {"ran": sorted(set(ran)), "calls": calls}
    if found:
        print(json.dumps(found))


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if a != "--time"], "--time" in sys.argv)
