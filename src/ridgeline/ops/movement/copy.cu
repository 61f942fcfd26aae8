// copy in CUDA C++: memory bandwidth, reached in four steps.
// Macros: UNIT the type that a thread moves at once; LOADS how many it loads before it stores one; CHUNK the bytes and
// STAGES the length of a ring.
#include "hopper.cuh"

#ifndef UNIT
#define UNIT char
#endif
#ifndef LOADS
#define LOADS 1
#endif

// One element per thread.
extern "C" __global__ void copy_units(UNIT* y, const UNIT* x, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

// LOADS units of 16 bytes (or what addresses allow) per thread, all loaded before the first is stored. Accesses
// coalesce. The first block also copies the bytes after the last whole unit.
extern "C" __global__ void copy_loads(UNIT* __restrict__ y, const UNIT* __restrict__ x, long long bytes) {
    const long long n = bytes / (long long)sizeof(UNIT), rest = n * sizeof(UNIT) + threadIdx.x;
    if (blockIdx.x == 0 && rest < bytes) reinterpret_cast<char*>(y)[rest] = reinterpret_cast<const char*>(x)[rest];
    const long long first = blockIdx.x * (long long)(blockDim.x * LOADS) + threadIdx.x;
    UNIT kept[LOADS];
    if (first + (LOADS - 1) * (long long)blockDim.x < n) {
#pragma unroll
        for (int k = 0; k < LOADS; ++k) kept[k] = x[first + k * (long long)blockDim.x];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) y[first + k * (long long)blockDim.x] = kept[k];
    } else
        for (long long i = first; i < n; i += blockDim.x) y[i] = x[i];
}

#if __CUDA_ARCH__ >= 900 && defined(STAGES)
// One thread per block issues bulk copies of chunks into a ring in shared memory, and stores each as soon as it
// arrives. No byte passes through a register. Pointers are multiples of 16; the block's other threads copy the last
// bytes, fewer than 16.
extern "C" __global__ void __launch_bounds__(32) copy_bulk(char* y, const char* x, long long bytes) {
    extern __shared__ __align__(128) char ring[];
    __shared__ Barrier full[STAGES];
    const long long whole = bytes / 16 * 16, chunks = (whole + CHUNK - 1) / CHUNK;
    if (blockIdx.x == 0 && threadIdx.x > 0 && whole + threadIdx.x - 1 < bytes)
        y[whole + threadIdx.x - 1] = x[whole + threadIdx.x - 1];
    if (threadIdx.x > 0) return;
    for (int s = 0; s < STAGES; ++s) barrier_init(&full[s]);
    barrier_init_done();
    const auto size = [&](long long chunk) { return (unsigned)min((long long)CHUNK, whole - chunk * CHUNK); };
    const auto load = [&](long long chunk, int s) {
        barrier_expect(&full[s], size(chunk));
        bulk_load(ring + s * CHUNK, x + chunk * CHUNK, size(chunk), &full[s]);
    };
    long long ahead = blockIdx.x;  // the next chunk to load
    for (int s = 0; s < STAGES && ahead < chunks; ++s, ahead += gridDim.x) load(ahead, s);
    int stage = 0, before = STAGES - 1;  // the stages of this chunk and of the one before
    unsigned phase = 0;
    for (long long chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        barrier_wait(&full[stage], phase);
        bulk_store(y + chunk * CHUNK, ring + stage * CHUNK, size(chunk));
        bulk_commit();
        if (chunk != blockIdx.x && ahead < chunks) {  // refill the previous chunk's stage once its store has read it
            bulk_stored<1>();
            load(ahead, before);
            ahead += gridDim.x;
        }
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    bulk_stored<0>();
}
#endif
