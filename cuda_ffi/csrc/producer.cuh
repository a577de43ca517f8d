// How the stages of one warp are filled: by TMA, 16 tokens of a page at a time, or by a gather of
// 16-byte pieces with cp.async for any page size and head dim. The producer runs kStages chunks
// ahead of the consumer, over the same segments.
#pragma once
#include "config.cuh"

namespace jax_flash {

// Fills the stages of one warp.
template <class C>
struct Producer {
  const DecodeParams& p;
  const CUtensorMap *key_map, *value_map;
  Walk<C::kBalanced> walk;
  const int lane, first, step;
  const uint32_t ring, barriers;
  const uint64_t policy;
  // Entries of the table as they are: whether they name a page is asked where they are used, since
  // at once the warp would have to wait for them.
  int chunk, count, ids, next_ids;  // a batch of entries, and the one after it
  int upcoming_ids = -1;  // the first ones of the segment after this one

  // `early` is what early_entry() gave, if not balanced.
  JF_DEVICE Producer(const DecodeParams& p, const CUtensorMap* key_map,
                     const CUtensorMap* value_map, const Walk<C::kBalanced>& walk, int lane,
                     int first, int step, int early, uint32_t ring, uint32_t barriers,
                     uint64_t policy)
      : p(p), key_map(key_map), value_map(value_map), walk(walk), lane(lane), first(first),
        step(step), ring(ring), barriers(barriers), policy(policy) {
    if (!walk.valid) return;
    if constexpr (C::kBalanced) {
      upcoming_ids = first_ids(walk.segment);
    } else if (walk.segment.span.begin == 0) {
      // By TMA a chunk lies in the page of its first token, and none beyond the last is asked for.
      const bool used = C::kTma || is_used(walk.segment, first + chunk_of(lane) * step);
      upcoming_ids = used ? early : -1;
    } else {
      upcoming_ids = first_ids(walk.segment);
    }
    begin_segment();
  }

  // The table's entry for a warp's first chunks, if no window hides the beginning: known before the
  // length, so that both loads overlap.
  static JF_DEVICE int early_entry(const DecodeParams& p, int b, int lane, int first, int step) {
    return table_entry(p, b, (first + chunk_of(lane) * step) * kChunk + slot(lane));
  }

  JF_DEVICE int token_of(int chunk) const { return walk.segment.span.begin + chunk * kChunk; }

  // A lane looks up the page of one of the next 32 chunks (TMA), or of a token of the next two.
  static constexpr int kBatch = C::kTma ? 32 : 2;
  static JF_DEVICE int chunk_of(int lane) { return C::kTma ? lane : lane / kChunk; }
  static JF_DEVICE int slot(int lane) { return C::kTma ? 0 : lane & (kChunk - 1); }

  JF_DEVICE bool is_used(const Segment& s, int chunk) const {
    return chunk < s.last && s.span.begin + chunk * kChunk + slot(lane) < s.span.end;
  }

  JF_DEVICE int load_ids(const Segment& s, int chunk) const {
    return is_used(s, chunk) ? table_entry(p, s.b, s.span.begin + chunk * kChunk + slot(lane)) : -1;
  }

  JF_DEVICE int first_ids(const Segment& s) const {
    return load_ids(s, s.first + first + chunk_of(lane) * step);
  }

  JF_DEVICE void begin_segment() {
    chunk = walk.segment.first + first, count = 0;
    ids = upcoming_ids;
    if constexpr (C::kBalanced) {  // a segment later these would have to be waited for
      auto upcoming = walk;
      upcoming.next(p);
      upcoming_ids = upcoming.valid ? first_ids(upcoming.segment) : -1;
    }
  }

  // Starts the copy of the next chunk into a stage; returns kLostBits.
  JF_DEVICE uint32_t produce(int stage) {
    if constexpr (C::kBalanced) {
      while (walk.valid && chunk >= walk.segment.last) {
        walk.next(p);
        if (walk.valid) begin_segment();
      }
    }
    uint32_t lost = 0;
    if (C::kBalanced ? walk.valid : chunk < walk.segment.last) {
      const int turn = count & (kBatch - 1);
      const int next = chunk + (kBatch + chunk_of(lane)) * step;
      if (turn == 0 && count != 0) ids = next_ids;
      if (!C::kTma && turn == 0) next_ids = load_ids(walk.segment, next);
      lost = C::kTma ? produce_by_tma(stage, turn) : produce_by_gather(stage, turn);
      // Of 32 chunks there is time for the next ones: the first copy need not wait for this.
      if (C::kTma && turn == 0) next_ids = load_ids(walk.segment, next);
      chunk += step, ++count;
    }
    if constexpr (!C::kTma) copy_async_commit();
    return lost;
  }

  JF_DEVICE uint32_t produce_by_tma(int stage, int turn) {
    const int page = page_named(p, __shfl_sync(~0u, ids, turn));
    if (elect()) {
      const uint32_t target = ring + stage * C::kStageBytes, barrier = barriers + stage * 8;
      const int token = token_of(chunk), slot = token - page_of(p, token) * p.page_size;
      barrier_expect(barrier, C::kStageBytes);  // a page of -1 is outside the map: zeros
      copy_tensor(target, key_map, slot, walk.segment.head, page, barrier, policy);
      copy_tensor(target + C::kKeyBytes, value_map, slot, walk.segment.head, page, barrier, policy);
    }
    return page < 0;
  }

  JF_DEVICE uint32_t produce_by_gather(int stage, int turn) {
    const int token = token_of(chunk) + slot(lane);
    const int page = page_named(p, __shfl_sync(~0u, ids, turn * kChunk + slot(lane)));
    const int page_slot = token - page_of(p, token) * p.page_size;
    const uint32_t target = ring + stage * C::kStageBytes;
    const uint32_t lost = __ballot_sync(~0u, page < 0) & 0xffffu;
    const bool is_plain = lost == 0 && p.head_dim == C::kDK && p.value_dim == C::kDV;
    gather<C::kDK>(target, p.k, p.head_dim, page, page_slot, is_plain);
    gather<C::kDV>(target + C::kKeyBytes, p.v, p.value_dim, page, page_slot, is_plain);
    return lost;
  }

  template <int kDim>
  JF_DEVICE void gather(uint32_t target, const KvView& view, int dim, int page_of_lane,
                        int slot_of_lane, bool is_plain) const {
    using KV = typename C::KV;
    constexpr int kElements = 16 / (int)sizeof(KV), kPieces = kDim / kElements;
    // Of one instruction: the greatest power of two that divides the pieces.
    constexpr int kLowest = kPieces & -kPieces, kLanes = kLowest < 32 ? kLowest : 32;
    constexpr int kRows = 32 / kLanes;
    // Fewer addresses at once where registers are short.
    constexpr int kUnroll = sizeof(KV) == 1 && C::kDK < 256 ? 2 : kChunk;
    // Each lane knows where one token begins; those that copy it ask for no more than that.
    const bool has_token = page_of_lane >= 0;
    const int64_t offset = page_of_lane * view.page_stride + slot_of_lane * view.token_stride +
                           walk.segment.head * view.head_stride;
    const KV* source_of_lane = (const KV*)view.data + (has_token ? offset : 0);
    const int first_row = lane / kLanes, first_piece = lane % kLanes;
    const auto source_of = [&](int row) {
      const uint64_t source = __shfl_sync(~0u, (uint64_t)source_of_lane, row);
      return (const KV*)source + first_piece * kElements;
    };
    if (is_plain) {
#pragma unroll kUnroll
      for (int i = 0; i < kChunk / kRows; ++i) {
        const int row = i * kRows + first_row;
        const KV* source = source_of(row);
#pragma unroll
        for (int n = 0; n < kPieces; n += kLanes) {
          const uint32_t place = target + piece_offset(row, first_piece + n);
          copy_async(place, source + n * kElements, 16, policy);
        }
      }
    } else {  // some tokens lie in no page, or heads are smaller than their room
#pragma unroll 1
      for (int i = 0; i < kChunk / kRows; ++i) {
        const int row = i * kRows + first_row;
        const KV* source = source_of(row);
        const bool exists = __shfl_sync(~0u, has_token, row);
#pragma unroll 1
        for (int n = 0; n < kPieces; n += kLanes) {
          const bool is_inside = exists && (first_piece + n) * kElements < dim;
          copy_async(target + piece_offset(row, first_piece + n),
                     is_inside ? source + n * kElements : (const KV*)view.data, is_inside ? 16 : 0,
                     policy);
        }
      }
    }
  }
};

}  // namespace jax_flash
