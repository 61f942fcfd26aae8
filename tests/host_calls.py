"""Small calls' host time on a CPU that emulates a GPU: everything but the driver's call.

`python tests/host_calls.py` prints the microseconds of each call, and how many functions of Python and of C it calls;
with `--json` those numbers alone. `emulate` replaces parts of torch and of ridgeline for the whole process.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import ridgeline
from ridgeline import boundary, cuda, op, replay, select
from ridgeline import device as devices

Call = Callable[[], Any]
KINDS = {float: "f", cuda.TensorMap: "128s"}  # of a kernel's parameters; the others are pointers and whole numbers


def load(kernel: Any, args: Any, constants: Any, values: list[Any], index: int) -> tuple[Any, None]:
    """As `boundary._load`, without compiling: a start packs the parameters and calls a function of the C library."""
    starter = cuda.Starter(1, "".join(KINDS.get(type(v), "q") for v in values), 128, 0, index)
    views = [(lambda _: None) if type(v) is cuda.TensorMap else None for v in values]
    return (cuda.Arranged(starter, list(enumerate(views))) if any(views) else starter), None


def emulate() -> None:
    """Makes CPU tensors look like a GPU's, and the driver do nothing."""
    card = devices.known("h200")
    some: Any = torch.Tensor
    some.is_cuda, some.get_device = True, lambda self: 0
    torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda index: 7  # type: ignore[attr-defined]
    torch.cuda.is_current_stream_capturing = lambda: False
    replay._empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    replay.encoded = lambda pointer, view: bytes(128)  # type: ignore[assignment]
    devices.gpu, devices.here, devices.CPU = lambda index: card, lambda: card, card  # type: ignore[assignment]
    nothing = ctypes.CDLL(None).getauxval  # takes any number, and answers 0
    cuda.driver_library = lambda: SimpleNamespace(cuLaunchKernelEx=nothing, cuMemsetD8Async=ctypes.CDLL(None).getauxval)  # type: ignore[assignment]
    cuda.unavailable = select.cuda.unavailable = lambda: None  # type: ignore[assignment]
    boundary._load = load  # type: ignore[assignment]
    op.readable = lambda tensor: False


def data(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def steps() -> dict[str, Call]:
    """A decoder's steps: one token of four sequences, the state in place."""
    q, k, v, a, b, z = (data(4, 1, 4, 16) for _ in range(6))
    g, w = (-data(*shape).abs() for shape in ((4, 1, 4), (4, 1, 4, 16)))
    beta, dt, u, B, C = (data(*shape) for shape in ((4, 1, 4), (4, 1, 4), (4, 16), (4, 1, 1, 16), (4, 1, 1, 16)))
    heads = {n: data(4, dtype=torch.float32) for n in ("A", "D", "dt_bias")}
    A = -heads.pop("A").abs()
    state: dict[str, Any] = {"initial_state": data(4, 4, 16, 16, dtype=torch.float32), "return_state": True}
    state["inplace"] = True
    window = state | {"initial_state": data(4, 64, 4)}
    lengths, kv = torch.full((4,), 100, dtype=torch.int32), data(4, 1, 576)
    cache, new = data(4, 128, 2, 64), {"k": data(4, 1, 2, 64), "v": data(4, 1, 2, 64)}
    return {
        "linear_attention": partial(ridgeline.linear_attention, q, k, v, **state),
        "gated_linear_attention": partial(ridgeline.gated_linear_attention, q, k, v, g, **state),
        "gated_linear_attention, channels": partial(ridgeline.gated_linear_attention, q, k, v, w, **state),
        "gated_delta_rule": partial(ridgeline.gated_delta_rule, q, k, v, g, beta, normalize=True, **state),
        "rwkv6": partial(ridgeline.rwkv6, q, k, v, w, u, **state),
        "rwkv7": partial(ridgeline.rwkv7, q, w, k, v, a, b, **state),
        "ssd": partial(ridgeline.ssd, v, dt, A, B, C, z=z, **heads, **state),
        "causal_conv1d": partial(ridgeline.causal_conv1d, data(4, 1, 64), data(64, 4), data(64), **window),
        "decode_attention": partial(
            ridgeline.decode_attention, data(4, 1, 8, 64), cache, torch.zeros_like(cache), lengths, **new
        ),
        "mla_decode": partial(ridgeline.mla_decode, data(4, 1, 16, 576), data(4, 128, 576), lengths, kv=kv, scale=0.07),
    }


def layers() -> dict[str, Call]:
    """Layers of one token without gradients."""
    codes, many = (
        torch.randint(255, (256, 256), dtype=torch.uint8),
        torch.randint(-99, 99, (256, 512), dtype=torch.int8),
    )
    blocks, powers = (
        torch.randint(255, (2, 4, 128, 64), dtype=torch.uint8),
        torch.full((4, 128, 4), 127, dtype=torch.uint8),
    )
    x, chosen, logits = data(1, 512), torch.tensor([[1, 3]], dtype=torch.int32), data(4, 64)
    row, experts, weights = data(1, 128), (data(4, 256, 128), data(4, 128, 128)), torch.rand(1, 2)
    few = torch.cat((blocks[0], blocks[1]), 1), blocks[0]
    scales = torch.cat((powers, powers), 1), powers
    return {
        "rms_norm": partial(ridgeline.rms_norm, data(65, 256), data(256)),
        "layer_norm": partial(ridgeline.layer_norm, data(65, 256), data(256), data(256)),
        "int4_linear": partial(ridgeline.int4_linear, x, codes, data(256, 4)),
        "int8_linear": partial(ridgeline.int8_linear, x, many, data(256)),
        "mxfp4_linear": partial(ridgeline.mxfp4_linear, x, codes, torch.full((256, 16), 127, dtype=torch.uint8)),
        "topk_gate": partial(ridgeline.topk_gate, logits, 2),
        "moe": partial(ridgeline.moe, row, weights, chosen, *experts),
        "moe, mxfp4": partial(ridgeline.moe, row, weights, chosen, *few, scales=scales),
    }


def trained() -> dict[str, Call]:
    """Forwards that keep what backward needs."""
    channels = {n: data(12, dtype=torch.float32, grad=True) for n in ("weight", "bias")}
    statistics, image = (torch.zeros(12), torch.ones(12)), data(3, 12, 7, 9, dtype=torch.float32, grad=True)
    x, w, b = data(65, 256, grad=True), data(256, grad=True), data(256, grad=True)
    return {
        "rms_norm, gradients": partial(ridgeline.rms_norm, x, w),
        "layer_norm, gradients": partial(ridgeline.layer_norm, x, w, b),
        "softmax, gradients": partial(ridgeline.softmax, x),
        "gelu, gradients": partial(ridgeline.gelu, x),
        "batch_norm, gradients": partial(ridgeline.batch_norm, image, *statistics, **channels),
        "batch_norm, training": partial(ridgeline.batch_norm, image, *statistics, **channels, training=True),
    }


def counted(call: Call) -> tuple[int, int]:
    """Returns how many functions of Python and of C a call calls."""
    seen = {"call": 0, "c_call": 0}

    def note(frame: Any, event: str, argument: Any) -> None:
        seen[event] = seen.get(event, 0) + 1

    for _ in range(6):  # checked, recorded, guarded
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen["call"], seen["c_call"] - 1  # without the last setprofile


def microseconds(call: Call, calls: int = 30) -> float:
    """The least of many short rounds, since other work shares the processor."""
    best = float("inf")
    for _ in range(400):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    emulate()
    work = steps() | layers() | trained()
    numbers = {name: counted(call) for name, call in work.items()}
    if "--json" in sys.argv:
        print(json.dumps(numbers))
    else:
        for name, call in work.items():
            print(f"{name:32} {microseconds(call):5.1f} us, calls {numbers[name]}", flush=True)
