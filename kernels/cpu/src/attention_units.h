// How a layer's attention is cut into units that threads take one by one, and the memory that each of them uses.
//
// Every thread works the same plan out for itself: a few numbers for each segment, against a barrier or a plan for each window.
#pragma once
#include "attention_tile.h"
#include "stealing.h"

// A chunk's unit has about so many rows (query heads times positions): enough that making lines costs little beside using them.
constexpr int64_t CHUNK_ROWS = 224;
// A single row's unit reads about so many bytes of keys, and as many of values: both fit the second-level cache.
constexpr int64_t UNIT_BYTES = 128 << 10;

// A step's queries and where results go.
template <class T>
struct Queries {
    const T* rows;
    int64_t stride;
    T* out;
};

// A segment with the numbers of its first unit and, for a single row, its first partial.
struct Work {
    const Segment* segment;
    int64_t first_unit, first_partial;
};
// A unit of a single row: which split, the positions that it sees of it, which KV heads.
struct Single {
    int64_t split;
    Range seen, heads;
};

// Cuts memory into pieces that begin on lines of their own; with no memory it only counts.
class Slices {
   public:
    explicit Slices(char* memory) : memory_(memory) {}
    template <class T>
    T* take(int64_t count) {
        T* piece = (T*)(memory_ + used_);
        used_ += (count * int64_t(sizeof(T)) + LINE - 1) / LINE * LINE;
        return piece;
    }
    int64_t used() const { return used_; }

   private:
    char* memory_;
    int64_t used_ = 0;
};

inline int64_t chunk_length(const AttentionStep& step) { return std::max<int64_t>(1, CHUNK_ROWS / step.group()); }

// One thread's own memory.
struct OwnScratch {
    Work* works;
    char *keys, *values, *queries, *weights;
    float *scores, *sums, *state;
    const char** asked;
    int64_t bytes;

    OwnScratch(const AttentionStep& step, char* memory) {
        Slices slices(memory);
        const int64_t width = columns_of(step.head_size) * LANES, rows = chunk_length(step) * step.group();
        const int64_t most_rows = std::max<int64_t>(TILE_ROWS, step.heads);
        works = slices.take<Work>(step.num_segments);
        keys = slices.take<char>(SPLIT * width * 4);
        values = slices.take<char>(SPLIT * width * 4);
        queries = slices.take<char>(rows * step.head_size * 4);
        weights = slices.take<char>(most_rows * SPLIT * 4);
        scores = slices.take<float>(most_rows * SPLIT);
        sums = slices.take<float>(TILE_ROWS * width);
        state = slices.take<float>(rows * (width + 2));
        // Float32 rows are the longest. A list is padded to a multiple of four, as STRIP is one.
        asked = slices.take<const char*>(STRIP * ((step.head_size * 4 + LINE - 1) / LINE));
        bytes = slices.used();
    }
};

class Plan {
   public:
    int64_t units = 0, partials = 0, singles = 0;

    Plan(const Team& team, const AttentionStep& step, int64_t layer, int64_t element, void* scratch)
        : step_(step), layer_(layer), scratch_((char*)scratch), own_bytes_(OwnScratch(step, nullptr).bytes),
          works_(own(team.rank).works), shared_(scratch_ + own_bytes_ * team.size) {
        // Chunks first: they are the larger units.
        for (int64_t s = 0; s < step.num_segments; ++s)
            if (step.segments[s].num_rows > 1) {
                works_[count_++] = {step.segments + s, units, 0};
                units += chunks(step.segments[s]) * step.kv_heads;
            }
        chunked_ = count_;
        int64_t all_splits = 0;
        for (int64_t s = 0; s < step.num_segments; ++s)
            if (step.segments[s].num_rows == 1) all_splits += split_count(step.segments[s]);
        heads_ = std::max<int64_t>(1, std::min(step.kv_heads, UNIT_BYTES / (SPLIT * step.head_size * element)));
        while (heads_ > 1 && all_splits * parts() < 4 * team.size) heads_ = (heads_ + 1) / 2;
        for (int64_t s = 0; s < step.num_segments; ++s)
            if (step.segments[s].num_rows == 1) {
                works_[count_++] = {step.segments + s, units, partials};
                units += split_count(step.segments[s]) * parts();
                partials += split_count(step.segments[s]) * step.heads;
            }
        singles = count_ - chunked_;
    }

    OwnScratch own(int rank) const { return {step_, scratch_ + rank * own_bytes_}; }
    const Work& single(int64_t i) const { return works_[chunked_ + i]; }

    const Work& work_of(int64_t unit) const {
        int64_t low = 0, high = count_;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (works_[middle].first_unit <= unit ? low : high) = middle;
        }
        return works_[low];
    }

    // Splits that a single row sees anything of.
    Range splits(const Segment& segment) const {
        const int64_t position = segment.num_computed;
        return {step_.first_visible(layer_, position) / SPLIT, position / SPLIT + 1};
    }
    Single single_unit(const Work& work, int64_t unit) const {
        const int64_t position = work.segment->num_computed, part = unit % parts();
        const int64_t split = splits(*work.segment).begin + unit / parts();
        const Range seen{std::max(step_.first_visible(layer_, position), split * SPLIT), std::min(position + 1, (split + 1) * SPLIT)};
        return {split, seen, {part * heads_, std::min((part + 1) * heads_, step_.kv_heads)}};
    }
    // What one query head gets from one split; heads lie one behind the other, values of all before their other numbers.
    Partial partial(const Work& work, int64_t split, int64_t head) const {
        const int64_t width = columns_of(step_.head_size) * LANES, first = work.first_partial + (split - splits(*work.segment).begin) * step_.heads;
        float* numbers = shared_values() + partials * width + (first + head) * 2;
        return {shared_values() + (first + head) * width, numbers, numbers + 1};
    }

    // Positions of a chunk's unit; the last ones, which see most, come first.
    Range chunk_positions(const Segment& segment, int64_t index) const {
        const int64_t begin = segment.num_computed + (chunks(segment) - 1 - index) * chunk_length(step_);
        return {begin, std::min(begin + chunk_length(step_), segment.num_computed + segment.num_rows)};
    }

   private:
    const AttentionStep& step_;
    const int64_t layer_;
    char* const scratch_;
    const int64_t own_bytes_;
    Work* const works_;
    char* const shared_;
    int64_t count_ = 0, chunked_ = 0, heads_ = 1;

    float* shared_values() const { return (float*)shared_; }
    // Parts that a split's KV heads are cut into.
    int64_t parts() const { return (step_.kv_heads + heads_ - 1) / heads_; }
    int64_t split_count(const Segment& segment) const {
        const Range range = splits(segment);
        return range.end - range.begin;
    }
    int64_t chunks(const Segment& segment) const { return (segment.num_rows + chunk_length(step_) - 1) / chunk_length(step_); }
};

// Bytes that `attend` needs for any layer of `step`, shared by a team of at most `threads`.
inline int64_t attention_scratch_bytes(const AttentionStep& step, int64_t threads) {
    int64_t partials = 0, window = step.windows[0];
    for (int64_t layer = 1; layer < step.layers; ++layer)
        window = window && step.windows[layer] ? std::max(window, step.windows[layer]) : 0;
    for (int64_t s = 0; s < step.num_segments; ++s) {
        if (step.segments[s].num_rows > 1) continue;
        const int64_t seen = step.segments[s].num_computed + 1, whole = seen / SPLIT + 1;
        partials += (window ? std::min(whole, window / SPLIT + 2) : whole) * step.heads;
    }
    return OwnScratch(step, nullptr).bytes * threads + partials * (columns_of(step.head_size) * LANES + 2) * 4 + LINE;
}
