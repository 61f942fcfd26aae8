// gemv in CUDA C++: gemv_rows, with rows of a by warps or parts of warps; gemv_bulk, with persistent blocks whose warps
// read rows from rings in shared memory that bulk copies fill.
// Macros: XTYPE, the element type, __half2 for complex32; PACK, elements per load.
#include "elementwise.cuh"
#include "hopper.cuh"

using P = Pack<XTYPE, PACK>;

#ifdef LANES  // lanes per row, a power of two; STEPS, packs that a lane loads before it uses any
// A float32 sum, with an imaginary part for complex numbers.
struct Sum {
    float2 value = {0, 0};

    __device__ void add(float a, float x) { value.x = fmaf(a, x, value.x); }
    __device__ void add(float2 a, float2 x) {
        value.x = fmaf(a.x, x.x, fmaf(-a.y, x.y, value.x));
        value.y = fmaf(a.x, x.y, fmaf(a.y, x.x, value.y));
    }
};

__device__ inline float2 to_float(__half2 x) { return __half22float2(x); }
__device__ inline void store(float2 sum, __half2& y) { y = __float22half2_rn(sum); }
template <typename T>
__device__ inline void store(float2 sum, T& y) {
    from_float(sum.x, y);
}

// Block (x, y) takes some rows of a, and row y of x. STEPS packs are summed apart, then added, since rounding errors
// grow with the length of a chain of additions.
extern "C" __global__ void gemv_rows(XTYPE* y, const XTYPE* a, const XTYPE* x, long long rows, long long packs,
                                     long long a_stride, long long x_stride) {
    const long long row = blockIdx.x * (long long)(blockDim.x / LANES) + threadIdx.x / LANES;
    const P* left = reinterpret_cast<const P*>(a + row * a_stride);
    const P* right = reinterpret_cast<const P*>(x + blockIdx.y * x_stride);
    float2 total = {0, 0};
    for (long long first = row < rows ? threadIdx.x % LANES : packs; first < packs; first += LANES * STEPS) {
        P one[STEPS], other[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            if (first + s * LANES < packs) one[s] = left[first + s * LANES], other[s] = right[first + s * LANES];
        Sum sum;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            if (first + s * LANES < packs)
#pragma unroll
                for (int k = 0; k < PACK; ++k) sum.add(to_float(one[s].at[k]), to_float(other[s].at[k]));
        total.x += sum.value.x;
        total.y += sum.value.y;
    }
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) {
        total.x += __shfl_xor_sync(~0u, total.x, lane);
        total.y += __shfl_xor_sync(~0u, total.y, lane);
    }
    if (threadIdx.x % LANES == 0 && row < rows) store(total, y[blockIdx.y * rows + row]);
}
#else
// Macros: MANY, rows of x; WARPS per block, each with STAGES stages of ROWS pieces of rows of PIECE bytes.
constexpr int PLANES = PACK / 4, PACKS = PIECE / 16;
constexpr int RING = STAGES * ROWS * PIECE;  // bytes per warp
extern __shared__ __align__(128) char memory[];

// Block b has the b-th of gridDim.x equal shares of a's rows, and its warps take ROWS of them in turn. Lane 0 of a warp
// requests what the warp reads STAGES pieces later. x stays in shared memory as float32, in planes: plane j has numbers
// 4j to 4j + 3 of every pack, so that neighbouring lanes read neighbouring 16 bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    gemv_bulk(XTYPE* y, const XTYPE* a, const XTYPE* x, long long rows, int packs, long long a_stride,
              long long x_stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = (packs + PACKS - 1) / PACKS;
    const long long first = blockIdx.x * rows / gridDim.x + warp * ROWS, last = (blockIdx.x + 1) * rows / gridDim.x;
    char* ring = memory + warp * RING;
    Barrier* full = reinterpret_cast<Barrier*>(memory + WARPS * RING) + warp * STAGES;
    float4* vector =
        reinterpret_cast<float4*>(memory + WARPS * RING + (WARPS * STAGES * sizeof(Barrier) + 15) / 16 * 16);

    long long next_row = first;  // lane 0 requests this next
    int next_piece = 0;
    const auto load = [&](int stage) {
        if (next_row >= last) return;
        const unsigned bytes = min(PACKS, packs - next_piece * PACKS) * 16;
        const int count = last - next_row < ROWS ? last - next_row : ROWS;
        barrier_expect(full + stage, count * bytes);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < count)
                bulk_load(ring + (stage * ROWS + r) * PIECE,
                          reinterpret_cast<const P*>(a + (next_row + r) * a_stride) + next_piece * PACKS, bytes,
                          full + stage);
        if (++next_piece == pieces) {
            next_piece = 0;
            next_row += WARPS * ROWS;
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; ++stage) barrier_init(full + stage);
        barrier_init_done();
        for (int stage = 0; stage < STAGES; ++stage) load(stage);
    }
    constexpr int AHEAD = 8;  // loads of x in flight per thread
    for (int start = threadIdx.x; start < MANY * packs; start += AHEAD * WARPS * 32) {
        P in[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int i = start + u * WARPS * 32, m = i / packs;
            if (i < MANY * packs) in[u] = reinterpret_cast<const P*>(x + m * x_stride)[i - m * packs];
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int i = start + u * WARPS * 32, m = i / packs;
            const XTYPE* const at = in[u].at;
            if (i < MANY * packs)
#pragma unroll
                for (int j = 0; j < PLANES; ++j)
                    vector[(m * PLANES + j) * packs + i - m * packs] =
                        make_float4(to_float(at[4 * j]), to_float(at[4 * j + 1]), to_float(at[4 * j + 2]),
                                    to_float(at[4 * j + 3]));
        }
    }
    __syncthreads();  // x is in shared memory, and the barriers are initialised

    int stage = 0, phase = 0;
    for (long long row = first; row < last; row += WARPS * ROWS) {
        float total[ROWS][MANY] = {};
        for (int piece = 0; piece < pieces; ++piece) {
            barrier_wait(full + stage, phase);
            const P* part = reinterpret_cast<const P*>(ring + stage * ROWS * PIECE);
            float sum[ROWS][MANY] = {};
#pragma unroll
            for (int i = 0; i < PACKS / 32; ++i) {
                const int p = i * 32 + lane, at = piece * PACKS + p;
                if (at < packs) {
                    P pack[ROWS];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) pack[r] = part[r * PACKS + p];  // stale beyond the last row
#pragma unroll
                    for (int m = 0; m < MANY; ++m)
#pragma unroll
                        for (int j = 0; j < PLANES; ++j) {
                            const float4 v = vector[(m * PLANES + j) * packs + at];
#pragma unroll
                            for (int r = 0; r < ROWS; ++r) {
                                const XTYPE* const four = pack[r].at + 4 * j;
                                const float front = fmaf(to_float(four[1]), v.y, to_float(four[0]) * v.x);
                                sum[r][m] += fmaf(to_float(four[3]), v.w, fmaf(to_float(four[2]), v.z, front));
                            }
                        }
                }
            }
            __syncwarp();  // every lane has read the stage
            if (lane == 0) load(stage);
            if (++stage == STAGES) stage = 0, phase ^= 1;
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int m = 0; m < MANY; ++m) total[r][m] += sum[r][m];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int m = 0; m < MANY; ++m) {
                const float whole = warp_sum(total[r][m]);
                if (lane == 0 && row + r < last) from_float(whole, y[m * rows + row + r]);
            }
    }
}
#endif
