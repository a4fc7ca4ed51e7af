// The quantised kinds of linear, for both types of x: here alone, because their many tiles take seconds to compile.
#include "quantised_rows.h"

template void quantised<float>(Team&, const LinearCall<float>&, void*);
template void quantised<bf16>(Team&, const LinearCall<bf16>&, void*);
template void quantised_embed<float>(Team&, const Linear&, const int64_t*, int64_t, float*);
template void quantised_embed<bf16>(Team&, const Linear&, const int64_t*, int64_t, bf16*);
