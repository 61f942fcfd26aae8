"""GPU kernels for language models, each proven against the roof of the machine it runs on.

`ridgeline.rms_norm` is the public function of that name, loaded at first use: importing ridgeline imports no torch.

Written by `make pyi`.
"""

import torch

__version__: str

def register_all() -> None:
    """Imports every op, so that `torch.export.load` knows them in a fresh process."""

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
