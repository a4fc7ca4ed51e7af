// The arithmetic of attention for some rows of one KV head and one split of positions, from lines (attention_lines.h).
//
//   split     256 positions, cut at multiples of 256: scores → largest → weights e^(s - largest), their sum, weighted values
//   row       a query head at a position; rows of a tile share the lines, each sees its own range of positions
//
// A row's result depends on nothing but the row and what it sees: a score is one chain of additions along the head, a weighted value
// one chain along visible positions. Cells that a row does not see are not added as zeros, they are not added (0 · NaN is NaN).
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention_ahead.h"

constexpr int64_t SPLIT = 256;
#if defined(DT_BF16)
constexpr int TILE_ROWS = 14;
#elif defined(DT_AVX512)
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif
#if defined(DT_AVX512)
constexpr int GROUPS_BESIDE = 2;
constexpr int columns_beside(int rows) { return 2 * rows <= TILE_ROWS ? 4 : 2; }
#else
constexpr int GROUPS_BESIDE = 1;
constexpr int columns_beside(int) { return 1; }
#endif

// scores[r][16 · p …] = scale · q[r] · keys, for R rows of q, one behind the other, and P groups of sixteen positions.
template <class T, int R, int P>
void score_tile(const char* lines, int64_t words, const T* q, float scale, float* scores, Asking& asking) {
    using Step = typename StepOf<T>::Step;
    V sums[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sums[r][p] = V::zero();
    const char* x = (const char*)q;
    // A copy stays in registers.
    Asking ask = asking;
    for (int64_t w = 0; w < words; ++w, lines += LINE, x += WORD) {
        typename Step::Line line[P];
        for (int p = 0; p < P; ++p) line[p] = Step::line(lines + p * words * LINE);
        ask.some<P>();
        for (int r = 0; r < R; ++r) {
            const typename Step::Word word = Step::word(x + r * words * WORD);
            for (int p = 0; p < P; ++p) sums[r][p] = Step::add(sums[r][p], line[p], word);
        }
    }
    asking = ask;
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) (sums[r][p] * V::of(scale)).store(scores + r * SPLIT + p * LANES);
}

// Weighted values are added to `sums` [R][columns · 16], over `steps` of positions, for P columns from `column` on.
template <class T>
struct ValueCall {
    const char* lines;
    int64_t columns;
    const T* weights;
    float* sums;
};
template <class T, int R, int P>
void value_tile(const ValueCall<T>& call, int64_t column, Range steps, Asking& asking) {
    using Step = typename StepOf<T>::Step;
    const int64_t width = call.columns * LANES, bytes = call.columns * LINE;
    float* to = call.sums + column * LANES;
    V sums[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sums[r][p] = V::load(to + r * width + p * LANES);
    const char* x = (const char*)call.weights + steps.begin * WORD;
    const char* lines = call.lines + steps.begin * bytes + column * LINE;
    Asking ask = asking;
    for (int64_t j = steps.begin; j < steps.end; ++j, lines += bytes, x += WORD) {
        typename Step::Line line[P];
        for (int p = 0; p < P; ++p) line[p] = Step::line(lines + p * LINE);
        ask.some<P>();
        for (int r = 0; r < R; ++r) {
            const typename Step::Word word = Step::word(x + r * SPLIT * int64_t(sizeof(T)));
            for (int p = 0; p < P; ++p) sums[r][p] = Step::add(sums[r][p], line[p], word);
        }
    }
    asking = ask;
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) sums[r][p].store(to + r * width + p * LANES);
}
template <class T, int R>
void value_rows(const ValueCall<T>& call, Range steps, Asking& asking) {
    constexpr int P = columns_beside(R);
    int64_t column = 0;
    for (; column + P <= call.columns; column += P) value_tile<T, R, P>(call, column, steps, asking);
    for (; column < call.columns; ++column) value_tile<T, R, 1>(call, column, steps, asking);
}

// Calls f with std::integral_constant<int, rows>, 1 … TILE_ROWS.
template <int R = TILE_ROWS, class F>
inline void with_rows(int rows, const F& f) {
    if constexpr (R > 0) {
        if (rows == R) return f(std::integral_constant<int, R>());
        with_rows<R - 1>(rows, f);
    }
}

// A half step: the pair at `step`, of which one row sees only `half` (0 or 1).
inline void value_half(const ValueCall<bf16>& call, int64_t step, int half) {
    for (int64_t column = 0; column < call.columns; ++column) {
        bf16 pairs[2 * LANES];
        std::memcpy(pairs, call.lines + (step * call.columns + column) * LINE, LINE);
        for (int i = 0; i < LANES; ++i) pairs[2 * i + 1 - half] = {0};
        float* to = call.sums + column * LANES;
        const StepBf16::Word word = StepBf16::word((const char*)call.weights + step * WORD);
        StepBf16::add(V::load(to), StepBf16::line((const char*)pairs), word).store(to);
    }
}
inline void value_half(const ValueCall<float>&, int64_t, int) {}

// Weights of the positions `seen` (of the split): written as T, 0 in hidden places of the groups that it touches.
// `scores` become garbage. Returns the largest score and the sum of the weights as they were written.
struct Softmax {
    float largest, sum;
};
template <class T>
inline Softmax softmax(float* scores, Range seen, T* weights) {
    const int64_t begin = seen.begin / LANES * LANES, end = (seen.end + LANES - 1) / LANES * LANES;
    constexpr float HIDDEN = -INFINITY;
    for (int64_t i = begin; i < seen.begin; ++i) scores[i] = HIDDEN;
    for (int64_t i = seen.end; i < end; ++i) scores[i] = HIDDEN;
    V best = V::of(HIDDEN);
    for (int64_t i = begin; i < end; i += LANES) best = V::max(best, V::load(scores + i));
    const float most = largest(best);
    // exp never gives 0; taking off what it gives for minus infinity makes hidden weights 0 and changes no other that counts.
    const V least = exp(V::of(HIDDEN)), middle = V::of(most);
    V total = V::zero();
    for (int64_t i = begin; i < end; i += LANES) {
        (exp(V::load(scores + i) - middle) - least).store(weights + i);
        total = total + V::load(weights + i);
    }
    return {most, sum(total)};
}

// One split's outcome for a row, before it is divided by `sum`; values [columns · 16].
struct Partial {
    float *values, *largest, *sum;
};

// Adds a later split to what earlier ones gave. The order is that of positions, always.
inline void merge(const Partial& into, const Partial& later, int64_t width) {
    const float most = *into.largest > *later.largest ? *into.largest : *later.largest;
    const V old = exp(V::of(*into.largest - most)), now = exp(V::of(*later.largest - most));
    float sums[LANES];
    V::fma(V::of(*later.sum), now, V::of(*into.sum) * old).store(sums);
    *into.largest = most;
    *into.sum = sums[0];
    for (int64_t i = 0; i < width; i += LANES)
        V::fma(V::load(later.values + i), now, V::load(into.values + i) * old).store(into.values + i);
}

// The result of a head, rounded.
template <class T>
inline void finish(const Partial& from, int64_t size, T* out) {
    const V by = V::of(1.0f) / V::of(*from.sum);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) (V::load(from.values + i) * by).store(out + i);
    if (i < size) (V::load(from.values + i) * by).store(out + i, int(size - i));
}

// Adds the values of `strip` that each row sees. `call` holds the lines of position 0 of the split at step 0.
template <class T>
void add_values(const ValueCall<T>& call, const Range* seen, int rows, Range strip, Asking& asking) {
    constexpr int64_t INPUTS = StepOf<T>::INPUTS;
    Range part[TILE_ROWS], whole[TILE_ROWS], common{0, SPLIT};
    for (int r = 0; r < rows; ++r) {
        const int64_t begin = std::max(seen[r].begin, strip.begin), end = std::max(begin, std::min(seen[r].end, strip.end));
        part[r] = {begin, end};
        whole[r].begin = (begin + INPUTS - 1) / INPUTS;
        whole[r].end = std::max(whole[r].begin, end / INPUTS);
        common = {std::max(common.begin, whole[r].begin), std::min(common.end, whole[r].end)};
    }
    const bool shared = common.begin < common.end;
    const auto alone = [&](int r) {
        return ValueCall<T>{call.lines, call.columns, call.weights + r * SPLIT, call.sums + r * call.columns * LANES};
    };
    for (int r = 0; r < rows; ++r) {
        if (part[r].begin < part[r].end && part[r].begin % INPUTS) value_half(alone(r), part[r].begin / INPUTS, 1);
        const Range first{whole[r].begin, shared ? common.begin : whole[r].end};
        if (first.begin < first.end) value_rows<T, 1>(alone(r), first, asking);
    }
    if (shared) with_rows(rows, [&](auto r) { value_rows<T, r()>(call, common, asking); });
    for (int r = 0; r < rows; ++r) {
        if (shared && common.end < whole[r].end) value_rows<T, 1>(alone(r), {common.end, whole[r].end}, asking);
        if (part[r].begin < part[r].end && part[r].end % INPUTS) value_half(alone(r), part[r].end / INPUTS, 0);
    }
}

// Scores of some rows for the positions `groups` (multiples of sixteen) of the split; lines of its position 0 at `lines`.
template <class T>
void add_scores(const char* lines, int64_t words, const T* q, int rows, float scale, Range groups, float* scores,
                Asking& asking) {
    with_rows(rows, [&](auto r) {
        int64_t at = groups.begin;
        for (; at + GROUPS_BESIDE * LANES <= groups.end; at += GROUPS_BESIDE * LANES)
            score_tile<T, r(), GROUPS_BESIDE>(lines + at / LANES * words * LINE, words, q, scale, scores + at, asking);
        for (; at < groups.end; at += LANES) score_tile<T, r(), 1>(lines + at / LANES * words * LINE, words, q, scale, scores + at, asking);
    });
}
