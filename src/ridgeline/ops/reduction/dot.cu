// The dot product of two vectors: three kernels with float16 atomics to one address, then sums of blocks, added by
// atomics or in order.
// Macros: DTYPE an element's type; YTYPE the result's; THREADS per block; LOADS of 16 bytes of each vector in flight
// per thread; PDL for the last two kernels.
#include "reduction.cuh"

using Sum = Sums<DTYPE>::Thread;
using Wide = Sums<DTYPE>::Wide;

__device__ long long place() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }

template <typename S>
__device__ void zero(S* sums, int count) {
    if (threadIdx.x < count) sums[threadIdx.x] = S(0.0f);
}

// One atomic per thread. The GPU cannot add a single half in memory: it reads, adds, and retries until its
// compare-and-swap succeeds.
__device__ void add_one(__half* sum, __half value) { atomicAdd(sum, value); }

// A single half paired with a zero, to use the GPU's atomic addition of pairs: the value is the lower or the upper half
// of its word. If the other half lies outside the tensor, a plain atomic.
__device__ void add_padded(__half* sums, int at, int size, __half value) {
    __half* const one = sums + at;
    const bool low = ((unsigned long long)one & 3) == 0;
    if (low && at + 1 < size)
        atomicAdd(reinterpret_cast<__half2*>(one), __halves2half2(value, __ushort_as_half(0)));
    else if (!low && at > 0)
        atomicAdd(reinterpret_cast<__half2*>(one - 1), __halves2half2(__ushort_as_half(0), value));
    else
        atomicAdd(one, value);
}

extern "C" __global__ void half_zero(__half* sums) { zero(sums, 2); }

extern "C" __global__ void half_half(__half* sums, const __half* a, const __half* b, long long n) {
    const long long i = place();
    if (i < n) add_one(sums, __hmul(a[i], b[i]));
}

extern "C" __global__ void half_half2(__half* sums, const __half* a, const __half* b, long long n) {
    const long long p = place();
    __half2* const pair = reinterpret_cast<__half2*>(sums);
    if (p < n / 2)
        atomicAdd(pair, __hmul2(reinterpret_cast<const __half2*>(a)[p], reinterpret_cast<const __half2*>(b)[p]));
    if (p == n / 2 && n % 2) atomicAdd(pair, __halves2half2(__hmul(a[n - 1], b[n - 1]), __ushort_as_half(0)));
}

// Blocks add to the lower and the upper half in turn, to exercise both cases.
extern "C" __global__ void half_padded(__half* sums, const __half* a, const __half* b, long long n) {
    const long long i = place();
    if (i < n) add_padded(sums, blockIdx.x % 2, 2, __hmul(a[i], b[i]));
}

extern "C" __global__ void half_end(__half* y, const __half* sums) {
    if (threadIdx.x == 0) *y = __hadd(sums[0], sums[1]);
}

struct Multiply {
    __device__ float operator()(float sum, const DTYPE (&x)[2]) const {
        return fmaf(to_float(x[0]), to_float(x[1]), sum);
    }
};

extern "C" __global__ void block_zero(float* sum) { zero(sum, 1); }

// A block's sum in registers and shared memory first, then one float32 atomic per block.
extern "C" __global__ void block_one(float* sum, const DTYPE* a, const DTYPE* b, long long n) {
    float mine = 0;
    for (long long i = place(); i < n; i += gridDim.x * (long long)blockDim.x)
        mine = fmaf(to_float(a[i]), to_float(b[i]), mine);
    mine = block_sum<THREADS>(mine);
    if (threadIdx.x == 0) atomicAdd(sum, mine);
}

extern "C" __global__ void block_end(DTYPE* y, const float* sum) {
    if (threadIdx.x == 0) from_float(*sum, *y);
}

// Each block leaves its part, and `add` adds the parts in order.
extern "C" __global__ void __launch_bounds__(THREADS)
    in_order(YTYPE* y, Wide* parts, const DTYPE* a, const DTYPE* b, long long n, int steps) {
    let_next_come();
    const DTYPE* const in[2] = {a, b};
    leave(block_sum<THREADS>(Wide(share<THREADS, LOADS>(Multiply(), n, steps, in))), y, parts);
}

extern "C" __global__ void add(YTYPE* y, const Wide* parts, int count) { add_parts<THREADS, Wide>(y, parts, count); }
