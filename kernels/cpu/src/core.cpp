// What the library says about itself, and vec.h's arithmetic for the tests that compare instruction sets.
#include "team.h"
#include "vec.h"

DT_API void dt_exp(float* out, const float* x, int64_t n, int32_t threads) {
    together(threads, [&](Team& team) {
        const Range mine = share(team, n, 16);
        for (int64_t i = mine.begin; i < mine.end; i += 16) {
            const int left = int(mine.end - i);
            if (left >= 16)
                exp(V::load(x + i)).store(out + i);
            else
                exp(V::load(x + i, left)).store(out + i, left);
        }
    });
}

DT_API void dt_round_to_bf16(bf16* out, const float* x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) V::load(x + i).store(out + i);
    if (i < n) V::load(x + i, int(n - i)).store(out + i, int(n - i));
}

// out[r] = the sum of row r of x [rows, n], by way of V; 1,000 barriers on the way, each of which another thread relies on.
DT_API void dt_row_sums(float* out, const float* x, int64_t rows, int64_t n, int32_t threads) {
    together(threads, [&](Team& team) {
        for (int64_t r = 0; r < rows; ++r) {
            if (r % team.size == team.rank) {
                V total = V::zero();
                int64_t i = 0;
                for (; i + 16 <= n; i += 16) total = total + V::load(x + r * n + i);
                if (i < n) total = total + V::load(x + r * n + i, int(n - i));
                out[r] = sum(total) + (r ? out[r - 1] : 0.0f);
            }
            team.barrier();
        }
    });
}
