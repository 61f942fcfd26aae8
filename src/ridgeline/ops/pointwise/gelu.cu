// gelu in CUDA C++: one element per thread with double literals, with float literals, and in 16-byte packs.
// Macros: DTYPE the element type; TANH 1 for the tanh form; PACK elements per pack (1 for unaligned pointers).
#include "elementwise.cuh"

// The lecture's kernel: double literals promote the whole formula to float64, for which the GPU has few units.
__device__ double lifted(double x) {
    return TANH ? 0.5 * x * (1.0 + tanh(0.79788456 * (x + 0.044715 * x * x * x)))
                : 0.5 * x * (1.0 + erf(x * 0.70710678118654752));
}

__device__ double lifted_slope(double x) {
    if (!TANH) return 0.5 * (1.0 + erf(x * 0.70710678118654752)) + x * 0.3989422804014327 * exp(-0.5 * x * x);
    double t = tanh(0.79788456 * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.79788456 * (1.0 + 3 * 0.044715 * x * x);
}

struct Gelu {
    __device__ float operator()(float x) const {
        if (TANH) return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
        return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
    }
};

struct GeluGrad {
    __device__ float operator()(float dy, float x) const {
        if (TANH) {
            float u = 1.5957691216f * (x + 0.044715f * x * x * x), e = expf(-fabsf(u)), p = 1.0f / (1.0f + e);
            return dy * ((u > 0 ? p : e * p) + x * e * p * p * (1.5957691216f + 0.2140644488f * x * x));
        }
        return dy * (0.5f * (1.0f + erff(x * 0.7071067812f)) + x * 0.3989422804f * expf(-0.5f * x * x));
    }
};

extern "C" __global__ void gelu_fwd_double(DTYPE* y, const DTYPE* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) from_float(lifted(to_float(x[i])), y[i]);
}

extern "C" __global__ void gelu_bwd_double(DTYPE* dx, const DTYPE* dy, const DTYPE* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) from_float(to_float(dy[i]) * lifted_slope(to_float(x[i])), dx[i]);
}

extern "C" __global__ void gelu_fwd(DTYPE* y, const DTYPE* x, long long n) { elementwise<PACK>(Gelu(), n, y, x); }

extern "C" __global__ void gelu_bwd(DTYPE* dx, const DTYPE* dy, const DTYPE* x, long long n) {
    elementwise<PACK>(GeluGrad(), n, dx, dy, x);
}
