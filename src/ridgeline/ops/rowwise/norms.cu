// rms_norm and layer_norm, with or without a residual added first, forward and backward.
// Forward: a cluster holds a row, and other clusters fill the time in which it waits. Backward: blocks stay and take rows in turn,
// the next ones on their way, so that each thread keeps its columns' weights and sums of the weights' gradients in registers.
// Macros beside those of cluster_rows.cuh: X = Y; WTYPE of the weights; MEAN, whether the mean is subtracted; ADD, whether there is
// a residual (forward) or a gradient of the sum (backward); WEIGHT, whether there is one; forward: BIAS; BACKWARD: which kernels, and
// for them DW and DB, which gradients are wanted, and CLUSTERS, how many there are at most.
#include "cluster_rows.cuh"

using W = WTYPE;
constexpr bool KEEP = ITEMS * PACK <= 16 && sizeof(X) == 2;  // backward, whether a row stays in registers between its two readings
constexpr int FLOATS = 1 + MEAN, INPUTS_FWD = 1 + ADD, INPUTS_BWD = 2 + ADD;

// Has the compiler keep a pack in 32-bit registers, not each half in one of its own.
template <typename P>
__device__ inline void hold(P& pack) {
    if constexpr (sizeof(P) % 4 == 0)
#pragma unroll
        for (int k = 0; k < sizeof(P) / 4; ++k) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[k]));
}

// Elements of a part that a warp has: packs i * THREADS + thread, of which the last may be missing.
__device__ inline int warp_count(int count, int warp) {
    int packs = 0;
    for (int i = 0; i < ITEMS; ++i) packs += max(0, min(32, (count + PACK - 1) / PACK - i * THREADS - warp * 32));
    return packs * PACK;
}

#if BACKWARD == 0
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_fwd(Y* y, X* sum, float* mean, float* rstd, const X* x, const X* residual, const W* weight, const W* bias, long long rows,
             int columns, long long x_stride, long long residual_stride, float eps) {
    const X* const from[2] = {x, residual};
    const long long strides[2] = {x_stride, residual_stride};
    Share<INPUTS_FWD, FLOATS, X> share(rows, columns, reinterpret_cast<const X* const(&)[INPUTS_FWD]>(from),
                                       reinterpret_cast<const long long(&)[INPUTS_FWD]>(strides));
    const int lane = threadIdx.x % 32;
    int k = 0;
    for (long long row = blockIdx.x / CLUSTER; row < rows; row += gridDim.x / CLUSTER, ++k) {
        if (WEIGHT && CLUSTER > 1 && thread() % 8 == 0)  // the weights lie in L2: towards L1 while the row is on its way
            for_each(share.count, [&](int p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(weight + share.begin + p * PACK)); });
        share.stream.wait(k);
        const auto* left = reinterpret_cast<const Pack<X, PACK>*>(share.stream.part(k, 0));
        const auto* right = reinterpret_cast<const Pack<X, PACK>*>(share.stream.part(k, ADD));
        const auto value = [&](const Pack<X, PACK>& a, const Pack<X, PACK>& b, int j) {
            return ADD ? to_float(a.at[j]) + to_float(b.at[j]) : to_float(a.at[j]);
        };
        const long long at = row * columns + share.begin;
        float middle = 0, squares = 0;
        if constexpr (MEAN) {
            for_each(share.count, [&](int p) {
                const Pack<X, PACK> a = left[p], b = ADD ? right[p] : a;
#pragma unroll
                for (int j = 0; j < PACK; ++j) middle += value(a, b, j);
            });
            middle = warp_sum(middle) / max(1, warp_count(share.count, threadIdx.x / 32));
        }
        for_each(share.count, [&](int p) {
            const Pack<X, PACK> a = left[p], b = ADD ? right[p] : a;
            Pack<X, PACK> added;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float v = value(a, b, j), d = v - middle;
                squares += d * d;
                if (ADD) from_float(v, added.at[j]);
            }
            if (ADD) reinterpret_cast<Pack<X, PACK>*>(sum + at)[p] = added;
        });
        squares = warp_sum(squares);
        // Of all warps: the mean of the whole row first, then the squares about that.
        float mine[FLOATS] = {squares}, center = 0, total = 0;
        if (MEAN) mine[FLOATS - 1] = middle;
        const float* slots = share.exchange(k, mine);
        const auto elements = [&](int s) {
            return warp_count(min(share.part, columns - min(s / WARPS * share.part, columns)), s % WARPS);
        };
        if (MEAN) {
            for (int s = lane; s < SLOTS; s += 32) center += slots[FLOATS * s + 1] * elements(s);
            center = warp_sum(center) / columns;
        }
        for (int s = lane; s < SLOTS; s += 32) {
            const float d = MEAN ? slots[FLOATS * s + 1] - center : 0.0f;
            total += MEAN ? slots[FLOATS * s] + d * d * elements(s) : slots[s];
        }
        const float scale = rsqrtf(warp_sum(total) / columns + eps);
        if (rstd && share.rank == 0 && threadIdx.x == 0) {
            rstd[row] = scale;
            if (MEAN) mean[row] = center;
        }
        auto* out = reinterpret_cast<Pack<Y, PACK>*>(y + at);
        for_each(share.count, [&](int p) {
            const Pack<X, PACK> a = left[p], b = ADD ? right[p] : a;
            Pack<W, PACK> w, shift;
            if (WEIGHT) w = reinterpret_cast<const Pack<W, PACK>*>(weight + share.begin)[p];
            if (BIAS) shift = reinterpret_cast<const Pack<W, PACK>*>(bias + share.begin)[p];
            Pack<Y, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                float v = (value(a, b, j) - center) * scale;
                if (WEIGHT) v *= to_float(w.at[j]);
                if (BIAS) v += to_float(shift.at[j]);
                from_float(v, pack.at[j]);
            }
            out[p] = pack;
        });
        if (row + gridDim.x / CLUSTER < rows) {
            __syncthreads();
            share.next(k);
        }
    }
}

#else
// partial: (clusters, DW + DB, columns) sums over each cluster's rows.
extern "C" __global__ void __launch_bounds__(THREADS* GROUPS, BLOCKS)
    norm_bwd(X* dx, float* partial, const Y* dy, const Y* dsum, const X* x, const W* weight, const float* mean, const float* rstd,
             long long rows, int columns, long long dy_stride, long long dsum_stride, long long x_stride) {
    const X* const from[3] = {x, dy, dsum};
    const long long strides[3] = {x_stride, dy_stride, dsum_stride};
    Share<INPUTS_BWD, FLOATS, X> share(rows, columns, reinterpret_cast<const X* const(&)[INPUTS_BWD]>(from),
                                       reinterpret_cast<const long long(&)[INPUTS_BWD]>(strides));
    const int lane = threadIdx.x % 32;
    Pack<W, PACK> w[ITEMS];
    float dweight[ITEMS][PACK] = {}, dbias[ITEMS][PACK] = {};
    if (WEIGHT)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + thread();
            if (p * PACK < share.count) hold(w[i] = reinterpret_cast<const Pack<W, PACK>*>(weight + share.begin)[p]);
        }
    const float part_of_mean = 1.0f / columns;
    const int step = gridDim.x / CLUSTER * GROUPS;
    long long row = blockIdx.x / CLUSTER * GROUPS + group();
    float next_scale = row < rows ? rstd[row] : 0.0f, next_center = MEAN && row < rows ? mean[row] : 0.0f;  // read a row ahead
    for (int k = 0; row < rows; row += step, ++k) {
        const float scale = next_scale, center = next_center;
        if (row + step < rows) {
            next_scale = rstd[row + step];
            if (MEAN) next_center = mean[row + step];
        }
        share.stream.wait(k);
        const auto* values = reinterpret_cast<const Pack<X, PACK>*>(share.stream.part(k, 0));
        const auto* slopes = reinterpret_cast<const Pack<Y, PACK>*>(share.stream.part(k, 1));
        const auto* others = reinterpret_cast<const Pack<Y, PACK>*>(share.stream.part(k, 1 + ADD));
        float product = 0, sum = 0;
        Pack<X, PACK> a_of[KEEP ? ITEMS : 1];
        Pack<Y, PACK> b_of[KEEP ? ITEMS : 1], c_of[KEEP ? ITEMS : 1];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + thread();
            if (p * PACK >= share.count) continue;
            const Pack<X, PACK> a = values[p];
            const Pack<Y, PACK> b = slopes[p];
            if (KEEP) hold(a_of[i] = a), hold(b_of[i] = b);
            if (KEEP && ADD) hold(c_of[i] = others[p]);
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float unit = (to_float(a.at[j]) - center) * scale, slope = to_float(b.at[j]);
                const float weighted = WEIGHT ? slope * to_float(w[i].at[j]) : slope;
                product += weighted * unit;
                if (MEAN) sum += weighted;
                if (DW) dweight[i][j] += slope * unit;
                if (DB) dbias[i][j] += slope;
            }
        }
        float mine[FLOATS] = {warp_sum(product)}, toward = 0, shift = 0;
        if (MEAN) mine[FLOATS - 1] = warp_sum(sum);
        const float* slots = share.exchange(k, mine);
        for (int s = lane; s < SLOTS; s += 32) {
            toward += slots[FLOATS * s];
            if (MEAN) shift += slots[FLOATS * s + 1];
        }
        if (MEAN) shift = warp_sum(shift) * part_of_mean;
        toward = warp_sum(toward) * part_of_mean;
        if (KEEP || k) share.next(KEEP ? k : k - 1);  // whose place all threads have left when they met for this row
        auto* out = reinterpret_cast<Pack<X, PACK>*>(dx + row * columns + share.begin);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + thread();
            if (p * PACK >= share.count) continue;
            if (KEEP) hold(a_of[i]), hold(b_of[i]), hold(w[i]);  // so that what was made of them above is made again, not kept
            const Pack<X, PACK> a = KEEP ? a_of[i] : values[p];
            const Pack<Y, PACK> b = KEEP ? b_of[i] : slopes[p], c = ADD ? KEEP ? c_of[i] : others[p] : b;
            Pack<X, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float unit = (to_float(a.at[j]) - center) * scale, slope = to_float(b.at[j]);
                const float weighted = WEIGHT ? slope * to_float(w[i].at[j]) : slope;
                const float along = scale * (weighted - shift - unit * toward);
                from_float(ADD ? along + to_float(c.at[j]) : along, pack.at[j]);
            }
            store_streaming(out + p, pack);
        }
    }
    if (!DW && !DB) return;
    // The groups' sums, one group after the other, in the shared memory that rows have left.
    float* sums = reinterpret_cast<float*>(memory);
    partial += blockIdx.x / CLUSTER * (long long)(DW + DB) * columns + share.begin;
#pragma unroll
    for (int which = 0; which < DW + DB; ++which) {
        for (int turn = 0; turn < GROUPS; ++turn) {
            __syncthreads();
            if (turn != group()) continue;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int p = i * THREADS + thread();
                if (p * PACK >= share.count) continue;
#pragma unroll
                for (int j = 0; j < PACK; ++j) {
                    float value = DW && which == 0 ? dweight[i][j] : dbias[i][j];
                    if (turn) value += sums[j * (THREADS * ITEMS) + p];
                    if (turn < GROUPS - 1)
                        sums[j * (THREADS * ITEMS) + p] = value;
                    else
                        partial[which * (long long)columns + p * PACK + j] = value;
                }
            }
        }
    }
}

// The weights' gradients: sums over the rows of `partial` that clusters wrote, of 32 columns by 32 warps.
extern "C" __global__ void __launch_bounds__(1024)
    norm_sums(W* dweight, W* dbias, const float* partial, long long rows, int columns) {
    const int count = min((long long)CLUSTERS, (rows + GROUPS - 1) / GROUPS);
    __shared__ float sums[32][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    const long long step = (DW + DB) * (long long)columns;
    partial += blockIdx.y * (long long)columns + column;
    float sum = 0;
    if (column < columns)
        for (int r = warp; r < count; r += 32) sum += partial[r * step];
    sums[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane][warp]);
    W* out = DW && blockIdx.y == 0 ? dweight : dbias;
    if (lane == 0 && blockIdx.x * 32 + warp < columns) from_float(sum, out[blockIdx.x * 32 + warp]);
}
#endif
