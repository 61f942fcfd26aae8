// The short causal convolution in half precision: a thread walks along time through 8 neighbouring channels.
//     z_t = bias + sum over j < WIDTH of w_j x_{t-WIDTH+1+j}          y = z or silu(z)
// Warps that run at the same time work on rows that are near each other in memory. Forward loads all rows of a warp at
// once. Backward copies rows into shared memory some groups ahead: a thread copies only what it reads itself, so it
// waits for its own copies and never for another thread, and no register holds a load in flight.
// x's rows lie X elements apart over all sequences; dy, y, dx, weight and bias are contiguous.
// Macros: C channels, WIDTH, SILU, HALF (1: float16), WARPS of a block, BLOCKS on a multiprocessor; FILTER and BIAS,
// the types of weight and bias; forward's HIGH rows of a warp; backward's GROUP rows of a copy, AHEAD groups in flight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "early.cuh"

constexpr int CHANNELS = 8, PAST = WIDTH - 1, LANES = 32, SPAN = LANES * CHANNELS, PACK = 2 * CHANNELS;
#if HALF
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

struct alignas(PACK) Pack {
    unsigned at[CHANNELS / 2];
};

__device__ inline void unpack(const Pack& pack, float (&to)[CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; c += 2) {
#if HALF
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pack.at[c / 2]));
        to[c] = two.x, to[c + 1] = two.y;
#else
        to[c] = __uint_as_float(pack.at[c / 2] << 16);
        to[c + 1] = __uint_as_float(pack.at[c / 2] & 0xffff0000u);
#endif
    }
}

__device__ inline Pack packed(const float (&from)[CHANNELS]) {
    Pack pack;
#pragma unroll
    for (int c = 0; c < CHANNELS; c += 2) {
#if HALF
        const __half2 two = __floats2half2_rn(from[c], from[c + 1]);
#else
        const __nv_bfloat162 two = __floats2bfloat162_rn(from[c], from[c + 1]);
#endif
        pack.at[c / 2] = *reinterpret_cast<const unsigned*>(&two);
    }
    return pack;
}

__device__ inline float exp2_quick(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
    return e;
}

__device__ inline float inverse_quick(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// With silu, taps and bias are multiplied by UNIT, so that z comes out as the exponent of e^-z = 2^(UNIT z).
constexpr float UNIT = SILU ? -1.4426950408889634f : 1.f;

template <class T>
struct alignas(16) Eight {
    T at[CHANNELS];
};

struct Filters {
    float tap[WIDTH][CHANNELS], bias[CHANNELS];

    __device__ Filters(const FILTER* weight, const BIAS* given, int channel) {
        const auto* from = reinterpret_cast<const Eight<FILTER>*>(weight) + channel / CHANNELS * WIDTH;
#pragma unroll
        for (int n = 0; n < WIDTH; ++n) {
            const Eight<FILTER> part = from[n];
#pragma unroll
            for (int e = n * CHANNELS; e < (n + 1) * CHANNELS; ++e)
                tap[e % WIDTH][e / WIDTH] = UNIT * (float)part.at[e - n * CHANNELS];
        }
        Eight<BIAS> part = {};
        if (given) part = reinterpret_cast<const Eight<BIAS>*>(given)[channel / CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) bias[c] = UNIT * (float)part.at[c];
    }
};

// What a sequence has between two multiples of `length` tokens; rows count over all sequences.
struct Piece {
    int sequence, begin, end, first, last;

    // Packed sequences: those of sequence n have the numbers from begin_n / length + n on.
    __device__ Piece(const int* ends, int tokens, int sequences, int length, int number) {
        if (ends) {
            int low = 0, high = sequences;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                if (ends[middle] / length + middle <= number)
                    low = middle;
                else
                    high = middle;
            }
            sequence = low;
            begin = ends[low], end = ends[low + 1];
            first = max(begin, (begin / length + (number - begin / length - low)) * length);
            last = min(end, (first / length + 1) * length);
        } else {
            const int each = max((tokens + length - 1) / length, 1);
            sequence = number / each;
            begin = sequence * tokens, end = begin + tokens;
            first = begin + number % each * length;
            last = min(end, first + length);
        }
        last = max(first, last);
    }
};

// A thread's own part of GROUP x AHEAD rows in shared memory, and where the next one comes from.
struct Ring {
    static constexpr int ROWS = GROUP * AHEAD;
    const Element* from;
    unsigned place;
    long long step;

    __device__ Ring(const Element* first, long long step, unsigned place) : from(first), place(place), step(step) {}

    // Copies a row if `here`, and else fills it with zeros.
    __device__ void copy(int slot, bool here) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(place + slot * (LANES * PACK)), "l"(from),
                     "n"(PACK), "r"(here ? PACK : 0)
                     : "memory");
        from += step;
    }
    __device__ void copy(int slot) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" ::"r"(place + slot * (LANES * PACK)), "l"(from),
                     "n"(PACK)
                     : "memory");
        from += step;
    }

    __device__ Pack row(int slot) const {
        Pack pack;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pack.at[0]), "=r"(pack.at[1]), "=r"(pack.at[2]), "=r"(pack.at[3])
                     : "r"(place + slot * (LANES * PACK))
                     : "memory");
        return pack;
    }
};

__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory"); }

__device__ inline Pack row_at(const Element* from) { return *reinterpret_cast<const Pack*>(from); }

// The entry of a state for the token `ahead` of the one after the state, for the first of a thread's channels.
__device__ inline long long entry(const Piece& piece, int channel, int ahead) {
    return ((long long)piece.sequence * C + channel) * WIDTH + WIDTH + ahead;
}

// The inputs of a token before the sequence: those of the state before it, or zeros.
__device__ inline void older(const Element* first, const Piece& piece, int at, int channel, float (&to)[CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        to[c] = first ? (float)first[entry(piece, channel, at - piece.begin) + c * WIDTH] : 0.f;
}

__device__ inline void input(const Element* x, long long step, const Element* first, const Piece& piece, int at,
                             int channel, float (&to)[CHANNELS]) {
    if (at >= piece.begin)
        unpack(row_at(x + at * step + channel), to);
    else
        older(first, piece, at, channel, to);
}

template <int N>
__device__ inline void rotate(float (&rows)[N][CHANNELS]) {
#pragma unroll
    for (int j = 0; j + 1 < N; ++j)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) rows[j][c] = rows[j + 1][c];
}

// A warp has HIGH rows of the block's piece of HIGH x WARPS. All its loads are in flight together; the inputs before
// its first row are also another warp's, and come from the nearest cache.
extern "C" __global__ void __launch_bounds__(LANES* WARPS, BLOCKS)
    conv_forward(Element* __restrict__ y, const Element* __restrict__ x, const FILTER* __restrict__ weight,
                 const BIAS* __restrict__ bias, const Element* first, Element* last, const int* ends, int tokens,
                 int sequences, long long X) {
    constexpr int ACROSS = (C + SPAN - 1) / SPAN;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int channel = blockIdx.x % ACROSS * SPAN + lane * CHANNELS;
    if (channel >= C) return;
    const Piece piece(ends, tokens, sequences, HIGH * WARPS, blockIdx.x / ACROSS);
    const int begin = piece.first + warp * HIGH, rows = piece.last - begin;
    const Element* from = x + (begin - PAST) * X + channel;
    Pack raw[PAST + HIGH];
    const bool whole = begin - PAST >= piece.begin && rows >= HIGH;
    if (whole) {
#pragma unroll
        for (int i = 0; i < PAST + HIGH; ++i, from += X) raw[i] = row_at(from);
    } else {
#pragma unroll
        for (int i = 0; i < PAST + HIGH; ++i, from += X) {
            raw[i] = {};
            if (i - PAST < rows && begin + i - PAST >= piece.begin) raw[i] = row_at(from);
        }
    }
    const Filters filters(weight, bias, channel);
    float past[WIDTH][CHANNELS];
#pragma unroll
    for (int j = 0; j < PAST; ++j) {
        unpack(raw[j], past[j]);
        if (first && begin + j - PAST < piece.begin) older(first, piece, begin + j - PAST, channel, past[j]);
    }
    Element* to = y + (long long)begin * C + channel;
#pragma unroll
    for (int i = 0; i < HIGH; ++i, to += C) {
        unpack(raw[PAST + i], past[PAST]);
        float z[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            z[c] = filters.bias[c];
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) z[c] = fmaf(filters.tap[j][c], past[j][c], z[c]);
            if (SILU) z[c] *= inverse_quick(fmaf(exp2_quick(z[c]), UNIT, UNIT));
        }
        if (whole || i < rows) *reinterpret_cast<Pack*>(to) = packed(z);
        rotate(past);
    }
    if (last && warp == 0 && piece.last == piece.end && (piece.first < piece.last || piece.begin == piece.end)) {
        float kept[WIDTH][CHANNELS];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) input(x, X, first, piece, piece.end - WIDTH + j, channel, kept[j]);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) last[entry(piece, channel, j - WIDTH) + c * WIDTH] = (Element)kept[j][c];
    }
}

// Copies rows of x and of dy into a thread's rings, a group at a time, through all pieces of a warp.
struct Copies {
    Ring inputs, slopes;
    Piece piece;
    int number, row, end, seen;

    __device__ void open(const Element* x, const Element* dy, long long X, int channel) {
        const int rows = piece.last - piece.first;
        row = -GROUP, end = rows ? rows + PAST : row, seen = min(piece.end - piece.first, rows + PAST);
        inputs.from = x + (piece.first + row) * X + channel;
        slopes.from = dy + (piece.first + row) * (long long)C + channel;
    }
    __device__ void group(int slot) {
        if (__builtin_expect(row >= 0 && row + GROUP <= seen, 1)) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) inputs.copy(slot + i), slopes.copy(slot + i);
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int at = row + i;
                inputs.copy(slot + i, at >= -PAST && at < seen && piece.first + at >= piece.begin);
                slopes.copy(slot + i, at >= 0 && at < seen);
            }
        }
        row += GROUP;
    }
};

// A block's warps walk through pieces of the same channels: pieces i, i + n, ... of all for warp i of n. A piece's
// first group has the inputs before it, and the rows after it end its last gradients.
extern "C" __global__ void __launch_bounds__(LANES* WARPS, BLOCKS)
    conv_backward(Element* dx, float* parts, Element* dfirst, const Element* dy, const Element* dlast, const Element* x,
                  const FILTER* weight, const BIAS* bias, const Element* first, const int* ends, int tokens,
                  int sequences, int length, int count, long long X) {
    static_assert(GROUP > PAST);
    extern __shared__ char memory[];
    constexpr int ACROSS = (C + SPAN - 1) / SPAN;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, block = blockIdx.x / ACROSS;
    const int channel = blockIdx.x % ACROSS * SPAN + lane * CHANNELS, stride = gridDim.x / ACROSS * WARPS;
    const bool here = channel < C;
    constexpr int RING = Ring::ROWS * LANES * PACK;
    const unsigned place = (unsigned)__cvta_generic_to_shared(memory) + warp * 2 * RING + lane * PACK;
    float totals[WIDTH + 1][CHANNELS] = {};
    const Filters filters(weight, bias, here ? channel : 0);
    const int own = here ? block * WARPS + warp : count;
    const auto piece_of = [&](int number) { return Piece(ends, tokens, sequences, length, number); };
    Copies ahead{{x, X, place}, {dy, C, place + RING}, piece_of(own < count ? own : 0), own};
    if (own < count) ahead.open(x, dy, X, channel);
    const auto advance = [&](int slot) {
        while (ahead.number < count && ahead.row >= ahead.end) {
            ahead.number += stride;
            if (ahead.number < count) ahead.piece = piece_of(ahead.number), ahead.open(x, dy, X, channel);
        }
        if (ahead.number < count) ahead.group(slot);
        commit();
    };
#pragma unroll 1
    for (int s = 0; s < AHEAD; ++s) advance(s * GROUP);
    int slot = 0;
    for (int number = own; number < count; number += stride) {
        const Piece piece = piece_of(number);
        const int rows = piece.last - piece.first;
        float past[WIDTH][CHANNELS], pending[WIDTH][CHANNELS] = {};
        Element* to = dx + (piece.first - PAST) * (long long)C + channel;
        // Row r, whose gradient ends that of row r - PAST.
        const auto step = [&](int slot, bool counts) {
            float dz[CHANNELS];
            unpack(ahead.inputs.row(slot), past[PAST]);
            unpack(ahead.slopes.row(slot), dz);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                if (SILU) {
                    float z = filters.bias[c];
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) z = fmaf(filters.tap[j][c], past[j][c], z);
                    // silu' = p (1 + z (1 - p)), and p = 1 / (1 + e^-z); z here is UNIT times that, dz 1 / UNIT times
                    const float p = inverse_quick(1.f + exp2_quick(z));
                    dz[c] *= p * fmaf(z, fmaf(p, -1 / (UNIT * UNIT), 1 / (UNIT * UNIT)), 1 / UNIT);
                }
                pending[PAST][c] = 0;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) pending[j][c] = fmaf(filters.tap[j][c], dz[c], pending[j][c]);
            }
            if (counts)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) totals[j][c] = fmaf(dz[c], past[j][c], totals[j][c]);
                    totals[WIDTH][c] += dz[c];
                }
        };
        const auto shift = [&] {
            to += C;
            rotate(past), rotate(pending);
        };
        const int plain = dlast ? rows - WIDTH : rows;  // rows that meet no gradient of the state after the sequence
        for (int r = rows ? -GROUP : rows + PAST; r < rows + PAST; r += GROUP) {
            arrived();
            if (__builtin_expect(r >= PAST && r + GROUP <= plain, 1)) {
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    step(slot + i, true);
                    *reinterpret_cast<Pack*>(to) = packed(pending[0]);
                    shift();
                }
            } else if (r < 0) {
#pragma unroll
                for (int i = GROUP - PAST; i < GROUP; ++i) {
                    float(&row)[CHANNELS] = past[i - GROUP + PAST];
                    unpack(ahead.inputs.row(slot + i), row);
                    const int at = piece.first + r + i;
                    if (first && at < piece.begin) older(first, piece, at, channel, row);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < GROUP && r + i < rows + PAST; ++i) {
                    step(slot + i, r + i < rows);
                    float(&value)[CHANNELS] = pending[0];
                    const int at = piece.first + r + i - PAST;
                    if (dlast && at >= piece.end - WIDTH && at < piece.end)
#pragma unroll
                        for (int c = 0; c < CHANNELS; ++c)
                            value[c] += (float)dlast[entry(piece, channel, at - piece.end) + c * WIDTH];
                    if (r + i >= PAST) *reinterpret_cast<Pack*>(to) = packed(value);
                    if (dfirst && r + i < PAST && piece.first == piece.begin)
#pragma unroll
                        for (int c = 0; c < CHANNELS; ++c)
                            dfirst[entry(piece, channel, at - piece.begin) + c * WIDTH] = (Element)value[c];
                    shift();
                }
            }
            advance(slot);
            slot = slot + GROUP == Ring::ROWS ? 0 : slot + GROUP;
        }
        if (dfirst && piece.first == piece.begin)  // its oldest input meets no token: kept only where none follows
            for (int j = 0; j < (piece.begin == piece.end ? WIDTH : 1); ++j)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    const long long spot = entry(piece, channel, j - WIDTH) + c * WIDTH;
                    dfirst[spot] = dlast && piece.begin == piece.end ? dlast[spot] : (Element)0.f;
                }
    }
    let_next_come();
    if (!parts) return;
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);  // (WARPS, WIDTH + 1, SPAN)
#pragma unroll
    for (int j = 0; j <= WIDTH; ++j)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            sums[((warp * (WIDTH + 1) + j) * CHANNELS + c) * LANES + lane] = UNIT * totals[j][c];
    __syncthreads();
    for (int e = threadIdx.x; e < (WIDTH + 1) * SPAN; e += LANES * WARPS) {
        float sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += sums[w * (WIDTH + 1) * SPAN + e];
        const int j = e / SPAN, at = blockIdx.x % ACROSS * SPAN + e % LANES * CHANNELS + e / LANES % CHANNELS;
        if (at < C) parts[((long long)block * (WIDTH + 1) + j) * C + at] = sum;
    }
}
