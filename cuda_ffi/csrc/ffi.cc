// The targets on platform "CUDA". They may be captured into a command buffer: nothing here
// allocates, synchronises or reads from the device.
#include <cuda_runtime.h>

#include "call.h"

namespace jax_flash {

template <class... Args>
ffi::Error decode_on_stream(cudaStream_t stream, Args... args) {
  return decode_call(decode_cuda, stream, args...);
}

template <class... Args>
ffi::Error append_on_stream(cudaStream_t stream, Args... args) {
  return append_call(append_cuda, stream, args...);
}

}  // namespace jax_flash

using namespace jax_flash;

#define JF_STREAM ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()

JF_EXPORT XLA_FFI_Error* jax_flash_decode(XLA_FFI_CallFrame*);
JF_EXPORT XLA_FFI_Error* jax_flash_append(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_flash_decode,
                              [](auto... args) { return decode_on_stream(args...); },
                              JF_BIND_DECODE(JF_STREAM), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_flash_append,
                              [](auto... args) { return append_on_stream(args...); },
                              JF_BIND_APPEND(JF_STREAM), {ffi::Traits::kCmdBufferCompatible});
