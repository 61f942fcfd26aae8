// softmax and log_softmax of wide rows: a cluster of CLUSTER blocks holds a row, each block one part, and reads it
// once. Bulk copies bring the parts into shared memory. Forward, a cluster has one row, and other clusters fill the
// time in which it waits; backward, it may take rows in turn, with STAGES of them in flight.
// Macros besides those of cluster_rows.cuh: X is the type of x and dx, Y of y and dy; BLOCKS that fit a multiprocessor;
// LOG 0 or 1.
#include "cluster_rows.cuh"

// e / total. A float32 result is rounded like a division: the rounding of a reciprocal alone would bias a whole row.
__device__ inline float divide(float e, float total, float reciprocal) {
    const float q = e * reciprocal;
    return sizeof(Y) < 4 ? q : fmaf(fmaf(-q, total, e), reciprocal, q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    const long long row = blockIdx.x / CLUSTER;
    Share<1, 2, X> share(rows, columns, {x}, {x_stride});
    share.take(row);
    share.wait(0);
    const X* in = share.input(0, 0);
    const auto [most, total] = exponentials(share, in);
    const float reciprocal = 1.0f / total, logarithm = LOG ? logf(total) : 0.0f;
    Y* out = y + row * columns + share.begin;
    share.for_each([&]<int N>(Columns<N> c) {
        const Pack<X, N> in_pack = c.of(in);
        Pack<Y, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float value = to_float(in_pack.at[j]);
            from_float(LOG ? value - most - logarithm : divide(exp_from(value, most), total, reciprocal), pack.at[j]);
        }
        c.of(out) = pack;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns, long long dy_stride, long long y_stride) {
    Turn<false> turn(rows);
    Share<2, 1, Y> share(turn, columns, {dy, y}, {dy_stride, y_stride});
    for (int k = 0; turn.more(); turn.next(), ++k) {
        share.take(turn.row);
        share.wait(k);
        const Y *left = share.input(k, 0), *right = share.input(k, 1);
        Pack<Y, PACK> a_of[TIMES], b_of[TIMES];
        float sum = 0, total = 0;
        share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
            const Pack<Y, N> a = c.in(a_of) = c.of(left), b = c.in(b_of) = c.of(right);
#pragma unroll
            for (int j = 0; j < N; ++j) sum += LOG ? to_float(a.at[j]) : to_float(a.at[j]) * to_float(b.at[j]);
        });
        const float* slots = share.exchange(k, {warp_sum(sum)});
        share.next(k);
        for (int s = threadIdx.x % 32; s < SLOTS; s += 32) total += slots[s];
        total = warp_sum(total);
        X* out = dx + turn.row * columns + share.begin;
        share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
            const Pack<Y, N> a = c.in(a_of), b = c.in(b_of);
            Pack<X, N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float slope = to_float(a.at[j]), value = to_float(b.at[j]);
                from_float(LOG ? slope - exp_from(value, 0.0f) * total : fmaf(-total, value, slope * value),
                           pack.at[j]);
            }
            store_streaming(c.of(out), pack);
        });
    }
}
