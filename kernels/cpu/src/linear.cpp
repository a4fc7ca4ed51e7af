// Linear, its packing and its rows, each as one call from Python.
#include "linear.h"

#include <vector>

#include "linear_pack.h"

#define LINEAR(NAME, T)                                                                                                        \
    DT_API void dt_linear_##NAME(const Linear* w, const T* x, int64_t rows, const T* residual, T* y, int32_t threads) {        \
        std::vector<char> scratch(w->kind >= INT8 ? linear_scratch_bytes(w->in, rows) : 0);                                    \
        together(threads, [&](Team& team) { linear<T>(team, *w, x, rows, residual, y, scratch.data()); });                     \
    }                                                                                                                          \
    DT_API void dt_pack_##NAME(uint32_t* packed, const T* plain, int64_t out, int64_t in, int32_t threads) {                   \
        together(threads, [&](Team& team) { pack<T>(team, packed, plain, out, in); });                                         \
    }                                                                                                                          \
    DT_API void dt_embed_##NAME(const Linear* w, const int64_t* ids, int64_t rows, T* y, int32_t threads) {              \
        together(threads, [&](Team& team) { embed<T>(team, *w, ids, rows, y); });                                        \
    }

LINEAR(f32, float)
LINEAR(bf16, bf16)

// Compiled here once; layers.cpp calls them.
#define COMPILED(T)                                                                                                            \
    template void linear<T>(Team&, const Linear&, const T*, int64_t, const T*, T*, void*);                                     \
    template void embed<T>(Team&, const Linear&, const int64_t*, int64_t, T*);

COMPILED(float)
COMPILED(bf16)
