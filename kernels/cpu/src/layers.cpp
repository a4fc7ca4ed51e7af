// A step through all layers, and the head alone, each as one call from Python.
#include "layers.h"

// The large ops are compiled in files of their own, so that all files take about equally long.
#define ELSEWHERE(T)                                                                                                           \
    extern template void linear<T>(Team&, const Linear&, const T*, int64_t, const T*, T*, void*);                              \
    extern template void embed<T>(Team&, const Linear&, const int64_t*, int64_t, T*);                                          \
    extern template void paged_attention<T>(Team&, const AttentionStep&, int64_t, const T*, T*, void*);

ELSEWHERE(float)
ELSEWHERE(bf16)

#define LAYERS(NAME, T)                                                                                                        \
    DT_API void dt_step_##NAME(const Stack* stack, const Step* step, int32_t threads) {                                        \
        Pieces pieces(step->scratch);                                                                                          \
        const Between<T> between(*stack, *step, threads, pieces);                                                              \
        together(threads, [&](Team& team) { Walk<T>(team, *stack, *step, between).all(); });                                   \
    }                                                                                                                          \
    DT_API void dt_head_##NAME(const Stack* stack, const Step* step, int32_t threads) {                                        \
        Pieces pieces(step->scratch);                                                                                          \
        const Between<T> between(*stack, *step, threads, pieces);                                                              \
        together(threads, [&](Team& team) { Walk<T>(team, *stack, *step, between).head((const T*)step->hidden); });            \
    }                                                                                                                          \
    DT_API void dt_step_scratch_##NAME(const Stack* stack, const Step* step, int32_t threads, int64_t* bytes) {                \
        Pieces pieces(nullptr);                                                                                                \
        const Between<T> between(*stack, *step, threads, pieces);                                                              \
        *bytes = pieces.used();                                                                                                \
    }

LAYERS(f32, float)
LAYERS(bf16, bf16)
