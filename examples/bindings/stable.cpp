// silu by the stable ABI: this binary runs with every PyTorch from 2.10 on, whatever compiled it.
#include <cmath>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

using torch::stable::Tensor;

static void check(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "silu takes float32");
  STD_TORCH_CHECK(x.is_contiguous(), "silu takes contiguous tensors");
}

Tensor silu_cpu(Tensor x) {
  check(x);
  Tensor y = torch::stable::empty_like(x);
  const float* from = static_cast<const float*>(x.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < x.numel(); i++) {
    to[i] = from[i] / (1.0f + std::exp(-from[i]));
  }
  return y;
}

STABLE_TORCH_LIBRARY(ridgeline_stable, m) {
  m.def("silu(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ridgeline_stable, CPU, m) {
  m.impl("silu", TORCH_BOX(&silu_cpu));
}

#ifdef USE_CUDA
extern "C" void silu_cuda(float* y, const float* x, long long n, void* stream);

Tensor silu_gpu(Tensor x) {
  check(x);
  torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::empty_like(x);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  silu_cuda(static_cast<float*>(y.mutable_data_ptr()), static_cast<const float*>(x.const_data_ptr()), x.numel(), stream);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(ridgeline_stable, CUDA, m) {
  m.impl("silu", TORCH_BOX(&silu_gpu));
}
#endif
