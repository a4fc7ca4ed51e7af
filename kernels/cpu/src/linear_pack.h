// From plain weights [out, in] to panels.
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
