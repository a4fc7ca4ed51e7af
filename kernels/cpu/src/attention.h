// Attention straight from the blocks, for any mix of decoding rows and chunks of prompts.
//
//   one row        units of (split, some KV heads): several threads share a long context; then partials are merged, row by row
//   several rows   units of (positions, KV head): lines of a split are made once for all rows; partials are merged as they come
//
// Both cut positions at the same places, compute a split alike (attention_tile.h) and merge in the order of positions. So a row has the
// same bits whatever chunk it comes in, whatever shares its step, however many threads there are.
#pragma once
#include "attention_units.h"
#include "attention_write.h"

// Keys and values of so many positions are in the first-level cache at once while a single row attends.
constexpr int64_t KEY_STRIP = 2 * LANES, VALUE_STRIP = 4 * LANES;

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

    T* weights() const { return (T*)own.weights; }

    // One split of a single row, for some KV heads. While keys are read, the values behind them are asked for; then the next keys.
    void split(const Work& work, int64_t unit, const Work* next, int64_t next_unit) {
        const Segment& segment = *work.segment;
        const Cells<T> cells(step, segment, layer);
        const Single at = plan.single_unit(work, unit);
        const int64_t group = step.group(), base = at.split * SPLIT, heads = at.heads.end - at.heads.begin;
        const Range seen{at.seen.begin - base, at.seen.end - base};
        const Range groups{seen.begin / LANES * LANES, (seen.end + LANES - 1) / LANES * LANES};
        for (int64_t from = groups.begin; from < groups.end; from += KEY_STRIP) {
            const int64_t count = std::min(KEY_STRIP, groups.end - from);
            ask(cells, clip(at.seen, base + from, count), at.heads, step.to_values());
            for (int64_t h = 0; h < heads; ++h) {
                const int64_t head = at.heads.begin + h;
                HeadCells<T>(cells, at.seen, head * step.head_size).keys(base + from, count, own.keys);
                const T* q = in.rows + segment.first_row * in.stride + head * group * step.head_size;
                for (int64_t r = 0; r < group; r += TILE_ROWS) {
                    float* scores = own.scores + (h * group + r) * SPLIT + from;
                    const int rows = int(std::min<int64_t>(TILE_ROWS, group - r));
                    add_scores(own.keys, words, q + r * step.head_size, rows, step.scale, {0, count}, scores);
                }
            }
        }
        Single ahead{};
        if (next && next->segment->num_rows == 1) ahead = plan.single_unit(*next, next_unit);
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t head = at.heads.begin + h;
            const Partial to = plan.partial(work, at.split, head * group);
            for (int64_t r = 0; r < group; ++r) {
                float* scores = own.scores + (h * group + r) * SPLIT;
                const Partial row = plan.partial(work, at.split, head * group + r);
                const Softmax found = softmax(scores, seen, weights() + r * SPLIT);
                *row.largest = found.largest;
                *row.sum = found.sum;
            }
            std::fill(to.values, to.values + group * width, 0.0f);
            const HeadCells<T> values(cells, at.seen, head * step.head_size + step.to_values());
            for (int64_t from = groups.begin; from < groups.end; from += VALUE_STRIP) {
                const int64_t count = std::min(VALUE_STRIP, groups.end - from);
                if (ahead.seen.end) ask_ahead(*next, ahead, h * SPLIT + from, count, heads);
                values.values(base + from, count, own.values);
                for (int64_t r = 0; r < group; r += TILE_ROWS)
                    one_strip(int(std::min<int64_t>(TILE_ROWS, group - r)), seen, {from, from + count}, weights() + r * SPLIT, to.values + r * width);
            }
        }
    }

    void one_strip(int rows, Range seen, Range strip, const T* weights, float* sums) {
        Range all[TILE_ROWS];
        std::fill(all, all + rows, seen);
        const char* lines = own.values - strip.begin / StepOf<T>::INPUTS * columns * LINE;
        add_values(ValueCall<T>{lines, columns, weights, sums}, all, rows, strip);
    }

    static Range clip(Range range, int64_t from, int64_t count) {
        return {std::max(range.begin, from), std::min(range.end, from + count)};
    }

    // A word with the memory system about cells that are needed soon.
    void ask(const Cells<T>& cells, Range positions, Range heads, int64_t offset) const {
        const int64_t elements = (heads.end - heads.begin) * step.head_size;
        // All heads of a run of positions lie together.
        const bool whole = elements == step.cell();
        for (int64_t at = positions.begin, run; at < positions.end; at += run) {
            run = cells.run(at, positions.end);
            const T* first = cells.at(at) + offset + heads.begin * step.head_size;
            for (int64_t i = 0; i < (whole ? 1 : run); ++i) {
                const char* from = (const char*)(first + i * step.cell());
                const char* end = from + (whole ? run : 1) * elements * sizeof(T);
                for (; from < end; from += LINE) __builtin_prefetch(from, 0, 2);
            }
        }
    }
    // The share of the next unit's keys that belongs to `count` of this one's `heads` · SPLIT positions.
    void ask_ahead(const Work& next, const Single& ahead, int64_t from, int64_t count, int64_t heads) const {
        const Cells<T> cells(step, *next.segment, layer);
        const int64_t first = ahead.split * SPLIT + from / heads;
        ask(cells, clip(ahead.seen, first, (count + heads - 1) / heads), ahead.heads, 0);
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
        add_scores(own.keys, words, (const T*)own.queries + row * step.head_size, rows, step.scale, groups, own.scores);
        Softmax found[TILE_ROWS];
        for (int r = 0; r < rows; ++r)
            if (seen[r].begin < seen[r].end) found[r] = softmax(own.scores + r * SPLIT, seen[r], weights() + r * SPLIT);
        std::fill(own.sums, own.sums + rows * width, 0.0f);
        add_values(ValueCall<T>{own.values, columns, weights(), own.sums}, seen, rows, {0, SPLIT});
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
