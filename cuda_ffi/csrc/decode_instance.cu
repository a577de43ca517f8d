// One instance; the build gives JF_QUERY, JF_CACHE (DType), JF_DK and JF_DV.
#include "instances.h"
#include "launch.cuh"

namespace jax_flash {

template <DType kType>
struct TypeOf;
template <>
struct TypeOf<DType::kF16> {
  using type = Half16;
};
template <>
struct TypeOf<DType::kBF16> {
  using type = Bf16;
};
template <>
struct TypeOf<DType::kE4M3> {
  using type = E4M3;
};
template <>
struct TypeOf<DType::kE5M2> {
  using type = E5M2;
};
template <>
struct TypeOf<DType::kI8> {
  using type = Int8;
};

template <>
Status decode_instance<DType::JF_QUERY, DType::JF_CACHE, JF_DK, JF_DV>(
    const DecodeParams& params, const DeviceFacts& device, void* stream) {
  using T = TypeOf<DType::JF_QUERY>::type;
  using KV = TypeOf<DType::JF_CACHE>::type;
  return decode_class<T, KV, JF_DK, JF_DV>(params, device, (cudaStream_t)stream);
}

}  // namespace jax_flash
