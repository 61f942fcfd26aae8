// Latency and bandwidth of shared memory, L1, L2 and DRAM; bank conflicts, strides, bytes in flight.
#include "micro.cuh"

#define KERNEL extern "C" __global__ void

__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ inline u32 fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
__device__ inline u32 fold(uint2 v) { return v.x ^ v.y; }
__device__ inline u32 fold(u32 v) { return v; }

// --- chases: each load's address is what the load before it read

KERNEL chase_shared(u64* cycles, u32* sink, int steps) {
    __shared__ u32 ring[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) ring[i] = shared_address(ring + (i + 33) % 1024);
    __syncthreads();
    u32 at = shared_address(ring);
    u64 start = ticks();
#pragma unroll 16
    for (int i = 0; i < steps; ++i) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at)::"memory");
    u64 end = ticks();
    keep(sink, at);
    tell(cycles, start, end);
}

// Each block of a pair reads the other's shared memory, by generic addresses: those of shared memory would need a sum.
KERNEL chase_cluster(u64* cycles, u32* sink, int steps) {
#if __CUDA_ARCH__ >= 900
    __shared__ u64 ring[1024];
    u32 rank;
    u64 mine, at;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.u64 %0, %1, %2;" : "=l"(mine) : "l"(ring), "r"(rank));
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(ring), "r"(rank ^ 1));
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) ring[i] = mine + (i + 33) % 1024 * 8;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    u64 start = ticks();
#pragma unroll 16
    for (int i = 0; i < steps; ++i) asm volatile("ld.u64 %0, [%0];" : "+l"(at)::"memory");
    u64 end = ticks();
    keep(sink, u32(at));
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    tell(cycles, start, end);
#endif
}

// Walks a ring of 64-bit addresses: `warm` steps, then `steps` of them timed. It goes on where the warming ended.
#define CHASE(NAME, CACHE)                                                                                     \
    KERNEL NAME(u64* cycles, u32* sink, const u64* ring, int warm, int steps) {            \
        u64 at = reinterpret_cast<u64>(ring);                                                                  \
        for (int i = 0; i < warm; ++i) asm volatile("ld.global." CACHE ".u64 %0, [%0];" : "+l"(at)::"memory"); \
        u64 start = ticks();                                                                                   \
        _Pragma("unroll 16") for (int i = 0; i < steps; ++i)                                                   \
            asm volatile("ld.global." CACHE ".u64 %0, [%0];" : "+l"(at)::"memory");                            \
        u64 end = ticks();                                                                                     \
        keep(sink, u32(at));                                                                                   \
        tell(cycles, start, end);                                                                              \
    }
CHASE(chase_l1, "ca")
CHASE(chase_l2, "cg")

// --- bandwidth

// Reads 32 KiB of shared memory, 16 bytes a thread, `turns` x 8 times.
KERNEL __launch_bounds__(1024) read_shared(u64* cycles, u32* sink, int turns) {
    __shared__ uint4 memory[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) memory[i] = make_uint4(i, noise(i), i, turns);
    __syncthreads();
    u32 at = shared_address(memory + threadIdx.x), sum = 0, other = 0;
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                         : "r"(at + i % 2 * 16384));
#pragma unroll
        for (int i = 0; i < 8; i += 2) sum ^= v[i].x ^ v[i].y, other ^= v[i].z ^ v[i + 1].w;
    }
    u64 end = ticks();
    keep(sink, sum + other);
    tell(cycles, start, end);
}

__device__ inline uint4 load_l1(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ inline uint4 load_l2(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// Each block of 512 threads reads its own 64 KiB again and again, 16 bytes a thread; the first time is not counted.
KERNEL __launch_bounds__(512) read_l1(u64* cycles, u32* sink, const uint4* data, int turns) {
    const uint4* mine = data + size_t(blockIdx.x) * 4096;
    u32 sum = 0, other = 0, at = threadIdx.x;
    for (int i = 0; i < 8; ++i) sum ^= fold(load_l1(mine + at + i * 512));
    __syncthreads();
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = load_l1(mine + at + i * 512);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = sum & v[i].x ^ v[i].y, other = other & v[i].z ^ v[i].w;
        at ^= 1;  // another address, so that no load is the same as one before
    }
    u64 end = ticks();
    keep(sink, sum + other);
    tell(cycles, start, end);
}

// All blocks read the same `window` vectors, each from another place on.
KERNEL __launch_bounds__(1024) read_l2(u64* cycles, u32* sink, const uint4* data, int window, int turns) {
    u32 sum = 0, step = blockDim.x;
    u32 at = (u64(blockIdx.x) * window / gridDim.x + threadIdx.x) % window;
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = load_l2(data + at);
            at = at + step < window ? at + step : at + step - window;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum ^= fold(v[i]);
    }
    u64 end = ticks();
    keep(sink, sum);
    tell(cycles, start, end);
}

// Streams `count` vectors (16 bytes): reads, writes or copies them once.
template <bool READ, bool WRITE>
__device__ inline void stream(u32* sink, const uint4* from, uint4* to, long long count) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    u32 sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * threads) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool inside = READ && i + k * threads < count;
            v[k] = inside ? load_l2(from + i + k * threads) : make_uint4(i, k, 0, 1);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (WRITE) {
                if (i + k * threads < count) to[i + k * threads] = v[k];
            } else
                sum ^= fold(v[k]);
    }
    if (!WRITE) keep(sink, sum);
}
KERNEL read_dram(u64* cycles, u32* sink, const uint4* from, uint4* to, long long count) {
    stream<true, false>(sink, from, to, count);
}
KERNEL write_dram(u64* cycles, u32* sink, const uint4* from, uint4* to, long long count) {
    stream<false, true>(sink, from, to, count);
}
KERNEL copy_dram(u64* cycles, u32* sink, const uint4* from, uint4* to, long long count) {
    stream<true, true>(sink, from, to, count);
}

// --- bank conflicts: the lanes of a warp read elements `stride` apart

template <class T>
struct Shared;
template <>
struct Shared<u32> {
    static __device__ u32 load(u32 at) {
        u32 v;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
        return v;
    }
};
template <>
struct Shared<uint2> {
    static __device__ uint2 load(u32 at) {
        uint2 v;
        asm volatile("ld.volatile.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
        return v;
    }
};
template <>
struct Shared<uint4> {
    static __device__ uint4 load(u32 at) {
        uint4 v;
        asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at));
        return v;
    }
};

template <class T>
__device__ inline void banks(u64* cycles, u32* sink, int stride, int turns) {
    extern __shared__ __align__(16) char memory[];
    T* elements = reinterpret_cast<T*>(memory);
    for (int i = threadIdx.x; i < (31 * stride + 1) * int(sizeof(T) / 4); i += blockDim.x)
        reinterpret_cast<u32*>(memory)[i] = noise(i);
    __syncthreads();
    u32 at = shared_address(elements + threadIdx.x % 32 * stride), sum = 0;
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        T v[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = Shared<T>::load(at);
#pragma unroll
        for (int i = 0; i < 16; ++i) sum ^= fold(v[i]);
    }
    u64 end = ticks();
    keep(sink, sum);
    tell(cycles, start, end);
}
KERNEL banks_4(u64* cycles, u32* sink, int stride, int turns) {
    banks<u32>(cycles, sink, stride, turns);
}
KERNEL banks_8(u64* cycles, u32* sink, int stride, int turns) {
    banks<uint2>(cycles, sink, stride, turns);
}
KERNEL banks_16(u64* cycles, u32* sink, int stride, int turns) {
    banks<uint4>(cycles, sink, stride, turns);
}

// --- coalescing: neighbouring threads read elements `stride` apart

template <class T>
__device__ inline void coalesce(u32* sink, const T* data, int stride, long long count) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    u32 sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * threads) {
        T v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = i + k * threads < count ? __ldcs(data + (i + k * threads) * stride) : T();
#pragma unroll
        for (int k = 0; k < 4; ++k) sum ^= fold(v[k]);
    }
    keep(sink, sum);
}
KERNEL coalesce_4(u64* cycles, u32* sink, const u32* data, int stride, long long count) {
    coalesce(sink, data, stride, count);
}
KERNEL coalesce_8(u64* cycles, u32* sink, const uint2* data, int stride, long long count) {
    coalesce(sink, data, stride, count);
}
KERNEL coalesce_16(u64* cycles, u32* sink, const uint4* data, int stride, long long count) {
    coalesce(sink, data, stride, count);
}

// --- Little's law: each thread has LOADS loads of 16 bytes in flight, and waits for all of them before the next ones

template <int LOADS>
__device__ inline void flight(u32* sink, const uint4* data, long long count) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    u32 sum = 0;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (; i + (LOADS - 1) * threads < count; i += LOADS * threads) {
        uint4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = load_l2(data + i + k * threads);
#pragma unroll
        for (int k = 0; k < LOADS; ++k) sum ^= fold(v[k]);
    }
    keep(sink, sum);
}
KERNEL __launch_bounds__(1024) flight_1(u64* cycles, u32* sink, const uint4* data, long long count) {
    flight<1>(sink, data, count);
}
KERNEL __launch_bounds__(1024) flight_2(u64* cycles, u32* sink, const uint4* data, long long count) {
    flight<2>(sink, data, count);
}
KERNEL __launch_bounds__(1024) flight_4(u64* cycles, u32* sink, const uint4* data, long long count) {
    flight<4>(sink, data, count);
}
