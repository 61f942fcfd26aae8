// Sums over many elements: in a thread's registers, then across a warp, a block and the grid.
// A thread adds in float32 (integers: in 64 bits). From a warp on sums are float64, so that the last, largest ones are
// not rounded.
#pragma once
#include "early.cuh"
#include "elementwise.cuh"

template <typename T>
struct Sums {  // of elements of type T
    using Thread = long long;
    using Wide = long long;
};
template <>
struct Sums<float> {
    using Thread = float;
    using Wide = double;
};
template <>
struct Sums<__half> : Sums<float> {};
template <>
struct Sums<__nv_bfloat16> : Sums<float> {};

// The sum of a warp's values, in its first thread. All 32 threads must call it.
template <typename S>
__device__ S warp_sum(S sum) {
#pragma unroll
    for (int s = 16; s > 0; s /= 2) sum += __shfl_down_sync(0xffffffffu, sum, s);
    return sum;
}

// The sum of a block's values, in its first thread: warp by warp, through one slot of shared memory per warp. All
// Threads must call it.
template <int Threads, typename S>
__device__ S block_sum(S sum) {
    __shared__ S slots[Threads / 32];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) sum = warp_sum(threadIdx.x < Threads / 32 ? slots[threadIdx.x] : S(0));
    return sum;
}

__device__ inline void put(double sum, double& y) { y = sum; }
__device__ inline void put(double sum, float& y) { y = float(sum); }
__device__ inline void put(double sum, __half& y) { y = __double2half(sum); }
__device__ inline void put(double sum, __nv_bfloat16& y) { y = __double2bfloat16(sum); }
template <typename Y>
__device__ void put(long long sum, Y& y) {
    y = Y(sum);
}

// Writes a block's result: the final one if it is the only block, else its part.
template <typename S, typename Y>
__device__ void leave(S sum, Y* y, S* parts) {
    if (threadIdx.x) return;
    if (gridDim.x == 1)
        put(sum, *y);
    else
        parts[blockIdx.x] = sum;
}

// One block adds up the parts, always in the same order. With PDL it may start before they are complete.
template <int Threads, typename S, typename P, typename Y>
__device__ void add_parts(Y* y, const P* parts, int count) {
    wait_for_before();
    S sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += Threads) sum += S(parts[i]);
    sum = block_sum<Threads>(sum);
    if (threadIdx.x == 0) put(sum, *y);
}

// This thread's sum over a block's share of n elements: `steps` times Threads * Loads adjacent packs of 16 bytes of
// each operand. The loads of a step are independent, so many are in flight at once. add(sum, x) adds one element of
// each operand. All operands have the same offset from a multiple of 16 bytes; the first block handles the elements
// before and after the packs.
template <int Threads, int Loads, typename F, typename T, int COUNT>
__device__ typename Sums<T>::Thread share(F add, long long n, int steps, const T* const (&in)[COUNT]) {
    constexpr int N = 16 / sizeof(T);
    using S = typename Sums<T>::Thread;
    S lanes[N] = {};
    auto use = [&](const uint4(&found)[COUNT]) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            T x[COUNT];
#pragma unroll
            for (int c = 0; c < COUNT; ++c) x[c] = reinterpret_cast<const T*>(&found[c])[j];
            lanes[j] = add(lanes[j], x);
        }
    };
    const long long before = (16 - ((unsigned long long)in[0] & 15)) % 16 / sizeof(T), head = before < n ? before : n;
    const long long packs = (n - head) / N, size = Threads * Loads;
    auto load = [&](int c, long long p) { return __ldcs(reinterpret_cast<const uint4*>(in[c] + head) + p); };
    long long p = blockIdx.x * size * steps;
    for (int step = 0; step < steps && p < packs; ++step, p += size) {
        if (p + size <= packs) {
            uint4 found[Loads][COUNT];
#pragma unroll
            for (int k = 0; k < Loads; ++k)
#pragma unroll
                for (int c = 0; c < COUNT; ++c) found[k][c] = load(c, p + k * Threads + threadIdx.x);
#pragma unroll
            for (int k = 0; k < Loads; ++k) use(found[k]);
        } else {
#pragma unroll 1
            for (long long q = p + threadIdx.x; q < packs; q += Threads) {
                uint4 found[COUNT];
#pragma unroll
                for (int c = 0; c < COUNT; ++c) found[c] = load(c, q);
                use(found);
            }
        }
    }
    S sum = lanes[0];
#pragma unroll
    for (int j = 1; j < N; ++j) sum += lanes[j];
    if (blockIdx.x == 0) {
        const long long at = threadIdx.x < head ? threadIdx.x : head + packs * N + (threadIdx.x - head);
        if (at < n) {
            T x[COUNT];
            for (int c = 0; c < COUNT; ++c) x[c] = in[c][at];
            sum = add(sum, x);
        }
    }
    return sum;
}
