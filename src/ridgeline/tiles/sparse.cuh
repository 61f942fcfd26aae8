// Products with a left operand of which two in four are kept, on the tensor cores: by a warp (mma.sp, sm_80 and later)
// or by four (wgmma.sp, Hopper), with float32 sums.
//
// A lane gives the columns that were kept for two rows, lane / 4 and 8 below, in the halves of a word: two bits for
// each kept number, so 16 bits are 16 columns. Over 64 columns, lane % 4 has those from 16 (lane % 4) on. An
// instruction takes 32 columns, and its selector which two lanes of each four it reads: 0 and 1, or 2 and 3.
#pragma once
#include "mma.cuh"

// Bytes instead of halves are twice as many columns in the same place. A word is then 32 columns of one row, lane / 4
// for even lanes and 8 below for odd ones, and all lanes of each four are read.
// A lane's word over 64 columns, of rows of 8 bytes in shared memory that begin with the first of 16 rows.
__device__ inline unsigned kept_columns(const void* rows) {
    const int lane = threadIdx.x % 32;
    unsigned word;
    asm volatile("{ .reg .b16 low, high; ld.shared.b16 low, [%1]; ld.shared.b16 high, [%1 + 64]; "
                 "mov.b32 %0, {low, high}; }"
                 : "=r"(word)
                 : "r"(shared_address(rows) + lane / 4 * 8 + lane % 4 * 2)
                 : "memory");
    return word;
}

__device__ inline unsigned kept_columns_of_bytes(const void* rows) {
    const int lane = threadIdx.x % 32;
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];"
                 : "=r"(word)
                 : "r"(shared_address(rows) + (lane / 4 + lane % 2 * 8) * 8 + lane % 4 / 2 * 4)
                 : "memory");
    return word;
}

#define MMA_SP(KIND, HALF) \
    asm volatile( \
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, " \
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " HALF ";" \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(kept))

// sum += a b: 16 x 32, kept as 16 x 16, by 32 x 8. HALF: which 32 of the 64 columns that `kept` describes.
template <bool BFLOAT, int HALF>
__device__ inline void mma_sparse(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned kept) {
    if constexpr (BFLOAT && HALF)
        MMA_SP("bf16", "1");
    else if constexpr (BFLOAT)
        MMA_SP("bf16", "0");
    else if constexpr (HALF)
        MMA_SP("f16", "1");
    else
        MMA_SP("f16", "0");
}

// The same for bytes, 16 x 64 by 64 x 8.
__device__ inline void mma_sparse(int (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[4], unsigned kept) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(kept));
}

// A tile of rows of 64 bytes that TMA has swizzled within 64; groups of eight rows are 512 bytes apart.
__device__ inline unsigned long long wgmma_tile_64(const void* tile) {
    return (shared_address(tile) & 0x3ffff) >> 4 | 1ull << 16 | 32ull << 32 | 2ull << 62;
}

#define WGMMA_SP(N, KIND, NAMES, A, B, KEPT, HALF_, MORE, ...) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " MORE ", 0; wgmma.mma_async.sp.sync.aligned.m64n" N "k32.f32." \
                 KIND "." KIND " {" NAMES "}, " A ", " B ", " KEPT ", " HALF_ ", p, 1, 1, 0, 0; }" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(kept), "n"(HALF), "r"(more))
#define WGMMA_SP_OF(KIND) \
    if constexpr (N == 256) \
        WGMMA_SP("256", KIND, NAMES_128, "%128", "%129", "%130", "%131", "%132", FLOATS_128(sum)); \
    else if constexpr (N == 128) \
        WGMMA_SP("128", KIND, NAMES_64, "%64", "%65", "%66", "%67", "%68", FLOATS_32(sum, 0), FLOATS_32(sum, 32)); \
    else \
        WGMMA_SP("64", KIND, NAMES_32, "%32", "%33", "%34", "%35", "%36", FLOATS_32(sum, 0))

// sum = a b or, with `more`, sum += a b: 64 x 32, kept as 64 x 16, by 32 x N, both with lines along K. Warp w has rows
// from 16 w on, and gives their `kept`; sums lie as those of wgmma.
template <int N, bool BFLOAT, int HALF>
__device__ inline void wgmma_sparse(float (&sum)[N / 2], unsigned long long a, unsigned long long b, unsigned kept,
                                    int more) {
    static_assert(N == 256 || N == 128 || N == 64);
    if constexpr (BFLOAT) {
        WGMMA_SP_OF("bf16");
    } else {
        WGMMA_SP_OF("f16");
    }
}

#define INTS_8(x, i) \
    "+r"(x[i]), "+r"(x[i + 1]), "+r"(x[i + 2]), "+r"(x[i + 3]), "+r"(x[i + 4]), "+r"(x[i + 5]), "+r"(x[i + 6]), \
        "+r"(x[i + 7])
#define INTS_32(x, i) INTS_8(x, i), INTS_8(x, i + 8), INTS_8(x, i + 16), INTS_8(x, i + 24)
#define INTS_64(x, i) INTS_32(x, i), INTS_32(x, i + 32)
#define WGMMA_SP_BYTES(N, NAMES, A, B, KEPT, MORE, ...) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " MORE ", 0; wgmma.mma_async.sp.sync.aligned.m64n" N \
                 "k64.s32.s8.s8 {" NAMES "}, " A ", " B ", " KEPT ", 0, p; }" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(kept), "r"(more))

// The same for bytes, 64 x 64 by 64 x N.
template <int N>
__device__ inline void wgmma_sparse(int (&sum)[N / 2], unsigned long long a, unsigned long long b, unsigned kept,
                                    int more) {
    if constexpr (N == 256)
        WGMMA_SP_BYTES("256", NAMES_128, "%128", "%129", "%130", "%131", INTS_64(sum, 0), INTS_64(sum, 64));
    else if constexpr (N == 128)
        WGMMA_SP_BYTES("128", NAMES_64, "%64", "%65", "%66", "%67", INTS_64(sum, 0));
    else
        WGMMA_SP_BYTES("64", NAMES_32, "%32", "%33", "%34", "%35", INTS_32(sum, 0));
}
