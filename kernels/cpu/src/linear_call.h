// What a call of linear is told, for weights of every kind, and how sums become its result.
#pragma once
#include "linear_tile.h"
#include "team.h"

enum LinearKind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT4_K = 4 };

// A packed weight, as Python describes it too (kernels/cpu/linear.py).
struct Linear {
    int32_t kind;
    int64_t in, out;
    const void* weight;
    // float32, filled up with zeros to a multiple of sixteen, or null.
    const float* bias;
};

template <class T>
struct LinearCall {
    const Linear& w;
    const T* x;
    int64_t rows;
    const T* residual;
    T* y;
};

// Writes what a tile has summed: rows first_row …, outputs of panel `panel` and following.
template <class T, int R, int P>
inline void finish(const LinearCall<T>& call, const Sums<T, R, P>& sums, int64_t row, int64_t panel) {
    for (int p = 0; p < P; ++p) {
        const int64_t at = (panel + p) * LANES;
        const int lanes = int(call.w.out - at < LANES ? call.w.out - at : LANES);
        const V bias = call.w.bias ? V::load(call.w.bias + at) : V::zero();
        for (int r = 0; r < R; ++r) {
            const int64_t to = (row + r) * call.w.out + at;
            V sum = sums.v[r][p];
            if (call.w.bias) sum = sum + bias;
            if (lanes == LANES) {
                if (call.residual) sum = sum + V::load(call.residual + to);
                sum.store(call.y + to);
            } else {
                if (call.residual) sum = sum + V::load(call.residual + to, lanes);
                sum.store(call.y + to, lanes);
            }
        }
    }
}
