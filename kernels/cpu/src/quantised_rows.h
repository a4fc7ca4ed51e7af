// y = x Wᵀ + bias (+ residual) for weights of one byte or half a byte, and for x quantised here, once per call.
//
//   1  every row of x, by groups of 32 inputs, becomes bytes and a scale (amax / 127), in the order in which tiles read them
//   2  units as in linear.h: a few panels × a chunk of rows, a chunk's x staying in the second-level cache
//
// What a weight is, and why a row has the same bits in all company, is in quantised_tile.h.
#pragma once
#include <limits>

#include "quantised_tile.h"
#include "stealing.h"

// Rows of a call's only tile at most, rows of a tile of several, and the panels beside each other that both have: as many as fit
// into registers, integer sums too. Several tiles have at least half of their most, so all are equally wide.
#if defined(DT_AVX512)
constexpr int ONE_TILE = 8, OF_SEVERAL = 7, MOST_BESIDE = 4;
constexpr int quantised_beside(int rows) { return rows < 3 ? MOST_BESIDE : rows <= OF_SEVERAL ? 2 : 1; }
#else
constexpr int ONE_TILE = 2, OF_SEVERAL = 2, MOST_BESIDE = 1;
constexpr int quantised_beside(int) { return MOST_BESIDE; }
#endif
// Of a chunk's x.
constexpr int64_t CHUNK_BYTES = 512 << 10;

// n inputs, 1 … 32, become a group filled up with zeros. Where one is not finite the scale is NaN, and so is all that it touches;
// where all are below 2^-100 they count as zero.
template <class T, int32_t K>
inline void quantise(const T* x, int n, XGroup& out) {
    const V a = n >= LANES ? V::load(x) : V::load(x, n);
    const V b = n == GROUP ? V::load(x + LANES) : n > LANES ? V::load(x + LANES, n - LANES) : V::zero();
    // Magnitudes in the order of their bits: infinity is above all numbers, NaN above that.
    const int32_t bits = Ints::max(Ints::magnitude(a), Ints::magnitude(b)).largest();
    const bool finite = bits < 0x7f800000;
    float most;
    std::memcpy(&most, &bits, WORD);
    out.scale = finite ? most / 127.0f : std::numeric_limits<float>::quiet_NaN();
    const V inverse = V::of(finite && most > 0x1p-100f ? 127.0f / most : 0.0f);
    const Ints first = Ints::rounded(finite ? a * inverse : V::zero()), second = Ints::rounded(finite ? b * inverse : V::zero());
    first.store(out.q);
    second.store(out.q + LANES);
    const int32_t total = (first + second).sum();
    if constexpr (Format<K>::SYMMETRIC)
        out.offset = -Format<K>::ZERO * total;
    else
        out.sum = float(total) * out.scale;
}

// How a call's rows are cut: chunks of about equal height, of tiles of about equal height.
struct RowsCut {
    int64_t rows, chunks;
    int most, beside;

    RowsCut(int64_t rows_, int64_t in) : rows(rows_), most(rows <= ONE_TILE ? ONE_TILE : OF_SEVERAL) {
        const int64_t fit = CHUNK_BYTES / (groups_of(in) * int64_t(sizeof(XGroup))), at_once = fit > 4 * most ? fit : 4 * most;
        chunks = (rows + at_once - 1) / at_once;
        beside = quantised_beside(rows <= ONE_TILE ? int(rows) : most);
    }
    Range chunk(int64_t i) const { return {rows * i / chunks, rows * (i + 1) / chunks}; }
    int64_t tiles(Range chunk) const { return (chunk.end - chunk.begin + most - 1) / most; }
    Range tile(Range chunk, int64_t i) const {
        const int64_t height = chunk.end - chunk.begin, n = tiles(chunk);
        return {chunk.begin + height * i / n, chunk.begin + height * (i + 1) / n};
    }
};

// Every tile's groups, one tile behind the other.
template <class T, int32_t K>
void quantise_rows(Team& team, const T* x, int64_t in, const RowsCut& cut, XGroup* out) {
    const int64_t groups = groups_of(in);
    const Range mine = share(team, cut.rows * groups, 1);
    if (mine.begin == mine.end) return;
    for (int64_t c = 0; c < cut.chunks; ++c) {
        const Range chunk = cut.chunk(c);
        if (chunk.end * groups <= mine.begin || chunk.begin * groups >= mine.end) continue;
        for (int64_t t = 0; t < cut.tiles(chunk); ++t) {
            const Range tile = cut.tile(chunk, t);
            const int64_t height = tile.end - tile.begin, first = tile.begin * groups;
            const int64_t begin = mine.begin > first ? mine.begin : first, end = tile.end * groups;
            for (int64_t i = begin; i < end && i < mine.end; ++i) {
                const int64_t group = (i - first) / height, row = tile.begin + (i - first) % height, k = group * GROUP;
                quantise<T, K>(x + row * in + k, int(in - k < GROUP ? in - k : GROUP), out[i]);
            }
        }
    }
}

using QuantisedTile = void (*)(PanelsAt, const XGroup*, int64_t groups, float* sums);
template <int32_t K, int R = ONE_TILE>
QuantisedTile quantised_tile_of(int rows, bool wide) {
    if constexpr (R > 0) {
        if (rows == R) return wide ? quantised_tile<K, R, quantised_beside(R)> : quantised_tile<K, R, 1>;
        return quantised_tile_of<K, R - 1>(rows, wide);
    }
    return nullptr;
}

// Writes a tile's sums [rows][beside][16], bias and residual added, where they belong.
template <class T>
inline void finish(const LinearCall<T>& call, const float* sums, Range rows, int64_t panel, int beside) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
        for (int p = 0; p < beside; ++p, sums += LANES) finish<T, 1, 1>(call, {{{V::load(sums)}}}, row, panel + p);
}

template <class T, int32_t K>
void quantised_linear(Team& team, const LinearCall<T>& call, XGroup* scratch) {
    const Linear& w = call.w;
    const RowsCut cut(call.rows, w.in);
    quantise_rows<T, K>(team, call.x, w.in, cut, scratch);
    team.barrier();
    const int64_t panels = (w.out + LANES - 1) / LANES, groups = groups_of(w.in), bytes = Format<K>::panel_bytes(groups);
    const int beside = cut.beside;
    const int64_t wide = panels / beside, units = wide + panels % beside;
    const auto first_panel = [&](int64_t unit) { return unit < wide ? unit * beside : panels - (units - unit); };
    alignas(LINE) float sums[ONE_TILE * MOST_BESIDE * LANES];
    for (Units mine(team, units * cut.chunks); mine.now < units * cut.chunks; mine.advance()) {
        const int64_t unit = mine.now % units, panel = first_panel(unit);
        const bool more = mine.next < units * cut.chunks && mine.next % units < wide;
        const char *here = (const char*)w.weight + panel * bytes, *next = (const char*)w.weight + first_panel(mine.next % units) * bytes;
        const Range chunk = cut.chunk(mine.now / units);
        const int64_t tiles = cut.tiles(chunk);
        for (int64_t t = 0; t < tiles; ++t) {
            const Range rows = cut.tile(chunk, t);
            const bool asks = more && t < beside;
            const PanelsAt at{here, asks ? next + t * bytes : nullptr, tiles == 1};
            quantised_tile_of<K>(int(rows.end - rows.begin), unit < wide)(at, scratch + rows.begin * groups, groups, sums);
            finish(call, sums, rows, panel, unit < wide ? beside : 1);
        }
    }
}

template <class T, int32_t K>
void quantised_embed(Team& team, const Linear& w, const int64_t* ids, int64_t rows, T* y) {
    using F = Format<K>;
    const int64_t groups = groups_of(w.in);
    const Range mine = share(team, rows * groups, 1);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t id = ids[i / groups], group = i % groups, lane = id % LANES;
        const PanelOf<K> panel((const char*)w.weight + id / LANES * F::panel_bytes(groups), groups);
        float scale[LANES], minimum[LANES];
        const WScale both = panel.scale(group);
        both.scale.store(scale);
        both.minimum.store(minimum);
        T* to = y + i / groups * w.in + group * GROUP;
        for (int64_t k = 0; k < GROUP && group * GROUP + k < w.in; ++k) {
            // Half bytes: the later sixteen inputs lie above the earlier ones.
            const int64_t at = F::WHOLE ? k : k % LANES;
            const uint8_t byte = panel.lines[group * F::GROUP_BYTES + at / WORD * LINE + lane * WORD + at % WORD];
            const int stored = F::WHOLE ? byte : k < LANES ? byte & 15 : byte >> 4;
            to[k] = from_float<T>(float(stored - F::ZERO) * scale[lane] + minimum[lane]);
        }
    }
}

template <class T>
void quantised_embed(Team& team, const Linear& w, const int64_t* ids, int64_t rows, T* y) {
    switch (w.kind) {
        case INT8: return quantised_embed<T, INT8>(team, w, ids, rows, y);
        case INT4: return quantised_embed<T, INT4>(team, w, ids, rows, y);
        default: return quantised_embed<T, INT4_K>(team, w, ids, rows, y);
    }
}

template <class T>
void quantised(Team& team, const LinearCall<T>& call, void* scratch) {
    switch (call.w.kind) {
        case INT8: return quantised_linear<T, INT8>(team, call, (XGroup*)scratch);
        case INT4: return quantised_linear<T, INT4>(team, call, (XGroup*)scratch);
        default: return quantised_linear<T, INT4_K>(team, call, (XGroup*)scratch);
    }
}
