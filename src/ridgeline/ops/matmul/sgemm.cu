// sgemm: y = a b in float32 without tensor cores: nine kernels, each faster than the last for one reason.
// Macros besides those of matrix.cuh: RUNG, which kernel is compiled. v1: STRIP, how much of K is in shared memory. v9:
// GM and GN, for 4 GM x 4 GN sums per thread; BK, the step along K; BLOCKS per multiprocessor; BAND, rows of tiles per
// band.
#include "matrix.cuh"

using Left = Matrix<float>;
using Right = Matrix<float>;
constexpr int THREADS = 256;  // 16 x 16 of them, except in v9
extern __shared__ __align__(16) float memory[];

#define SGEMM(name, blocks) \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) \
        name(float* y, const float* a, const float* b, int M, int N, int K, long long a_m, long long b_k)
#define MATRICES Left{a, a_m, M, K}, Right{b, b_k, K, N}, Result<float>{y, M, N}

// v1 to v4. A thread computes WORK x WORK results, 16 apart. WINDOW of K at a time is in shared memory, loaded by packs
// of P.
template <int WINDOW, int WORK, int P>
__device__ void windows(Left a, Right b, Result<float> y, float* left, float* right) {
    constexpr int SIDE = 16 * WORK;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const Place tile = place_of<SIDE, SIDE, 1>(blockIdx.x, y.rows, y.columns);
    float sum[WORK][WORK] = {};
    for (int start = 0; start < a.columns; start += WINDOW) {
        load<Rows<WINDOW>, SIDE, WINDOW, P, THREADS>(left, a, tile.row, start);
        load<Rows<SIDE>, WINDOW, SIDE, P, THREADS>(right, b, start, tile.column);
        __syncthreads();
        const int count = EVEN ? WINDOW : min(WINDOW, a.columns - start);
#pragma unroll 8
        for (int k = 0; k < count; ++k)
#pragma unroll
            for (int i = 0; i < WORK; ++i)
#pragma unroll
                for (int j = 0; j < WORK; ++j)
                    sum[i][j] += left[(ty + 16 * i) * WINDOW + k] * right[k * SIDE + tx + 16 * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < WORK; ++i)
#pragma unroll
        for (int j = 0; j < WORK; ++j)
            y.put(tile.row + ty + 16 * i, tile.column + tx + 16 * j, Pack<float, 1>{sum[i][j]});
}

#if RUNG == 1
SGEMM(sgemm_v1, 1) { windows<STRIP, 1, 1>(MATRICES, memory, memory + 16 * STRIP); }
#endif

#if RUNG == 2
SGEMM(sgemm_v2, 8) {
    __shared__ float left[16 * 16], right[16 * 16];
    windows<16, 1, 1>(MATRICES, left, right);
}
#endif

#if RUNG == 3
SGEMM(sgemm_v3, 6) {
    __shared__ float left[32 * 32], right[32 * 32];
    windows<32, 2, 1>(MATRICES, left, right);
}
#endif

#if RUNG == 4
SGEMM(sgemm_v4, 6) {
    __shared__ __align__(16) float left[32 * 32], right[32 * 32];
    windows<32, 2, 4>(MATRICES, left, right);
}
#endif

// The matrix from this thread's pack on, in a rectangle of WIDE columns with a pack per thread; and its place in shared
// memory.
template <int WIDE>
__device__ Matrix<float> own(const Matrix<float>& m) {
    return m.from(threadIdx.x * 4 / WIDE, threadIdx.x * 4 % WIDE);
}
__device__ Pack<float, 4>* packs(float* tile) { return reinterpret_cast<Pack<float, 4>*>(tile) + threadIdx.x; }

// v5. A thread has four neighbours of a row and reads four numbers of a along K at once. It reads b one number at a
// time, and neighbouring threads read 4 columns apart: a 2-way bank conflict. `volatile` keeps the compiler from
// joining neighbours, which is v7's step.
#if RUNG == 5
SGEMM(sgemm_v5, 3) {
    constexpr int SIDE = 64, WINDOW = 16;
    __shared__ __align__(16) float left[SIDE * WINDOW], right[WINDOW * SIDE];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const Place tile = place_of<SIDE, SIDE, 1>(blockIdx.x, M, N);
    Left as = own<WINDOW>(Left{a, a_m, M, K}.from(tile.row, 0));
    Right bs = own<SIDE>(Right{b, b_k, K, N}.from(0, tile.column));
    Pack<float, 4> sum[4] = {};
    for (int start = 0; start < K; start += WINDOW) {
        *packs(left) = fetch<4>(as, 0, 0);
        *packs(right) = fetch<4>(bs, 0, 0);
        as = as.from(0, WINDOW), bs = bs.from(WINDOW, 0);
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < WINDOW; k += 4) {
            float piece[4][4];
#pragma unroll
            for (int l = 0; l < 4; ++l)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    piece[l][j] = static_cast<const volatile float*>(right)[(k + l) * SIDE + 4 * tx + j];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const auto row = reinterpret_cast<const Pack<float, 4>&>(left[(ty + 16 * i) * WINDOW + k]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int l = 0; l < 4; ++l) sum[i].at[j] += row.at[l] * piece[l][j];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) Result<float>{y, M, N}.put(tile.row + ty + 16 * i, tile.column + 4 * tx, sum[i]);
}
#endif

// Reads COUNT numbers from shared memory, by ones or fours, STEP apart.
template <int P, int COUNT, int STEP>
__device__ void gather(float (&to)[COUNT], const float* from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += P)
        reinterpret_cast<Pack<float, P>&>(to[i]) = *reinterpret_cast<const Pack<float, P>*>(from + i / P * STEP);
}

template <int ROWS, int COLUMNS>
__device__ void add_product(float (&sum)[ROWS][COLUMNS], const float (&left)[ROWS], const float (&right)[COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sum[i][j] += left[i] * right[j];
}

// Stores a thread's pack of a row of a as four numbers of a column: a's tile is transposed, PITCH from one k to the
// next. A warp has two packs of each of 16 rows; a PITCH of 4 more than a multiple of 32 spreads them over 32 banks.
template <int PITCH>
__device__ void put_column(float* to, const Pack<float, 4>& pack) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[(threadIdx.x % 2 * 4 + j) * PITCH + threadIdx.x / 2] = pack.at[j];
}

// v6 to v8. A thread has 8 x 8 sums, and for every k reads 8 numbers of a and 8 of b into registers, PA and PB at once.
// a is read by fours only if its tile is transposed.
template <int PA, int PB>
__device__ void outer(Left a, Right b, Result<float> y) {
    constexpr int SIDE = 128, WINDOW = 8, PITCH = SIDE + 4;
    constexpr bool TRANSPOSED = PA == 4;
    __shared__ __align__(16) float left[WINDOW * PITCH], right[WINDOW * SIDE];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const Place tile = place_of<SIDE, SIDE, 1>(blockIdx.x, y.rows, y.columns);
    Left as = own<WINDOW>(a.from(tile.row, 0));
    Right bs = own<SIDE>(b.from(0, tile.column));
    float sum[8][8] = {};
    for (int k = a.columns; k > 0; k -= WINDOW) {
        if constexpr (TRANSPOSED)
            put_column<PITCH>(left, fetch<4>(as, 0, 0));
        else
            *packs(left) = fetch<4>(as, 0, 0);
        *packs(right) = fetch<4>(bs, 0, 0);
        as = as.from(0, WINDOW), bs = bs.from(WINDOW, 0);
        __syncthreads();
#pragma unroll(PA == PB ? WINDOW : 2)
        for (int k = 0; k < WINDOW; ++k) {
            float u[8], v[8];
            gather<PA, 8, TRANSPOSED ? SIDE / 2 : 16 * WINDOW>(
                u, TRANSPOSED ? left + k * PITCH + 4 * ty : left + ty * WINDOW + k);
            gather<PB, 8, 16 * PB>(v, right + k * SIDE + PB * tx);
            add_product(sum, u, v);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += PB)
            y.put(tile.row + (TRANSPOSED ? 4 * ty + i / 4 * 64 + i % 4 : ty + 16 * i), tile.column + PB * tx + j * 16,
                  reinterpret_cast<const Pack<float, PB>&>(sum[i][j]));
}

#if RUNG == 6
SGEMM(sgemm_v6, 2) { outer<1, 1>(MATRICES); }
#endif
#if RUNG == 7
SGEMM(sgemm_v7, 2) { outer<1, 4>(MATRICES); }
#endif
#if RUNG == 8
SGEMM(sgemm_v8, 2) { outer<4, 4>(MATRICES); }
#endif

// v9. Two buffers: while one is multiplied, the next tile is loaded to registers, then stored to the other. Within a
// tile the next k's numbers are read while this k's are multiplied. A warp has 16 GM rows and 32 GN columns; its
// threads are 4 x 8, with groups of 4 x 4 results.
#if RUNG == 9
SGEMM(sgemm_v9, BLOCKS) {
    constexpr int BM = 64 * GM, BN = 64 * GN, PITCH = BM + 4, HIGH = BM / 128, TALL = HIGH * BK / 8,
                  WIDE = BK * BN / 4 / THREADS;
    __shared__ __align__(16) float left[2][BK * PITCH], right[2][BK * BN];
    const Place tile = place_of<BM, BN, BAND>(blockIdx.x, M, N);
    Left as = own<8>(Left{a, a_m, M, K}.from(tile.row, 0));
    Right bs = own<BN>(Right{b, b_k, K, N}.from(0, tile.column));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 2 * (16 * GM) + (lane / 16 * 2 + lane % 2) * 4,
              column = warp % 2 * (32 * GN) + lane / 2 % 8 * 4;
    Pack<float, 4> from_a[TALL], from_b[WIDE];
    float sum[4 * GM][4 * GN] = {}, u[2][4 * GM], v[2][4 * GN];

    const auto ask = [&] {
#pragma unroll
        for (int i = 0; i < TALL; ++i) from_a[i] = fetch<4>(as, i % HIGH * 128, i / HIGH * 8);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) from_b[i] = fetch<4>(bs, i * (4 * THREADS / BN), 0);
        as = as.from(0, BK), bs = bs.from(BK, 0);
    };
    const auto take = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < TALL; ++i)
            put_column<PITCH>(left[buffer] + i / HIGH * 8 * PITCH + i % HIGH * 128, from_a[i]);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) packs(right[buffer])[i * THREADS] = from_b[i];
    };
    const auto read = [&](int buffer, int k) {
        gather<4, 4 * GM, 16>(u[k % 2], left[buffer] + k * PITCH + row);
        gather<4, 4 * GN, 32>(v[k % 2], right[buffer] + k * BN + column);
    };

    ask();
    take(0);
    __syncthreads();
    read(0, 0);
    for (int left_over = K, buffer = 0; left_over > 0; left_over -= BK, buffer ^= 1) {
        const bool more = left_over > BK;
        if (more) ask();
#pragma unroll
        for (int k = 0; k < BK - 1; ++k) {
            read(buffer, k + 1);
            add_product(sum, u[k % 2], v[k % 2]);
        }
        if (more) {
            take(buffer ^ 1);
            __syncthreads();
            read(buffer ^ 1, 0);
        }
        add_product(sum, u[1], v[1]);
    }
#pragma unroll
    for (int i = 0; i < 4 * GM; ++i)
#pragma unroll
        for (int j = 0; j < GN; ++j)
            Result<float>{y, M, N}.put(tile.row + row + i / 4 * 16 + i % 4, tile.column + column + j * 32,
                                       reinterpret_cast<const Pack<float, 4>&>(sum[i][4 * j]));
}
#endif
