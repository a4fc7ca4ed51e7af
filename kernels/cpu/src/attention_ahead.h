// Lines of memory that a tile asks for while it computes, a few between products: a burst would fill the queue of misses, and every load
// would wait behind it.
#pragma once
#include "attention_lines.h"

// Positions of a tile: so many keys or values of a head are in the first cache at once while a single row attends.
constexpr int64_t STRIP = 2 * LANES;
// Tiles from the one that computes to the one that is asked for. Far enough for a hundred lines under way, not farther: blocks of one
// layer often lie a power of two apart, and then a few of them fill the ways of a cache.
constexpr int64_t FAR_TILES = 4;

struct Asking {
    const char *const *next, *const *end;

    // The next few; their number is a multiple of four.
    template <int N>
    inline __attribute__((always_inline)) void some() {
        static_assert(N <= 4 && 4 % N == 0);
        if (next >= end) return;
        for (int i = 0; i < N; ++i) __builtin_prefetch(next[i], 0, 2);
        next += N;
    }
    // Inline: compilers take a function that does nothing but ask for one without effects, and drop its calls.
    inline __attribute__((always_inline)) void rest() {
        while (next < end) some<4>();
    }
};
