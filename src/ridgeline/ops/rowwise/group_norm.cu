// group_norm: a cluster of CLUSTER blocks takes a band of channels of one image (a group; in channels_last memory the
// groups of some 128 bytes) and reads it once. Each thread keeps its own packs in shared memory.
// A unit is a pack of one channel or, in channels_last memory (LAST), a position with all CHANNELS of the band; a warp
// has RUN adjacent units. Its results per channel are merged over block, cluster and group: forward, means and squared
// distances from them, as Chan et al. do, so that nothing cancels; backward, sums of dy (x - mean) and of dy.
// Macros: XTYPE of x and dx, YTYPE of y and dy, WTYPE and BTYPE of weight and bias, void if missing; LAST; WIDTH
// channels per group, CHANNELS per band; CLUSTER; WARPS per block; ITEMS packs per thread; BLOCKS that fit a
// multiprocessor; BACKWARD; SILU, whether results pass through it; PDL, whether the next kernel starts early.
#include "early.cuh"
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;
constexpr int PACK = 16 / sizeof(X), THREADS = 32 * WARPS;
constexpr int LANES = LAST ? CHANNELS / PACK : 32, ROWS = 32 / LANES;  // lanes per position; positions per warp load
constexpr int UNROLL = ITEMS < 4 ? ITEMS : 4;
constexpr int STEP = LAST ? ROWS : 32, RUN = ITEMS * STEP;
constexpr int OWN = LAST ? PACK : 1;                    // channels per thread,
constexpr int MEANS = LAST && WIDTH % PACK ? PACK : 1;  // and their means: one if the pack lies in one group

struct Shared {
    Pack<X, PACK> values[ITEMS * THREADS];
    Pack<Y, PACK> slopes[BACKWARD ? ITEMS * THREADS : 1];
    // Sums of each warp, each block, the cluster.
    float2 found[WARPS][LAST ? CHANNELS : 1], sent[CLUSTER][CHANNELS], whole[CHANNELS];
    Barrier barrier;
    float middle[CHANNELS], up[CHANNELS], add[CHANNELS];  // each channel's factors for the last pass
};
extern __shared__ __align__(128) char memory[];

template <typename P>
__device__ inline void copy_async(P* to, const P* from) {
#pragma unroll
    for (int k = 0; k < sizeof(P); k += 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + k),
                     "l"(__cvta_generic_to_global(reinterpret_cast<const char*>(from) + k))
                     : "memory");
}

__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#ifndef STORE
#define STORE __stwb
#endif
// Stores whole 16 bytes; the compiler would split a plain store into one per element.
template <typename P>
__device__ inline void store(P* to, const P& pack) {
#pragma unroll
    for (int k = 0; k < sizeof(P) / 16; ++k)
        STORE(reinterpret_cast<uint4*>(to) + k, reinterpret_cast<const uint4*>(&pack)[k]);
}

// The sum over a warp's lanes that have the same channels, for each of them.
__device__ inline float over_lanes(float v) {
    if (!LAST) return warp_sum(v);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int rows = ROWS; rows > 1; rows = (rows + 1) / 2) {
        const float other = __shfl_down_sync(~0u, v, (rows + 1) / 2 * LANES);
        if (lane / LANES + (rows + 1) / 2 < rows) v += other;
    }
    return __shfl_sync(~0u, v, lane % LANES);
}

template <typename P>
__device__ inline float parameter(const P* values, int channel, float) {
    return to_float(values[channel]);
}
__device__ inline float parameter(const void*, int, float otherwise) { return otherwise; }

// sigmoid(v) and sigmoid(-v), without subtraction, which sums of many terms would show; quick if Y is not float32.
__device__ inline float2 shares(float v) {
    constexpr bool exact = sizeof(Y) == 4;
    const float e = exact ? expf(-fabsf(v)) : __expf(-fabsf(v));
    const float near = exact ? 1.0f / (1.0f + e) : __fdividef(1.0f, 1.0f + e);
    return v < 0 ? make_float2(e * near, near) : make_float2(near, e * near);
}
__device__ inline float activated(float v) { return SILU ? v * shares(v).x : v; }
// The factor by which the activation of v changes a gradient.
__device__ inline float rate(float v) {
    if (!SILU) return 1.0f;
    const float2 s = shares(v);
    return s.x * (1.0f + v * s.y);
}

// A summary of n elements: forward, their mean, its rounding error, and the squared distances from it; backward, two
// sums.
struct Sums {
    float n, a, b, rest;
};

// The merged summaries at(from), ..., at(to - 1).
template <typename F>
__device__ inline Sums merged(int from, int to, F at) {
    Sums all = {};
    float base = 0;
#pragma unroll 4
    for (int k = from; k < to; ++k) {
        const Sums s = at(k);
        if (!BACKWARD && all.n == 0) base = s.a;
        all.n += s.n;
        all.a += BACKWARD ? s.a : s.n * (s.a - base);
        all.b += s.b;
    }
    if (BACKWARD) return all;
    const float shift = all.a / fmaxf(all.n, 1.0f);
    all.a = base + shift;
    all.rest = shift - (all.a - base);
#pragma unroll 4
    for (int k = from; k < to; ++k) {
        const Sums s = at(k);
        const float off = s.a - all.a - all.rest;
        all.b += s.n * (off * off);
    }
    return all;
}

// The position of this cluster, block, warp and thread.
struct Place {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    int rank = blockIdx.x % CLUSTER, warp = rank * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    int units, per;           // per channel (LAST: per band), and the warps that share them
    int band, image, images;  // this cluster takes images `image`, `image` + `images`, ...
    int channel, unit;        // this thread's first in the band
    bool any;                 // whether this thread has any work

    __device__ Place(int groups, int size) {
        const int cluster = blockIdx.x / CLUSTER, bands = groups / (CHANNELS / WIDTH);
        band = cluster % bands;
        image = cluster / bands;
        images = gridDim.x / CLUSTER / bands;
        units = LAST ? size : size / PACK;
        per = (units + RUN - 1) / RUN;
        any = LAST ? lane < ROWS * LANES : warp < CHANNELS * per;
        channel = LAST ? lane % LANES * PACK : any ? warp / per : 0;
        unit = LAST ? warp * RUN + lane / LANES : warp % per * RUN + lane;
        if (threadIdx.x == 0) {
            barrier_init(&shared.barrier);
            barrier_init_done();
        }
    }

    // Calls f(pack in shared memory, its offset in a band whose channels, or with LAST positions, are `step` elements
    // apart).
    template <typename F>
    __device__ void for_each(long long step, F f) const {
        const long long first = LAST ? channel : channel * step;
#pragma unroll(UNROLL)
        for (int i = 0; i < ITEMS; ++i)
            if (any && unit + i * STEP < units)
                f(i * THREADS + threadIdx.x, first + (unit + i * STEP) * (LAST ? step : PACK));
    }

    // The number of elements of channel c that the cluster's warps from `from` to before `to` have.
    __device__ float elements(int c, int from, int to) const {
        const int first = LAST ? 0 : c * per;
        const auto until = [&](int w) { return min(max(w - first, 0) * RUN, units); };
        return (until(to) - until(from)) * (LAST ? 1 : PACK);
    }

    // Takes this warp's sums of its channels, and sends all blocks this block's sums.
    __device__ void meet(const float (&a)[OWN], const float (&b)[OWN], int turn) {
        if (lane < (LAST ? LANES : 1))
#pragma unroll
            for (int j = 0; j < OWN; ++j) shared.found[threadIdx.x / 32][LAST ? channel + j : 0] = {a[j], b[j]};
        __syncthreads();
        if (CLUSTER > 1 && threadIdx.x == 0) barrier_expect(&shared.barrier, sizeof(shared.sent));
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
            const int own = rank * WARPS, first = LAST ? 0 : min(max(c * per - own, 0), WARPS),
                      last = LAST ? WARPS : min(max((c + 1) * per - own, 0), WARPS);
            const Sums here = merged(first, last, [&](int w) {
                const float2 s = shared.found[w][LAST ? c : 0];
                return Sums{elements(c, own + w, own + w + 1), s.x, s.y};
            });
            if constexpr (CLUSTER == 1)
                shared.sent[0][c] = {here.a, here.b};
            else
                for (int to = 0; to < CLUSTER; ++to)
                    cluster_send(&shared.sent[rank][c].x, {here.a, here.b}, &shared.barrier, to);
        }
        if (CLUSTER > 1) barrier_wait(&shared.barrier, turn & 1);
    }

    // The sums of channel c over all blocks.
    __device__ Sums together(int c) const {
        return merged(0, CLUSTER, [&](int r) {
            const float2 s = shared.sent[r][c];
            return Sums{elements(c, r * WARPS, (r + 1) * WARPS), s.x, s.y};
        });
    }
};

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    group_fwd(Y* y, float* mean, float* rstd, const X* x, const WTYPE* w, const BTYPE* b, int groups, int size,
              long long y_image, long long y_step, long long x_image, long long x_step, float eps) {
    Place place(groups, size);
    Shared& shared = place.shared;
    const int before = place.band * CHANNELS;  // channels
    x += place.image * x_image + before * (LAST ? 1 : x_step);
    y += place.image * y_image + before * (LAST ? 1 : y_step);
    place.for_each(x_step, [&](int p, long long at) {
        copy_async(shared.values + p, reinterpret_cast<const Pack<X, PACK>*>(x + at));
    });
    cluster_sync<CLUSTER>();
    copies_done();
    float a[OWN] = {}, d[OWN] = {};
    place.for_each(x_step, [&](int p, long long) {
        const Pack<X, PACK> pack = shared.values[p];
#pragma unroll
        for (int j = 0; j < PACK; ++j) a[j % OWN] += to_float(pack.at[j]);
    });
    const float part = 1.0f / fmaxf(place.elements(place.channel, place.warp, place.warp + 1), 1.0f);
#pragma unroll
    for (int j = 0; j < OWN; ++j) a[j] = over_lanes(a[j]) * part;
    place.for_each(x_step, [&](int p, long long) {
        const Pack<X, PACK> pack = shared.values[p];
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            const float off = to_float(pack.at[j]) - a[j % OWN];
            d[j % OWN] += off * off;
        }
    });
#pragma unroll
    for (int j = 0; j < OWN; ++j) d[j] = over_lanes(d[j]);
    place.meet(a, d, 0);
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
        const Sums all = place.together(c);
        shared.whole[c] = {all.a, all.b};
    }
    __syncthreads();
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
        const int first = c / WIDTH * WIDTH;
        const Sums all = merged(first, first + WIDTH,
                                [&](int k) { return Sums{(float)size, shared.whole[k].x, shared.whole[k].y}; });
        const float scale = 1.0f / sqrtf(all.b / all.n + eps), weight = scale * parameter(w, before + c, 1.0f);
        shared.middle[c] = all.a;
        shared.up[c] = weight;
        shared.add[c] = parameter(b, before + c, 0.0f) - all.rest * weight;
        if (place.rank == 0 && c == first) {
            const long long group = place.image * (long long)groups + (before + c) / WIDTH;
            mean[group] = all.a;
            rstd[group] = scale;
        }
    }
    __syncthreads();
    float middle[MEANS], up[OWN], add[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        middle[j % MEANS] = shared.middle[place.channel + j];
        up[j] = shared.up[place.channel + j];
        add[j] = shared.add[place.channel + j];
    }
    place.for_each(y_step, [&](int p, long long at) {
        const Pack<X, PACK> pack = shared.values[p];
        Pack<Y, PACK> out;
#pragma unroll
        for (int j = 0; j < PACK; ++j)
            from_float(activated((to_float(pack.at[j]) - middle[j % MEANS]) * up[j % OWN] + add[j % OWN]), out.at[j]);
        store(reinterpret_cast<Pack<Y, PACK>*>(y + at), out);
    });
}

#else
// dx and sums may be null. sums: of dy xh and of dy, (concurrent images, 2, channels).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    group_bwd(const Y* dy, X* dx, float* sums, const X* x, const WTYPE* w, const BTYPE* b, const float* mean,
              const float* rstd, int images, int groups, int size, long long dx_image, long long dx_step,
              long long dy_image, long long dy_step, long long x_image, long long x_step) {
    let_next_come();
    Place place(groups, size);
    Shared& shared = place.shared;
    const int before = place.band * CHANNELS, channels = groups * WIDTH;
    x += before * (LAST ? 1 : x_step);
    dy += before * (LAST ? 1 : dy_step);
    const bool slope = dx, sum = sums;  // wanted, tested before the pointers move
    dx += before * (LAST ? 1 : dx_step);
    sums += place.image * 2ll * channels + before;
    for (int image = place.image, turn = 0; image < images; image += place.images, ++turn) {
        const X* values = x + image * x_image;
        const Y* slopes = dy + image * dy_image;
        place.for_each(x_step, [&](int p, long long at) {
            copy_async(shared.values + p, reinterpret_cast<const Pack<X, PACK>*>(values + at));
        });
        place.for_each(dy_step, [&](int p, long long at) {
            copy_async(shared.slopes + p, reinterpret_cast<const Pack<Y, PACK>*>(slopes + at));
        });
        const long long group = image * (long long)groups + before / WIDTH;
        float middle[MEANS], a[OWN] = {}, d[OWN] = {};
#pragma unroll
        for (int j = 0; j < MEANS; ++j) middle[j] = mean[group + (place.channel + j) / WIDTH];
        float factor[OWN], shift[OWN];  // of each channel, for what SiLU was applied to
#pragma unroll
        for (int j = 0; SILU && j < OWN; ++j) {
            factor[j] = rstd[group + (place.channel + j) / WIDTH] * parameter(w, before + place.channel + j, 1.0f);
            shift[j] = parameter(b, before + place.channel + j, 0.0f);
        }
        // Element j of dy, before the activation.
        const auto earlier = [&](const Pack<Y, PACK>& slope, float off, int j) {
            return SILU ? to_float(slope.at[j]) * rate(off * factor[j % OWN] + shift[j % OWN]) : to_float(slope.at[j]);
        };
        cluster_sync<CLUSTER>();  // the barriers are ready, and the previous image's sums have been read
        copies_done();
        place.for_each(x_step, [&](int p, long long) {
            const Pack<X, PACK> value = shared.values[p];
            const Pack<Y, PACK> slope = shared.slopes[p];
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float off = to_float(value.at[j]) - middle[j % MEANS], g = earlier(slope, off, j);
                a[j % OWN] += g * off;
                d[j % OWN] += g;
            }
        });
#pragma unroll
        for (int j = 0; j < OWN; ++j) a[j] = over_lanes(a[j]), d[j] = over_lanes(d[j]);
        place.meet(a, d, turn);
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
            const Sums all = place.together(c);
            const float dw = all.a * rstd[group + c / WIDTH], weight = parameter(w, before + c, 1.0f);
            if (sum && place.rank == c % CLUSTER) {
                sums[c] = turn ? sums[c] + dw : dw;
                sums[channels + c] = turn ? sums[channels + c] + all.b : all.b;
            }
            shared.whole[c] = {dw * weight, all.b * weight};
        }
        if (!slope) continue;
        __syncthreads();
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
            const int first = c / WIDTH * WIDTH;
            const Sums all = merged(first, first + WIDTH,
                                    [&](int k) { return Sums{(float)size, shared.whole[k].x, shared.whole[k].y}; });
            const float scale = rstd[group + c / WIDTH];
            shared.middle[c] = -scale * scale * (all.a / all.n);
            shared.up[c] = scale * parameter(w, before + c, 1.0f);
            shared.add[c] = -scale * (all.b / all.n);
        }
        __syncthreads();
        float along[MEANS], up[OWN], add[MEANS];
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            along[j % MEANS] = shared.middle[place.channel + j];
            up[j] = shared.up[place.channel + j];
            add[j % MEANS] = shared.add[place.channel + j];
        }
        X* out = dx + image * dx_image;
        place.for_each(dx_step, [&](int p, long long at) {
            const Pack<X, PACK> value = shared.values[p];
            const Pack<Y, PACK> slope = shared.slopes[p];
            Pack<X, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float off = to_float(value.at[j]) - middle[j % MEANS];
                const float g = earlier(slope, off, j);
                from_float(g * up[j % OWN] + (off * along[j % MEANS] + add[j % MEANS]), pack.at[j]);
            }
            store(reinterpret_cast<Pack<X, PACK>*>(out + at), pack);
        });
    }
}
#endif
