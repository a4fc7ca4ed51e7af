// The exported forms of sampling.h.
#include "sampling.h"

DT_API void dt_sample_f32(sampling::Row* rows, int64_t count, int64_t vocab, void* scratch, int32_t threads) {
    together(threads, [&](Team& team) { sampling::sample<float>(team, rows, count, vocab, scratch); });
}

DT_API void dt_sample_bf16(sampling::Row* rows, int64_t count, int64_t vocab, void* scratch, int32_t threads) {
    together(threads, [&](Team& team) { sampling::sample<bf16>(team, rows, count, vocab, scratch); });
}
