#include <cuda_bf16.h>
#include "hopper.cuh"
constexpr int K = 128, V = 128, THREADS = 32 * WARPS, ROWS = K / WARPS;
struct Shared {
    float4 state[STAGES][K][V / 4];
    float2 qk[2][K];
    float v[2][V];
    float sums[WARPS][V];
    Barrier full[STAGES];
};
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    step(__nv_bfloat16* o, const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, const float* g,
         const float* first, float* last, int pairs, float scale) {
    extern __shared__ __align__(128) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    if (!t) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&s.full[i]);
        barrier_init_done();
    }
    __syncthreads();
    const int step = gridDim.x;
    if (!t)
        for (int i = 0; i < STAGES; ++i) {
            const int pair = blockIdx.x + i * step;
            if (pair < pairs) {
                barrier_expect(&s.full[i], K * V * 4);
                bulk_load(s.state[i], first + (long long)pair * K * V, K * V * 4, &s.full[i]);
            }
        }
    float nq = 0, nk = 0, nv = 0, ng = 0;
    const auto ahead = [&](int pair) {
        if (pair >= pairs) return;
        if (t < K) nq = q[pair * K + t], nk = k[pair * K + t], nv = v[pair * V + t];
        ng = g[pair];
    };
    ahead(blockIdx.x);
    int stage = 0, phase = 0, odd = 0;
    for (int pair = blockIdx.x; pair < pairs; pair += step, odd ^= 1) {
        if (t < K) s.qk[odd][t] = {nq, nk}, s.v[odd][t] = nv;
        const float decay = exp2f(ng * 1.4426950408889634f);
        __syncthreads();
        ahead(pair + step);
        const float4 v4 = reinterpret_cast<const float4*>(s.v[odd])[lane];
        float4 sum = {0, 0, 0, 0};
        barrier_wait(&s.full[stage], phase);
        float4* to = reinterpret_cast<float4*>(last + (long long)pair * K * V) + lane;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = i * WARPS + warp;
            float4 x = s.state[stage][row][lane];
            const float2 two = s.qk[odd][row];
            x.x = fmaf(x.x, decay, two.y * v4.x), x.y = fmaf(x.y, decay, two.y * v4.y);
            x.z = fmaf(x.z, decay, two.y * v4.z), x.w = fmaf(x.w, decay, two.y * v4.w);
            sum.x = fmaf(two.x, x.x, sum.x), sum.y = fmaf(two.x, x.y, sum.y);
            sum.z = fmaf(two.x, x.z, sum.z), sum.w = fmaf(two.x, x.w, sum.w);
#if BULK
            s.state[stage][row][lane] = x;
#else
            to[row * (V / 4)] = x;
#endif
        }
        reinterpret_cast<float4*>(s.sums[warp])[lane] = sum;
#if BULK
        bulk_fence();
#endif
        __syncthreads();
        if (!t) {
#if BULK
            bulk_store(last + (long long)pair * K * V, s.state[stage], K * V * 4);
            bulk_commit();
            // the stage before this one was stored a step ago
            bulk_stored<1>();
            const int again = stage ? stage - 1 : STAGES - 1, next = pair + (STAGES - 1) * step;
            if (pair != blockIdx.x && next < pairs) {
#else
            const int again = stage, next = pair + STAGES * step;
            if (next < pairs) {
#endif
                barrier_expect(&s.full[again], K * V * 4);
                bulk_load(s.state[again], first + (long long)next * K * V, K * V * 4, &s.full[again]);
            }
        }
        if (t < V) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += s.sums[w][t];
            o[pair * V + t] = (__nv_bfloat16)(sum * scale);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}
