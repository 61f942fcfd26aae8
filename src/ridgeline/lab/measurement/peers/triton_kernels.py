"""triton_kernels: the grouped products of Triton's own repository, in the form that they have since Triton 3.6.

Its experts are no peer of moe here: their fused activation takes gate and up in turns, and its routing no expert twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

# PyPI's triton-kernels is another project.
INSTALL = "git+https://github.com/triton-lang/triton@v3.6.0#subdirectory=python/triton_kernels"
PACKAGE, KIND, FORWARD_ALONE = "triton_kernels", "triton", ("grouped_matmul",)


def _grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, bias: Any = None, main_grad: Any = None
) -> torch.Tensor:
    """Times what finds the groups' tiles too. Leaves rows past the last end as they were."""
    import torch
    from triton_kernels.matmul import matmul
    from triton_kernels.tensor import make_ragged_tensor_metadata

    if bias is not None or main_grad is not None or x.dtype not in (torch.bfloat16, torch.float16):
        raise RidgelineError("triton_kernels is timed in 16 bits, without bias and without main_grad")
    with torch.no_grad():
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
        groups = make_ragged_tensor_metadata(sizes, x.shape[0])
        found: torch.Tensor = matmul(x.detach(), w.detach(), None, a_ragged_metadata=groups)
    return found


PEERS = {"grouped_matmul": _grouped_matmul}
