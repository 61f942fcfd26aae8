// index_add in CUDA C++. x and y are (outer, size, inner) and source (outer, n, inner), all contiguous. Row index[k] of
// y takes row k of source.
// Macros: DTYPE the elements, ITYPE the indices (int or long long), PACK the elements of a load (it divides inner); the
// others are explained at their kernels.
// An index out of range is replaced by the nearest valid one, and gives NaN there.
#include "early.cuh"
#include "elementwise.cuh"

using T = DTYPE;
using I = ITYPE;
using Packed = Pack<T, PACK>;

__device__ inline long long nearest(long long row, long long size) { return row < 0 ? 0 : row < size ? row : size - 1; }

__device__ inline float nan_if(bool bad, float value) { return bad ? __int_as_float(0x7fffffff) : value; }

// A unit of work: one or several packs at `column` of row `item` (of `items`) of slice `o`.
struct Unit {
    long long o, item, column;
    __device__ Unit(long long unit, long long items, long long pieces, long long wide) {
        column = unit % pieces * wide;
        item = unit / pieces % items;
        o = unit / pieces / items;
    }
};

// At most 16 indices: a thread owns a position in a row and adds every source row there in order, so no two threads
// collide.
extern "C" __global__ void index_add_small(T* y, const I* index, const T* source, long long outer, long long size,
                                           long long n, long long inner, float alpha) {
    const long long threads = gridDim.x * (long long)blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < outer * inner; i += threads) {
        const long long o = i / inner, column = i % inner;
        for (long long k = 0; k < n; ++k) {
            const long long row = index[k], to = (o * size + nearest(row, size)) * inner + column;
            const float value = alpha * to_float(source[(o * n + k) * inner + column]);
            from_float(to_float(y[to]) + nan_if(row < 0 || row >= size, value), y[to]);
        }
    }
}

__device__ inline void add_one(T* y, long long i, const I* index, const T* source, long long size, long long n,
                               long long inner, float alpha) {
    const Unit unit(i, n, inner, 1);
    const long long row = index[unit.item];
    T value;
    from_float(nan_if(row < 0 || row >= size, alpha * to_float(source[i])), value);
    atomicAdd(y + (unit.o * size + nearest(row, size)) * inner + unit.column, value);
}

// More indices: a grid as large as the GPU holds at once loops over the source's elements.
extern "C" __global__ void index_add_large(T* y, const I* index, const T* source, long long outer, long long size,
                                           long long n, long long inner, float alpha) {
    const long long threads = gridDim.x * (long long)blockDim.x, count = outer * n * inner;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += threads)
        add_one(y, i, index, source, size, n, inner, alpha);
}

// One thread per element of the source.
extern "C" __global__ void index_add_atomic(T* y, const I* index, const T* source, long long outer, long long size,
                                            long long n, long long inner, float alpha) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < outer * n * inner) add_one(y, i, index, source, size, n, inner, alpha);
}

// Adds 16 bytes: one request from Hopper on, otherwise four of a float or of two halves. Like all atomics, in no fixed
// order.
__device__ inline void add_packed(float* y, const Pack<float, 4>& v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(y)), "f"(v.at[0]),
                 "f"(v.at[1]), "f"(v.at[2]), "f"(v.at[3])
                 : "memory");
#else
    for (int j = 0; j < 4; ++j) atomicAdd(y + j, v.at[j]);
#endif
}

template <typename Half>
__device__ void add_packed(Half* y, const Pack<Half, 8>& v) {
#if __CUDA_ARCH__ >= 900
    const uint4 w = reinterpret_cast<const uint4&>(v);
    if constexpr (is_half<Half>)
        asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(y)),
                     "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
    else
        asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(y)),
                     "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
#else
    if constexpr (is_half<Half>)
        for (int j = 0; j < 8; j += 2)
            atomicAdd(reinterpret_cast<__half2*>(y + j), reinterpret_cast<const __half2&>(v.at[j]));
    else
        for (int j = 0; j < 8; j += 2)
            atomicAdd(reinterpret_cast<__nv_bfloat162*>(y + j), reinterpret_cast<const __nv_bfloat162&>(v.at[j]));
#endif
}

#if PACK * 2 >= 8
extern "C" __global__ void index_add_packed(T* y, const I* index, const T* source, long long outer, long long size,
                                            long long n, long long inner, float alpha) {
    const long long threads = gridDim.x * (long long)blockDim.x, packs = inner / PACK, count = outer * n * packs;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += threads) {
        const Unit unit(i, n, packs, 1);
        const long long row = index[unit.item];
        Packed pack = reinterpret_cast<const Packed*>(source)[i];
#pragma unroll
        for (int j = 0; j < PACK; ++j)
            from_float(nan_if(row < 0 || row >= size, alpha * to_float(pack.at[j])), pack.at[j]);
        add_packed(y + (unit.o * size + nearest(row, size)) * inner + unit.column * PACK, pack);
    }
}
#endif

// A pack of a row of y, accumulated in float32 in the order of the source.
struct Sum {
    float at[PACK];
    __device__ void take(const T* from) {
        const Packed pack = *reinterpret_cast<const Packed*>(from);
#pragma unroll
        for (int j = 0; j < PACK; ++j) at[j] = to_float(pack.at[j]);
    }
    __device__ void add(const Packed& pack, float alpha) {
#pragma unroll
        for (int j = 0; j < PACK; ++j) at[j] = fmaf(alpha, to_float(pack.at[j]), at[j]);
    }
    __device__ void put(T* to, bool bad) const {
        Packed pack;
#pragma unroll
        for (int j = 0; j < PACK; ++j) from_float(nan_if(bad, at[j]), pack.at[j]);
        store_global(to, pack);
    }
};

// At most 1024 indices, in one pass. A block copies the same part of several slices of x and looks for the indices
// whose rows reach into it. If there are any, equal ones are linked in order. One thread per pack of such a row
// computes x plus its source rows.
// THREADS: a power of 2; COPY: elements per load; LOADS: loads per thread; BATCH: source rows in flight.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    index_add_pass(T* y, const T* x, const I* __restrict__ index, const T* source, long long outer, long long size,
                   long long n, long long inner, float alpha) {
    using Copied = Pack<T, COPY>;
    constexpr int MOST = 1024, WARPS = THREADS / 32, PART = THREADS * LOADS * COPY;
    __shared__ unsigned found[MOST / 32];  // a bit for each index
    // Of each index found: its number, where its row begins here, and the next equal one or 0.
    __shared__ short item[MOST], spot[MOST], next[MOST];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, words = ((int)n + 31) / 32;
    const long long slice = size * inner, begin = blockIdx.x * (long long)PART;
    // A strided x was copied before.
    const int count = (int)min((long long)PART, slice - begin), moved = x == y ? 0 : count;
    const auto start_of = [&](long long row) { return nearest(row, size) * inner - begin; };

    Copied copied[LOADS];
    const auto load = [&](long long o) {
        const Copied* from = reinterpret_cast<const Copied*>(x + o * slice + begin) + threadIdx.x;
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            copied[u] = u * THREADS + threadIdx.x < moved / COPY ? from[u * THREADS] : Copied{};
    };
    const auto store = [&](long long o) {
        Copied* to = reinterpret_cast<Copied*>(y + o * slice + begin) + threadIdx.x;
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (u * THREADS + threadIdx.x < moved / COPY) to[u * THREADS] = copied[u];
        const long long rest = o * slice + begin + moved / COPY * COPY + threadIdx.x;
        if (COPY > 1 && threadIdx.x < moved % COPY) y[rest] = x[rest];
    };
    load(blockIdx.y);

    bool any = false;
    for (int first = warp; first < words; first += 4 * WARPS) {
        I given[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) given[u] = index[min((first + u * WARPS) * 32 + lane, (int)n - 1)];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int word = first + u * WARPS;
            const long long start = start_of(given[u]);
            const unsigned hits = __ballot_sync(~0u, word * 32 + lane < n && start < count && start > -inner);
            if (lane == 0 && word < words) found[word] = hits;
            any |= hits != 0;
        }
    }
    any = __syncthreads_or(any);

    int total = 0;
    if (any) {
#pragma unroll 1
        for (int word = 0; word < words; ++word) {
            const unsigned hits = found[word];
            if (word % WARPS == warp && hits >> lane & 1) {
                const int k = word * 32 + lane, i = total + __popc(hits & ((1u << lane) - 1));
                item[i] = k;
                spot[i] = max(start_of(index[k]), -1LL);  // at most one row begins earlier
            }
            total += __popc(hits);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < total; i += THREADS) {
            int after = 0;
#pragma unroll 8
            for (int j = total - 1; j > i; --j)
                if (spot[j] == spot[i]) after = j;
            next[i] = after;
            if (after) item[after] = ~item[after];  // an earlier equal index makes its row
        }
    }

    const int wide = (int)min(inner, (long long)count) / PACK, packs = total * wide;
    Sum sum;
    bool bad;
    T* to;
    const auto make = [&](int p, long long o) {  // pack p of the named rows; false if there is none
        int i = p / wide;
        if (item[i] < 0) return false;
        const long long start = start_of(index[item[i]]);
        const int at = (int)max(start, 0LL) + p % wide * PACK;
        if (at >= min(start + inner, (long long)count)) return false;
        const T* from = source + o * n * inner + (at - start);
        to = y + o * slice + begin + at;
        sum.take(x + o * slice + begin + at);
        bad = false;
        do {
            Packed pack[BATCH];
            int taken = 0;
#pragma unroll
            for (int a = 0; a < BATCH; ++a)
                if (a == 0 || i) {
                    const int k = item[i] < 0 ? ~item[i] : item[i];
                    bad |= index[k] < 0 || index[k] >= size;
                    pack[a] = *reinterpret_cast<const Packed*>(from + k * inner);
                    i = next[i];
                    ++taken;
                }
#pragma unroll
            for (int a = 0; a < BATCH; ++a)
                if (a < taken) sum.add(pack[a], alpha);
        } while (i);
        return true;
    };
    if (any) __syncthreads();
    for (long long o = blockIdx.y;;) {
        const bool first = (int)threadIdx.x < packs && make(threadIdx.x, o);  // its loads overlap the copy's
        store(o);
        if (any) __syncthreads();
        if (first) sum.put(to, bad);
        for (int p = threadIdx.x + THREADS; p < packs; p += THREADS)
            if (make(p, o)) sum.put(to, bad);
        o += gridDim.y;
        if (o >= outer) break;
        load(o);
    }
}

// Few indices, and little to copy: each warp takes a part of any row of y, named or not, so this is also the copy. It
// searches all indices for its row and adds their source rows in order. Nothing is sorted.
extern "C" __global__ void __launch_bounds__(256)
    index_add_few(T* y, const T* x, const I* index, const T* source, long long outer, long long size, long long n,
                  long long inner, float alpha) {
    constexpr int PACKS = 4;         // per thread
    __shared__ long long all[1024];  // the indices' rows, at most FEW in the launcher; ~row if out of range
    for (int k = threadIdx.x; k < n; k += blockDim.x) {
        const long long given = index[k], row = nearest(given, size);
        all[k] = given == row ? row : ~row;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, words = ((int)n + 31) / 32;
    const long long wide = 32 * PACK * PACKS, pieces = (inner + wide - 1) / wide;
    const long long warps = gridDim.x * (long long)(blockDim.x / 32);
    for (long long w = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32; w < outer * size * pieces; w += warps) {
        const Unit unit(w, size, pieces, wide);
        const long long row = unit.item, column = unit.column + lane * PACK,
                        to = (unit.o * size + row) * inner + column;
        unsigned hits = 0;  // bit i: index 32 i + lane names the row
        bool bad = false;
#pragma unroll 8
        for (int i = 0; i < words; ++i) {
            const int k = 32 * i + lane;
            const long long named = all[min(k, (int)n - 1)];
            const bool hit = k < n && (named < 0 ? ~named : named) == row;
            hits |= (unsigned)hit << i;
            bad |= hit && named < 0;
        }
        bad = __any_sync(~0u, bad);
        unsigned left = hits;  // words with any hit
#pragma unroll
        for (int step = 16; step; step /= 2) left |= __shfl_xor_sync(~0u, left, step);
        Sum sum[PACKS];
#pragma unroll
        for (int u = 0; u < PACKS; ++u)
            if (column + u * 32 * PACK < inner) sum[u].take(x + to + u * 32 * PACK);
        for (; left; left &= left - 1) {
            const int i = __ffs(left) - 1;
            for (unsigned lanes = __ballot_sync(~0u, hits >> i & 1); lanes; lanes &= lanes - 1) {
                const T* from = source + (unit.o * n + 32 * i + __ffs(lanes) - 1) * inner + column;
                Packed pack[PACKS];
#pragma unroll
                for (int u = 0; u < PACKS; ++u)
                    if (column + u * 32 * PACK < inner)
                        pack[u] = *reinterpret_cast<const Packed*>(from + u * 32 * PACK);
#pragma unroll
                for (int u = 0; u < PACKS; ++u)
                    if (column + u * 32 * PACK < inner) sum[u].add(pack[u], alpha);
            }
        }
#pragma unroll
        for (int u = 0; u < PACKS; ++u)
            if (column + u * 32 * PACK < inner) sum[u].put(y + to + u * 32 * PACK, bad);
    }
}

// A sorted index: its row, its number (~item if out of range) and, for the first index of a row, how many indices name
// that row.
struct __align__(16) SortedIndex {
    long long row;
    int item, times;
};

// Few indices, and much to copy: the first block sorts them meanwhile (Batcher's bitonic network, by row, then by
// position).
// COPY: elements per load of the copy, one load per thread.
extern "C" __global__ void __launch_bounds__(256) index_add_copy(T* y, const T* x, const I* index, SortedIndex* sorted,
                                                                 long long count, long long size, long long n) {
    using Copied = Pack<T, COPY>;
    if (blockIdx.x) {
        let_next_come();
        const long long i = (blockIdx.x - 1) * (long long)blockDim.x + threadIdx.x, rest = count / COPY * COPY + i;
        if (i < count / COPY) reinterpret_cast<Copied*>(y)[i] = reinterpret_cast<const Copied*>(x)[i];
        if (COPY > 1 && rest < count) y[rest] = x[rest];
        return;
    }
    __shared__ long long keys[1024];  // a row, its index's number, and whether it is in range
    const int width = n < 2 ? 1 : 1 << (32 - __clz((int)n - 1));
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        const long long given = k < n ? (long long)index[k] : 0, row = nearest(given, size);
        keys[k] = k < n ? row << 11 | k << 1 | (given == row) : 0x7fffffffffffffffLL;
    }
    for (int run = 2; run <= width; run *= 2)
        for (int apart = run / 2; apart; apart /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < width / 2; i += blockDim.x) {
                const int low = 2 * i - (i & (apart - 1)), high = low + apart;
                const long long a = keys[low], b = keys[high];
                if (a > b == !(low & run)) keys[low] = b, keys[high] = a;
            }
        }
    __syncthreads();
    const auto row_of = [&](int k) { return keys[k] >> 11; };
    for (int k = threadIdx.x; k < n; k += blockDim.x) {
        const long long row = row_of(k);
        int end = k + 1;
        if (k && row_of(k - 1) == row)
            end = k;
        else
            for (int past = (int)n; end < past;) {
                const int middle = (end + past) / 2;
                if (row_of(middle) == row)
                    end = middle + 1;
                else
                    past = middle;
            }
        const int item = (int)(keys[k] >> 1) & 1023;
        sorted[k] = SortedIndex{row, keys[k] & 1 ? item : ~item, end - k};
    }
    __threadfence();
    __syncthreads();
    let_next_come();  // only now, because the next kernel reads `sorted` before this one has ended
}

// The named rows, which the kernel before has copied or, with PDL, is still copying: only the final store waits for it.
// LANES threads take a part of a row and add its source rows in order, BATCH in flight.
extern "C" __global__ void __launch_bounds__(256)
    index_add_sorted(T* y, const T* x, const SortedIndex* sorted, const T* source, long long outer, long long size,
                     long long n, long long inner, float alpha) {
    const auto look = [&](long long k) {  // from L2: the previous kernel wrote it and may still be running
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(sorted + k));
        return reinterpret_cast<const SortedIndex&>(words);
    };
    const long long wide = LANES * PACK, pieces = (inner + wide - 1) / wide;
    const long long groups = gridDim.x * (long long)(blockDim.x / LANES);
    for (long long g = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / LANES; g < outer * n * pieces;
         g += groups) {
        const Unit unit(g, n, pieces, wide);
        const long long column = unit.column + threadIdx.x % LANES * PACK;
        const SortedIndex first = look(unit.item);
        if (column >= inner || !first.times) continue;
        const long long to = (unit.o * size + first.row) * inner + column;
        bool bad = false;
        Sum sum;
        sum.take(x + to);
        const T* from = source + unit.o * n * inner + column;
        for (int k = 0; k < first.times; k += BATCH) {
            Packed pack[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (k + b < first.times) {
                    const int item = k + b ? look(unit.item + k + b).item : first.item;
                    bad |= item < 0;
                    pack[b] = *reinterpret_cast<const Packed*>(from + (item < 0 ? ~item : item) * inner);
                }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (k + b < first.times) sum.add(pack[b], alpha);
        }
        wait_for_before();
        sum.put(y + to, bad);
    }
}

// The first position from `begin` on whose sorted index, clamped to a valid row, is at least `row`.
__device__ inline long long first_at(const I* sorted, long long begin, long long n, long long size, long long row) {
    for (long long end = n; begin < end;) {
        const long long middle = (begin + end) / 2;
        if (nearest(sorted[middle], size) < row)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

// Where each row's indices begin among the sorted ones, and one more entry for the end.
extern "C" __global__ void index_add_starts(int* starts, const I* sorted, long long size, long long n) {
    const long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row <= size) starts[row] = (int)first_at(sorted, 0, n, size, row);
}

// Many indices, sorted: LANES threads take a part of a row and add the source rows of its segment in order, BATCH in
// flight.
// ROWS 1: all rows, whose segments `starts` gives, so this is also the copy. ROWS 0: only rows with a segment; the
// others were copied before.
extern "C" __global__ void __launch_bounds__(256)
    index_add_segments(T* y, const T* x, const I* sorted, const OTYPE* order, const int* starts, const T* source,
                       long long outer, long long size, long long n, long long inner, float alpha) {
    const long long wide = LANES * PACK, pieces = (inner + wide - 1) / wide, items = ROWS ? size : n;
    const long long groups = gridDim.x * (long long)(blockDim.x / LANES);
    for (long long g = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / LANES; g < outer * items * pieces;
         g += groups) {
        const Unit unit(g, items, pieces, wide);
        const long long column = unit.column + threadIdx.x % LANES * PACK;
        if (column >= inner) continue;
        const long long row = ROWS ? unit.item : nearest(sorted[unit.item], size);
        if (!ROWS && unit.item && nearest(sorted[unit.item - 1], size) == row) continue;
        const long long begin = ROWS ? starts[row] : unit.item;
        const long long end = ROWS ? starts[row + 1] : first_at(sorted, begin + 1, n, size, row + 1);
        const long long to = (unit.o * size + row) * inner + column;
        const bool bad = begin < end && (sorted[begin] < 0 || sorted[end - 1] >= size);
        Sum sum;
        sum.take(x + to);
        const T* from = source + unit.o * n * inner + column;
        for (long long k = begin; k < end; k += BATCH) {
            Packed pack[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (k + b < end) pack[b] = *reinterpret_cast<const Packed*>(from + (long long)order[k + b] * inner);
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (k + b < end) sum.add(pack[b], alpha);
        }
        sum.put(y + to, bad);
    }
}

// The source's gradient: alpha times the rows of dy that the indices name.
extern "C" __global__ void index_add_bwd(T* dsource, const T* dy, const I* index, long long outer, long long size,
                                         long long n, long long inner, float alpha) {
    const long long threads = gridDim.x * (long long)blockDim.x, packs = inner / PACK, count = outer * n * packs;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += threads) {
        const Unit unit(i, n, packs, 1);
        const long long row = index[unit.item];
        Sum sum;
        sum.take(dy + (unit.o * size + nearest(row, size)) * inner + unit.column * PACK);
#pragma unroll
        for (int j = 0; j < PACK; ++j) sum.at[j] *= alpha;
        sum.put(dsource + i * PACK, row < 0 || row >= size);
    }
}
