// transpose in CUDA C++: y[b][c][r] = x[b][r][c], by tiles that a block transposes.
// Macros: UNIT an unsigned type of the element's size; LAYOUT of a small tile in shared memory (0 plain, 1 with a
// column of padding, 2 with swizzled columns); PACK the bytes that a thread moves at once and SIDE the elements along a
// side of its tile; GROUP the tiles across a band; for TMA, DOWN and ACROSS squares of 128 bytes per tile, STAGES and
// OUTS.
#include "hopper.cuh"

#ifndef LAYOUT
#define LAYOUT 0
#endif
#ifndef PACK
#define PACK 16
#define SIDE (256 / sizeof(UNIT))
#endif
#ifndef GROUP
#define GROUP (1 << 30)
#endif

// Where a tile of HIGH x WIDE begins. Tiles follow each other row by row in bands of GROUP across, so blocks that run
// at about the same time touch nearby parts of x and of y.
template <unsigned HIGH, unsigned WIDE>
struct Place {
    int batch, row, column;

    static __device__ unsigned down(int rows) { return (rows + HIGH - 1) / HIGH; }
    static __device__ unsigned across(int columns) { return (columns + WIDE - 1) / WIDE; }

    __device__ Place(unsigned id, int rows, int columns) {
        const unsigned d = down(rows), a = across(columns), wide = min(a, (unsigned)GROUP);
        const unsigned b = id / (d * a), mine = id - b * d * a, band = mine / (wide * d),
                       width = min(wide, a - band * wide);
        const unsigned rest = mine - band * wide * d, line = rest / width;
        batch = b;
        row = line * HIGH;
        column = (band * wide + rest - line * width) * WIDE;
    }
};

// --- one element at a time, 32 x 32 per block of 32 x 8 threads

// A warp reads 32 neighbours and writes each of them a row apart.
extern "C" __global__ void transpose_naive(UNIT* y, const UNIT* x, int rows, int columns) {
    const Place<32, 32> at(blockIdx.x, rows, columns);
    const long long first = (long long)at.batch * rows * columns;
    const int c = at.column + threadIdx.x % 32;
    for (int r = at.row + threadIdx.x / 32; r < at.row + 32; r += 8)
        if (r < rows && c < columns) y[first + (long long)c * rows + r] = x[first + (long long)r * columns + c];
}

// Through shared memory, so that a warp's writes coalesce too. It reads a column there: with rows of 32 words, all in
// one bank.
extern "C" __global__ void transpose_tile(UNIT* y, const UNIT* x, int rows, int columns) {
    constexpr int WIDTH = LAYOUT == 1 ? 33 : 32;
    __shared__ UNIT tile[32][WIDTH];
    const Place<32, 32> at(blockIdx.x, rows, columns);
    const long long first = (long long)at.batch * rows * columns;
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const auto place = [](int r, int c) { return LAYOUT == 2 ? c ^ r : c; };
#pragma unroll
    for (int r = line; r < 32; r += 8)
        if (at.row + r < rows && at.column + lane < columns)
            tile[r][place(r, lane)] = x[first + (long long)(at.row + r) * columns + at.column + lane];
    __syncthreads();
#pragma unroll
    for (int c = line; c < 32; c += 8)
        if (at.column + c < columns && at.row + lane < rows)
            y[first + (long long)(at.column + c) * rows + at.row + lane] = tile[lane][place(lane, c)];
}

// --- squares of packs: P rows of P elements, which a thread transposes in registers

constexpr int SIZE = sizeof(UNIT), P = PACK / SIZE;

template <int BYTES>
struct alignas(BYTES) Pack {
    unsigned at[BYTES / 4];
};
template <>
struct Pack<2> {
    unsigned short at[1];
};
template <>
struct Pack<1> {
    unsigned char at[1];
};

// out[c] becomes column c of the rows in[0] to in[P - 1].
__device__ inline void turn(const Pack<PACK> (&in)[P], Pack<PACK> (&out)[P]) {
    if constexpr (P == 1)
        out[0] = in[0];
    else if constexpr (SIZE >= 4) {  // whole words move: only registers are renamed
        constexpr int N = SIZE / 4;
#pragma unroll
        for (int c = 0; c < P; ++c)
#pragma unroll
            for (int r = 0; r < P; ++r)
#pragma unroll
                for (int n = 0; n < N; ++n) out[c].at[r * N + n] = in[r].at[c * N + n];
    } else if constexpr (SIZE == 2) {  // a word from two rows: their lower or their upper halves
#pragma unroll
        for (int c = 0; c < P; ++c)
#pragma unroll
            for (int m = 0; m < P / 2; ++m)
                out[c].at[m] = __byte_perm(in[2 * m].at[c / 2], in[2 * m + 1].at[c / 2], c % 2 ? 0x7632 : 0x5410);
    } else {  // squares of 4 x 4 bytes: neighbours first, then pairs of them
#pragma unroll
        for (int c = 0; c < P; c += 4)
#pragma unroll
            for (int m = 0; m < P / 4; ++m) {
                const unsigned a = in[4 * m].at[c / 4], b = in[4 * m + 1].at[c / 4];
                const unsigned d = in[4 * m + 2].at[c / 4], e = in[4 * m + 3].at[c / 4];
                const unsigned ab = __byte_perm(a, b, 0x5140), de = __byte_perm(d, e, 0x5140);
                const unsigned AB = __byte_perm(a, b, 0x7362), DE = __byte_perm(d, e, 0x7362);
                out[c].at[m] = __byte_perm(ab, de, 0x5410);
                out[c + 1].at[m] = __byte_perm(ab, de, 0x7632);
                out[c + 2].at[m] = __byte_perm(AB, DE, 0x5410);
                out[c + 3].at[m] = __byte_perm(AB, DE, 0x7632);
            }
    }
}

// A tile of SIDE x SIDE by 256 threads. Transposed squares lie in shared memory as packs of y's rows. Their columns are
// swizzled, so that the threads of a quarter warp, which write one row each and read neighbours, never share a bank.
// PACK divides the rows of x and of y.
extern "C" __global__ void __launch_bounds__(256)
    transpose_packed(UNIT* __restrict__ y, const UNIT* __restrict__ x, int rows, int columns) {
    extern __shared__ uint4 memory[];
    auto* tile = reinterpret_cast<Pack<PACK>*>(memory);
    constexpr int U = SIDE / P, SWIZZLE = U < 128 / PACK ? U : 128 / PACK;  // packs along a side
    const Place<SIDE, SIDE> at(blockIdx.x, rows, columns);
    const long long first = (long long)at.batch * rows * columns;
    const int down = rows - at.row, across = columns - at.column;  // what is left of the matrix
    x += first + (long long)at.row * columns + at.column;
    y += first + (long long)at.column * rows + at.row;
    constexpr int N = U * U / 256;  // squares per thread
    Pack<PACK> in[N][P] = {}, out[P];
#pragma unroll
    for (int s = 0; s < N; ++s) {
        const int q = threadIdx.x + s * 256, i = q / U, j = q % U;
#pragma unroll
        for (int k = 0; k < P; ++k)
            if (i * P + k < down && j * P < across)
                in[s][k] = *reinterpret_cast<const Pack<PACK>*>(x + (long long)(i * P + k) * columns + j * P);
    }
#pragma unroll
    for (int s = 0; s < N; ++s) {
        const int q = threadIdx.x + s * 256, i = q / U, j = q % U;
        turn(in[s], out);
#pragma unroll
        for (int k = 0; k < P; ++k) tile[(j * P + k) * U + (i ^ j % SWIZZLE)] = out[k];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < N * P; ++s) {
        const int q = threadIdx.x + s * 256, c = q / U, u = q % U;
        if (c < across && u * P < down)
            *reinterpret_cast<Pack<PACK>*>(y + (long long)c * rows + u * P) = tile[c * U + (u ^ c / P % SWIZZLE)];
    }
}

#if PACK == 16
// --- rows that begin anywhere: whole granules of 16 bytes on both sides all the same

__device__ inline void copy_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
}
__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A granule: the elements `offset` bytes after each pointer.
__device__ inline void gather(Pack<16>& in, const char* const (&from)[16 / SIZE], int offset) {
    const auto at = [&](int m) { return *reinterpret_cast<const UNIT*>(from[m] + offset); };
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if constexpr (SIZE == 1)
            in.at[j] = __byte_perm(at(4 * j) | at(4 * j + 1) << 8, at(4 * j + 2) | at(4 * j + 3) << 8, 0x5410);
        else if constexpr (SIZE == 2)
            in.at[j] = __byte_perm(at(2 * j), at(2 * j + 1), 0x5410);
        else if constexpr (SIZE == 4)
            in.at[j] = at(j);
        else
            in.at[j] = (unsigned)(at(j / 2) >> (j % 2 * 32));
}

// A granule rotated: byte 0 of out is byte `first` of in.
__device__ inline void turned(const Pack<16>& in, Pack<16>& out, int first) {
    unsigned a[4], b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = first & 8 ? in.at[j ^ 2] : in.at[j];
#pragma unroll
    for (int j = 0; j < 4; ++j) b[j] = first & 4 ? a[(j + 1) % 4] : a[j];
#pragma unroll
    for (int j = 0; j < 4; ++j) out.at[j] = __funnelshift_r(b[j], b[(j + 1) % 4], first % 4 * 8);
}

__device__ inline UNIT one(const Pack<16>& granule, int k) {
    if constexpr (SIZE == 8)
        return granule.at[2 * k] | (unsigned long long)granule.at[2 * k + 1] << 32;
    else
        return granule.at[k * SIZE / 4] >> (k * SIZE % 4 * 8);
}

// For rows that 16 bytes do not divide. The tile holds the granules of x's rows as they lie in memory, so element c of
// row i is `off` elements further, which depends on i modulo P alone. Column c takes the rows from `shift` rows before
// the tile's on, so that its part of y is whole granules too; hence P - 1 rows more. Rows of one remainder modulo P are
// PITCH bytes apart from the next remainder's and STEP bytes from each other. A warp reads eight of these in four
// columns, 32 different banks. A granule of y has one row of each remainder, in an order that starts at `b`.
constexpr int PITCH = 272, STEP = 16 / SIZE * PITCH + 16;

extern "C" __global__ void __launch_bounds__(256)
    transpose_shifted(UNIT* __restrict__ y, const UNIT* __restrict__ x, int rows, int columns) {
    extern __shared__ uint4 memory[];
    char* tile = reinterpret_cast<char*>(memory);
    const Place<SIDE, SIDE> at(blockIdx.x, rows + P - 1, columns);
    const long long first = (long long)at.batch * rows * columns;
    const int before = at.row - (P - 1);  // the tile's first row
    const auto begin = reinterpret_cast<unsigned long long>(x + first + (long long)before * columns + at.column);
    const auto off = [&](int i) { return (unsigned)(begin / SIZE + i * (unsigned)columns) % P; };
    const auto fetch = [&](int i, int u) {
        const unsigned long long row = begin + (long long)i * columns * SIZE, granule = (row & ~15ull) + 16 * u;
        if (before + i >= 0 && before + i < rows && granule < row + (long long)(columns - at.column) * SIZE)
            copy_16(tile + i / P * STEP + i % P * PITCH + 16 * u, reinterpret_cast<const void*>(granule));
    };
    for (int i = threadIdx.x / 16; i < SIDE + P - 1; i += 16) fetch(i, threadIdx.x % 16);
    for (int i = threadIdx.x; i < SIDE + P - 1; i += 256)
        if (off(i)) fetch(i, 16);
    copies_done();
    __syncthreads();
    const int slot = threadIdx.x % 8, line = threadIdx.x / 8;
    UNIT* to = y + first + (long long)(at.column + line) * rows + at.row;
    const int shift = reinterpret_cast<unsigned long long>(to) / SIZE % P, b = P - 1 - shift;
    const char* from[P];
#pragma unroll
    for (int m = 0; m < P; ++m) from[m] = tile + (slot + (m < b)) * STEP + m * PITCH + (off(m) + line) * SIZE;
    to += slot * P - shift;
#pragma unroll
    for (int c = 0; c < SIDE; c += 32, to += 32ll * rows)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Pack<16> in, out;
            gather(in, from, c * SIZE + h * 8 * STEP);
            turned(in, out, b * SIZE);
            const int row = at.row - shift + (slot + 8 * h) * P;
            if (at.column + line + c >= columns) continue;
            if (row >= 0 && row + P <= rows)
                *reinterpret_cast<uint4*>(to + 8 * h * P) = make_uint4(out.at[0], out.at[1], out.at[2], out.at[3]);
            else
                for (int k = 0; k < P; ++k)
                    if (row + k >= 0 && row + k < rows) to[8 * h * P + k] = one(out, k);
        }
}

#endif

// --- TMA: boxes 128 bytes wide are copied asynchronously

#if __CUDA_ARCH__ >= 900 && defined(STAGES)
// A block takes every gridDim.x-th tile. Tiles arrive in a ring of STAGES, several ahead, and leave from one of OUTS.
// TMA swizzles the 16-byte units of a row by the row's number modulo 8. Thread (i, j) of a square takes unit j of rows
// i P to i P + P - 1; eight neighbours have j = l and i = l ^ d, so the units they read, and those they write, lie in
// eight different columns.
constexpr int EDGE = 128 / SIZE, HIGH = DOWN * EDGE, WIDE = ACROSS * EDGE, SQUARES = DOWN * ACROSS;
constexpr int BYTES = SQUARES * EDGE * 128, THREADS = SQUARES < 4 ? SQUARES * 64 : 256;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    transpose_tma(UNIT*, const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap x, int batches,
                  int rows, int columns) {
    extern __shared__ char ring[];
    __shared__ Barrier full[STAGES];
    using Tile = Place<HIGH, WIDE>;
    char* stages = ring + (-shared_address(ring) & 1023);  // the swizzle counts from multiples of 1024
    char* outs = stages + STAGES * BYTES;
    const unsigned tiles = batches * Tile::down(rows) * Tile::across(columns);
    const bool first = threadIdx.x == 0;
    const auto load = [&](const Tile& at, int s) {
        barrier_expect(&full[s], BYTES);
#pragma unroll
        for (int a = 0; a < ACROSS; ++a)
            tensor_load(stages + s * BYTES + a * HIGH * 128, x, at.batch, at.row, at.column + a * EDGE, &full[s]);
    };
    unsigned ahead = blockIdx.x;  // the next tile to load
    if (first) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s]);
        barrier_init_done();
        for (int s = 0; s < STAGES && ahead < tiles; ++s, ahead += gridDim.x) load(Tile(ahead, rows, columns), s);
    }
    __syncthreads();
    int stage = 0, out = 0;
    unsigned phase = 0;
    for (unsigned id = blockIdx.x; id < tiles; id += gridDim.x) {
        const Tile at(id, rows, columns), next(ahead, rows, columns);  // divisions, while waiting for the load
        const char* from = stages + stage * BYTES;
        char* to = outs + out * BYTES;
        Pack<16> turned[SQUARES * 64 / THREADS][P];
        barrier_wait(&full[stage], phase);
#pragma unroll
        for (int s = 0; s < SQUARES * 64 / THREADS; ++s) {
            const int q = threadIdx.x + s * THREADS, square = q / 64, l = q % 8,
                      i = square / ACROSS * 8 + (l ^ q / 8 % 8);
            const char* box = from + square % ACROSS * HIGH * 128;
            Pack<16> in[P];
#pragma unroll
            for (int k = 0; k < P; ++k)
                in[k] = *reinterpret_cast<const Pack<16>*>(box + (i * P + k) * 128 + (l ^ (i * P + k) % 8) * 16);
            turn(in, turned[s]);
        }
        if (first) bulk_stored<OUTS - 1>();  // the tile that was in `to` has been stored
        __syncthreads();                     // and all threads have read this stage
        if (first && ahead < tiles) {
            load(next, stage);
            ahead += gridDim.x;
        }
#pragma unroll
        for (int s = 0; s < SQUARES * 64 / THREADS; ++s) {
            const int q = threadIdx.x + s * THREADS, square = q / 64, i = q % 8 ^ q / 8 % 8,
                      j = square % ACROSS * 8 + q % 8;
            char* box = to + square / ACROSS * WIDE * 128;
#pragma unroll
            for (int k = 0; k < P; ++k)
                *reinterpret_cast<Pack<16>*>(box + (j * P + k) * 128 + (i ^ (j * P + k) % 8) * 16) = turned[s][k];
        }
        bulk_fence();
        __syncthreads();
        if (first) {
#pragma unroll
            for (int d = 0; d < DOWN; ++d) tensor_store(to + d * WIDE * 128, y, at.batch, at.column, at.row + d * EDGE);
            bulk_commit();
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (++out == OUTS) out = 0;
    }
    if (first) bulk_stored<0>();
}
#endif
