// mul in CUDA C++. Macros: LEFT, RIGHT and RESULT the element types of operands and result; PACK elements per pack.
#include "elementwise.cuh"

struct Mul {
    __device__ float operator()(float a, float b) const { return a * b; }
    __device__ static __half2 pair(__half2 a, __half2 b) { return __hmul2(a, b); }
};

extern "C" __global__ void mul_fwd(RESULT* y, const LEFT* a, const RIGHT* b, long long n) {
    elementwise<PACK>(Mul(), n, y, a, b);
}
