// Attention as an op of its own, for callers that run a decoder's ops from Python.
#include "attention.h"

// What one layer's call takes: rows of q, k and v lie their stride apart (elements), heads of a row one behind the other.
struct AttentionCall {
    const void *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    void *out, *scratch;
};

template <class T>
void write_and_attend(const AttentionStep& step, int64_t layer, const AttentionCall& call, int threads) {
    together(threads, [&](Team& team) {
        write_kv(team, step, layer, KeysAndValues<T>{(const T*)call.key, (const T*)call.value, call.key_stride, call.value_stride});
        team.barrier();
        attend(team, step, layer, Queries<T>{(const T*)call.query, call.query_stride, (T*)call.out}, call.scratch);
    });
}
DT_API void dt_attention_f32(const AttentionStep* step, int64_t layer, const AttentionCall* call, int32_t threads) {
    write_and_attend<float>(*step, layer, *call, threads);
}
DT_API void dt_attention_bf16(const AttentionStep* step, int64_t layer, const AttentionCall* call, int32_t threads) {
    write_and_attend<bf16>(*step, layer, *call, threads);
}
DT_API void dt_attention_scratch(const AttentionStep* step, int64_t threads, int64_t* bytes) {
    *bytes = attention_scratch_bytes(*step, threads);
}

// Compiled here once; layers.cpp calls them.
template void paged_attention<float>(Team&, const AttentionStep&, int64_t, const float*, float*, void*);
template void paged_attention<bf16>(Team&, const AttentionStep&, int64_t, const bf16*, bf16*, void*);
