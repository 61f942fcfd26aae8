// What the microbenchmarks share: the clock of a multiprocessor, and how a block tells its time and its result.
#pragma once

using u32 = unsigned;
using u64 = unsigned long long;

__device__ inline u64 ticks() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}

// Numbers that no compiler knows, whose bytes are small finite numbers in every format: each byte is at most 0x3f, or
// 0x80 to 0xbf.
__device__ inline u32 noise(u32 seed) {
    seed = (seed ^ 61) ^ (seed >> 16);
    seed *= 9;
    seed ^= seed >> 4;
    seed *= 0x27d4eb2d;
    return (seed ^ (seed >> 15)) & 0xbfbfbfbf;
}

// Writes a block's cycles: from the first warp's start to the last warp's end. Every thread calls it.
__device__ inline void tell(u64* cycles, u64 start, u64 end) {
    __shared__ u64 first, last;
    if (threadIdx.x == 0) first = ~0ull, last = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        atomicMin(&first, start);
        atomicMax(&last, end);
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = last - first;
}

// Keeps a result: it might be the one number that is stored, so it must be computed.
__device__ inline void keep(u32* sink, u32 value) {
    if (value == 0x9e3779b9) sink[threadIdx.x] = value;
}
