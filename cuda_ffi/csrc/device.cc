#include "device.h"

#include <map>
#include <mutex>

namespace jax_flash {

Status current_device(DeviceFacts* facts) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;
  int device;
  JF_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) {
    *facts = found->second;
    return {};
  }
  auto get = [device](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device);
  };
  int major, minor;
  facts->device = device;
  JF_CHECK(get(&major, cudaDevAttrComputeCapabilityMajor));
  JF_CHECK(get(&minor, cudaDevAttrComputeCapabilityMinor));
  JF_CHECK(get(&facts->multiprocessors, cudaDevAttrMultiProcessorCount));
  JF_CHECK(get(&facts->smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  JF_CHECK(get(&facts->l2_bytes, cudaDevAttrL2CacheSize));
  facts->capability = 10 * major + minor;
  known[device] = *facts;
  return {};
}

Status encode_map(const DecodeParams& p, const KvView& view, int dim, CUtensorMap* map) {
  // Asked of the runtime, so that the library loads on a machine without a driver.
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &found);
    return error == cudaSuccess ? (decltype(&cuTensorMapEncodeTiled))entry : nullptr;
  }();
  if (encode == nullptr) return {"cuTensorMapEncodeTiled", "the driver does not have it"};
  const uint64_t size = size_of(p.kv_type), group = 128 / size;
  const uint64_t extents[5] = {group, (uint64_t)p.page_size, dim / group, (uint64_t)p.kv_heads,
                               (uint64_t)p.num_pages};
  const uint64_t strides[4] = {view.token_stride * size, 128, view.head_stride * size,
                               view.page_stride * size};
  const uint32_t box[5] = {(uint32_t)group, 16, (uint32_t)(dim / group), 1, 1};
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = size == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                             : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const CUresult result = encode(map, type, 5, (void*)view.data, extents, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {"cuTensorMapEncodeTiled", "it refused the cache's layout"};
  return {};
}

}  // namespace jax_flash
