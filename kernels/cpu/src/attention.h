// Attention straight from the blocks, for any mix of decoding rows and chunks of prompts.
//
//   one row        units of (split, some KV heads): several threads share a long context; then partials are merged, row by row
//   several rows   units of (positions, KV head): lines of a split are made once for all rows; partials are merged as they come
//
// Both cut positions at the same places, compute a split alike (attention_tile.h) and merge in the order of positions. So a row has the
// same bits whatever chunk it comes in, whatever shares its step, however many threads there are.
#pragma once
#include <optional>

#include "attention_stream.h"
#include "attention_write.h"

template <class T>
class Attending {
   public:
    Attending(Team& team, const AttentionStep& step, int64_t layer, const Queries<T>& in, void* scratch)
        : team(team), step(step), layer(layer), in(in), plan(team, step, layer, sizeof(T), scratch), own(plan.own(team.rank)),
          words(words_of<T>(step.head_size)), columns(columns_of(step.head_size)), width(columns * LANES) {}

    void all() {
        for (Units mine(team, plan.units); mine.now < plan.units; mine.advance()) {
            const Work& work = plan.work_of(mine.now);
            const int64_t unit = mine.now - work.first_unit;
            if (work.segment->num_rows > 1) {
                chunk(*work.segment, unit);
                continue;
            }
            const Work* next = mine.next < plan.units ? &plan.work_of(mine.next) : nullptr;
            split(work, unit, next, next ? mine.next - next->first_unit : 0);
        }
        if (!plan.partials) return;
        team.barrier();
        const Range mine = share(team, plan.singles * step.heads, 1);
        for (int64_t i = mine.begin; i < mine.end; ++i) merge_splits(plan.single(i / step.heads), i % step.heads);
    }

   private:
    Team& team;
    const AttentionStep& step;
    const int64_t layer;
    const Queries<T>& in;
    const Plan plan;
    const OwnScratch own;
    const int64_t words, columns, width;
    Stream<T> stream{own.asked};

    T* weights() const { return (T*)own.weights; }

    // One split of a single row, for some KV heads: all keys, then all values, tile by tile.
    void split(const Work& work, int64_t unit, const Work* next, int64_t next_unit) {
        const Single at = plan.single_unit(work, unit);
        const int64_t group = step.group(), base = at.split * SPLIT, heads = at.heads.end - at.heads.begin, rows = heads * group;
        const Range seen{at.seen.begin - base, at.seen.end - base};
        const T* q = in.rows + work.segment->first_row * in.stride + at.heads.begin * group * step.head_size;
        const UnitTiles<T> now(Cells<T>(step, *work.segment, layer), at);
        std::optional<UnitTiles<T>> then;
        if (next && next->segment->num_rows == 1) then.emplace(Cells<T>(step, *next->segment, layer), plan.single_unit(*next, next_unit));
        stream.begin(&now, then ? &*then : nullptr);
        int64_t tile = 0;
        for (int64_t from = now.groups.begin; from < now.groups.end; from += STRIP)
            for (int64_t h = 0; h < heads; ++h, ++tile) {
                const int64_t count = std::min(STRIP, now.groups.end - from);
                Asking asking = stream.at(tile);
                HeadCells<T>(now.cells, at.seen, (at.heads.begin + h) * step.head_size).keys(from, count, own.keys);
                for (int64_t r = h * group; r < (h + 1) * group; r += TILE_ROWS)
                    add_scores(own.keys, words, q + r * step.head_size, int(std::min<int64_t>(TILE_ROWS, (h + 1) * group - r)), step.scale,
                               {0, count}, own.scores + r * SPLIT + from - base, asking);
                asking.rest();
            }
        const Partial to = plan.partial(work, at.split, at.heads.begin * group);
        for (int64_t r = 0; r < rows; ++r) {
            const Partial row = plan.partial(work, at.split, at.heads.begin * group + r);
            const Softmax found = softmax(own.scores + r * SPLIT, seen, weights() + r * SPLIT);
            *row.largest = found.largest;
            *row.sum = found.sum;
        }
        std::fill(to.values, to.values + rows * width, 0.0f);
        for (int64_t from = now.groups.begin; from < now.groups.end; from += STRIP)
            for (int64_t h = 0; h < heads; ++h, ++tile) {
                const int64_t count = std::min(STRIP, now.groups.end - from);
                Asking asking = stream.at(tile);
                HeadCells<T>(now.cells, at.seen, (at.heads.begin + h) * step.head_size + step.to_values()).values(from, count, own.values);
                for (int64_t r = h * group; r < (h + 1) * group; r += TILE_ROWS)
                    one_strip(int(std::min<int64_t>(TILE_ROWS, (h + 1) * group - r)), seen, {from - base, from - base + count},
                              weights() + r * SPLIT, to.values + r * width, asking);
                asking.rest();
            }
    }

    void one_strip(int rows, Range seen, Range strip, const T* weights, float* sums, Asking& asking) {
        Range all[TILE_ROWS];
        std::fill(all, all + rows, seen);
        const char* lines = own.values - strip.begin / StepOf<T>::INPUTS * columns * LINE;
        add_values(ValueCall<T>{lines, columns, weights, sums}, all, rows, strip, asking);
    }

    static Range clip(Range range, int64_t from, int64_t count) {
        return {std::max(range.begin, from), std::min(range.end, from + count)};
    }

    void merge_splits(const Work& work, int64_t head) {
        const Range splits = plan.splits(*work.segment);
        const Partial whole = plan.partial(work, splits.begin, head);
        for (int64_t s = splits.begin + 1; s < splits.end; ++s) merge(whole, plan.partial(work, s, head), width);
        finish(whole, step.head_size, in.out + (work.segment->first_row * step.heads + head) * step.head_size);
    }

    // Some positions of a chunk, for one KV head: query heads of a position are rows one behind the other.
    void chunk(const Segment& segment, int64_t unit) {
        const int64_t group = step.group(), head = unit % step.kv_heads, size = step.head_size;
        const Range at = plan.chunk_positions(segment, unit / step.kv_heads);
        const int64_t rows = (at.end - at.begin) * group, row = segment.first_row + at.begin - segment.num_computed;
        T* q = (T*)own.queries;
        for (int64_t i = 0; i < at.end - at.begin; ++i)
            std::memcpy(q + i * group * size, in.rows + (row + i) * in.stride + head * group * size, group * size * sizeof(T));
        const Cells<T> cells(step, segment, layer);
        const int64_t first = step.first_visible(layer, at.begin);
        for (int64_t base = first / SPLIT * SPLIT; base < at.end; base += SPLIT) {
            const Range exist{std::max(first, base), std::min(at.end, base + SPLIT)};
            const int64_t from = (exist.begin - base) / LANES * LANES, count = (exist.end - base - from + LANES - 1) / LANES * LANES;
            HeadCells<T>(cells, exist, head * size).keys(base + from, count, own.keys + from / LANES * words * LINE);
            HeadCells<T>(cells, exist, head * size + step.to_values())
                .values(base + from, count, own.values + from / StepOf<T>::INPUTS * columns * LINE);
            for (int64_t r = 0; r < rows; r += TILE_ROWS) chunk_tile(at.begin, base, r, int(std::min<int64_t>(TILE_ROWS, rows - r)));
        }
        for (int64_t r = 0; r < rows; ++r)
            finish(state(r), size, in.out + ((row + r / group) * step.heads + head * group + r % group) * size);
    }

    Partial state(int64_t row) const { return {own.state + row * (width + 2), own.state + row * (width + 2) + width, own.state + row * (width + 2) + width + 1}; }

    // Rows `row` … of the unit against the split that begins at position `base`.
    void chunk_tile(int64_t first_position, int64_t base, int64_t row, int rows) {
        Range seen[TILE_ROWS], groups{SPLIT, 0};
        for (int r = 0; r < rows; ++r) {
            const int64_t position = first_position + (row + r) / step.group();
            seen[r] = clip({step.first_visible(layer, position) - base, position + 1 - base}, 0, SPLIT);
            if (seen[r].begin >= seen[r].end) continue;
            groups.begin = std::min(groups.begin, seen[r].begin / LANES * LANES);
            groups.end = std::max(groups.end, (seen[r].end + LANES - 1) / LANES * LANES);
        }
        if (groups.begin >= groups.end) return;
        Asking none{nullptr, nullptr};
        add_scores(own.keys, words, (const T*)own.queries + row * step.head_size, rows, step.scale, groups, own.scores, none);
        Softmax found[TILE_ROWS];
        for (int r = 0; r < rows; ++r)
            if (seen[r].begin < seen[r].end) found[r] = softmax(own.scores + r * SPLIT, seen[r], weights() + r * SPLIT);
        std::fill(own.sums, own.sums + rows * width, 0.0f);
        add_values(ValueCall<T>{own.values, columns, weights(), own.sums}, seen, rows, {0, SPLIT}, none);
        for (int r = 0; r < rows; ++r) {
            if (seen[r].begin >= seen[r].end) continue;
            const Partial now{own.sums + r * width, &found[r].largest, &found[r].sum}, so_far = state(row + r);
            const int64_t position = first_position + (row + r) / step.group();
            if (step.first_visible(layer, position) >= base) {
                std::copy(now.values, now.values + width, so_far.values);
                *so_far.largest = found[r].largest;
                *so_far.sum = found[r].sum;
            } else {
                merge(so_far, now, width);
            }
        }
    }
};

// Rows of q [heads · head_size] lie `stride` elements apart; out [rows, heads · head_size]. Keys and values are in their cells already.
template <class T>
void attend(Team& team, const AttentionStep& step, int64_t layer, const Queries<T>& in, void* scratch) {
    Attending<T>(team, step, layer, in, scratch).all();
}

// As `attend`, for rows as rotate_and_write has them.
template <class T>
void paged_attention(Team& team, const AttentionStep& step, int64_t layer, const T* qkv, T* out, void* scratch) {
    attend(team, step, layer, Queries<T>{qkv, (step.heads + 2 * step.kv_heads) * step.head_size, out}, scratch);
}
