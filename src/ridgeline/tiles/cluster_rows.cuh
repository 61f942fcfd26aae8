// Kernels on rows: a cluster of CLUSTER blocks holds a row, each block one part of it, and reads it once. A block may be several
// GROUPS of THREADS, each with rows of its own.
// Macros: XTYPE and YTYPE the element types of what is read and written; CLUSTER; STAGES; THREADS; GROUPS; ITEMS packs per thread.
#pragma once
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;
constexpr int SMALL = sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y), LARGE = sizeof(X) < sizeof(Y) ? sizeof(Y) : sizeof(X);
constexpr int PACK = 16 / LARGE, ALIGN = 16 / SMALL, WARPS = THREADS / 32, SLOTS = CLUSTER * WARPS;

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

#ifndef GROUPS
#define GROUPS 1
#endif

extern __shared__ __align__(128) char memory[];

// This thread's group, and its place there.
__device__ inline int group() { return GROUPS == 1 ? 0 : threadIdx.x / THREADS; }
__device__ inline int thread() { return GROUPS == 1 ? threadIdx.x : threadIdx.x % THREADS; }

__device__ inline void group_sync() {
    if constexpr (GROUPS == 1)
        __syncthreads();
    else if constexpr (THREADS == 32)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group()), "n"(THREADS) : "memory");
}

// Calls f on each of this thread's packs of a part of `count` elements.
template <typename F>
__device__ inline void for_each(int count, F f) {
#pragma unroll(ITEMS < 4 ? ITEMS : 4)
    for (int i = 0; i < ITEMS; ++i) {
        const int p = i * THREADS + thread();
        if (p * PACK < count) f(p);
    }
}

// exp(x - base). For float32 logits by the fraction alone: of the whole exponent ex2.approx comes out 5e-8 too small, but not near 0.
__device__ inline float exp_from(float x, float base) {
    if (sizeof(X) == 4) return expf(x - base);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, -base * 1.44269504f)));
    return y;
}

// Past the caches: backward reads twice what it writes, and its next rows are the better guests. Forward's stores gain nothing.
template <typename P>
__device__ inline void store_streaming(P* to, const P& value) {
    if constexpr (sizeof(P) == 16)
        __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(value));
    else
        __stcs(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(value));
}

// What a block has of every row, and where its shared memory lies: the parts, their barriers, the barriers of two sets of
// slots, and the sets: FLOATS of every warp of the cluster. Rows use the sets in turn: when a warp sends for row k + 2, all
// warps have sent for row k + 1, and so have read what they were sent for row k.
template <int INPUTS, int FLOATS, typename T>
struct Share {
    int rank = blockIdx.x % CLUSTER;
    int part, begin, count;
    Barrier* barriers;
    float* slots;
    RowStream<STAGES, INPUTS, T> stream;

    __device__ Share(long long rows, int columns, const T* const (&from)[INPUTS], const long long (&stride)[INPUTS]) {
        part = (columns + CLUSTER * ALIGN - 1) / (CLUSTER * ALIGN) * ALIGN;
        begin = min(rank * part, columns);
        count = min(part, columns - begin);
        stream.room = part * sizeof(T);
        stream.bytes = count * sizeof(T);
        const unsigned size = STAGES * INPUTS * stream.room + (STAGES + 2) * sizeof(Barrier) + 2 * FLOATS * SLOTS * sizeof(float);
        stream.memory = memory + group() * ((size + 15) / 16 * 16);
        stream.barriers = reinterpret_cast<Barrier*>(stream.memory + STAGES * INPUTS * stream.room);
        barriers = stream.barriers + STAGES;
        slots = reinterpret_cast<float*>(barriers + 2);
#pragma unroll
        for (int i = 0; i < INPUTS; ++i) {
            stream.from[i] = from[i] + begin;
            stream.stride[i] = stride[i];
        }
        stream.row = blockIdx.x / CLUSTER * GROUPS + group();
        stream.step = gridDim.x / CLUSTER * GROUPS;
        stream.rows = rows;
        if (thread() == 0) {
            barrier_init(barriers);
            barrier_init(barriers + 1);
            stream.begin();
        }
        cluster_sync<CLUSTER>();
    }

    // Every warp of the cluster gives FLOATS floats; returns them all.
    __device__ const float* exchange(int k, const float (&mine)[FLOATS]) {
        float* set = slots + (k & 1) * FLOATS * SLOTS;
        float* slot = set + FLOATS * (rank * WARPS + thread() / 32);
        const int lane = threadIdx.x % 32;
        if constexpr (CLUSTER == 1) {
            if (lane == 0)
                for (int f = 0; f < FLOATS; ++f) slot[f] = mine[f];
            group_sync();
        } else {
            Barrier* barrier = barriers + (k & 1);
            if (thread() == 0) barrier_expect(barrier, FLOATS * SLOTS * sizeof(float));
            if (lane < CLUSTER) cluster_send(slot, mine, barrier, lane);
            barrier_wait(barrier, k / 2 & 1);
        }
        return set;
    }

    // Asks for the row STAGES after the k-th, in whose place it comes: all threads of this block have read that.
    __device__ void next(int k) {
        if (thread() == 0) stream.load(k + STAGES);
    }
};

// Of a row: its maximum, and the sum of its elements' exponentials from there.
struct Exponentials {
    float most, total;
};

// Of the k-th row, whose part of this block lies at `in`: every warp's two, brought together.
template <typename T, typename S>
__device__ inline Exponentials exponentials(S& share, int k, const T* in) {
    float top = -INF, sum = 0;
    for_each(share.count, [&](int p) {
        const T pack = in[p];
#pragma unroll
        for (int j = 0; j < PACK; ++j) top = fmaxf(top, to_float(pack.at[j]));
    });
    top = warp_max(top);
    const float base = top == -INF ? 0.0f : top;  // nothing but -inf: exponentials of 0, not of -inf + inf
    for_each(share.count, [&](int p) {
        const T pack = in[p];
#pragma unroll
        for (int j = 0; j < PACK; ++j) sum += exp_from(to_float(pack.at[j]), base);
    });
    const float* slots = share.exchange(k, {top, warp_sum(sum)});
    const int lane = threadIdx.x % 32;
    float most = -INF, total = 0;
    for (int s = lane; s < SLOTS; s += 32) most = fmaxf(most, slots[2 * s]);
    most = warp_max(most);
    for (int s = lane; s < SLOTS; s += 32) total += slots[2 * s + 1] * exp_from(slots[2 * s], most);
    return {most, warp_sum(total)};
}
