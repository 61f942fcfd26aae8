// cross_entropy for wide rows: a cluster of CLUSTER blocks holds a row in shared memory, so that its loss and gradient
// take one read. Macros besides those of cluster_rows.cuh: NEED, 1 to store a row's maximum and sum of exponentials, 2
// for the gradient too; MEAN, whether the gradient is that of the mean. No label smoothing and no softcap.
#include "cluster_rows.cuh"

constexpr int PARTS = 64;  // partial counts of rows

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_fwd(float* losses, float* stats, Y* d, const X* x, const long long* target, const int* counts,
                      long long rows, int columns, long long x_stride, long long ignore, float z) {
    Share<1, 2, X> share(rows, columns, {x}, {x_stride});
    const int lane = threadIdx.x % 32;
    const long long row = blockIdx.x / CLUSTER, label = target[row];
    const bool live = label != ignore, known = label >= 0 && label < columns;
    const bool first = share.rank == 0 && threadIdx.x == 0;
    const float chosen = first && known ? to_float(x[row * x_stride + label]) : 0.0f;
    float upstream = 1;
    if (NEED == 2 && MEAN) {
        int count = 0;
        for (int part = lane; part < PARTS; part += 32) count += counts[part];
        upstream = 1.0f / warp_sum(float(count));
    }
    share.take(row);
    share.wait(0);
    const X* in = share.input(0, 0);
    const auto [most, total] = exponentials(share, in);
    const float logarithm = logf(total), lse = most + logarithm;
    if (first) {
        losses[row] = !live ? 0.0f : !known ? INF - INF : logarithm + (most - chosen) + (z ? z * lse * lse : 0.0f);
        if (NEED) {
            stats[row] = live ? most : 0.0f;
            stats[rows + row] = live ? total : 1.0f;
        }
    }
    if constexpr (NEED == 2) {
        const float scale = known ? upstream : INF - INF;
        const float factor = scale * (1.0f + (z ? 2 * z * lse : 0.0f)) / total;
        const int hit =
            known && label >= share.begin && label < share.begin + share.count ? int(label) - share.begin : -1;
        Y* out = d + row * columns + share.begin;
        share.for_each([&]<int N>(Columns<N> c) {
            const Pack<X, N> in_pack = c.of(in);
            Pack<Y, N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float slope = exp_from(to_float(in_pack.at[j]), most) * factor;
                if (c.first() + j == hit) slope -= scale;
                from_float(live ? slope : 0.0f, pack.at[j]);
            }
            c.of(out) = pack;
        });
    }
}
