// concat_kv in CUDA C++: an element or pack per thread and a tensor per launch; then both tensors in one launch.
// Macros: UNIT the unsigned type of 1, 2, 4 or 16 bytes that a thread copies, the unit of sizes and strides; INDEX the
// type of positions; UNROLL units per thread; NUMBER an unsigned type that counts the units to copy.

// Which of a sequence's `rows` new rows fall within the cache's `room` rows: row s goes to at + s.
struct Landing {
    long long at, from, to;

    __device__ Landing(const INDEX* position, long long rows, long long room) : at(*position), from(0), to(0) {
        if (at <= -rows || at >= room) return;  // any value is possible: returning first avoids an overflow below
        from = at < 0 ? -at : 0;
        to = at + rows > room ? room - at : rows;
    }
};

// Any strides, of sequences, rows, heads and elements.
extern "C" __global__ void concat_kv_one(UNIT* cache, const UNIT* x, const INDEX* positions, long long step,
                                         long long count, long long rows, long long heads, long long size,
                                         long long room, long long cache_b, long long cache_s, long long cache_h,
                                         long long cache_d, long long x_b, long long x_s, long long x_h,
                                         long long x_d) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (first >= count) return;
    NUMBER i = first;
    const NUMBER d = i % (NUMBER)size;
    i /= (NUMBER)size;
    const NUMBER h = i % (NUMBER)heads;
    i /= (NUMBER)heads;
    const long long s = i % (NUMBER)rows, b = i / (NUMBER)rows;
    const Landing landing(positions + b * step, rows, room);
    if (s < landing.from || s >= landing.to) return;
    cache[b * cache_b + (landing.at + s) * cache_s + h * cache_h + d * cache_d] =
        x[b * x_b + s * x_s + h * x_h + d * x_d];
}

// Rows of `width` packs. A sequence's new rows are contiguous, and so is their place in the cache.
// Block (x, y, z): part x of sequence y, of keys (z = 0) or values (z = 1).
extern "C" __global__ void concat_kv_both(UNIT* cache_k, UNIT* cache_v, const UNIT* k, const UNIT* v,
                                          const INDEX* positions, long long step, long long batch, long long rows,
                                          long long width, long long room, long long cache_k_b, long long cache_v_b,
                                          long long k_b, long long v_b) {
    for (long long b = blockIdx.y; b < batch; b += gridDim.y) {
        const Landing landing(positions + b * step, rows, room);
        const UNIT* in = (blockIdx.z ? v + b * v_b : k + b * k_b) + landing.from * width;
        UNIT* out =
            (blockIdx.z ? cache_v + b * cache_v_b : cache_k + b * cache_k_b) + (landing.at + landing.from) * width;
        const long long count = (landing.to - landing.from) * width, piece = (long long)blockDim.x * UNROLL;
        for (long long start = blockIdx.x * piece + threadIdx.x; start < count; start += gridDim.x * piece) {
            UNIT pack[UNROLL];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j)
                if (start + j * blockDim.x < count) pack[j] = in[start + j * blockDim.x];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j)
                if (start + j * blockDim.x < count) out[start + j * blockDim.x] = pack[j];
        }
    }
}
