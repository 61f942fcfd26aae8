"""CUDA C++ in a string, as a kernel that a learner's own Python starts."""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

CODES = {"int": "i", "unsigned": "i", "long long": "q", "int64_t": "q", "size_t": "q", "float": "f"}


class NeedsGpu(RuntimeError):
    """CUDA C++ was called on a CPU."""


class Inline:
    """A CUDA C++ kernel in a string: `Inline(source, "my_gelu")[blocks, threads](y, x, n)`.

    source: it holds `extern "C" __global__ void my_gelu(float* y, const float* x, int n)`. Tensors are passed as
    pointers; numbers may be int, long long or float. A third number in the brackets is bytes of dynamic shared memory.
    Raises RidgelineError if the source has no such kernel, or a parameter of another type.
    """

    def __init__(self, source: str, name: str):
        from ridgeline.cuda import CudaKernel

        if "extern" not in source:
            source = source.replace("__global__", 'extern "C" __global__')
        folder = Path(tempfile.gettempdir()) / "ridgeline-inline"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.cu"
        path.write_text(source)
        self.source, self.kernel = source, CudaKernel(path, name, _codes(source, name))

    def __getitem__(self, shape: tuple[Any, ...]) -> Any:
        from ridgeline import boundary, device
        from ridgeline.op import RidgelineError

        blocks, threads, shared = (*shape, 0)[:3]
        grid = blocks if isinstance(blocks, tuple) else (blocks,)

        def start(*args: Any) -> None:
            if len(args) != len(self.kernel.arguments):
                name, takes = self.kernel.name, len(self.kernel.arguments)
                raise RidgelineError(f"{name} takes {takes} arguments, and the call passes {len(args)}")
            if threads > 1024:
                raise RidgelineError(f"{self.kernel.name} starts blocks of {threads} threads; 1024 are the most")
            if device.stand_in is None and args[0].device.type == "cpu":
                raise NeedsGpu("CUDA C++ needs a GPU")
            boundary.launch(self.kernel, grid, *args, block=threads, shared=shared)

        return start


def _codes(source: str, name: str) -> str:
    """Returns the codes of a kernel's parameters, as `CudaKernel` takes them."""
    from ridgeline.op import RidgelineError

    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name)}\s*\(([^)]*)\)", source)
    if not found:
        raise RidgelineError(f"the CUDA C++ has no `__global__ void {name}(...)`")
    codes = ""
    for parameter in filter(None, (p.strip() for p in found[1].split(","))):
        kind = re.sub(r"\bconst\b|\b__restrict__\b", "", parameter.rpartition(" ")[0]).strip()
        code = "P" if "*" in parameter else CODES.get(kind)
        if code is None:
            raise RidgelineError(f"{name} takes `{parameter}`; parameters are pointers, {', '.join(CODES)}")
        codes += code
    return codes
