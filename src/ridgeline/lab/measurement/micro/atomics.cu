// Atomics on shared and on global memory, with many or few addresses, and in the scope of a block or of the GPU.
#include "micro.cuh"

// Each thread's value is its own, so that the compiler cannot add a warp's values first.
#define SHARED(NAME, TEXT)                                                                                            \
    extern "C" __global__ void NAME(u64* cycles, u32* sink, int addresses, int turns) {                               \
        __shared__ u32 cells[1024];                                                                                   \
        cells[threadIdx.x % 1024] = 0;                                                                                \
        __syncthreads();                                                                                              \
        u32 at = static_cast<u32>(__cvta_generic_to_shared(cells + threadIdx.x % addresses));                         \
        u32 value = threadIdx.x | 1, old = 0, sum = 0;                                                                \
        u64 start = ticks();                                                                                          \
        _Pragma("unroll 4") for (int turn = 0; turn < turns; ++turn) {                                                \
            asm volatile(TEXT : "+r"(old) : "r"(at), "r"(value) : "memory");                                          \
            sum ^= old;                                                                                               \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        u64 end = ticks();                                                                                            \
        keep(sink, sum + cells[threadIdx.x % 1024]);                                                                  \
        tell(cycles, start, end);                                                                                     \
    }
SHARED(shared_red_u32, "red.shared.add.u32 [%1], %2;")
SHARED(shared_atom_u32, "atom.shared.add.u32 %0, [%1], %2;")
SHARED(shared_red_f32, "{.reg .f32 f; cvt.rn.f32.u32 f, %2; red.shared.add.f32 [%1], f;}")
SHARED(shared_cas_u32, "atom.shared.cas.b32 %0, [%1], %2, %2;")

#define GLOBAL(NAME, TEXT)                                                                                            \
    extern "C" __global__ void NAME(u64* cycles, u32* sink, u32* cells, int addresses, int turns) {                   \
        const u32* at = cells + (blockIdx.x * blockDim.x + threadIdx.x) % addresses;                                  \
        u32 value = threadIdx.x | 1, old = 0, sum = 0;                                                                \
        u64 start = ticks();                                                                                          \
        _Pragma("unroll 4") for (int turn = 0; turn < turns; ++turn) {                                                \
            asm volatile(TEXT : "+r"(old) : "l"(at), "r"(value) : "memory");                                          \
            sum ^= old;                                                                                               \
        }                                                                                                             \
        u64 end = ticks();                                                                                            \
        keep(sink, sum);                                                                                              \
        tell(cycles, start, end);                                                                                     \
    }
GLOBAL(global_red_u32, "red.relaxed.gpu.global.add.u32 [%1], %2;")
GLOBAL(global_red_u32_block, "red.relaxed.cta.global.add.u32 [%1], %2;")
GLOBAL(global_atom_u32, "atom.relaxed.gpu.global.add.u32 %0, [%1], %2;")
GLOBAL(global_atom_u32_block, "atom.relaxed.cta.global.add.u32 %0, [%1], %2;")
GLOBAL(global_red_f32, "{.reg .f32 f; cvt.rn.f32.u32 f, %2; red.relaxed.gpu.global.add.f32 [%1], f;}")
GLOBAL(global_red_f16x2, "red.relaxed.gpu.global.add.noftz.f16x2 [%1], %2;")
GLOBAL(global_cas_u32, "atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %2;")
