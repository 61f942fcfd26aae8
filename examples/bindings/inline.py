"""C++ in a string by `load_inline`: compiled against all of PyTorch's headers, called through pybind11."""

from pathlib import Path

import torch
from common import differentiable
from torch.utils.cpp_extension import load_inline

CUDA = torch.cuda.is_available()
SOURCE = """
#include <torch/extension.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
extern "C" void silu_cuda(float* y, const float* x, long long n, void* stream);
#endif

torch::Tensor silu(const torch::Tensor& given) {
  TORCH_CHECK_TYPE(given.scalar_type() == torch::kFloat32, "silu takes float32, not ", given.scalar_type());
  torch::Tensor x = given.contiguous(), y = torch::empty_like(x);
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    c10::cuda::CUDAGuard guard(x.device());
    silu_cuda(y.data_ptr<float>(), x.data_ptr<float>(), x.numel(), c10::cuda::getCurrentCUDAStream());
    return y;
  }
#endif
  return torch::mul_out(y, x, torch::sigmoid(x));
}
"""

module = load_inline(
    "ridgeline_inline",
    cpp_sources=SOURCE,
    cuda_sources=Path(__file__).with_name("silu.cu").read_text() if CUDA else None,
    functions=["silu"],
    extra_cflags=["-DWITH_CUDA"] if CUDA else [],
    no_implicit_headers=True,  # nvcc then reads no header of PyTorch's, which is most of its time
)
silu = differentiable(module.silu)
