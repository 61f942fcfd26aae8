"""PyTorch's products with 2:4 sparse weights: cuSPARSELt's and CUTLASS's, forward, each with its own packed weight.

A weight is packed once, before the clock starts; cuSPARSELt then also searches its algorithms once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError, get

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "cuda"
_packed: dict[str, tuple[Any, Any]] = {}  # by library: the call's tensors, and what it packed of them


def _pack(library: str, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> Any:
    import torch

    if library == "cusparselt":
        packed = torch._cslt_compress(dense)
        best = torch._cslt_sparse_mm_search(packed, x.t(), bias=bias, transpose_result=True)
        return partial(torch._cslt_sparse_mm, packed, x.t(), bias=bias, transpose_result=True, alg_id=best)
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    return partial(torch._sparse_semi_structured_linear, x, packed, meta, bias=bias)


def _product(
    library: str, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    import torch

    if not x.is_cuda or torch.version.hip or x.element_size() != 2:
        raise RidgelineError(f"{library} is timed on an NVIDIA GPU in 16 bits, and x is {x.dtype} on {x.device}")
    if x.dim() != 2 or any([t is not None and t.requires_grad for t in (x, values, bias)]):
        raise RidgelineError(f"{library} is timed for a matrix x, forward only")
    given = x, values, metadata, bias
    known, call = _packed.get(library, (None, None))
    if known is None or not all([a is b for a, b in zip(known, given, strict=True)]):
        call = _pack(library, x, get("densify").function(values, metadata), bias)
        _packed[library] = given, call
    found: torch.Tensor = call()
    return found


PEERS = {"sparse_matmul": {name: partial(_product, name) for name in ("cusparselt", "cutlass_sparse")}}
