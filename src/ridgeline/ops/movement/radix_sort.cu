// radix_sort in CUDA C++: by digits of 8 bits, the lowest first, each pass stable. A block takes a tile of keys and
// each warp a stretch of it, 32 adjacent keys at a time, so a key's position in the tile grows with warp, item and
// lane.
// Macros: KTYPE the unsigned integer of a key's bits; KIND its type (0 unsigned, 1 signed, 2 floating point, with
// INFINITE the bits of its infinity); DESCENDING; VTYPE the unsigned integer of a value; WORD the unsigned integer of
// counts, two bits of which are a state; THREADS (at least 256); ITEMS keys per thread; PACK keys per load when
// counting; PDL whether kernels let the next one start early.
#include "early.cuh"
#include "elementwise.cuh"

using Key = KTYPE;
using Value = VTYPE;
using Word = WORD;
using Count = unsigned long long;
constexpr int COPIES = 4, LOOK = 2;  // copies of the counts in a block; tiles looked back at together
constexpr int DIGITS = 256, PASSES = sizeof(Key), WARPS = THREADS / 32, TILE = THREADS * ITEMS,
              BITS = 8 * sizeof(Word) - 2;
constexpr Word LOW = ((Word)1 << BITS) - 1;

// One sort's state: for each pass, how many keys have a digit (after radix_bases: a smaller digit); the next tile; one
// word per tile and digit.
struct State {
    Count totals[8][DIGITS];
    Count tickets[8];
    Word words[1];
};

// A key as an unsigned number with the same order: NaN is the greatest, -0 equals 0.
__device__ inline Key order(Key key) {
    constexpr Key SIGN = (Key)((Key)1 << (8 * sizeof(Key) - 1));
    Key k = key;
    if (KIND == 1) k = (Key)(key ^ SIGN);
    if (KIND == 2) {
        const Key size = (Key)(key & (Key)~SIGN);
        k = size > (Key)INFINITE ? (Key) ~(Key)0 : size == 0 ? SIGN : key & SIGN ? (Key)~key : (Key)(key | SIGN);
    }
    return DESCENDING ? (Key)~k : k;
}

__device__ inline unsigned digit_of(Key key, int shift) { return (unsigned)(order(key) >> shift) & 255; }

// The lanes that have this lane's digit, by one vote per bit: faster than __match_any_sync on an H100.
__device__ inline unsigned peers_of(unsigned digit) {
    unsigned peers = ~0u;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        const bool set = digit >> b & 1;
        const unsigned same = __ballot_sync(~0u, set);
        peers &= set ? same : ~same;
    }
    return peers;
}

// A thread's part of a tile. Positions past the last key have the last digit and come after all its keys.
struct Tile {
    Key key[ITEMS];
    unsigned rank[ITEMS];  // a key's position among the warp's keys of its digit
    int valid;

    __device__ Tile(const Key* keys, long long first, long long n) : valid(n - first < TILE ? (int)(n - first) : TILE) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) key[i] = place(i) < valid ? keys[first + place(i)] : (Key)0;
    }
    static __device__ int place(int i) { return threadIdx.x / 32 * 32 * ITEMS + i * 32 + threadIdx.x % 32; }
    __device__ unsigned digit(int i, int shift) const { return place(i) < valid ? digit_of(key[i], shift) : 255; }

    // `counts` belongs to the warp. Lanes with the same digit rank in lane order, and the first of them counts for all.
    __device__ void count(unsigned* counts, int shift) {
        const unsigned lane = threadIdx.x % 32;
        for (int d = lane; d < DIGITS; d += 32) counts[d] = 0;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const unsigned d = digit(i, shift), peers = peers_of(d), earlier = __popc(peers & ((1u << lane) - 1));
            const unsigned before = counts[d];
            __syncwarp();
            if (earlier == 0) counts[d] = before + __popc(peers);
            __syncwarp();
            rank[i] = before + earlier;
        }
    }
};

// Thread d turns the warps' counts of digit d into offsets where each warp's keys begin, and returns their sum; threads
// from 256 on return 0.
__device__ inline unsigned add_warps(unsigned (*counts)[DIGITS]) {
    unsigned sum = 0;
    if (threadIdx.x < DIGITS)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const unsigned own = counts[w][threadIdx.x];
            counts[w][threadIdx.x] = sum;
            sum += own;
        }
    return sum;
}

// The exclusive prefix sum over the first 256 threads, with their total in `all`. Every thread must call it: it
// synchronises the block.
template <typename T>
__device__ T sum_before(T own, T& all) {
    __shared__ T parts[DIGITS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31 && warp < DIGITS / 32) parts[warp] = upto;
    __syncthreads();
    T start = upto - own;
    all = 0;
#pragma unroll
    for (int w = 0; w < DIGITS / 32; ++w) {
        if (w < warp) start += parts[w];
        all += parts[w];
    }
    return start;
}

// The value of the key at `at`: its index if no values were given.
__device__ inline Value value_of(const Value* values, long long at) { return values ? values[at] : (Value)at; }

// `wide`: 4-byte indices are written as int64 in the last pass.
__device__ inline void put(Key* sorted, void* moved, long long to, Key key, Value value, int wide) {
    sorted[to] = key;
    if (wide)
        reinterpret_cast<long long*>(moved)[to] = (long long)value;
    else
        reinterpret_cast<Value*>(moved)[to] = value;
}

// ---- several kernels per digit: count, add up, scatter ----

// How many keys of a tile have each digit, one row per digit.
extern "C" __global__ void __launch_bounds__(THREADS)
    radix_tiles(State* state, const Key* keys, long long n, int pass) {
    __shared__ unsigned counts[DIGITS];
    if (threadIdx.x < DIGITS) counts[threadIdx.x] = 0;
    __syncthreads();
    const long long first = blockIdx.x * (long long)TILE;
    const int valid = n - first < TILE ? (int)(n - first) : TILE;
    for (int i = threadIdx.x; i < valid; i += THREADS) atomicAdd(counts + digit_of(keys[first + i], 8 * pass), 1u);
    __syncthreads();
    if (threadIdx.x < DIGITS) state->words[threadIdx.x * (long long)gridDim.x + blockIdx.x] = (Word)counts[threadIdx.x];
}

// Per digit, the exclusive prefix sum over tiles, and the total: 256 threads, one block per digit.
extern "C" __global__ void radix_rows(State* state, long long tiles, int pass) {
    Word* row = state->words + blockIdx.x * tiles;
    Count carry = 0;
    for (long long start = 0; start < tiles; start += DIGITS) {
        const long long i = start + threadIdx.x;
        Count all;
        const Count before = sum_before<Count>(i < tiles ? row[i] : 0, all);
        if (i < tiles) row[i] = (Word)(carry + before);
        carry += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) state->totals[pass][blockIdx.x] = carry;
}

// Per pass from `first` on, one block each: how many keys have a smaller digit.
extern "C" __global__ void radix_bases(State* state, int first) {
    let_next_come();
    wait_for_before();
    Count* totals = state->totals[first + blockIdx.x];
    Count all;
    totals[threadIdx.x] = sum_before(totals[threadIdx.x], all);
}

// Each thread writes its keys to their places, which are rarely adjacent to its neighbours'.
extern "C" __global__ void __launch_bounds__(THREADS)
    radix_scatter(Key* sorted, void* moved, const Key* keys, const Value* values, const State* state, long long n,
                  int pass, int wide) {
    __shared__ unsigned counts[WARPS][DIGITS];
    __shared__ long long to[DIGITS];
    const long long first = blockIdx.x * (long long)TILE;
    const int shift = 8 * pass, warp = threadIdx.x / 32;
    Tile tile(keys, first, n);
    tile.count(counts[warp], shift);
    __syncthreads();
    add_warps(counts);
    if (threadIdx.x < DIGITS)
        to[threadIdx.x] = (long long)(state->totals[pass][threadIdx.x] +
                                      state->words[threadIdx.x * (long long)gridDim.x + blockIdx.x]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned d = tile.digit(i, shift);
        if (Tile::place(i) < tile.valid)
            put(sorted, moved, to[d] + counts[warp][d] + tile.rank[i], tile.key[i],
                value_of(values, first + Tile::place(i)), wide);
    }
}

// ---- all digits counted once, then one kernel per digit ----

extern "C" __global__ void radix_clear(Count* state, long long words) {
    let_next_come();
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < words) state[i] = 0;
}

// How many keys have each digit of every pass, in one read of the keys.
extern "C" __global__ void __launch_bounds__(256) radix_counts(State* state, const Key* keys, long long n) {
    let_next_come();
    constexpr int LOADS = 4;
    __shared__ unsigned own[PASSES * DIGITS * COPIES];
    for (int i = threadIdx.x; i < PASSES * DIGITS * COPIES; i += blockDim.x) own[i] = 0;
    __syncthreads();
    unsigned* mine = own + threadIdx.x % COPIES;
    const auto count = [&](Key key) {
        const Key k = order(key);
#pragma unroll
        for (int p = 0; p < PASSES; ++p) atomicAdd(mine + (p * DIGITS + ((unsigned)(k >> 8 * p) & 255)) * COPIES, 1u);
    };
    using Keys = Pack<Key, PACK>;
    const long long step = blockDim.x * (long long)LOADS, packs = n / PACK;
    for (long long start = blockIdx.x * step + threadIdx.x; start < packs; start += gridDim.x * step) {
        Keys pack[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (start + u * blockDim.x < packs) pack[u] = reinterpret_cast<const Keys*>(keys)[start + u * blockDim.x];
#pragma unroll
        for (int u = 0; u < LOADS; ++u)
            if (start + u * blockDim.x < packs)
#pragma unroll
                for (int j = 0; j < PACK; ++j) count(pack[u].at[j]);
    }
    if (PACK > 1 && blockIdx.x == 0 && threadIdx.x < n % PACK) count(keys[packs * PACK + threadIdx.x]);
    __syncthreads();
    wait_for_before();
    for (int i = threadIdx.x; i < PASSES * DIGITS; i += blockDim.x) {
        unsigned sum = 0;
        for (int c = 0; c < COPIES; ++c) sum += own[i * COPIES + c];
        if (sum) atomicAdd(state->totals[i / DIGITS] + i % DIGITS, (Count)sum);
    }
}

// A word of a tile's digit holds a count and its state: 0 nothing yet, 1 the tile's own count, 2 the count of it and
// all before. Every word ends a pass at 2, so in every second pass 2 stands for 0 (`turn` is 2), and nothing is cleared
// between passes.
__device__ inline Word with_state(Word value, Word state, int turn) { return (state ^ turn) << BITS | value; }

// How many keys of thread d's digit earlier tiles have, plus the digit's start: the nearest inclusive count and the
// tiles' own counts since.
__device__ inline Word look_back(const volatile Word* words, long long tile, int turn) {
    Word before = 0;
    for (long long at = tile - 1;;) {
        Word seen[LOOK];
#pragma unroll
        for (int j = 0; j < LOOK; ++j)
            seen[j] = at >= j ? words[(at - j) * DIGITS + threadIdx.x] : with_state(0, 0, turn);
        bool known = true;
#pragma unroll
        for (int j = 0; j < LOOK; ++j) {
            const Word state = seen[j] >> BITS ^ turn;
            known = known && state;
            if (!known) continue;
            before += seen[j] & LOW;
            if (state == 2) return before;
            --at;
        }
        if (!known) __nanosleep(20);
    }
}

// One digit in one pass. A block ranks its tile, publishes its counts, sorts the tile by digit in shared memory, looks
// back for where its keys of each digit go, and writes them from there with coalesced stores.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    radix_onesweep(Key* sorted, void* moved, const Key* keys, const Value* values, State* state, long long n, int pass,
                   int wide) {
    extern __shared__ uint4 room[];
    Value* staged_values = reinterpret_cast<Value*>(room);
    Key* staged_keys = reinterpret_cast<Key*>(staged_values + TILE);
    __shared__ unsigned counts[WARPS][DIGITS], starts[DIGITS];
    __shared__ Word to[DIGITS];
    __shared__ long long ticket;
    const int shift = 8 * pass, turn = pass % 2 * 2, warp = threadIdx.x / 32;
    let_next_come();
    wait_for_before();
    // Tickets instead of block numbers, so that all earlier tiles have started.
    if (threadIdx.x == 0) ticket = (long long)atomicAdd(state->tickets + pass, 1ULL);
    __syncthreads();
    const long long number = ticket, first = number * TILE;
    volatile Word* words = state->words;
    Tile tile(keys, first, n);
    tile.count(counts[warp], shift);
    __syncthreads();
    const unsigned own = add_warps(counts);
    Word before = 0;
    if (threadIdx.x < DIGITS) {
        if (number == 0) before = (Word)state->totals[pass][threadIdx.x];
        words[number * DIGITS + threadIdx.x] = with_state(before + own, number ? 1 : 2, turn);
    }
    Value value[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (Tile::place(i) < tile.valid) value[i] = value_of(values, first + Tile::place(i));
    unsigned all;
    const unsigned start = sum_before(own, all);
    if (threadIdx.x < DIGITS) starts[threadIdx.x] = start;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned d = tile.digit(i, shift), at = starts[d] + counts[warp][d] + tile.rank[i];
        staged_keys[at] = tile.key[i];
        if (Tile::place(i) < tile.valid) staged_values[at] = value[i];
    }
    if (threadIdx.x < DIGITS) {
        if (number) {
            before = look_back(words, number, turn);
            words[number * DIGITS + threadIdx.x] = with_state(before + own, 2, turn);
        }
        to[threadIdx.x] = before - start;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at >= tile.valid) break;
        const Key key = staged_keys[at];
        put(sorted, moved, (long long)(Word)(to[digit_of(key, shift)] + at), key, staged_values[at], wide);
    }
}
