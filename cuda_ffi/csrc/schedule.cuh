// Who computes what. An item is one sequence, one key/value head and one tile of query rows; it is
// as many chunks of 16 tokens long as its queries can see.
//
// Split by a cluster (fixed): the blocks of a cluster share one item, chunk by chunk in turn, and
// merge through each other's shared memory. No workspace; bits do not depend on other sequences.
//
// Equal ranges (balanced): all chunks of all items, one after another, are cut into as many equal
// ranges as there are blocks (those of other tiles of query rows beside them, so that L2 serves all
// but the first). Lengths are read here, on the device, so any skew is balanced and no length is
// known on the host. An item inside one range is written at once; each part of a cut one goes to a
// slot of the workspace, and combine.cuh merges the parts in order. A block has at most two cut
// items: its first (slot 0) and its last (slot 1).
#pragma once
#include "kv_view.cuh"

namespace jax_flash {

// A part of an item: chunks [first, last) of its span.
struct Segment {
  int b, head, row_tile;
  int length;  // of the sequence
  Span span;   // of the whole item
  int first, last;

  JF_DEVICE int num_chunks() const { return span.chunks(); }
  JF_DEVICE bool is_whole() const { return first == 0 && last == num_chunks(); }
};

struct Equal {  // T chunks over G blocks: the first T % G have one more
  int share, extra;

  JF_DEVICE Equal(int total, int blocks)
      : share((unsigned)total / (unsigned)blocks), extra(total - share * blocks) {}

  JF_DEVICE int begin(int block) const { return block * share + min(block, extra); }

  JF_DEVICE int owner(int chunk) const {
    const int large = extra * (share + 1);
    return chunk < large ? (unsigned)chunk / (unsigned)(share + 1)
                         : extra + (unsigned)(chunk - large) / (unsigned)share;
  }
};

// The prefix sums of the sequences' chunks, in shared memory. They come from a plan, where the call
// has one: the running sum of all sequences' chunks, made once for all layers of a step. It is
// checked against the lengths; one that does not fit them is ignored. (Of a part of the sequences
// it may begin anywhere.)
struct Ranges {
  const int* prefix;  // [B + 1], and behind it the lengths [B]
  int heads;          // key/value heads

  static __host__ __device__ int bytes(int batch) { return (2 * batch + 1) * (int)sizeof(int); }

  // By the whole block, which is synchronised at the end.
  static JF_DEVICE void fill(const DecodeParams& p, int* tables) {
    const bool has_plan = p.chunk_ends != nullptr;
    const int32_t* ends = has_plan ? p.chunk_ends : p.kv_lens;
    int* lengths = tables + p.batch + 1;
    int is_right = has_plan;
    for (int b = threadIdx.x; b < p.batch; b += blockDim.x) {
      int raw, begin, end;
      load_now(p.kv_lens + b, ends + max(b - 1, 0), ends + b, raw, begin, end);
      const int chunks = chunks_of(p, raw);
      lengths[b] = clipped(p, raw);
      tables[b + 1] = has_plan ? end : chunks;
      if (b == 0) {
        tables[0] = has_plan ? end - chunks : 0;
      } else {
        is_right &= end - begin == chunks;
      }
    }
    if (__syncthreads_and(is_right)) {
      const int start = tables[0];
      if (start == 0) return;
      __syncthreads();
      for (int b = threadIdx.x; b <= p.batch; b += blockDim.x) tables[b] -= start;
    } else {
      if (has_plan) {  // not that of these lengths
        for (int b = threadIdx.x; b < p.batch; b += blockDim.x) {
          tables[b + 1] = chunks_of(p, lengths[b]);
        }
        if (threadIdx.x == 0) tables[0] = 0;
        __syncthreads();
      }
      if (threadIdx.x < 32) add_up(tables + 1, p.batch, threadIdx.x);
    }
    __syncthreads();
  }

  static JF_DEVICE int chunks_of(const DecodeParams& p, int raw_length) {
    return visible_to_any(p, clipped(p, raw_length)).chunks();
  }

  static JF_DEVICE void add_up(int* counts, int batch, int lane) {
    int carry = 0;
    for (int b = lane; b - lane < batch; b += 32) {
      int sum = b < batch ? counts[b] : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += below;
      }
      if (b < batch) counts[b] = carry + sum;
      carry += __shfl_sync(~0u, sum, 31);
    }
  }

  JF_DEVICE int total(int batch) const { return prefix[batch] * heads; }

  JF_DEVICE int first_chunk(int b, int head) const {  // of an item, among all of its row tile
    return prefix[b] * heads + head * (prefix[b + 1] - prefix[b]);
  }

  JF_DEVICE int sequence_at(int batch, int chunk) const {  // the last one that begins at or before
    int low = 0, high = batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] * heads <= chunk) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// The segments of one block, in order.
template <bool kBalanced>
struct Walk;

template <>
struct Walk<false> {  // one item; this block's chunks are part, part + parts, ...
  Segment segment;
  bool valid;

  JF_DEVICE Walk(const DecodeParams& p, int b, int head, int row_tile, int length) {
    segment.b = b, segment.head = head, segment.row_tile = row_tile;
    segment.length = length;
    segment.span = visible_to_any(p, segment.length);
    segment.first = 0, segment.last = segment.num_chunks();
    valid = true;
  }

  JF_DEVICE void next(const DecodeParams&) { valid = false; }
};

template <>
struct Walk<true> {
  Segment segment;
  bool valid;
  int low, high;  // the block's range
  Ranges ranges;

  JF_DEVICE Walk(const DecodeParams& p, const Ranges& ranges, int block, int row_tile, int blocks)
      : ranges(ranges) {
    segment.row_tile = row_tile;
    const Equal equal(ranges.total(p.batch), blocks);
    low = equal.begin(block), high = equal.begin(block + 1);
    valid = high > low;
    if (!valid) return;
    segment.b = ranges.sequence_at(p.batch, low);
    const int length = ranges.prefix[segment.b + 1] - ranges.prefix[segment.b];
    segment.head = (unsigned)(low - ranges.prefix[segment.b] * ranges.heads) / (unsigned)length;
    locate(p);
  }

  JF_DEVICE void next(const DecodeParams& p) {
    if (++segment.head == ranges.heads) {
      segment.head = 0;
      do {
        ++segment.b;
      } while (segment.b < p.batch && ranges.prefix[segment.b + 1] == ranges.prefix[segment.b]);
    }
    valid = segment.b < p.batch && ranges.first_chunk(segment.b, segment.head) < high;
    if (valid) locate(p);
  }

  JF_DEVICE void locate(const DecodeParams& p) {
    segment.length = ranges.prefix[p.batch + 1 + segment.b];
    segment.span = visible_to_any(p, segment.length);
    const int begin = ranges.first_chunk(segment.b, segment.head);
    segment.first = max(low - begin, 0), segment.last = min(high - begin, segment.num_chunks());
  }
};

}  // namespace jax_flash
