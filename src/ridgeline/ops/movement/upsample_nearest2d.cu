// upsample_nearest2d in CUDA C++: any scale one element at a time, and a factor of two in both directions by packs.
// Macros: DTYPE the element type; INDEX an integer that counts y's elements; LAST 1 if channels are the innermost
// dimension; ITEMS packs that a thread reads before it writes.
#include "elementwise.cuh"

#ifndef LAST
#define LAST 0
#endif
#ifndef ITEMS
#define ITEMS 1
#endif

// The source of pixel `out`, in float32 as in PyTorch's own kernels; step is 1 / scale.
__device__ inline int source(int out, float step, int size) {
    return min((int)floorf(__fmul_rn((float)out, step)), size - 1);
}

// The first pixel of `outs` whose source is pixel `in` or a later one. It starts from a guess, because `source` rounds.
__device__ inline int first_copy(int in, float step, int size, int outs) {
    int out = min(outs, (int)ceilf((float)in / step));
    while (out > 0 && source(out - 1, step, size) >= in) --out;
    while (out < outs && source(out, step, size) < in) ++out;
    return out;
}

// One element per thread: of y here, of dx below. Images are (n, h, w, inner), where inner is the channels or 1.
extern "C" __global__ void upsample_fwd(DTYPE* y, const DTYPE* x, long long count, int h, int w, int out_h, int out_w,
                                        int channels, float step_h, float step_w) {
    const INDEX i = blockIdx.x * (INDEX)blockDim.x + threadIdx.x, inner = LAST ? channels : 1;
    if (i >= (INDEX)count) return;
    const INDEX pixel = i / inner, line = pixel / out_w, image = line / out_h;
    const int row = source((int)(line - image * out_h), step_h, h),
              column = source((int)(pixel - line * out_w), step_w, w);
    y[i] = x[((image * h + row) * w + column) * inner + (i - pixel * inner)];
}

extern "C" __global__ void upsample_bwd(DTYPE* dx, const DTYPE* dy, long long count, int h, int w, int out_h, int out_w,
                                        int channels, float step_h, float step_w) {
    const INDEX i = blockIdx.x * (INDEX)blockDim.x + threadIdx.x, inner = LAST ? channels : 1;
    if (i >= (INDEX)count) return;
    const INDEX pixel = i / inner, line = pixel / w, image = line / h;
    const int row = (int)(line - image * h), column = (int)(pixel - line * w);
    const int bottom = row + 1 < h ? first_copy(row + 1, step_h, h, out_h) : out_h;
    const int left = first_copy(column, step_w, w, out_w),
              right = column + 1 < w ? first_copy(column + 1, step_w, w, out_w) : out_w;
    float sum = 0;
    for (int r = first_copy(row, step_h, h, out_h); r < bottom; ++r)
        for (int c = left; c < right; ++c)
            sum += to_float(dy[((image * out_h + r) * out_w + c) * inner + (i - pixel * inner)]);
    from_float(sum, dx[i]);
}

// --- a factor of two in both directions: x's row r becomes y's rows 2 r and 2 r + 1

// If channels are not last, a unit of x is 8 bytes, which become 16 in each of two rows of y. If they are, it is 16
// bytes of one pixel's channels, which become those of four pixels.
constexpr int WIDE = 16 / sizeof(DTYPE), NARROW = LAST ? WIDE : WIDE / 2, COPIES = LAST ? 4 : 2;
using In = Pack<DTYPE, NARROW>;
using Out = Pack<DTYPE, WIDE>;

// Unit i of x, and which units of y it becomes: `across` units make a row of x, `channels` a pixel.
struct Unit {
    INDEX at[COPIES];

    __device__ Unit(INDEX i, INDEX across, INDEX channels) {
        const INDEX row = i / across, rest = i - row * across;
        if constexpr (LAST) {
            const INDEX column = rest / channels;
            at[0] = 4 * row * across + (column * channels + rest);  // `column` doubles, the rest stays
            at[1] = at[0] + channels;
            at[2] = at[0] + 2 * across;
            at[3] = at[1] + 2 * across;
        } else {
            at[0] = 2 * row * across + rest;
            at[1] = at[0] + across;
        }
    }
};

extern "C" __global__ void __launch_bounds__(256)
    upsample2_fwd(Out* __restrict__ y, const In* __restrict__ x, long long count, int across, int channels) {
    const INDEX first = blockIdx.x * (INDEX)(256 * ITEMS) + threadIdx.x, units = count;
    In in[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k)
        if (first + k * 256 < units) in[k] = x[first + k * 256];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (first + k * 256 >= units) return;
        const Unit unit(first + k * 256, across, channels);
        Out out;
#pragma unroll
        for (int e = 0; e < WIDE; ++e) out.at[e] = in[k].at[e * NARROW / WIDE];
#pragma unroll
        for (int c = 0; c < COPIES; ++c) y[unit.at[c]] = out;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    upsample2_bwd(In* __restrict__ dx, const Out* __restrict__ dy, long long count, int across, int channels) {
    const INDEX first = blockIdx.x * (INDEX)(256 * ITEMS) + threadIdx.x, units = count;
    Out in[ITEMS][COPIES];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (first + k * 256 >= units) break;
        const Unit unit(first + k * 256, across, channels);
#pragma unroll
        for (int c = 0; c < COPIES; ++c) in[k][c] = dy[unit.at[c]];
    }
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (first + k * 256 >= units) return;
        In out;
#pragma unroll
        for (int e = 0; e < NARROW; ++e) {
            float sum = 0;
#pragma unroll
            for (int c = 0; c < COPIES; ++c)
#pragma unroll
                for (int n = 0; n < WIDE / NARROW; ++n) sum += to_float(in[k][c].at[e * WIDE / NARROW + n]);
            from_float(sum, out.at[e]);
        }
        dx[first + k * 256] = out;
    }
}
