// cumsum in CUDA C++ of x (outer, n, inner), contiguous. Along rows (inner 1) a block holds one tile at a time in
// registers: each warp takes a stretch of it in packs and sums its packs by shuffles; the warps' totals give the
// tile's. Along columns, each thread walks down one.
// Macros: XTYPE and YTYPE the elements; STYPE the type of sums within a tile and TTYPE of sums over tiles (float and
// double, or unsigned integers, which wrap around); PACK elements per load; ITEMS packs per thread; THREADS; REVERSE 1
// for sums from the end; PHASE of the tiles: 0 looks back, 1 writes the tiles' totals, 2 starts from their prefix sums;
// for the ring (from Hopper on) GROUPS of THREADS each, STAGES tiles; PDL if the kernel after `cumsum_clear` starts
// early.
#include "early.cuh"
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;
using SUM = STYPE;
using TOTAL = TTYPE;
using Word = unsigned long long;
constexpr bool FLOATING = TOTAL(0.5) != 0;
constexpr bool EXACT = FLOATING && sizeof(Y) == 4;  // half results hide what a tile's float32 sums lose
constexpr int WARPS = THREADS / 32, GROUP = 32;
constexpr long long STRETCH = 32 * PACK * ITEMS, TILE = WARPS * STRETCH;

template <typename T>
__device__ inline SUM widen(T x) {
    if constexpr (FLOATING)
        return to_float(x);
    else
        return (SUM)x;
}

template <typename S>
__device__ inline Y narrow(S s) {
    Y y;
    if constexpr (FLOATING)
        from_float(s, y);
    else
        y = (Y)s;
    return y;
}

// Element i of a row of n, counted from the end for reverse sums.
__device__ inline long long place(long long i, long long n) { return REVERSE ? n - 1 - i : i; }

// The value that sums start from. For float32 results it has two parts, a float and the remainder, so that many
// additions lose nothing.
struct Start {
    SUM sum, rest;

    __device__ explicit Start(TOTAL given) : sum((SUM)given), rest(EXACT ? (SUM)(given - (TOTAL)sum) : 0) {}
    __device__ SUM left() const { return EXACT && sum - sum != 0 ? SUM(0) : rest; }  // infinity has no remainder
    __device__ void add(SUM x) {
        const SUM before = sum;
        sum += x;
        if constexpr (EXACT) {  // Knuth's two-sum
            const SUM added = sum - before;
            rest += (before - (sum - added)) + (x - added);
        }
    }
    __device__ SUM operator+(SUM x) const { return EXACT ? sum + (left() + x) : sum + x; }
};

// A thread's packs of a tile: the first begins at element `first`, the others are 32 packs apart.
struct Tile {
    SUM at[ITEMS][PACK];

    // Whether all of the warp's elements lie within n.
    static __device__ bool inside(long long first, long long n) {
        return first - threadIdx.x % 32 * PACK + STRETCH <= n;
    }

    __device__ void load(const X* x, long long first, long long n) {
        inside(first, n) ? read<true>(x, first, n) : read<false>(x, first, n);
    }

    template <bool INSIDE>
    __device__ void read(const X* x, long long first, long long n) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const long long p = first + i * 32 * PACK;
            if (INSIDE || p + PACK <= n) {
                const Pack<X, PACK> pack = *reinterpret_cast<const Pack<X, PACK>*>(x + (REVERSE ? n - PACK - p : p));
#pragma unroll
                for (int j = 0; j < PACK; ++j) at[i][j] = widen(pack.at[REVERSE ? PACK - 1 - j : j]);
            } else {
#pragma unroll
                for (int j = 0; j < PACK; ++j) at[i][j] = p + j < n ? widen(x[place(p + j, n)]) : SUM(0);
            }
        }
    }

    // Prefix sums from the warp's first element on. Returns their total, for float32 results as accurate as a double
    // sum: later elements start from it, so its error would bias them all.
    __device__ TOTAL scan() {
        TOTAL total = 0;
        if constexpr (EXACT) {
            Start own(0);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
#pragma unroll
                for (int j = 0; j < PACK; ++j) own.add(at[i][j]);
            total = (TOTAL)own.sum + (TOTAL)own.left();
#pragma unroll
            for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        }
        SUM upto[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (int j = 1; j < PACK; ++j) at[i][j] += at[i][j - 1];
            upto[i] = at[i][PACK - 1];
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const SUM other = __shfl_up_sync(~0u, upto[i], step);
                if (threadIdx.x % 32 >= step) upto[i] += other;
            }
        Start start(0);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const SUM lower = __shfl_up_sync(~0u, upto[i], 1);
            Start here = start;
            here.add(threadIdx.x % 32 ? lower : SUM(0));
#pragma unroll
            for (int j = 0; j < PACK; ++j) at[i][j] = here + at[i][j];
            start.add(__shfl_sync(~0u, upto[i], 31));
        }
        return EXACT ? total : (TOTAL)start.sum;
    }

    // The sum before the warp's first element is added last: if rounded first, its error would affect the whole tile.
    __device__ void store(Y* y, long long first, long long n, TOTAL before) const {
        inside(first, n) ? write<true>(y, first, n, before) : write<false>(y, first, n, before);
    }

    template <bool INSIDE>
    __device__ void write(Y* y, long long first, long long n, TOTAL before) const {
        const Start start(before);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const long long p = first + i * 32 * PACK;
            Pack<Y, PACK> pack;
#pragma unroll
            for (int j = 0; j < PACK; ++j) pack.at[REVERSE ? PACK - 1 - j : j] = narrow(start + at[i][j]);
            if (INSIDE || p + PACK <= n)
                store_global(y + (REVERSE ? n - PACK - p : p), pack);
            else
#pragma unroll
                for (int j = 0; j < PACK; ++j)
                    if (p + j < n) y[place(p + j, n)] = pack.at[REVERSE ? PACK - 1 - j : j];
        }
    }
};

// A published total, with its state: 1 the sum of a tile or group, 2 the sum of everything up to it. Each of its two
// words holds the state beside half of the value, so a reader detects halves of different values, and no fence is
// needed.
struct alignas(16) Entry {
    Word word[2];

    __device__ void put(TOTAL value, Word state) {
        const Word bits = reinterpret_cast<const Word&>(value);
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(word)),
                     "l"(state << 32 | (bits & 0xffffffff)), "l"(state << 32 | bits >> 32)
                     : "memory");
    }
    __device__ int get(TOTAL& value) const {
        Word low, high;
        asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(low), "=l"(high)
                     : "l"(__cvta_generic_to_global(word)));
        const Word bits = high << 32 | (low & 0xffffffff);
        value = reinterpret_cast<const TOTAL&>(bits);
        return low >> 32 == high >> 32 ? (int)(low >> 32) : 0;
    }
};

extern "C" __global__ void cumsum_clear(Word* state, long long words) {
    let_next_come();
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < words) state[i] = 0;
}

// One warp finds the sum of all earlier tiles of its row. Tiles form groups of 32. The group's earlier tiles contribute
// their own totals, summed by a fixed tree. Earlier groups contribute the nearest known prefix sum, then the totals of
// the groups since, in order. The additions are the same whoever is first, so floats are reproducible.
__device__ inline TOTAL look_back(Entry* tiles, Entry* groups, long long tile, TOTAL mine) {
    const int lane = threadIdx.x % 32, within = (int)(tile % GROUP);
    const long long group = tile / GROUP;
    if (lane == 0) tiles[tile].put(mine, 1);
    TOTAL earlier = 0;
    if (lane < within)
        while (!tiles[tile - within + lane].get(earlier)) __nanosleep(20);
    if (lane >= within) earlier = 0;
    __syncwarp();
#pragma unroll
    for (int step = 16; step; step /= 2) earlier += __shfl_xor_sync(~0u, earlier, step);
    const bool last = within == GROUP - 1 && lane == 0;
    if (last) groups[group].put(earlier + mine, 1);
    TOTAL base = 0;
    if (group) {
        for (;;) {
            TOTAL value = 0;
            const long long other = group - 1 - lane;
            const int state = other >= 0 ? groups[other].get(value) : 2;
            if (other < 0) value = 0;
            const unsigned known = __ballot_sync(~0u, state == 2), open = __ballot_sync(~0u, state == 0);
            const int nearest = __ffs(known) - 1;
            if (known && !(open & ((1u << nearest) - 1))) {
                base = __shfl_sync(~0u, value, nearest);
                for (int l = nearest - 1; l >= 0; --l) base += __shfl_sync(~0u, value, l);
                break;
            }
            __nanosleep(20);
        }
    }
    if (last) groups[group].put(base + (earlier + mine), 2);
    return base + earlier;
}

// One pass over rows of `tiles` tiles, one tile per block, handed out in order of arrival, so that earlier tiles have
// started. On Hopper 128 registers just suffice for four blocks of 128 threads per multiprocessor with exact sums.
// Other sums need fewer, and would get more under such a bound; on other GPUs some registers would spill.
extern "C" __global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ == 900 && EXACT && PACK > 1 ? 512 / THREADS : 0)
    cumsum_tiles(Y* y, const X* x, Word* state, long long outer, long long n, long long tiles) {
    __shared__ TOTAL totals[WARPS], begin;
    __shared__ long long ticket;
    const int warp = threadIdx.x / 32;
    if (PHASE == 0) {
        wait_for_before();
        if (threadIdx.x == 0) ticket = (long long)atomicAdd(state, 1ULL);
        __syncthreads();
    }
    const long long all = PHASE == 0 ? ticket : (long long)blockIdx.x, row = all / tiles, tile = all % tiles;
    const long long groups = (tiles + GROUP - 1) / GROUP,
                    first = tile * TILE + warp * STRETCH + threadIdx.x % 32 * PACK;
    Tile mine;
    mine.load(x + row * n, first, n);
    const TOTAL total = mine.scan();
    if (threadIdx.x % 32 == 0) totals[warp] = total;
    __syncthreads();
    TOTAL before = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) before = sum;
        sum += totals[w];
    }
    if (PHASE == 1) {
        if (threadIdx.x == 0) reinterpret_cast<TOTAL*>(state)[all] = sum;
        return;
    }
    if (PHASE == 0 && warp == 0) {
        Entry* entries = reinterpret_cast<Entry*>(state + 2);
        const TOTAL found = look_back(entries + row * tiles, entries + outer * tiles + row * groups, tile, sum);
        if (threadIdx.x == 0) begin = found;
    }
    if (PHASE == 2 && threadIdx.x == 0) begin = reinterpret_cast<const TOTAL*>(state)[all];
    __syncthreads();
    mine.store(y + row * n, first, n, begin + before);
}

#if __CUDA_ARCH__ >= 900 && defined(STAGES)
// The ring: one persistent block per multiprocessor takes every gridDim.x-th tile of all rows. Bulk copies bring its
// tiles into shared memory, STAGES ahead. GROUPS groups of warps in turn load a tile into registers, free its stage,
// and publish its total. One more warp finds the sum before the block's next tile: the sum before its last one, plus
// the totals since, one tile per block, which have been published or soon will be. So no wait depends on another wait,
// and the order of additions is fixed. Sums are stored from registers. Blocks wait for each other, so the launch is
// cooperative.
extern "C" __global__ void __launch_bounds__(GROUPS* THREADS + 64, 1)
    cumsum_ring(Y* y, const X* x, Word* state, long long outer, long long n, long long row_tiles) {
    constexpr int MOST = 5, SEEN = 2 * GROUPS;
    constexpr unsigned BYTES = TILE * sizeof(X);
    extern __shared__ __align__(128) char ring[];
    __shared__ Barrier full[STAGES], read[STAGES], known[SEEN], taken[SEEN];
    __shared__ TOTAL begin[SEEN], totals[2][GROUPS][WARPS];
    Entry* told = reinterpret_cast<Entry*>(state);
    const int group = threadIdx.x / THREADS, thread = threadIdx.x % THREADS, warp = thread / 32,
              lane = threadIdx.x % 32;
    // The warps after the groups': one looks back, one loads.
    const int other = (int)threadIdx.x / 32 - GROUPS * WARPS;
    const unsigned tiles = (unsigned)row_tiles, all = (unsigned)outer * tiles,
                   count = blockIdx.x < all ? (all - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    const auto tile = [&](unsigned i) { return blockIdx.x + i * gridDim.x; };
    // The groups themselves load a row's incomplete last tile.
    const auto whole = [&](unsigned t) { return (t % tiles + 1) * TILE <= n; };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s]), barrier_init(&read[s], WARPS);
        for (int s = 0; s < SEEN; ++s) barrier_init(&known[s]), barrier_init(&taken[s], WARPS);
        barrier_init_done();
    }
    __syncthreads();

    if (group < GROUPS) {
        for (unsigned i = group; i < count; i += GROUPS) {
            const unsigned stage = i % STAGES, place = i % SEEN, turn = i / GROUPS % 2, t = tile(i);
            const long long row = t / tiles * n, inside = warp * STRETCH + lane * PACK,
                            first = t % tiles * TILE + inside;
            Tile mine;
            barrier_wait(&full[stage], i / STAGES % 2);
            if (whole(t))
                mine.read<true>(reinterpret_cast<const X*>(ring + stage * BYTES), inside, TILE);
            else
                mine.load(x + row, first, n);
            __syncwarp();
            if (lane == 0) barrier_arrive(&read[stage]);
            const TOTAL total = mine.scan();
            if (lane == 0) totals[turn][group][warp] = total;
            __syncwarp();  // bar.sync needs converged warps
            asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS) : "memory");
            TOTAL before = 0, sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w == warp) before = sum;
                sum += totals[turn][group][w];
            }
            if (thread == 0) told[t].put(sum, 1);
            barrier_wait(&known[place], i / SEEN % 2);
            before += begin[place];
            __syncwarp();
            if (lane == 0) barrier_arrive(&taken[place]);
            mine.store(y + row, first, n, before);
        }
    } else if (other == 0) {
        TOTAL base = 0;
        for (unsigned i = 0; i < count; ++i) {
            const unsigned place = i % SEEN, t = tile(i), row = t / tiles * tiles;
            const bool new_row = t < row + gridDim.x;  // the block's previous tile was in another row
            TOTAL since = 0;
            for (unsigned k = (new_row ? row : t - gridDim.x) + lane; k - lane < t; k += 32 * MOST) {
                TOTAL value[MOST];
                bool open;
                do {
                    open = false;
#pragma unroll
                    for (int u = 0; u < MOST; ++u) {
                        const bool there = k + u * 32 < t;
                        open |= told[there ? k + u * 32 : t - 1].get(value[u]) == 0 && there;
                        if (!there) value[u] = 0;
                    }
                } while (open);
#pragma unroll
                for (int u = 0; u < MOST; ++u) since += value[u];
            }
#pragma unroll
            for (int step = 16; step; step /= 2) since += __shfl_xor_sync(~0u, since, step);
            base = (new_row ? TOTAL(0) : base) + since;
            if (i >= SEEN) barrier_wait(&taken[place], (i / SEEN - 1) % 2);
            if (lane == 0) {
                begin[place] = base;
                barrier_arrive(&known[place]);
            }
        }
    } else if (lane == 0) {
        for (unsigned i = 0; i < count; ++i) {
            const unsigned stage = i % STAGES, t = tile(i);
            const long long within = t % tiles * TILE;
            if (i >= STAGES) barrier_wait(&read[stage], (i / STAGES - 1) % 2);
            if (whole(t)) {
                barrier_expect(&full[stage], BYTES);
                bulk_load(ring + stage * BYTES, x + t / tiles * n + (REVERSE ? n - within - TILE : within), BYTES,
                          &full[stage]);
            } else
                barrier_arrive(&full[stage]);
        }
    }
}
#endif

// Each row's exclusive prefix sums over the tiles' totals, one block per row.
extern "C" __global__ void cumsum_totals(Word* state, long long tiles) {
    __shared__ TOTAL parts[32];
    TOTAL* totals = reinterpret_cast<TOTAL*>(state) + blockIdx.x * tiles;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    TOTAL carry = 0;
    for (long long start = 0; start < tiles; start += blockDim.x) {
        const long long i = start + threadIdx.x;
        const TOTAL own = i < tiles ? totals[i] : TOTAL(0);
        TOTAL upto = own;
        for (int step = 1; step < 32; step *= 2) {
            const TOTAL other = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += other;
        }
        const TOTAL before = __shfl_up_sync(~0u, upto, 1);
        if (lane == 31) parts[warp] = upto;
        __syncthreads();
        TOTAL base = carry;
        for (int w = 0; w < (int)blockDim.x / 32; ++w) {
            if (w == warp) base = carry;
            carry += parts[w];
        }
        if (i < tiles) totals[i] = lane ? base + before : base;
        __syncthreads();
    }
}

// Many rows, or short ones: one block per row, tile after tile.
extern "C" __global__ void __launch_bounds__(THREADS) cumsum_rows(Y* y, const X* x, long long n) {
    __shared__ TOTAL totals[2][WARPS];
    const int warp = threadIdx.x / 32;
    const X* from = x + blockIdx.x * n;
    TOTAL carry = 0;
    for (long long tile = 0, first = warp * STRETCH + threadIdx.x % 32 * PACK; tile * TILE < n; ++tile, first += TILE) {
        Tile mine;
        mine.load(from, first, n);
        const TOTAL total = mine.scan();
        TOTAL before = 0, sum = total;
        if (WARPS > 1) {
            if (threadIdx.x % 32 == 0) totals[tile % 2][warp] = total;
            __syncthreads();
            sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (w == warp) before = sum;
                sum += totals[tile % 2][w];
            }
        }
        mine.store(y + blockIdx.x * n, first, n, carry + before);
        carry += sum;
    }
}

// Columns: a thread walks down `chunk` rows of one, eight loads in flight. If y is null it writes their sum to `totals`
// (outer, chunks, inner); otherwise it starts from the sums of the chunks above.
extern "C" __global__ void __launch_bounds__(256)
    cumsum_columns(const X* x, Y* y, TOTAL* totals, long long outer, long long n, long long inner, long long chunk,
                   long long chunks) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= outer * chunks * inner) return;
    const long long column = i % inner, k = i / inner % chunks, o = i / inner / chunks,
                    end = n < (k + 1) * chunk ? n : (k + 1) * chunk;
    TOTAL start = 0;
    if (y)
        for (long long j = 0; j < k; ++j) start += totals[(o * chunks + j) * inner + column];
    SUM sum = 0;
    const long long to = o * n * inner + column;
    for (long long r = k * chunk; r < end; r += 8) {
        SUM at[8];
#pragma unroll
        for (int u = 0; u < 8; ++u)
            if (r + u < end) at[u] = widen(x[to + place(r + u, n) * inner]);
#pragma unroll
        for (int u = 0; u < 8; ++u)
            if (r + u < end) {
                sum += at[u];
                if (y) y[to + place(r + u, n) * inner] = narrow((SUM)(start + (TOTAL)sum));
            }
    }
    if (!y) totals[i] = sum;
}
