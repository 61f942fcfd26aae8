"""GPU kernels for language models, each proven against the roof of the machine it runs on.

`ridgeline.rms_norm` is the public function of that name, loaded at first use: importing ridgeline imports no torch.

Written by `make pyi`.
"""

import torch

__version__: str

def register_all() -> None:
    """Imports every op, so that `torch.export.load` knows them in a fresh process."""

def matmul(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The matrix product, as `torch.matmul`: (..., M, K) @ (..., K, N), leading dimensions broadcast; a vector is a row or a column.

    a, b: one dtype, one device, any strides. float32 products follow `torch.get_float32_matmul_precision()`.
    Raises RidgelineError where shapes, dtypes or devices do not fit, or `impl` cannot run the call.
    """

def gelu(x: torch.Tensor, approximate: str = "none", *, impl: str | None = None) -> torch.Tensor:
    """The Gaussian error linear unit of every element, as `torch.nn.functional.gelu`.

    x: any shape and strides, floating point. approximate: "none" (erf) or "tanh". Returns a tensor of x's shape and dtype.
    Raises RidgelineError on another `approximate`, a tensor that is not floating point, or an `impl` that cannot run the call.
    """

def mul(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The product of two tensors, element by element, as `torch.mul`.

    a, b: tensors on one device whose shapes broadcast together; the result has PyTorch's promoted dtype.
    Raises RidgelineError where an argument is no tensor, the devices differ, or `impl` cannot run the call.
    """

def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, impl: str | None = None) -> torch.Tensor:
    """exp(x) scaled to sum to 1 along `dim`, as `torch.nn.functional.softmax`. Gradients flow to x.

    x: any shape and strides, floating point. dtype: what x is cast to first, and the result's type; float32 of a half-precision
    x costs no extra pass. Returns a tensor of x's shape; along `dim` it is contiguous where kernels serve the call.
    A row of nothing but -inf, or with +inf or NaN in it, gives NaN.
    Raises RidgelineError on a `dim` that x does not have, a result that is not floating point, or an `impl` that cannot run the call.
    """
