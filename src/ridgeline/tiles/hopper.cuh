// Thread-block clusters, on Hopper and later: blocks that run together and write into each other's shared memory.
#pragma once

// All threads of the cluster meet between `arrive` and `wait`; what they wrote before is visible after.
__device__ inline void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes a float to the same place in the shared memory of the cluster's block `rank`.
__device__ inline void cluster_store(float* place, float value, unsigned rank) {
    unsigned there, here = (unsigned)__cvta_generic_to_shared(place);
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}
