// y = x Wᵀ + bias (+ residual) for weights in panels, at any number of rows.
//
//   weight      panels of sixteen outputs, the last one filled up with zeros; see linear_step.h for what a line is
//   unit        what a thread takes at a time (stealing.h): a few panels side by side × a chunk of rows
//   few rows    reading weights is all the time there is: every panel is read once, several at a time, the next unit's asked for ahead
//   many rows   arithmetic is: chunks of rows whose x stays in the cache, over all panels; tiles of MAX_ROWS rows
//
// A row's result has the same bits whatever number of rows, threads or units there is: see linear_tile.h.
// float32 x takes float32 weights, bf16 takes bf16; quantised kinds are in quantised.h.
#pragma once
#include "linear_call.h"
#include "quantised.h"
#include "stealing.h"

// Bytes of one panel.
inline int64_t panel_bytes(const Linear& w) {
    return (w.kind == FLOAT32 ? w.in : (w.in + 1) / 2) * LINE;
}

// Rows of x that are worked on before the next: with 1,000 to 4,000 inputs they stay in the second-level cache.
constexpr int CHUNK_TILES = 16;
// Lines between a panel's asking and its use: enough to hide memory, few enough for the second-level cache.
constexpr int64_t DISTANCE = 128;

template <class T, int R, int P>
void tile(const LinearCall<T>& call, int64_t row, int64_t panel, Ahead next, int64_t distance) {
    const int64_t bytes = panel_bytes(call.w);
    const char* weight = (const char*)call.w.weight + panel * bytes;
    finish<T, R, P>(call, tile_sums<T, R, P>({weight, bytes, call.x + row * call.w.in, call.w.in, next, distance}), row, panel);
}

// The tile of `rows` rows (1 … MAX_ROWS) and one panel, or as many as lie beside each other.
template <class T>
using Tile = void (*)(const LinearCall<T>&, int64_t row, int64_t panel, Ahead, int64_t distance);
template <class T, int R = MAX_ROWS>
Tile<T> tile_of(int rows, bool wide) {
    if constexpr (R > 0) {
        if (rows == R) return wide ? tile<T, R, panels_beside(R)> : tile<T, R, 1>;
        return tile_of<T, R - 1>(rows, wide);
    }
    return nullptr;
}

// How a call is cut: `rows` into chunks, a chunk into tiles of about equal height, panels into groups of `beside`.
// The last groups are single panels: the smaller the last units are, the less one thread waits for another.
struct Cut {
    int64_t rows, panels, chunks;
    int beside;
    int64_t wide, groups;

    Cut(int64_t rows_, int64_t out, int threads) : rows(rows_), panels((out + LANES - 1) / LANES) {
        const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        chunks = (tiles + CHUNK_TILES - 1) / CHUNK_TILES;
        beside = panels_beside(rows < MAX_ROWS ? int(rows) : MAX_ROWS);
        const int64_t single = chunks > 1 ? 0 : 2 * threads * (beside - 1);
        wide = panels > single ? (panels - single) / beside : 0;
        groups = wide + panels - wide * beside;
    }
    int64_t units() const { return groups * chunks; }
    int64_t first_panel(int64_t group) const { return group < wide ? group * beside : panels - (groups - group); }
};

template <class T>
void linear(Team& team, const Linear& w, const T* x, int64_t rows, const T* residual, T* y, void* scratch) {
    const LinearCall<T> call{w, x, rows, residual, y};
    if (w.kind >= INT8) return quantised(team, call, scratch);
    const Cut cut(rows, w.out, team.size);
    const int64_t bytes = panel_bytes(w);
    for (Units mine(team, cut.units()); mine.now < cut.units(); mine.advance()) {
        const int64_t group = mine.now % cut.groups, chunk = mine.now / cut.groups;
        const int64_t begin = rows * chunk / cut.chunks, end = rows * (chunk + 1) / cut.chunks;
        const int64_t tiles = (end - begin + MAX_ROWS - 1) / MAX_ROWS;
        const bool wide = group < cut.wide, more = mine.next < cut.units();
        const char* next = (const char*)w.weight + cut.first_panel(mine.next % cut.groups) * bytes;
        const int beside = wide ? cut.beside : 1;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = begin + (end - begin) * t / tiles;
            const int height = int(begin + (end - begin) * (t + 1) / tiles - row);
            const bool alone = tiles == 1;
            const Ahead ahead{alone ? next : next + t * bytes, bytes, !more ? 0 : alone ? beside : t < beside ? 1 : 0};
            tile_of<T>(height, wide)(call, row, cut.first_panel(group), ahead, alone ? DISTANCE : w.in);
        }
    }
}

// y[n] = row ids[n] of the plain weight, for an embedding that is held once, as the head; 0 ≤ ids[n] < out.
template <class T>
void embed(Team& team, const Linear& w, const int64_t* ids, int64_t rows, T* y) {
    if (w.kind >= INT8) return quantised_embed(team, w, ids, rows, y);
    constexpr int64_t N = StepOf<T>::INPUTS;
    const Range mine = share(team, rows, 1);
    for (int64_t n = mine.begin; n < mine.end; ++n) {
        const char* panel = (const char*)w.weight + ids[n] / LANES * panel_bytes(w) + ids[n] % LANES * WORD;
        T* to = y + n * w.in;
        for (int64_t k = 0; k * N < w.in; ++k) std::memcpy(to + k * N, panel + k * LINE, k * N + N <= w.in ? WORD : sizeof(T));
    }
}

// Bytes of scratch that linear needs for rows of x, shared by the team, aligned to a word: what quantised weights need.
inline int64_t linear_scratch_bytes(int64_t in, int64_t rows) { return quantised_scratch_bytes(in, rows); }
