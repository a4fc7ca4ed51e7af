// V: sixteen float32 in a register (AVX-512), in two (AVX2) or in an array (scalar), with one arithmetic for all three.
//
// The order of every sum is part of the meaning: lane i adds elements i, i + 16, …, and `sum` adds lanes i and i + 8, then
// i + 4, i + 2, i + 1. So the same row gives the same bits on any of the three. bf16 is widened exactly and rounded to nearest even
// (the BF16 instructions round denormals to zero).
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Storage of bfloat16; a type of its own, so that ops can be written once for it and for float.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    // A NaN stays one: rounding could carry it into infinity.
    if (x != x) return {uint16_t(wide >> 16 | 64)};
    return {uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}

#if defined(DT_AVX512)
struct V {
    __m512 v;
    static V zero() { return {_mm512_setzero_ps()}; }
    static V of(float x) { return {_mm512_set1_ps(x)}; }
    static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static V load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    // The first n lanes, 0 < n < 16; the others are 0 and not read.
    static V load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
    static V load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(bf16* p) const { _mm256_storeu_si256((__m256i*)p, narrow()); }
    void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
    void store(bf16* p, int n) const { _mm256_mask_storeu_epi16(p, mask(n), narrow()); }
    static __mmask16 mask(int n) { return __mmask16((1u << n) - 1); }
    static V widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
    __m256i narrow() const {
#if defined(DT_BF16)
        return (__m256i)_mm512_cvtneps_pbh(v);
#else
        const __m512i wide = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
        const __m512i even = _mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __m512i quiet = _mm512_or_si512(wide, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(even, nan, quiet), 16));
#endif
    }
    friend V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
    static V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
    static V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
    V round() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    // x · 2^n for whole n from -126 to 127.
    V scale(V n) const {
        const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
        return {_mm512_mul_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(e, 23)))};
    }
    __m256 low() const { return _mm512_castps512_ps256(v); }
    __m256 high() const { return _mm512_extractf32x8_ps(v, 1); }
};
#elif defined(DT_AVX2)
struct V {
    __m256 a, b;
    static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static V of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static V load(const bf16* p) { return {widen((const __m128i*)p), widen((const __m128i*)(p + 8))}; }
    template <class T>
    static V load(const T* p, int n) {
        T whole[16] = {};
        std::memcpy(whole, p, n * sizeof(T));
        return load(whole);
    }
    void store(float* p) const { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
    void store(bf16* p) const { _mm_storeu_si128((__m128i*)p, narrow(a)), _mm_storeu_si128((__m128i*)(p + 8), narrow(b)); }
    template <class T>
    void store(T* p, int n) const {
        T whole[16];
        store(whole);
        std::memcpy(p, whole, n * sizeof(T));
    }
    static __m256 widen(const __m128i* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    }
    static __m128i narrow(__m256 v) {
        const __m256i wide = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
        const __m256i even = _mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(wide, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
    }
    friend V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    friend V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    friend V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    friend V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
    static V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
    static V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
    V round() const {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(a, nearest), _mm256_round_ps(b, nearest)};
    }
    V scale(V n) const { return {scale8(a, n.a), scale8(b, n.b)}; }
    static __m256 scale8(__m256 x, __m256 n) {
        const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
    }
    __m256 low() const { return a; }
    __m256 high() const { return b; }
};
#else
struct V {
    float v[16];
    template <class F>
    static V each(F f) {
        V out;
        for (int i = 0; i < 16; ++i) out.v[i] = f(i);
        return out;
    }
    static V zero() { return of(0); }
    static V of(float x) {
        return each([&](int) { return x; });
    }
    template <class T>
    static V load(const T* p) {
        return each([&](int i) { return to_float(p[i]); });
    }
    template <class T>
    static V load(const T* p, int n) {
        return each([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
    }
    template <class T>
    void store(T* p, int n = 16) const {
        for (int i = 0; i < n; ++i) p[i] = from_float<T>(v[i]);
    }
    friend V operator+(V a, V b) {
        return each([&](int i) { return a.v[i] + b.v[i]; });
    }
    friend V operator-(V a, V b) {
        return each([&](int i) { return a.v[i] - b.v[i]; });
    }
    friend V operator*(V a, V b) {
        return each([&](int i) { return a.v[i] * b.v[i]; });
    }
    friend V operator/(V a, V b) {
        return each([&](int i) { return a.v[i] / b.v[i]; });
    }
    static V fma(V a, V b, V c) {
        return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
    }
    static V max(V a, V b) {
        return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    }
    static V min(V a, V b) {
        return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
    }
    V round() const {
        return each([&](int i) { return std::nearbyint(v[i]); });
    }
    V scale(V n) const {
        return each([&](int i) { return v[i] * std::ldexp(1.0f, int(n.v[i])); });
    }
};
#endif

#if defined(DT_AVX512) || defined(DT_AVX2)
inline float sum(V x) {
    const __m256 eight = _mm256_add_ps(x.low(), x.high());
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(V x) {
    const __m256 eight = _mm256_max_ps(x.low(), x.high());
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum(V x) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) x.v[i] += x.v[i + step];
    return x.v[0];
}
inline float largest(V x) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) x.v[i] = x.v[i] > x.v[i + step] ? x.v[i] : x.v[i + step];
    return x.v[0];
}
#endif

// e^x to about one unit in the last place; below -87.3 it is 2^-126, which every use here adds to something larger, and above
// 88 it is e^88. A NaN stays one: max and min give their second operand when either is.
// Cody and Waite's reduction x = n ln 2 + r, |r| ≤ ln 2 / 2, and the Taylor polynomial of e^r to r^7.
inline V exp(V x) {
    x = V::min(V::of(88.0f), V::max(V::of(-87.33654f), x));
    const V n = (x * V::of(1.44269504f)).round();
    const V r = V::fma(n, V::of(2.12194440e-4f), V::fma(n, V::of(-0.693359375f), x));
    V p = V::of(1.0f / 5040);
    p = V::fma(p, r, V::of(1.0f / 720));
    p = V::fma(p, r, V::of(1.0f / 120));
    p = V::fma(p, r, V::of(1.0f / 24));
    p = V::fma(p, r, V::of(1.0f / 6));
    p = V::fma(p, r, V::of(0.5f));
    p = V::fma(p, r, V::of(1.0f));
    p = V::fma(p, r, V::of(1.0f));
    return p.scale(n);
}
