// A step through all layers, and the head alone, each as one call from Python.
#include "layers.h"

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
