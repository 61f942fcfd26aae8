"""The GPU time of a step by kind of work: each kernel by its name, and by the operator that started it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

KINDS = ("products", "attention", "norms", "loss", "optimizer", "elementwise", "rest")
# The kind of an op of Ridgeline's, by its family; rowwise and pointwise ones are told apart by name.
FAMILIES = {
    "attention": "attention", "experts": "products", "loss": "loss", "matmul": "products", "optimizer": "optimizer",
}  # fmt: skip
# (kind, pattern of the owners' path, pattern of the kernel's name): the first rule whose patterns both match decides.
# Products come before the loss, since the last layer's product is one whoever starts it; the optimizer comes first.
RULES = tuple(
    (kind, re.compile(owner, re.IGNORECASE), re.compile(name, re.IGNORECASE))
    for kind, owner, name in (
        ("optimizer", r"optimizer\.step|adamw", ""),
        ("optimizer", "", r"adam"),
        ("attention", r"attention|sdpa", ""),
        ("attention", "", r"flash|fmha|attention|sdpa"),
        ("attention", r"aten::(bmm|baddbmm|_softmax|_softmax_backward_data)\b", ""),
        ("products", "", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|_mm_|gemv|splitk"),
        ("products", r"aten::(mm|addmm|linear|_grouped_mm|_scaled_mm)\b", ""),
        ("loss", r"cross_?entropy|nll_loss|log_softmax", ""),
        ("loss", "", r"cross_?entropy|nll_loss|softmax"),
        ("norms", r"rms_?norm|layer_?norm", ""),
        ("norms", "", r"rms_?norm|layer_?norm|rsqrt"),
        ("elementwise", "", r"memcpy|memset"),
        ("elementwise", "", r"elementwise|vectorized|copy|cat|fill|reduce|embedding|index|triton_(poi|red|per)"),
        ("elementwise", r"aten::|liger|autograd::", ""),
    )
)
LONG = 120  # characters of a name that are kept
MODE = "PythonDispatchMode"  # the profiler's name of what `named` adds between an operator and its kernel
OVERHEAD = ("Command Buffer Full", "Buffer Flush")  # the profiler's own events, to which it also assigns kernels
OWN = re.compile(r"ridgeline::(\w+?)(?:_fwd|_bwd)?(?=/|$)")


@cache
def kind(name: str, owner: str) -> str:
    """The kind of work of a kernel. owner: the operators that it runs in, the outermost first, joined by "/"."""
    if found := OWN.findall(owner):
        return _own(found[-1], name)
    return next((what for what, o, n in RULES if o.search(owner) and n.search(name)), "rest")


def _own(op: str, name: str) -> str:
    """The kind of a kernel that a Ridgeline op starts. The products of linear_cross_entropy are products."""
    from ridgeline.op import op_modules

    if op == "linear_cross_entropy" and re.search(r"gemm|nvjet|cutlass|matmul|product", name, re.IGNORECASE):
        return "products"
    if op == "topk_gate" or (op.startswith("gated_linear") and name in ("_gate", "_ungate")):
        return "elementwise"
    module = max((m for m in op_modules().items() if op.startswith(m[0])), key=lambda m: len(m[0]), default=None)
    family = module[1].split(".")[2] if module else ""
    return FAMILIES.get(family) or ("norms" if "norm" in op else "elementwise")


@contextmanager
def named() -> Iterator[None]:
    """Inside, Ridgeline's ops go through PyTorch's dispatcher, which tells the profiler their names."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Passing():
        yield


def kernels(events: Any) -> list[dict[str, Any]]:
    """The kernels of a profile: name, owner, kind, calls and seconds, the longest first.

    events: torch.profiler's events of one step. Kernels that no operator is known to have started have the owner "".
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, owner, micro in _linked(events):
        place = name[:LONG], owner.rpartition("/")[2][:LONG], kind(name, owner)
        fresh = {**dict(zip(("name", "owner", "kind"), place, strict=True)), "calls": 0, "seconds": 0.0}
        line = found.setdefault(place, fresh)
        line["calls"] += 1
        line["seconds"] += micro * 1e-6
    return sorted(found.values(), key=lambda line: -line["seconds"])


def _linked(events: Any) -> Iterator[tuple[str, str, float]]:
    """Yields each kernel's name, owner and microseconds; on a CPU each operator's own time."""
    devices = [e for e in events if "CPU" not in str(e.device_type) and not e.is_user_annotation]
    if not devices:
        for event in events:
            if event.self_cpu_time_total > 0 and event.name != MODE:
                yield event.name, _path(event), event.self_cpu_time_total
        return
    left: dict[str, list[float]] = {}
    for event in devices:
        left.setdefault(event.name, []).append(event.time_range.elapsed_us())
    for event in events:
        if "CPU" in str(event.device_type) and event.name not in OVERHEAD:
            for kernel in event.kernels:
                if left.get(kernel.name):
                    left[kernel.name].pop()
                    yield kernel.name, _path(event), kernel.duration
    for name, rest in left.items():
        yield from ((name, "", micro) for micro in rest)


def _path(event: Any) -> str:
    names = []
    while event is not None:
        if event.name != MODE:
            names.append(event.name.removeprefix("autograd::engine::evaluate_function: ").replace("/", "|"))
        event = event.cpu_parent
    return "/".join(reversed(names))


def by_kind(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by kind of work, in the order of KINDS."""
    return {name: sum(line["seconds"] for line in lines if line["kind"] == name) for name in KINDS}
