// Matrix instructions: `lat_` runs a chain of them in one warp or warpgroup, `rate_` several chains in each.
#include "micro.cuh"

// --- mma.sync, of one warp. Operands are d += a b in registers.

template <class D, int D_, class A, int A_, int B_>
struct Fragments {
    D d[D_];
    A a[A_], b[B_];
    __device__ void fill(u32 seed) {
        for (int i = 0; i < D_; ++i) d[i] = 0;
        for (int i = 0; i < A_; ++i) a[i] = A(noise(seed + i));
        for (int i = 0; i < B_; ++i) b[i] = A(noise(seed + 9 + i));
    }
    __device__ u32 fold() const {
        D sum = 0;
        for (int i = 0; i < D_; ++i) sum += d[i];
        return u32(sum);
    }
};

#define MMA_442(NAME, TYPE, C, TEXT)                                                                          \
    struct NAME : Fragments<TYPE, 4, u32, 4, 2> {                                                             \
        __device__ void step() {                                                                              \
            asm volatile("mma.sync.aligned." TEXT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"    \
                         : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                 \
        }                                                                                                     \
    };
#define MMA_421(NAME, TYPE, C, TEXT)                                                                          \
    struct NAME : Fragments<TYPE, 4, u32, 2, 1> {                                                             \
        __device__ void step() {                                                                              \
            asm volatile("mma.sync.aligned." TEXT " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"             \
                         : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(b[0]));                                                  \
        }                                                                                                     \
    };
MMA_442(m16n8k16_f16_f32, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MMA_421(m16n8k8_f16_f32, float, "f", "m16n8k8.row.col.f32.f16.f16.f32")
MMA_442(m16n8k16_bf16_f32, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_442(m16n8k8_tf32_f32, float, "f", "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_421(m16n8k4_tf32_f32, float, "f", "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_442(m16n8k32_s8_s32, u32, "r", "m16n8k32.row.col.s32.s8.s8.s32")
#if __CUDA_ARCH__ >= 890
MMA_442(m16n8k32_e4m3_f32, float, "f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
#endif
struct m16n8k16_f16_f16 : Fragments<u32, 2, u32, 4, 2> {
    __device__ void step() {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                     : "+r"(d[0]), "+r"(d[1])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
struct m8n8k4_f64_f64 : Fragments<double, 2, double, 1, 1> {
    __device__ void step() {
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+d"(d[0]), "+d"(d[1])
                     : "d"(a[0]), "d"(b[0]));
    }
};
#if __CUDA_ARCH__ >= 900
struct m16n8k8_f64_f64 : Fragments<double, 4, double, 4, 2> {
    __device__ void step() {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                     : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
    }
};
#endif

template <class M, int CHAINS, int STEPS>
__device__ inline void products(u64* cycles, u32* sink, int turns) {
    M m[CHAINS];
    u32 sum = 0;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) m[chain].fill(threadIdx.x * 97 + chain);
    __syncthreads();
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int chain = 0; chain < CHAINS; ++chain) m[chain].step();
    }
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) sum ^= m[chain].fold();
    keep(sink, sum);
    u64 end = ticks();
    tell(cycles, start, end);
}

#define KERNELS(M)                                                                                                     \
    extern "C" __global__ void lat_##M(u64* cycles, u32* sink, int turns) { products<M, 1, 16>(cycles, sink, turns); } \
    extern "C" __global__ void rate_##M(u64* cycles, u32* sink, int turns) { products<M, 4, 4>(cycles, sink, turns); }

KERNELS(m16n8k16_f16_f32)
KERNELS(m16n8k8_f16_f32)
KERNELS(m16n8k16_f16_f16)
KERNELS(m16n8k16_bf16_f32)
KERNELS(m16n8k8_tf32_f32)
KERNELS(m16n8k4_tf32_f32)
KERNELS(m16n8k32_s8_s32)
KERNELS(m8n8k4_f64_f64)
#if __CUDA_ARCH__ >= 900
KERNELS(m16n8k8_f64_f64)
#endif
#if __CUDA_ARCH__ >= 890
KERNELS(m16n8k32_e4m3_f32)
#endif

// --- wgmma, of a warpgroup: a (64 rows) and b from shared memory, or a from registers. PTX keeps the accumulators.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Lists of accumulators d100, d101, ...: eight in E, and 4 to 128 of them in D4 to D128.
#define E(t) "d" #t "0,d" #t "1,d" #t "2,d" #t "3,d" #t "4,d" #t "5,d" #t "6,d" #t "7"
#define D4 "d100,d101,d102,d103"
#define D8 E(10)
#define D16 D8 "," E(11)
#define D32 D16 "," E(12) "," E(13)
#define D64 D32 "," E(14) "," E(15) "," E(16) "," E(17)
#define D128 D64 "," E(18) "," E(19) "," E(20) "," E(21) "," E(22) "," E(23) "," E(24) "," E(25)
// The same for an instruction on each, OP "s,s,d": they all end in s.
#define F(OP, t) OP "s,s,d" #t "0;" OP "s,s,d" #t "1;" OP "s,s,d" #t "2;" OP "s,s,d" #t "3;" \
                 OP "s,s,d" #t "4;" OP "s,s,d" #t "5;" OP "s,s,d" #t "6;" OP "s,s,d" #t "7;"
#define S4(OP) OP "s,s,d100;" OP "s,s,d101;" OP "s,s,d102;" OP "s,s,d103;"
#define S8(OP) F(OP, 10)
#define S16(OP) S8(OP) F(OP, 11)
#define S32(OP) S16(OP) F(OP, 12) F(OP, 13)
#define S64(OP) S32(OP) F(OP, 14) F(OP, 15) F(OP, 16) F(OP, 17)
#define S128(OP) S64(OP) F(OP, 18) F(OP, 19) F(OP, 20) F(OP, 21) F(OP, 22) F(OP, 23) F(OP, 24) F(OP, 25)

#define SHARED_A "a"
#define REGISTERS_A "{%5,%6,%7,%8}"
#define WGMMA(TEXT, D, A, B, P, TAIL) "wgmma.mma_async.sync.aligned." TEXT "{" D "}," A "," B "," P TAIL ";"
#define COMMIT "wgmma.commit_group.sync.aligned;"
#define FENCE "wgmma.fence.sync.aligned;"
#define WAIT "wgmma.wait_group.sync.aligned 0;"

// A loop around BODY, which reads the descriptors a and b. The first instruction clears the accumulators.
#define LOOP(REG, FIRST, BODY, SUM)                                                                              \
    asm volatile("{.reg ." REG " d<260>; .reg ." REG " s; .reg .pred no, yes, more; .reg .b64 a, b, b1, b2, b3, t;" \
                 ".reg .s32 i; setp.ne.s32 no, 0, 0; setp.eq.s32 yes, 0, 0; mov.b64 a, %2; mov.b64 b, %3;"       \
                 "add.u64 b1, b, 2; add.u64 b2, b, 4; add.u64 b3, b, 6; mov.s32 i, %4; mov.b32 s, 0;"            \
                 FENCE FIRST COMMIT WAIT "mov.u64 %0, %%clock64;\n"                                              \
                 "again: " FENCE BODY COMMIT WAIT "sub.s32 i, i, 1; setp.gt.s32 more, i, 0; @more bra again;\n"  \
                 "mov.u64 t, %%clock64;" SUM "sub.u64 %0, t, %0; mov.b32 %1, s;}"                                \
                 : "=l"(time), "=r"(sum)                                                                         \
                 : "l"(a), "l"(b), "r"(turns), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])                        \
                 : "memory")

#define WARPGROUP(NAME, REG, TEXT, D, S, A, TAIL)                                                                      \
    template <bool RATE>                                                                                               \
    __device__ inline void NAME(u64* cycles, u32* sink, int turns) {                                                   \
        __shared__ __align__(1024) u32 tile[(64 + 256) * 32];  /* rows of 128 bytes, swizzled */                   \
        for (int i = threadIdx.x; i < sizeof(tile) / 4; i += blockDim.x) tile[i] = noise(i);                           \
        u32 x[4] = {noise(threadIdx.x), noise(threadIdx.x + 1), noise(threadIdx.x + 2), noise(threadIdx.x + 3)}, sum;  \
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                   \
        __syncthreads();                                                                                               \
        const u64 layout = 1ull << 62 | 64ull << 32 | 1ull << 16;                                                      \
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(tile));                                               \
        u64 a = layout | (at >> 4), b = layout | (at + 8192 >> 4), time;                                               \
        if constexpr (RATE)                                                                                            \
            LOOP(REG, WGMMA(TEXT, D, A, "b", "no", TAIL),                                                              \
                 WGMMA(TEXT, D, A, "b", "yes", TAIL) WGMMA(TEXT, D, A, "b1", "yes", TAIL)                              \
                 WGMMA(TEXT, D, A, "b2", "yes", TAIL) WGMMA(TEXT, D, A, "b3", "yes", TAIL)                             \
                 WGMMA(TEXT, D, A, "b", "yes", TAIL) WGMMA(TEXT, D, A, "b1", "yes", TAIL)                              \
                 WGMMA(TEXT, D, A, "b2", "yes", TAIL) WGMMA(TEXT, D, A, "b3", "yes", TAIL), S);                        \
        else                                                                                                           \
            LOOP(REG, WGMMA(TEXT, D, A, "b", "no", TAIL), WGMMA(TEXT, D, A, "b", "yes", TAIL), S);                     \
        keep(sink, sum);                                                                                               \
        tell(cycles, 0, time);                                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) lat_##NAME(u64* cycles, u32* sink, int turns) {                  \
        NAME<false>(cycles, sink, turns);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) rate_##NAME(u64* cycles, u32* sink, int turns) {                 \
        NAME<true>(cycles, sink, turns);                                                                               \
    }

#define HALF ",1,1,0,0"  // scales of a and b, and that neither is transposed
#define OTHER ",1,1"
#define ADD_F "add.f32 "
#define ADD_I "add.s32 "

WARPGROUP(m64n8k16_bf16_f32, "f32", "m64n8k16.f32.bf16.bf16", D4, S4(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n16k16_bf16_f32, "f32", "m64n16k16.f32.bf16.bf16", D8, S8(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n32k16_bf16_f32, "f32", "m64n32k16.f32.bf16.bf16", D16, S16(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n64k16_bf16_f32, "f32", "m64n64k16.f32.bf16.bf16", D32, S32(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n128k16_bf16_f32, "f32", "m64n128k16.f32.bf16.bf16", D64, S64(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n256k16_bf16_f32, "f32", "m64n256k16.f32.bf16.bf16", D128, S128(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n64k16_bf16_f32_registers, "f32", "m64n64k16.f32.bf16.bf16", D32, S32(ADD_F), REGISTERS_A, ",1,1,0")
WARPGROUP(m64n256k16_bf16_f32_registers, "f32", "m64n256k16.f32.bf16.bf16", D128, S128(ADD_F), REGISTERS_A, ",1,1,0")
WARPGROUP(m64n256k16_f16_f32, "f32", "m64n256k16.f32.f16.f16", D128, S128(ADD_F), SHARED_A, HALF)
WARPGROUP(m64n256k16_f16_f16, "b32", "m64n256k16.f16.f16.f16", D64, S64(ADD_I), SHARED_A, HALF)
WARPGROUP(m64n256k8_tf32_f32, "f32", "m64n256k8.f32.tf32.tf32", D128, S128(ADD_F), SHARED_A, OTHER)
WARPGROUP(m64n256k32_e4m3_f32, "f32", "m64n256k32.f32.e4m3.e4m3", D128, S128(ADD_F), SHARED_A, OTHER)
WARPGROUP(m64n256k32_s8_s32, "b32", "m64n256k32.s32.s8.s8", D128, S128(ADD_I), SHARED_A, "")
#endif
