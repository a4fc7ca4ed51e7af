// Keys and values in the order that attention's arithmetic wants: lines of 64 bytes, as linear_step.h has them.
//
//   keys     sixteen positions side by side, one line for each word (4 bytes) of a key: scores of sixteen positions at once
//   values   sixteen elements side by side, one line for each step along positions: float32 one, bf16 a pair
//
// Lines of positions that do not exist or must not be seen hold anything: whoever uses lines knows what is visible.
#pragma once
#include "attention_step.h"
#include "linear_step.h"

// Words of one head of one position, and lines of one step along positions.
template <class T>
inline int64_t words_of(int64_t head_size) {
    return head_size * int64_t(sizeof(T)) / WORD;
}
inline int64_t columns_of(int64_t head_size) { return (head_size + LANES - 1) / LANES; }

#if defined(DT_AVX512)
// Sixteen rows of sixteen words become sixteen lines, of which `words` are stored.
inline void transpose16(__m512i r[16], char* lines, int words) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
    for (int i = 0; i < words; ++i) _mm512_storeu_si512(lines + i * LINE, r[i]);
}
template <class T>
inline void key_lines(const T* const rows[LANES], int64_t words, char* lines) {
    __m512i r[LANES];
    int64_t w = 0;
    for (; w + LANES <= words; w += LANES) {
        for (int i = 0; i < LANES; ++i) r[i] = _mm512_loadu_si512((const char*)rows[i] + w * WORD);
        transpose16(r, lines + w * LINE, LANES);
    }
    if (w == words) return;
    const __mmask16 mask = V::mask(int(words - w));
    for (int i = 0; i < LANES; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, (const char*)rows[i] + w * WORD);
    transpose16(r, lines + w * LINE, int(words - w));
}
// As above, of rows that lie `stride` bytes apart: their addresses fit in registers.
inline void key_lines(const char* first, int64_t stride, int64_t words, char* lines) {
    const char* of[4];
    for (int64_t w = 0; w + LANES <= words; w += LANES) {
        for (int i = 0; i < 4; ++i) of[i] = first + 4 * i * stride + w * WORD;
        __m512i r[LANES];
        for (int i = 0; i < LANES; ++i) r[i] = _mm512_loadu_si512(of[i / 4] + i % 4 * stride);
        transpose16(r, lines + w * LINE, LANES);
    }
}
#else
template <class T>
inline void key_lines(const T* const rows[LANES], int64_t words, char* lines) {
    for (int i = 0; i < LANES; ++i)
        for (int64_t w = 0; w < words; ++w) std::memcpy(lines + w * LINE + i * WORD, (const char*)rows[i] + w * WORD, WORD);
}
#endif

// One step of values: of the head at `rows` (float32 one position, bf16 two), into columns_of(size) lines.
inline void value_lines(const float* const rows[1], int64_t size, char* lines) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) V::load(rows[0] + i).store((float*)lines + i);
    if (i < size) V::load(rows[0] + i, int(size - i)).store((float*)lines + i);
}
inline void value_lines(const bf16* const rows[2], int64_t size, char* lines) {
    int64_t i = 0;
#if defined(DT_AVX512)
    alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        const __m512i a = _mm512_loadu_si512(rows[0] + i), b = _mm512_loadu_si512(rows[1] + i);
        _mm512_storeu_si512(lines + i * WORD, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(lines + i * WORD + LINE, _mm512_permutex2var_epi16(a, high, b));
    }
#endif
    bf16* out = (bf16*)lines;
    const int64_t whole = columns_of(size) * LANES;
    for (; i < size; ++i) out[2 * i] = rows[0][i], out[2 * i + 1] = rows[1][i];
    for (; i < whole; ++i) out[2 * i] = out[2 * i + 1] = {0};
}

// K or V of one head: where each position's lies. Positions outside the range stand for the nearest one inside.
template <class T>
class HeadCells {
   public:
    // offset: of the head in a cell, for V with what lies between K and V. range: positions that exist, at least one.
    HeadCells(const Cells<T>& cells, Range range, int64_t offset) : cells_(cells), range_(range), offset_(offset) {}

    // The cells of count positions from `position` on.
    void rows(int64_t position, int count, const T** out) const {
        if (in_one(position, count)) {
            const T* first = cells_.at(position) + offset_;
            for (int i = 0; i < count; ++i) out[i] = first + i * cells_.step.cell();
            return;
        }
        for (int i = 0; i < count; ++i) {
            const int64_t at = position + i < range_.begin ? range_.begin : position + i;
            out[i] = cells_.at(at < range_.end ? at : range_.end - 1) + offset_;
        }
    }

    // Key lines of positions `from` … `from` + count - 1; both multiples of sixteen.
    void keys(int64_t from, int64_t count, char* lines) const {
        const int64_t words = words_of<T>(cells_.step.head_size);
        for (int64_t i = 0; i < count; i += LANES, lines += words * LINE) {
            const T* rows_of[LANES];
            rows(from + i, LANES, rows_of);
#if defined(DT_AVX512)
            const char* first = (const char*)rows_of[0];
            const int64_t stride = cells_.step.cell() * sizeof(T);
            if (in_one(from + i, LANES) && words % LANES == 0) {
                key_lines(first, stride, words, lines);
                continue;
            }
#endif
            key_lines(rows_of, words, lines);
        }
    }
    // Value lines of positions `from` … `from` + count - 1; both multiples of sixteen.
    void values(int64_t from, int64_t count, char* lines) const {
        constexpr int64_t INPUTS = StepOf<T>::INPUTS;
        const int64_t size = cells_.step.head_size, bytes = columns_of(size) * LINE;
        for (int64_t i = 0; i < count; i += LANES) {
            const T* rows_of[LANES];
            rows(from + i, LANES, rows_of);
            for (int j = 0; j < LANES; j += INPUTS, lines += bytes) value_lines(rows_of + j, size, lines);
        }
    }

   private:
    // Whether count positions exist and lie in one block, evenly spaced.
    bool in_one(int64_t position, int64_t count) const {
        const int64_t block = cells_.step.block_size;
        return position >= range_.begin && position + count <= range_.end && position % block + count <= block;
    }

    const Cells<T>& cells_;
    Range range_;
    int64_t offset_;
};
