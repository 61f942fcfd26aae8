// Kernels on rows: a cluster of CLUSTER blocks holds a row, each block one part, and reads it once. A block may consist
// of several GROUPS of THREADS, each with its own rows.
// Macros: XTYPE and YTYPE the element types of what is read and written; CLUSTER; STAGES; THREADS; GROUPS; ITEMS packs
// per thread; SHIFTED, whether rows may begin at any element; otherwise they begin and end at multiples of 16 bytes.
#pragma once
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;
constexpr int SMALL = sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y),
              LARGE = sizeof(X) < sizeof(Y) ? sizeof(Y) : sizeof(X);
constexpr int PACK = 16 / LARGE, ALIGN = 16 / SMALL, WARPS = THREADS / 32, SLOTS = CLUSTER * WARPS;

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef SHIFTED
#define SHIFTED 0
#endif

extern __shared__ __align__(128) char memory[];

// This thread's group, and its place in the group.
__device__ inline int group() { return GROUPS == 1 ? 0 : threadIdx.x / THREADS; }
__device__ inline int thread() { return GROUPS == 1 ? threadIdx.x : threadIdx.x % THREADS; }

__device__ inline void group_sync() {
    if constexpr (GROUPS == 1)
        __syncthreads();
    else if constexpr (THREADS == 32)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group()), "n"(THREADS) : "memory");
}

// N columns of a part, the `slot`-th that a thread takes. They are the `index`-th N from column `base` on.
template <int N>
struct Columns {
    int base, index, slot;

    __device__ int first() const { return base + index * N; }
    template <typename T>
    __device__ const Pack<T, N>& of(const T* part) const {
        return reinterpret_cast<const Pack<T, N>*>(part + base)[index];
    }
    template <typename T>
    __device__ Pack<T, N>& of(T* part) const {
        return reinterpret_cast<Pack<T, N>*>(part + base)[index];
    }
    // This thread's element of an array with a pack per slot.
    template <typename T>
    __device__ Pack<T, N>& in(Pack<T, PACK>* packs) const {
        return reinterpret_cast<Pack<T, N>&>(packs[slot]);
    }
};

constexpr int TIMES = ITEMS + SHIFTED;  // slots of a thread

// The whole packs of a part of `count` columns. With SHIFTED the columns at its ends are as many wherever the row
// begins, and there is room for one more pack after the whole ones.
__device__ inline int whole_packs(int count) { return SHIFTED ? max(0, count / PACK - 1) : count / PACK; }

// The number of a part's columns that a warp takes.
__device__ inline int warp_count(int count, int warp) {
    const int whole = whole_packs(count);
    int packs = 0;
    for (int i = 0; i < ITEMS; ++i) packs += max(0, min(32, whole - i * THREADS - warp * 32));
    return packs * PACK + (SHIFTED && warp == 0 ? count - whole * PACK : 0);
}

// exp(x - base). For float32 logits from the exponent's fraction alone: ex2.approx of an exponent that is not near 0 is
// 5e-8 too small.
__device__ inline float exp_from(float x, float base) {
    if (sizeof(X) == 4) return expf(x - base);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, -base * 1.44269504f)));
    return y;
}

// A streaming store: backward reads twice what it writes, and its next rows use the cache better. Forward gains nothing
// by it.
template <typename P>
__device__ inline void store_streaming(P& to, const P& value) {
    if constexpr (sizeof(P) == 16)
        __stcs(reinterpret_cast<uint4*>(&to), reinterpret_cast<const uint4&>(value));
    else if constexpr (sizeof(P) == 8)
        __stcs(reinterpret_cast<uint2*>(&to), reinterpret_cast<const uint2&>(value));
    else
        to = value;
}

// The rows that a group takes in turn: every `step`-th. SORTED: groups share the rows evenly in the order of (row % 8,
// row). Rows 8 apart begin at the same offset within 16 bytes, whatever their length, so a group's offset rarely
// changes.
template <bool SORTED>
struct Turn {
    long long row, rows, step, left;

    __device__ Turn(long long rows) : rows(rows) {
        row = blockIdx.x / CLUSTER * GROUPS + group();
        step = gridDim.x / CLUSTER * GROUPS;
        if constexpr (SORTED) {
            long long skipped = row * rows / step;
            left = (row + 1) * rows / step - skipped;
            for (row = 0; row < 7 && skipped >= alike(); ++row) skipped -= alike();
            row += 8 * skipped;
        }
    }

    __device__ long long alike() const { return (rows - row + 7) / 8; }  // rows 8 apart, this one included
    __device__ bool more() const { return SORTED ? left > 0 : row < rows; }
    __device__ bool last() const { return SORTED && row + 8 >= rows; }  // the last row with this offset

    __device__ void next() {
        if constexpr (SORTED) {
            row = last() ? row % 8 + 1 : row + 8;
            --left;
        } else
            row += step;
    }
};

// A block's part of every row, and its shared memory: the parts, STAGES rows of INPUTS each; their barriers; the
// barriers of two sets of slots; and the sets, with FLOATS for each warp of the cluster. Rows alternate between the
// sets: when a warp sends for row k + 2, all warps have sent for row k + 1, so they have read the slots of row k.
template <int INPUTS, int FLOATS, typename T, bool SORTED = false>
struct Share {
    static constexpr int GRAIN = 16 / sizeof(T);
    int rank = blockIdx.x % CLUSTER;
    int part, begin, count, columns;
    // For the current row: elements from a multiple of 16 bytes to the part, and from there to a whole pack.
    int shift = 0, head = 0;
    char* parts;
    unsigned room;  // bytes per part
    Barrier* barriers;
    float* slots;
    const T* from[INPUTS];     // this block's part of row 0
    long long stride[INPUTS];  // elements between rows
    Turn<SORTED> ahead;        // the next row to load

    __device__ Share(Turn<SORTED> turn, int columns, const T* const (&tensors)[INPUTS],
                     const long long (&strides)[INPUTS])
        : columns(columns), ahead(turn) {
        part = (columns + CLUSTER * ALIGN - 1) / (CLUSTER * ALIGN) * ALIGN;
        begin = min(rank * part, columns);
        count = min(part, columns - begin);
        room = (part + SHIFTED * GRAIN) * sizeof(T);
        const unsigned size =
            STAGES * INPUTS * room + (STAGES + 2) * sizeof(Barrier) + 2 * FLOATS * SLOTS * sizeof(float);
        parts = memory + group() * ((size + 15) / 16 * 16);
        barriers = reinterpret_cast<Barrier*>(parts + STAGES * INPUTS * room);
        slots = reinterpret_cast<float*>(barriers + STAGES + 2);
#pragma unroll
        for (int i = 0; i < INPUTS; ++i) {
            from[i] = tensors[i] + begin;
            stride[i] = strides[i];
        }
        if (thread() == 0) {
            for (int k = 0; k < STAGES + 2; ++k) barrier_init(barriers + k, k < STAGES ? 1 : WARPS);
            barrier_init_done();
            for (int k = 0; k < STAGES; ++k) load(k);
        }
        cluster_sync<CLUSTER>();
    }

    // Elements from a multiple of 16 bytes to where a row begins: tensors begin at such a multiple, and their rows are
    // equally spaced.
    __device__ int shift_of(long long row) const { return SHIFTED ? (unsigned)row * (unsigned)stride[0] % GRAIN : 0; }

    __device__ T* place(int k, int input) const {
        return reinterpret_cast<T*>(parts + (k % STAGES * INPUTS + input) * room);
    }

    // One thread: loads the next row, if there is one, as this group's k-th. With SHIFTED the 16 bytes at a part's ends
    // are loaded whole, with their neighbours, except at the end of a tensor, beyond which nothing may be read.
    __device__ void load(int k) {
        if (!ahead.more()) return;
        const int shift = shift_of(ahead.row);
        int elements = shift + count;
        if (SHIFTED && elements % GRAIN) {
            const int whole = elements / GRAIN * GRAIN;
            if (ahead.row == ahead.rows - 1 && begin - shift + whole + GRAIN > columns) {
                for (int i = 0; i < INPUTS; ++i)
                    for (int e = whole; e < elements; ++e) place(k, i)[e] = from[i][ahead.row * stride[i] - shift + e];
                bulk_fence();
                elements = whole;
            } else
                elements = whole + GRAIN;
        }
        const unsigned bytes = count ? elements * sizeof(T) : 0;
        Barrier* barrier = barriers + k % STAGES;
        barrier_expect(barrier, INPUTS * bytes);
        if (bytes)
#pragma unroll
            for (int i = 0; i < INPUTS; ++i)
                bulk_load(place(k, i), from[i] + ahead.row * stride[i] - shift, bytes, barrier);
        ahead.next();
    }

    // Loads the row STAGES after the k-th into its place: all threads of this group have read the k-th and
    // synchronised.
    __device__ void next(int k) {
        if (thread() == 0) load(k + STAGES);
    }

    // Makes a row the current one.
    __device__ void take(long long row) {
        shift = shift_of(row);
        head = -shift & (PACK - 1);
    }

    // Waits for the current row, the k-th, and returns where its part lies.
    __device__ void wait(int k) const { barrier_wait(barriers + k % STAGES, k / STAGES & 1); }
    __device__ const T* input(int k, int input) const { return place(k, input) + shift; }

    // Calls f on this thread's columns of the current row: packs and, with SHIFTED, one of the columns at the part's
    // ends.
    template <int UNROLL = ITEMS < 4 ? ITEMS : 4, typename F>
    __device__ void for_each(F f) const {
        const int whole = whole_packs(count);
#pragma unroll(UNROLL)
        for (int i = 0; i < ITEMS; ++i) {
            const int p = i * THREADS + thread();
            if (p < whole) f(Columns<PACK>{head, p, i});
        }
        if constexpr (SHIFTED)
            if (thread() < count - whole * PACK)
                f(Columns<1>{0, thread() < head ? thread() : thread() + whole * PACK, ITEMS});
    }

    // Every warp of the cluster contributes FLOATS floats; returns them all.
    __device__ const float* exchange(int k, const float (&mine)[FLOATS]) {
        float* set = slots + (k & 1) * FLOATS * SLOTS;
        float* slot = set + FLOATS * (rank * WARPS + thread() / 32);
        const int lane = threadIdx.x % 32;
        if constexpr (CLUSTER == 1) {
            if (lane == 0)
                for (int f = 0; f < FLOATS; ++f) slot[f] = mine[f];
            group_sync();
        } else {
            Barrier* barrier = barriers + STAGES + (k & 1);
            if (thread() == 0)
                barrier_expect(barrier, FLOATS * SLOTS * sizeof(float));
            else if (lane == 0)
                barrier_arrive(barrier);
            if (lane < CLUSTER) cluster_send(slot, mine, barrier, lane);
            barrier_wait(barrier, k / 2 & 1);
        }
        return set;
    }
};

// A row's maximum, and the sum of its elements' exponentials relative to it.
struct Exponentials {
    float most, total;
};

// The statistics of the cluster's one row, whose part in this block lies at `in`, merged over all warps. For float32
// logits the common maximum comes first: terms of different bases would each be rounded twice, which a row's scale
// shows.
template <typename S>
__device__ inline Exponentials exponentials(S& share, const X* in) {
    constexpr bool FIRST = sizeof(X) == 4;
    const int lane = threadIdx.x % 32;
    float top = -INF, sum = 0, most = -INF, total = 0;
    share.for_each([&]<int N>(Columns<N> c) {
        const Pack<X, N> pack = c.of(in);
#pragma unroll
        for (int j = 0; j < N; ++j) top = fmaxf(top, to_float(pack.at[j]));
    });
    top = warp_max(top);
    const auto agree = [&](const float* slots) {
        for (int s = lane; s < SLOTS; s += 32) most = fmaxf(most, slots[2 * s]);
        most = warp_max(most);
    };
    if constexpr (FIRST) {
        agree(share.exchange(0, {top, 0.0f}));
        top = most;
    }
    const float base = top == -INF ? 0.0f : top;  // all -inf: exponentials of -inf, not of -inf + inf
    share.for_each([&]<int N>(Columns<N> c) {
        const Pack<X, N> pack = c.of(in);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += exp_from(to_float(pack.at[j]), base);
    });
    const float* slots = share.exchange(FIRST, {top, warp_sum(sum)});
    if constexpr (!FIRST) agree(slots);
    for (int s = lane; s < SLOTS; s += 32)
        total += FIRST ? slots[2 * s + 1] : slots[2 * s + 1] * exp_from(slots[2 * s], most);
    return {most, warp_sum(total)};
}
