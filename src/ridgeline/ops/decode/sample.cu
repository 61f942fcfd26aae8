// sample by thread-block clusters: a cluster of CLUSTER blocks holds a row in registers, as keys whose unsigned order
// is that of the logits, and reads it once. Cuts are found by histograms: first of equal steps of the logit, which
// spread the atomics, then of equal steps of the key inside the boundary bin, until one key is left. Masses are whole
// numbers of 2^-40 of the largest, as in _sample_rows.py, which draws the same tokens.
// Macros: XTYPE; CLUSTER; THREADS; CHUNKS packs of VECTOR elements a thread; MASK, whether there is a mask.
#include "elementwise.cuh"

using X = XTYPE;
using Whole = unsigned long long;
constexpr int BINS = 2048, SLICE = BINS / CLUSTER, WARPS = THREADS / 32, ENTRIES = CHUNKS * WARPS;
constexpr float SCALE = 1ull << 40, TINY = 1e-37f, LOG_SCALE = 28;  // exp(-28) has no mass
constexpr int PEAKS = CLUSTER * WARPS;
constexpr unsigned LEAST = 0x007fffff;                              // the key of -inf

struct Shared {
    Whole bins[BINS], entries[ENTRIES], partial[WARPS];
    unsigned tied[ENTRIES], most[WARPS], least[WARPS], entry;
    // What other blocks of the cluster write: a place for each.
    Whole slice[CLUSTER], mass[CLUSTER], above;
    unsigned ties[CLUSTER], high[CLUSTER], low[CLUSTER], wrong[CLUSTER], peaks[PEAKS], digit;
};

using Keys = unsigned[CHUNKS * VECTOR];

__device__ inline void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_meet() {
    cluster_arrive();
    cluster_wait();
}

// The same place in the shared memory of a block of the cluster.
template <typename T>
__device__ inline T* of_block(T* place, unsigned rank) {
    Whole there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((Whole)place), "r"(rank));
    return (T*)there;
}

// Division and exponential as Triton compiles them, so that masses have the same bits.
__device__ inline float quotient(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value == 0 ? 0.0f : value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float value_of(unsigned key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

// What turns keys into masses and bins.
struct Row {
    float top, t, step;

    __device__ float exponent(float value) const { return value == top ? 0.0f : quotient(__fsub_rn(value, top), t); }
    __device__ float weight(float value) const { return power_of_2(__fmul_rn(exponent(value), 1.44269504f)); }
    __device__ Whole mass(unsigned key) const {
        return (Whole)__float2ll_rz(__fmul_rn(weight(value_of(key)), SCALE));
    }
    // Equal steps of the logit from the largest down; the last bin takes the rest.
    __device__ unsigned bin(unsigned key) const {
        const float value = value_of(key), at = __fmul_rn(top - value, step);
        return value == top ? 0 : at >= 0 && at < BINS - 1 ? (unsigned)at : BINS - 1;
    }
};

template <typename T>
__device__ inline T warp_scan(T x) {  // inclusive
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
        const T before = __shfl_up_sync(~0u, x, n);
        if (threadIdx.x % 32 >= n) x += before;
    }
    return x;
}

// Adds to a bin by 32-bit atomics, which shared memory has.
__device__ inline void add(Whole* bin, Whole amount) {
    unsigned* half = reinterpret_cast<unsigned*>(bin);
    const unsigned low = (unsigned)amount, before = atomicAdd(half, low);
    const unsigned high = (unsigned)(amount >> 32) + (before + low < before);
    if (high) atomicAdd(half + 1, high);
}

// Largest and smallest key of the cluster, from each thread's.
__device__ inline void extremes(Shared& s, unsigned rank, unsigned& high, unsigned& low) {
    const unsigned warp = threadIdx.x / 32;
    high = __reduce_max_sync(~0u, high);
    low = __reduce_min_sync(~0u, low);
    if (threadIdx.x % 32 == 0) s.most[warp] = high, s.least[warp] = low;
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        for (int n = 0; n < WARPS; ++n) high = max(high, s.most[n]), low = min(low, s.least[n]);
        of_block(s.high, threadIdx.x)[rank] = high;
        of_block(s.low, threadIdx.x)[rank] = low;
    }
    cluster_meet();
    high = 0, low = ~0u;
    for (int n = 0; n < CLUSTER; ++n) high = max(high, s.high[n]), low = min(low, s.low[n]);
}

// The k-th largest of the warps' largest keys, 1 if there are fewer: at least k keys are not below it, and mostly few
// more. The warps have left their largest in s.peaks.
__device__ inline unsigned bound(Shared& s, int k) {
    if (k > PEAKS) return 1;
    const unsigned n = threadIdx.x;
    if (n < PEAKS) {
        const unsigned mine = s.peaks[n];
        int rank = 0;
        for (unsigned i = 0; i < PEAKS; ++i) rank += s.peaks[i] > mine || (s.peaks[i] == mine && i < n);
        if (rank == k - 1) s.entry = max(mine, 1u);
    }
    __syncthreads();
    return s.entry;
}

// This thread's bin of the cluster's histogram, summed over blocks, and the sum up to it in this block's slice.
__device__ inline Whole merged(Shared& s, unsigned rank, Whole& own) {
    const unsigned thread = threadIdx.x, warp = thread / 32;
    own = 0;
    if (thread < SLICE)
        for (int n = 0; n < CLUSTER; ++n) own += of_block(s.bins, n)[rank * SLICE + thread];
    Whole sum = warp_scan(own);
    if (thread % 32 == 31) s.partial[warp] = sum;
    __syncthreads();
    for (int n = 0; n < warp; ++n) sum += s.partial[n];
    if (thread < CLUSTER) {
        Whole all = 0;
        for (int n = 0; n < WARPS; ++n) all += s.partial[n];
        of_block(s.slice, thread)[rank] = all;
    }
    cluster_meet();
    return sum;
}

// One histogram of the keys from `low` to `high`: narrows them to the keys of the bin that holds the `goal`-th unit,
// from above, and takes off `goal` what lies above that bin. FIRST bins by value, later ones by key. `wanted` gives the
// goal from the sum of all; if that is larger than the sum, nothing is narrowed.
template <bool MASS, bool FIRST, typename F>
__device__ inline bool narrow(const Keys& keys, Shared& s, unsigned rank, const Row& row, unsigned& low, unsigned& high,
                              Whole& goal, F wanted) {
    const int shift = max(0, 32 - __clz(high - low) - 11);
    const unsigned top = high, bottom = low;
    auto digit_of = [&](unsigned key) { return FIRST ? row.bin(key) : (top - key) >> shift; };
    for (int n = threadIdx.x; n < BINS; n += THREADS) s.bins[n] = 0;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < CHUNKS * VECTOR; ++n)
        if (keys[n] >= bottom && keys[n] <= top) {
            const Whole amount = MASS ? row.mass(keys[n]) : 1;
            if (amount) add(s.bins + digit_of(keys[n]), amount);
        }
    cluster_meet();
    Whole own, sum = merged(s, rank, own), before = 0, all = 0;
    for (int n = 0; n < CLUSTER; ++n) {
        before += n < rank ? s.slice[n] : 0;
        all += s.slice[n];
    }
    if (FIRST) goal = wanted(all);
    if (goal > all) return false;
    sum += before;
    if (threadIdx.x < SLICE && sum >= goal && sum - own < goal)
        for (int n = 0; n < CLUSTER; ++n) {
            *of_block(&s.above, n) = sum - own;
            *of_block(&s.digit, n) = rank * SLICE + threadIdx.x;
        }
    cluster_meet();
    goal -= s.above;
    high = 0, low = ~0u;
#pragma unroll
    for (int n = 0; n < CHUNKS * VECTOR; ++n)
        if (keys[n] >= bottom && keys[n] <= top && digit_of(keys[n]) == s.digit)
            high = max(high, keys[n]), low = min(low, keys[n]);
    extremes(s, rank, high, low);
    return true;
}

// Narrows until one key is left; whether it holds the goal.
template <bool MASS, typename F>
__device__ inline bool select(const Keys& keys, Shared& s, unsigned rank, const Row& row, unsigned& low, unsigned high,
                              Whole& goal, F wanted) {
    if (!narrow<MASS, true>(keys, s, rank, row, low, high, goal, wanted)) return false;
    while (low < high) narrow<MASS, false>(keys, s, rank, row, low, high, goal, wanted);
    return true;
}

// Replaces a block's entries by the sums before them; returns the sum of all, to the first warp.
template <typename T>
__device__ inline T scan_entries(T* entries) {
    constexpr int SPAN = (ENTRIES + 31) / 32;
    const int first = threadIdx.x * SPAN;
    T own = 0;
    for (int n = 0; n < SPAN; ++n) own += first + n < ENTRIES ? entries[first + n] : 0;
    const T sum = warp_scan(own);
    T before = sum - own;
    for (int n = 0; n < SPAN && first + n < ENTRIES; ++n) {
        const T entry = entries[first + n];
        entries[first + n] = before;
        before += entry;
    }
    return __shfl_sync(~0u, sum, 31);
}

// Sums of the cluster's blocks, given each block's entries: those before this block, and all.
template <typename T>
__device__ inline T cluster_scan(T* entries, T* blocks, unsigned rank, T& all) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const T sum = scan_entries(entries);
        if (threadIdx.x < CLUSTER) of_block(blocks, threadIdx.x)[rank] = sum;
    }
    cluster_meet();
    T before = 0;
    all = 0;
    for (int n = 0; n < CLUSTER; ++n) {
        before += n < rank ? blocks[n] : 0;
        all += blocks[n];
    }
    return before;
}

// 31 random bits of a row.
__device__ inline Whole uniform(unsigned c0, unsigned c1, unsigned k0, unsigned k1) {
    unsigned c2 = 0, c3 = 0;
    for (int n = 0; n < 10; ++n) {
        const Whole x = (Whole)c2 * 0xCD9E8D57u, y = (Whole)c0 * 0xD2511F53u;
        c0 = (unsigned)(x >> 32) ^ c1 ^ k0;
        c1 = (unsigned)x;
        c2 = (unsigned)(y >> 32) ^ c3 ^ k1;
        c3 = (unsigned)y;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 >> 1;
}

// A bit for each of the thread's elements that stays: above the cut, or one of its first `ties` by index, and not below
// min_p.
__device__ inline Whole kept_bits(const Keys& keys, Shared& s, unsigned rank, const Row& row, unsigned cut, Whole ties,
                                  float least) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned before = 0, all = 0;
    if (cut) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            unsigned count = 0;
            for (int e = 0; e < VECTOR; ++e) count += keys[c * VECTOR + e] == cut;
            count = __reduce_add_sync(~0u, count);
            if (lane == 0) s.tied[c * WARPS + warp] = count;
        }
        before = cluster_scan(s.tied, s.ties, rank, all);
    }
    Whole bits = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        unsigned count = 0, seen = 0;
        for (int e = 0; e < VECTOR; ++e) count += keys[c * VECTOR + e] == cut;
        if (cut && all > ties && __ballot_sync(~0u, count))
            seen = before + s.tied[c * WARPS + warp] + warp_scan(count) - count;
        for (int e = 0; e < VECTOR; ++e) {
            const unsigned key = keys[c * VECTOR + e];
            bool keep = key > cut;
            if (cut && key == cut) keep = seen++ < ties || all <= ties;
            if (keep && !(least <= 0)) {
                const float value = value_of(key);
                keep = value == row.top || row.weight(value) >= least;
            }
            bits |= (Whole)keep << (c * VECTOR + e);
        }
    }
    return bits;
}

__device__ inline Whole chunk_mass(const Keys& keys, const Row& row, Whole bits, int c) {
    Whole sum = 0;
    for (int e = 0; e < VECTOR; ++e)
        if (bits >> (c * VECTOR + e) & 1) sum += row.mass(keys[c * VECTOR + e]);
    return sum;
}

// Writes the token at which the kept masses, in the order of indices, pass a share `random` / 2^31 of their sum.
__device__ inline void draw(const Keys& keys, Shared& s, unsigned rank, const Row& row, Whole bits, Whole random,
                            int begin, long long& token, float& chance) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        Whole sum = 0;
        if (__ballot_sync(~0u, (unsigned)(bits >> (c * VECTOR)) & ((1u << VECTOR) - 1))) {
            sum = chunk_mass(keys, row, bits, c);
#pragma unroll
            for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
        }
        if (lane == 0) s.entries[c * WARPS + warp] = sum;
    }
    Whole all;
    const Whole before = cluster_scan(s.entries, s.mass, rank, all), own = s.mass[rank];
    const Whole goal = (all >> 32) * random * 2 + ((all & 0xffffffffu) * random >> 31);
    if (goal < before || goal >= before + own) return;  // the whole block
    const Whole left = goal - before;
    for (int n = threadIdx.x; n < ENTRIES; n += THREADS)
        if (s.entries[n] <= left && left < (n + 1 < ENTRIES ? s.entries[n + 1] : own)) s.entry = n;
    __syncthreads();
    if (s.entry % WARPS != warp) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (s.entry / WARPS == c) {
            const Whole mine = chunk_mass(keys, row, bits, c), upto = s.entries[s.entry] + warp_scan(mine);
            Whole sum = upto - mine;
            if (sum > left || left >= upto) return;
            for (int e = 0; e < VECTOR; ++e) {
                if (!(bits >> (c * VECTOR + e) & 1)) continue;
                sum += row.mass(keys[c * VECTOR + e]);
                if (sum <= left) continue;
                token = begin + (c * THREADS + threadIdx.x) * VECTOR + e;
                chance = row.exponent(value_of(keys[c * VECTOR + e])) - logf(__ll2float_rn(all) / SCALE);
                return;
            }
        }
}

// This thread's keys of a row's part, 0 beyond its end; whether one is NaN.
__device__ inline bool load(Keys& keys, const X* x, const unsigned char* mask, long long step, int count) {
    Pack<X, VECTOR> packs[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int i = c * THREADS + threadIdx.x;
        if (i * VECTOR < count) packs[c] = reinterpret_cast<const Pack<X, VECTOR>*>(x)[i];
    }
    bool wrong = false;
#pragma unroll
    for (int n = 0; n < CHUNKS * VECTOR; ++n) {
        const int i = (n / VECTOR * THREADS + threadIdx.x) * VECTOR + n % VECTOR;
        const bool inside = i < count, allowed = !MASK || (inside && mask[i * step]);
        const float value = inside ? to_float(packs[n / VECTOR].at[n % VECTOR]) : 0;
        keys[n] = !inside ? 0 : allowed ? key_of(value) : LEAST;
        wrong |= inside && allowed && value != value;
    }
    return wrong;
}

// Two blocks fit a multiprocessor, so that 32 rows of 128256 run at once.
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS * VECTOR <= 32 ? 2 : 1)
    sample_fwd(long long* token, float* logprob, const X* x, const unsigned char* mask, const float* temperature,
               const long long* top_k, const float* top_p, const float* min_p, const long long* seed,
               const long long* offset, long long x_row, long long mask_row, long long mask_step, float t, int k,
               float p, float m, int seed_low, int seed_high, int position, int V, int part) {
    __shared__ Shared s;
    const unsigned rank = blockIdx.x % CLUSTER;
    const long long row = blockIdx.x / CLUSTER;
    const int begin = min((int)rank * part, V);
    cluster_arrive();  // all blocks run before one writes to another
    Keys keys;
    const bool nan = load(keys, x + row * x_row + begin, mask + row * mask_row + begin * mask_step, mask_step,
                          min(part, V - begin));
    if (temperature) t = temperature[row];
    if (top_k) k = (int)min(max(top_k[row], 1ll), (long long)V);
    if (top_p) p = top_p[row];
    if (min_p) m = min_p[row];
    if (t < TINY) k = 1, t = 1;
    unsigned high = 0, low = ~0u;
#pragma unroll
    for (int n = 0; n < CHUNKS * VECTOR; ++n) {
        high = max(high, keys[n]);
        if (keys[n] > LEAST) low = min(low, keys[n]);
    }
    const bool wrong_here = __syncthreads_or(nan);
    cluster_wait();
    if (threadIdx.x < CLUSTER) of_block(s.wrong, threadIdx.x)[rank] = wrong_here;
    const unsigned peak = __reduce_max_sync(~0u, high), lane = threadIdx.x % 32;
    if (lane < CLUSTER) of_block(s.peaks, lane)[rank * WARPS + threadIdx.x / 32] = peak;
    extremes(s, rank, high, low);
    bool none = high <= LEAST || t != t;
    for (int n = 0; n < CLUSTER; ++n) none |= s.wrong[n] != 0;
    if (none) {
        if (rank == 0 && threadIdx.x == 0) token[row] = -1, logprob[row] = __uint_as_float(0x7fffffff);
        return;
    }
    const float top = value_of(high), range = top - value_of(low);
    unsigned cut = 0;
    Whole ties = V;
    if (k < V) {
        cut = bound(s, k);
        const float reach = cut > LEAST ? top - value_of(cut) : range;
        select<false>(keys, s, rank, {top, t, BINS / reach}, cut, high, ties, [&](Whole) { return (Whole)k; });
    }
    const Row found{top, t, BINS / fminf(cut ? top - value_of(cut) : range, LOG_SCALE * t)};
    if (p < 1) {
        unsigned key = cut + 1;
        Whole goal = 0;
        const Whole each = cut ? found.mass(cut) : 0;
        auto wanted = [&](Whole all) {
            const double total = __ll2double_rn(all + each * (cut ? ties : 0));
            return (Whole)max(1ll, __double2ll_rz(ceil(__dmul_rn(total, (double)p))));
        };
        if (cut == high) goal = wanted(0);
        if (cut < high && select<true>(keys, s, rank, found, key, high, goal, wanted)) {
            cut = key;
            const Whole unit = max(found.mass(key), 1ull);
            ties = (goal + unit - 1) / unit;
        } else {
            // All keys above the cut stay; `goal` is still that of all, and s.slice their masses.
            Whole above = 0;
            if (cut < high)
                for (int n = 0; n < CLUSTER; ++n) above += s.slice[n];
            const Whole unit = max(each, 1ull);
            ties = (goal - above + unit - 1) / unit;
        }
    }
    const Whole bits = kept_bits(keys, s, rank, found, cut, ties, m);
    if (seed) seed_low = (int)*seed, seed_high = (int)(*seed >> 32);
    if (offset) position = (int)*offset;
    draw(keys, s, rank, found, bits, uniform((unsigned)row, position, seed_low, seed_high), begin, token[row],
         logprob[row]);
}
