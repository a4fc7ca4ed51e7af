// KV blocks to and from their narrow form; kernels/packing.py says what it is, and is its truth bit by bit.
//
//   block   [layers, 2, block_size, kv_heads, d]      packed   [layers, 2, kv_heads] records: scale, then [block_size, d] bytes
//
// A record is read twice, for its largest magnitude and then to be divided; it is small enough to be in the first cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vec.h"

namespace packing {

struct Shape {
    int64_t layers, size, heads, width;
    int64_t records() const { return layers * 2 * heads; }
    int64_t record_bytes() const { return 4 + size * width; }
    int64_t block_values() const { return layers * 2 * size * heads * width; }
};

// float32, at most 448 in magnitude, to the bits of float8 e4m3, ties to even.
inline uint8_t to_e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 31 << 7;
    // Three bits of mantissa stay; exponents are counted from 7 instead of 127.
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    // Below 2^-6 there is one step, of 2^-9.
    const uint32_t small = uint32_t(std::nearbyint(std::fabs(x) * 512.0f));
    return uint8_t((magnitude < 0x3c800000u ? small : normal) | sign);
}

inline float from_e4m3(uint8_t code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float sign = code >> 7 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * float(mantissa) * 0x1p-9f;
    uint32_t bits = (exponent + 120) << 23 | mantissa << 20;
    float out;
    std::memcpy(&out, &bits, 4);
    return sign * out;
}

struct Int8 {
    static constexpr float LARGEST = 127;
    static uint8_t narrow(float x) { return uint8_t(int8_t(std::nearbyint(x))); }
    static float widen(uint8_t x) { return float(int8_t(x)); }
};

struct Fp8 {
    static constexpr float LARGEST = 448;
    static uint8_t narrow(float x) { return to_e4m3(x); }
    static float widen(uint8_t x) { return from_e4m3(x); }
};

// Calls each(values, bytes) for the positions of a record: `width` values beside their bytes.
template <class T, class Each>
void over_record(T* block, uint8_t* packed, const Shape& shape, int64_t record, const Each& each) {
    const int64_t side = record / shape.heads, head = record % shape.heads;
    T* values = block + side * shape.size * shape.heads * shape.width + head * shape.width;
    for (int64_t at = 0; at < shape.size; ++at) each(values + at * shape.heads * shape.width, packed + at * shape.width);
}

// The blocks `ids` of `cache` into `packed`, one after the other.
template <class F, class T>
void pack(Team& team, const T* cache, const int64_t* ids, int64_t count, const Shape& shape, uint8_t* packed) {
    const Range mine = share(team, count * shape.records(), 1);
    for (int64_t at = mine.begin; at < mine.end; ++at) {
        T* block = const_cast<T*>(cache) + ids[at / shape.records()] * shape.block_values();
        uint8_t* record = packed + at * shape.record_bytes();
        const int64_t which = at % shape.records();
        float largest = 0;
        over_record(block, record + 4, shape, which, [&](const T* values, uint8_t*) {
            for (int64_t i = 0; i < shape.width; ++i) largest = std::max(largest, std::fabs(to_float(values[i])));
        });
        const float scale = largest / F::LARGEST, divisor = scale > 0 ? scale : 1;
        std::memcpy(record, &scale, 4);
        over_record(block, record + 4, shape, which, [&](const T* values, uint8_t* bytes) {
            for (int64_t i = 0; i < shape.width; ++i) bytes[i] = F::narrow(to_float(values[i]) / divisor);
        });
    }
}

// `packed` into the blocks `ids` of `cache`.
template <class F, class T>
void unpack(Team& team, const uint8_t* packed, const int64_t* ids, int64_t count, const Shape& shape, T* cache) {
    const Range mine = share(team, count * shape.records(), 1);
    for (int64_t at = mine.begin; at < mine.end; ++at) {
        uint8_t* record = const_cast<uint8_t*>(packed) + at * shape.record_bytes();
        float scale;
        std::memcpy(&scale, record, 4);
        T* block = cache + ids[at / shape.records()] * shape.block_values();
        over_record(block, record + 4, shape, at % shape.records(), [&](T* values, const uint8_t* bytes) {
            for (int64_t i = 0; i < shape.width; ++i) values[i] = from_float<T>(F::widen(bytes[i]) * scale);
        });
    }
}

}  // namespace packing
