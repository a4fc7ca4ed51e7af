// What a step's attention is about: where KV lies, and which rows belong to whom. Made once per step, used by every layer.
//
//   KV memory   [blocks, layers, 2 (K, V), block_size, kv_heads, head_size]; the cells of one block and layer lie together
//   segment     consecutive rows of one request: first_row, num_rows, num_computed, where its block ids begin (kernels/batch.py)
//
// Row first_row + i is at position num_computed + i and sees positions up to its own, with a window w only the last w of those.
#pragma once
#include "team.h"
#include "vec.h"

struct Segment {
    int64_t first_row, num_rows, num_computed, first_block;
};

// As Python describes it too (kernels/cpu/attention.py).
struct AttentionStep {
    void* memory;
    int64_t layers, block_size, heads, kv_heads, head_size;
    // Of each layer; 0: none.
    const int64_t* windows;
    const Segment* segments;
    int64_t num_segments, rows;
    const int64_t* block_ids;
    float scale;

    int64_t group() const { return heads / kv_heads; }
    // Elements from one cell to the next, and from K to V of the same cell.
    int64_t cell() const { return kv_heads * head_size; }
    int64_t to_values() const { return block_size * cell(); }
    int64_t first_visible(int64_t layer, int64_t position) const {
        const int64_t window = windows[layer];
        return window && position + 1 > window ? position + 1 - window : 0;
    }
};

// The cells of one segment in one layer.
template <class T>
struct Cells {
    const AttentionStep& step;
    T* first;
    const int64_t* blocks;

    Cells(const AttentionStep& step, const Segment& segment, int64_t layer)
        : step(step), first((T*)step.memory + 2 * layer * step.to_values()), blocks(step.block_ids + segment.first_block) {}

    // K of `position`, all heads; V lies to_values() behind it.
    T* at(int64_t position) const {
        const int64_t block = blocks[position / step.block_size];
        return first + block * step.layers * 2 * step.to_values() + position % step.block_size * step.cell();
    }
    // Positions of `range` from `position` on that lie in the same block.
    int64_t run(int64_t position, int64_t end) const {
        const int64_t left = step.block_size - position % step.block_size;
        return left < end - position ? left : end - position;
    }
};

// The segment that a row belongs to.
inline const Segment& segment_of(const AttentionStep& step, int64_t row) {
    int64_t low = 0, high = step.num_segments;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (step.segments[middle].first_row <= row ? low : high) = middle;
    }
    return step.segments[low];
}
