// The small ops one by one, for callers that run a decoder's ops from Python.
#include "small.h"

template <class T>
void norm(T* out, const T* x, int64_t rows, int64_t width, const T* weight, float eps, int threads) {
    together(threads, [&](Team& team) { rms_norm(team, x, rows, width, weight, eps, out); });
}
DT_API void dt_rms_norm_f32(float* out, const float* x, int64_t rows, int64_t width, const float* weight, float eps, int32_t threads) {
    norm(out, x, rows, width, weight, eps, threads);
}
DT_API void dt_rms_norm_bf16(bf16* out, const bf16* x, int64_t rows, int64_t width, const bf16* weight, float eps, int32_t threads) {
    norm(out, x, rows, width, weight, eps, threads);
}

// Heads of one row lie one behind the other, rows `stride` elements apart; out is contiguous. cos and sin [rows, size].
struct Heads {
    int64_t rows, heads, size, stride;
};
template <class T>
void rotate(T* out, const T* x, const Heads& of, const T* cos, const T* sin, int threads) {
    together(threads, [&](Team& team) {
        const Range mine = share(team, of.rows * of.heads, 1);
        for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
            const int64_t row = unit / of.heads, head = unit % of.heads;
            const T *c = cos + row * of.size, *s = sin + row * of.size;
            rotary_head(x + row * of.stride + head * of.size, of.size, c, s, out + unit * of.size);
        }
    });
}
DT_API void dt_rotary_f32(float* out, const float* x, const Heads* of, const float* cos, const float* sin, int32_t threads) {
    rotate(out, x, *of, cos, sin, threads);
}
DT_API void dt_rotary_bf16(bf16* out, const bf16* x, const Heads* of, const bf16* cos, const bf16* sin, int32_t threads) {
    rotate(out, x, *of, cos, sin, threads);
}

template <class T>
void gate(T* out, const T* gate_up, int64_t rows, int64_t width, int threads) {
    together(threads, [&](Team& team) { silu_mul(team, gate_up, rows, width, out); });
}
DT_API void dt_silu_mul_f32(float* out, const float* gate_up, int64_t rows, int64_t width, int32_t threads) {
    gate(out, gate_up, rows, width, threads);
}
DT_API void dt_silu_mul_bf16(bf16* out, const bf16* gate_up, int64_t rows, int64_t width, int32_t threads) {
    gate(out, gate_up, rows, width, threads);
}
