// The causal product of linear attention in float32 on CUDA cores, a token at a time:
//     S = S + up b_t c_t^T        out_t = down S^T a_t
// with time forward or reversed, so the same kernels make o and the gradients of q, k and v.
// Tensors are contiguous: a, b (B, T, H, D), c, out (B, T, H, N), states (B * H, D, N) with steps of rows and columns.
// Macros: D, N; REVERSE; TOKENS staged in shared memory at once.

struct Place {
    int T, H, pair;  // pair: a sequence and a head

    // The row of step i of this pair, where steps count in the direction of time.
    __device__ long long row(int i) const {
        const int t = REVERSE ? T - 1 - i : i;
        return (pair / H * (long long)T + t) * H + pair % H;
    }
};

// One block a head and a thread for each column of the state, which lies in shared memory. Each thread reads a_t and
// b_t itself, through L1.
extern "C" __global__ void product_shared(float* out, const float* a, const float* b, const float* c,
                                          const float* first, float* last, int T, int H, int row_step,
                                          int column_step, float up, float down) {
    extern __shared__ float state[];  // (D, N)
    const Place place{T, H, (int)blockIdx.x};
    const int m = threadIdx.x;
    const long long home = place.pair * (long long)(D * N) + m * column_step;
    for (int e = 0; e < D; ++e) state[e * N + m] = first ? first[home + e * row_step] : 0;
    for (int i = 0; i < T; ++i) {
        const long long row = place.row(i);
        const float mine = up * c[row * N + m];
        float sum = 0;
        for (int e = 0; e < D; ++e) {
            const float now = fmaf(b[row * D + e], mine, state[e * N + m]);
            state[e * N + m] = now;
            sum = fmaf(a[row * D + e], now, sum);
        }
        out[row * N + m] = down * sum;
    }
    if (last)
        for (int e = 0; e < D; ++e) last[home + e * row_step] = state[e * N + m];
}

// TOKENS rows of D numbers in shared memory, 16 bytes at a time. SPLIT: a row's second half begins 16 bytes later, so
// that both halves of the same element lie in different banks.
template <bool SPLIT>
struct Stage {
    static constexpr int GAP = SPLIT ? 4 : 0, ROW = D + GAP;
    alignas(16) float at[TOKENS * ROW];

    __device__ void fill(const float* from, const Place& place, int i, int end, int threads) {
        for (int p = threadIdx.x; p < TOKENS * (D / 4); p += threads) {
            const int token = p / (D / 4), e = p % (D / 4) * 4;
            float4 pack = {0, 0, 0, 0};
            if (i + token < end) pack = *reinterpret_cast<const float4*>(from + place.row(i + token) * D + e);
            *reinterpret_cast<float4*>(at + token * ROW + e + (e >= D / 2 ? GAP : 0)) = pack;
        }
    }

    __device__ float4 pack(int token, int e) const { return *reinterpret_cast<const float4*>(at + token * ROW + e); }
};

// As before with a thread's column of the state in registers; rows of a and b come into shared memory once for all
// threads, and from there by 16 bytes.
extern "C" __global__ void __launch_bounds__(N)
    product_registers(float* out, const float* a, const float* b, const float* c, const float* first, float* last,
                      int T, int H, int row_step, int column_step, float up, float down) {
    __shared__ Stage<false> rows_a, rows_b;
    const Place place{T, H, (int)blockIdx.x};
    const int m = threadIdx.x;
    const long long home = place.pair * (long long)(D * N) + m * column_step;
    float state[D];
#pragma unroll
    for (int e = 0; e < D; ++e) state[e] = first ? first[home + e * row_step] : 0;
    for (int i = 0; i < T; i += TOKENS) {
        __syncthreads();
        rows_a.fill(a, place, i, T, N);
        rows_b.fill(b, place, i, T, N);
        __syncthreads();
        for (int token = 0; token < TOKENS && i + token < T; ++token) {
            const long long row = place.row(i + token);
            const float mine = up * c[row * N + m];
            float sum = 0;
#pragma unroll
            for (int e = 0; e < D; e += 4) {
                const float4 x = rows_a.pack(token, e), y = rows_b.pack(token, e);
                state[e] = fmaf(y.x, mine, state[e]), sum = fmaf(x.x, state[e], sum);
                state[e + 1] = fmaf(y.y, mine, state[e + 1]), sum = fmaf(x.y, state[e + 1], sum);
                state[e + 2] = fmaf(y.z, mine, state[e + 2]), sum = fmaf(x.z, state[e + 2], sum);
                state[e + 3] = fmaf(y.w, mine, state[e + 3]), sum = fmaf(x.w, state[e + 3], sum);
            }
            out[row * N + m] = down * sum;
        }
    }
    if (last)
#pragma unroll
        for (int e = 0; e < D; ++e) last[home + e * row_step] = state[e];
}

// What two lanes hold of two columns of a state: half of the rows each.
struct Halves {
    float at[D];  // element e of column j at 2 e + j

    __device__ void update(const Stage<true>& rows, int token, int half, float2 mine) {
#pragma unroll
        for (int e = 0; e < D / 2; e += 4) {
            const float4 y = rows.pack(token, half * (D / 2 + 4) + e);
            const float k[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                at[2 * (e + j)] = fmaf(k[j], mine.x, at[2 * (e + j)]);
                at[2 * (e + j) + 1] = fmaf(k[j], mine.y, at[2 * (e + j) + 1]);
            }
        }
    }

    // The sum over all rows of this lane's column: each lane gives the other its half of the other's column.
    __device__ float read(const Stage<true>& rows, int token, int half) const {
        float sums[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < D / 2; e += 4) {
            const float4 x = rows.pack(token, half * (D / 2 + 4) + e);
            const float q[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[0] = fmaf(q[j], at[2 * (e + j)], sums[0]);
                sums[1] = fmaf(q[j], at[2 * (e + j) + 1], sums[1]);
            }
        }
        const float others = __shfl_xor_sync(~0u, half ? sums[0] : sums[1], 1);
        return (half ? sums[1] : sums[0]) + others;
    }
};

// Segments of a sequence side by side, a block for each. First without `out`: a segment's state from zero goes to
// starts (segments, pairs, D, N). Then, with the states before segments in `starts`, their results.
template <bool OUT>
__device__ void walk(float* out, float* starts, const float* a, const float* b, const float* c, int T, int H,
                     int tokens, float up, float down) {
    __shared__ Stage<true> rows_a, rows_b;
    const Place place{T, H, (int)blockIdx.x};
    const int half = threadIdx.x % 2, pairs = gridDim.x, begin = blockIdx.y * tokens, end = min(begin + tokens, T);
    const int column = threadIdx.x / 2 * 2;
    float* const home = starts + ((long long)blockIdx.y * pairs + place.pair) * (D * N) + half * (D / 2) * N + column;
    Halves state;
#pragma unroll
    for (int e = 0; e < D / 2; ++e) {
        float2 old = {0, 0};
        if (OUT) old = *reinterpret_cast<const float2*>(home + e * N);
        state.at[2 * e] = old.x, state.at[2 * e + 1] = old.y;
    }
    for (int i = begin; i < end; i += TOKENS) {
        __syncthreads();
        if (OUT) rows_a.fill(a, place, i, end, N);
        rows_b.fill(b, place, i, end, N);
        __syncthreads();
        for (int token = 0; token < TOKENS && i + token < end; ++token) {
            const long long row = place.row(i + token);
            float2 mine = *reinterpret_cast<const float2*>(c + row * N + column);
            mine.x *= up, mine.y *= up;
            state.update(rows_b, token, half, mine);
            if (OUT) out[row * N + column + half] = down * state.read(rows_a, token, half);
        }
    }
    if (!OUT)
#pragma unroll
        for (int e = 0; e < D / 2; ++e)
            *reinterpret_cast<float2*>(home + e * N) = float2{state.at[2 * e], state.at[2 * e + 1]};
}

extern "C" __global__ void __launch_bounds__(N) segment_states(float* starts, const float* b, const float* c, int T,
                                                               int H, int tokens, float up) {
    walk<false>(nullptr, starts, nullptr, b, c, T, H, tokens, up, 1.0f);
}

// Turns the states that segments make from zero into the states before them, in order; a thread for each element.
extern "C" __global__ void chain_states(float* starts, const float* first, float* last, int pairs, int segments,
                                        int row_step, int column_step) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, all = pairs * (long long)(D * N);
    if (i >= all) return;
    const int e = i % (D * N) / N, m = i % N;
    const long long home = i / (D * N) * (D * N) + e * (long long)row_step + m * (long long)column_step;
    float sum = first ? first[home] : 0;
    for (int segment = 0; segment < segments; ++segment) {
        const float made = starts[segment * all + i];
        starts[segment * all + i] = sum;
        sum += made;
    }
    if (last) last[home] = sum;
}

extern "C" __global__ void __launch_bounds__(N) segment_outputs(float* out, float* starts, const float* a,
                                                                const float* b, const float* c, int T, int H,
                                                                int tokens, float up, float down) {
    walk<true>(out, starts, a, b, c, T, H, tokens, up, down);
}
