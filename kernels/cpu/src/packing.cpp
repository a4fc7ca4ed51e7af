// The exported forms of packing.h: by form and by the cache's type.
#include "packing.h"

using packing::Fp8;
using packing::Int8;
using packing::Shape;

#define PACKING(NAME, FORM, TYPE)                                                                                            \
    DT_API void dt_pack_##NAME(const TYPE* cache, const int64_t* ids, int64_t count, const Shape* shape, uint8_t* packed,    \
                               int32_t threads) {                                                                            \
        together(threads, [&](Team& team) { packing::pack<FORM>(team, cache, ids, count, *shape, packed); });                \
    }                                                                                                                        \
    DT_API void dt_unpack_##NAME(const uint8_t* packed, const int64_t* ids, int64_t count, const Shape* shape, TYPE* cache,  \
                                 int32_t threads) {                                                                          \
        together(threads, [&](Team& team) { packing::unpack<FORM>(team, packed, ids, count, *shape, cache); });              \
    }

PACKING(int8_f32, Int8, float)
PACKING(int8_bf16, Int8, bf16)
PACKING(fp8_f32, Fp8, float)
PACKING(fp8_bf16, Fp8, bf16)
