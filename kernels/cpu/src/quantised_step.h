// Integers in sixteen lanes: a line of weights (64 bytes: sixteen outputs × 4 inputs, 0 … 255) times a word of x (4 inputs,
// -127 … 127), added to 32-bit sums. Everything is exact, so every instruction set gives the same bits.
#pragma once
#include "linear_step.h"

// sums: of lanes; line, low, high: weights of a byte each, or of half a byte; dot: sums + the four products of each lane.
#if defined(DT_AVX512)
struct Ints {
    __m512i v;
    static Ints of(int32_t x) { return {_mm512_set1_epi32(x)}; }
    V floats() const { return {_mm512_cvtepi32_ps(v)}; }
    static Ints rounded(V x) { return {_mm512_cvtps_epi32(x.v)}; }
    static Ints magnitude(V x) { return {_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff))}; }
    static Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
    friend Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
    int32_t sum() const { return _mm512_reduce_add_epi32(v); }
    int32_t largest() const { return _mm512_reduce_max_epi32(v); }
    void store(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
};
inline V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline V load_byte(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
using Raw = __m512i;
inline Raw raw(const char* p) { return _mm512_loadu_si512(p); }
inline Raw low(Raw x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Raw high(Raw x) { return low(_mm512_srli_epi16(x, 4)); }
#if defined(DT_BF16)
using ByteLine = __m512i;
using ByteWord = __m512i;
inline ByteLine byte_line(Raw x) { return x; }
inline ByteWord byte_word(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, WORD);
    return _mm512_set1_epi32(word);
}
inline Ints dot(Ints sum, ByteLine w, ByteWord x) { return {_mm512_dpbusd_epi32(sum.v, w, x)}; }
#else
struct ByteLine {
    __m512i even, odd;
};
using ByteWord = ByteLine;
inline ByteLine byte_line(Raw x) { return {_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srli_epi16(x, 8)}; }
inline ByteWord byte_word(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, WORD);
    const __m512i x = _mm512_set1_epi32(word);
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
inline Ints dot(Ints sum, const ByteLine& w, const ByteWord& x) {
    const __m512i odd = _mm512_madd_epi16(w.odd, x.odd);
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), odd))};
}
#endif
#elif defined(DT_AVX2)
struct Ints {
    __m256i a, b;
    static Ints of(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    V floats() const { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
    static Ints rounded(V x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
    static Ints magnitude(V x) {
        const __m256i mask = _mm256_set1_epi32(0x7fffffff);
        return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
    }
    static Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
    friend Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    int32_t largest() const {
        const __m256i eight = _mm256_max_epi32(a, b);
        const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
        return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
    }
    int32_t sum() const {
        const __m256i eight = _mm256_add_epi32(a, b);
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
    }
    void store(int8_t* p) const {
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
    }
};
inline V load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline V load_byte(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
struct Raw {
    __m256i a, b;
};
inline Raw raw(const char* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
inline __m256i low8(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Raw low(Raw x) { return {low8(x.a), low8(x.b)}; }
inline Raw high(Raw x) { return {low8(_mm256_srli_epi16(x.a, 4)), low8(_mm256_srli_epi16(x.b, 4))}; }
struct ByteLine {
    Raw even, odd;
};
struct ByteWord {
    __m256i even, odd;
};
inline ByteLine byte_line(Raw x) {
    const __m256i mask = _mm256_set1_epi16(255);
    return {{_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)}, {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}};
}
inline ByteWord byte_word(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, WORD);
    const __m256i x = _mm256_set1_epi32(word);
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
inline __m256i dot8(__m256i sum, __m256i even, __m256i odd, const ByteWord& x) {
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd)));
}
inline Ints dot(Ints sum, const ByteLine& w, const ByteWord& x) {
    return {dot8(sum.a, w.even.a, w.odd.a, x), dot8(sum.b, w.even.b, w.odd.b, x)};
}
#else
struct Ints {
    int32_t v[LANES];
    template <class F>
    static Ints each(F f) {
        Ints out;
        for (int i = 0; i < LANES; ++i) out.v[i] = f(i);
        return out;
    }
    static Ints of(int32_t x) {
        return each([&](int) { return x; });
    }
    V floats() const {
        return V::each([&](int i) { return float(v[i]); });
    }
    static Ints rounded(const V& x) {
        return each([&](int i) { return int32_t(std::nearbyint(x.v[i])); });
    }
    static Ints magnitude(const V& x) {
        return each([&](int i) {
            int32_t bits;
            std::memcpy(&bits, &x.v[i], WORD);
            return bits & 0x7fffffff;
        });
    }
    static Ints max(const Ints& a, const Ints& b) {
        return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    }
    friend Ints operator+(const Ints& a, const Ints& b) {
        return each([&](int i) { return a.v[i] + b.v[i]; });
    }
    int32_t largest() const {
        int32_t most = v[0];
        for (int32_t x : v) most = x > most ? x : most;
        return most;
    }
    int32_t sum() const {
        int32_t total = 0;
        for (int i = 0; i < LANES; ++i) total += v[i];
        return total;
    }
    void store(int8_t* p) const {
        for (int i = 0; i < LANES; ++i) p[i] = int8_t(v[i]);
    }
};
// IEEE half to single, exactly: denormals are scaled by 2^-24, the others get their exponent's other bias.
inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) * 0x1p-24f;
    const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline V load_half(const uint16_t* p) {
    return V::each([&](int i) { return from_half(p[i]); });
}
inline V load_byte(const uint8_t* p) {
    return V::each([&](int i) { return float(p[i]); });
}
struct Raw {
    uint8_t v[LINE];
};
using ByteLine = Raw;
struct ByteWord {
    int8_t v[WORD];
};
inline Raw raw(const char* p) {
    Raw out;
    std::memcpy(out.v, p, LINE);
    return out;
}
inline Raw low(Raw x) {
    for (uint8_t& byte : x.v) byte &= 15;
    return x;
}
inline Raw high(Raw x) {
    for (uint8_t& byte : x.v) byte >>= 4;
    return x;
}
inline ByteLine byte_line(const Raw& x) { return x; }
inline ByteWord byte_word(const int8_t* p) {
    ByteWord out;
    std::memcpy(out.v, p, WORD);
    return out;
}
inline Ints dot(Ints sum, const ByteLine& w, const ByteWord& x) {
    for (int i = 0; i < LANES; ++i)
        for (int k = 0; k < WORD; ++k) sum.v[i] += w.v[i * WORD + k] * x.v[k];
    return sum;
}
#endif
