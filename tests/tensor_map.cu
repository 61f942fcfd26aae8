// Transposes a tensor tile by tile, each read by TMA through a tensor map, for tests of `cuda.tensor_map`.
#include "hopper.cuh"

extern "C" __global__ void transpose(float* y, const __grid_constant__ TensorMap x, int rows, int columns) {
    __shared__ alignas(128) float tile[ROWS][COLUMNS];
    __shared__ Barrier barrier;
    const int row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS;
    if (threadIdx.x == 0) {
        barrier_init(&barrier);
        barrier_init_done();
        barrier_expect(&barrier, sizeof tile);
        tensor_load(tile, x, row, column, &barrier);
    }
    __syncthreads();
    barrier_wait(&barrier, 0);
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
        const int r = i % ROWS, c = i / ROWS;
        if (row + r < rows && column + c < columns) y[(column + c) * rows + row + r] = tile[r][c];
    }
}
