// softmax and log_softmax of wide rows: a cluster of CLUSTER blocks holds a row, each block one part of it, and reads it once.
// Bulk copies bring the parts into shared memory. A cluster may take rows in a loop and have STAGES of them on their way; on an
// H100 one row each is best, where other clusters fill the time in which one waits.
// Macros: XTYPE and YTYPE the element types of x (and dx) and of y (and dy); CLUSTER; STAGES; THREADS per block; BLOCKS that fit a
// multiprocessor; ITEMS packs per thread; LOG 0 or 1. Rows start at multiples of 16 bytes and are multiples of 16 bytes long.
#include "cluster_rows.cuh"

// e / total. For float32 results rounded as a division is: a reciprocal's rounding alone would put one bias on a row.
__device__ inline float divide(float e, float total, float reciprocal) {
    const float q = e * reciprocal;
    return sizeof(Y) < 4 ? q : fmaf(fmaf(-q, total, e), reciprocal, q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    Share<1, 2, X> share(rows, columns, {x}, {x_stride});
    int k = 0;
    for (long long row = blockIdx.x / CLUSTER; row < rows; row += gridDim.x / CLUSTER, ++k) {
        share.stream.wait(k);
        const auto* in = reinterpret_cast<const Pack<X, PACK>*>(share.stream.part(k, 0));
        const auto [most, total] = exponentials(share, k, in);
        const float reciprocal = 1.0f / total, logarithm = LOG ? logf(total) : 0.0f;
        auto* out = reinterpret_cast<Pack<Y, PACK>*>(y + row * columns + share.begin);
        for_each(share.count, [&](int p) {
            const Pack<X, PACK> in_pack = in[p];
            Pack<Y, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float value = to_float(in_pack.at[j]);
                from_float(LOG ? value - most - logarithm : divide(exp_from(value, most), total, reciprocal), pack.at[j]);
            }
            out[p] = pack;
        });
        if (row + gridDim.x / CLUSTER < rows) {
            __syncthreads();
            share.next(k);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns, long long dy_stride, long long y_stride) {
    Share<2, 1, Y> share(rows, columns, {dy, y}, {dy_stride, y_stride});
    int k = 0;
    for (long long row = blockIdx.x / CLUSTER; row < rows; row += gridDim.x / CLUSTER, ++k) {
        share.stream.wait(k);
        const auto* left = reinterpret_cast<const Pack<Y, PACK>*>(share.stream.part(k, 0));
        const auto* right = reinterpret_cast<const Pack<Y, PACK>*>(share.stream.part(k, 1));
        Pack<Y, PACK> a[ITEMS], b[ITEMS];
        float sum = 0, total = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + threadIdx.x;
            if (p * PACK >= share.count) continue;
            a[i] = left[p];
            b[i] = right[p];
#pragma unroll
            for (int j = 0; j < PACK; ++j) sum += LOG ? to_float(a[i].at[j]) : to_float(a[i].at[j]) * to_float(b[i].at[j]);
        }
        const float* slots = share.exchange(k, {warp_sum(sum)});
        share.next(k);
        for (int s = threadIdx.x % 32; s < SLOTS; s += 32) total += slots[s];
        total = warp_sum(total);
        auto* out = reinterpret_cast<Pack<X, PACK>*>(dx + row * columns + share.begin);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + threadIdx.x;
            if (p * PACK >= share.count) continue;
            Pack<X, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float slope = to_float(a[i].at[j]), value = to_float(b[i].at[j]);
                from_float(LOG ? slope - exp_from(value, 0.0f) * total : value * (slope - total), pack.at[j]);
            }
            store_streaming(out + p, pack);
        }
    }
}
