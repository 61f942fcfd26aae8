// radix_sort in CUDA C++: by digits of 8 bits, the lowest first, each pass stable. A block has a tile of keys, each warp a stretch of it,
// 32 keys side by side at a time, so that a key's place in the tile grows with warp, item and lane.
// Macros: KTYPE the unsigned integer of a key's bits, KIND what it stands for (0 unsigned, 1 signed, 2 a float, INFINITE the bits of whose
// infinity), DESCENDING, VTYPE the unsigned integer that goes with a key, WORD the unsigned integer of counts (two bits of which are a
// state), THREADS (256 or more) and ITEMS, the keys of a thread, PACK the keys of a load that counts, PDL where each kernel lets the next one come
// early.
#include "early.cuh"
#include "elementwise.cuh"

using Key = KTYPE;
using Value = VTYPE;
using Word = WORD;
using Count = unsigned long long;
constexpr int COPIES = 4, LOOK = 2;  // of the counts in a block, and the tiles that are looked back at together
constexpr int DIGITS = 256, PASSES = sizeof(Key), WARPS = THREADS / 32, TILE = THREADS * ITEMS, BITS = 8 * sizeof(Word) - 2;
constexpr Word LOW = ((Word)1 << BITS) - 1;

// What one sort keeps: of each pass how many keys have a digit (or a smaller one, after radix_bases), the next tile, a word a tile and digit.
struct State {
    Count totals[8][DIGITS];
    Count tickets[8];
    Word words[1];
};

// A key as an unsigned number of its place in the order: NaN the greatest, -0 and 0 the same.
__device__ inline Key order(Key key) {
    constexpr Key SIGN = (Key)((Key)1 << (8 * sizeof(Key) - 1));
    Key k = key;
    if (KIND == 1) k = (Key)(key ^ SIGN);
    if (KIND == 2) {
        const Key size = (Key)(key & (Key)~SIGN);
        k = size > (Key)INFINITE ? (Key)~(Key)0 : size == 0 ? SIGN : key & SIGN ? (Key)~key : (Key)(key | SIGN);
    }
    return DESCENDING ? (Key)~k : k;
}

__device__ inline unsigned digit_of(Key key, int shift) { return (unsigned)(order(key) >> shift) & 255; }

// The lanes that have this lane's digit, by a vote for each bit: a fifth sooner than __match_any_sync on an H100.
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

// What a thread has of a tile. Places beyond the last key have the last digit, and stand behind all others of it.
struct Tile {
    Key key[ITEMS];
    unsigned rank[ITEMS];  // of a key among those of its digit in the warp
    int valid;

    __device__ Tile(const Key* keys, long long first, long long n) : valid(n - first < TILE ? (int)(n - first) : TILE) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) key[i] = place(i) < valid ? keys[first + place(i)] : (Key)0;
    }
    static __device__ int place(int i) { return threadIdx.x / 32 * 32 * ITEMS + i * 32 + threadIdx.x % 32; }
    __device__ unsigned digit(int i, int shift) const { return place(i) < valid ? digit_of(key[i], shift) : 255; }

    // `counts` are the warp's own; lanes that meet in a digit stand in their order, and the first of them counts for all.
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

// Thread d makes of the warps' counts of digit d where each warp's keys of it begin, and returns their sum; threads beyond return 0.
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

// What the numbers of all threads before add up to, of the first 256, and in `all` of all of these. Every thread calls it, and meets the others.
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

// The value that goes with the key at `at`: its index where none were given.
__device__ inline Value value_of(const Value* values, long long at) { return values ? values[at] : (Value)at; }

// `wide`: indices of 4 bytes are written as int64 in the last pass.
__device__ inline void put(Key* sorted, void* moved, long long to, Key key, Value value, int wide) {
    sorted[to] = key;
    if (wide)
        reinterpret_cast<long long*>(moved)[to] = (long long)value;
    else
        reinterpret_cast<Value*>(moved)[to] = value;
}

// ---- a digit in passes: count, add up, scatter ----

// How many keys of a tile have each digit, as a row a digit.
extern "C" __global__ void __launch_bounds__(THREADS) radix_tiles(State* state, const Key* keys, long long n, int pass) {
    __shared__ unsigned counts[DIGITS];
    if (threadIdx.x < DIGITS) counts[threadIdx.x] = 0;
    __syncthreads();
    const long long first = blockIdx.x * (long long)TILE;
    const int valid = n - first < TILE ? (int)(n - first) : TILE;
    for (int i = threadIdx.x; i < valid; i += THREADS) atomicAdd(counts + digit_of(keys[first + i], 8 * pass), 1u);
    __syncthreads();
    if (threadIdx.x < DIGITS) state->words[threadIdx.x * (long long)gridDim.x + blockIdx.x] = (Word)counts[threadIdx.x];
}

// Of a digit's row what the tiles before each have, and the total: 256 threads, a block a digit.
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

// Of the totals from pass `first` on, a block a pass, what all smaller digits have.
extern "C" __global__ void radix_bases(State* state, int first) {
    let_next_come();
    wait_for_before();
    Count* totals = state->totals[first + blockIdx.x];
    Count all;
    totals[threadIdx.x] = sum_before(totals[threadIdx.x], all);
}

// Each thread writes its keys where they belong, which is next to nothing that its neighbours write.
extern "C" __global__ void __launch_bounds__(THREADS)
    radix_scatter(Key* sorted, void* moved, const Key* keys, const Value* values, const State* state, long long n, int pass, int wide) {
    __shared__ unsigned counts[WARPS][DIGITS];
    __shared__ long long to[DIGITS];
    const long long first = blockIdx.x * (long long)TILE;
    const int shift = 8 * pass, warp = threadIdx.x / 32;
    Tile tile(keys, first, n);
    tile.count(counts[warp], shift);
    __syncthreads();
    add_warps(counts);
    if (threadIdx.x < DIGITS)
        to[threadIdx.x] = (long long)(state->totals[pass][threadIdx.x] + state->words[threadIdx.x * (long long)gridDim.x + blockIdx.x]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned d = tile.digit(i, shift);
        if (Tile::place(i) < tile.valid)
            put(sorted, moved, to[d] + counts[warp][d] + tile.rank[i], tile.key[i], value_of(values, first + Tile::place(i)), wide);
    }
}

// ---- all digits counted once, then a kernel a digit ----

extern "C" __global__ void radix_clear(Count* state, long long words) {
    let_next_come();
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < words) state[i] = 0;
}

// How many keys have each digit of every pass: one read of the keys.
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

// Words of a tile's digits hold a number beside its state: 0 nothing yet, 1 what the tile has, 2 what it and all before it have. As all
// end a pass at 2, the next one has that stand for 0 (`turn` 2, in every second pass), and nothing is cleared between passes.
__device__ inline Word with_state(Word value, Word state, int turn) { return (state ^ turn) << BITS | value; }

// What the tiles before have of thread d's digit, and where the digit begins: the number nearest back that includes it, and the tiles' own since.
__device__ inline Word look_back(const volatile Word* words, long long tile, int turn) {
    Word before = 0;
    for (long long at = tile - 1;;) {
        Word seen[LOOK];
#pragma unroll
        for (int j = 0; j < LOOK; ++j) seen[j] = at >= j ? words[(at - j) * DIGITS + threadIdx.x] : with_state(0, 0, turn);
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

// One digit in one pass. A block ranks its tile, tells its counts, puts the tile in order of the digit in shared memory, finds where its
// keys of each digit go, and writes them from there: neighbours write side by side.
extern "C" __global__ void __launch_bounds__(THREADS, 2) radix_onesweep(
    Key* sorted, void* moved, const Key* keys, const Value* values, State* state, long long n, int pass, int wide) {
    extern __shared__ uint4 room[];
    Value* staged_values = reinterpret_cast<Value*>(room);
    Key* staged_keys = reinterpret_cast<Key*>(staged_values + TILE);
    __shared__ unsigned counts[WARPS][DIGITS], starts[DIGITS];
    __shared__ Word to[DIGITS];
    __shared__ long long ticket;
    const int shift = 8 * pass, turn = pass % 2 * 2, warp = threadIdx.x / 32;
    let_next_come();
    wait_for_before();
    if (threadIdx.x == 0) ticket = (long long)atomicAdd(state->tickets + pass, 1ULL);  // so that the tiles before have begun
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
