// Rectangles of matrices, loaded from global into shared memory by the threads of a block.
// Macros: EVEN, whether rectangles lie within their matrices; ALIGNED, whether rows begin at multiples of 16 bytes.
#pragma once
#include "elementwise.cuh"

// A matrix with contiguous rows.
template <typename T>
struct Matrix {
    const T* at;
    long long stride;
    int rows, columns;

    // The part of the matrix from (row, column) on.
    __device__ Matrix from(int row, int column) const {
        return {at + row * stride + column, stride, rows - row, columns - column};
    }
};

// A result, contiguous.
template <typename T>
struct Result {
    T* at;
    int rows, columns;

    // Stores those of P adjacent elements of a row that lie inside.
    template <int P>
    __device__ void put(int row, int column, const Pack<T, P>& values) const {
        if (!EVEN && row >= rows) return;
        T* to = at + (long long)row * columns + column;
        if (EVEN || (columns % P == 0 && column + P <= columns))
            *reinterpret_cast<Pack<T, P>*>(to) = values;
        else
#pragma unroll
            for (int j = 0; j < P; ++j)
                if (column + j < columns) to[j] = values.at[j];
    }
};

// The tile of TALL x WIDE that a block takes: bands of MANY tiles down before the next column of them, so that
// concurrent blocks share their reads in L2.
struct Place {
    int row, column;
};

template <int TALL, int WIDE, int MANY>
__device__ Place place_of(int tile, int rows, int columns) {
    const int down = (rows + TALL - 1) / TALL, across = (columns + WIDE - 1) / WIDE;
    const int first = tile / (MANY * across) * MANY, size = min(MANY, down - first), rest = tile - first * across;
    return {(first + rest % size) * TALL, rest / size * WIDE};
}

// P adjacent elements of a row of a matrix; elements outside are 0.
template <int P, typename T>
__device__ Pack<T, P> fetch(const Matrix<T>& m, int row, int column) {
    const T* at = m.at + row * m.stride + column;
    Pack<T, P> pack;
    if (ALIGNED && (EVEN || (row < m.rows && column + P <= m.columns)))
        pack = *reinterpret_cast<const Pack<T, P>*>(at);
    else
#pragma unroll
        for (int j = 0; j < P; ++j) pack.at[j] = EVEN || (row < m.rows && column + j < m.columns) ? at[j] : T(0.0f);
    return pack;
}

// Rows of shared memory, PITCH elements from one to the next.
template <int PITCH>
struct Rows {
    static __device__ int at(int row, int column) { return row * PITCH + column; }
};

// Loads TALL x WIDE of a matrix from (row, column) on, in the layout L, in packs of P.
template <typename L, int TALL, int WIDE, int P, int THREADS, typename T>
__device__ void load(T* to, const Matrix<T>& m, int row, int column) {
#pragma unroll 4
    for (int i = threadIdx.x * P; i < TALL * WIDE; i += THREADS * P)
        *reinterpret_cast<Pack<T, P>*>(to + L::at(i / WIDE, i % WIDE)) = fetch<P>(m, row + i / WIDE, column + i % WIDE);
}
