// The innermost work of a quantised linear: R rows of quantised x times P panels of quantised weights, group after group along K.
//
//   group     32 inputs that share a scale, on both sides
//   weights   stored q ≥ 0 stands for          panel of sixteen outputs
//     INT8      (q - 128) · scale                scales ‖ 8 lines a group
//     INT4      (q - 8) · scale                  scales ‖ 4 lines a group
//     INT4_K    q · d · s - dmin · m             8 groups: (d, dmin) ‖ a group: (s, m) ‖ 4 lines a group
//   x         q · scale, q from -127 to 127
//
// Scales and d are halves, s and m bytes, each sixteen side by side; a part begins on a line. A line has, for each output, inputs
// 4 j … 4 j + 3 of its group; a line of INT4 has those in the low halves of its bytes and 4 j + 16 … in the high ones.
// y = Σ over groups, in order, of float(Σ q q) · (scale · scale), fused; the inner sum is exact. So the bits depend on nothing else.
#pragma once
#include "quantised.h"
#include "quantised_step.h"

// Groups that share a d and a dmin.
constexpr int64_t SUPER = 8;

template <int32_t K>
struct Format {
    static constexpr bool WHOLE = K == INT8, SYMMETRIC = K != INT4_K;
    static constexpr int64_t LINES = WHOLE ? 8 : 4, GROUP_BYTES = LINES * LINE;
    // What is subtracted from stored values that stand for symmetric ones.
    static constexpr int32_t ZERO = WHOLE ? 128 : SYMMETRIC ? 8 : 0;
    // Bytes of a group's sixteen scales, of either kind.
    static constexpr int64_t SCALES = 32;
    static int64_t supers_bytes(int64_t groups) { return SYMMETRIC ? 0 : (groups + SUPER - 1) / SUPER * LINE; }
    static int64_t scales_bytes(int64_t groups) { return (groups * SCALES + LINE - 1) / LINE * LINE; }
    static int64_t panel_bytes(int64_t groups) { return supers_bytes(groups) + scales_bytes(groups) + groups * GROUP_BYTES; }
};

// What a panel's group scales by.
struct WScale {
    V scale, minimum;
};

template <int32_t K>
struct PanelOf {
    const char *supers, *scales, *lines;

    PanelOf() = default;
    PanelOf(const char* panel, int64_t groups)
        : supers(panel), scales(panel + Format<K>::supers_bytes(groups)), lines(scales + Format<K>::scales_bytes(groups)) {}

    WScale scale(int64_t group) const {
        const char* at = scales + group * Format<K>::SCALES;
        if constexpr (K == INT4_K) {
            const uint16_t* super = (const uint16_t*)(supers + group / SUPER * LINE);
            const V d = load_half(super), dmin = load_half(super + LANES);
            return {d * load_byte((const uint8_t*)at), V::zero() - dmin * load_byte((const uint8_t*)at + LANES)};
        } else {
            return {load_half((const uint16_t*)at), V::zero()};
        }
    }
};

template <int32_t K, int R, int P>
inline __attribute__((always_inline)) void add_group(V (&sums)[R][P], const PanelOf<K> (&panels)[P], const XGroup* x, int64_t group, const char* ask,
                                                     int64_t ask_stride) {
    using F = Format<K>;
    Ints dots[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) dots[r][p] = Ints::of(F::SYMMETRIC ? x[r].offset : 0);
    for (int j = 0; j < F::LINES; ++j) {
        Raw lines[P];
        for (int p = 0; p < P; ++p) __builtin_prefetch(ask + p * ask_stride + j * LINE, 0, 2);
        for (int p = 0; p < P; ++p) lines[p] = raw(panels[p].lines + group * F::GROUP_BYTES + j * LINE);
        ByteLine first[P];
        for (int p = 0; p < P; ++p) first[p] = byte_line(F::WHOLE ? lines[p] : low(lines[p]));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const ByteWord word = byte_word(x[r].q + j * WORD);
            for (int p = 0; p < P; ++p) dots[r][p] = dot(dots[r][p], first[p], word);
        }
        if constexpr (!F::WHOLE) {
            ByteLine second[P];
            for (int p = 0; p < P; ++p) second[p] = byte_line(high(lines[p]));
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const ByteWord word = byte_word(x[r].q + (F::LINES + j) * WORD);
                for (int p = 0; p < P; ++p) dots[r][p] = dot(dots[r][p], second[p], word);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        const WScale w = panels[p].scale(group);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            sums[r][p] = V::fma(dots[r][p].floats(), w.scale * V::of(x[r].scale), sums[r][p]);
            if constexpr (!F::SYMMETRIC) sums[r][p] = V::fma(w.minimum, V::of(x[r].sum), sums[r][p]);
        }
    }
}

// Lines between a panel's asking and its use, those of panels beside each other together: enough to hide memory.
constexpr int64_t LINES_AHEAD = 256;

// Where a tile's panels are, side by side, and what it asks memory for. A unit's only tile: its own groups, some lines ahead, and at
// the end the first ones of the panels that the thread reads next. Tile t of several: panel t of those. Null: of none.
struct PanelsAt {
    const char *here, *next;
    bool only;
};

// Writes sums [R][P][16].
template <int32_t K, int R, int P>
void quantised_tile(PanelsAt at, const XGroup* x, int64_t groups, float* out) {
    using F = Format<K>;
    const int64_t bytes = F::panel_bytes(groups);
    PanelOf<K> panels[P];
    for (int p = 0; p < P; ++p) panels[p] = PanelOf<K>(at.here + p * bytes, groups);
    const PanelOf<K> next(at.next ? at.next : at.here, groups);
    const int64_t wanted = LINES_AHEAD / (F::LINES * P), own = wanted < groups ? wanted : groups;
    const int64_t distance = at.only ? own : at.next ? groups : 0, stride = at.next && !at.only ? 0 : bytes;
    V sums[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = V::zero();
    for (int64_t group = 0; group < groups; ++group, x += R) {
        const int64_t ahead = group + distance;
        if (ahead < groups) {
            add_group<K, R, P>(sums, panels, x, group, panels[0].lines + ahead * F::GROUP_BYTES, bytes);
        } else {
            __builtin_prefetch(next.scales + (ahead - groups) * F::SCALES, 0, 2);
            add_group<K, R, P>(sums, panels, x, group, next.lines + (ahead - groups) * F::GROUP_BYTES, stride);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p].store(out + (r * P + p) * LANES);
}
