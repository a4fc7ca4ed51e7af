// From rows of logits to one token each: the likeliest, or one drawn after temperature, min-p, top-k and top-p.
//
//   all rows' runs of 128 ──▶ largest of each run ─┬─ barrier ─▶ sums of exp, of rows that need them ─┬─ barrier ─▶ a row a thread:
//                                                  └ the largest of a row, and where it stands first   └ choose what is kept, draw
//
// What is kept is found from the runs' largest: at least n logits are as large as the n-th largest of those, so only runs that
// reach it are looked into. The meaning, and the noise, is that of engine/sampling: order (logit descending, id ascending),
// an exponential race between runs of 128 and then within one, SplitMix64 noise that belongs to a run's and a token's number.
// A row's result does not depend on the rows beside it nor on the number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "team.h"
#include "vec.h"

namespace sampling {

constexpr int64_t RUN = 128;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What is asked of one row, and the answer; kernels/cpu/sampling.py has the same fields.
struct Row {
    const void* logits;
    // 0: the likeliest, nothing below matters.
    float temperature;
    // What (logit - largest) / temperature must reach, log of min-p; -inf: anything.
    float floor;
    double top_p;
    // 0: all.
    int64_t top_k;
    uint64_t keys[2];
    // Out: the token, and the largest logit; NaN where any is, and then, or where it is infinite, there is no token (-1).
    int64_t token;
    float largest;
    float unused;
};

inline int64_t runs_of(int64_t vocab) { return (vocab + RUN - 1) / RUN; }

// Scratch: a float and a double for each run of each row.
inline int64_t scratch_bytes(int64_t rows, int64_t vocab) { return rows * runs_of(vocab) * 12 + 64; }

struct Scratch {
    double* sums;
    float* largest;
    Scratch(void* memory, int64_t rows, int64_t runs) : sums((double*)memory), largest((float*)(sums + rows * runs)) {}
};

// One row after temperature: a logit is (logit / temperature) - (largest / temperature), rounded as torch rounds it.
template <class T>
struct Scaled {
    const T* logits;
    int64_t vocab;
    V temperature, shift;
    Scaled(const Row& row, int64_t vocab)
        : logits((const T*)row.logits), vocab(vocab), temperature(V::of(row.temperature)), shift(V::of(row.largest) / temperature) {}
    V of(V x) const { return x / temperature - shift; }
    V at(int64_t i) const { return of(i + 16 <= vocab ? V::load(logits + i) : V::load(logits + i, int(vocab - i))); }
    float of(float x) const {
        float lanes[16];
        of(V::of(x)).store(lanes);
        return lanes[0];
    }
};

// The largest of a run, NaN where any of it is one.
template <class T>
float largest_of(const T* p, int64_t n) {
    V best = V::of(NOTHING), trace = V::zero();
    for (int64_t i = 0; i < n; i += 16) {
        V x;
        if (i + 16 <= n) {
            x = V::load(p + i);
        } else {
            // Lanes beyond the end repeat the last element.
            float lanes[16];
            for (int j = 0; j < 16; ++j) lanes[j] = to_float(p[i + j < n ? i + j : n - 1]);
            x = V::load(lanes);
        }
        best = V::max(x, best);
        // From -1 to 0, but NaN stays NaN: min and max give their second operand then.
        trace = trace + V::max(V::of(-1), V::min(V::zero(), x));
    }
    const float marked = sum(trace);
    return marked == marked ? largest(best) : marked;
}

// Sixteen sums in float64, of lanes of float32.
struct Sums {
#if defined(DT_AVX512)
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(V x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(x.low()));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(x.high()));
    }
    void store(double* p) const { _mm512_storeu_pd(p, low), _mm512_storeu_pd(p + 8, high); }
#else
    double lanes[16] = {};
    void add(V x) {
        float one[16];
        x.store(one);
        for (int j = 0; j < 16; ++j) lanes[j] += double(one[j]);
    }
    void store(double* p) const { std::copy(lanes, lanes + 16, p); }
#endif
};

// The sum of exp over a run, of what reaches the floor. Lane by lane, then the lanes in order.
template <class T>
double sum_of(const Scaled<T>& scaled, int64_t begin, int64_t end, float floor) {
    Sums sums;
    for (int64_t i = begin; i < end; i += 16) {
        const V s = scaled.at(i);
        const int n = int(std::min<int64_t>(16, end - i));
        if (n == 16 && floor == NOTHING) {
            sums.add(exp(s));
            continue;
        }
        float value[16], weight[16];
        s.store(value);
        exp(s).store(weight);
        for (int j = 0; j < 16; ++j) weight[j] = j < n && value[j] >= floor ? weight[j] : 0.0f;
        sums.add(V::load(weight));
    }
    double lanes[16], all = 0;
    sums.store(lanes);
    for (double one : lanes) all += one;
    return all;
}

// Exponential noise of mean 1 for number i (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
inline double noise(uint64_t key, int64_t i) {
    uint64_t bits = key + uint64_t(i + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return -std::log((double(bits >> 12) + 0.5) * 0x1p-52);
}

// Who arrives first of those that have a weight.
struct Race {
    uint64_t key;
    int64_t first = -1;
    double arrival = std::numeric_limits<double>::infinity();
    void enter(int64_t i, double weight) {
        if (weight <= 0) return;
        const double at = noise(key, i) / weight;
        if (at < arrival || (at == arrival && i < first)) arrival = at, first = i;
    }
};

struct Kept {
    float value;
    int32_t id;
    bool operator<(const Kept& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// Sorted by (value descending, id ascending); they come in order of their ids.
inline void sort(std::vector<Kept>& kept, std::vector<Kept>& spare) {
    if (kept.size() < 2048) {
        std::sort(kept.begin(), kept.end());
        return;
    }
    // By digits of eleven bits, which leaves equal ones in their order.
    spare.resize(kept.size());
    for (int shift = 0; shift < 33; shift += 11) {
        uint32_t places[2048] = {};
        const auto digit = [shift](float value) {
            uint32_t bits;
            // Both zeros are one value.
            value += 0.0f;
            std::memcpy(&bits, &value, 4);
            // Larger floats to smaller numbers.
            bits = bits >> 31 ? bits : ~(bits | 0x80000000u);
            return bits >> shift & 2047;
        };
        for (const Kept& one : kept) ++places[digit(one.value)];
        uint32_t before = 0;
        for (uint32_t& place : places) {
            const uint32_t count = place;
            place = before;
            before += count;
        }
        for (const Kept& one : kept) spare[places[digit(one.value)]++] = one;
        kept.swap(spare);
    }
}

// How many of the first `kept` it takes until their mass reaches `target`; at least one, at most all.
inline size_t nucleus(const std::vector<Kept>& kept, double target) {
    double before = 0;
    for (size_t i = 0; i + 1 < kept.size(); ++i) {
        before += std::exp(double(kept[i].value));
        if (!(before < target)) return i + 1;
    }
    return kept.size();
}

// Chooses and draws for one row whose runs' largest, and sums where they are needed, are known.
template <class T>
class Choice {
   public:
    Choice(const Row& row, int64_t vocab, const float* largest, const double* sums)
        : row(row), vocab(vocab), runs(runs_of(vocab)), largest(largest), sums(sums), scaled(row, vocab) {}

    int64_t token() {
        if (row.top_k > 0 && row.top_k < vocab) {
            keep(row.top_k);
            if (int64_t(kept.size()) > row.top_k) {
                std::nth_element(kept.begin(), kept.begin() + row.top_k, kept.end());
                kept.resize(row.top_k);
            }
            if (row.top_p < 1) {
                std::sort(kept.begin(), kept.end());
                double total = 0;
                for (const Kept& one : kept) total += std::exp(double(one.value));
                kept.resize(nucleus(kept, row.top_p * total));
            }
            return draw_kept();
        }
        if (row.top_p < 1) {
            keep_nucleus();
            return draw_kept();
        }
        return draw_all();
    }

   private:
    const Row& row;
    const int64_t vocab, runs;
    const float* const largest;
    const double* const sums;
    const Scaled<T> scaled;
    std::vector<Kept> kept, spare;

    // All that reach the floor and the `count`-th largest of the runs' largest, in order of their ids: at least `count` of what
    // reaches the floor, or all of it.
    void keep(int64_t count) {
        float bound = NOTHING;
        if (count < runs) {
            std::vector<float> sorted(largest, largest + runs);
            std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
            bound = scaled.of(sorted[count - 1]);
        }
        bound = std::max(bound, row.floor);
        kept.clear();
        for (int64_t run = 0; run < runs; ++run) {
            if (scaled.of(largest[run]) < bound) continue;
            const int64_t end = std::min(vocab, (run + 1) * RUN);
            for (int64_t i = run * RUN; i < end; i += 16) {
                float value[16];
                scaled.at(i).store(value);
                for (int64_t j = 0; j < 16 && i + j < end; ++j)
                    if (value[j] >= bound) kept.push_back({value[j], int32_t(i + j)});
            }
        }
    }

    void keep_nucleus() {
        double total = 0;
        for (int64_t run = 0; run < runs; ++run) total += sums[run];
        // A first guess at how many tokens hold the nucleus; the result does not depend on it.
        for (int64_t count = 64;; count *= 16) {
            keep(count);
            sort(kept, spare);
            const size_t size = nucleus(kept, row.top_p * total);
            if (size < kept.size() || count >= runs) {
                kept.resize(size);
                return;
            }
        }
    }

    int64_t draw_kept() {
        std::sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) { return a.id < b.id; });
        std::vector<float> weights((kept.size() + 15) / 16 * 16);
        for (size_t i = 0; i < kept.size(); i += 16) {
            float value[16] = {};
            for (size_t j = 0; j < 16 && i + j < kept.size(); ++j) value[j] = kept[i + j].value;
            exp(V::load(value)).store(&weights[i]);
        }
        Race race{row.keys[0]};
        size_t begin = 0, won = 0;
        while (begin < kept.size()) {
            const int64_t run = kept[begin].id / RUN;
            double mass = 0;
            size_t end = begin;
            for (; end < kept.size() && kept[end].id / RUN == run; ++end) mass += weights[end];
            race.enter(run, mass);
            if (race.first == run) won = begin;
            begin = end;
        }
        Race within{row.keys[1]};
        for (size_t i = won; i < kept.size() && kept[i].id / RUN == race.first; ++i) within.enter(kept[i].id % RUN, weights[i]);
        return race.first * RUN + within.first;
    }

    int64_t draw_all() {
        Race race{row.keys[0]};
        for (int64_t run = 0; run < runs; ++run) race.enter(run, sums[run]);
        Race within{row.keys[1]};
        const int64_t begin = race.first * RUN, end = std::min(vocab, begin + RUN);
        for (int64_t i = begin; i < end; i += 16) {
            float value[16], weight[16];
            const V s = scaled.at(i);
            s.store(value);
            exp(s).store(weight);
            for (int64_t j = 0; j < 16 && i + j < end; ++j)
                if (value[j] >= row.floor) within.enter(i - begin + j, weight[j]);
        }
        return begin + within.first;
    }
};

// Sets the row's largest and, where that is finite, the first place it stands at; from its runs' largest.
template <class T>
void find_largest(Row& row, int64_t vocab, const float* largest) {
    const int64_t runs = runs_of(vocab);
    int64_t best = 0;
    row.token = -1;
    for (int64_t run = 0; run < runs; ++run) {
        if (largest[run] != largest[run]) {
            row.largest = largest[run];
            return;
        }
        if (largest[run] > largest[best]) best = run;
    }
    row.largest = largest[best];
    if (!std::isfinite(row.largest)) return;
    const T* logits = (const T*)row.logits;
    for (row.token = best * RUN; to_float(logits[row.token]) != row.largest;) ++row.token;
}

inline bool needs_sums(const Row& row, int64_t vocab) {
    const bool few = row.top_k > 0 && row.top_k < vocab;
    return row.temperature > 0 && row.token >= 0 && !few;
}

// Every row's token; `scratch` of scratch_bytes(rows, vocab). A body: the caller's barrier comes after it.
template <class T>
void sample(Team& team, Row* rows, int64_t count, int64_t vocab, void* memory) {
    const int64_t runs = runs_of(vocab);
    const Scratch scratch(memory, count, runs);
    const Range mine = share(team, count * runs, 1);
    for (int64_t at = mine.begin; at < mine.end; ++at) {
        const int64_t begin = at % runs * RUN;
        scratch.largest[at] = largest_of((const T*)rows[at / runs].logits + begin, std::min(RUN, vocab - begin));
    }
    team.barrier();
    for (int64_t row = team.rank; row < count; row += team.size) find_largest<T>(rows[row], vocab, scratch.largest + row * runs);
    team.barrier();
    for (int64_t at = mine.begin; at < mine.end;) {
        const Row& row = rows[at / runs];
        const int64_t end = std::min(mine.end, (at / runs + 1) * runs);
        if (needs_sums(row, vocab)) {
            const Scaled<T> scaled(row, vocab);
            for (int64_t one = at; one < end; ++one) {
                const int64_t begin = one % runs * RUN;
                const bool none = scaled.of(scratch.largest[one]) < row.floor;
                scratch.sums[one] = none ? 0.0 : sum_of(scaled, begin, std::min(vocab, begin + RUN), row.floor);
            }
        }
        at = end;
    }
    team.barrier();
    for (int64_t row = team.rank; row < count; row += team.size) {
        Row& one = rows[row];
        if (one.temperature > 0 && one.token >= 0)
            one.token = Choice<T>(one, vocab, scratch.largest + row * runs, scratch.sums + row * runs).token();
    }
}

}  // namespace sampling
