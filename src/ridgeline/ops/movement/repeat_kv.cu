// repeat_kv in CUDA C++: one thread per element or pack of the result, then one per pack of the input, each read once.
// Macros: XTYPE the element type; PACK the elements of a pack, the unit of sizes and strides; COPIES of each head;
// LENGTH the type of lengths, MASKED whether there are any; NUMBER an unsigned type that counts a tensor's packs;
// UNROLL packs per thread; DENSE whether rows are contiguous.
#include "elementwise.cuh"

using P = Pack<XTYPE, PACK>;

// How many of a sequence's `rows` are not masked.
__device__ inline long long valid_rows(const LENGTH* lengths, long long step, long long b, long long rows) {
    if (!MASKED) return rows;
    const long long length = lengths[b * step];
    return length < 0 ? 0 : length < rows ? length : rows;
}

__device__ inline P zeros() {
    P pack;
#pragma unroll
    for (int k = 0; k < PACK; ++k) from_float(0.0f, pack.at[k]);
    return pack;
}

// The sum of the copies, which lie `apart` packs from each other, in order.
__device__ inline P sum_of(const P* first, long long apart) {
    float sum[PACK];
#pragma unroll
    for (int k = 0; k < PACK; ++k) sum[k] = 0.0f;
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
        const P pack = first[j * apart];
#pragma unroll
        for (int k = 0; k < PACK; ++k) sum[k] += to_float(pack.at[k]);
    }
    P made;
#pragma unroll
    for (int k = 0; k < PACK; ++k) from_float(sum[k], made.at[k]);
    return made;
}

// A pack's position in a dense tensor (batch, heads, rows, size), from its number.
struct Place {
    long long b, h, s, d;

    __device__ Place(NUMBER i, long long heads, long long rows, long long size) {
        d = i % (NUMBER)size;
        i /= (NUMBER)size;
        s = i % (NUMBER)rows;
        i /= (NUMBER)rows;
        h = i % (NUMBER)heads;
        b = i / (NUMBER)heads;
    }
};

extern "C" __global__ void repeat_kv_fwd(P* y, const P* x, const LENGTH* lengths, long long step, long long count,
                                         long long heads, long long rows, long long size, long long x_b, long long x_h,
                                         long long x_s, long long x_d) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count * COPIES) return;
    const Place p(i, heads * COPIES, rows, size);
    const bool valid = p.s < valid_rows(lengths, step, p.b, rows);
    y[i] = valid ? x[p.b * x_b + p.h / COPIES * x_h + p.s * x_s + p.d * x_d] : zeros();
}

extern "C" __global__ void repeat_kv_bwd(P* dx, const P* dy, const LENGTH* lengths, long long step, long long count,
                                         long long heads, long long rows, long long size, long long dy_b,
                                         long long dy_h, long long dy_s, long long dy_d) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Place p(i, heads, rows, size);
    const bool valid = p.s < valid_rows(lengths, step, p.b, rows);
    dx[i] = valid ? sum_of(dy + p.b * dy_b + p.h * COPIES * dy_h + p.s * dy_s + p.d * dy_d, dy_h) : zeros();
}

// Calls f(head, its packs, its valid packs) for each head that this block takes: number y, y + gridDim.y, ... of all.
template <typename F>
__device__ void each_head(const LENGTH* lengths, long long step, long long batch, long long heads, long long rows,
                          long long size, F f) {
    for (long long head = blockIdx.y; head < batch * heads; head += gridDim.y)
        f(head, (unsigned)(rows * size), (unsigned)(valid_rows(lengths, step, head / heads, rows) * size));
}

// The u-th pack of this thread in its block's part of a head, and its offset in a tensor whose rows are `stride` apart.
__device__ inline unsigned mine(int u) { return (blockIdx.x * UNROLL + u) * blockDim.x + threadIdx.x; }
__device__ inline long long place(unsigned p, unsigned size, long long stride) {
    return DENSE ? p : p / size * stride + p % size;
}

// Each pack is read once and stored COPIES times; a thread has UNROLL packs in flight.
extern "C" __global__ void repeat_kv_once_fwd(P* y, const P* x, const LENGTH* lengths, long long step, long long batch,
                                              long long heads, long long rows, long long size, long long x_b,
                                              long long x_h, long long x_s) {
    each_head(lengths, step, batch, heads, rows, size, [&](long long head, unsigned all, unsigned valid) {
        const P* in = x + head / heads * x_b + head % heads * x_h;
        P* out = y + head * COPIES * all;
        P pack[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) pack[u] = mine(u) < valid ? in[place(mine(u), size, x_s)] : zeros();
#pragma unroll
        for (int j = 0; j < COPIES; ++j)
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (mine(u) < all) out[(long long)j * all + mine(u)] = pack[u];
    });
}

extern "C" __global__ void repeat_kv_once_bwd(P* dx, const P* dy, const LENGTH* lengths, long long step,
                                              long long batch, long long heads, long long rows, long long size,
                                              long long dy_b, long long dy_h, long long dy_s) {
    each_head(lengths, step, batch, heads, rows, size, [&](long long head, unsigned all, unsigned valid) {
        const P* in = dy + head / heads * dy_b + head % heads * COPIES * dy_h;
        P sum[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            sum[u] = mine(u) < valid ? sum_of(in + place(mine(u), size, dy_s), dy_h) : zeros();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (mine(u) < all) dx[head * all + mine(u)] = sum[u];
    });
}
