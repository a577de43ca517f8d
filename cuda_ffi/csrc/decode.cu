// From a call to the instance that runs it.
#include "device.h"
#include "instances.h"

namespace jax_flash {

template <DType kQuery, DType kCache>
static Status decode_dims(const DecodeParams& p, const DeviceFacts& device, void* stream) {
#define JF_TRY(DK, DV)                                                       \
  if (p.head_dim <= DK && p.value_dim <= DV) {                               \
    return decode_instance<kQuery, kCache, DK, DV>(p, device, stream);       \
  }
  JF_FOR_EACH_DIMS(JF_TRY)
#undef JF_TRY
  return {"decode", "head dims beyond 256 have no kernel"};
}

template <DType kQuery>
static Status decode_cache(const DecodeParams& p, const DeviceFacts& device, void* stream) {
  if (p.kv_type == kQuery) return decode_dims<kQuery, kQuery>(p, device, stream);
  switch (p.kv_type) {
    case DType::kE4M3:
      return decode_dims<kQuery, DType::kE4M3>(p, device, stream);
    case DType::kE5M2:
      return decode_dims<kQuery, DType::kE5M2>(p, device, stream);
    case DType::kI8:
      return decode_dims<kQuery, DType::kI8>(p, device, stream);
    default:
      return {"decode", "the cache's type has no kernel"};
  }
}

Status decode_cuda(const DecodeParams& p, void* stream) {
  if (p.batch == 0 || p.rows() == 0 || p.kv_heads == 0) return {};
  DeviceFacts device;
  JF_RETURN_IF_FAILED(current_device(&device));
  if (p.q_type == DType::kF16) return decode_cache<DType::kF16>(p, device, stream);
  if (p.q_type == DType::kBF16) return decode_cache<DType::kBF16>(p, device, stream);
  return {"decode", "the query's type has no kernel"};
}

}  // namespace jax_flash
