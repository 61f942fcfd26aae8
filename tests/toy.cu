// Two kernels for testing the lab: one with 16-byte accesses, one whose array must lie in local memory.
extern "C" __global__ void __launch_bounds__(256) toy_twice(const float4* x, float4* y, long long n) {
    __shared__ float flip[256];
    long long i = blockIdx.x * 256ll + threadIdx.x;
    flip[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (4 * i < n) {
        float4 v = x[i];
        v.x *= flip[255 - threadIdx.x];
        y[i] = v;
    }
}

extern "C" __global__ void toy_local(const float* x, float* y, long long n) {
    float kept[64] = {};
    for (long long i = 0; i < n; ++i) kept[(int)x[i] & 63] += x[i];
    y[threadIdx.x] = kept[threadIdx.x & 63];
}
