// int4_linear for few rows of x: 4-bit codes go from global memory into registers, 16 bytes a lane, and from there into
// mma. No warp waits for another after x is in shared memory.
// Macros: XTYPE; STYPE, the scales' type; BFLOAT16; ZEROS; SHARED_BY, steps of 128 columns that share a scale;
// TILES, times 8 rows of x; WARPS, with 16 rows of W each.
#include "early.cuh"
#include "elementwise.cuh"
#include "mma.cuh"

constexpr int AHEAD = 4, ROWS = 8 * TILES;  // steps loaded at once; rows of x in shared memory
constexpr unsigned MAGIC = BFLOAT16 ? 0x4300 : 0x6400;  // 128 or 1024: the last bits of its fraction count by one
extern __shared__ __align__(16) uint4 packs[];

// Codes 0 and 4 of a word, minus their zero: exact.
__device__ inline unsigned pair_of(unsigned word, unsigned zero) {
    const unsigned raw = (word & 0x000f000f) | MAGIC * 0x10001;
#if BFLOAT16
    const __nv_bfloat162 v = __hsub2(reinterpret_cast<const __nv_bfloat162&>(raw),
                                     reinterpret_cast<const __nv_bfloat162&>(zero));
#else
    const __half2 v = __hsub2(reinterpret_cast<const __half2&>(raw), reinterpret_cast<const __half2&>(zero));
#endif
    return reinterpret_cast<const unsigned&>(v);
}

__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if BFLOAT16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma(sum, a, b0, b1);
#endif
}

__device__ inline uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(from)));
    return v;
}

// What a lane reads of its two rows of W, 8 apart, for some steps: 32 codes of each step. Its scales and zeros are
// those of the step of its place among the four lanes of a row.
struct Ahead {
    uint4 code[AHEAD][2];
    float scale[2];
    unsigned zero[2];
};

// Block (b, s) makes the sums of 16 WARPS rows of W and all rows of x over part s of K: parts (s, M, N). In a step of
// 128 columns lane c of a row has columns 32 c to 32 c + 31. The order of columns within a product is free, so words
// are cut where that is cheap: a product takes codes i, i + 4 and i + 1, i + 5 of a word, and x lies in shared memory
// in that order, for each step and word a row after the other.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    int4_mma(float* parts, const uint4* q, const STYPE* scale, const unsigned char* zero, const XTYPE* x, int M, int N,
             int K, long long x_row) {
    const int steps = K / 128, groups = steps / SHARED_BY;
    const int first = steps * blockIdx.y / gridDim.y, last = steps * (blockIdx.y + 1) / gridDim.y;
    const int lane = threadIdx.x % 32, c = lane % 4, top = (blockIdx.x * WARPS + threadIdx.x / 32) * 16 + lane / 4;
    const long long row[2] = {min(top, N - 1), min(top + 8, N - 1)};

    const auto load = [&](Ahead& to, int step) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (step + s < last) to.code[s][r] = load_once(q + row[r] * (steps * 4) + (step + s) * 4 + c);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long at = row[r] * groups + min(step + c, last - 1) / SHARED_BY;
            to.scale[r] = to_float(scale[at]);
            to.zero[r] = ZEROS ? zero[at] : 8;
        }
    };
    Ahead now, next;
    load(now, first);

    for (int n = 0; n < ROWS; ++n)
        for (int p = threadIdx.x; p < (last - first) * 16; p += WARPS * 32) {
            uint4 v = {0, 0, 0, 0};
            if (n < M) v = *reinterpret_cast<const uint4*>(x + n * x_row + first * 128 + p * 8);
            const uint4 turned = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                  __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
            packs[((p / 16 * 4 + p % 4) * ROWS + n) * 4 + p % 16 / 4] = turned;
        }
    __syncthreads();

    float total[TILES][4] = {};
    for (int step = first; step < last; step += AHEAD) {
        load(next, step + AHEAD);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            float by[2];
            unsigned minus[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                by[r] = __shfl_sync(~0u, now.scale[r], (lane & ~3) | s);
                const unsigned z = ZEROS ? __shfl_sync(~0u, now.zero[r], (lane & ~3) | s) : 8;
                minus[r] = (MAGIC + z) * 0x10001;
            }
            if (step + s >= last) break;
            float sum[TILES][4] = {};
            const unsigned* left = reinterpret_cast<const unsigned*>(&now.code[s][0]);
            const unsigned* right = reinterpret_cast<const unsigned*>(&now.code[s][1]);
            const uint4* at = packs + (step + s - first) * 16 * ROWS + lane;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const unsigned one[4] = {pair_of(left[w], minus[0]), pair_of(right[w], minus[1]),
                                         pair_of(left[w] >> 4, minus[0]), pair_of(right[w] >> 4, minus[1])};
                const unsigned other[4] = {pair_of(left[w] >> 8, minus[0]), pair_of(right[w] >> 8, minus[1]),
                                           pair_of(left[w] >> 12, minus[0]), pair_of(right[w] >> 12, minus[1])};
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const uint4 b = at[w * 4 * ROWS + t * 32];
                    multiply(sum[t], one, b.x, b.y);
                    multiply(sum[t], other, b.z, b.w);
                }
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[t][i] = fmaf(sum[t][i], by[i / 2], total[t][i]);
        }
        now = next;
    }
    let_next_come();
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 8 * t + 2 * c + i % 2, m = top + i / 2 * 8;
            if (n < M && m < N) parts[((long long)blockIdx.y * M + n) * N + m] = total[t][i];
        }
}
