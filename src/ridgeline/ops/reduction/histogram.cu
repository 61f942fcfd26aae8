// histogram in CUDA C++. An element's bin is floor((v - low) * bins / (high - low)) in float64; `high` itself counts in
// the last bin.
// Macros: XTYPE the elements; FLOATING whether they are floats; PACK elements per load; LOADS in flight per thread (at
// most 32 elements); COPIES of the counts in a block's shared memory (a power of two, at most 32); THREADS of such a
// block.
#include "elementwise.cuh"

using X = XTYPE;
using Count = unsigned long long;

// Where the bins lie. One fused multiply-add, rounded down, turns an element into a fixed-point number in the mantissa:
// the bin, and below it the `fraction`. That decides the bin unless the element is so close to an edge that rounding
// matters: then float64 decides.
struct Range {
    const double* ends;  // low and high, rarely needed: shared memory saves registers
    int bins, shift;     // shift: the bits of the fraction
    float scale, offset;
    // Fixed point. Fractions below `near` are close to an edge, and so is everything from `end` to `limit`.
    unsigned zero, end, limit, fraction, near;

    // From the given range or, if `least` is not null, from the data's extremes. All threads must call this.
    __device__ Range(double* room, const X* least, const X* most, double from, double to, int bins)
        : ends(room), bins(bins) {
        double low = least ? value(*least) : from, high = most ? value(*most) : to;
        if (low == high) low -= 1, high += 1;
        if (threadIdx.x == 0) room[0] = low, room[1] = high;
        __syncthreads();
        shift = max(__clz((bins - 1) | 1) - 9, 0);  // 23 bits hold the bins and the fraction
        const double one = 1u << shift, base = 8388608.0 / one, largest = fmax(fabs(low), fabs(high));
        scale = (float)(bins / (high - low));
        // A power of two times a number, and its fixed-point value, are exact: only float64 itself rounds, just below
        // an edge.
        offset = (float)(base - low * scale + 1 / one);
        const bool exact = !(__float_as_int(scale) & 0x7fffff) && (double)scale * (high - low) == bins &&
                           (double)offset - base - 1 / one == -low * scale && (FLOATING || largest < 16777216);
        const double reach = 2 + one * scale * largest * 2.5e-7;
        if (!exact) offset = (float)(base - low * scale + reach / one);
        fraction = (unsigned)one - 1;
        zero = __float_as_uint((float)base);
        end = (unsigned)bins << shift;
        near = exact ? 1 : 2 * (unsigned)fmin(reach, one) + 2;
        limit = end + near;
        if (!(scale > 1e-30f && reach < one / 4)) near = limit = ~0u;  // float32 cannot decide anything
    }

    static __device__ double value(float x) { return x; }
    static __device__ double value(__half x) { return to_float(x); }
    static __device__ double value(__nv_bfloat16 x) { return to_float(x); }
    static __device__ double value(int x) { return x; }
    static __device__ double value(long long x) { return (double)x; }

    // An element in fixed point: if `sure`, `bin` is its bin; if `unsure`, float64 must decide; otherwise it lies
    // outside.
    struct Place {
        unsigned bin;
        bool sure, unsure;
    };
    __device__ Place place(X x) const {
        float given;
        if constexpr (FLOATING)
            given = to_float(x);
        else
            given = (float)x;
        const unsigned bits = __float_as_uint(__fmaf_rd(given, scale, offset)), at = bits - zero;
        const bool sure = at < end && (bits & fraction) >= near;
        return {at >> shift, sure, at <= limit && !sure};
    }

    // The bin, or -1 for an element outside the range, in float64.
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

// One atomic on global memory per element.
extern "C" __global__ void histogram_global(Count* counts, const X* x, const X* least, const X* most, long long n,
                                            int bins, double low, double high) {
    __shared__ double room[2];
    const Range range(room, least, most, low, high, bins);
    const long long threads = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
        const Range::Place place = range.place(x[i]);
        const int bin = place.sure ? (int)place.bin : place.unsure ? range.exact(x[i]) : -1;
        if (bin >= 0) atomicAdd(counts + bin, 1ULL);
    }
}

// A block counts in shared memory, in COPIES interleaved copies, so lanes that hit the same bin hit different banks. At
// the end it adds its counts to global memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    histogram_shared(Count* counts, const X* x, const X* least, const X* most, long long n, int bins, double low,
                     double high) {
    extern __shared__ unsigned own[];
    __shared__ double room[2];
    const Range range(room, least, most, low, high, bins);
    for (int i = threadIdx.x; i < (bins + 1) * COPIES; i += THREADS) own[i] = 0;
    __syncthreads();
    unsigned mine;  // the address of this thread's count of bin 0; `volatile` keeps the compiler from recomputing it
    asm volatile("mov.u32 %0, %1;" : "=r"(mine) : "r"((unsigned)__cvta_generic_to_shared(own + threadIdx.x % COPIES)));
    // Elements that do not count go to an extra last bin: that is faster than a branch around each addition.
    const auto count = [&](int bin, bool there) {
        asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(mine + (there ? bin : bins) * (4 * COPIES)) : "memory");
    };
    const auto count_exactly = [&](X x) {
        const int bin = range.exact(x);
        count(bin, bin >= 0);
    };
    const long long packs = n / PACK, step = gridDim.x * (long long)(THREADS * LOADS);
    long long left =
        packs - blockIdx.x * (long long)(THREADS * LOADS) - threadIdx.x;  // packs from this thread's first on
    const Pack<X, PACK>* from = reinterpret_cast<const Pack<X, PACK>*>(x) + (packs - left);
    for (; left > 0; left -= step, from += step) {
        const int here = (int)min(left, (long long)(THREADS * LOADS));
        Pack<X, PACK> pack[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (u * THREADS < here) pack[u] = from[u * THREADS];
        unsigned unsure = 0;  // a bit for each element that is read again for float64 to decide
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (u * THREADS < here) {
#pragma unroll
                for (int j = 0; j < PACK; ++j) {
                    const Range::Place place = range.place(pack[u].at[j]);
                    count(place.bin, place.sure);
                    unsure |= (unsigned)place.unsure << (u * PACK + j);
                }
            }
        for (; unsure; unsure &= unsure - 1) {
            const int k = __ffs(unsure) - 1;
            count_exactly(from[k / PACK * THREADS].at[k % PACK]);
        }
    }
    if (PACK > 1 && blockIdx.x == 0 && threadIdx.x < n % PACK) count_exactly(x[packs * PACK + threadIdx.x]);
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) {
        unsigned sum = 0;
        for (int c = 0; c < COPIES; ++c) sum += own[bin * COPIES + (c + threadIdx.x) % COPIES];
        if (sum) atomicAdd(counts + bin, (Count)sum);
    }
}
