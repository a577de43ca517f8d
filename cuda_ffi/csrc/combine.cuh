// Merges the parts of the items that decode_kernel's equal ranges cut (see schedule.cuh).
//
// Block (j, row tile) looks at the end of range j: if it falls inside an item that begins in range
// j, the block merges that item's parts, in order.
#pragma once
#include "decode.cuh"

namespace jax_flash {

template <class C>
__global__ __launch_bounds__(128) void combine_kernel(const __grid_constant__ DecodeParams p,
                                                      const __grid_constant__ Grid grid,
                                                      int blocks) {
  extern __shared__ int tables[];
  const Ranges ranges{tables, p.kv_heads};
  Ranges::fill(p, tables);
  const int total = ranges.total(p.batch), range = blockIdx.x, row_tile = blockIdx.y;
  const Equal equal(total, blocks);
  const int low = equal.begin(range), end = equal.begin(range + 1);
  if (end >= total || end == low) return;
  const int b = ranges.sequence_at(p.batch, end);
  const int chunks = ranges.prefix[b + 1] - ranges.prefix[b];
  const int head = (unsigned)(end - ranges.prefix[b] * ranges.heads) / (unsigned)chunks;
  const int begin = ranges.first_chunk(b, head);
  if (begin == end || begin < low) return;  // nothing is cut here, or an earlier block merges it
  const int last = equal.owner(begin + chunks - 1);
  const int first_row = row_tile * C::kRows;
  const int rows = min(C::kRows, p.rows() - first_row);
  for (int i = threadIdx.x; i < rows * (C::kDV / 4); i += blockDim.x) {
    const int row = i / (C::kDV / 4), d = i % (C::kDV / 4) * 4;
    if (d >= p.value_dim) continue;
    constexpr int kTogether = 8;
    State4 x;
    for (int k = range; k <= last; k += kTogether) {
      merge_into<kTogether>(x, [&](int j) {
        if (k + j > last) return State4{};
        const int slot = 2 * ((k + j) * grid.row_tiles + row_tile) + (k + j == range);
        const float* source = p.partials + ((int64_t)slot * grid.rows + row) * C::kPitch;
        const float2 sums = __ldcg((const float2*)(source + C::kDV));
        return State4{sums.x, sums.y, __ldcg((const float4*)(source + d))};
      });
    }
    write_row<typename C::T>(p, b, head, first_row + row, d, v_scale_of(p, head), x);
  }
}

}  // namespace jax_flash
