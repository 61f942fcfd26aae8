// A few rows of x times a weight of 4-bit or 8-bit codes, on the CUDA cores.
// A code's bits below the exponent of 2^23 are a float32 number, and one subtraction takes off 2^23 and the zero:
//     word & (15 << p) | 0x4b000000 = 2^23 + 2^p q        2^p (q - z) = that - (2^23 + 2^p z)
// x is multiplied by 2^-p instead.
// Macros: XTYPE and STYPE, types of x and of scales; BITS of a code; MANY rows of x; GROUP, columns with one scale;
// ROWS of the weight for a warp; AHEAD, words of each that a lane loads before it uses any.
#include "elementwise.cuh"

constexpr int EACH = 32 / BITS, HALF = 16 / BITS;  // codes of a word, and of half of one
using P = Pack<XTYPE, EACH>;

// 2^p (q - zero) for every code of a word. base: 2^23 + 2^p zero.
__device__ inline void decode(unsigned word, const float (&base)[HALF], float (&code)[EACH]) {
    if (BITS == 8) word ^= 0x80808080u;  // signed codes as unsigned ones, 128 more
    const unsigned half = word >> 16, mask = (1u << BITS) - 1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned bits = ((i < HALF ? word : half) & (mask << (BITS * (i % HALF)))) | 0x4b000000u;
        code[i] = __uint_as_float(bits) - base[i % HALF];
    }
}

extern "C" __global__ void __launch_bounds__(128)
    few_rows(XTYPE* y, const unsigned* q, const STYPE* scale, const unsigned char* zero, const XTYPE* bias,
             const XTYPE* x, int N, int K) {
    const int lane = threadIdx.x % 32, words = K / EACH, groups = K / GROUP;
    const long long first = (blockIdx.x * 4ll + threadIdx.x / 32) * ROWS;
    float total[ROWS][MANY] = {};
    for (int start = lane; start < words; start += 32 * AHEAD) {
        unsigned word[AHEAD][ROWS];
        float by[AHEAD][ROWS], z[AHEAD][ROWS];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int at = min(start + 32 * u, words - 1);  // what is read twice counts once, below
                const long long row = min(first + r, N - 1ll), group = row * groups + at * EACH / GROUP;
                word[u][r] = q[row * words + at];
                by[u][r] = BITS == 8 ? 1 : to_float(scale[group]);
                z[u][r] = BITS == 8 ? 128 : zero ? zero[group] : 8;
            }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int at = start + 32 * u;
            if (at >= words) break;
            float code[ROWS][EACH];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float base[HALF];
#pragma unroll
                for (int i = 0; i < HALF; ++i) base[i] = 8388608.0f + z[u][r] * (1 << (BITS * i));
                decode(word[u][r], base, code[r]);
            }
#pragma unroll
            for (int m = 0; m < MANY; ++m) {
                const P own = reinterpret_cast<const P*>(x + (long long)m * K)[at];
                float value[EACH], part[ROWS] = {};
#pragma unroll
                for (int i = 0; i < EACH; ++i) value[i] = to_float(own.at[i]) * (1.0f / (1 << (BITS * (i % HALF))));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int i = 0; i < EACH; ++i) part[r] = fmaf(code[r][i], value[i], part[r]);
                    total[r][m] = fmaf(part[r], by[u][r], total[r][m]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int m = 0; m < MANY; ++m) {
            float sum = total[r][m];
#pragma unroll
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            const long long row = first + r;
            if (lane == 0 && row < N) {
                if (BITS == 8) sum *= to_float(scale[row]);
                if (bias) sum += to_float(bias[row]);
                from_float(sum, y[(long long)m * N + row]);
            }
        }
}
