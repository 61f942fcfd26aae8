// matmul on Hopper by thread-block clusters that share loads: y = a b in half precision, sums in float32.
//
// A block computes tiles of 128 x BN: one warp loads steps of 64 along K through a ring of STAGES, and two warpgroups
// multiply 64 rows each. A cluster is DOWN x ACROSS blocks with neighbouring tiles. The blocks of a column need the
// same columns of b: each loads its share and multicasts it to all. The blocks of a row do the same with a. A slot of
// the ring is free once every block that shares it has read it. If each block has one short tile, as at 1024 x 1024 x
// 1024, a cluster of one is fastest: no block waits for another.
// Macros: BFLOAT16; A_BY_K and B_BY_K, whether rows of a and columns of b are contiguous along K; BN, STAGES, GROUP,
// DOWN, ACROSS; LAG, by how many steps the second group starts later, so that the two do not end a tile together.
#include "mma.cuh"

constexpr int BM = 128, BK = 64, CHUNK = 64 * 128;  // CHUNK: 64 rows of 128 bytes
static_assert(LAG < STAGES, "the second group waits for a step that the first leaves in the ring");
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, BOARDS = BN > 64 ? 2 : 1;

struct Shared {
    alignas(1024) char a[STAGES][A_BYTES];
    alignas(1024) char b[STAGES][B_BYTES];
    alignas(1024) char boards[2][BOARDS][CHUNK];
    Barrier full[STAGES], empty[STAGES];
};

// Loads a box to the same place in every block whose bit is set in `to_blocks`; the barrier there counts its bytes.
__device__ inline void load(void* to, const TensorMap& map, int column, int row, int batch, Barrier* barrier,
                            short to_blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(barrier)), "h"(to_blocks)
        : "memory");
}

// Loads one of SHARES of a tile of LINES lines by 64 of K: LINES / SHARES lines if they run along K, else a part of K
// for all lines, 64 lines at a time.
template <int LINES, int SHARES, bool BY_K>
__device__ inline void load_share(char* tile, const TensorMap& map, int line, int k, int batch, Barrier* barrier,
                                  int share, short to_blocks) {
    if constexpr (BY_K)
        load(tile + share * (LINES / SHARES) * 128, map, k, line + share * (LINES / SHARES), batch, barrier, to_blocks);
    else
        for (int i = 0; i < LINES / 64; i++)
            load(tile + i * CHUNK + share * (BK / SHARES) * 128, map, line + 64 * i, k + share * (BK / SHARES), batch,
                 barrier, to_blocks);
}

__device__ inline unsigned pack(float low, float high) {
    unsigned both;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// Position of this block's tile in the cluster's tile t, in bands GROUP clusters high, so that a wave is nearly square.
struct Place {
    int row, column, batch;
    Place() = default;
    __device__ Place(int t, int down, int across) {
        batch = t / (down * across);
        t %= down * across;
        const int rank = blockIdx.x % (DOWN * ACROSS), in = t % (GROUP * across);
        const int first = t / (GROUP * across) * GROUP, high = min(down - first, GROUP);
        row = ((first + in % high) * DOWN + rank % DOWN) * BM;
        column = (in / high * ACROSS + rank / DOWN) * BN;
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    matmul_cluster(void*, const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap a,
                   const __grid_constant__ TensorMap b, int down, int across, int batches, int steps, int a_step,
                   int b_step) {
    extern __shared__ char memory[];
    Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<unsigned long long>(memory) + 1023) & ~1023ull);
    const int rank = blockIdx.x % (DOWN * ACROSS), cluster = blockIdx.x / (DOWN * ACROSS),
              clusters = gridDim.x / (DOWN * ACROSS);
    const int tiles = down * across * batches, group = threadIdx.x / 128, row_of_it = rank % DOWN,
              column_of_it = rank / DOWN;
    const bool fetches = threadIdx.x == 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i]);
            barrier_init(&s.empty[i], 2 * (DOWN + ACROSS - 1));  // both groups of each block that it loads for
        }
        barrier_init_done();
    }
    Place at;
    if (fetches) {  // while barriers are initialised
        tensor_map_ahead(a), tensor_map_ahead(b), tensor_map_ahead(y);
        at = Place(cluster, down, across);
        asm volatile("" : "+r"(at.row), "+r"(at.column), "+r"(at.batch));
    }
    __syncthreads();
    cluster_sync<DOWN * ACROSS>();
    int slot = 0;
    unsigned odd = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (fetches) {
            short a_row = 0;
            for (int i = 0; i < ACROSS; i++) a_row |= 1 << (row_of_it + DOWN * i);
            const short b_column = ((1 << DOWN) - 1) << (DOWN * column_of_it);
            for (int t = cluster; t < tiles; at = Place(t += clusters, down, across)) {
                for (int step = 0; step < steps; step++) {
                    const int k = step * BK;
                    barrier_wait(&s.empty[slot], odd ^ 1);
                    Barrier* full = &s.full[slot];
                    barrier_expect(full, A_BYTES + B_BYTES);
                    load_share<BM, ACROSS, A_BY_K>(s.a[slot], a, at.row, k, at.batch * a_step, full, column_of_it,
                                                   a_row);
                    load_share<BN, DOWN, B_BY_K>(s.b[slot], b, at.column, k, at.batch * b_step, full, row_of_it,
                                                 b_column);
                    if (++slot == STAGES) slot = 0, odd ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int me = group - 1, thread = threadIdx.x % 128, lane = thread % 32;
        const int in_chunk = (thread / 32) * 16 + lane % 16;  // the row whose address this lane gives to stmatrix
        char(&boards)[BOARDS][CHUNK] = s.boards[me];
        if (LAG && me) barrier_wait(&s.full[min(LAG, steps - 1)], 0);
        // One thread for each block that loads for this one: those in its row or column of the cluster.
        const bool tells = thread < DOWN * ACROSS && (thread % DOWN == row_of_it || thread / DOWN == column_of_it);
        for (int t = cluster; t < tiles; t += clusters) {
            float sums[BN / 2];
            int before = 0;
            for (int step = 0; step < steps; step++) {
                barrier_wait(&s.full[slot], odd);
                const unsigned long long left = wgmma_tile(s.a[slot] + me * CHUNK, CHUNK),
                                         right = wgmma_tile(s.b[slot], CHUNK);
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < 4; k++)  // 16 of K: 32 bytes of a row, or 16 rows
                    wgmma<BN, BFLOAT16, A_BY_K, B_BY_K>(sums, left + k * (A_BY_K ? 2 : 128),
                                                        right + k * (B_BY_K ? 2 : 128), step > 0 || k > 0);
                wgmma_group();
                if (step == 0) at = Place(t, down, across);  // while the products run
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step && tells) barrier_arrive_at(&s.empty[before], thread);
                before = slot;
                if (++slot == STAGES) slot = 0, odd ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");  // no read before the wait
            if (tells) barrier_arrive_at(&s.empty[before], thread);
#pragma unroll
            for (int chunk = 0; chunk < BN / 64; chunk++) {
                char* board = boards[chunk % BOARDS];
                if (thread == 0) bulk_stored<BOARDS - 1>();
                asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
                for (int j = 0; j < 8; j += 2) {  // 16 columns: four matrices of 8 x 8
                    const float* x = sums + 32 * chunk + 4 * j;
                    const unsigned place =
                        shared_address(board) + in_chunk * 128 + (((j + lane / 16) ^ (in_chunk & 7)) * 16);
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place),
                                 "r"(pack(x[0], x[1])), "r"(pack(x[2], x[3])), "r"(pack(x[4], x[5])),
                                 "r"(pack(x[6], x[7]))
                                 : "memory");
                }
                bulk_fence();
                asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
                if (thread == 0) {
                    tensor_store(board, y, at.batch, at.row + 64 * me, at.column + 64 * chunk);
                    bulk_commit();
                }
            }
        }
        if (thread == 0) bulk_stored<0>();
    }
    if (DOWN * ACROSS > 1) cluster_sync<DOWN * ACROSS>();  // other blocks may still write and arrive here
}
