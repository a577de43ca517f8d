// The compiled kernels: one object file for each type of query, type of cache and class of head
// dims.
#pragma once
#include "params.h"

// X(head dim, value dim): calls take the first class that holds theirs.
#define JF_FOR_EACH_DIMS(X) X(64, 64) X(128, 128) X(192, 128) X(256, 256)

namespace jax_flash {

template <DType kQuery, DType kCache, int DK, int DV>
Status decode_instance(const DecodeParams& params, const struct DeviceFacts& device, void* stream);

}  // namespace jax_flash
