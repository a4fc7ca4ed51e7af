// From plain weights [out, in] to panels and, for an embedding that shares them, back to rows.
#pragma once
#include "linear.h"

// The words of one plain row: a float each, or a pair of bf16, the last one's other half zero if the number of inputs is odd.
template <class T>
inline uint32_t word_at(const T* row, int64_t in, int64_t k) {
    constexpr int64_t N = StepOf<T>::INPUTS;
    uint32_t word = 0;
    std::memcpy(&word, row + k * N, k * N + N <= in ? WORD : sizeof(T));
    return word;
}

// `packed` is panels × lines × 64 bytes, all of which are written.
template <class T>
void pack(Team& team, uint32_t* packed, const T* plain, int64_t out, int64_t in) {
    const int64_t lines = (in + StepOf<T>::INPUTS - 1) / StepOf<T>::INPUTS;
    const Range mine = share(team, (out + LANES - 1) / LANES, 1);
    for (int64_t panel = mine.begin; panel < mine.end; ++panel) {
        uint32_t* line = packed + panel * lines * LANES;
        const int64_t first = panel * LANES;
        for (int64_t k = 0; k < lines; ++k, line += LANES)
            for (int64_t i = 0; i < LANES; ++i) line[i] = first + i < out ? word_at(plain + (first + i) * in, in, k) : 0;
    }
}

// y[n] = row ids[n] of the plain weight, 0 ≤ ids[n] < out.
template <class T>
void packed_rows(Team& team, const Linear& w, const int64_t* ids, int64_t rows, T* y) {
    constexpr int64_t N = StepOf<T>::INPUTS;
    const Range mine = share(team, rows, 1);
    for (int64_t n = mine.begin; n < mine.end; ++n) {
        const char* panel = (const char*)w.weight + ids[n] / LANES * panel_bytes(w) + ids[n] % LANES * WORD;
        T* to = y + n * w.in;
        for (int64_t k = 0; k * N < w.in; ++k) std::memcpy(to + k * N, panel + k * LINE, k * N + N <= w.in ? WORD : sizeof(T));
    }
}
