// The small ops between the projections: norms, rotation, the gate of the MLP. All arithmetic is float32, rounded once at the end.
//
// Everything is row by row (or head by head), so a row's bits depend on that row alone.
#pragma once
#include <type_traits>

#include "team.h"
#include "vec.h"

// Calls lane(i, n) for n lanes from i on: whole vectors, then what is left. With n = 16 known, the compiler drops the masks.
template <class Body>
inline void for_lanes(int64_t count, const Body& lanes) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) lanes(i, std::integral_constant<int, 16>());
    if (i < count) lanes(i, int(count - i));
}
template <class T>
inline V load_lanes(const T* p, std::integral_constant<int, 16>) {
    return V::load(p);
}
template <class T>
inline V load_lanes(const T* p, int n) {
    return V::load(p, n);
}
template <class T>
inline void store_lanes(V x, T* p, std::integral_constant<int, 16>) {
    x.store(p);
}
template <class T>
inline void store_lanes(V x, T* p, int n) {
    x.store(p, n);
}

// Four sums side by side, because one would wait for its last addition; element i goes to sum i / 16 % 4.
template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
    V sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = 0;
    for (; i + 64 <= width; i += 64)
        for (int j = 0; j < 4; ++j) {
            const V part = V::load(x + i + 16 * j);
            sums[j] = V::fma(part, part, sums[j]);
        }
    for (int j = 0; i < width; ++j, i += 16) {
        const V part = width - i < 16 ? V::load(x + i, int(width - i)) : V::load(x + i);
        sums[j] = V::fma(part, part, sums[j]);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = x / √(mean of x² + eps) · weight; out may be x.
template <class T>
inline void rms_norm_row(const T* x, int64_t width, const T* weight, float eps, T* out) {
    const V scale = V::of(1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps));
    for_lanes(width, [&](int64_t i, auto n) {
        store_lanes(load_lanes(x + i, n) * scale * load_lanes(weight + i, n), out + i, n);
    });
}

// x [rows, width] → out [rows, width].
template <class T>
void rms_norm(Team& team, const T* x, int64_t rows, int64_t width, const T* weight, float eps, T* out) {
    const Range mine = share(team, rows, 1);
    for (int64_t r = mine.begin; r < mine.end; ++r) rms_norm_row(x + r * width, width, weight, eps, out + r * width);
}

// One head of `size`, rotate-half convention: cos and sin [size], sin's first half negated. out may be x.
template <class T>
inline void rotary_head(const T* x, int64_t size, const T* cos, const T* sin, T* out) {
    const int64_t half = size / 2;
    for_lanes(half, [&](int64_t i, auto n) {
        const V first = load_lanes(x + i, n), second = load_lanes(x + half + i, n);
        const V low = V::fma(first, load_lanes(cos + i, n), second * load_lanes(sin + i, n));
        const V high = V::fma(second, load_lanes(cos + half + i, n), first * load_lanes(sin + half + i, n));
        store_lanes(low, out + i, n);
        store_lanes(high, out + half + i, n);
    });
}

// gate_up [rows, 2 · width], gate first → silu(gate) · up [rows, width].
template <class T>
void silu_mul(Team& team, const T* gate_up, int64_t rows, int64_t width, T* out) {
    // Cut along the width, too: a single row keeps all threads busy.
    constexpr int64_t PIECE = 256;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    const Range mine = share(team, rows * pieces, 1);
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
        const int64_t row = unit / pieces, from = unit % pieces * PIECE;
        const T* gate = gate_up + row * 2 * width + from;
        T* to = out + row * width + from;
        for_lanes(width - from < PIECE ? width - from : PIECE, [&](int64_t i, auto n) {
            const V g = load_lanes(gate + i, n);
            store_lanes(g / (V::of(1.0f) + exp(V::zero() - g)) * load_lanes(gate + width + i, n), to + i, n);
        });
    }
}
