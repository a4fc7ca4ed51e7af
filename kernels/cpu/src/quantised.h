// Weights of one byte or half a byte: what linear.h calls for their kinds. The work is in quantised_rows.h, compiled once.
#pragma once
#include "linear_call.h"

// Inputs that share a scale.
constexpr int64_t GROUP = 32;
inline int64_t groups_of(int64_t in) { return (in + GROUP - 1) / GROUP; }

// A group of one row of x. A tile's lie behind each other, all rows of a group, then the next group.
struct XGroup {
    int8_t q[GROUP];
    float scale;
    // Where weights are symmetric, what their stored zero adds to a dot product, negative; otherwise the group's sum times scale.
    union {
        int32_t offset;
        float sum;
    };
};

inline int64_t quantised_scratch_bytes(int64_t in, int64_t rows) { return groups_of(in) * rows * int64_t(sizeof(XGroup)); }

// y = x Wᵀ + bias (+ residual); `scratch` as above, shared by the team. T is float or bf16.
template <class T>
void quantised(Team& team, const LinearCall<T>& call, void* scratch);

// y[n] = row ids[n] of the weight, as near as T comes.
template <class T>
void quantised_embed(Team& team, const Linear& w, const int64_t* ids, int64_t rows, T* y);

extern template void quantised<float>(Team&, const LinearCall<float>&, void*);
extern template void quantised<bf16>(Team&, const LinearCall<bf16>&, void*);
extern template void quantised_embed<float>(Team&, const Linear&, const int64_t*, int64_t, float*);
extern template void quantised_embed<bf16>(Team&, const Linear&, const int64_t*, int64_t, bf16*);
