// hgemm: y = a b in float16 with float32 sums: four kernels, each faster than the last for one reason.
// Macros besides those of matrix.cuh: RUNG, which kernel is compiled; for the last two BN and BK, a tile's columns and
// its step along K; STAGES, tiles in flight; BAND, rows of tiles per band.
#include "matrix.cuh"
#include "mma.cuh"

using Operand = Matrix<__half>;
using Sums = Result<__half>;
constexpr int THREADS = 256;
extern __shared__ __align__(1024) char memory[];

#define HGEMM(name, blocks) \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) \
        name(__half* y, const __half* a, const __half* b, int M, int N, int K, long long a_m, long long b_k)

#if RUNG == 1
// A warp has 32 x 64 of a tile of 128 x 128, in fragments of 16 x 16. Rows in shared memory have 16 bytes of padding,
// so that they begin in different banks.
HGEMM(hgemm_wmma, 1 + EVEN) {
    constexpr int SIDE = 128, WINDOW = 32, A = WINDOW + 8, B = SIDE + 8;
    __shared__ __align__(128) __half left[SIDE * A], right[WINDOW * B];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 32, column = warp % 2 * 64;
    const Place tile = place_of<SIDE, SIDE, 1>(blockIdx.x, M, N);
    float sum[2][4][8] = {};
    for (int start = 0; start < K; start += WINDOW) {
        load<Rows<A>, SIDE, WINDOW, 8, THREADS>(left, Operand{a, a_m, M, K}, tile.row, start);
        load<Rows<B>, WINDOW, SIDE, 8, THREADS>(right, Operand{b, b_k, K, N}, start, tile.column);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < WINDOW; k += 16) {
            const Fragment u[2] = {wmma_load<false>(left + row * A + k, A),
                                   wmma_load<false>(left + (row + 16) * A + k, A)};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const Fragment v = wmma_load<true>(right + k * B + column + 16 * j, B);
#pragma unroll
                for (int i = 0; i < 2; ++i) wmma(sum[i][j], u[i], v);
            }
        }
        __syncthreads();
    }
    // Only wmma_store knows a fragment's layout: results go through shared memory, 16 x 16 per warp at a time.
    float* mine = reinterpret_cast<float*>(left) + warp * 256;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            wmma_store(mine, sum[i][j], 16);
            __syncwarp();
            Pack<__half, 8> pack;
#pragma unroll
            for (int l = 0; l < 8; ++l) from_float(mine[lane * 8 + l], pack.at[l]);
            Sums{y, M, N}.put(tile.row + row + 16 * i + lane / 2, tile.column + column + 16 * j + lane % 2 * 8, pack);
            __syncwarp();
        }
}
#endif

// Adds a warp's ROWS x COLUMNS of a product over DEPTH of K; left and right (DEPTH x WIDE) are swizzled.
template <int DEPTH, int WIDE, int ROWS, int COLUMNS>
__device__ void multiply(float (&sum)[ROWS / 16][COLUMNS / 8][4], const __half* left, const __half* right, int row,
                         int column) {
    const int down = threadIdx.x % 16, across = threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        unsigned u[ROWS / 16][4], v[COLUMNS / 16][4];
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
            ldmatrix<false>(u[i], left + Swizzled<DEPTH>::at(row + 16 * i + down, k + across));
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j)
            ldmatrix<true>(v[j], right + Swizzled<WIDE>::at(k + down, column + 16 * j + across));
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) mma(sum[i][j], u[i], v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1]);
    }
}

// Stores two neighbours of a row, and the two that are 8 rows below.
__device__ void put_quad(const Sums& y, int row, int column, const float* sum) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Pack<__half, 2> pack;
        from_float(sum[2 * i], pack.at[0]);
        from_float(sum[2 * i + 1], pack.at[1]);
        y.put(row + 8 * i, column, pack);
    }
}

template <int ROWS, int COLUMNS>
__device__ void put_warp(const Sums& y, int row, int column, const float (&sum)[ROWS][COLUMNS][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            put_quad(y, row + 16 * i + lane / 4, column + 8 * j + lane % 4 * 2, sum[i][j]);
}

#if RUNG == 2
// A warp has 64 x 32 of a tile of 128 x 128, without padding.
HGEMM(hgemm_mma, 1 + EVEN) {
    constexpr int SIDE = 128, WINDOW = 32;
    __shared__ __align__(128) __half left[SIDE * WINDOW], right[WINDOW * SIDE];
    const int warp = threadIdx.x / 32, row = warp / 4 * 64, column = warp % 4 * 32;
    const Place tile = place_of<SIDE, SIDE, 1>(blockIdx.x, M, N);
    float sum[4][4][4] = {};
    for (int start = 0; start < K; start += WINDOW) {
        load<Swizzled<WINDOW>, SIDE, WINDOW, 8, THREADS>(left, Operand{a, a_m, M, K}, tile.row, start);
        load<Swizzled<SIDE>, WINDOW, SIDE, 8, THREADS>(right, Operand{b, b_k, K, N}, start, tile.column);
        __syncthreads();
        multiply<WINDOW, SIDE, 64, 32>(sum, left, right, row, column);
        __syncthreads();
    }
    put_warp(Sums{y, M, N}, tile.row + row, tile.column + column, sum);
}
#endif

#if RUNG == 3
// Copies TALL x WIDE of a matrix from its first element on, with zeros beyond its edges.
template <int TALL, int WIDE>
__device__ void ask(__half* to, const Operand& m) {
#pragma unroll
    for (int i = 0; i < TALL * WIDE / 8 / THREADS; ++i) {
        const int piece = i * THREADS + threadIdx.x, row = piece / (WIDE / 8), column = piece % (WIDE / 8) * 8;
        const int inside = EVEN ? 8 : row < m.rows ? max(0, min(8, m.columns - column)) : 0;
        __half *const there = to + Swizzled<WIDE>::at(row, column);
        const __half *const here = m.at + row * m.stride + column;
        if (inside == 8)
            copy_ahead(there, here);
        else
#pragma unroll
            for (int j = 0; j < 8; ++j) there[j] = j < inside ? here[j] : __half(0.0f);
    }
}

// A ring of STAGES tiles of 128 x BK and BK x BN; a warp has 64 x BN / 4.
HGEMM(hgemm_stages, 1) {
    constexpr int BM = 128, LEFT = BM * BK, RIGHT = BK * BN;
    __half* ring = reinterpret_cast<__half*>(memory);
    const int warp = threadIdx.x / 32, row = warp / 4 * 64, column = warp % 4 * (BN / 4);
    const Place tile = place_of<BM, BN, BAND>(blockIdx.x, M, N);
    Operand as = Operand{a, a_m, M, K}.from(tile.row, 0), bs = Operand{b, b_k, K, N}.from(0, tile.column);
    float sum[4][BN / 32][4] = {};
    int asked = 0;
    const auto next = [&] {
        if (asked * BK < K) {
            __half* to = ring + asked % STAGES * (LEFT + RIGHT);
            ask<BM, BK>(to, as);
            ask<BK, BN>(to + LEFT, bs);
            as = as.from(0, BK), bs = bs.from(BK, 0);
        }
        copy_group();  // empty groups too, so that copy_wait always counts the same number
        ++asked;
    };
    for (int s = 0; s < STAGES - 1; ++s) next();
    for (int step = 0; step * BK < K; ++step) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        next();
        const __half* here = ring + step % STAGES * (LEFT + RIGHT);
        multiply<BK, BN, 64, BN / 4>(sum, here, here + LEFT, row, column);
    }
    put_warp(Sums{y, M, N}, tile.row + row, tile.column + column, sum);
}
#endif

#if RUNG == 4
// Persistent blocks take tiles of 128 x 256 in turn. One warp loads up to STAGES tiles ahead with TMA. Two warpgroups
// multiply 64 rows each and release the stages that they have read. While they store, the next tile's stages fill.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    hgemm_wgmma(__half* y, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, int M, int N,
                int K) {
    constexpr int BM = 128, DEPTH = 64, LEFT = BM * DEPTH, RIGHT = DEPTH * 256, BOX = DEPTH * 64;
    __shared__ Barrier full[STAGES], empty[STAGES];
    __half* ring = reinterpret_cast<__half*>((reinterpret_cast<unsigned long long>(memory) + 1023) / 1024 * 1024);
    const int tiles = (M + BM - 1) / BM * ((N + 255) / 256), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s);
            barrier_init(empty + s, 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    unsigned turn = 0;  // counts stages over all tiles
    if (warp == 8) {
        if (lane) return;
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const Place tile = place_of<BM, 256, BAND>(t, M, N);
            for (int k = 0; k < K; k += DEPTH, ++turn) {
                const unsigned stage = turn % STAGES;
                barrier_wait(empty + stage, turn / STAGES & 1 ^ 1);
                barrier_expect(full + stage, (LEFT + RIGHT) * sizeof(__half));
                __half* to = ring + stage * (LEFT + RIGHT);
                tensor_load(to, a, tile.row, k, full + stage);
                for (int j = 0; j < 4; ++j) tensor_load(to + LEFT + j * BOX, b, k, tile.column + 64 * j, full + stage);
            }
        }
        return;
    }
    float sum[128];
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        for (int k = 0; k < K; k += DEPTH, ++turn) {
            const unsigned stage = turn % STAGES;
            const __half* here = ring + stage * (LEFT + RIGHT);
            const unsigned long long left = wgmma_tile(here + warp / 4 * (LEFT / 2), 16),
                                     right = wgmma_tile(here + LEFT, BOX * 2);
            barrier_wait(full + stage, turn / STAGES & 1);
            wgmma_begin();
#pragma unroll
            for (int j = 0; j < DEPTH / 16; ++j)  // 32 bytes along a's rows, 16 rows of b
                wgmma<256, false, true, false>(sum, left + j * 2, right + j * 128, k + j);
            wgmma_group();
            wgmma_wait<1>(sum);
            if (k && lane == 0) barrier_arrive(empty + (turn - 1) % STAGES);
        }
        wgmma_wait<0>(sum);
        if (lane == 0) barrier_arrive(empty + (turn - 1) % STAGES);
        const Place tile = place_of<BM, 256, BAND>(t, M, N);
#pragma unroll
        for (int j = 0; j < 32; ++j)
            put_quad(Sums{y, M, N}, tile.row + warp * 16 + lane / 4, tile.column + 8 * j + lane % 4 * 2, sum + 4 * j);
    }
}
#endif
