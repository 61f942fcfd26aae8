// An elementwise kernel of any number of operands: packs of up to 16 bytes, a grid-stride loop, and a tail of single
// elements. All tensors share one dense layout. The functor takes and returns floats; if it has a member `pair`, packs
// of halves go through it two at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float x, float& y) { y = x; }
__device__ inline void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

// Stores a pack to global memory by one instruction. Next to stores of single elements, the compiler may split an
// assigned pack into such (NVRTC 13.0; docs/notes/cumsum.md).
template <typename T, int N>
__device__ inline void store_global(T* to, const Pack<T, N>& pack) {
    if constexpr (sizeof(pack) == 16) {
        const uint4& words = reinterpret_cast<const uint4&>(pack);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                     "r"(words.y), "r"(words.z), "r"(words.w)
                     : "memory");
    } else
        *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <typename T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;

// Whether F has `pair`, for two halves at a time, and all operands are halves.
template <typename F, typename R, typename... A>
concept Paired = (is_half<R> && ... && is_half<A>) && requires(A... x) { F::pair(__halves2half2(x, x)...); };

template <typename F, typename R, typename... A>
__device__ void apply(F f, R& out, const A&... in) {
    from_float(f(to_float(in)...), out);
}

template <int N, typename F, typename R, typename... A>
__device__ void elementwise(F f, long long n, R* out, const A*... in) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long threads = gridDim.x * (long long)blockDim.x;
    for (long long p = first; p < n / N; p += threads) {
        Pack<R, N> y;
        [&](const auto... x) {
            if constexpr (N % 2 == 0 && Paired<F, R, A...>) {
#pragma unroll
                for (int k = 0; k < N; k += 2)
                    reinterpret_cast<__half2&>(y.at[k]) = F::pair(reinterpret_cast<const __half2&>(x.at[k])...);
            } else {
#pragma unroll
                for (int k = 0; k < N; ++k) apply(f, y.at[k], x.at[k]...);
            }
        }(reinterpret_cast<const Pack<A, N>*>(in)[p]...);
        reinterpret_cast<Pack<R, N>*>(out)[p] = y;
    }
    if (N > 1 && first < n % N) apply(f, out[n / N * N + first], in[n / N * N + first]...);
}
