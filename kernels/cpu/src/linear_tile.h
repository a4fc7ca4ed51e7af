// The innermost work of linear: R rows of x times P panels of weights, sums in registers, K from first to last.
//
//   panel       sixteen outputs: lines for k = 0, 1, …, one behind the other
//   tile        R × P × 16 sums; each is one chain of additions along K, so R and P do not show in the result
//
// While a tile streams its panels, it asks for the memory of what follows (`Ahead`).
#pragma once
#include "linear_step.h"

#if defined(DT_BF16)
constexpr int MAX_ROWS = 14;
#elif defined(DT_AVX512)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 4;
#endif

// Panels side by side at R rows: few rows need several lines under way, many rows need the registers. Calls of more than
// MAX_ROWS rows are cut into tiles of at least half of it, so all their tiles are equally wide.
constexpr int panels_beside(int rows) {
#if defined(DT_AVX512)
    return 2 * rows < MAX_ROWS ? 4 : 2;
#else
    return 2 * rows < MAX_ROWS ? 2 : 1;
#endif
}

// Memory to ask for while a tile runs, `streams` (0, 1 or P) places that lie `stride` bytes apart.
struct Ahead {
    const char* first;
    int64_t stride;
    int streams;
};

// What a tile works on: its panels, its first row of x (rows lie one behind the other), and what comes after it.
template <class T>
struct TileOf {
    const char* weight;
    int64_t panel_bytes;
    const T* x;
    int64_t in;
    Ahead next;
    // Up to so many lines before its end a tile asks for its own lines, so many ahead; then for the first lines of `next`.
    int64_t distance;
};

template <class T, int R, int P>
struct Sums {
    V v[R][P];
};

// Steps begin … end, and at step k a word with the memory system about line k of `ahead` and of ASK - 1 places behind it.
template <class T, int R, int P, int ASK>
inline __attribute__((always_inline)) void run(Sums<T, R, P>& sums, const TileOf<T>& tile, Range steps, const char* ahead, int64_t stride) {
    using Step = typename StepOf<T>::Step;
    const int64_t row_bytes = tile.in * sizeof(T);
    const char* w = tile.weight + steps.begin * LINE;
    const char* x = (const char*)tile.x + steps.begin * WORD;
    const char* ask = ahead + steps.begin * LINE;
    for (int64_t k = steps.begin; k < steps.end; ++k, w += LINE, x += WORD, ask += LINE) {
        typename Step::Line line[P];
        for (int p = 0; p < P; ++p) line[p] = Step::line(w + p * tile.panel_bytes);
        for (int p = 0; p < ASK; ++p) __builtin_prefetch(ask + p * stride, 0, 2);
        for (int r = 0; r < R; ++r) {
            const typename Step::Word word = Step::word(x + r * row_bytes);
            for (int p = 0; p < P; ++p) sums.v[r][p] = Step::add(sums.v[r][p], line[p], word);
        }
    }
}

// An odd last input: its pair's other half counts as zero.
template <int R, int P>
inline void last_of_odd(Sums<bf16, R, P>& sums, const TileOf<bf16>& tile) {
    for (int r = 0; r < R; ++r) {
        const bf16 pair[2] = {tile.x[(r + 1) * tile.in - 1], {0}};
        const typename StepBf16::Word word = StepBf16::word((const char*)pair);
        for (int p = 0; p < P; ++p) {
            const char* line = tile.weight + p * tile.panel_bytes + tile.in / 2 * LINE;
            sums.v[r][p] = StepBf16::add(sums.v[r][p], StepBf16::line(line), word);
        }
    }
}
template <int R, int P>
inline void last_of_odd(Sums<float, R, P>&, const TileOf<float>&) {}

template <class T, int R, int P>
inline Sums<T, R, P> tile_sums(const TileOf<T>& tile) {
    Sums<T, R, P> sums;
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sums.v[r][p] = V::zero();
    const int64_t whole = tile.in / StepOf<T>::INPUTS;
    const int64_t turn = tile.distance < whole ? whole - tile.distance : 0;
    run<T, R, P, P>(sums, tile, {0, turn}, tile.weight + tile.distance * LINE, tile.panel_bytes);
    const char* next = tile.next.first - turn * LINE;
    if (tile.next.streams == P)
        run<T, R, P, P>(sums, tile, {turn, whole}, next, tile.next.stride);
    else if (tile.next.streams == 1)
        run<T, R, P, 1>(sums, tile, {turn, whole}, next, 0);
    else
        run<T, R, P, 0>(sums, tile, {turn, whole}, next, 0);
    if (tile.in % StepOf<T>::INPUTS) last_of_odd<R, P>(sums, tile);
    return sums;
}
