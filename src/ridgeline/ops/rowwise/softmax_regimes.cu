// softmax in CUDA C++, by row length: a part of a warp, a warp or a block per row, and a block per (batch, head) for
// comparison.
// Macros: XTYPE the type of x and dx, YTYPE of y and dy; PACK elements per load; THREADS per block; for the warp
// kernels LANES per row, a power of two, PACKS per lane, ROWS that they take, and LOG for log_softmax.
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

// e / total, rounded like a division: the rounding of a reciprocal alone would bias a whole row.
__device__ inline float share_of(float e, float total, float reciprocal) {
    const float q = e * reciprocal;
    return fmaf(fmaf(-q, total, e), reciprocal, q);
}

// y (dy - total), with its largest terms multiplied before they cancel.
__device__ inline float gradient(float dy, float y, float total) { return fmaf(-total, y, dy * y); }

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline float added(float a, float b) { return a + b; }

// A reduction over WIDTH adjacent lanes; the whole warp must call it.
template <int WIDTH, typename F>
__device__ float over_lanes(float x, F f) {
#pragma unroll
    for (int lane = WIDTH / 2; lane; lane /= 2) x = f(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// A reduction over a block; all threads must call it. `none` is the neutral element.
template <typename F>
__device__ float over_block(float x, float none, F f) {
    __shared__ float slots[32];
    x = over_lanes<32>(x, f);
    __syncthreads();  // the slots are no longer in use
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
    __syncthreads();
    return over_lanes<32>(threadIdx.x % 32 < THREADS / 32 ? slots[threadIdx.x % 32] : none, f);
}

// Calls f(p) on this thread's packs of a row.
template <typename F>
__device__ void for_packs(int columns, F f) {
    for (int p = threadIdx.x; p < columns / PACK; p += THREADS) f(p);
}

template <typename T>
__device__ Pack<T, PACK>& pack_at(T* row, int p) {
    return reinterpret_cast<Pack<T, PACK>*>(row)[p];
}

template <typename T>
__device__ const Pack<T, PACK>& pack_at(const T* row, int p) {
    return reinterpret_cast<const Pack<T, PACK>*>(row)[p];
}

#ifdef LANES
// The rows that these lanes take, in registers; packs past a row's end, and rows past the last, hold `none`.
template <typename T>
struct Rows {
    float at[ROWS][PACKS * PACK];

    __device__ Rows(const T* from, long long first, long long rows, int columns, long long stride, float none) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int p = i * LANES + threadIdx.x % LANES;
                if (first + r < rows && p < columns / PACK) {
                    const Pack<T, PACK> pack = pack_at(from + (first + r) * stride, p);
#pragma unroll
                    for (int k = 0; k < PACK; ++k) at[r][i * PACK + k] = to_float(pack.at[k]);
                } else
#pragma unroll
                    for (int k = 0; k < PACK; ++k) at[r][i * PACK + k] = none;
            }
    }

    template <typename R>
    __device__ void store(R* to, long long first, long long rows, int columns) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PACKS; ++i) {
                const int p = i * LANES + threadIdx.x % LANES;
                Pack<R, PACK> pack;
#pragma unroll
                for (int k = 0; k < PACK; ++k) from_float(at[r][i * PACK + k], pack.at[k]);
                if (first + r < rows && p < columns / PACK) pack_at(to + (first + r) * columns, p) = pack;
            }
    }
};

__device__ inline long long first_row() {
    return (blockIdx.x * (long long)(THREADS / LANES) + threadIdx.x / LANES) * ROWS;
}

extern "C" __global__ void softmax_warp_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    Rows<X> row(x, first_row(), rows, columns, x_stride, -INF);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float most = -INF, total = 0;
#pragma unroll
        for (int k = 0; k < PACKS * PACK; ++k) most = fmaxf(most, row.at[r][k]);
        most = over_lanes<LANES>(most, larger);
#pragma unroll
        for (int k = 0; k < PACKS * PACK; ++k) {
            const float below = row.at[r][k] - most, e = expf(below);
            row.at[r][k] = LOG ? below : e;
            total += e;
        }
        total = over_lanes<LANES>(total, added);
        const float last = LOG ? logf(total) : 1.0f / total;
#pragma unroll
        for (int k = 0; k < PACKS * PACK; ++k)
            row.at[r][k] = LOG ? row.at[r][k] - last : share_of(row.at[r][k], total, last);
    }
    row.store(y, first_row(), rows, columns);
}

extern "C" __global__ void softmax_warp_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns,
                                            long long dy_stride, long long y_stride) {
    Rows<Y> slope(dy, first_row(), rows, columns, dy_stride, 0);
    const Rows<Y> row(y, first_row(), rows, columns, y_stride, 0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float total = 0;
#pragma unroll
        for (int k = 0; k < PACKS * PACK; ++k) total += LOG ? slope.at[r][k] : slope.at[r][k] * row.at[r][k];
        total = over_lanes<LANES>(total, added);
#pragma unroll
        for (int k = 0; k < PACKS * PACK; ++k)
            slope.at[r][k] = LOG ? fmaf(-total, expf(row.at[r][k]), slope.at[r][k])
                                 : gradient(slope.at[r][k], row.at[r][k], total);
    }
    slope.store(dx, first_row(), rows, columns);
}
#else
// A row's numbers, the k-th of pack p at [k][p], so that adjacent threads use adjacent banks.
extern __shared__ float kept[];

extern "C" __global__ void softmax_block_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    const X* in = x + blockIdx.x * x_stride;
    Y* out = y + blockIdx.x * (long long)columns;
    const int packs = columns / PACK;
    float most = -INF, total = 0;
    for_packs(columns, [&](int p) {
        const Pack<X, PACK> pack = pack_at(in, p);
#pragma unroll
        for (int k = 0; k < PACK; ++k) most = fmaxf(most, kept[k * packs + p] = to_float(pack.at[k]));
    });
    most = over_block(most, -INF, larger);
    for_packs(columns, [&](int p) {
#pragma unroll
        for (int k = 0; k < PACK; ++k) total += kept[k * packs + p] = expf(kept[k * packs + p] - most);
    });
    total = over_block(total, 0, added);
    const float reciprocal = 1.0f / total;
    for_packs(columns, [&](int p) {
        Pack<Y, PACK> pack;
#pragma unroll
        for (int k = 0; k < PACK; ++k) from_float(share_of(kept[k * packs + p], total, reciprocal), pack.at[k]);
        pack_at(out, p) = pack;
    });
}

extern "C" __global__ void softmax_block_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns,
                                             long long dy_stride, long long y_stride) {
    const int packs = columns / PACK;
    float *slopes = kept, *values = kept + columns, total = 0;
    for_packs(columns, [&](int p) {
        const Pack<Y, PACK> a = pack_at(dy + blockIdx.x * dy_stride, p), b = pack_at(y + blockIdx.x * y_stride, p);
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            total += (slopes[k * packs + p] = to_float(a.at[k])) * (values[k * packs + p] = to_float(b.at[k]));
    });
    total = over_block(total, 0, added);
    for_packs(columns, [&](int p) {
        Pack<X, PACK> pack;
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            from_float(gradient(slopes[k * packs + p], values[k * packs + p], total), pack.at[k]);
        pack_at(dx + blockIdx.x * (long long)columns, p) = pack;
    });
}

// One row by a block that keeps nothing of it: x is read for the maximum, for the sum and for the result.
__device__ void uncached(Y* out, const X* in, int columns) {
    float most = -INF, total = 0;
    for_packs(columns, [&](int p) {
        const Pack<X, PACK> pack = pack_at(in, p);
#pragma unroll
        for (int k = 0; k < PACK; ++k) most = fmaxf(most, to_float(pack.at[k]));
    });
    most = over_block(most, -INF, larger);
    for_packs(columns, [&](int p) {
        const Pack<X, PACK> pack = pack_at(in, p);
        float sum = 0;
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum += expf(to_float(pack.at[k]) - most);
        total += sum;
    });
    total = over_block(total, 0, added);
    const float reciprocal = 1.0f / total;
    for_packs(columns, [&](int p) {
        const Pack<X, PACK> pack = pack_at(in, p);
        Pack<Y, PACK> made;
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            from_float(share_of(expf(to_float(pack.at[k]) - most), total, reciprocal), made.at[k]);
        pack_at(out, p) = made;
    });
}

__device__ void uncached_gradient(X* out, const Y* dy, const Y* y, int columns) {
    float total = 0;
    for_packs(columns, [&](int p) {
        const Pack<Y, PACK> a = pack_at(dy, p), b = pack_at(y, p);
        float sum = 0;
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum += to_float(a.at[k]) * to_float(b.at[k]);
        total += sum;
    });
    total = over_block(total, 0, added);
    for_packs(columns, [&](int p) {
        const Pack<Y, PACK> a = pack_at(dy, p), b = pack_at(y, p);
        Pack<X, PACK> pack;
#pragma unroll
        for (int k = 0; k < PACK; ++k) from_float(gradient(to_float(a.at[k]), to_float(b.at[k]), total), pack.at[k]);
        pack_at(out, p) = pack;
    });
}

// EACH rows per block, in turn: one, or those of a (batch, head).
extern "C" __global__ void softmax_uncached_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    for (long long row = blockIdx.x * (long long)EACH; row < rows && row < (blockIdx.x + 1) * (long long)EACH; ++row)
        uncached(y + row * columns, x + row * x_stride, columns);
}

extern "C" __global__ void softmax_uncached_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns,
                                                long long dy_stride, long long y_stride) {
    for (long long row = blockIdx.x * (long long)EACH; row < rows && row < (blockIdx.x + 1) * (long long)EACH; ++row)
        uncached_gradient(dx + row * columns, dy + row * dy_stride, y + row * y_stride, columns);
}
#endif
