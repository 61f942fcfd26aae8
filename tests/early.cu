// A kernel that takes its time, and one that may start before it ends, for tests of programmatic dependent launch.
// Macros: PDL; WAITS 0 for a second kernel that does not wait, as none may be.
#include "early.cuh"

// Lets the next one come, and writes a good half of a millisecond later.
extern "C" __global__ void early_first(int* made, int value) {
    let_next_come();
    for (const long long start = clock64(); clock64() - start < 1000000;) {}
    made[threadIdx.x] = value;
}

extern "C" __global__ void early_second(int* sum, const int* made, const int* given) {
    const int own = given[threadIdx.x];
    if (WAITS) wait_for_before();
    sum[threadIdx.x] = own + *(volatile const int*)(made + threadIdx.x);
}
