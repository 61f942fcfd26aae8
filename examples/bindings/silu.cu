// y = x / (1 + exp(-x)) in float32: the kernel that every CUDA template here binds. NVRTC compiles the kernel alone.
#define BLOCK 256

extern "C" __global__ void silu_kernel(float* y, const float* x, long long n) {
  long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;
  if (i < n) {
    y[i] = x[i] / (1.0f + expf(-x[i]));
  }
}

#ifndef __CUDACC_RTC__
extern "C" void silu_cuda(float* y, const float* x, long long n, void* stream) {
  if (n > 0) {
    silu_kernel<<<(n + BLOCK - 1) / BLOCK, BLOCK, 0, static_cast<cudaStream_t>(stream)>>>(y, x, n);
  }
}
#endif
