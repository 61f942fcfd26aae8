"""A C++ extension on PyTorch's stable ABI: one binary for many versions. Python adds the fake op and the gradient."""

from pathlib import Path

import torch
from common import backward, setup_context
from torch.utils.cpp_extension import load

CUDA = torch.cuda.is_available()
HERE = Path(__file__).parent
NAME = "ridgeline_stable::silu"

load(
    "ridgeline_stable",
    [str(HERE / "stable.cpp"), *([str(HERE / "silu.cu")] if CUDA else [])],
    extra_cflags=["-O2", "-DTORCH_TARGET_VERSION=0x020a000000000000", *(["-DUSE_CUDA"] if CUDA else [])],
    is_python_module=False,  # no pybind11: the library registers its op when it is loaded
)
torch.library.register_fake(NAME, torch.empty_like)
torch.library.register_autograd(NAME, backward, setup_context=setup_context)

silu = torch.ops.ridgeline_stable.silu.default
