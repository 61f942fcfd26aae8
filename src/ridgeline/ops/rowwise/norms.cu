// rms_norm and layer_norm, with or without a residual added first, forward and backward.
// Forward: a cluster holds a row, and other clusters fill the time in which it waits. Backward: persistent blocks take
// rows in turn and prefetch the next ones; each thread keeps its columns' weights, and its sums for their gradients, in
// registers.
// Macros besides those of cluster_rows.cuh: X = Y; WTYPE of the weights; MEAN, whether the mean is subtracted; ADD,
// whether there is a residual (forward) or a gradient of the sum (backward); WEIGHT, whether there is one; OFFSET, the
// number added to it; forward: BIAS, and LLAMA, whether the normalised row is rounded before it is multiplied;
// BACKWARD, which kernel; for backward, DW and DB, which gradients are wanted, and PDL, whether the kernel that adds up
// their parts starts early.
#include "cluster_rows.cuh"
#include "early.cuh"

using W = WTYPE;
// Backward: whether a row stays in registers between its two uses.
constexpr bool KEEP = ITEMS * PACK <= 16 && sizeof(X) == 2;
constexpr int FLOATS = 1 + MEAN, INPUTS_FWD = 1 + ADD, INPUTS_BWD = 2 + ADD;

// What the normalised row is multiplied by.
__device__ inline float factor(W weight) {
    if constexpr (float(OFFSET) == 0)
        return to_float(weight);
    else
        return to_float(weight) + float(OFFSET);
}

__device__ inline float rounded(float value) {
    X nearest;
    from_float(value, nearest);
    return to_float(nearest);
}

// Makes the compiler keep a pack in 32-bit registers, not each half in its own.
template <typename P>
__device__ inline void hold(P& pack) {
    if constexpr (sizeof(P) % 4 == 0)
#pragma unroll
        for (int k = 0; k < sizeof(P) / 4; ++k) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(&pack)[k]));
}

// The weights of the columns c, where a row's weights begin at `from`. With SHIFTED a row's packs begin `head` columns
// after the weights' packs, so each is assembled from two of them.
template <int N, typename T>
__device__ inline Pack<T, N> vector(Columns<N> c, const T* from, int head) {
    if constexpr (!SHIFTED || N == 1)
        return c.of(from);
    else {
        constexpr int EACH = N * sizeof(T) < 16 ? N : 16 / sizeof(T), STEP = EACH * sizeof(T) / 4,
                      WORDS = N * sizeof(T) / 4;
        const int ahead = head % EACH;
        const auto* near = reinterpret_cast<const Pack<T, EACH>*>(from + c.first() - ahead);
        unsigned words[WORDS + STEP];
        Pack<T, N> pack;
#pragma unroll
        for (int k = 0; k <= N / EACH; ++k) reinterpret_cast<Pack<T, EACH>*>(words)[k] = near[k];
#pragma unroll
        for (int step = STEP / 2; step; step /= 2)
            if (ahead * sizeof(T) / 4 & step)
#pragma unroll
                for (int k = 0; k < WORDS + step; ++k) words[k] = words[k + step];
        const unsigned bytes = sizeof(T) == 2 && ahead % 2 ? 0x5432 : 0x3210;
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            reinterpret_cast<unsigned*>(&pack)[k] = __byte_perm(words[k], words[k + 1], bytes);
        return pack;
    }
}

#if BACKWARD == 0
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_fwd(Y* y, X* sum, float* mean, float* rstd, const X* x, const X* residual, const W* weight, const W* bias,
             long long rows, int columns, long long x_stride, long long residual_stride, float eps) {
    const X* const from[2] = {x, residual};
    const long long strides[2] = {x_stride, residual_stride};
    const long long row = blockIdx.x / CLUSTER;
    Share<INPUTS_FWD, FLOATS, X> share(rows, columns, reinterpret_cast<const X* const(&)[INPUTS_FWD]>(from),
                                       reinterpret_cast<const long long(&)[INPUTS_FWD]>(strides));
    const int lane = threadIdx.x % 32;
    share.take(row);
    if (WEIGHT && CLUSTER > 1 && thread() % 8 == 0)  // prefetch the weights from L2 to L1 while the row is loading
        share.for_each(
            [&](auto c) { asm volatile("prefetch.global.L1 [%0];" ::"l"(weight + share.begin + c.first())); });
    share.wait(0);
    const X *left = share.input(0, 0), *right = share.input(0, ADD);
    const auto value = [&](const auto& a, const auto& b, int j) {
        return ADD ? to_float(a.at[j]) + to_float(b.at[j]) : to_float(a.at[j]);
    };
    const long long at = row * columns + share.begin;
    float middle = 0, squares = 0;
    if constexpr (MEAN) {
        share.for_each([&]<int N>(Columns<N> c) {
            const Pack<X, N> a = c.of(left), b = ADD ? c.of(right) : a;
#pragma unroll
            for (int j = 0; j < N; ++j) middle += value(a, b, j);
        });
        middle = warp_sum(middle) / max(1, warp_count(share.count, threadIdx.x / 32));
    }
    share.for_each([&]<int N>(Columns<N> c) {
        const Pack<X, N> a = c.of(left), b = ADD ? c.of(right) : a;
        Pack<X, N> added;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float v = value(a, b, j), d = v - middle;
            squares += d * d;
            if (ADD) from_float(v, added.at[j]);
        }
        if (ADD) c.of(sum + at) = added;
    });
    squares = warp_sum(squares);
    // Over all warps: first the mean of the whole row, then the squared distances from it.
    float mine[FLOATS] = {squares}, center = 0, total = 0;
    if (MEAN) mine[FLOATS - 1] = middle;
    const float* slots = share.exchange(0, mine);
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
    share.for_each([&]<int N>(Columns<N> c) {
        const Pack<X, N> a = c.of(left), b = ADD ? c.of(right) : a;
        Pack<W, N> w, shift;
        if (WEIGHT) w = vector(c, weight + share.begin, share.head);
        if (BIAS) shift = vector(c, bias + share.begin, share.head);
        Pack<Y, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float v = (value(a, b, j) - center) * scale;
            if (LLAMA) v = rounded(v);
            if (WEIGHT) v *= factor(w.at[j]);
            if (BIAS) v += to_float(shift.at[j]);
            from_float(v, pack.at[j]);
        }
        c.of(y + at) = pack;
    });
}

#else
// partial: (clusters, DW + DB, columns) sums over each cluster's rows; with SHIFTED 8 more clusters, see below.
extern "C" __global__ void __launch_bounds__(THREADS* GROUPS, BLOCKS)
    norm_bwd(X* dx, float* partial, const Y* dy, const Y* dsum, const X* x, const W* weight, const float* mean,
             const float* rstd, long long rows, int columns, long long dy_stride, long long dsum_stride,
             long long x_stride) {
    const X* const from[3] = {x, dy, dsum};
    const long long strides[3] = {x_stride, dy_stride, dsum_stride};
    Turn<SHIFTED> turn(rows);
    Share<INPUTS_BWD, FLOATS, X, SHIFTED> share(turn, columns, reinterpret_cast<const X* const(&)[INPUTS_BWD]>(from),
                                                reinterpret_cast<const long long(&)[INPUTS_BWD]>(strides));
    const int lane = threadIdx.x % 32;
    Pack<W, PACK> w[TIMES];
    float dweight[TIMES][PACK] = {}, dbias[TIMES][PACK] = {};
    const auto weights = [&] {
        if (WEIGHT)
            share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
                if constexpr (SHIFTED)
#pragma unroll
                    for (int j = 0; j < N; ++j) w[c.slot].at[j] = weight[share.begin + c.first() + j];
                else
                    w[c.slot] = c.of(weight + share.begin);
                hold(c.in(w));
            });
    };
    // Calls f on each of this thread's columns, with its sum.
    const auto sums_of = [&](bool bias, auto f) {
        share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
#pragma unroll
            for (int j = 0; j < N; ++j) f(c.first() + j, bias ? dbias[c.slot][j] : dweight[c.slot][j]);
        });
    };
    share.take(turn.row);
    weights();
    const float part_of_mean = 1.0f / columns;
    // Read one row ahead.
    float next_scale = turn.more() ? rstd[turn.row] : 0.0f, next_center = MEAN && turn.more() ? mean[turn.row] : 0.0f;
    for (int k = 0; turn.more(); ++k) {
        const float scale = next_scale, center = next_center;
        const long long row = turn.row;
        const bool last = turn.last();
        turn.next();
        if (turn.more()) {
            next_scale = rstd[turn.row];
            if (MEAN) next_center = mean[turn.row];
        }
        share.wait(k);
        const X* values = share.input(k, 0);
        const Y *slopes = share.input(k, 1), *others = share.input(k, 1 + ADD);
        float product = 0, sum = 0;
        Pack<X, PACK> a_of[KEEP ? TIMES : 1];
        Pack<Y, PACK> b_of[KEEP ? TIMES : 1], c_of[KEEP ? TIMES : 1];
        share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
            const Pack<X, N> a = c.of(values);
            const Pack<Y, N> b = c.of(slopes);
            if (KEEP) hold(c.in(a_of) = a), hold(c.in(b_of) = b);
            if (KEEP && ADD) hold(c.in(c_of) = c.of(others));
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float unit = (to_float(a.at[j]) - center) * scale, slope = to_float(b.at[j]);
                const float weighted = WEIGHT ? slope * factor(w[c.slot].at[j]) : slope;
                product += weighted * unit;
                if (MEAN) sum += weighted;
                if (DW) dweight[c.slot][j] += slope * unit;
                if (DB) dbias[c.slot][j] += slope;
            }
        });
        float mine[FLOATS] = {warp_sum(product)}, toward = 0, shift = 0;
        if (MEAN) mine[FLOATS - 1] = warp_sum(sum);
        const float* slots = share.exchange(k, mine);
        for (int s = lane; s < SLOTS; s += 32) {
            toward += slots[FLOATS * s];
            if (MEAN) shift += slots[FLOATS * s + 1];
        }
        if (MEAN) shift = warp_sum(shift) * part_of_mean;
        toward = warp_sum(toward) * part_of_mean;
        if (KEEP || k) share.next(KEEP ? k : k - 1);  // all threads left its stage before they met for this row
        share.for_each<ITEMS>([&]<int N>(Columns<N> c) {
            // Recomputes what was derived above instead of keeping it in registers.
            if (KEEP) hold(c.in(a_of)), hold(c.in(b_of)), hold(c.in(w));
            const Pack<X, N> a = KEEP ? c.in(a_of) : c.of(values);
            const Pack<Y, N> b = KEEP ? c.in(b_of) : c.of(slopes), other = ADD ? KEEP ? c.in(c_of) : c.of(others) : b;
            Pack<X, N> pack;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float unit = (to_float(a.at[j]) - center) * scale, slope = to_float(b.at[j]);
                const float weighted = WEIGHT ? slope * factor(w[c.slot].at[j]) : slope;
                const float along = scale * (weighted - shift - unit * toward);
                from_float(ADD ? along + to_float(other.at[j]) : along, pack.at[j]);
            }
            store_streaming(c.of(dx + row * columns + share.begin), pack);
        });
        if (last) {  // the next row gives this thread other columns: its sums so far go to an extra part
#pragma unroll
            for (int which = 0; which < DW + DB; ++which) {
                float* to = partial + ((gridDim.x / CLUSTER + row % 8) * (DW + DB) + which) * columns + share.begin;
                sums_of(which >= DW, [&](int column, float& sum) { to[column] = sum, sum = 0; });
            }
            share.take(turn.row);
            weights();
        }
    }
    if (!DW && !DB) return;
    let_next_come();  // the kernel that adds up the clusters' sums
    // The groups' sums, one group after the other, in the shared memory that rows no longer need.
    constexpr int PACKS = THREADS * ITEMS + 2 * SHIFTED;
    float* sums = reinterpret_cast<float*>(memory);
    partial += blockIdx.x / CLUSTER * (long long)(DW + DB) * columns + share.begin;
#pragma unroll
    for (int which = 0; which < DW + DB; ++which) {
        for (int turn = 0; turn < GROUPS; ++turn) {
            __syncthreads();
            if (turn != group()) continue;
            sums_of(which >= DW, [&](int column, float value) {
                float& sum = sums[column % PACK * PACKS + column / PACK];
                if (turn) value += sum;
                if (turn < GROUPS - 1)
                    sum = value;
                else
                    partial[which * (long long)columns + column] = value;
            });
        }
    }
}
#endif
