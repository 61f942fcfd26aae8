// Instructions of one thread: `lat_OP` runs a chain of them, `rate_OP` eight chains in each of a block's threads.
#include "micro.cuh"

constexpr int LINKS = 256, CHAINS = 8, UNROLL = 32;

// Operations on 32-bit registers, whatever they hold. Two of a row must not fold into one.
#define OPERATION(NAME, TEXT)                                                                   \
    struct NAME {                                                                               \
        using T = u32;                                                                          \
        static __device__ void step(u32& x, u32 a, u32 b) {                                     \
            asm volatile(TEXT : "+r"(x) : "r"(a), "r"(b));                                      \
        }                                                                                       \
    };
#define OPERATION64(NAME, TEXT)                                                                 \
    struct NAME {                                                                               \
        using T = u64;                                                                          \
        static __device__ void step(u64& x, u64 a, u64 b) {                                     \
            asm volatile(TEXT : "+l"(x) : "l"(a), "l"(b));                                      \
        }                                                                                       \
    };
#define FLOATS(TEXT) "{.reg .f32 x,a,b; mov.b32 x,%0; mov.b32 a,%1; mov.b32 b,%2;" TEXT "mov.b32 %0,x;}"
#define DOUBLES(TEXT) "{.reg .f64 x,a,b; mov.b64 x,%0; mov.b64 a,%1; mov.b64 b,%2;" TEXT "mov.b64 %0,x;}"

OPERATION(add_f32, FLOATS("add.rn.f32 x,x,a;"))
OPERATION(mul_f32, FLOATS("mul.rn.f32 x,x,a;"))
OPERATION(fma_f32, FLOATS("fma.rn.f32 x,x,a,b;"))
OPERATION(fma_f16x2, "fma.rn.f16x2 %0,%0,%1,%2;")
OPERATION(fma_bf16x2, "fma.rn.bf16x2 %0,%0,%1,%2;")
OPERATION64(add_f64, DOUBLES("add.rn.f64 x,x,a;"))
OPERATION64(fma_f64, DOUBLES("fma.rn.f64 x,x,a,b;"))
OPERATION(add_s32, "add.u32 %0,%0,%1; add.u32 %0,%0,%2;")  // one IADD3
OPERATION(mul_s32, "mul.lo.u32 %0,%0,%1;")
OPERATION(mad_s32, "mad.lo.u32 %0,%0,%1,%2;")
OPERATION(shift_s32, "shf.l.wrap.b32 %0,%0,%1,%2;")
OPERATION(logic_b32, "lop3.b32 %0,%0,%1,%2,0x6a;")
OPERATION(min_s32, "min.s32 %0,%0,%1; max.s32 %0,%0,%2;")  // two instructions
OPERATION(popc_b32, "popc.b32 %0,%0;")
OPERATION(dp4a_s32, "dp4a.s32.s32 %0,%0,%1,%2;")
OPERATION(shuffle_b32, "shfl.sync.bfly.b32 %0,%0,1,31,0xffffffff;")
OPERATION(convert_s32, "{.reg .f32 x; mov.b32 x,%0; cvt.rni.s32.f32 %0,x;}")
OPERATION(ex2_f32, FLOATS("ex2.approx.ftz.f32 x,x;"))
OPERATION(lg2_f32, FLOATS("lg2.approx.ftz.f32 x,x;"))
// No reciprocal: two of a row cancel, and the compiler knows.
OPERATION(rsqrt_f32, FLOATS("rsqrt.approx.ftz.f32 x,x;"))
OPERATION(sin_f32, FLOATS("sin.approx.ftz.f32 x,x;"))  // a multiplication and the sine
OPERATION(tanh_f32, FLOATS("tanh.approx.f32 x,x;"))

template <class Op>
__device__ inline void latency(u64* cycles, u32* sink, int passes) {
    using T = typename Op::T;
    T x = noise(threadIdx.x), a = noise(passes), b = noise(passes + 1);
    u64 start = 0, end = 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {  // the first pass fills the instruction cache
        start = ticks();
#pragma unroll
        for (int link = 0; link < LINKS; ++link) Op::step(x, a, b);
        end = ticks();
    }
    keep(sink, u32(x));
    tell(cycles, start, end);
}

template <class Op>
__device__ inline void rate(u64* cycles, u32* sink, int turns) {
    using T = typename Op::T;
    T x[CHAINS], a = noise(turns), b = noise(turns + 1), sum = 0;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) x[chain] = noise(threadIdx.x * CHAINS + chain);
    __syncthreads();
    u64 start = ticks();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int step = 0; step < UNROLL; ++step)
#pragma unroll
            for (int chain = 0; chain < CHAINS; ++chain) Op::step(x[chain], a, b);
    }
    u64 end = ticks();
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) sum ^= x[chain];
    keep(sink, u32(sum));
    tell(cycles, start, end);
}

#define KERNELS(OP)                                                                                               \
    extern "C" __global__ void lat_##OP(u64* cycles, u32* sink, int passes) { latency<OP>(cycles, sink, passes); } \
    extern "C" __global__ void rate_##OP(u64* cycles, u32* sink, int turns) { rate<OP>(cycles, sink, turns); }

KERNELS(add_f32)
KERNELS(mul_f32)
KERNELS(fma_f32)
KERNELS(fma_f16x2)
KERNELS(fma_bf16x2)
KERNELS(add_f64)
KERNELS(fma_f64)
KERNELS(add_s32)
KERNELS(mul_s32)
KERNELS(mad_s32)
KERNELS(shift_s32)
KERNELS(logic_b32)
KERNELS(min_s32)
KERNELS(popc_b32)
KERNELS(dp4a_s32)
KERNELS(shuffle_b32)
KERNELS(convert_s32)
KERNELS(ex2_f32)
KERNELS(lg2_f32)
KERNELS(rsqrt_f32)
KERNELS(sin_f32)
KERNELS(tanh_f32)

// Spins for some cycles and counts the nanoseconds beside them: the clock's rate, and a kernel of a known length.
extern "C" __global__ void spin(u64* cycles, u32* sink, int least, u64* nanoseconds) {
    u64 begin, end, start = ticks(), now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
    do now = ticks();
    while (now - start < least);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end)::"memory");
    keep(sink, u32(end));
    if (threadIdx.x == 0) cycles[blockIdx.x] = now - start, nanoseconds[blockIdx.x] = end - begin;
}

extern "C" __global__ void nothing(u64* cycles, u32* sink) {}
