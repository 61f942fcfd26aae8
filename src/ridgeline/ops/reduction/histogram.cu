// histogram in CUDA C++. An element's bin is floor((v - low) * bins / (high - low)) in float64, and `high` itself counts in the last.
// Macros: XTYPE the elements, FLOATING whether these are floats, PACK those of a load, LOADS of a thread on their
// way (at most 32 elements), COPIES of the counts in a block's shared memory (a power of two, at most 32).
#include "elementwise.cuh"

using X = XTYPE;
using Count = unsigned long long;

// Where the bins lie. Float32 gives an element's bin unless it falls next to an edge, nearer than its roundings reach: then float64 says.
struct Range {
    const double* ends;  // low and high, in shared memory to spare registers: they are seldom asked for
    int bins;
    float start, scale, reach;
    bool doubling;  // the scale is a power of two, so that float32 errs in the difference alone

    // From the given range, or where `least` is not null from the data's own. All threads call this.
    __device__ Range(double* room, const X* least, const X* most, double from, double to, int bins) : ends(room), bins(bins) {
        double low = least ? value(*least) : from, high = most ? value(*most) : to;
        if (low == high) low -= 1, high += 1;
        if (threadIdx.x == 0) room[0] = low, room[1] = high;
        __syncthreads();
        start = (float)low;
        scale = (float)(bins / (high - low));
        doubling = !(__float_as_int(scale) & 0x7fffff) && (double)scale * (high - low) == bins && (double)start == low;
        reach = 5e-7f * ((float)bins + scale * fmaxf(fabsf((float)low), fabsf((float)high)));
    }

    static __device__ double value(float x) { return x; }
    static __device__ double value(__half x) { return to_float(x); }
    static __device__ double value(__nv_bfloat16 x) { return to_float(x); }
    static __device__ double value(int x) { return x; }
    static __device__ double value(long long x) { return (double)x; }

    // The bin, -1 for what lies outside, or -2 where `exact` must say. 1.5 * 2^23 added, and taken away, rounds a number to a whole one, whose bits
    // are then at the low end: conversions would take four times as long.
    __device__ int bin(X x) const {
        float given;
        if constexpr (FLOATING)
            given = to_float(x);
        else
            given = (float)x;
        const float difference = given - start, near = difference * scale;
        const float shifted = (near - 0.5f) + 12582912.0f, over = near - (shifted - 12582912.0f);
        if (over > reach && over < 1.0f - reach) return near > 0 && near < (float)bins ? __float_as_int(shifted) - 0x4b400000 : -1;
        if (doubling && (FLOATING || (long long)given == (long long)value(x))) {
            const float back = difference - given, lost = (given - (difference - back)) + (-start - back);
            if (lost == 0) return near >= 0 && near <= (float)bins ? (int)fminf(floorf(near), (float)bins - 1) : -1;
        }
        return -2;
    }

    __device__ int exact(X x) const {
        const double v = value(x), low = ends[0], high = ends[1];
        if (!(v >= low && v <= high)) return -1;
        const double bin = (v - low) * bins / (high - low);
        return bin >= 0 ? (int)fmin(bin, bins - 1.0) : -1;
    }
};

extern "C" __global__ void histogram_clear(Count* counts, long long bins) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < bins) counts[i] = 0;
}

// Every element is an atomic on memory.
extern "C" __global__ void histogram_global(Count* counts, const X* x, const X* least, const X* most, long long n, int bins, double low, double high) {
    __shared__ double room[2];
    const Range range(room, least, most, low, high, bins);
    const long long threads = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
        int bin = range.bin(x[i]);
        if (bin == -2) bin = range.exact(x[i]);
        if (bin >= 0) atomicAdd(counts + bin, 1ULL);
    }
}

// A block counts in shared memory, in COPIES copies side by side, so that lanes of a warp that meet in a bin meet in different banks; at
// the end it adds what it counted to memory.
extern "C" __global__ void __launch_bounds__(512, 2)
    histogram_shared(Count* counts, const X* x, const X* least, const X* most, long long n, int bins, double low, double high) {
    extern __shared__ unsigned own[];
    __shared__ double room[2];
    const Range range(room, least, most, low, high, bins);
    for (int i = threadIdx.x; i < bins * COPIES; i += blockDim.x) own[i] = 0;
    __syncthreads();
    unsigned* mine = own + threadIdx.x % COPIES;
    const auto count = [&](int bin) {
        if (bin >= 0) atomicAdd(mine + bin * COPIES, 1u);
    };
    const long long step = blockDim.x * (long long)LOADS, packs = n / PACK;
    for (long long start = blockIdx.x * step + threadIdx.x; start < packs; start += gridDim.x * step) {
        Pack<X, PACK> pack[LOADS];
        unsigned unsure = 0;  // a bit for each element that float64 must look at, which is read again
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (start + u * blockDim.x < packs) pack[u] = reinterpret_cast<const Pack<X, PACK>*>(x)[start + u * blockDim.x];
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (start + u * blockDim.x < packs) {
#pragma unroll
                for (int j = 0; j < PACK; ++j) {
                    const int bin = range.bin(pack[u].at[j]);
                    count(bin);
                    if (bin == -2) unsure |= 1u << (u * PACK + j);
                }
            }
        for (; unsure; unsure &= unsure - 1) {
            const int k = __ffs(unsure) - 1;
            count(range.exact(x[(start + k / PACK * blockDim.x) * PACK + k % PACK]));
        }
    }
    if (PACK > 1 && blockIdx.x == 0 && threadIdx.x < n % PACK) count(range.exact(x[packs * PACK + threadIdx.x]));
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        unsigned sum = 0;
        for (int c = 0; c < COPIES; ++c) sum += own[bin * COPIES + (c + threadIdx.x) % COPIES];
        if (sum) atomicAdd(counts + bin, (Count)sum);
    }
}
