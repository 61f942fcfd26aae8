// softmax of wide rows: a cluster of CLUSTER blocks takes a row, each block one part of it, which it holds in registers, so that
// the row is read once. The blocks tell each other maxima and sums through their shared memory.
// Macros: XTYPE and YTYPE the element types of x (and dx) and of y (and dy); CLUSTER; THREADS per block; BLOCKS that fit a
// multiprocessor; ITEMS packs per thread. Rows start at multiples of 16 bytes and are multiples of 16 bytes long.
#include "elementwise.cuh"
#include "hopper.cuh"

using X = XTYPE;
using Y = YTYPE;
constexpr int SMALL = sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y), LARGE = sizeof(X) < sizeof(Y) ? sizeof(Y) : sizeof(X);
constexpr int PACK = 16 / LARGE, ALIGN = 16 / SMALL, WARPS = THREADS / 32, SLOTS = CLUSTER * WARPS;
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

// exp(x - base). For float32 inputs by the fraction alone: of the whole exponent ex2.approx comes out 5e-8 too small, but not near 0.
__device__ inline float exp_from(float x, float base) {
    if (sizeof(X) == 4) return expf(x - base);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, -base * 1.44269504f)));
    return y;
}

// e * factor / total. For float32 results rounded as a division is: a reciprocal's rounding alone would put one bias on a row.
__device__ inline float divide(float e, float factor, float total, float reciprocal) {
    if (sizeof(Y) < 4) return e * (factor * reciprocal);
    const float scaled = e * factor, q = scaled * reciprocal;
    return fmaf(fmaf(-q, total, scaled), reciprocal, q);
}

// What this block has of its row: `count` elements from `begin` on, in packs that its threads take in turn.
struct Part {
    int rank = blockIdx.x % CLUSTER;
    long long row = blockIdx.x / CLUSTER;
    int begin, count;

    __device__ explicit Part(int columns) {
        const int part = (columns + CLUSTER * ALIGN - 1) / (CLUSTER * ALIGN) * ALIGN;
        begin = min(rank * part, columns);
        count = min(part, columns - begin);
    }

    __device__ static int pack(int item) { return item * THREADS + threadIdx.x; }
    __device__ bool has(int item) const { return pack(item) * PACK < count; }

    // Gives a float of every warp to all blocks of the cluster: it lands in their `slots`.
    __device__ void send(float* slots, float value) const {
        const int lane = threadIdx.x % 32;
        if (lane < CLUSTER) cluster_store(slots + rank * WARPS + threadIdx.x / 32, value, lane);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fwd(Y* y, const X* x, long long rows, int columns, long long x_stride) {
    __shared__ float tops[SLOTS], sums[SLOTS];
    cluster_arrive();  // all blocks run, and so may be written to, when all have come through the wait below
    const Part part(columns);
    const auto* in = reinterpret_cast<const Pack<X, PACK>*>(x + part.row * x_stride + part.begin);
    Pack<X, PACK> packs[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (part.has(i)) packs[i] = in[part.pack(i)];
    float e[ITEMS][PACK], top = -INF, sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < PACK; ++j) top = fmaxf(top, e[i][j] = part.has(i) ? to_float(packs[i].at[j]) : -INF);
    top = warp_max(top);
    const float base = top == -INF ? 0.0f : top;  // nothing but -inf: exponentials of 0, not of -inf + inf
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < PACK; ++j) sum += e[i][j] = exp_from(e[i][j], base);
    sum = warp_sum(sum);
    cluster_wait();
    part.send(tops, top);
    part.send(sums, sum);
    cluster_arrive();
    cluster_wait();
    float most = -INF, total = 0;
    for (int s = threadIdx.x % 32; s < SLOTS; s += 32) most = fmaxf(most, tops[s]);
    most = warp_max(most);
    for (int s = threadIdx.x % 32; s < SLOTS; s += 32) total += sums[s] * exp_from(tops[s], most);
    total = warp_sum(total);
    const float factor = exp_from(top, most), reciprocal = 1.0f / total;
    auto* out = reinterpret_cast<Pack<Y, PACK>*>(y + part.row * columns + part.begin);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        Pack<Y, PACK> pack;
#pragma unroll
        for (int j = 0; j < PACK; ++j) from_float(divide(e[i][j], factor, total, reciprocal), pack.at[j]);
        if (part.has(i)) out[part.pack(i)] = pack;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_bwd(X* dx, const Y* dy, const Y* y, long long rows, int columns, long long dy_stride, long long y_stride) {
    __shared__ float sums[SLOTS];
    cluster_arrive();
    const Part part(columns);
    const auto* left = reinterpret_cast<const Pack<Y, PACK>*>(dy + part.row * dy_stride + part.begin);
    const auto* right = reinterpret_cast<const Pack<Y, PACK>*>(y + part.row * y_stride + part.begin);
    Pack<Y, PACK> a[ITEMS], b[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (part.has(i)) {
            a[i] = left[part.pack(i)];
            b[i] = right[part.pack(i)];
        }
    float sum = 0, total = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < PACK; ++j)
            if (part.has(i)) sum += to_float(a[i].at[j]) * to_float(b[i].at[j]);
    sum = warp_sum(sum);
    cluster_wait();
    part.send(sums, sum);
    cluster_arrive();
    cluster_wait();
    for (int s = threadIdx.x % 32; s < SLOTS; s += 32) total += sums[s];
    total = warp_sum(total);
    auto* out = reinterpret_cast<Pack<X, PACK>*>(dx + part.row * columns + part.begin);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        Pack<X, PACK> pack;
#pragma unroll
        for (int j = 0; j < PACK; ++j) from_float(to_float(b[i].at[j]) * (to_float(a[i].at[j]) - total), pack.at[j]);
        if (part.has(i)) out[part.pack(i)] = pack;
    }
}
