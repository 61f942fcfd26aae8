// Products of halves on the tensor cores, by a warp (wmma, mma) or four (wgmma), with float32 sums; and asynchronous
// copies of 16 bytes into shared memory that bypass registers.
#pragma once
#include "hopper.cuh"
#include <cuda_fp16.h>

// wmma: fragments of 16 x 16, whose register layout is opaque. Addresses are multiples of 32 bytes.
struct Fragment {
    unsigned at[8];
};

template <bool RIGHT>
__device__ inline Fragment wmma_load(const __half* from, int pitch) {
    Fragment f;
    if constexpr (RIGHT)
        asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                     : "=r"(f.at[0]), "=r"(f.at[1]), "=r"(f.at[2]), "=r"(f.at[3]), "=r"(f.at[4]), "=r"(f.at[5]),
                       "=r"(f.at[6]), "=r"(f.at[7])
                     : "r"(shared_address(from)), "r"(pitch)
                     : "memory");
    else
        asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                     : "=r"(f.at[0]), "=r"(f.at[1]), "=r"(f.at[2]), "=r"(f.at[3]), "=r"(f.at[4]), "=r"(f.at[5]),
                       "=r"(f.at[6]), "=r"(f.at[7])
                     : "r"(shared_address(from)), "r"(pitch)
                     : "memory");
    return f;
}

__device__ inline void wmma(float (&sum)[8], const Fragment& a, const Fragment& b) {
    asm volatile(
        "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(a.at[4]), "r"(a.at[5]), "r"(a.at[6]),
          "r"(a.at[7]), "r"(b.at[0]), "r"(b.at[1]), "r"(b.at[2]), "r"(b.at[3]), "r"(b.at[4]), "r"(b.at[5]),
          "r"(b.at[6]), "r"(b.at[7]));
}

__device__ inline void wmma_store(float* to, const float (&sum)[8], int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(
                     shared_address(to)),
                 "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]), "f"(sum[4]), "f"(sum[5]), "f"(sum[6]), "f"(sum[7]),
                 "r"(pitch)
                 : "memory");
}

// Rows of WIDE halves in shared memory. Their pieces of 16 bytes are permuted, so that eight rows' pieces of one column
// lie in 32 banks.
template <int WIDE>
struct Swizzled {
    static constexpr int PIECES = WIDE / 8 < 8 ? WIDE / 8 : 8, SHARE = 8 / PIECES;  // rows that share 128 bytes
    static __device__ int at(int row, int column) {
        return row * WIDE + ((column / 8 ^ row / SHARE % PIECES) * 8 + column % 8);
    }
};

// Four matrices of 8 x 8, from rows of 16 bytes at the lanes' addresses, eight each; TRANSPOSED if K runs down the
// rows.
template <bool TRANSPOSED>
__device__ inline void ldmatrix(unsigned (&to)[4], const __half* row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
}

// sum += a b: 16 x 16 by 16 x 8. A lane has rows lane / 4 and 8 below, columns 2 (lane % 4) and the next.
__device__ inline void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes.
__device__ inline void copy_ahead(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}
__device__ inline void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// wgmma reads both tiles from shared memory, in rows of 128 bytes that TMA has swizzled. `far`: bytes from 64 columns
// to the next 64, for a tile whose columns are contiguous; groups of eight rows are always 1024 bytes apart.
__device__ inline unsigned long long wgmma_tile(const void* tile, unsigned far) {
    return (shared_address(tile) & 0x3ffff) >> 4 | (unsigned long long)(far >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define FLOATS_8(x, i) \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), \
        "+f"(x[i + 7])
#define FLOATS_32(x, i) FLOATS_8(x, i), FLOATS_8(x, i + 8), FLOATS_8(x, i + 16), FLOATS_8(x, i + 24)
#define FLOATS_128(x) FLOATS_32(x, 0), FLOATS_32(x, 32), FLOATS_32(x, 64), FLOATS_32(x, 96)
#define NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 \
    NAMES_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_128 \
    NAMES_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Waits until all but the newest LEFT groups are done; the sums may be read only after a wait for all.
template <int LEFT>
__device__ inline void wgmma_wait(float (&sum)[128]) {
    if constexpr (LEFT == 0)
        asm volatile("wgmma.wait_group.sync.aligned 0;" : FLOATS_128(sum)::"memory");
    else
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The instruction for N columns of halves of a KIND, with the names of the operands after the sums; the sums come last.
#define WGMMA(N, KIND, NAMES, A, B, MORE, ACROSS_A, ACROSS_B, ...) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " MORE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." \
                 KIND "." KIND " {" NAMES "}, " A ", " B ", p, 1, 1, " ACROSS_A ", " ACROSS_B "; }" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(more), "n"(!LEFT_BY_K), "n"(!RIGHT_BY_K))
#define WGMMA_OF(KIND) \
    if constexpr (N == 256) \
        WGMMA("256", KIND, NAMES_128, "%128", "%129", "%130", "%131", "%132", FLOATS_128(sum)); \
    else if constexpr (N == 128) \
        WGMMA("128", KIND, NAMES_64, "%64", "%65", "%66", "%67", "%68", FLOATS_32(sum, 0), FLOATS_32(sum, 32)); \
    else \
        WGMMA("64", KIND, NAMES_32, "%32", "%33", "%34", "%35", "%36", FLOATS_32(sum, 0))

// sum = a b or, with `more`, sum += a b: 64 x 16 by 16 x N, whose lines lie along K (BY_K) or across it. Warp w has
// rows from 16 w on; its lanes have columns as in mma, 8 further for every four sums.
template <int N, bool BFLOAT, bool LEFT_BY_K, bool RIGHT_BY_K>
__device__ inline void wgmma(float (&sum)[N / 2], unsigned long long a, unsigned long long b, int more) {
    static_assert(N == 256 || N == 128 || N == 64);
    if constexpr (BFLOAT) {
        WGMMA_OF("bf16");
    } else {
        WGMMA_OF("f16");
    }
}
