// What single rows read, tile by tile, and the list by which it is asked for a few tiles before its turn.
//
//   tile      STRIP positions of one KV head; of a unit first all tiles of keys, then all of values, then the next unit's keys
#pragma once
#include "attention_units.h"

// The tiles of one unit, in the order in which they are read.
template <class T>
struct UnitTiles {
    Cells<T> cells;
    Single at;
    // Sixteens of positions that it touches.
    Range groups;

    UnitTiles(const Cells<T>& cells, const Single& at)
        : cells(cells), at(at), groups{at.seen.begin / LANES * LANES, (at.seen.end + LANES - 1) / LANES * LANES} {}

    int64_t heads() const { return at.heads.end - at.heads.begin; }
    int64_t of_keys() const { return (groups.end - groups.begin + STRIP - 1) / STRIP * heads(); }
    int64_t count() const { return 2 * of_keys(); }

    // Writes where a tile's lines lie, padded to a multiple of four; returns the end.
    const char** list(int64_t tile, const char** to) const {
        const AttentionStep& step = cells.step;
        const char** const first = to;
        const int64_t offset = tile < of_keys() ? 0 : step.to_values(), strip = tile % of_keys() / heads();
        const int64_t head = at.heads.begin + tile % heads(), bytes = step.head_size * sizeof(T), from = groups.begin + strip * STRIP;
        const Range seen{std::max(from, at.seen.begin), std::min(from + STRIP, at.seen.end)};
        for (int64_t position = seen.begin, run; position < seen.end; position += run) {
            run = cells.run(position, seen.end);
            const char* row = (const char*)(cells.at(position) + offset + head * step.head_size);
            for (int64_t i = 0; i < run; ++i, row += step.cell() * sizeof(T))
                for (int64_t at = 0; at < bytes; at += LINE) *to++ = row + at;
        }
        for (; (to - first) % 4; ++to) *to = to[-1];
        return to;
    }
};

// One thread's way through its units.
template <class T>
class Stream {
   public:
    explicit Stream(const char** memory) : memory_(memory) {}

    // `then` may be null. Both must stay until the last tile.
    void begin(const UnitTiles<T>* now, const UnitTiles<T>* then) {
        const bool asked = expected_;
        now_ = now;
        then_ = then;
        expected_ = then;
        for (int64_t tile = 0; !asked && tile < FAR_TILES; ++tile) list(tile).rest();
    }
    // What to ask for while `tile` is worked on.
    Asking at(int64_t tile) { return list(tile + FAR_TILES); }

   private:
    const char** memory_;
    const UnitTiles<T>*now_ = nullptr, *then_ = nullptr;
    bool expected_ = false;

    Asking list(int64_t tile) {
        const UnitTiles<T>* of = now_;
        if (tile >= of->count()) {
            tile -= of->count();
            of = then_;
        }
        return {memory_, of && tile < of->count() ? of->list(tile, memory_) : memory_};
    }
};
