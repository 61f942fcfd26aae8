// sparse_matmul by mma.sp, from sm_80 on: y = x W^T + bias in half precision, sums in float32.
//
// The sparse operand is the left one, so a block computes a tile of W x^T: 128 rows of W by 128 rows of x. Both walk K
// in steps of 64 through a ring of STAGES, by asynchronous copies; a warp has 64 x 32. The tile turns in shared memory
// before it is stored. Values are read once, half of K wide, and their columns as eight bytes a row and step.
// With INT8, x and values are bytes: twice as many columns lie in the same tiles, and sums are int32. They are scaled
// by a number for each row of x and of W before they are rounded.
// Macros besides those of matrix.cuh: BFLOAT16, of the result; INT8; BIAS; STAGES; BAND, rows of tiles per band.
#include "matrix.cuh"
#include "sparse.cuh"

#if BFLOAT16
using T = __nv_bfloat16;
#else
using T = __half;
#endif
// DEPTH counts halves, of which K and its steps have 1 or 2 numbers each.
constexpr int SIDE = 128, DEPTH = 64, THREADS = 256, PITCH = SIDE + 8, BLOCKS = 1 + INT8;

struct Stage {
    __half values[SIDE * DEPTH / 2], x[SIDE * DEPTH];
    unsigned long long kept[BLOCKS][SIDE];
};
#if INT8
using Sum = int;
#else
using Sum = float;
#endif
static_assert(STAGES * sizeof(Stage) >= SIDE * PITCH * sizeof(T), "the tile turns in the ring");
extern __shared__ __align__(1024) char memory[];

// Copies a tile of SIDE rows of WIDE from (row, column) on. Rows past the last repeat it, columns past the last are 0.
template <int WIDE>
__device__ void ask(__half* to, const __half* from, long long pitch, int rows, int columns, int row, int column) {
#pragma unroll
    for (int i = 0; i < SIDE * WIDE / 8 / THREADS; ++i) {
        const int piece = i * THREADS + threadIdx.x, down = piece / (WIDE / 8), across = piece % (WIDE / 8) * 8;
        const bool inside = column + across < columns;
        const __half* here = from + min(row + down, rows - 1) * pitch + (inside ? column + across : 0);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         shared_address(to + Swizzled<WIDE>::at(down, across))),
                     "l"(__cvta_generic_to_global(here)), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

// Adds a warp's products over half a step: 64 rows of values from `row` on by 32 rows of x from `column` on.
template <int HALF>
__device__ void multiply(Sum (&sum)[4][4][4], const Stage& stage, int row, int column) {
    const int lane = threadIdx.x % 32;
    unsigned a[4][4], b[4][4], kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#if INT8
        kept[i] = kept_columns_of_bytes(stage.kept[HALF] + row + 16 * i);
#else
        kept[i] = kept_columns(stage.kept[0] + row + 16 * i);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i)
        ldmatrix<false>(a[i],
                        stage.values + Swizzled<32>::at(row + 16 * i + lane % 16, 16 * HALF + lane / 16 * 8));
#pragma unroll
    for (int j = 0; j < 4; ++j)
        ldmatrix<false>(b[j], stage.x + Swizzled<64>::at(column + 8 * j + lane % 8, 32 * HALF + lane / 8 * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#if INT8
            mma_sparse(sum[i][j], a[i], b[j], kept[i]);
#else
            mma_sparse<BFLOAT16, HALF>(sum[i][j], a[i], b[j], kept[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sparse_mma(T* y, const __half* x, const __half* values, const unsigned long long* metadata, const T* bias,
               const float* scale_x, const float* scale_w, int M, int N, int K) {
    Stage* ring = reinterpret_cast<Stage*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 4 * 64, column = warp % 4 * 32;
    const Place tile = place_of<SIDE, SIDE, BAND>(blockIdx.x, M, N);  // rows of x, and columns of y
    Sum sum[4][4][4] = {};
    int asked = 0;
    const int blocks = (K * BLOCKS + 63) / 64;  // of metadata; the last step may have one alone
    const auto next = [&] {
        if (const int k = asked * DEPTH; k < K) {
            Stage& to = ring[asked % STAGES];
            ask<DEPTH / 2>(to.values, values, K / 2, N, K / 2, tile.column, k / 2);
            ask<DEPTH>(to.x, x, K, M, K, tile.row, k);
            if (threadIdx.x < BLOCKS * SIDE) {
                const int block = min(asked * BLOCKS + (int)threadIdx.x / SIDE, blocks - 1), n = threadIdx.x % SIDE;
                const auto* from = metadata + (long long)block * N + min(tile.column + n, N - 1);
                asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                                 shared_address(to.kept[threadIdx.x / SIDE] + n)),
                             "l"(__cvta_generic_to_global(from))
                             : "memory");
            }
        }
        copy_group();  // empty groups too, so that copy_wait always counts the same number
        ++asked;
    };
    for (int s = 0; s < STAGES - 1; ++s) next();
    for (int step = 0; step * DEPTH < K; ++step) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        next();
        multiply<0>(sum, ring[step % STAGES], row, column);
        multiply<1>(sum, ring[step % STAGES], row, column);
    }
    copy_wait<0>();
    __syncthreads();
    T* board = reinterpret_cast<T*>(memory);  // rows of x by columns of y
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int down = 0; down < 2; ++down) {
            const int n = row + 16 * i + 8 * down + lane / 4;
            const bool inside = EVEN || tile.column + n < N;
            const float add = BIAS && inside ? to_float(bias[tile.column + n]) : 0;
            const float scale = INT8 && inside ? scale_w[tile.column + n] : 1;
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int l = 0; l < 2; ++l) {
                    const int m = column + 8 * j + lane % 4 * 2 + l;
                    float v = sum[i][j][2 * down + l];
                    if (INT8) v = v * scale_x[EVEN ? tile.row + m : min(tile.row + m, M - 1)] * scale;
                    from_float(v + add, board[m * PITCH + n]);
                }
        }
    __syncthreads();
    const Result<T> result{y, M, N};
#pragma unroll
    for (int i = 0; i < SIDE * SIDE / 8 / THREADS; ++i) {
        const int piece = i * THREADS + threadIdx.x, down = piece / (SIDE / 8), across = piece % (SIDE / 8) * 8;
        result.put(tile.row + down, tile.column + across,
                   *reinterpret_cast<const Pack<T, 8>*>(board + down * PITCH + across));
    }
}
