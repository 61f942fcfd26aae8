// Hopper and later: bulk copies into shared memory that signal a barrier, and thread-block clusters.
#pragma once

using Barrier = unsigned long long;

__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A barrier with so many arrivals per phase, besides the announced bytes. One thread calls this, then all synchronise.
__device__ inline void barrier_init(Barrier* barrier, unsigned arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the same barrier in the cluster's block `rank`.
__device__ inline void barrier_arrive_at(Barrier* barrier, unsigned rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// Orders this thread's earlier writes to shared memory before later accesses by bulk copies and TMA.
__device__ inline void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes initialised barriers visible to bulk copies and TMA.
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    bulk_fence();
}

// Arrives, and makes the phase wait for that many bytes.
__device__ inline void barrier_expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline void barrier_wait(Barrier* barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
}

// A bulk copy from global to shared memory. Addresses and sizes are multiples of 16 bytes.
__device__ inline void bulk_load(void* to, const void* from, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// The device side of a `cuda.TensorMap`; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    char opaque[128];
};

// Prefetches the map itself; otherwise its first use waits for it.
__device__ inline void tensor_map_ahead(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads a box of a 2-dimensional tensor, its first element at (row, column), by TMA. Elements outside the tensor are 0.
__device__ inline void tensor_load(void* to, const TensorMap& map, int row, int column, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// The same for a 3-dimensional tensor.
__device__ inline void tensor_load(void* to, const TensorMap& map, int batch, int row, int column, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(barrier))
        : "memory");
}

// Stores shared memory to a box of a 3-dimensional tensor; elements outside the tensor are not written. A thread's
// stores up to its `bulk_commit` form one group. Writes of other threads to shared memory need their `bulk_fence` and a
// barrier before.
__device__ inline void tensor_store(const void* from, const TensorMap& map, int batch, int row, int column) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(batch), "r"(shared_address(from))
                 : "memory");
}

// A bulk copy from shared to global memory. Addresses and sizes are multiples of 16 bytes.
__device__ inline void bulk_store(void* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but this thread's last LEFT groups of stores have read their shared memory, which is then free.
template <int LEFT>
__device__ inline void bulk_stored() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Synchronises all threads of a cluster of SIZE blocks, and shows them each other's initialised barriers. Relaxed: a
// releasing arrival would be a fence over all of a thread's global writes, and every warp of every block would wait for
// it.
template <int SIZE>
__device__ inline void cluster_sync() {
    if constexpr (SIZE == 1)
        __syncthreads();
    else {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

// Writes one or two floats to the same place in the shared memory of the cluster's block `rank`, whose barrier counts
// the bytes. Unlike `cluster_sync`, this waits for no earlier store to global memory.
template <int FLOATS>
__device__ inline void cluster_send(float* place, const float (&value)[FLOATS], Barrier* barrier, unsigned rank) {
    unsigned there, signal;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(shared_address(barrier)), "r"(rank));
    if constexpr (FLOATS == 2)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(there),
                     "f"(value[0]), "f"(value[1]), "r"(signal)
                     : "memory");
    else
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there),
                     "f"(value[0]), "r"(signal)
                     : "memory");
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
