// A step's keys and values into their cells: as they are, or rotated on the way.
#pragma once
#include "attention_step.h"
#include "small.h"

// K and V of every row, heads one behind the other; rows lie `stride` elements apart.
template <class T>
struct KeysAndValues {
    const T *keys, *values;
    int64_t key_stride, value_stride;
};

template <class T>
void write_kv(Team& team, const AttentionStep& step, int64_t layer, const KeysAndValues<T>& from) {
    const Range mine = share(team, step.rows, 1);
    const size_t bytes = step.cell() * sizeof(T);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
        const Segment& segment = segment_of(step, row);
        T* cell = Cells<T>(step, segment, layer).at(segment.num_computed + row - segment.first_row);
        std::memcpy(cell, from.keys + row * from.key_stride, bytes);
        std::memcpy(cell + step.to_values(), from.values + row * from.value_stride, bytes);
    }
}

// Projected rows [rows, (heads + 2 · kv_heads) · head_size], q, k, v of a row one behind the other; cos and sin [rows, head_size] as
// rotary_head has them; q_norm and k_norm [head_size] or null.
template <class T>
struct QkvRows {
    T* qkv;
    const T *q_norm, *k_norm;
    float eps;
    const T *cos, *sin;
};

// Norms and rotates q in place and k into its cell, copies v into its cell. The copy of k in `qkv` is left as it may be.
template <class T>
void rotate_and_write(Team& team, const AttentionStep& step, int64_t layer, const QkvRows<T>& in) {
    const int64_t size = step.head_size, of_row = step.heads + 2 * step.kv_heads;
    const Range mine = share(team, step.rows * of_row, 1);
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
        const int64_t row = unit / of_row, head = unit % of_row;
        T* x = in.qkv + unit * size;
        const T *cos = in.cos + row * size, *sin = in.sin + row * size;
        if (head < step.heads) {
            if (in.q_norm) rms_norm_row(x, size, in.q_norm, in.eps, x);
            rotary_head(x, size, cos, sin, x);
            continue;
        }
        const Segment& segment = segment_of(step, row);
        T* cell = Cells<T>(step, segment, layer).at(segment.num_computed + row - segment.first_row);
        if (head < step.heads + step.kv_heads) {
            if (in.k_norm) rms_norm_row(x, size, in.k_norm, in.eps, x);
            rotary_head(x, size, cos, sin, cell + (head - step.heads) * size);
        } else {
            std::memcpy(cell + step.to_values() + (head - step.heads - step.kv_heads) * size, x, size * sizeof(T));
        }
    }
}
