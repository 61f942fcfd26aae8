// The sum of all elements, nine times as it is taught and once as it should be done. Each block leaves a part; `add`
// adds the parts.
// Macros: DTYPE an element's type; YTYPE the result's; THREADS per block; LOADS of 16 bytes in flight per thread; PDL
// for the last two kernels.
#include "reduction.cuh"

using Sum = Sums<DTYPE>::Thread;
using Wide = Sums<DTYPE>::Wide;

__device__ long long place() { return blockIdx.x * (long long)THREADS + threadIdx.x; }

// Neighbours first, then neighbours of neighbours: every 2nd, 4th, ... thread works, picked by a remainder.
extern "C" __global__ void v0(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    const unsigned t = threadIdx.x;
    sums[t] = place() < n ? Sum(x[place()]) : 0;
    __syncthreads();
    for (unsigned s = 1; s < blockDim.x; s *= 2) {
        if (t % (2 * s) == 0) sums[t] += sums[t + s];
        __syncthreads();
    }
    if (t == 0) parts[blockIdx.x] = sums[0];
}

// The same pairs by the first threads: whole warps work or idle, without remainders. But a warp's threads read 2s
// apart.
extern "C" __global__ void v1(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    const unsigned t = threadIdx.x;
    sums[t] = place() < n ? Sum(x[place()]) : 0;
    __syncthreads();
    for (unsigned s = 1; s < blockDim.x; s *= 2) {
        const unsigned left = 2 * s * t;
        if (left < blockDim.x) sums[left] += sums[left + s];
        __syncthreads();
    }
    if (t == 0) parts[blockIdx.x] = sums[0];
}

// Adds the upper half to the lower one until `least` sums are left: adjacent threads read adjacent words.
__device__ void halve(Sum* sums, unsigned least) {
    __syncthreads();
    for (unsigned s = blockDim.x / 2; s > least; s /= 2) {
        if (threadIdx.x < s) sums[threadIdx.x] += sums[threadIdx.x + s];
        __syncthreads();
    }
}

extern "C" __global__ void v2(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = place() < n ? Sum(x[place()]) : 0;
    halve(sums, 0);
    if (threadIdx.x == 0) parts[blockIdx.x] = sums[0];
}

// The sum of this thread's two elements, THREADS apart: half as many blocks, and no thread that only loads.
__device__ Sum two(const DTYPE* x, long long n) {
    const long long i = blockIdx.x * (2LL * THREADS) + threadIdx.x;
    return (i < n ? Sum(x[i]) : 0) + (i + THREADS < n ? Sum(x[i + THREADS]) : 0);
}

extern "C" __global__ void v3(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = two(x, n);
    halve(sums, 0);
    if (threadIdx.x == 0) parts[blockIdx.x] = sums[0];
}

// The last 64 sums, by the first warp, which needs no block barrier. Since Volta a warp's threads may diverge:
// __syncwarp makes all read a value before it is overwritten, and all write before it is read again.
__device__ void last_warp(Sum* sums, Sum* part) {
    if (threadIdx.x >= 32) return;
    Sum sum = sums[threadIdx.x];
#pragma unroll
    for (int s = 32; s > 0; s /= 2) {
        sum += sums[threadIdx.x + s];
        __syncwarp();
        sums[threadIdx.x] = sum;
        __syncwarp();
    }
    if (threadIdx.x == 0) *part = sum;
}

extern "C" __global__ void v4(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = two(x, n);
    halve(sums, 32);
    last_warp(sums, parts + blockIdx.x);
}

// All steps unrolled: the number of threads is known at compile time.
__device__ void halve_all(Sum* sums, Sum* part) {
    __syncthreads();
#pragma unroll
    for (int s = THREADS / 2; s > 32; s /= 2) {
        if (threadIdx.x < s) sums[threadIdx.x] += sums[threadIdx.x + s];
        __syncthreads();
    }
    last_warp(sums, part);
}

extern "C" __global__ void v5(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = two(x, n);
    halve_all(sums, parts + blockIdx.x);
}

// This thread's sum of its elements, a grid's threads apart.
__device__ Sum many(const DTYPE* x, long long n) {
    Sum sum = 0;
    for (long long i = place(); i < n; i += gridDim.x * (long long)THREADS) sum += Sum(x[i]);
    return sum;
}

extern "C" __global__ void v6(Sum* parts, const DTYPE* x, long long n) {
    __shared__ Sum sums[THREADS];
    sums[threadIdx.x] = many(x, n);
    halve_all(sums, parts + blockIdx.x);
}

extern "C" __global__ void v7(Sum* parts, const DTYPE* x, long long n) {
    const Sum sum = block_sum<THREADS>(many(x, n));
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

extern "C" __global__ void v8(Sum* parts, const DTYPE* x, long long n) {
    constexpr int N = 16 / sizeof(DTYPE);
    Sum sum = 0;
    for (long long p = place(); p < n / N; p += gridDim.x * (long long)THREADS) {
        const Pack<DTYPE, N> found = reinterpret_cast<const Pack<DTYPE, N>*>(x)[p];
#pragma unroll
        for (int k = 0; k < N; ++k) sum += Sum(found.at[k]);
    }
    if (place() < n % N) sum += Sum(x[n / N * N + place()]);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Parts of parts, if there are too many for one block: block b adds `each` parts from b * each on.
extern "C" __global__ void few(Sum* fewer, const Sum* parts, int count, int each) {
    const int first = blockIdx.x * each, left = count - first;
    add_parts<THREADS, Wide>(fewer + blockIdx.x, parts + first, left < each ? left : each);
}

extern "C" __global__ void add(YTYPE* y, const Sum* parts, int count) { add_parts<THREADS, Wide>(y, parts, count); }

// As it should be done: short blocks, which the GPU schedules as multiprocessors become free, with all of a block's
// loads in flight at once.
extern "C" __global__ void __launch_bounds__(THREADS)
    best(YTYPE* y, Wide* parts, const DTYPE* x, long long n, int steps) {
    let_next_come();
    auto add = [](Sum sum, const DTYPE(&one)[1]) {
        if constexpr (sizeof(Sum) == 8)
            return sum + Sum(one[0]);
        else
            return sum + to_float(one[0]);
    };
    const DTYPE* const in[1] = {x};
    leave(block_sum<THREADS>(Wide(share<THREADS, LOADS>(add, n, steps, in))), y, parts);
}

extern "C" __global__ void best_add(YTYPE* y, const Wide* parts, int count) {
    add_parts<THREADS, Wide>(y, parts, count);
}
