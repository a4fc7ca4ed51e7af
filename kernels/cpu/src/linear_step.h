// One step along K for sixteen outputs: a line of weights (64 bytes) times a word of x (4 bytes, the same for all lanes).
//
//   float32   a line is 16 outputs × 1 input, a word is 1 input
//   bf16      a line is 16 outputs × 2 inputs (a pair per output), a word is 2 inputs
//
// All sums are float32. With the BF16 instructions a pair is added as they do it (denormals are zero); without them first the
// pair's even input, then its odd one, each fused. Within an instruction set the order of a sum never changes.
#pragma once
#include "team.h"
#include "vec.h"

constexpr int64_t LINE = 64, WORD = 4, LANES = 16;

#if defined(DT_AVX512)
struct StepFloat {
    using Line = V;
    using Word = V;
    static Line line(const char* p) { return V::load((const float*)p); }
    static Word word(const char* p) { return {_mm512_set1_ps(*(const float*)p)}; }
    static V add(V sum, Line w, Word x) { return V::fma(w, x, sum); }
};
#if defined(DT_BF16)
struct StepBf16 {
    using Line = __m512bh;
    using Word = __m512bh;
    static Line line(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static Word word(const char* p) {
        int32_t pair;
        std::memcpy(&pair, p, WORD);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static V add(V sum, Line w, Word x) { return {_mm512_dpbf16_ps(sum.v, w, x)}; }
};
#else
struct StepBf16 {
    struct Line {
        V even, odd;
    };
    using Word = Line;
    static Line split(__m512i pairs) {
        const __m512i high = _mm512_set1_epi32(int(0xffff0000));
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(pairs, high))}};
    }
    static Line line(const char* p) { return split(_mm512_loadu_si512(p)); }
    static Word word(const char* p) {
        int32_t pair;
        std::memcpy(&pair, p, WORD);
        return split(_mm512_set1_epi32(pair));
    }
    static V add(V sum, const Line& w, const Word& x) { return V::fma(w.odd, x.odd, V::fma(w.even, x.even, sum)); }
};
#endif
#else
struct StepFloat {
    using Line = V;
    using Word = V;
    static Line line(const char* p) { return V::load((const float*)p); }
    static Word word(const char* p) {
        float x;
        std::memcpy(&x, p, WORD);
        return V::of(x);
    }
    static V add(const V& sum, const Line& w, const Word& x) { return V::fma(w, x, sum); }
};
struct StepBf16 {
    struct Line {
        V even, odd;
    };
    using Word = Line;
#if defined(DT_AVX2)
    static Line split(__m256i a, __m256i b) {
        const __m256i high = _mm256_set1_epi32(int(0xffff0000));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
    }
    static Line line(const char* p) {
        return split(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32)));
    }
#else
    static Line line(const char* p) {
        bf16 pairs[2 * LANES];
        std::memcpy(pairs, p, LINE);
        Line out;
        for (int i = 0; i < LANES; ++i) out.even.v[i] = to_float(pairs[2 * i]), out.odd.v[i] = to_float(pairs[2 * i + 1]);
        return out;
    }
#endif
    static Word word(const char* p) {
        bf16 pair[2];
        std::memcpy(pair, p, WORD);
        return {V::of(to_float(pair[0])), V::of(to_float(pair[1]))};
    }
    static V add(const V& sum, const Line& w, const Word& x) { return V::fma(w.odd, x.odd, V::fma(w.even, x.even, sum)); }
};
#endif

// The step that a type of x takes.
template <class T>
struct StepOf;
template <>
struct StepOf<float> {
    using Step = StepFloat;
    static constexpr int64_t INPUTS = 1;
};
template <>
struct StepOf<bf16> {
    using Step = StepBf16;
    static constexpr int64_t INPUTS = 2;
};
