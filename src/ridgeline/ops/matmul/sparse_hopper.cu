// sparse_matmul on Hopper by wgmma.sp: y = x W^T + bias in half precision, sums in float32.
//
// The sparse operand is the left one, so a block computes tiles of W x^T: 128 rows of W by BM rows of x. One warp loads
// steps of 64 along K through a ring of STAGES: values, half of K wide, the eight bytes of each row that tell their
// columns, and x. Two warpgroups multiply 64 rows of W each. A sparse product takes 32 of K in the time of 16, so tiles
// must arrive twice as fast: a cluster is DOWN x ACROSS blocks with neighbouring tiles. Blocks that share rows of x
// each load a part and multicast it; so do those that share rows of W. A slot of the ring is free once every block that
// shares it has read it. Sums turn on their way to shared memory (stmatrix.trans), and TMA stores rows of y.
// With INT8, x and values are bytes: twice as many columns lie in the same tiles, and sums are int32, scaled by a
// number for each row of x and of W.
// Macros: BFLOAT16, of the result; INT8; BIAS; BM, STAGES, BOARDS, GROUP, DOWN, ACROSS; LAG, by how many steps the
// second group starts later, so that the two do not end a tile together.
#include "elementwise.cuh"
#include "sparse.cuh"

#if BFLOAT16
using T = __nv_bfloat16;
#else
using T = __half;
#endif
#if INT8
using Sum = int;
#define SUM_REGISTER "+r"
#else
using Sum = float;
#define SUM_REGISTER "+f"
#endif
constexpr int BN = 128, BK = 64, BOARD = 64 * 128;  // BK: halves, or twice as many bytes. BOARD: 64 x 64 of y
constexpr int BLOCKS = 1 + INT8;                    // of metadata a step
constexpr int W_BYTES = BN * BK, X_BYTES = BM * BK * 2;
static_assert(LAG < STAGES, "the second group waits for a step that the first leaves in the ring");

struct Shared {
    alignas(1024) char x[STAGES][X_BYTES];
    alignas(1024) char w[STAGES][W_BYTES];
    alignas(1024) char boards[2][BOARDS][BOARD];
    alignas(128) unsigned long long kept[STAGES][BLOCKS][BN];
    Barrier full[STAGES], empty[STAGES];
};

// Loads a box to the same place in every block whose bit is set in `to_blocks`; the barrier there counts its bytes.
__device__ inline void share(void* to, const TensorMap& map, int row, int column, Barrier* barrier, short to_blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(to_blocks)
        : "memory");
}

__device__ inline unsigned both(float low, float high) {
    Pack<T, 2> pack;
    from_float(low, pack.at[0]), from_float(high, pack.at[1]);
    return reinterpret_cast<const unsigned&>(pack);
}

// The first row of W and of x of this block's tile in the cluster's tile t, in bands GROUP clusters high.
struct Corner {
    int n, m;
    Corner() = default;
    __device__ Corner(int t, int down, int across) {
        const int rank = blockIdx.x % (DOWN * ACROSS), in = t % (GROUP * across);
        const int first = t / (GROUP * across) * GROUP, high = min(down - first, GROUP);
        n = ((first + in % high) * DOWN + rank % DOWN) * BN;
        m = (in / high * ACROSS + rank / DOWN) * BM;
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    sparse_wgmma(void*, const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap x,
                 const __grid_constant__ TensorMap values, const unsigned long long* metadata, const T* bias,
                 const float* scale_x, const float* scale_w, int M, int N, int down, int across, int blocks) {
    extern __shared__ char memory[];
    Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<unsigned long long>(memory) + 1023) & ~1023ull);
    const int rank = blockIdx.x % (DOWN * ACROSS), cluster = blockIdx.x / (DOWN * ACROSS),
              clusters = gridDim.x / (DOWN * ACROSS);
    const int tiles = down * across, steps = (blocks + BLOCKS - 1) / BLOCKS;
    const int group = threadIdx.x / 128, row_of_it = rank % DOWN, column_of_it = rank / DOWN;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i]);
            barrier_init(&s.empty[i], 2 * (DOWN + ACROSS - 1));  // both groups of each block that it loads for
        }
        barrier_init_done();
    }
    __syncthreads();
    cluster_sync<DOWN * ACROSS>();
    int slot = 0;
    unsigned odd = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 32) {
            tensor_map_ahead(x), tensor_map_ahead(values), tensor_map_ahead(y);
            short same_n = 0;
            for (int i = 0; i < ACROSS; i++) same_n |= 1 << (row_of_it + DOWN * i);
            const short same_m = ((1 << DOWN) - 1) << (DOWN * column_of_it);
            for (int t = cluster; t < tiles; t += clusters) {
                const Corner at(t, down, across);
                const unsigned kept_bytes = max(0, min(BN, N - at.n)) * 8;
                for (int step = 0; step < steps; step++) {
                    barrier_wait(&s.empty[slot], odd ^ 1);
                    Barrier* full = &s.full[slot];
                    const int many = min(BLOCKS, blocks - step * BLOCKS);
                    barrier_expect(full, W_BYTES + X_BYTES + many * kept_bytes);
                    const int w_part = column_of_it * (BN / ACROSS), x_part = row_of_it * (BM / DOWN);
                    share(s.x[slot] + x_part * 128, x, at.m + x_part, step * BK * BLOCKS, full, same_m);
                    share(s.w[slot] + w_part * 64, values, at.n + w_part, step * (BK / 2) * BLOCKS, full, same_n);
                    for (int b = 0; kept_bytes && b < many; b++)
                        bulk_load(s.kept[slot][b], metadata + (long long)(step * BLOCKS + b) * N + at.n, kept_bytes,
                                  full);
                    if (++slot == STAGES) slot = 0, odd ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int me = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        char(&boards)[BOARDS][BOARD] = s.boards[me];
        if (LAG && me) barrier_wait(&s.full[min(LAG, steps - 1)], 0);
        // One thread for each block that loads for this one: those in its row or column of the cluster.
        const bool tells = thread < DOWN * ACROSS && (thread % DOWN == row_of_it || thread / DOWN == column_of_it);
        for (int t = cluster; t < tiles; t += clusters) {
            const Corner at(t, down, across);
            Sum sums[BM / 2];
            for (int step = 0; step < steps; step++) {
                barrier_wait(&s.full[slot], odd);
                const unsigned long long left = wgmma_tile_64(s.w[slot] + me * (W_BYTES / 2)),
                                         right = wgmma_tile(s.x[slot], 16);
                // The second product is 32 and 64 bytes further along the rows.
#if INT8
                const unsigned kept = kept_columns_of_bytes(s.kept[slot][0] + me * 64 + warp * 16),
                               later = kept_columns_of_bytes(s.kept[slot][1] + me * 64 + warp * 16);
                wgmma_begin();
                wgmma_sparse<BM>(sums, left, right, kept, step);
                wgmma_sparse<BM>(sums, left + 2, right + 4, later, 1);
#else
                const unsigned kept = kept_columns(s.kept[slot][0] + me * 64 + warp * 16);
                wgmma_begin();
                wgmma_sparse<BM, BFLOAT16, 0>(sums, left, right, kept, step);
                wgmma_sparse<BM, BFLOAT16, 1>(sums, left + 2, right + 4, kept, 1);
#endif
                wgmma_group();
                // For all, since the next step overwrites the register of `kept`; the other group multiplies meanwhile.
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                if (tells) barrier_arrive_at(&s.empty[slot], thread);
                if (++slot == STAGES) slot = 0, odd ^= 1;
            }
            // No sum is read before the wait.
#pragma unroll
            for (int i = 0; i < BM / 2; i++) asm volatile("" : SUM_REGISTER(sums[i])::"memory");
            const int n = at.n + me * 64 + warp * 16 + lane / 4;
            float add[2], scale[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                add[i] = BIAS && n + 8 * i < N ? to_float(bias[n + 8 * i]) : 0;
                scale[i] = INT8 && n + 8 * i < N ? scale_w[n + 8 * i] : 1;
            }
            // Sums i and i + 1: neighbouring rows of y, in its column n, or 8 further for the second two of each four.
            const auto turned = [&](int i) {
                float low = sums[i], high = sums[i + 1];
                if (INT8) {
                    const int m = at.m + i / 4 * 8 + lane % 4 * 2;
                    low = low * scale_x[min(m, M - 1)] * scale[i / 2 % 2];
                    high = high * scale_x[min(m + 1, M - 1)] * scale[i / 2 % 2];
                }
                return both(low + add[i / 2 % 2], high + add[i / 2 % 2]);
            };
#pragma unroll
            for (int chunk = 0; chunk < BM / 64; chunk++) {
                char* board = boards[chunk % BOARDS];
                if (thread == 0) bulk_stored<BOARDS - 1>();
                asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
                for (int j = 0; j < 8; j += 2) {  // 16 rows of y: four matrices of 8 x 8, turned
                    const int i = 32 * chunk + 4 * j;
                    const int m = 8 * j + lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                     shared_address(board) + m * 128 + (piece ^ (m & 7)) * 16),
                                 "r"(turned(i)), "r"(turned(i + 2)), "r"(turned(i + 4)), "r"(turned(i + 6))
                                 : "memory");
                }
                bulk_fence();
                asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
                if (thread == 0) {
                    tensor_store(board, y, 0, at.m + 64 * chunk, at.n + 64 * me);
                    bulk_commit();
                }
            }
        }
        if (thread == 0) bulk_stored<0>();
    }
    if (DOWN * ACROSS > 1) cluster_sync<DOWN * ACROSS>();  // other blocks may still write and arrive here
}
