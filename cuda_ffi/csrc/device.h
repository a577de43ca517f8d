// Facts about the current device, and the driver's encoder of tensor maps.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "params.h"

namespace jax_flash {

struct DeviceFacts {
  int device, multiprocessors, capability, smem_bytes, l2_bytes;  // capability 90 is 9.0
};

// Read once for each device.
Status current_device(DeviceFacts* facts);

// The map of a cache for copies of 16 tokens of one head: [elements, token, group, head, page].
Status encode_map(const DecodeParams& params, const KvView& view, int dim, CUtensorMap* map);

#define JF_CHECK(call)                                                                  \
  do {                                                                                  \
    const cudaError_t error_ = (call);                                                  \
    if (error_ != cudaSuccess) return Status{#call, cudaGetErrorString(error_)};        \
  } while (0)

#define JF_RETURN_IF_FAILED(call)                       \
  do {                                                  \
    const Status status_ = (call);                      \
    if (status_.what != nullptr) return status_;        \
  } while (0)

}  // namespace jax_flash
